"""Dropout's kernels compile for the architectures that they are meant for, and fit their shared memory."""

import sys

import pytest
from helpers.compilation import TARGETS, check_compiled, compile_launches

CALLS = [  # shape, dtype, layout, bits, what else is given
    *(((1 << 20,), dtype, "rows", bits, {}) for dtype in ("bfloat16", "float32", "uint8") for bits in (8, 16, 32)),
    ((1 << 20,), "float16", "rows", 16, {}),
    ((1 << 20,), "float64", "rows", 16, {}),
    ((999,), "bfloat16", "rows", 16, {"offset": 3}),
    ((999,), "float32", "rows", 32, {"steps": True}),
    ((4096, 1024), "bfloat16", "rows", 16, {"seeds": True}),
    ((4096, 1000), "float32", "rows", 8, {"seeds": True, "steps": True}),
    ((1024, 4096), "bfloat16", "columns", 16, {}),
    ((1024, 4096), "float32", "columns", 32, {}),
    ((1000, 333), "float16", "columns", 8, {"offset": 1}),
    ((64, 200), "float32", "part", 16, {"row_stride": 203}),
    ((3, 5, 7, 9, 4), "float64", "axes", 16, {}),
    ((1024, 4096), "bfloat16", "mixed", 16, {}),
    ((5000,), "float32", "every second", 16, {}),  # one row, which Triton makes a constant of
]


def make_calls():
    import torch

    from sjlt.backends.triton import dropout as backend
    from sjlt.laws.dropout import Rule

    def new(shape, dtype, layout):
        dtype = getattr(torch, dtype)
        if layout == "columns":
            return torch.empty(shape[::-1], dtype=dtype, device="meta").t()
        if layout == "part":
            return torch.empty((shape[0], shape[1] + 3), dtype=dtype, device="meta")[:, 3:]
        if layout == "every second":
            return torch.empty((*shape, 2), dtype=dtype, device="meta")[..., 0]
        if layout == "axes":
            return torch.empty(shape[::-1], dtype=dtype, device="meta").permute(1, 3, 0, 2, 4)[:, ::2]
        return torch.empty(shape, dtype=dtype, device="meta")

    for shape, dtype, layout, bits, given in CALLS:
        given = dict(given)
        for name, size in (("seeds", shape[:1]), ("steps", ())):
            if given.get(name):
                given[name] = torch.empty(size, dtype=torch.int64, device="meta")
        rule = Rule(bits, 77, 1.5, **given)
        if dtype == "uint8":
            backend.mask(rule, torch.empty(shape, dtype=torch.bool, device="meta"))
            continue
        x = new(shape, dtype, "columns" if layout == "mixed" else layout)
        out = torch.empty(x.shape, dtype=x.dtype, device="meta") if layout == "mixed" else torch.empty_like(x)
        backend.drop(rule, x, out)
        if layout != "rows" or bits == 16:
            backend.drop_add(rule, x, new(x.shape, "float32", "rows"), out)
            backend.drop_stored(1.5, x, torch.empty(x.shape, dtype=torch.bool, device="meta"), out)


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target):
    check_compiled(__file__, target)


if __name__ == "__main__":
    from sjlt.backends.triton import dropout as triton_dropout

    compile_launches(sys.argv[1], make_calls, triton_dropout)
