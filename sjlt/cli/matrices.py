"""Shared by the commands that read a matrix: opening the file, showing progress for each pass, saving the result."""

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
    """Open a matrix for `sjlt.linalg`; yield it, as an open `Source` or a CSR matrix in memory, and its shape."""
    from ..files.csr import CsrMatrix
    from ..files.opening import open_source

    with open_source(path, note, column) as source:
        shape = source.shape
        if source.order == "CSR":
            if not isinstance(source, CsrMatrix):  # `CsrMatrix` prints this note itself
                note(f"{path}: sparse, so it is loaded whole into memory")
            yield source.read(0, shape[0]), shape
        else:
            yield source, shape


@contextlib.contextmanager
def solving(out: Path) -> Iterator[Progress]:
    """Show a progress bar for each pass over a matrix; report errors and interruptions in one line."""
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
            note(f"Interrupted{when}: nothing was written; the same command starts over")
            raise typer.Exit(130) from None


def save(out: Path, write: Callable[[BinaryIO], None], force: bool) -> None:
    """Write a result that appears only when it is complete; remove temporary files of killed runs."""
    from ..files import atomic, attempts

    def write_file(descriptor: int) -> None:
        with open(descriptor, "wb", closefd=False) as file:
            write(file)

    attempts.sweep(out.parent, out.name)
    atomic.write_by(out, write_file, replace=force)
