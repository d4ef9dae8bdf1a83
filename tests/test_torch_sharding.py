"""Trees and matrices of DTensors on several processes: the results for the unsharded data, equal on every rank."""

from pathlib import Path

import pytest
import torch
from helpers.ranks import run_ranks

PROGRAM = Path(__file__).parent / "helpers" / "distributed_program.py"


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sharded(device, world):
    if device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    assert all("agrees" in out for out in run_ranks(PROGRAM, device, world=world))
