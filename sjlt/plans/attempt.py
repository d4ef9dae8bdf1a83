"""One attempt at one part of a plan. This runs in workers, on any machine that sees the files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..files import device as devices
from ..files.atomic import write_all
from ..files.attempts import appearing, named
from ..files.description import differences
from ..files.encoding import Encoding
from ..files.errors import UserError
from ..files.npy import npy_header
from ..files.opening import open_source
from ..files.projection import projected_rows
from ..files.source import Source
from ..sketch import Sketch
from .records import MANIFEST, PLAN


class Job(NamedTuple):
    """The settings shared by all parts of a plan."""

    identity: str  # hash of the plan
    target: str
    kind: str  # format of the parts, "npy" or "parquet"
    sketch: dict[str, int]
    column: str | None  # of the source
    source_dtype: str
    output_column: str | None
    dtype: str | None  # of the result, as given
    normalize: bool
    batch_rows: int
    device: str


class Part(NamedTuple):
    """A range of rows of one input, and the name of the file to which their projections are written."""

    name: str
    path: str  # of the input
    size: int  # of the input
    mtime_ns: int  # of the input
    rows: int  # of the input
    start: int
    stop: int


def attempt(job: Job, part: Part, number: str = "") -> str:
    """Write one part, unless it exists already; return its name.

    Any number of attempts at the same part may run at once: each writes its own file, and the first to complete is
    renamed to the part. `number` must differ between attempts, because dask caches calls by their arguments and would
    return an earlier failure.

    Raises
    ------
    UserError
        If the data cannot be projected, or the input or the plan has changed.
    OSError, MemoryError
        If a file cannot be read or written.
    """
    out = Path(job.target) / part.name
    if out.exists() or (out.parent / MANIFEST).exists():
        return part.name
    _check_plan(job)
    with open_source(Path(part.path), _silent, job.column) as source:
        _check_input(source, job, part)
        with appearing(out, existing="keep") as temporary:
            if job.kind == "parquet":
                _write_parquet(job, part, source, temporary)
            else:
                _write_npy(job, part, source, temporary)
            _check_input(source, job, part)
            _check_plan(job)
    return part.name


def _silent(line: str) -> None:
    """Discard a note: it has been shown when the plan was made."""


def _check_plan(job: Job) -> None:
    """Raise UserError if the folder no longer belongs to the plan of this job."""
    path = Path(job.target) / PLAN
    try:
        with open(path, "rb") as file:
            if job.identity.encode() in file.read(200):
                return
    except FileNotFoundError:
        if (path.parent / MANIFEST).exists():  # committed in the meantime, with this part from another attempt
            return
    raise UserError(f"{path}: no longer holds this plan; the part was not written")


def _check_input(source: Source, job: Job, part: Part) -> None:
    """Raise UserError if the source is not the matrix that was planned."""
    found = source.description()
    planned: dict[str, Any] = {
        "size": part.size,
        "mtime_ns": part.mtime_ns,
        "shape": [part.rows, job.sketch["n_features"]],
        "dtype": job.source_dtype,
        "column": job.column,
    }
    if found["shape"] == [0, 0]:  # a parquet file without rows may not know the length of its vectors
        planned["shape"][1] = 0
    if different := differences(planned, {key: found.get(key) for key in planned}):
        raise UserError(f"{part.path}: changed since it was planned: {'; '.join(different)}")


def _write_npy(job: Job, part: Part, source: Source, out: Path) -> None:
    encoding = Encoding.of(source.dtype, job.sketch["n_components"], job.dtype, job.normalize)
    with open(out, "r+b", buffering=0) as file:

        def write(content: bytes | memoryview) -> None:
            with named(Path(job.target) / part.name):
                write_all(file.fileno(), content)

        write(npy_header(encoding.shape(part.stop - part.start), encoding.dtype))
        for rows in _projected(job, part, source, encoding):
            write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)


def _projected(job: Job, part: Part, source: Source, encoding: Encoding) -> Iterator[np.ndarray]:
    on_gpu = job.device != "cpu"
    if on_gpu and (not devices.use_gpu("cuda", source, _silent) or devices.device_name(True) != job.device):
        raise UserError(f"the plan is for the device {job.device}, this machine has {devices.device_name(True)}")
    left = part.stop - part.start
    if not left:
        return
    sketch = Sketch.from_dict(job.sketch)
    with closing(projected_rows(source, sketch, encoding, part.start, job.batch_rows, on_gpu)) as batches:
        for batch in batches:
            yield batch[:left]
            left -= len(batch)
            if left <= 0:
                return


def _write_parquet(job: Job, part: Part, source: Any, out: Path) -> None:
    from ..arrow import Projector
    from ..files.parquet import write_projected

    sketch = Sketch.from_dict(job.sketch)
    projector = Projector(
        source.column,
        sketch.n_components,
        n_features=sketch.n_features,
        nnz=sketch.nnz or "auto",
        stacks=sketch.stacks,
        density=sketch.density,
        seed=sketch.seed,
        output_column=job.output_column,
        normalize=job.normalize,
        dtype=job.dtype,
    )
    description = {
        "plan": job.identity,
        "sketch": job.sketch,
        "source": {"name": os.path.basename(part.path), "size": part.size, "mtime_ns": part.mtime_ns},
        "rows": [part.start, part.stop],
    }
    write_projected(source, projector, out, description, (part.start, part.stop, job.batch_rows))
