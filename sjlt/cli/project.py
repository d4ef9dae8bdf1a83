"""The command ``sjlt project``."""

from __future__ import annotations

import enum
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import INTEGER, INTEGER_OR_AUTO, NUMBER_OR_AUTO, Column, Threads, set_threads
from .terminal import ProgressBar, note, watch_compilation


class Dtype(enum.StrEnum):
    float16 = "float16"
    float32 = "float32"
    float64 = "float64"
    int8 = "int8"


class Device(enum.StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def project(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A file of vectors; a folder or glob of files.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The result: .npy, .parquet, or a folder.")],
    n_components: Annotated[int, typer.Option("-k", "--n-components", help="Length of a projected vector.", **INTEGER)],
    nnz: Annotated[
        int | None,
        typer.Option(help="Nonzeros per column; auto, the default, is 4 if k >= 4.", show_default=False,
                     **INTEGER_OR_AUTO),
    ] = None,
    density: Annotated[
        float | None,
        typer.Option(help="Instead of nnz: independent entries, this share of them nonzero; auto is "
                     "1/sqrt(features).", show_default=False, **NUMBER_OR_AUTO),
    ] = None,
    stacks: Annotated[
        int, typer.Option(help="Independent sketches, one below the other; 4 keeps rare features apart.", **INTEGER)
    ] = 1,
    seed: Annotated[int, typer.Option(help="From -2^63 to 2^64 - 1.", **INTEGER)] = 0,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Dtype of the result; numbers out of range become inf. Default: float16 and float32 stay, int8, uint8 "
            "and bool give float32, others float64. int8: with one scale per vector.",
            show_default=False,
        ),
    ] = None,
    normalize: Annotated[bool, typer.Option("--normalize", help="Scale each result to unit length.")] = False,
    batch_rows: Annotated[
        int | None,
        typer.Option(help="Rows per batch; default: about 16 MiB, 32 on a GPU.", show_default=False, **INTEGER),
    ] = None,
    device: Annotated[
        Device, typer.Option(help="auto: a GPU where there is one, for dense floating-point IN; it starts slower.")
    ] = Device.auto,
    threads: Threads = None,
    column: Column = None,
    output_column: Annotated[
        str | None,
        typer.Option(help="A new last column of a parquet file; by default the column is replaced.",
                     show_default=False),
    ] = None,
    part_rows: Annotated[
        int | None,
        typer.Option(help="Rows per part of a folder; by default a part is a file.", show_default=False, **INTEGER),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that share the parts.", show_default=False, **INTEGER)
    ] = None,
    dask: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="A dask scheduler, as tcp://host:8786, whose workers share the parts.",
                     show_default=False),
    ] = None,
    part: Annotated[
        int | None,
        typer.Option(metavar="I", help="Run parts I, I+N, I+2N, ... (from 0); then sjlt commit.",
                     show_default=False, parser=INTEGER["parser"]),
    ] = None,
    of: Annotated[
        int | None,
        typer.Option(metavar="N", help="The number of such jobs.", show_default=False,
                     parser=INTEGER["parser"]),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue an interrupted run; parquet starts over, folders always continue."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT, or the rows of an interrupted run.")] = False,
) -> None:  # fmt: skip
    """Project the rows of IN to k components each.

    IN is a 2-D .npy file, or a matrix in a parquet, .fbin, .f16bin, .i8bin, .u8bin, .safetensors, HDF5, .h5ad or zarr
    file. It may be larger than memory, except a CSR matrix written by scipy.sparse.save_npz, which is loaded whole.
    Arrays of Python objects (pickles) are refused. OUT is a C-ordered .npy file. On a CPU its bytes do not depend on
    threads or batches.

    With --dtype int8, OUT has the fields "codes" (int8) and "scale" (float32, one per vector):
    sjlt.load_int8 reads it as floats. In a parquet file the scales are a column of their own.

    On a GPU, reading, copying, projecting and writing overlap. The sketch is the same; results
    may differ from the CPU's, and between batch sizes, by rounding.

    OUT appears when it is complete, together with OUT.json, which describes it (see sjlt info). Until then the rows
    are in OUT.partial. An interrupted run continues with --resume, on the same kind of device, and gives the same bytes
    as an uninterrupted one.

    In a parquet file, the vectors in one column are projected and the other columns are carried through; OUT is a
    parquet file, described in its own metadata, or the vectors alone if its name ends in .npy.

    For a folder or glob, OUT is a folder of parts: part-00000.npy, ... A killed run continues with the same command.
    The folder is complete once it holds _sjlt.json, which is written last.

    Numbers are not checked: a NaN or infinity reaches the nnz components of its feature and no others; on a GPU it may
    reach others of the same row.
    """
    from ..files.opening import refuse_dash
    from ..files.zarr import stored_size
    from .folders import Work, is_planned, project_folder

    for path in (source, out):
        refuse_dash(path)
    set_threads(threads)
    options: dict[str, Any] = {
        "nnz": "auto" if nnz is None and density is None else nnz,  # None stands for independent entries
        "stacks": stacks, "density": density, "seed": seed, "column": column, "dtype": dtype and dtype.value,
        "normalize": normalize, "batch_rows": batch_rows,
    }  # fmt: skip
    work = Work(part_rows, workers, dask, part, of)
    if is_planned(source, work):
        options |= {"output_column": output_column, "device": device.value}
        project_folder(source, out, n_components, work, force, **options)
        return
    try:
        with ProgressBar(out.name) as bar, watch_compilation(bar.compiling):
            options |= {"resume": resume, "force": force, "progress": bar.show, "note": bar.note}
            _project_one(source, out, n_components, device, output_column, options)
    except KeyboardInterrupt as e:
        note(f"Interrupted: {e}: {_resume_command()}" if e.args else "Interrupted")
        raise typer.Exit(130) from None
    bar.finish(stored_size(source), out.stat().st_size)


def _project_one(
    source: Path, out: Path, n_components: int, device: Device, output_column: str | None, options: dict[str, Any]
) -> None:
    """Project one file: a parquet file to another one, anything else to an array."""
    from ..files.errors import UserError
    from ..files.names import output_format
    from ..files.parquet import project_parquet
    from ..files.parquet_vectors import is_parquet
    from ..files.projection import project_file

    if is_parquet(source) and output_format(out, "name the result .parquet or .npy") != "npy":
        if device is Device.cuda:
            raise UserError(f"{source}: a parquet file is projected on the CPU")
        project_parquet(source, out, n_components, output_column=output_column, **options)
    elif output_column is not None and source.exists():
        raise UserError(f"{out}: not a parquet file: it has no column {output_column!r}")
    else:
        project_file(source, out, n_components, device=device.value, **options)


def _resume_command() -> str:
    arguments = sys.argv[1:]
    return shlex.join(["sjlt", *arguments, *([] if "--resume" in arguments else ["--resume"])])
