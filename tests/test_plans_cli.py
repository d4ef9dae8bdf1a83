"""The command line for parquet files, folders and array jobs."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import cli
from helpers.plans import D, K, contents, left, result, shards, write_parquet

import sjlt
from sjlt import plans
from sjlt.files.errors import UserError

in_process = cli.run  # a fixture


def run(*arguments, check=True, **options):
    command = [sys.executable, "-m", "sjlt", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, **options)
    if check:
        assert done.returncode == 0, done.stderr
    return done


def error(*arguments):
    done = run(*arguments, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.exhaustive
def test_folder_with_workers_and_resume(tmp_path):
    x = shards(tmp_path / "in")
    out = tmp_path / "out"
    run("project", tmp_path / "in", out, "-k", K, "--part", 1, "--of", 2)
    assert left(out) == ["_sjlt.plan.json", "part-00001.npy", "part-00003.npy"]
    described = run("info", out).stdout
    assert "2 of 4 parts, not committed" in described
    assert "2 of 4 parts are missing: 0, 2" in error("commit", out)
    run("project", tmp_path / "in", out, "-k", K, "--workers", 2)
    assert np.array_equal(result(out), sjlt.Sketch(D, K).project(x))
    described = run("info", out).stdout
    assert "76 x 24 float32" in described
    assert "unfinished" not in described
    assert "x1.npy to x11.npy" in described


@pytest.mark.exhaustive
def test_array_job(tmp_path):
    """As under a batch system: one command per job, then the commit."""
    x = shards(tmp_path / "in")
    script = f"""
    set -e
    for SLURM_ARRAY_TASK_ID in 2 0 1; do
        "{sys.executable}" -m sjlt project in out -k {K} --part-rows 9 --part $SLURM_ARRAY_TASK_ID --of 3
    done
    "{sys.executable}" -m sjlt commit out
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "11 parts, committed" in done.stdout
    assert np.array_equal(result(tmp_path / "out"), sjlt.Sketch(D, K).project(x))


@pytest.mark.exhaustive
def test_parquet_file(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    x = np.random.default_rng(0).normal(size=(50, D)).astype(np.float32)
    write_parquet(tmp_path / "x.parquet", x, text=[str(i) for i in range(50)])
    out = tmp_path / "y.parquet"
    run("project", tmp_path / "x.parquet", out, "-k", K, "--seed", 4, "--output-column", "w")
    table = pq.read_table(out)
    assert table.column_names == ["id", "v", "text", "w"]
    assert table.schema.field("w").type == pa.list_(pa.float32(), K)
    y = sjlt.Sketch(D, K, seed=4).project(x)
    assert np.array_equal(np.stack(table["w"].to_numpy()), y)
    described = run("info", out).stdout
    for words in ("column", "50 x 24 float32", "seed=4", "x.parquet"):
        assert words in described
    assert "exists (--force replaces it)" in error("project", tmp_path / "x.parquet", out, "-k", K)
    again = run("project", tmp_path / "x.parquet", out, "-k", K, "--seed", 4, "--output-column", "w", "--resume")
    assert "complete already" in again.stderr
    run("project", tmp_path / "x.parquet", tmp_path / "y.npy", "-k", K, "--seed", 4, "--column", "v")
    assert np.array_equal(np.load(tmp_path / "y.npy"), y)


@pytest.mark.exhaustive
def test_dask_cluster(tmp_path):
    distributed = pytest.importorskip("distributed")
    x = shards(tmp_path / "in")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster:
        run("project", tmp_path / "in", tmp_path / "out", "-k", K, "--dask", cluster.scheduler_address)
    assert np.array_equal(result(tmp_path / "out"), sjlt.Sketch(D, K).project(x))


@pytest.mark.exhaustive
def test_refusals_are_one_line(tmp_path):
    shards(tmp_path / "in")
    source, out = tmp_path / "in", tmp_path / "out"
    assert "pass one of --workers" in error("project", source, out, "-k", K, "--workers", 2, "--part", 0, "--of", 2)
    assert "pass one of --workers" in error("project", source, out, "-k", K, "--part", 0)
    assert "--part must be from 0 to 1" in error("project", source, out, "-k", K, "--part", 2, "--of", 2)
    assert "--force does not replace folders; remove it first" in error("project", source, out, "-k", K, "--force")
    assert "workers must be from 1" in error("project", source, out, "-k", K, "--workers", 0)
    assert "nnz must be from 1" in error("project", source, out, "-k", K, "--nnz", 99)
    assert "no column 'v'" in error("project", source / "x1.npy", tmp_path / "y.npy", "-k", K, "--column", "v")
    assert "no column 'w'" in error("project", source / "x1.npy", tmp_path / "y.npy", "-k", K, "--output-column", "w")
    assert "absent.parquet: No such" in error("project", "absent.parquet", "y.parquet", "-k", K, "--output-column", "w")
    assert "a folder of parts: give it a name without .npy" in error("project", source, tmp_path / "y.npy", "-k", K)
    assert "cannot write .fbin files; name a folder" in error("project", source, tmp_path / "y.fbin", "-k", K)
    assert not list(tmp_path.glob("y*"))
    assert "not the address of a dask scheduler" in error("project", source, out, "-k", K, "--dask", "nowhere")
    assert "not a plan folder" in error("commit", source)
    assert "not a plan folder" in error("info", source)
    assert not out.exists()
    out.mkdir()
    (out / "mine").touch()
    assert "not empty, and without a plan" in error("project", source, out, "-k", K)


def test_progress_bar_of_a_job(tmp_path):
    from sjlt.cli import folders

    shards(tmp_path / "in")
    seen = []
    bar = SimpleNamespace(show=lambda rows, total: seen.append((rows, total)))
    plan = sjlt.plan(tmp_path / "in", tmp_path / "out", K)
    folders._run(plan, folders.Work(part_rows=None, workers=None, dask=None, part=0, of=2), bar)
    assert seen == [(0, 71), (40, 71), (71, 71)]


def test_number_of_jobs_must_be_positive(tmp_path):
    from sjlt.cli import folders

    for of in (0, -1):
        with pytest.raises(UserError, match=f"^--of must be at least 1, got {of}$"):
            folders.project_folder(tmp_path, tmp_path / "out", K, folders.Work(None, None, None, 0, of), False)


@pytest.mark.exhaustive
def test_interrupted_folder_continues(tmp_path):
    shards(tmp_path / "in", rows=(60_000, 60_000, 60_000))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "sjlt", "project", str(tmp_path / "in"), str(out), "-k", str(K)]
    command += ["--part-rows", "5000", "--batch-rows", "50", "--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not out.exists() or len(left(out)) < 4:
        time.sleep(0.01)
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command continues" in message
    assert "Traceback" not in message
    assert not [name for name in left(out) if name.endswith(".tmp")]
    assert subprocess.run(command, timeout=240).returncode == 0
    sjlt.plan(tmp_path / "in", tmp_path / "reference", K, part_rows=5000, batch_rows=50).run(workers=1)
    assert contents(out) == contents(tmp_path / "reference")
    assert len(plans.committed_parts(out)) == 36


def save_parquet(path, column, **columns):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    kind = pa.list_(pa.float32())
    pq.write_table(pa.table({"id": range(len(column)), "v": pa.array(column, kind), **columns}), path)


def save_shards(folder):
    folder.mkdir()
    save_parquet(folder / "a.parquet", GOOD)
    save_parquet(folder / "b.parquet", GOOD, extra=["x"] * 30)


def save_truncated(path):
    save_parquet(path, GOOD)
    path.write_bytes(path.read_bytes()[:-20])


GOOD = [[1.0, 2.0, 3.0]] * 30
BAD = {
    "a null": (lambda p: save_parquet(p / "x.parquet", [*GOOD, None]), "x.parquet: column 'v': row 30 is null"),
    "ragged": (lambda p: save_parquet(p / "x.parquet", [*GOOD, [1.0]]), "row 30 has length 1, expected 3"),
    "empty .npy": (lambda p: (p / "x.npy").touch(), "x.npy: is empty"),
    "empty .parquet": (lambda p: (p / "x.parquet").touch(), "x.parquet: is empty"),
    "no rows": (lambda p: save_parquet(p / "x.parquet", []), "no row of column 'v' states the length"),
    "truncated": (lambda p: save_truncated(p / "x.parquet"), "x.parquet: Parquet magic bytes not found in footer"),
    "schemas": (
        lambda p: save_shards(p / "x"),
        "b.parquet: columns (id: int64, v: list<element: float>, extra: string)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_one_line(tmp_path, in_process, case):
    make, message = BAD[case]
    make(tmp_path)
    (source,) = tmp_path.iterdir()
    out = "y" if source.is_dir() else f"y{source.suffix}"
    result = in_process("project", source, tmp_path / out, "-k", 2)
    assert result.code == 2
    assert result.err.startswith("Error: ")
    assert result.err.count("\n") == 1
    assert message in result.err
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.exhaustive
def test_full_disk_gives_one_line(tmp_path):
    """Simulated for a parquet file by a limit on file sizes."""
    import resource

    save_parquet(tmp_path / "x.parquet", np.random.default_rng(0).random((20_000, 30)).tolist())
    arguments = ["project", tmp_path / "x.parquet", tmp_path / "y.parquet", "-k", 10]
    run(*arguments)  # fills the cache of compiled code, which is larger than the limit
    (tmp_path / "y.parquet").unlink()
    done = run(
        *arguments, check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    )
    assert (done.returncode, done.stderr) == (2, f"Error: {tmp_path}/y.parquet: File too large\n")
    assert left(tmp_path) == ["x.parquet"]
