"""`project_file`: project the rows of a file, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from .. import __version__
from ..sketch import Sketch
from . import device as devices
from .description import differences
from .encoding import Encoding, StoredDtype, natural_dtype
from .errors import UserError, explain, one_line
from .names import check_batch_rows, check_format, check_names
from .opening import open_source
from .output import SUFFIXES, Output
from .raw import RawMatrix
from .source import Source

BATCH_BYTES = 16 << 20  # of input or output, whichever is larger; 4 to 32 MiB are equally fast with 768 features
GPU_BATCH_BYTES = 32 << 20  # see stream.py


def project_file(
    source: Path,
    out: Path,
    n_components: int,
    *,
    column: str | None = None,
    dtype: StoredDtype | None = None,
    normalize: bool = False,
    batch_rows: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "cpu",
    resume: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda rows, of: None,
    note: Callable[[str], None] = lambda line: None,
    **parameters: Any,
) -> None:
    """Project the rows of a file to an ``.npy`` file, and describe it in ``<out>.json``.

    Parameters
    ----------
    source : Path
        In any format that `open_source` reads.
    out : Path
    n_components : int
    column : str, optional
        Name of the column of a parquet file, tensor of a safetensors file, dataset of an HDF5 file, or array of a zarr
        store; required if several are matrices.
    dtype : {"float16", "float32", "float64", "int8"}, optional
        Dtype of the result. By default float32 for 1-byte integers and bool, otherwise that of `Sketch.project`. int8
        is stored with one scale per vector; read it with `sjlt.load_int8`.
    normalize : bool, default False
        Divide each projected row by its norm.
    batch_rows : int >= 1, optional
        Rows per batch. By default, as many as fill about 16 MiB (32 MiB on a GPU). On the CPU, results do not depend
        on it; on a GPU, their last bits may.
    device : {"auto", "cpu", "cuda"}, default "cpu"
        "cuda" is torch's current CUDA device, which holds a few batches at a time. "auto" uses it if it is available
        and the rows can be streamed through it (dense, float16, float32 or float64).
    resume : bool, default False
        Continue an interrupted run with the same parameters, source and kind of device.
    force : bool, default False
        Replace existing files.
    progress : callable
        Called with the number of projected rows and the total; for the first time after all checks have passed.
    note : callable
        Called with messages for the user.
    **parameters
        Of `Sketch`: nnz and stacks, or density; seed.

    Raises
    ------
    UserError, OSError
        UserErrors have one-line messages.
    KeyboardInterrupt
        With a message that says how many rows are kept for `resume`.
    """
    batch_rows = check_batch_rows(batch_rows)
    check_names(source, out, "npy", SUFFIXES)
    with open_source(source, note, column) as rows:
        check_format(out, "npy")
        try:
            sketch = Sketch(rows.shape[1], n_components, **parameters)
        except (TypeError, ValueError) as e:
            raise UserError(one_line(e)) from None
        encoding = Encoding.of(rows.dtype, sketch.n_components, dtype, normalize)
        on_gpu = devices.use_gpu(device, rows, note)
        description: dict[str, Any] = {
            "sjlt": __version__,
            "sketch": sketch.to_dict(),
            "source": rows.description(),
            "result": encoding.description(rows.shape[0]),
            "batch_rows": batch_rows or default_batch_rows(rows, encoding, on_gpu),
            "device": devices.device_name(on_gpu),
        }
        shape = encoding.shape(rows.shape[0])
        size = int(np.prod(shape, dtype=object)) * encoding.dtype.itemsize
        widths = rows.shape[1], encoding.n_components
        note_poor_choices(out, widths, (size, description["source"]["size"]), note)
        output = Output(
            out, shape, encoding.dtype, description,
            resume=resume, force=force, adopt=() if on_gpu else ("batch_rows",), note=note,
        )  # fmt: skip
        if output.complete:
            note(f"{out}: complete already, from the same source and parameters")
            return
        batches = projected_rows(rows, sketch, encoding, output.rows, description["batch_rows"], on_gpu)
        _write(output, rows, batches, progress)


def _write(
    output: Output, source: Source, projected: Generator[np.ndarray], progress: Callable[[int, int], None]
) -> None:
    """Append the projected rows, and commit unless the source has changed since it was described."""
    try:
        with output, closing(projected) as batches:
            progress(output.rows, source.shape[0])
            for batch in batches:
                output.append(batch)
                progress(output.rows, source.shape[0])
            if different := differences(output.description["source"], source.description(), "source."):
                output.discard()
                raise UserError(f"{source.path}: changed while it was read: {'; '.join(different)}")
            output.commit()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_kept(output)) from None
    except (OSError, MemoryError) as e:
        raise UserError(f"{explain(e)}; {_kept(output)}") from None


def note_poor_choices(out: Path, widths: tuple[int, int], sizes: tuple[int, int], note: Callable[[str], None]) -> None:
    """Call `note` if the projection saves no dimensions or no storage.

    Parameters
    ----------
    out : Path
    widths : (features, components)
    sizes : (bytes of the result, bytes of the source)
    note : callable
    """
    features, n_components = widths
    if n_components >= features:
        note(f"n_components = {n_components} is not below the {features} features: nothing is compressed")
    size, of = sizes
    if size > of:
        note(f"{out}: will take {size:,} bytes, more than the {of:,} of its source")


def projected_rows(
    source: Source, sketch: Sketch, encoding: Encoding, start: int, rows: int, on_gpu: bool
) -> Generator[np.ndarray]:
    """Yield the encoded projections of all rows from `start` on, `rows` at a time.

    A batch may be overwritten by the next one. Close the generator to stop early.
    """
    batches = (_on_gpu if on_gpu else _on_cpu)(source, sketch, encoding.computed, start, rows)
    with closing(batches):
        for batch in batches:
            yield encoding.encode(batch)


def _on_cpu(source: Source, sketch: Sketch, dtype: np.dtype, start: int, rows: int) -> Generator[np.ndarray]:
    buffer = np.empty((min(rows, source.shape[0]), sketch.n_components), dtype)
    given = natural_dtype(source.dtype) if source.dtype.itemsize == 1 else source.dtype
    for batch in source.batches(start, rows):
        with np.errstate(over="ignore", invalid="ignore"):  # no warnings for inf and NaN
            yield sketch.project(batch.astype(given, copy=False), out=buffer[: batch.shape[0]])


def _on_gpu(source: Source, sketch: Sketch, dtype: np.dtype, start: int, rows: int) -> Generator[np.ndarray]:
    """Like `_on_cpu`, on torch's current CUDA device."""
    import torch

    from . import stream

    try:
        yield from stream.projected(cast(RawMatrix, source), sketch, dtype, start, rows, torch.device("cuda"))
    except (torch.OutOfMemoryError, torch.AcceleratorError) as e:
        raise OSError(f"{devices.device_name(True)}: {str(e).partition(chr(10))[0]}") from None


def default_batch_rows(source: Source, encoding: Encoding, on_gpu: bool) -> int:
    """The number of rows per batch, a multiple of the source's `chunk_rows`.

    Rows of a batch share the generation of entries, so a batch of long rows has at least 16 if they fit in 256 MiB.
    """
    row_bytes = max(1, source.row_bytes, encoding.n_components * encoding.computed.itemsize)
    batch_bytes = GPU_BATCH_BYTES if on_gpu else BATCH_BYTES
    rows = max(1, batch_bytes // row_bytes, min(16, (256 << 20) // row_bytes))
    return -(-rows // source.chunk_rows) * source.chunk_rows


def _kept(output: Output) -> str:
    return f"{output.safe} of {output.shape[0]} rows are kept" + (", --resume continues" if output.safe else "")
