"""Projecting one file into another, batch by batch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from io import FileIO
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from .. import __version__
from ..sketch import Sketch
from .output import Output, UserError, differences, explain, one_line

BATCH_BYTES = 16 << 20  # of input or output, whichever is more; 4 to 32 MiB are equally fast with 768 features
GPU_BATCH_BYTES = 32 << 20  # see stream.py


class Source:
    """A file that holds a matrix, one data vector a row. Leaving its ``with`` block closes it."""

    order: Literal["C", "F", "CSR"]
    shape: tuple[int, int]
    dtype: np.dtype
    row_bytes: int

    def __init__(self, path: Path, file: FileIO) -> None:
        self.path, self.file = path, file

    def batches(self, start: int, rows: int) -> Iterator[Any]:
        """Rows start, start + 1, ..., `rows` of them at a time. A batch may overwrite the one before it."""
        raise NotImplementedError

    def not_for_a_gpu(self) -> str | None:
        """Why a GPU does not take such rows; None where it does."""
        raise NotImplementedError

    def description(self) -> dict[str, Any]:
        status = os.fstat(self.file.fileno())
        return {
            "name": self.path.name,
            "size": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "shape": list(self.shape),
            "dtype": str(self.dtype),
            "order": self.order,
        }

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()


class NpySource(Source):
    """A 2-D array in an ``.npy`` file.

    It is read into a buffer instead of being mapped: memory use stays flat, a failing disk or a file that shrinks is
    an exception instead of a SIGBUS, and without page faults it is cheaper (2.1 GB to 256 components from the page
    cache on 2 cores: 0.75 s of CPU time against 1.2 s). Reading ahead on a thread of its own was no faster.
    """

    def __init__(self, path: Path, file: FileIO) -> None:
        super().__init__(path, file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        try:
            version = np.lib.format.read_magic(file)
            if version not in read_header:
                raise ValueError(f"version {version} of the format is for structured dtypes")
            shape, fortran, self.dtype = read_header[version](file)
        except Exception as e:  # whatever a parser says of bytes that are not its format
            raise UserError(f"{path}: not a readable .npy file: {one_line(e)}") from None
        if self.dtype.hasobject:
            raise UserError(f"{path}: holds Python objects (dtype {self.dtype}): pickles are refused, never loaded")
        if len(shape) != 2 or min(shape) < 0:
            raise UserError(f"{path}: holds an array of shape {shape}; needs 2 dimensions, one data vector a row")
        self.shape, self.order = shape, "F" if fortran else "C"
        self.row_bytes = shape[1] * self.dtype.itemsize
        self._start = file.tell()
        needed, held = shape[0] * self.row_bytes, os.fstat(file.fileno()).st_size - self._start
        if held < needed:
            raise UserError(f"{path}: truncated: {shape} of {self.dtype} take {needed} bytes, the file has {held}")

    def not_for_a_gpu(self) -> str | None:
        if self.dtype.kind != "f" or not self.dtype.isnative:
            return f"holds {self.dtype}, and a GPU takes float16, float32 and float64 of this machine's byte order"
        return None

    def batches(self, start: int, rows: int) -> Iterator[np.ndarray]:
        n, width = self.shape
        buffer = np.empty((min(rows, n), width), self.dtype, order=cast(Literal["C", "F"], self.order))
        for i in range(start, n, rows):
            batch = buffer[: n - i]
            self.fill(self.parts(batch, i, batch.nbytes))
            yield batch

    def parts(self, batch: np.ndarray, i: int, size: int) -> list[tuple[np.ndarray, int]]:
        """What to read for the rows from i on that fill `batch`, an array of the file's order.

        Contiguous parts of the batch, columns or pieces of about `size` bytes, each with the byte at which it begins
        in the file's array.
        """
        itemsize = self.dtype.itemsize
        if self.order == "F":
            return [(column, (j * self.shape[0] + i) * itemsize) for j, column in enumerate(batch.T)]
        numbers, step = batch.reshape(-1), max(1, size // itemsize)
        return [(numbers[a : a + step], i * self.row_bytes + a * itemsize) for a in range(0, numbers.size, step)]

    def fill(self, parts: list[tuple[np.ndarray, int]]) -> None:
        """Read what belongs into the `parts`; any number of threads may do so."""
        for part, position in parts:
            left = memoryview(part.view(np.uint8))  # type: ignore[arg-type]  # NumPy's stubs before Python 3.12
            position += self._start
            while left:
                try:
                    count = os.preadv(self.file.fileno(), [left], position)
                except OSError as e:
                    raise OSError(e.errno, e.strerror, str(self.path)) from None
                if not count:
                    raise UserError(f"{self.path}: ends early: it was truncated while it was read")
                left, position = left[count:], position + count


class CsrSource(Source):
    """A CSR matrix or array in an ``.npz`` file of `scipy.sparse.save_npz`. It is loaded whole."""

    order = "CSR"
    _WANTED = "a sparse 2-D CSR"

    def __init__(self, path: Path, file: FileIO, note: Callable[[str], None]) -> None:
        super().__init__(path, file)
        import scipy.sparse

        try:
            held = self._held(file)
            if held == self._WANTED:
                note(f"{path}: sparse, so it is loaded whole into memory")
                file.seek(0)
                matrix = scipy.sparse.load_npz(file)  # without pickles
                matrix.check_format(full_check=True)
        except MemoryError:  # nothing is wrong with the file
            raise
        except Exception as e:
            raise UserError(f"{path}: not a readable sparse .npz file: {one_line(e)}") from None
        if held != self._WANTED:
            raise UserError(f"{path}: holds {held}; needs {self._WANTED} (.tocsr(), scipy.sparse.save_npz)")
        self._matrix, self.shape, self.dtype = matrix, matrix.shape, matrix.dtype
        self.row_bytes = (matrix.data.nbytes + matrix.indices.nbytes) // max(1, matrix.shape[0])

    @staticmethod
    def _held(file: FileIO) -> str:
        """What the file holds, by its small members."""
        with np.load(file, allow_pickle=False) as members:
            if not {"format", "shape"} <= set(members):
                return f"the arrays {', '.join(members)}"
            return f"a sparse {len(members['shape'])}-D {str(members['format'].astype(str)).upper()}"

    def not_for_a_gpu(self) -> str | None:
        return "sparse, and a GPU takes dense rows"

    def batches(self, start: int, rows: int) -> Iterator[Any]:
        for i in range(start, self.shape[0], rows):
            yield self._matrix[i : i + rows]


def open_source(path: Path, note: Callable[[str], None]) -> Source:
    """The source of the kind that the file's first bytes show."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a regular file")
    file = open(path, "rb", buffering=0)  # noqa: SIM115  # the source closes it
    try:
        magic = file.read(len(np.lib.format.MAGIC_PREFIX))
        file.seek(0)
        if magic == np.lib.format.MAGIC_PREFIX:
            return NpySource(path, file)
        if magic.startswith(b"PK"):
            return CsrSource(path, file, note)
        raise UserError(f"{path}: neither .npy nor .npz: it begins with {magic!r}")
    except BaseException:
        file.close()
        raise


# ------------------------------------------------------------------------------------- project


def project_file(
    source: Path,
    out: Path,
    n_components: int,
    *,
    nnz: int | Literal["auto"] = "auto",
    seed: int = 0,
    dtype: str | None = None,
    batch_rows: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "cpu",
    resume: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda rows, of: None,
    note: Callable[[str], None] = lambda line: None,
) -> None:
    """Write the projection of the rows of `source` (.npy, or CSR .npz) to `out` (.npy), described in ``out.json``.

    Parameters
    ----------
    source, out : Path
    n_components, nnz, seed
        As for `Sketch`.
    dtype : {"float16", "float32", "float64"}, optional
        Of the result; by default that of `Sketch.project`.
    batch_rows : int >= 1, optional
        Rows of a batch, by default about 16 MiB of them, 32 on a GPU. On the CPU results do not depend on it; on a
        GPU they may, in their last bits.
    device : {"auto", "cpu", "cuda"}
        "auto" is a GPU where there is one and it takes such rows (dense, float16, float32 or float64). It is torch's
        current CUDA device, and a few batches are in memory at a time.
    resume : bool
        Continue an interrupted run of the same parameters on the same source and the same kind of device.
    force : bool
        Replace what stands in the way.
    progress : callable
        Called with the rows that are done and the rows there are.
    note : callable
        Called with lines that the user should see.

    Raises
    ------
    UserError, OSError
        UserError's message is one line with the numbers.
    KeyboardInterrupt
        With a message that says how many rows are kept for `resume`.
    """
    if batch_rows is not None and batch_rows < 1:
        raise UserError(f"a batch must have at least 1 row, got {batch_rows}")
    _refuse_names(source, out)
    with open_source(source, note) as rows:
        sketch, result = _operator(rows, n_components, nnz, seed, dtype)
        on_gpu = _chosen(device, rows, note)
        if batch_rows is None:
            row_bytes = max(1, rows.row_bytes, n_components * result.itemsize)
            batch_rows = _batch_rows(row_bytes, GPU_BATCH_BYTES if on_gpu else BATCH_BYTES)
        description: dict[str, Any] = {
            "sjlt": __version__,
            "sketch": sketch.to_dict(),
            "source": rows.description(),
            "result": {"shape": [rows.shape[0], n_components], "dtype": str(result)},
            "batch_rows": batch_rows,
            "device": _device_name(on_gpu),
        }
        output = Output(out, description, resume=resume, force=force, note=note)
        if output.complete:
            note(f"{out}: complete already, from the same source and parameters")
            return
        try:
            projected = _on_gpu if on_gpu else _on_cpu
            with output, closing(projected(rows, sketch, result, output.rows, batch_rows)) as batches:
                progress(output.rows, rows.shape[0])
                for batch in batches:
                    output.append(batch)
                    progress(output.rows, rows.shape[0])
                if different := differences(description["source"], rows.description(), "source."):
                    output.discard()
                    raise UserError(f"{source}: changed while it was read: {'; '.join(different)}")
                output.commit()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_kept(output)) from None
        except (OSError, MemoryError) as e:
            raise UserError(f"{explain(e)}; {_kept(output)}") from None


def _refuse_names(source: Path, out: Path) -> None:
    if os.path.lexists(out) and not out.is_file():
        raise UserError(f"{out}: exists and is not a regular file")
    if out.suffix == ".npz":
        raise UserError(f"{out}: the result is one dense array: give it a name that ends in .npy")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent}: no such directory")
    for end in ("", ".json", ".partial", ".partial.json"):
        path = out.with_name(out.name + end)
        if path.exists() and source.exists() and path.samefile(source):
            raise UserError(f"{path}: would be written while it is read: it is the source {source}")


def _operator(
    rows: Source, n_components: int, nnz: int | Literal["auto"], seed: int, dtype: str | None
) -> tuple[Sketch, np.dtype]:
    """The sketch for such rows and the dtype of the result."""
    try:
        sketch = Sketch(rows.shape[1], n_components, nnz=cast(int, nnz), seed=seed)
        natural = sketch.project(np.empty((0, rows.shape[1]), rows.dtype)).dtype  # refuses what it cannot take
    except (TypeError, ValueError) as e:
        raise UserError(one_line(e)) from None
    return sketch, np.dtype(dtype or natural)


def _on_cpu(source: Source, sketch: Sketch, dtype: np.dtype, start: int, rows: int) -> Generator[np.ndarray]:
    """The projections of rows start, start + 1, ..., `rows` at a time. Each overwrites the one before it."""
    buffer = np.empty((min(rows, source.shape[0]), sketch.n_components), dtype)
    for batch in source.batches(start, rows):
        with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN go their way unremarked
            yield sketch.project(batch, out=buffer[: batch.shape[0]])


def _on_gpu(source: Source, sketch: Sketch, dtype: np.dtype, start: int, rows: int) -> Generator[np.ndarray]:
    """As `_on_cpu`, on torch's current CUDA device."""
    import torch

    from . import stream

    try:
        yield from stream.projected(cast(NpySource, source), sketch, dtype, start, rows, torch.device("cuda"))
    except (torch.OutOfMemoryError, torch.AcceleratorError) as e:
        raise OSError(f"{_device_name(True)}: {str(e).partition(chr(10))[0]}") from None


def _chosen(device: str, rows: Source, note: Callable[[str], None]) -> bool:
    """Whether the rows go through a GPU. Without a driver "auto" says so at once, before torch is imported."""
    if device == "cpu" or (device == "auto" and not _has_driver()):
        return False
    import torch

    available, reason = torch.cuda.is_available(), rows.not_for_a_gpu()
    if device == "auto":
        if available and reason:
            note(f"{rows.path}: {reason}: it is projected on the CPU")
        return available and not reason
    if reason:
        raise UserError(f"{rows.path}: {reason}: it cannot be projected on the device cuda")
    if not available:
        raise UserError(f"no device cuda: torch {torch.__version__} finds no GPU that it can use")
    return True


def _has_driver() -> bool:
    """Whether a driver for NVIDIA's GPUs is installed."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _device_name(gpu: bool) -> str:
    """What a description calls the device: GPUs of different kinds may round differently."""
    if not gpu:
        return "cpu"
    import torch

    return torch.cuda.get_device_name()


def _batch_rows(row_bytes: int, batch_bytes: int) -> int:
    """As many as fill a batch, but 16 of long rows if they stay below 256 MiB: they share the work per feature."""
    return max(1, batch_bytes // row_bytes, min(16, (256 << 20) // row_bytes))


def _kept(output: Output) -> str:
    return f"{output.safe} of {output.shape[0]} rows are kept" + (", --resume continues" if output.safe else "")
