"""Plans under SIGKILL: workers and drivers die at random moments; the resumed run has every row exactly once."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from helpers.plans import contents, left

import sjlt
from sjlt import plans
from sjlt.files.errors import UserError

D, K = 256, 32
PARTS = 40

DRIVER = """
import sys, sjlt
if __name__ == "__main__":
    sjlt.plan(sys.argv[1], sys.argv[2], 32, part_rows=1000, batch_rows=10).run(workers=2, retries=3)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "driver.py"
    path.write_text(DRIVER)
    return path


def make_source(folder, kind):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(4):
        x = rng.normal(size=(PARTS // 4 * 1000, D)).astype(np.float32)
        if kind == "npy":
            np.save(folder / f"{i}.npy", x)
        else:
            pa = pytest.importorskip("pyarrow")
            import pyarrow.parquet as pq

            lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), D)
            pq.write_table(
                pa.table({"id": np.arange(len(x)), "v": lists}), folder / f"{i}.parquet", row_group_size=1000
            )


def planned(tmp_path, name="out"):
    return sjlt.plan(tmp_path / "in", tmp_path / name, K, part_rows=1000, batch_rows=10)


def start(program, tmp_path):
    command = [sys.executable, str(program), str(tmp_path / "in"), str(tmp_path / "out")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def workers_of(pid):
    try:
        children = psutil.Process(pid).children(recursive=True)
        return [each.pid for each in children if "spawn_main" in " ".join(each.cmdline())]
    except psutil.Error:
        return []


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
        return 1
    except ProcessLookupError:
        return 0


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def assert_is_complete(tmp_path):
    assert contents(tmp_path / "out") == contents(tmp_path / "reference")
    assert len(plans.committed_parts(tmp_path / "out")) == PARTS
    assert len(left(tmp_path / "out")) == PARTS + 1


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("npy", 2),
        pytest.param("npy", 40, marks=pytest.mark.exhaustive),
        pytest.param("parquet", 40, marks=pytest.mark.exhaustive),
    ],
)
def test_random_kills(tmp_path, program, kind, kills):
    """SIGKILL of workers and drivers: a hundred, counting those of a single parquet file in test_arrow_parquet."""
    make_source(tmp_path / "in", kind)
    planned(tmp_path, "reference").run(workers=1)
    rng, done, committed = np.random.default_rng(kills), 0, 0
    while done < kills:
        if (tmp_path / "out" / "_sjlt.json").exists():
            planned(tmp_path).run(workers=1)  # finishes the commit if its driver was killed after writing the manifest
            assert_is_complete(tmp_path)
            committed += 1
            for path in (tmp_path / "out").iterdir():
                path.unlink()
        driver = start(program, tmp_path)
        before = len(left(tmp_path / "out")) if (tmp_path / "out").exists() else 0
        wait_until(lambda: driver.poll() is not None or len(left_or_none(tmp_path)) > before + 1)  # noqa: B023
        while done < kills and driver.poll() is None:
            time.sleep(rng.exponential(0.15))
            victims = workers_of(driver.pid)
            if rng.random() < 0.4 or not victims:
                done += kill(driver.pid)
                break
            done += kill(rng.choice(victims))
        output, _ = driver.communicate(timeout=300)
        ended = driver.returncode in (0, -signal.SIGKILL)
        assert ended or "failed 4 times: its process died" in output, output
    planned(tmp_path).run(workers=1)
    assert_is_complete(tmp_path)


def left_or_none(tmp_path):
    return left(tmp_path / "out") if (tmp_path / "out").exists() else []


@pytest.mark.exhaustive
def test_workers_end_with_a_killed_driver(tmp_path, program):
    make_source(tmp_path / "in", "npy")
    driver = start(program, tmp_path)
    wait_until(lambda: len(left_or_none(tmp_path)) > 3)
    workers = workers_of(driver.pid)
    assert len(workers) == 2
    kill(driver.pid)
    driver.communicate()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in workers), 10)


def test_second_driver_is_refused(tmp_path, program):
    make_source(tmp_path / "in", "npy")
    driver = start(program, tmp_path)
    wait_until(lambda: len(left_or_none(tmp_path)) > 2)
    os.kill(driver.pid, signal.SIGSTOP)
    try:
        with pytest.raises(UserError, match="another process is running this plan"):
            planned(tmp_path).run(workers=1)
        with pytest.raises(UserError, match="another process is running this plan"):
            plans.load(tmp_path / "out").commit()
        planned(tmp_path).run_part(PARTS - 1)  # array jobs need no lock
    finally:
        os.kill(driver.pid, signal.SIGCONT)
    output, _ = driver.communicate(timeout=120)
    assert driver.returncode == 0, output
    planned(tmp_path, "reference").run(workers=1)
    assert_is_complete(tmp_path)


def test_only_files_of_dead_processes_are_swept(tmp_path, program):
    make_source(tmp_path / "in", "npy")
    driver = start(program, tmp_path)
    wait_until(lambda: any(name.endswith(".tmp") for name in left_or_none(tmp_path)[1:]))
    wait_until(lambda: len(left_or_none(tmp_path)) > 4)
    for pid in [driver.pid, *workers_of(driver.pid)]:
        kill(pid)
    driver.communicate()
    (tmp_path / "out" / ".sjlt-part-00000.npy~dead-1-abc.tmp").write_bytes(b"half")
    from sjlt.files.attempts import appearing

    plan = planned(tmp_path)
    with appearing(tmp_path / "out" / "part-00001.npy", existing="keep") as living:
        living.write_bytes(b"half")
        plan.run(workers=1)
        assert [name for name in left(tmp_path / "out") if name.endswith(".tmp")] == [living.name]
    planned(tmp_path, "reference").run(workers=1)
    assert_is_complete(tmp_path)


@pytest.mark.exhaustive
def test_duplicate_attempts_leave_one_file(tmp_path, program):
    """Twelve processes attempt the same two parts at the same time."""
    make_source(tmp_path / "in", "npy")
    part = """
import sys, sjlt
plan = sjlt.plan(sys.argv[1], sys.argv[2], 32, part_rows=1000, batch_rows=10)
for i in (0, 1):
    plan.run_part(i)
"""
    command = [sys.executable, "-c", part, str(tmp_path / "in"), str(tmp_path / "out")]
    processes = [subprocess.Popen(command) for _ in range(6)]
    assert [process.wait(timeout=120) for process in processes] == [0] * 6
    assert left(tmp_path / "out") == ["_sjlt.plan.json", "part-00000.npy", "part-00001.npy"]
    planned(tmp_path, "reference").run(workers=1)
    planned(tmp_path).run(workers=1)
    assert_is_complete(tmp_path)


@pytest.mark.exhaustive
def test_concurrent_plans_do_not_share_a_folder(tmp_path):
    make_source(tmp_path / "in", "npy")
    part = """
import sys, sjlt
from sjlt.files.errors import UserError
try:
    sjlt.plan(sys.argv[1], sys.argv[2], 32, part_rows=1000, seed=int(sys.argv[3])).run_part(0)
except UserError as e:
    assert "belongs to a different plan" in str(e), e
    print("refused")
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", part, str(tmp_path / "in"), str(tmp_path / "out"), str(seed)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(4)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert sorted(outputs) == ["", "refused\n", "refused\n", "refused\n"]
    assert plans.load(tmp_path / "out").sketch.seed == outputs.index("")


LETHAL = """
import os, signal, sys
import sjlt.plans.running as running, sjlt
from sjlt.plans.attempt import attempt

def lethal(job, part, number):
    if part.name == "part-00005.npy":
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt(job, part)

running.attempt = lethal
if __name__ == "__main__":
    from sjlt.files.errors import UserError
    try:
        sjlt.plan(sys.argv[1], sys.argv[2], 32, part_rows=1000).run(workers=2, retries=1)
    except UserError as e:
        print(e)
"""


@pytest.mark.exhaustive
def test_part_that_kills_its_process_is_named(tmp_path):
    make_source(tmp_path / "in", "npy")
    (tmp_path / "lethal.py").write_text(LETHAL)
    command = [sys.executable, str(tmp_path / "lethal.py"), str(tmp_path / "in"), str(tmp_path / "out")]
    output = subprocess.run(command, capture_output=True, text=True, timeout=240).stdout
    assert "part 5 (" in output
    assert "failed 2 times: its process died" in output
    assert "part-00005.npy" not in left(tmp_path / "out")
