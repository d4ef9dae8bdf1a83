"""The command line: ``sjlt project``, ``commit``, ``info``, ``lstsq``, ``svd``, ``demo`` and ``quality``.

Each command is a function in its own module. Slow imports happen inside the commands, so that help appears at once.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Annotated, cast

import typer

from .. import __version__
from .demo import demo
from .folders import commit
from .info import info
from .lstsq import lstsq
from .project import project
from .quality import quality
from .svd import svd
from .terminal import note, open_standard_streams

app = typer.Typer(
    help="Compress vectors, and solve large matrix problems, with sparse Johnson-Lindenstrauss transforms.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__base__)  # typer does not export it


def main() -> None:
    """Run the command line. Errors print one line to standard error and exit with code 2."""
    from ..files.errors import UserError, explain

    open_standard_streams()
    try:
        if any(not value and not before.startswith("-") for before, value in itertools.pairwise(sys.argv)):
            raise UserError("an argument is empty: is a variable not set?")  # as a path, it would be the current folder
        sys.exit(app(prog_name="sjlt", standalone_mode=False))
    except typer.Abort:
        sys.exit(1)
    except _UsageError as e:
        if len(sys.argv) == 1:
            e.show()  # the help
        else:
            note(f"Error: {' '.join(e.format_message().split())}")
    except BrokenPipeError:  # the reader of standard output is gone: discard the rest, including the flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (UserError, OSError, MemoryError) as e:
        note(f"Error: {explain(e)}")
    sys.exit(2)


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


for _command in (project, commit, info, lstsq, svd, demo, quality):
    app.command()(_command)
