"""Plans refuse what they cannot do in one line with names and values, and lose no existing data."""

import os
import subprocess
import sys
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.cases import each_value
from helpers.plans import ROWS, D, K, left, result, shards, write_parquet

import sjlt
from sjlt import plans
from sjlt.files.errors import UserError


def test_bad_sources(tmp_path):
    shards(tmp_path / "in")
    out = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    with pytest.raises(TypeError, match="normalize must be True or False, got 'no'"):
        sjlt.plan(tmp_path / "in", out, K, normalize="no")
    with pytest.raises(UserError, match="empty: no files"):
        sjlt.plan(tmp_path / "empty", out, K)
    with pytest.raises(UserError, match="no files"):
        sjlt.plan(tmp_path / "in" / "*.parquet", out, K)
    with pytest.raises(FileNotFoundError, match=r"no\.npy"):
        sjlt.plan(tmp_path / "no.npy", out, K)
    (tmp_path / "in" / "more").mkdir()
    with pytest.raises(UserError, match="more: is a subfolder: name the files with a glob"):
        sjlt.plan(tmp_path / "in", out, K)
    (tmp_path / "in" / "more").rmdir()
    (tmp_path / "in" / "README.txt").write_text("hello, world")
    with pytest.raises(UserError, match=r"README\.txt"):
        sjlt.plan(tmp_path / "in", out, K)
    (tmp_path / "in" / "README.txt").write_bytes(b"")
    with pytest.raises(UserError, match=r"README\.txt"):
        sjlt.plan(tmp_path / "in", out, K)
    assert not out.exists()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda path: np.save(path, np.ones((2, D + 1), np.float32)), "vectors of length 71, not 70 as in .*x1.npy"),
        (lambda path: np.save(path, np.ones((2, D))), "dtype float64, not float32 as in .*x1.npy"),
        (lambda path: write_parquet(path, np.ones((2, D), np.float32)), "parquet rows, not npy as in .*x1.npy"),
        (lambda path: np.save(path, np.ones(3)), "needs 2 dimensions"),
        (lambda path: path.write_bytes(b"\x93NUMPY\x01"), "not a readable .npy file"),
    ],
)
def test_inconsistent_shards(tmp_path, other, message):
    shards(tmp_path / "in")
    other(tmp_path / "in" / "x3.npy")
    with pytest.raises(UserError, match=message) as caught:
        sjlt.plan(tmp_path / "in", tmp_path / "out", K)
    assert "x3.npy" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parquet_shards_with_different_schemas(tmp_path):
    shards(tmp_path / "in", kind="parquet")
    write_parquet(tmp_path / "in" / "x3.parquet", np.ones((2, D), np.float32), text=["a", "b"])
    with pytest.raises(UserError, match=r"x3.parquet: columns \(id: int64, v: .*, text: string\), not \(id"):
        sjlt.plan(tmp_path / "in", tmp_path / "out", K)
    (tmp_path / "in" / "x3.parquet").write_bytes((tmp_path / "in" / "x1.parquet").read_bytes()[:-50])
    with pytest.raises(UserError, match=r"x3.parquet"):
        sjlt.plan(tmp_path / "in", tmp_path / "out", K)


def test_bad_rows_are_named_and_other_parts_are_kept(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "in").mkdir()
    for i in range(4):
        rows = [[float(i)] * D] * 20
        rows[7:8] = [None] if i == 2 else rows[7:8]
        pq.write_table(pa.table({"v": rows}), tmp_path / "in" / f"{i}.parquet", row_group_size=5)
    plan = sjlt.plan(tmp_path / "in", tmp_path / "out", K)
    for workers in (1, 2):
        with pytest.raises(UserError, match=r"2\.parquet: column 'v': row 7 is null") as caught:
            plan.run(workers=workers, retries=0)
        assert "of 4 parts are done" in str(caught.value)
    assert "part-00002.parquet" not in left(tmp_path / "out")
    assert not [name for name in left(tmp_path / "out") if name.endswith(".tmp")]


def test_bad_targets(tmp_path):
    shards(tmp_path / "in")
    with pytest.raises(UserError, match="is the folder of the source"):
        sjlt.plan(tmp_path / "in", tmp_path / "in", K)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    with pytest.raises(UserError, match=r"not empty, and without a plan: holds 'mine\.txt'"):
        sjlt.plan(tmp_path / "in", tmp_path / "full", K)
    with pytest.raises(UserError, match="exists and is not a folder"):
        sjlt.plan(tmp_path / "in", tmp_path / "full" / "mine.txt", K)
    with pytest.raises(UserError, match="no such directory"):
        sjlt.plan(tmp_path / "in", tmp_path / "no" / "out", K)
    with pytest.raises(UserError, match=r"not a plan folder: neither _sjlt\.plan\.json nor _sjlt\.json exists"):
        plans.load(tmp_path / "full")


def test_bad_arguments(tmp_path):
    shards(tmp_path / "in")

    def planned(*arguments, **options):
        return sjlt.plan(tmp_path / "in", tmp_path / "out", *arguments, **options)

    with pytest.raises(ValueError, match="n_components='auto' depends on the number of rows"):
        planned("auto")
    with pytest.raises(ValueError, match="part_rows must be from 1"):
        planned(K, part_rows=0)
    with pytest.raises(ValueError, match="batch_rows must be from 1"):
        planned(K, batch_rows=0)
    with pytest.raises(ValueError, match="nnz must be from 1"):
        planned(K, nnz=K + 1)
    with pytest.raises(UserError, match="it has no column 'v'"):
        planned(K, column="v")
    with pytest.raises(UserError, match="has no column 'w'"):
        planned(K, output_column="w")
    plan = planned(K)
    with pytest.raises(ValueError, match="index must be from 0 to 3, got 4"):
        plan.run_part(4)
    with pytest.raises(ValueError, match="pass workers=2 or an executor"), ThreadPoolExecutor(2) as executor:
        plan.run(executor, workers=2)
    with pytest.raises(ValueError, match="workers must be from 1"):
        plan.run(workers=0)
    with pytest.raises(ValueError, match="retries must be from 0"):
        plan.run(retries=-1)
    assert not (tmp_path / "out").exists()


def test_numpy_integers_as_row_counts(tmp_path):
    shards(tmp_path / "in")
    given = [{}, {"part_rows": 7, "batch_rows": 3}]
    for options in given:
        same = {name: np.int64(value) for name, value in options.items()}
        plans_made = [sjlt.plan(tmp_path / "in", tmp_path / "out", K, **o) for o in (options, same)]
        assert plans_made[0].record == plans_made[1].record


def test_disk_space_is_checked_first(tmp_path, monkeypatch):
    shards(tmp_path / "in")
    plan = sjlt.plan(tmp_path / "in", tmp_path / "out", K)
    monkeypatch.setattr("sjlt.files.names.shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(UserError, match=rf"needs {sum(ROWS) * K * 4} bytes, the file system has 10 free"):
        plan.run(workers=1)
    assert not (tmp_path / "out").exists()  # nor anything that another plan would have to agree with


def test_files_without_features(tmp_path):
    shards(tmp_path / "in")
    for name in ("0.npy", "zz.npy"):
        np.save(tmp_path / "in" / name, np.zeros((5, 0), np.float32))
        with pytest.raises(UserError, match=r"vectors of length \d+, not \d+ as in"):
            sjlt.plan(tmp_path / "in", tmp_path / "out", K)
        (tmp_path / "in" / name).unlink()


@pytest.mark.skipif(not os.path.isdir("/sys/kernel"), reason="Linux")
def test_folder_without_permission(tmp_path):
    """A location in which even root may not create a folder."""
    shards(tmp_path / "in")
    with pytest.raises(PermissionError, match="/sys/kernel/sjlt"):
        sjlt.plan(tmp_path / "in", "/sys/kernel/sjlt", K).run(workers=1)


LIMITED = """
import resource, sys, sjlt
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from sjlt.files.errors import UserError
try:
    sjlt.plan(sys.argv[1], sys.argv[2], 24).run(workers=1)
except UserError as e:
    print(e)
"""


def test_full_disk_keeps_existing_parts(tmp_path):
    shards(tmp_path / "in", rows=(100, 1000, 50))
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "in"), str(tmp_path / "out")]
    message = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert "File too large; 1 of 3 parts are done" in message
    assert left(tmp_path / "out") == ["_sjlt.plan.json", "part-00000.npy"]
    sjlt.plan(tmp_path / "in", tmp_path / "out", K).run(workers=1)
    assert len(result(tmp_path / "out")) == 1150


def fails_twice(job, part, number=""):
    """An attempt that raises OSError the first two times."""
    from sjlt.plans.attempt import attempt

    tally = Path(job.target).parent / f"{part.name}.tally"
    with open(tally, "a") as file:
        file.write("x")
    if len(tally.read_text()) < 3:
        raise OSError(5, "Input/output error", part.path)
    return attempt(job, part)


@pytest.mark.parametrize("retries", [1, 2])
def test_failures_are_retried(tmp_path, monkeypatch, retries):
    shards(tmp_path / "in")
    plan = sjlt.plan(tmp_path / "in", tmp_path / "out", K)
    monkeypatch.setattr(plans.running, "attempt", fails_twice)
    with ThreadPoolExecutor(2) as executor:
        if retries == 2:
            plan.run(executor, retries=2)
            assert plan.committed
        else:
            with pytest.raises(UserError, match=r"failed 2 times: .*Input/output error"):
                plan.run(executor, retries=1)
            assert not plan.committed


def test_lost_executor(tmp_path):
    shards(tmp_path / "in")
    plan = sjlt.plan(tmp_path / "in", tmp_path / "out", K)
    plan.run_part(1)
    with ThreadPoolExecutor(1) as executor:
        pass
    with pytest.raises(UserError, match=r"^the executor was lost: cannot schedule new .*; 1 of 4 parts are done$"):
        plan.run(executor)
    with pytest.raises(UserError, match=r"^the executor was lost: running parts were cancelled; 1 of 4 parts"):
        plan.run(Cancelling())
    plan.run(workers=1)


class Cancelling(Executor):
    """An executor whose futures are cancelled, as dask's are when its scheduler dies."""

    def submit(self, *arguments):
        future = Future()
        future.cancel()
        future.set_running_or_notify_cancel()
        return future


@each_value(kept=[0, 50, -1], kind=["npy", "parquet"])
def test_truncated_parts_are_not_committed(tmp_path, kind, kept):
    shards(tmp_path / "in", kind=kind)
    plan = sjlt.plan(tmp_path / "in", tmp_path / "out", K)
    plan.run_part(0)
    part = next((tmp_path / "out").glob("part-*"))
    content = part.read_bytes()
    part.write_bytes(content[:kept])
    with pytest.raises(UserError, match=rf"{part.name}: is damaged, with \d+ bytes: remove it"):
        plan.run()
    assert not (tmp_path / "out" / "_sjlt.json").exists()
    part.unlink()
    plan.run()
    assert part.read_bytes() == content


def test_errors_of_writes_name_the_part(tmp_path, monkeypatch):
    """They have no file name of their own."""
    shards(tmp_path / "in")

    def full(descriptor, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sjlt.plans.attempt.write_all", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        sjlt.plan(tmp_path / "in", tmp_path / "out", K).run_part(0)
    assert Path(caught.value.filename).parent == tmp_path / "out"
    assert Path(caught.value.filename).name.startswith("part-")
