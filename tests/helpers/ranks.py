"""Run a program once per rank, as torchrun does, with the repository importable even if it is not installed."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def run_ranks(program, *arguments, world, timeout=300):
    """Run `program` on `world` ranks until all end; return their outputs. Fail with the errors of ranks that failed."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), *arguments],
            env={**variables, "RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        results = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    pairs = zip(processes, results, strict=True)
    failed = {rank: err for rank, (process, (_, err)) in enumerate(pairs) if process.returncode}
    assert not failed, "\n".join(f"rank {rank}: {err[-3000:]}" for rank, err in failed.items())
    return [out for out, _ in results]
