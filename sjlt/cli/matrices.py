"""Shared by the commands that solve with a matrix in a file: reading, progress pass by pass, and the result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import typer

from .terminal import ProgressBar, note, watch_compilation

Progress = Callable[[int, int, int], None]


@contextlib.contextmanager
def open_matrix(path: Path, column: str | None) -> Iterator[tuple[Any, tuple[int, int]]]:
    """The matrix in a file, as `sjlt.linalg` accepts it, and its shape: the open file, or a CSR matrix."""
    from ..files.csr import CsrMatrix
    from ..files.opening import open_source

    with open_source(path, note, column) as source:
        shape = source.shape
        if source.order == "CSR":
            if not isinstance(source, CsrMatrix):  # which says so itself
                note(f"{path}: sparse, so it is loaded whole into memory")
            yield source.read(0, shape[0]), shape
        else:
            yield source, shape


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
