"""How many kernels a process compiles for many shapes, derived without a GPU from Triton's compilation keys."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.compilation import source_of
from helpers.kernels import adjoint, project

ROOT = Path(__file__).parent.parent

# Limits for 100 shapes of `benchmarks.envelope`. Most random shapes differ in a constant that decides how the kernel
# reads its data or generates entries; how a sum is split, accumulated and stored must not multiply them.
LIMITS = {"reduce_partial_sums": 20, "scale_vectors": 4, "encode_chunks": 2}
LIMIT = 125


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kernels", ["hopper", "portable"])
def test_kernels_for_100_shapes(kernels, seed):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, kernels, str(seed)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    counts = json.loads(result.stdout)
    assert counts["reduce_partial_sums"] > 1
    assert {name: counts[name] for name, limit in LIMITS.items() if counts.get(name, 0) > limit} == {}
    assert sum(counts.values()) <= LIMIT, counts


def count_kernels(hopper, seed):
    """The number of kernels by name, for the first 100 shapes of a seed."""
    from benchmarks.envelope import draw
    from sjlt import Sketch
    from sjlt.backends.triton import device, launcher
    from sjlt.backends.triton import hopper as launches
    from sjlt.kernels.config.product import Device

    described = Device(132, 227 << 10, hopper=hopper, programmatic_launch=True, asynchronous_copies=True)
    device.describe = lambda _: described
    compiled = {}

    def note(kernel, grid, index, arguments, key, constants):
        source, options = source_of(kernel, arguments, {**constants(), **launcher.OPTIONS})
        compiled_for = str(source.signature), str(source.constants), str(source.attrs), str(options)
        compiled.setdefault(kernel.__name__, set()).add(compiled_for)

    launcher.run = launches.run = note
    rng = random.Random(seed)
    for _ in range(100):
        shape = draw(rng)
        rng.getrandbits(32)  # the benchmark draws a sketch seed here
        sketch, new = Sketch(shape.d, shape.k, nnz=shape.nnz), {"device": "meta", "dtype": shape.dtype}
        width, product = (shape.k, adjoint) if shape.kind == "adjoint" else (shape.d, project)
        out_width = shape.d + shape.k - width
        if shape.padding is None:
            x = torch.empty(width, shape.n, **new).T
        else:
            x = torch.empty(shape.n, width + shape.padding, **new)[:, :width]
        out = (
            torch.empty(out_width, shape.n, **new).T if shape.kind == "tall" else torch.empty(shape.n, out_width, **new)
        )
        product(sketch, x, out)
    return {name: len(found) for name, found in compiled.items()}


if __name__ == "__main__":
    print(json.dumps(count_kernels(sys.argv[1] == "hopper", int(sys.argv[2]))))
