"""Tensors in every layout, and exact checks of the kernels' products on integer-valued data."""

import math

import numpy as np
import torch

from helpers.data import integers
from sjlt.backends import triton_backend

FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

# Layouts of a tensor of shape (n, d) in memory that `new` allocates.
LAYOUTS = {
    "rows": lambda n, d, new: new(n, d),
    "columns": lambda n, d, new: new(d, n).t(),
    "every second column": lambda n, d, new: new(n, 2 * d)[:, ::2],
    "every third row": lambda n, d, new: new(3 * n, d)[::3],
    "inner part": lambda n, d, new: new(n + 3, d + 9)[1:-2, 4:-5],
    "inner part of columns": lambda n, d, new: new(d + 9, n + 3).t()[1:-2, 4:-5],
    "aligned part": lambda n, d, new: new(n, d + 32)[:, 16:-16],
    "padded rows": lambda n, d, new: new(n, d // 8 * 8 + 16)[:, :d],
    "other axes between": lambda n, d, new: new(d, 2, n, 3).permute(2, 3, 0, 1)[:, 1, :, 1],
}


def launches_run():
    """Whether launches run. The first call of a kind is also made once in order to compile all its kernels."""
    from sjlt.backends.triton import launcher

    return launcher._to_compile.get() is None


def poisoned(layout, shape, dtype, device="cpu"):
    """An output filled and surrounded with NaN, so that unwritten elements and writes outside are detected."""
    return LAYOUTS[layout](*shape, lambda *size: torch.full(size, math.nan, dtype=FLOATS[dtype], device=device))


def filled(layout, array, dtype, device="cpu"):
    """The values of `array`, surrounded with NaN, so that reads outside are detected."""
    return poisoned(layout, array.shape, dtype, device).copy_(torch.from_numpy(np.array(array, np.float64)))


def large_first(x):
    """Yield (normal data with larger first features, the error bound for an fp32 result relative to its norm)."""
    for factor in (100, 10_000):
        larger = x.clone()
        larger[:, :64] *= factor
        yield larger, 1e-6
    larger = x.clone()
    larger[:, 0] = 16_400  # just above 2^14, where fp32 is coarsest, and nearly all of the norm
    yield larger, 2e-6


def product_error(result, exact):
    """The largest error of a vector relative to its norm."""
    return ((result.double() - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-300)).max().item()


def of_many_sizes(n, d):
    """Vectors over 60 decades, two of them zero."""
    x = torch.randn(n, d, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    x *= 10.0 ** torch.linspace(-30, 30, n, device="cuda")[:, None]
    x[5] = x[n - 1] = 0
    return x


def steep(n, d, rising):
    """Vectors whose values rise or fall over 80 decades."""
    decades = torch.linspace(-44, 37, d, dtype=torch.float64, device="cuda")
    x = torch.randn(n, d, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).double()
    return (x * 10 ** (decades if rising else decades.flip(0))).float()


def assert_untouched_around(view):
    """Assert that the memory around a result is still poisoned."""
    memory = (view if view._base is None else view._base).clone()
    torch.as_strided(memory, view.shape, view.stride(), view.storage_offset()).fill_(math.nan)
    assert memory.isnan().all(), "written outside of out"


def assert_exact(actual, integral, start, nnz, compute):
    """Assert `actual` == `start` + `integral` / sqrt(nnz), exactly for dyadic sqrt(nnz), else up to rounding."""
    expected = start + integral * nnz**-0.5
    numbers = actual.cpu().double().numpy()
    if math.isqrt(nnz) ** 2 == nnz and math.isqrt(nnz).bit_count() == 1:
        assert np.array_equal(torch.from_numpy(expected).to(actual.dtype).double(), expected), "choose smaller data"
        np.testing.assert_array_equal(numbers, expected)
    else:  # the factor, its product and the result are rounded
        rounding = 2 * torch.finfo(compute).eps + torch.finfo(actual.dtype).eps
        assert (np.abs(numbers - expected) <= rounding * (np.abs(start) + np.abs(expected))).all()


def integral_matrix(S):
    """S without its scale, with entries 0, 1 and -1."""
    matrix = S.to_scipy()
    matrix.data = np.sign(matrix.data)
    return matrix


def project(S, x, out, accumulate=False):
    """Write x Sᵀ (+ out) to out with the Triton backend."""
    triton_backend(S.spec).project(S.spec, x, out, accumulate)


def adjoint(S, y, out, accumulate=False):
    """Write y S (+ out) to out with the Triton backend."""
    triton_backend(S.spec).adjoint(S.spec, y, out, accumulate)


def check_project(S, n, dtype="float32", out_dtype=None, device="cpu", x_in="rows", out_in="rows", x=None, add=False):
    """Check out = x S' (+ out) of the kernels exactly; x is drawn unless given as (array, tensor)."""
    array, tensor = x or drawn(n, S.n_features, dtype, x_in, device)
    before = tensor.clone()
    out = poisoned(out_in, (n, S.n_components), out_dtype or dtype, device)
    check(project, S, tensor, out, (integral_matrix(S) @ array.T).T, add)
    assert torch.equal(tensor, before), "the input was written to"


def check_adjoint(S, n, dtype="float32", out_dtype=None, device="cpu", x_in="rows", out_in="rows", x=None, add=False):
    """Check out = y S (+ out) of the kernels exactly; x, if given, is (array, tensor)."""
    array, tensor = x or drawn(n, S.n_components, dtype, x_in, device)
    before = tensor.clone()
    out = poisoned(out_in, (n, S.n_features), out_dtype or dtype, device)
    check(adjoint, S, tensor, out, (integral_matrix(S).T @ array.T).T, add)
    assert torch.equal(tensor, before), "the input was written to"


def drawn(n, width, dtype, layout, device):
    array = integers((n, width), "float64", seed=n + width)
    return array, filled(layout, array, dtype, device)


def check(product, S, x, out, integral, add):
    start = np.zeros(out.shape)
    if add:
        start = integers(out.shape, "float64", seed=5) * 8
        out.copy_(torch.from_numpy(start))
    product(S, x, out, add)
    assert_exact(out, integral, start, S.nnz, torch.float64 if x.dtype == torch.float64 else torch.float32)
    assert_untouched_around(out)
