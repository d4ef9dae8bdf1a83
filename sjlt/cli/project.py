"""The command ``sjlt project``."""

from __future__ import annotations

import enum
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from .options import INTEGER, INTEGER_OR_AUTO, NUMBER_OR_AUTO
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
    source: Annotated[Path, typer.Argument(metavar="IN", help="A 2-D array (.npy), or CSR matrix (.npz).")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The result, .npy.")],
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
    seed: Annotated[int, typer.Option(help="From -2^63 to 2^64 - 1.", **INTEGER)] = 0,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Of the result; numbers out of range become inf. Default: float16 and float32 stay, int8, uint8 and "
            "bool give float32, others float64. int8: with one scale per vector.",
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
    threads: Annotated[
        int | None,
        typer.Option(help="Default: all CPUs of the process.", show_default=False, **INTEGER),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT, or the rows of an interrupted run.")] = False,
) -> None:  # fmt: skip
    """Project the rows of IN to k components each.

    IN is a 2-D .npy file, which may be larger than memory, or a CSR matrix written by scipy.sparse.save_npz, which is
    loaded whole. Arrays of Python objects (pickles) are refused. OUT is a C-ordered .npy file. Its bytes depend neither
    on threads nor on batches, nor on whether the run was interrupted.

    With --dtype int8, OUT has the fields "codes" (int8) and "scale" (float32, one per vector):
    sjlt.files.encoding.load_int8 reads it as floats.

    On a GPU, reading, copying to it, projecting, copying back and writing overlap. The sketch is the same; results
    may differ from the CPU's, and between batch sizes, by rounding. An interrupted run continues on the same kind of
    device with the same batches, and gives the same bytes as an uninterrupted one.

    OUT appears when it is complete, together with OUT.json, which describes it (see sjlt info). Until then the rows
    are in OUT.partial, and an interrupted run continues with --resume.

    Numbers are not checked: a NaN or infinity reaches the nnz components of its feature and no others; on a GPU it may
    reach others of the same row.
    """
    from .. import set_num_threads
    from ..files.errors import UserError
    from ..files.projection import project_file

    if threads is not None:
        try:
            set_num_threads(threads)
        except (ValueError, OverflowError) as e:
            raise UserError(str(e)) from None
    start = time.perf_counter()
    try:
        with ProgressBar(out.name) as bar, watch_compilation(bar.compiling):
            project_file(
                source, out, n_components, dtype=cast(Any, dtype and dtype.value), normalize=normalize,
                batch_rows=batch_rows, device=device.value, resume=resume, force=force, progress=bar.show,
                note=bar.note, seed=seed, density=density, nnz=_nnz(nnz, density),
            )  # fmt: skip
    except KeyboardInterrupt as e:
        note(f"Interrupted: {e}: {_resume_command()}" if e.args else "Interrupted")
        raise typer.Exit(130) from None
    if bar.visible:
        from rich.filesize import decimal

        sizes = [decimal(path.stat().st_size) for path in (source, out)]
        note(f"{sizes[0]} → {sizes[1]} in {time.perf_counter() - start:.1f} s")


def _nnz(nnz: Any, density: Any) -> Any:
    """The argument nnz of `Sketch`, to which None means independent entries."""
    return "auto" if nnz is None and density is None else nnz


def _resume_command() -> str:
    arguments = sys.argv[1:]
    return shlex.join(["sjlt", *arguments, *([] if "--resume" in arguments else ["--resume"])])
