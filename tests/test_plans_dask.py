"""Plans and lazy arrays on a dask cluster of processes: killed workers, equal bytes, bounded memory."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from helpers.plans import contents, left, shards
from test_plans_refusals import fails_twice

import sjlt
from sjlt import plans

distributed = pytest.importorskip("distributed")

pytestmark = pytest.mark.filterwarnings("default")

D, K, ROWS, FILES = 256, 32, 6000, 4


def cluster(**options):
    return distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs="CRITICAL", **options
    )


def planned(tmp_path, name):
    return sjlt.plan(tmp_path / "in", tmp_path / name, K, part_rows=500, batch_rows=10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kills", [20])
def test_killed_workers(tmp_path, kills):
    (tmp_path / "in").mkdir()
    rng = np.random.default_rng(0)
    for i in range(FILES):
        np.save(tmp_path / "in" / f"{i}.npy", rng.normal(size=(ROWS, D)).astype(np.float32))
    planned(tmp_path, "reference").run(workers=1)
    done, rounds = 0, 0
    with cluster() as workers, distributed.Client(workers, set_as_default=False) as client:
        while done < kills:
            rounds += 1
            target = f"out{rounds}"
            ended = threading.Event()

            def kill(ended=ended):
                nonlocal done
                while not ended.wait(rng.exponential(0.4)) and done < kills:
                    nannies = list(workers.workers.values())
                    pid = nannies[rng.integers(len(nannies))].pid
                    with contextlib.suppress(ProcessLookupError):  # its nanny has not started the next one yet
                        if pid:
                            os.kill(pid, signal.SIGKILL)
                            done += 1

            killer = threading.Thread(target=kill)
            killer.start()
            try:
                planned(tmp_path, target).run(client.get_executor(), retries=100)
            finally:
                ended.set()
                killer.join()
            plans.load(tmp_path / target).commit()  # sweep the leftovers of workers killed after the first commit
            assert contents(tmp_path / target) == contents(tmp_path / "reference")
            assert len(plans.committed_parts(tmp_path / target)) == FILES * ROWS // 500
            assert len(left(tmp_path / target)) == FILES * ROWS // 500 + 1
    assert done >= kills


@pytest.mark.exhaustive
def test_failed_parts_are_retried(tmp_path, monkeypatch):
    """Dask would answer a call with equal arguments from its memory of the failure."""
    shards(tmp_path / "in")
    monkeypatch.setattr(plans.running, "attempt", fails_twice)
    plan = sjlt.plan(tmp_path / "in", tmp_path / "out", 24)
    with cluster() as workers, distributed.Client(workers, set_as_default=False) as client:
        plan.run(client.get_executor(), retries=2)
    assert plan.committed
    assert {path.read_text() for path in tmp_path.glob("*.tally")} == {"xxx"}


PEAK = """
import sys
import numpy as np
import dask, dask.array as da, distributed
import sjlt

def peak():
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("VmHWM")).split()[1]) * 1024

def warm(S):
    S.project(np.ones((100, S.n_features), np.float32))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from now on
    return peak()

if __name__ == "__main__":
    S, block = sjlt.Sketch(768, 256), 20_000
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", memory_limit=0
    ) as cluster, distributed.Client(cluster) as client:
        before = client.run(warm, S)
        X = da.random.default_rng(0).random((block * 24, 768), chunks=(block, 768), dtype=np.float32)
        (X @ S.T).sum().compute()
        after = client.run(peak)
    print(max(after[worker] - before[worker] for worker in before) / (block * 768 * 4))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="Linux")
def test_workers_hold_few_blocks(tmp_path):
    """24 blocks of 61 MB on two workers: each holds at most 4 blocks in memory."""
    (tmp_path / "peak.py").write_text(PEAK)
    done = subprocess.run([sys.executable, str(tmp_path / "peak.py")], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 4, done.stdout
