"""``sjlt project`` for folders, globs and parts, and the command ``sjlt commit``."""

from __future__ import annotations

import contextlib
import glob
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from .terminal import ProgressBar, note, say, watch_compilation

if TYPE_CHECKING:
    from ..plans import Plan


class Work(NamedTuple):
    """How the parts of a plan are cut and run, as given on the command line.

    Attributes
    ----------
    part_rows, workers : int or None
    dask : str or None
        Address of a dask scheduler.
    part, of : int or None
        Index of this array job, from 0, and the number of jobs.
    """

    part_rows: int | None
    workers: int | None
    dask: str | None
    part: int | None
    of: int | None


def is_planned(source: Path, work: Work) -> bool:
    """Whether the source is several files, or an option asks for parts."""
    from ..files.zarr import is_zarr

    many = (source.is_dir() and not is_zarr(source)) or (glob.has_magic(str(source)) and not source.exists())
    return many or any(value is not None for value in work)


def project_folder(source: Path, out: Path, n_components: int, work: Work, force: bool, **parameters: Any) -> None:
    """Plan the projection of `source` into the folder `out`, and run all parts or those of this array job."""
    from ..files.errors import UserError, one_line
    from ..files.names import output_format
    from ..plans import load, plan

    if force:
        raise UserError(f"{out}: --force does not replace folders; remove it first")
    ways = [name for name in ("workers", "dask", "part") if getattr(work, name) is not None]
    if len(ways) > 1 or (work.part is None) != (work.of is None):
        raise UserError("pass one of --workers N, --dask ADDRESS, and --part I with --of N")
    if work.of is not None and work.of < 1:
        raise UserError(f"--of must be at least 1, got {work.of}")
    if work.part is not None and work.of is not None and not 0 <= work.part < work.of:
        raise UserError(f"--part must be from 0 to {work.of - 1} for --of {work.of}, got {work.part}")
    with ProgressBar(out.name) as bar, watch_compilation(bar.compiling):
        try:
            planned = plan(source, out, n_components, part_rows=work.part_rows, note=bar.note, **parameters)
            if output_format(out, "name a folder, without a suffix") is not None:
                raise UserError(f"{out}: the result is a folder of parts: give it a name without {out.suffix}")
            _run(planned, work, bar)
        except (TypeError, ValueError) as e:
            raise UserError(one_line(e)) from None
        except KeyboardInterrupt:
            note(f"Interrupted: the parts in {out} are kept; the same command continues")
            raise typer.Exit(130) from None
    if work.part is None:
        parts = load(out).record["parts"]
        bar.finish(sum(each["size"] for each in planned.record["inputs"]), sum(each["size"] for each in parts))
    else:
        note(f"Job {work.part} of {work.of} is done. When all jobs are done, run: sjlt commit {out}")


def _run(planned: Plan, work: Work, bar: ProgressBar) -> None:
    workers = 1 if work.workers is None else work.workers
    starting = workers > 1 or work.dask is not None

    def progress(rows: int, total: int) -> None:
        nonlocal starting
        bar.show(rows, total)
        if starting and rows < total:
            bar.waits("starting workers")
        starting = False

    if work.part is not None and work.of is not None:
        parts = planned.record["parts"]
        mine = {i: parts[i]["stop"] - parts[i]["start"] for i in range(work.part, len(parts), work.of)}
        rows, total = 0, sum(mine.values())
        progress(rows, total)
        for i, count in mine.items():
            planned.run_part(i)
            rows += count
            progress(rows, total)
    elif work.dask is not None:
        with _dask_executor(work.dask) as executor:
            planned.run(executor, progress=progress)
    else:
        planned.run(workers=workers, progress=progress)


@contextlib.contextmanager
def _dask_executor(address: str) -> Iterator[Any]:
    from ..files.errors import UserError, one_line

    try:
        from distributed import Client
    except ImportError:
        raise UserError("--dask needs dask's distributed: pip install 'sjlt-triton[dask]'") from None
    if not re.fullmatch(r"([a-z]+://)?.+:[0-9]+", address):
        raise UserError(f"{address}: not the address of a dask scheduler, such as tcp://host:8786")
    try:
        client: Any = Client(address, set_as_default=False, timeout="10s")
    except (OSError, ValueError) as e:
        raise UserError(f"{address}: no dask scheduler: {one_line(e)}") from None
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # a lost scheduler is reported by our own error
    with client:
        yield client.get_executor()


def commit(
    out: Annotated[Path, typer.Argument(metavar="OUT/", help="The folder written by the jobs.")],
) -> None:
    """Complete a folder written by array jobs.

    Run it once all jobs (sjlt project --part I --of N) are done. It writes the manifest OUT/_sjlt.json, which lists
    inputs and parts, and removes temporary files of killed jobs. If parts are missing, it fails and lists them.
    """
    from ..plans import load

    planned = load(out)
    planned.commit()
    say(f"{out}: {len(planned)} parts, committed")
