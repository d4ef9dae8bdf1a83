"""`plan` and `Plan`: the projection of a folder of files, cut into parts that any engine can run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Literal, cast

from .. import __version__
from ..files import device as devices
from ..files.encoding import Encoding
from ..files.errors import UserError, explain
from ..files.names import check_space
from ..files.projection import default_batch_rows, note_poor_choices
from ..files.source import Source
from ..inputs.checks import flag, integer
from ..sketch import Sketch
from ..threads import get_num_threads
from . import folder, records, shards
from .attempt import Job, Part, attempt
from .running import Processes, run_parts


class Plan:
    """A projection cut into parts, each of which is a range of rows of one input file. Created by `plan`.

    A plan is a description; the same source and parameters give equal plans everywhere. Its parts may be attempted any
    number of times, by any number of processes, on any machine that sees the files under the same paths.

    Attributes
    ----------
    target : Path
        The folder of the result.
    record : dict
        The plan as JSON-serializable objects: the sketch, the inputs, the parts, and how parts are written.
    """

    def __init__(self, record: dict[str, Any], target: Path) -> None:
        self.record, self.target = record, target

    def __len__(self) -> int:
        """The number of parts."""
        return len(self.record["parts"])

    def __repr__(self) -> str:
        rows = sum(each["rows"] for each in self.record["inputs"])
        return f"Plan({len(self.record['inputs'])} files, {rows} rows, {len(self)} parts, target={str(self.target)!r})"

    @property
    def sketch(self) -> Sketch:
        """The projection."""
        return Sketch.from_dict(self.record["sketch"])

    @property
    def committed(self) -> bool:
        """Whether the result is complete and can be read."""
        return folder.is_committed(self.target, self.record)

    def run(
        self,
        executor: Executor | None = None,
        *,
        workers: int | None = None,
        retries: int = 2,
        progress: Callable[[int, int], None] = lambda rows, total: None,
    ) -> None:
        """Write the missing parts, then commit.

        Parameters
        ----------
        executor : concurrent.futures.Executor, optional
            For example `ProcessPoolExecutor`, ``dask.distributed.Client(...).get_executor()`` or
            ``mpi4py.futures.MPIPoolExecutor``. By default, a pool of local processes.
        workers : int >= 1, optional
            Size of the default pool; by default `sjlt.get_num_threads`. With 1, the parts run in this process.
            Otherwise processes are spawned, so a script must call this under ``if __name__ == "__main__":``.
        retries : int >= 0, default 2
            Additional attempts at a part that fails for any reason other than bad data.
        progress : callable
            Called with the number of projected rows and the total.

        Raises
        ------
        sjlt.files.errors.UserError
            If another process is running the plan, the folder holds something else or damaged parts, the source has
            changed, the disk is too small, the data is bad, a part keeps failing, or the executor is lost. Finished
            parts are kept, and a later run continues with the others.
        """
        retries = integer("retries", retries, 0, 10**9)
        if workers is not None:
            if executor is not None:
                raise ValueError(f"workers is for the default executor: pass workers={workers} or an executor")
            workers = integer("workers", workers, 1, 10**6)
        if self.committed:
            folder.commit(self.target, self.record)  # checks the parts, and removes what a killed commit left
            total = sum(each["rows"] for each in self.record["inputs"])
            progress(total, total)
            return
        if not self.target.exists():
            folder.create(self.target, self._bytes_of(range(len(self))))
        folder.begin(self.target, self.record)
        with folder.driving(self.target):
            absent = folder.missing(self.target, self.record)
            check_space(self.target, self._bytes_of(absent))
            self._run_missing(absent, executor, workers, retries, progress)
            folder.commit(self.target, self.record)

    def run_part(self, index: int) -> None:
        """Write one part, unless it exists already. For array jobs of a batch system.

        Parameters
        ----------
        index : int, 0 to len(plan) - 1

        Raises
        ------
        sjlt.files.errors.UserError, OSError
            As for `run`, except that other processes may run other parts at the same time.
        """
        index = integer("index", index, 0, len(self) - 1)
        if self.committed:
            folder.check_committed(self.target, self.record, index)
            return
        folder.begin(self.target, self.record)
        attempt(self._job(), self._part(index))

    def commit(self) -> None:
        """Write the manifest once all parts exist. `run` calls this itself.

        Raises
        ------
        sjlt.files.errors.UserError
            If parts are missing or damaged, or another process is running the plan.
        """
        self.committed  # noqa: B018  # raises if the folder belongs to something else
        with folder.driving(self.target):
            folder.commit(self.target, self.record)

    def _run_missing(
        self,
        absent: list[int],
        executor: Executor | None,
        workers: int | None,
        retries: int,
        progress: Callable[[int, int], None],
    ) -> None:
        job, parts = self._job(), {i: self._part(i) for i in absent}
        total = sum(each["rows"] for each in self.record["inputs"])
        rows = total - sum(part.stop - part.start for part in parts.values())
        progress(rows, total)

        def done(i: int) -> None:
            nonlocal rows
            rows += parts[i].stop - parts[i].start
            progress(rows, total)

        workers = min(workers or get_num_threads(), max(1, len(parts)))
        try:
            if executor is not None:
                run_parts(job, parts, executor, retries, done)
            elif workers == 1:
                for i, part in parts.items():
                    _attempt_here(job, part, retries)
                    done(i)
            else:
                with Processes(workers) as pool:
                    run_parts(job, parts, pool, retries, done)
        except (UserError, OSError, MemoryError) as e:
            left = len(folder.missing(self.target, self.record))
            raise UserError(f"{explain(e)}; {len(self) - left} of {len(self)} parts are done") from e

    def _bytes_of(self, parts: Iterable[int]) -> int:
        """The bytes that the results of some parts take."""
        rows = sum(self.record["parts"][i]["stop"] - self.record["parts"][i]["start"] for i in parts)
        return int(rows * self.record["result"]["row_bytes"])

    def _job(self) -> Job:
        result = self.record["result"]
        return Job(
            identity=self.record["plan"],
            target=str(self.target),
            kind=result["kind"],
            sketch=self.record["sketch"],
            column=result["column"],
            source_dtype=result["source_dtype"],
            output_column=result["output_column"],
            dtype=result["given_dtype"],
            normalize=result["normalize"],
            batch_rows=self.record["batch_rows"],
            device=self.record["device"],
        )

    def _part(self, i: int) -> Part:
        part = self.record["parts"][i]
        held = self.record["inputs"][part["input"]]
        path = str(Path(self.record["source"]) / held["name"])
        return Part(part["name"], path, held["size"], held["mtime_ns"], held["rows"], part["start"], part["stop"])


def _attempt_here(job: Job, part: Part, retries: int) -> None:
    for left in reversed(range(retries + 1)):
        try:
            attempt(job, part)
            return
        except (OSError, MemoryError):
            if not left:
                raise


def plan(
    source: str | Path,
    target: str | Path,
    n_components: int,
    *,
    nnz: int | Literal["auto"] = "auto",
    stacks: int = 1,
    density: float | Literal["auto"] | None = None,
    seed: int = 0,
    column: str | None = None,
    output_column: str | None = None,
    dtype: Literal["float16", "float32", "float64", "int8"] | None = None,
    normalize: bool = False,
    part_rows: int | None = None,
    batch_rows: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "cpu",
    note: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Plan the projection of the rows of many files into a folder.

    Parameters
    ----------
    source : path
        A file, a folder or a glob, in any format that ``sjlt project`` reads. Files are sorted in natural order
        (``2.npy`` before ``10.npy``). In a folder, names that begin with "." or "_" are skipped. If the folder is the
        target of another plan, exactly its committed parts are read.
    target : path
        The folder of the result. It must be new, empty, or begun by the same plan, and not inside the source.
    n_components, nnz, stacks, density, seed
        As for `Sketch`. n_components="auto" is refused.
    column : str, optional
        Name of the column of parquet files, tensor of safetensors files, dataset of HDF5 files, or array of zarr
        stores; required if several are matrices.
    output_column : str, optional
        For parquet files: as for `sjlt.arrow.Projector`.
    dtype : {"float16", "float32", "float64", "int8"}, optional
        Dtype of the result. By default float32 for 1-byte integers and bool, otherwise that of `Sketch.project`. int8
        is stored with one scale per vector; read it with `sjlt.load_int8`.
    normalize : bool, default False
        Scale projected vectors to unit length.
    part_rows : int >= 1, optional
        Rows per part. By default, one part per file.
    batch_rows : int >= 1, optional
        Rows in memory at a time.
    device : {"auto", "cpu", "cuda"}, default "cpu"
        Where parts are projected. "auto" is resolved now; every attempt must find the same kind of device.
    note : callable
        Called with messages for the user.

    Returns
    -------
    Plan
        Nothing has been written yet: call `Plan.run`, or `Plan.run_part` for each part and then `Plan.commit`.

    Raises
    ------
    sjlt.files.errors.UserError
        For an unsuitable source or target.
    TypeError, ValueError
        For invalid arguments.

    Notes
    -----
    Part i is written to ``part-<i>.npy`` or ``part-<i>.parquet``, completely or not at all. After all parts, the
    manifest ``_sjlt.json`` is written, which lists inputs and parts; do not read the folder before it exists. On CPUs,
    the bytes do not depend on the engine, retries or interruptions. Source and target must be on POSIX file systems
    that all workers share.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import numpy as np, sjlt
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> (folder / "in").mkdir()
    >>> for i in range(3):
    ...     np.save(folder / "in" / f"{i}.npy", np.ones((10, 500), np.float32))
    >>> plan = sjlt.plan(folder / "in", folder / "out", 64)
    >>> plan.run(workers=1)
    >>> sorted(path.name for path in (folder / "out").iterdir())
    ['_sjlt.json', 'part-00000.npy', 'part-00001.npy', 'part-00002.npy']
    """
    if isinstance(n_components, str):
        raise ValueError(f"n_components={n_components!r} depends on the number of rows: a plan needs an integer")
    part_rows = None if part_rows is None else integer("part_rows", part_rows, 1, 2**62)
    batch_rows = None if batch_rows is None else integer("batch_rows", batch_rows, 1, 2**62)
    source, target = Path(source).absolute(), Path(target).absolute()
    normalize = flag("normalize", normalize)
    shards.check_apart(source, target)
    paths = shards.find(source)
    shards.check_outside(paths, target)
    shard, inputs = shards.describe(paths, column, note)
    if not shard.n_features and shard.kind == "parquet":
        raise UserError(f"{source}: no row of column {shard.column!r} states the length of its vectors")
    sketch = Sketch(shard.n_features, n_components, nnz=nnz, stacks=stacks, density=density, seed=seed)
    result = _result(shard, sketch, output_column, dtype, normalize, paths[0])
    device = "cpu" if shard.kind == "parquet" and device == "auto" else device
    on_gpu = devices.use_gpu(device, cast(Source, shard), note)
    batch_rows = batch_rows or _batch_rows(shard, sketch, result, on_gpu)
    record = {
        "sjlt": __version__,
        "sketch": sketch.to_dict(),
        "result": result,
        "batch_rows": batch_rows,
        "device": devices.device_name(on_gpu),
        "inputs": inputs,
        "parts": _parts(inputs, part_rows, shard.kind),
    }
    identity = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    top = shards.common_folder(paths)
    made = Plan({"plan": identity, "source": str(top), **record}, target)
    if not made.committed:
        rows, size = (sum(each[key] for each in inputs) for key in ("rows", "size"))
        note_poor_choices(target, (shard.n_features, sketch.n_components), (rows * result["row_bytes"], size), note)
    return made


def load(target: str | Path) -> Plan:
    """Load the plan with which a folder was begun or written.

    Parameters
    ----------
    target : path

    Returns
    -------
    Plan

    Raises
    ------
    sjlt.files.errors.UserError
        If the folder does not belong to a plan.
    """
    target = Path(target).absolute()
    for name in (records.MANIFEST, records.PLAN):
        if (target / name).exists():
            return Plan(records.read_record(target / name), target)
    raise UserError(f"{target}: not a plan folder: neither {records.PLAN} nor {records.MANIFEST} exists")


def _result(
    shard: shards.Shard, sketch: Sketch, output_column: str | None, dtype: str | None, normalize: bool, path: Path
) -> dict[str, Any]:
    """The entry "result" of the record: how parts are written."""
    k = sketch.n_components
    encoding = Encoding.of(shard.dtype, k, dtype, normalize)
    row_bytes = encoding.dtype.itemsize * (1 if encoding.stored == "int8" else k)
    if shard.kind == "parquet":
        kept = 0 if output_column in (None, shard.column) else shard.n_features * shard.dtype.itemsize
        row_bytes += shard.stored_bytes + kept
    elif output_column is not None:
        raise UserError(f"{path}: not a parquet file: its result has no column {output_column!r}")
    described = encoding.description(0, (output_column or shard.column) if shard.kind == "parquet" else None)
    return {
        "kind": shard.kind,
        **({"scale": described["scale"]} if "scale" in described else {}),
        "column": shard.column,
        "source_dtype": str(shard.dtype),
        "output_column": output_column,
        "given_dtype": dtype,
        "dtype": encoding.stored,
        "normalize": normalize,
        "row_bytes": int(row_bytes),
    }


def _batch_rows(shard: shards.Shard, sketch: Sketch, result: dict[str, Any], on_gpu: bool) -> int:
    from ..files.parquet import BATCH_BYTES

    if shard.kind == "parquet":
        return int(max(1, BATCH_BYTES // max(1, shard.row_bytes)))
    encoding = Encoding.of(shard.dtype, sketch.n_components, result["given_dtype"], result["normalize"])
    return default_batch_rows(cast(Source, shard), encoding, on_gpu)


def _parts(inputs: list[dict[str, Any]], part_rows: int | None, kind: str) -> list[dict[str, Any]]:
    ranges = []
    for number, each in enumerate(inputs):
        rows = each["rows"]
        step = part_rows or max(1, rows)
        starts = range(0, rows, step) if rows else (0,)
        ranges += [(number, start, min(start + step, rows)) for start in starts]
    return [
        {"name": f"part-{i:05d}.{kind}", "input": number, "start": start, "stop": stop}
        for i, (number, start, stop) in enumerate(ranges)
    ]
