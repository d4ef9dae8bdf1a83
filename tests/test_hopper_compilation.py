"""The kernels for Hopper compile, and fit its shared memory."""

import sys

import pytest
import triton
from helpers.compilation import check_compiled, compile_launches

from sjlt.backends.triton import hopper as triton_hopper
from sjlt.kernels.config import iid as iid_launch

PRODUCTS = [  # (d, k, nnz, dtype): of one, two and more tiles
    (768, 128, 4, "float32"),
    (768, 256, 1, "float32"),
    (768, 256, 2, "float32"),
    (4096, 512, 4, "float32"),
    (4096, 512, 8, "float32"),
    (4096, 128, 4, "float32"),
    (4096, 512, 4, "bfloat16"),
    (768, 128, 8, "float16"),
    (1 << 17, 128, 4, "float32"),  # with splits
    (1 << 17, 128, 4, "bfloat16"),
]
TURNED = [  # (n, d, k, nnz, dtype), of S A: with splits and without
    (512, 1 << 18, 1024, 8, "float32"),
    (1024, 1 << 14, 1024, 4, "float32"),
    (1 << 16, 1 << 10, 128, 2, "float32"),
    (512, 1 << 18, 1024, 8, "bfloat16"),
    (1 << 16, 1 << 10, 128, 1, "float16"),
]


def make_calls():
    import torch

    from sjlt import Sketch
    from sjlt.backends.triton import exact as backend

    backend._resources = lambda device: (132, 227 << 10, True)
    backend._reduce = lambda *_: None  # which is compiled with the other kernels
    for n, d, k, nnz, dtype in TURNED:
        a, out = (torch.empty((width, n), dtype=getattr(torch, dtype), device="meta") for width in (d, k))
        backend.project(Sketch(d, k, nnz=nnz), a.t(), out.t(), False)
    for d, k, nnz, dtype in PRODUCTS:
        x, y = (torch.empty((1 << 20, width), dtype=getattr(torch, dtype), device="meta") for width in (d, k))
        backend.project(Sketch(d, k, nnz=nnz), x, y, False)
        if dtype == "float32" and nnz < 8:
            backend.adjoint(Sketch(d, k, nnz=nnz), y, x, False)
        if dtype != "float32" and d <= iid_launch.NATIVE_TERMS:
            for density in (0.01, 0.5):  # lanes of 16 and of 8 bits
                backend.project(Sketch(d, k, density=density), x, y, False)


@pytest.mark.skipif(not triton.__version__.startswith(triton_hopper.GLUON_VERSIONS), reason="no such Gluon")
def test_kernels_compile():
    check_compiled(__file__, "sm_90")


if __name__ == "__main__":
    compile_launches(sys.argv[1], make_calls, triton_hopper)
