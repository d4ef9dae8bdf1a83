"""All kernels compile for their target architectures and fit in shared memory."""

import sys

import pytest
import triton
from helpers.compilation import TARGETS, check_compiled, compile_launches

PORTABLE = {
    *(f"{way}_{kernel}" for way in ("project", "adjoint") for kernel in ("tensor_core", "row_gather", "few_vectors")),
    *("write_entries", "project_one_tile", "adjoint_one_tile", "write_dense_matrix"),
    *("multiply_iid", "reduce_partial_sums", "scale_vectors", "dropout_flat", "dropout_tiles"),
    "residual_gradient",
    *("encode_columns", "project_sparse", "gather_sparse", "project_sparse_iid", "gather_sparse_iid"),
}
NVIDIA = {"encode_groups", "project_staged", "project_scattered", "project_warp_tiles", "project_sparse_shared"}
NVIDIA |= {"project_lane_sums"}
NVIDIA |= {"encode_offsets", "adjoint_staged", "multiply_tall", "encode_chunks", "project_codes_ampere"}
HOPPER = {"project_hopper", "adjoint_hopper", "multiply_iid_hopper", "project_codes_hopper"}

# (n, d, k, law, dtype, layout): tall, square, wide and narrow data; full and partial tiles; one and many vectors.
PRODUCTS = [
    (65_536, 768, 256, {"nnz": 4}, "float32", "rows"),
    (512, 262_144, 1024, {"nnz": 4}, "float32", "columns"),
    (2000, 301, 300, {"nnz": 5}, "bfloat16", "rows"),
    (8, 1 << 24, 4096, {"nnz": 4}, "float32", "columns"),
    (65_536, 4096, 128, {"density": 1 / 3}, "bfloat16", "rows"),
    (65_536, 4096, 512, {"nnz": 4}, "bfloat16", "rows"),
    (2000, 301, 300, {"nnz": 5}, "float32", "rows"),
    (2000, 4096, 128, {"nnz": 1}, "float32", "rows"),
    (2000, 4096, 128, {"nnz": 1}, "bfloat16", "rows"),
    (100, 128, 64, {"nnz": 64}, "float16", "columns"),
    (70, 500, 1000, {"nnz": 3}, "float64", "rows"),
    (8, 1 << 27, 4096, {"nnz": 4}, "float32", "rows"),
    (1, 1 << 28, 4096, {"nnz": 1}, "float32", "rows"),
    (65_536, 768, 128, {"density": 1 / 3}, "float32", "rows"),
    (2000, 301, 300, {"density": 0.01}, "float16", "columns"),
    (70, 500, 1000, {"density": 0.5}, "float64", "rows"),
    (8, 1 << 24, 4096, {"density": 1.0}, "float32", "rows"),
    (65_536, 768, 100, {"nnz": 4}, "float32", "rows"),
    (65_536, 768, 30, {"nnz": 3}, "bfloat16", "rows"),
    (1000, 20_001, 60, {"nnz": 8}, "float16", "columns"),
    (1000, 768, 30, {"nnz": 3}, "float32", "rows"),
    (2000, 301, 100, {"nnz": 8}, "bfloat16", "columns"),
    (65_536, 768, 1024, {"nnz": 4, "stacks": 4}, "float32", "rows"),
    (512, 262_144, 1024, {"nnz": 8, "stacks": 2}, "float32", "columns"),
    (2000, 301, 600, {"nnz": 4, "stacks": 2}, "bfloat16", "rows"),
]

ON_HOPPER = [  # the same, for one, two and more tiles, with and without splits
    (1 << 20, 4096, 512, {"nnz": 4}, "float32", "rows"),
    (512, 1 << 18, 1024, {"nnz": 8}, "float32", "columns"),
    (1 << 20, 768, 128, {"nnz": 8}, "float16", "rows"),
    (1 << 20, 768, 128, {"density": 0.01}, "bfloat16", "rows"),
    # From codes of the sketch: rows of any length, loaded by TMA, by copies, or through registers.
    (200_000, 1024, 300, {"nnz": 4}, "float32", "rows"),
    (200_000, 1023, 64, {"nnz": 3}, "bfloat16", "rows"),
    (1001, 50_000, 777, {"nnz": 8}, "float32", "columns"),
    (1 << 20, 384, 64, {"nnz": 4}, "float32", "rows"),
    (200_000, 1001, 1000, {"nnz": 4}, "float32", "rows"),
    (200_000, 1024, 300, {"nnz": 4}, "float16", "rows"),
    (200_000, 1022, 300, {"nnz": 5}, "float16", "rows"),
    (1000, 175_397, 200, {"nnz": 4}, "bfloat16", "columns"),
    (1001, 50_000, 20, {"nnz": 8}, "bfloat16", "columns"),
    (1024, 50_000, 1000, {"nnz": 8}, "float32", "columns"),
    (100, 2_000_000, 16, {"nnz": 4}, "float32", "rows"),
    (1 << 20, 768, 128, {"nnz": 4}, "float32", "rows"),
    (1 << 20, 768, 256, {"nnz": 1}, "float32", "rows"),
    (1 << 20, 768, 256, {"nnz": 2}, "float32", "rows"),
    (1 << 20, 4096, 512, {"nnz": 8}, "float32", "rows"),
    (1 << 20, 4096, 128, {"nnz": 4}, "float32", "rows"),
    (1 << 20, 4096, 512, {"nnz": 4}, "bfloat16", "rows"),
    (1 << 20, 1 << 17, 128, {"nnz": 4}, "float32", "rows"),
    (1 << 20, 1 << 17, 128, {"nnz": 4}, "bfloat16", "rows"),
    (1 << 20, 768, 128, {"density": 0.5}, "bfloat16", "rows"),
    (1 << 20, 768, 128, {"density": 0.5}, "float16", "rows"),
    (1024, 1 << 14, 1024, {"nnz": 4}, "float32", "columns"),
    (1 << 16, 1 << 10, 128, {"nnz": 2}, "float32", "columns"),
    (512, 1 << 18, 1024, {"nnz": 8}, "bfloat16", "columns"),
    (1 << 16, 1 << 10, 128, {"nnz": 1}, "float16", "columns"),
    # Shared products, whose sums are exchanged in the memory of results or in other shared memory.
    (20_000, 768, 96, {"nnz": 4}, "float32", "rows"),
    (17_000, 6144, 200, {"nnz": 4}, "float16", "columns"),
    (52_000, 1537, 100, {"nnz": 2}, "float16", "rows"),
    (40_000, 12_001, 720, {"nnz": 3}, "float16", "rows"),
    # Results in shared memory, programs that keep in step, and both.
    (472_599, 384, 1759, {"nnz": 4}, "float16", "rows"),
    (200_000, 401, 901, {"nnz": 4}, "float16", "rows"),
    (400_001, 300, 1001, {"nnz": 4}, "bfloat16", "columns"),
    (50_000, 768, 1999, {"nnz": 4}, "bfloat16", "columns"),
    (322_899, 235, 49, {"nnz": 4}, "float16", "rows"),
    (236_299, 384, 1759, {"nnz": 4}, "float32", "rows"),
]

ADDED_ON_HOPPER = [  # accumulated into an fp32 result; loads are as wide as for the others
    (200_000, 1024, 384, {"nnz": 4}, "float32", "rows"),
    (200_000, 1024, 300, {"nnz": 4}, "bfloat16", "rows"),
    (1024, 50_000, 1000, {"nnz": 8}, "bfloat16", "columns"),
]

STAGED = [  # kernels that address shared memory themselves
    (512, 1 << 18, 1024, {"nnz": 4, "stacks": 4}, "float32", "columns"),
    (1024, 1 << 16, 4096, {"nnz": 4, "stacks": 4}, "float32", "columns"),
    (1 << 18, 4096, 512, {"nnz": 4, "stacks": 4}, "float32", "rows"),
    (512, 1 << 20, 2048, {"nnz": 8, "stacks": 4}, "float64", "columns"),
    (301, 300_001, 1200, {"nnz": 8, "stacks": 4}, "float32", "columns"),
    (200_000, 777, 700, {"nnz": 4, "stacks": 2}, "float32", "rows"),
    (200_001, 1000, 300, {"nnz": 3}, "float64", "rows"),
    (33, 1 << 20, 128, {"nnz": 2}, "float64", "columns"),
    (1, 20_000_000, 1088, {"nnz": 8}, "bfloat16", "rows"),
    (8, 2_000_000, 700, {"nnz": 3}, "float16", "rows"),
    (8, 60_000_000, 1024, {"nnz": 4}, "float16", "rows"),  # scattered_sums with columns that are spread
    (4, 20_000_000, 834, {"nnz": 8}, "float32", "rows"),  # the same by slot
    (5, 2_000_000, 100, {"nnz": 1}, "float32", "part"),
    (1, 20_000_000, 50, {"nnz": 4}, "bfloat16", "rows"),
    (1, 20_000_001, 75, {"nnz": 4}, "float32", "part"),
    (4, 20_000_000, 90, {"nnz": 8}, "float32", "columns"),
    (2, 20_000_000, 128, {"nnz": 4}, "float16", "rows"),
    (100, 6_800_000, 18, {"nnz": 3}, "float16", "columns"),
    (6, 2_000_000, 1600, {"nnz": 8}, "float32", "columns"),
    (32, 1_000_000, 1216, {"nnz": 4}, "float32", "columns"),
    (16, 2_000_000, 1400, {"nnz": 8}, "bfloat16", "rows"),
    (2, 2_000_000, 1200, {"nnz": 12, "stacks": 4}, "float64", "rows"),
    (16, 2_000_000, 300, {"nnz": 8}, "bfloat16", "part"),
    (24, 2_000_001, 1216, {"nnz": 4}, "float16", "columns"),
]

STAGED_ADJOINTS = [  # in every order, with and without wide accesses
    (254_527, 1024, 1152, {"nnz": 4}, "float32", "rows"),
    (104_282, 384, 384, {"nnz": 3}, "float16", "rows"),
    (21_624, 3072, 192, {"nnz": 4}, "float16", "columns"),
    (21_619, 3072, 192, {"nnz": 4}, "float16", "columns"),
    (100_000, 3279, 300, {"nnz": 4}, "float32", "rows"),
    (100_000, 1000, 300, {"nnz": 4}, "float64", "rows"),
    (49_175, 66, 2048, {"nnz": 3}, "bfloat16", "rows"),
    (4096, 8192, 4000, {"nnz": 4}, "float32", "columns"),
]

CODES = [  # for blocks of 2 to 64 columns, tiles of 32 to 128 rows, copies of 4 to 16 bytes and loads of elements
    (96_000, 3072, 1856, {"nnz": 4}, "bfloat16", "rows"),
    (68_000, 1000, 192, {"nnz": 8}, "bfloat16", "part"),
    (33_000, 1001, 1728, {"nnz": 2}, "float32", "rows"),
    (4000, 50_000, 4000, {"nnz": 1}, "float16", "columns"),
    (180, 671_215, 1792, {"nnz": 8}, "float32", "rows"),
    (1001, 100_001, 1448, {"nnz": 8}, "float32", "columns"),
    (1001, 100_001, 200, {"nnz": 50}, "float16", "columns"),
    (30, 10_000_000, 300, {"nnz": 10}, "float16", "rows"),
    (60, 3_000_000, 2000, {"nnz": 4}, "bfloat16", "columns"),
    (5000, 5001, 20, {"nnz": 4}, "float16", "rows"),
    (5000, 5000, 60, {"nnz": 1}, "float32", "rows"),
    (5000, 5000, 50, {"nnz": 20}, "bfloat16", "columns"),
]

DENSE = [(65_536, 768, 200, {"nnz": 4}, "bfloat16", "rows"), (65_536, 768, 4096, {"nnz": 32}, "float16", "rows")]

SPARSE = [  # (n, nonzeros, k, law, dtype, index dtype)
    (200_000, 20_000_000, 512, {"nnz": 4}, "float32", "int64"),
    (8, 10_000_000, 300, {"density": 1 / 3}, "float32", "int32"),
    (1, 10_000_000, 4096, {"nnz": 1}, "bfloat16", "int64"),
    (1000, 100_000, 300, {"nnz": 5}, "float64", "int32"),
    (1000, 100_000, 1000, {"nnz": 8, "stacks": 4}, "float16", "int64"),
    (1000, 100_000, 2000, {"nnz": 16}, "float32", "int32"),
    (1000, 100_000, 64, {"density": 0.01}, "float64", "int64"),
]

DROPOUT = [  # (shape, dtype, layout, bits, other arguments)
    ((1 << 20,), "bfloat16", "rows", 16, {}),
    ((4096, 1000), "float32", "rows", 8, {"seeds": True, "steps": True}),
    ((1 << 20,), "uint8", "rows", 16, {}),
    *(((1 << 20,), dtype, "rows", bits, {}) for dtype in ("bfloat16", "float32", "uint8") for bits in (8, 16, 32)),
    ((1 << 20,), "float16", "rows", 16, {}),
    ((1 << 20,), "float64", "rows", 16, {}),
    ((999,), "bfloat16", "rows", 16, {"offset": 3}),
    ((999,), "float32", "rows", 32, {"steps": True}),
    ((4096, 1024), "bfloat16", "rows", 16, {"seeds": True}),
    ((1024, 4096), "bfloat16", "columns", 16, {}),
    ((1024, 4096), "float32", "columns", 32, {}),
    ((1000, 333), "float16", "columns", 8, {"offset": 1}),
    ((64, 200), "float32", "part", 16, {"row_stride": 203}),
    ((3, 5, 7, 9, 4), "float64", "axes", 16, {}),
    ((1024, 4096), "bfloat16", "mixed", 16, {}),
    ((5000,), "float32", "every second", 16, {}),  # one row: Triton turns its length into a constant
]


def new(shape, dtype, layout):
    import torch

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


def multiply(n, d, k, law, dtype, layout):
    from helpers.kernels import adjoint, project

    from sjlt import Sketch

    S, x, y = Sketch(d, k, **law), new((n, d), dtype, layout), new((n, k), dtype, layout)
    project(S, x, y)
    adjoint(S, y, x)


def add(n, d, k, law, dtype, layout):
    from helpers.kernels import project

    from sjlt import Sketch

    project(Sketch(d, k, **law), new((n, d), dtype, layout), new((n, k), "float32", layout), True)


def multiply_sparse(n, nonzeros, k, law, dtype, index):
    from sjlt import Sketch
    from sjlt.backends import triton_backend

    S = Sketch(1 << 20, k, **law)
    backend, values = triton_backend(S.spec), new((nonzeros,), dtype, "rows")
    indptr, rows, columns = (new((size,), index, "rows") for size in (n + 1, nonzeros, nonzeros))
    backend.project_sparse(S.spec, values, indptr, columns, new((n, k), dtype, "rows"), False)
    backend.gather_sparse(S.spec, new((n, k), dtype, "rows"), rows, columns, values)


def drop(shape, dtype, layout, bits, given):
    import torch

    from sjlt.backends.triton import dropout
    from sjlt.laws.dropout import Rule

    given = dict(given)
    for name, size in (("seeds", shape[:1]), ("steps", ())):
        if given.get(name):
            given[name] = torch.empty(size, dtype=torch.int64, device="meta")
    rule = Rule(bits, 77, 1.5, **given)
    if dtype == "uint8":
        dropout.mask(rule, torch.empty(shape, dtype=torch.bool, device="meta"))
        return
    x = new(shape, dtype, "columns" if layout == "mixed" else layout)
    out = torch.empty(x.shape, dtype=x.dtype, device="meta") if layout == "mixed" else torch.empty_like(x)
    dropout.drop(rule, x, out)
    if layout != "rows" or bits == 16:
        dropout.drop_add(rule, x, new(x.shape, "float32", "rows"), out)
        dropout.drop_stored(1.5, x, torch.empty(x.shape, dtype=torch.bool, device="meta"), out)


def multiply_by(name, n, d, k, law, dtype, layout):
    """A projection by the launch of a module of `sjlt.kernels.config`."""
    from importlib import import_module

    from helpers.kernels import project

    from sjlt import Sketch
    from sjlt.backends.triton import exact

    choose, exact.choose = exact.choose, import_module(f"sjlt.kernels.config.{name}").launch
    try:
        project(Sketch(d, k, **law), new((n, d), dtype, layout), new((n, k), dtype, layout))
    finally:
        exact.choose = choose


def differentiate(m, n):
    from sjlt.backends.triton import residual

    residual.residual_gradient(*(new(shape, "float64", "rows") for shape in ((m, n), (n, 1), (m, 1))))


def multiply_tall(m, n, columns):
    from sjlt.backends.triton import tall_product

    tall_product.multiply(new((m, n), "float32", "rows"), new((n, columns), "float64", "rows"))


def make_calls(on, nvidia, hopper):
    import torch

    on()
    for call in PRODUCTS:
        multiply(*call)
    for call in DROPOUT:
        drop(*call)
    for call in DENSE:
        multiply_by("dense_matrix", *call)
    for call in SPARSE:
        multiply_sparse(*call)
    for columns in (512, 100, 4096):
        differentiate(1 << 20, columns)
    torch.set_float32_matmul_precision("high")
    multiply(2000, 301, 300, {"nnz": 5}, "float32", "rows")
    torch.set_float32_matmul_precision("highest")
    if nvidia:
        multiply_tall(1 << 20, 2048, 128)
        on(asynchronous_copies=True)
        for call in STAGED + STAGED_ADJOINTS:
            multiply(*call)
        for call in CODES:
            multiply_by("ampere_codes", *call)
        for call in SPARSE:
            multiply_sparse(*call)
    if hopper:
        on(hopper=True)
        for call in ON_HOPPER:
            multiply(*call)
        for call in ADDED_ON_HOPPER:
            add(*call)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target):
    from sjlt.backends.triton.device import GLUON_VERSIONS
    from sjlt.backends.triton.launcher import DIRECT

    nvidia = target.startswith("sm_") and DIRECT
    hopper = target == "sm_90" and triton.__version__.startswith(GLUON_VERSIONS)
    kernels = PORTABLE | (NVIDIA if nvidia else set()) | (HOPPER if hopper else set())
    check_compiled(__file__, target, kernels, *(["nvidia"] if nvidia else []), *(["hopper"] if hopper else []))


if __name__ == "__main__":
    target, *which = sys.argv[1:]
    compile_launches(target, lambda on: make_calls(on, "nvidia" in which, "hopper" in which))
