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
    source: Annotated[Path, typer.Argument(metavar="IN", help="A file of vectors, or a folder or glob of such files.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The result: .npy, .parquet, or a folder.")],
    n_components: Annotated[
        int, typer.Option("-k", "--n-components", help="Length of each projected vector.", **INTEGER)
    ],
    nnz: Annotated[
        int | None,
        typer.Option(help="Nonzeros per column of the sketch. Default: auto, which is 4 if k >= 4.",
                     show_default=False, **INTEGER_OR_AUTO),
    ] = None,
    density: Annotated[
        float | None,
        typer.Option(help="Use independent entries instead of nnz per column; each is nonzero with this probability. "
                     "auto is 1/sqrt(features).", show_default=False, **NUMBER_OR_AUTO),
    ] = None,
    stacks: Annotated[
        int,
        typer.Option(help="Number of independent sketches that share the components. Use 4 if single features matter "
                     "(one-hot data, rare terms).", **INTEGER),
    ] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the sketch, from -2^63 to 2^64 - 1.", **INTEGER)] = 0,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Dtype of the result; values out of range become inf. int8 also stores one scale per vector. Default: "
            "the dtype of IN if float16 or float32; float32 for int8, uint8 and bool; float64 otherwise.",
            show_default=False,
        ),
    ] = None,
    normalize: Annotated[bool, typer.Option("--normalize", help="Scale each projected vector to unit length.")] = False,
    batch_rows: Annotated[
        int | None,
        typer.Option(help="Rows per batch. Default: as many as fill about 16 MiB (32 MiB on a GPU).",
                     show_default=False, **INTEGER),
    ] = None,
    device: Annotated[
        Device,
        typer.Option(help="auto uses a GPU if there is one and IN holds dense floating-point vectors. A GPU takes "
                     "longer to start."),
    ] = Device.auto,
    threads: Threads = None,
    column: Column = None,
    output_column: Annotated[
        str | None,
        typer.Option(help="Parquet: append the projected vectors as this new last column. Default: replace the column "
                     "of vectors.", show_default=False),
    ] = None,
    part_rows: Annotated[
        int | None,
        typer.Option(help="Rows per part of an output folder. Default: one part per file.", show_default=False,
                     **INTEGER),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Number of processes that project the parts.", show_default=False, **INTEGER)
    ] = None,
    dask: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Project the parts on the workers of this dask scheduler, for example "
                     "tcp://host:8786.", show_default=False),
    ] = None,
    part: Annotated[
        int | None,
        typer.Option(metavar="I", help="Array jobs: project only parts I, I+N, I+2N, ..., for I from 0 to N-1. Run "
                     "sjlt commit after the last job.", show_default=False, parser=INTEGER["parser"]),
    ] = None,
    of: Annotated[
        int | None,
        typer.Option(metavar="N", help="Array jobs: the number of jobs.", show_default=False,
                     parser=INTEGER["parser"]),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue an interrupted run. Parquet output starts over; folders continue "
                     "without it."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite OUT, or the rows of an interrupted run.")
    ] = False,
) -> None:  # fmt: skip
    """Project each row of IN to k components.

    IN is a 2-D .npy file, or a matrix in a parquet, .fbin, .f16bin, .i8bin, .u8bin, .safetensors, HDF5, .h5ad or zarr
    file. It may be larger than memory, except for a CSR matrix from scipy.sparse.save_npz, which is loaded whole.
    Arrays of Python objects (pickles) are refused.

    OUT is a C-ordered .npy file. It appears only when it is complete, together with OUT.json, which describes it (see
    sjlt info). Until then the rows are in OUT.partial. --resume continues an interrupted run on the same kind of device
    and gives the same bytes as an uninterrupted run.

    On a CPU, the result does not depend on the number of threads or the batch size. On a GPU the sketch is the same,
    but results may differ from the CPU's, and between batch sizes, by rounding.

    With --dtype int8, OUT is a structured array with the fields "codes" (int8) and "scale" (float32, one per vector);
    sjlt.load_int8 reads it as floats. In a parquet file, the scales are a separate column.

    If IN is a parquet file, the vectors in one column are projected and all other columns are copied. OUT is then a
    parquet file with the description in its metadata, or only the vectors if its name ends in .npy.

    If IN is a folder or glob, OUT is a folder of parts: part-00000.npy, ... To continue a killed run, repeat the
    command. The folder is complete once it contains _sjlt.json, which is written last.

    Values are not checked. On a CPU, a NaN or infinity affects only the components in which its feature has a nonzero;
    on a GPU it may affect other components of the same row.
    """
    from ..files.errors import UserError
    from ..files.opening import refuse_dash
    from ..files.zarr import stored_size
    from .folders import Work, is_planned, project_folder

    for path in (source, out):
        refuse_dash(path)
    if output_column == "":
        raise UserError("--output-column is empty: is a variable not set?")
    set_threads(threads)
    options: dict[str, Any] = {
        "nnz": "auto" if nnz is None and density is None else nnz,  # None means independent entries
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
    """Project one file: parquet to parquet unless `out` is an .npy file, anything else to an array."""
    from ..files.errors import UserError
    from ..files.names import output_format
    from ..files.parquet import project_parquet
    from ..files.parquet_vectors import is_parquet
    from ..files.projection import project_file

    if is_parquet(source) and output_format(out, "name the result .parquet or .npy") != "npy":
        if device is Device.cuda:
            raise UserError(f"{source}: parquet files are projected on the CPU only")
        project_parquet(source, out, n_components, output_column=output_column, **options)
    elif output_column is not None and source.exists():
        raise UserError(f"{out}: not a parquet file: it has no column {output_column!r}")
    else:
        project_file(source, out, n_components, device=device.value, **options)


def _resume_command() -> str:
    arguments = sys.argv[1:]
    return shlex.join(["sjlt", *arguments, *([] if "--resume" in arguments else ["--resume"])])
