"""Shared by the commands that solve with a matrix in a file: names, reading, progress pass by pass, and the result."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import typer

from .terminal import ProgressBar, note, watch_compilation

Progress = Callable[[int, int, int], None]


def check_names(out: Path, sources: list[Path], suffix: str, force: bool) -> None:
    """Refuse a result that could not be written, or that would replace a file."""
    from ..files.errors import UserError

    if out.suffix != suffix:
        raise UserError(f"{out}: a result's name ends in {suffix}")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent}: no such directory")
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"{out.parent}: not writable")
    if out.exists() and not out.is_file():
        raise UserError(f"{out}: exists and is not a regular file")
    for source in sources:
        if out.exists() and source.exists() and out.samefile(source):
            raise UserError(f"{out}: is the source {source}")
    if os.path.lexists(out) and not force:
        raise UserError(f"{out}: exists (--force replaces it)")


def set_threads(threads: int | None) -> None:
    from .. import set_num_threads
    from ..files.errors import UserError

    if threads is None:
        return
    try:
        set_num_threads(threads)
    except (ValueError, OverflowError) as e:
        raise UserError(str(e)) from None


def open_matrix(path: Path) -> tuple[Any, tuple[int, int]]:
    """The matrix in a file, in the form in which `sjlt.linalg` accepts it, and its shape: a path, or a CSR matrix."""
    from ..files.opening import open_source

    with open_source(path, note) as source:
        shape = source.shape
        return (source.read(0, shape[0]) if source.order == "CSR" else path), shape


@contextlib.contextmanager
def solving(out: Path) -> Iterator[Progress]:
    """A progress bar for each pass over a matrix; errors and interruptions become lines for the user."""
    from ..files.errors import UserError, one_line

    number = 0
    with ProgressBar(out.name) as bar, watch_compilation(bar.compiling):

        def progress(passes: int, rows: int, of: int) -> None:
            nonlocal number
            number = passes
            bar.show(rows, of, f"pass {passes}")

        try:
            yield progress
        except (TypeError, ValueError) as e:  # NumPy's LinAlgError is a ValueError
            raise UserError(one_line(e)) from None
        except KeyboardInterrupt:
            when = f" in pass {number}" if number else ""
            note(f"Interrupted{when}: nothing was written, and the same command starts anew")
            raise typer.Exit(130) from None


def save(out: Path, write: Callable[[BinaryIO], None], force: bool) -> None:
    """Write a result that appears when it is complete; remove what killed runs have left of it."""
    from ..files import atomic, attempts

    def write_file(descriptor: int) -> None:
        with open(descriptor, "wb", closefd=False) as file:
            write(file)

    attempts.sweep(out.parent, out.name)
    atomic.write_by(out, write_file, replace=force)
