"""The command line: ``sjlt project``, ``sjlt info``, ``sjlt demo``, ``sjlt quality``.

Modules that take long to import are imported by the commands that need them, so that help appears at once.
"""

from __future__ import annotations

import contextlib
import enum
import shlex
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from .. import __version__
from .arguments import INTEGER, INTEGER_OR_AUTO
from .quality import quality

app = typer.Typer(
    help="Sparse Johnson-Lindenstrauss transforms that are never stored.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__base__)  # which typer does not export


class Dtype(enum.StrEnum):
    float16 = "float16"
    float32 = "float32"
    float64 = "float64"


class Device(enum.StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def main() -> None:
    """The entry point: an error is one line on stderr and exit code 2."""
    from ..files.output import UserError, explain

    try:
        sys.exit(app(prog_name="sjlt", standalone_mode=False))
    except typer.Abort:
        sys.exit(1)
    except _UsageError as e:
        if len(sys.argv) == 1:
            e.show()  # the help
        else:
            _note(f"Error: {' '.join(e.format_message().split())}")
    except (UserError, OSError, MemoryError) as e:
        _note(f"Error: {explain(e)}")
    sys.exit(2)


def _note(line: str) -> None:
    typer.echo(line, err=True)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"sjlt {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


# ------------------------------------------------------------------------------------- project


@app.command()
def project(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A 2-D array (.npy), or CSR matrix (.npz).")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The result, .npy.")],
    n_components: Annotated[int, typer.Option("-k", "--n-components", help="Length of a projected vector.", **INTEGER)],
    nnz: Annotated[
        int,
        typer.Option(help="Nonzeros per column; auto is 4 where k >= 4.", **INTEGER_OR_AUTO),
    ] = cast(int, "auto"),
    seed: Annotated[int, typer.Option(help="From -2^63 to 2^64 - 1.", **INTEGER)] = 0,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Of the result; numbers beyond its range become inf. By default float16 and float32 stay, "
            "float64, integers and bool give float64.",
            show_default=False,
        ),
    ] = None,
    batch_rows: Annotated[
        int | None,
        typer.Option(help="Rows of a batch; by default about 16 MiB, 32 on a GPU.", show_default=False, **INTEGER),
    ] = None,
    device: Annotated[
        Device, typer.Option(help="auto is a GPU where there is one, for dense floating IN; it starts slower.")
    ] = Device.auto,
    threads: Annotated[
        int | None,
        typer.Option(help="All CPUs of the process by default.", show_default=False, **INTEGER),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT, or what an interrupted run left.")] = False,
) -> None:
    """Project the rows of IN to k components each.

    IN is a 2-D .npy file, which may be larger than memory, or a CSR matrix that scipy.sparse.save_npz wrote, which
    is loaded whole. Arrays of Python objects (pickles) are refused. OUT is a C-ordered .npy file; the same bytes
    whatever the threads and batches, and whether or not the run was interrupted.

    On a GPU, reading, copying to it, projecting, copying back and writing overlap. The sketch is the same one there;
    results may differ from the CPU's, and between batch sizes, by rounding. A run that was interrupted continues on
    the same kind of device with the same batches, and so gives the bytes that it would have given.

    OUT appears when it is complete, together with OUT.json, which says what it is (see sjlt info). Until then the
    rows are in OUT.partial, and an interrupted run continues with --resume.

    Numbers are not checked: a NaN or infinity reaches the nnz components of its feature, no others; on a GPU perhaps
    others among the 128 around them, but of no other row.
    """
    from .. import set_num_threads
    from ..files import io
    from ..files.output import UserError

    if threads is not None:
        try:
            set_num_threads(threads)
        except ValueError as e:
            raise UserError(str(e)) from None
    try:
        with _progress_bar(out.name) as progress:
            io.project_file(
                source,
                out,
                n_components,
                nnz=nnz,
                seed=seed,
                dtype=dtype,
                batch_rows=batch_rows,
                device=device.value,
                resume=resume,
                force=force,
                progress=progress,
                note=_note,
            )
    except KeyboardInterrupt as e:
        _note(f"Interrupted: {e}: {_resume_command()}" if e.args else "Interrupted")
        raise typer.Exit(130) from None


def _resume_command() -> str:
    arguments = sys.argv[1:]
    return shlex.join(["sjlt", *arguments, *([] if "--resume" in arguments else ["--resume"])])


@contextlib.contextmanager
def _progress_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A function that shows rows done of rows there are on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda rows, of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
    from rich.text import Text

    class RowsPerSecond(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.0f} rows/s", style="progress.data.speed")

    columns = (BarColumn(), MofNCompleteColumn(), RowsPerSecond(), TimeRemainingColumn(elapsed_when_finished=True))
    with Progress("{task.description}", *columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=None)

        def show(rows: int, of: int) -> None:
            if bar.tasks[task].total is None:
                bar.reset(task, total=of, completed=rows)
            bar.update(task, completed=rows)

        yield show


# ------------------------------------------------------------------------------------- info


@app.command()
def info(
    path: Annotated[Path, typer.Argument(metavar="OUT.json", help="Or OUT, or OUT.partial.json.")],
) -> None:
    """Show what a projected file is: its sketch, its source and the version that made it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..files.output import UserError, read_json

    described = path if path.suffix == ".json" else path.with_name(path.name + ".json")
    content = read_json(described)
    try:
        lines = _described(content)
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise UserError(f"{described}: not a description of a projected file: {e!r}") from None
    table = Table(show_header=False, box=None)
    for name, value in lines:
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    Console().print(table)


def _described(content: dict[str, Any]) -> list[tuple[str, str]]:
    from rich.filesize import decimal

    from ..sketch import Sketch

    def array(shape: list[int], dtype: str) -> str:
        return f"{shape[0]:,} x {shape[1]:,} {dtype}"

    source, result = content["source"], content["result"]
    modified = datetime.fromtimestamp(source["mtime_ns"] / 1e9, UTC).isoformat(" ", "seconds")
    lines = [
        ("result", array(**result)),
        ("sketch", repr(Sketch.from_dict(content["sketch"]))),
        ("law", f"version {content['sketch']['law']}"),
        ("source", source["name"]),
        ("", f"{array(source['shape'], source['dtype'])}, {source['order']} order, {decimal(source['size'])}"),
        ("", f"modified {modified}"),
        ("batch", f"{content['batch_rows']:,} rows"),
        ("device", content["device"]),
        ("made by", f"sjlt {content['sjlt']}"),
    ]
    if "rows_done" in content:
        lines.insert(1, ("unfinished", f"{content['rows_done']:,} of {result['shape'][0]:,} rows"))
    return lines


# ------------------------------------------------------------------------------------- demo


@app.command()
def demo(
    plot: Annotated[Path, typer.Option(help="Where to save the plot: .png, .pdf or .svg.")] = Path("sjlt-demo.png"),
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="Keep the vectors and results there.", show_default=False),
    ] = None,
    stride: Annotated[int, typer.Option(help="Pixels from patch to patch; 2 gives 128,956 vectors.", **INTEGER)] = 2,
) -> None:
    """Project real vectors, side by side with scikit-learn.

    Cuts the two photographs that ship with scikit-learn into overlapping 16 x 16 patches of 768 numbers, projects the
    file of them to 256 dimensions, and compares time, memory, distances and nearest neighbours with scikit-learn's
    SparseRandomProjection. Where there is a GPU, sjlt projects the file on it, and the table says so. All of it takes
    about half a minute, and 700 MB of temporary space.
    """
    import tempfile

    from rich.console import Console

    from ..files.output import UserError
    from . import demo as comparison

    if stride < 1:
        raise UserError(f"stride must be at least 1, got {stride}")
    if plot.suffix.lower() not in comparison.PLOT_SUFFIXES:
        raise UserError(f"{plot}: a plot's name ends in {' or '.join(comparison.PLOT_SUFFIXES)}")
    if not plot.parent.is_dir():
        raise UserError(f"{plot.parent}: no such directory")
    progress = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        if keep is None:
            keep = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sjlt-demo-")))
        keep.mkdir(parents=True, exist_ok=True)
        with progress.status("Starting") as status:
            report = comparison.compare(keep, stride, lambda line: status.update(f"{line} ..."))
    Console().print(comparison.table(report))
    comparison.plot(report, plot)
    typer.echo(f"Plot: {plot}")


# ------------------------------------------------------------------------------------- quality

app.command()(quality)
