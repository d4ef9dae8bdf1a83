"""Output of commands: lines, tables, a progress bar, a status. All text is made safe for a terminal first."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import typer

if TYPE_CHECKING:
    from rich.console import Console

MAX_LINE = 1 << 16  # width of a table that is not shown on a terminal
HINT_CACHE = (
    "compiled code could not be cached, so every run compiles it again: set NUMBA_CACHE_DIR to a writable folder"
)


def open_standard_streams() -> None:
    """Connect closed standard streams (``2>&-``) to the null device, and escape what standard output cannot encode.

    If a stream stayed closed, the next file to be opened, perhaps a result, would take its descriptor.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # whose encoding may lack characters of a path
        sys.stdout.reconfigure(errors="backslashreplace")


def note(line: str) -> None:
    """Write one line to standard error."""
    from ..files.errors import printable

    try:
        typer.echo(printable(line), err=True)
    except ValueError:  # standard error is closed
        pass
    except OSError:  # it is full, for example: discard the rest, lest the flush at exit fail and change the exit status
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def say(line: str) -> None:
    """Write one line to standard output."""
    from ..files.errors import printable

    typer.echo(printable(line))


def show(content: Any) -> None:
    """Write a Rich renderable, such as a table, to standard output.

    If standard output is not a terminal, the lines of a table are not wrapped, so that paths stay whole.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if isinstance(content, Table) and not sys.stdout.isatty():
        console.width = MAX_LINE
    console.print(content)


def _console() -> Console | None:
    """A console on standard error, or None if that is not a terminal."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console

    return Console(stderr=True)


class ProgressBar:
    """A progress bar on standard error, if that is a terminal. It appears at the first call of `show`.

    Parameters
    ----------
    name : str
    """

    def __init__(self, name: str) -> None:
        from ..files.errors import printable

        self._name, self._console, self._bar = printable(name), _console(), cast(Any, None)
        self._began = time.perf_counter()

    def show(self, rows: int, of: int, stage: str = "") -> None:
        """Show that `rows` of `of` are done. `stage` names the current pass if there are several."""
        if self._console is None:
            return
        name = f"{self._name}, {stage}" if stage else self._name
        if self._bar is None:
            self._bar = _rows_bar(self._console)
            self._bar.start()
            self._task = self._bar.add_task(name, total=of, completed=rows)
        self._bar.update(self._task, completed=rows, description=name)

    def waits(self, reason: str) -> None:
        """Show why the bar does not move yet."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{reason} ...")

    def compiling(self) -> None:
        """Show that machine code is being compiled."""
        self.waits("compiling, once (about 6 s)")

    def finish(self, size_before: int, size_after: int) -> None:
        """Write both sizes and the elapsed time, if there is a terminal."""
        if self._console is None:
            return
        from rich.filesize import decimal

        note(f"{decimal(size_before)} → {decimal(size_after)} in {time.perf_counter() - self._began:.1f} s")

    def note(self, line: str) -> None:
        """Write one line to standard error, above the bar."""
        if self._bar is None:
            note(line)
            return
        from rich.text import Text

        from ..files.errors import printable

        self._bar.console.print(Text(printable(line)))

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _rows_bar(console: Console) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.progress import TimeRemainingColumn as TimeColumn
    from rich.text import Text

    class RowsPerSecond(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.0f} rows/s", style="progress.data.speed")

    name = TextColumn("{task.description}", markup=False)  # a file's name may look like markup
    columns = (name, BarColumn(20), MofNCompleteColumn(), RowsPerSecond(), TimeColumn(elapsed_when_finished=True))
    return Progress(*columns, console=console)


@contextlib.contextmanager
def watch_compilation(started: Callable[[], None]) -> Iterator[None]:
    """Call `started` whenever Numba compiles something; at the end, print a hint if nothing could be cached."""
    from numba.core import event

    class Listener(event.Listener):
        compiled = cached = False

        def on_start(self, e: Any) -> None:
            self.compiled = True
            self.cached |= e.data["dispatcher"].stats.cache_path is not None
            started()

        def on_end(self, e: Any) -> None:
            pass

    listener = Listener()
    with event.install_listener("numba:compile", listener):
        yield
    if listener.compiled and not listener.cached:
        note(HINT_CACHE)


@contextlib.contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current step on standard error, if that is a terminal."""
    console = _console()
    if console is None:
        yield lambda line: None
        return
    from rich.text import Text

    from ..files.errors import printable

    with console.status("Starting") as shown:
        yield lambda line: shown.update(Text(f"{printable(line)} ..."))
