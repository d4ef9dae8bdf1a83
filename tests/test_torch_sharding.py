"""Trees and matrices of DTensors on several processes: the results for the unsharded data, equal on every rank."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parent / "helpers" / "distributed_program.py"


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sharded(device, world):
    if device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1]), "WORLD_SIZE": str(world)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), device],
            env={**os.environ, **rendezvous, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            cwd=PROGRAM.parent.parent.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        results = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    pairs = zip(processes, results, strict=True)
    failed = {rank: err for rank, (process, (_, err)) in enumerate(pairs) if process.returncode}
    assert not failed, "\n".join(f"rank {rank}: {err[-3000:]}" for rank, err in failed.items())
    assert all("agrees" in out for out, _ in results)
