"""The projection's kernels compile for the architectures that they are meant for, and fit their shared memory."""

import sys

import pytest
from helpers.compilation import TARGETS, check_compiled, compile_launches

# (n, d, k, nnz, dtype, layout): tall, square, wide and narrow data; whole and broken tiles; one and many vectors.
PRODUCTS = [
    (65_536, 768, 256, 4, "float32", "rows"),
    (65_536, 4096, 512, 4, "bfloat16", "rows"),
    (512, 262_144, 1024, 4, "float32", "columns"),
    (2000, 301, 300, 5, "float32", "rows"),
    (2000, 4096, 128, 1, "float32", "rows"),
    (2000, 4096, 128, 1, "bfloat16", "rows"),
    (100, 128, 64, 64, "float16", "columns"),
    (70, 500, 1000, 3, "float64", "rows"),
    (8, 1 << 27, 4096, 4, "float32", "rows"),
    (1, 1 << 28, 4096, 1, "float32", "rows"),
    (8, 1 << 24, 4096, 4, "float32", "columns"),
]


def make_calls():
    import torch

    from sjlt import Sketch
    from sjlt.backends.triton import exact as backend

    def empty(rows, columns, dtype, layout):
        new = torch.empty((rows, columns) if layout == "rows" else (columns, rows), dtype=dtype, device="meta")
        return new if layout == "rows" else new.t()

    for n, d, k, nnz, dtype, layout in PRODUCTS:
        S = Sketch(d, k, nnz=nnz)
        dtype = getattr(torch, dtype)
        x, y = empty(n, d, dtype, layout), empty(n, k, dtype, layout)
        for precision in ("highest", "high") if (n, dtype) == (2000, torch.float32) else ("highest",):
            torch.set_float32_matmul_precision(precision)
            backend.project(S, x, y, False)
            backend.adjoint(S, y, x, False)


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target):
    check_compiled(__file__, target)


if __name__ == "__main__":
    from sjlt.backends.triton import exact as triton

    compile_launches(sys.argv[1], make_calls, triton)
