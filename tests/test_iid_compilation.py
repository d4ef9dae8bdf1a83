"""The iid law's kernels compile for the architectures that they are meant for, and fit their shared memory."""

import sys

import pytest
from helpers.compilation import TARGETS, Launches, check_compiled, compile_launches

PRODUCTS = [  # (n, d, k, density, dtype, layout)
    (65_536, 4096, 128, 1 / 3, "bfloat16", "rows"),
    (65_536, 768, 128, 1 / 3, "float32", "rows"),
    (2000, 301, 300, 0.01, "float16", "columns"),
    (70, 500, 1000, 0.5, "float64", "rows"),
    (8, 1 << 24, 4096, 1.0, "float32", "rows"),
]


def make_calls():
    import torch

    from sjlt import Sketch
    from sjlt.backends.triton import exact as backend

    for name in ("reduce_partials", "scale_vectors"):  # compiled with the projection's
        setattr(backend, name, Launches(getattr(backend, name)))
    for n, d, k, density, dtype, layout in PRODUCTS:
        S = Sketch(d, k, density=density)
        shapes = ((n, d), (n, k)) if layout == "rows" else ((d, n), (k, n))
        x, y = (torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape in shapes)
        x, y = (x, y) if layout == "rows" else (x.t(), y.t())
        backend.project(S, x, y, False)
        if n > 16:
            backend.adjoint(S, y, x, False)


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target):
    check_compiled(__file__, target)


if __name__ == "__main__":
    from sjlt.backends.triton import iid as triton_iid

    compile_launches(sys.argv[1], make_calls, triton_iid)
