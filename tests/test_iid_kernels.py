"""The iid law's Triton kernel: exact on integer data, in the interpreter and (marked `gpu`) on a device."""

import numpy as np
import pytest
import torch
from helpers import kernels
from helpers.cases import each_value, exhaustive_except, pairwise
from helpers.choices import iid_product, with_parts
from helpers.data import integers
from helpers.kernels import FLOATS, LAYOUTS, assert_exact, assert_untouched_around, filled, integral_matrix, poisoned

from sjlt import Sketch
from sjlt.kernels.config import arithmetic
from sjlt.kernels.config import iid as config
from sjlt.kernels.config.iid import choose
from sjlt.kernels.config.product import Device

pytestmark = pytest.mark.filterwarnings(  # NumPy's, when an fp16 sum overflows in the interpreter
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)

# (k, density): k * density is a power of 4, so the scale is a power of two.
EXACT = [(64, 1.0), (64, 0.25), (16, 0.25), (256, 0.0625), (1024, 2**-8)]


def check(S, n, adjoint=False, dtype="float32", out_dtype=None, device="cpu", x_in="rows", out_in="rows", add=False):
    """Check out = x S' (+ out), or y S (+ out), exactly."""
    matrix = integral_matrix(S) if adjoint else integral_matrix(S).T
    x = integers((n, matrix.shape[0]), "float64", seed=n)
    given = filled(x_in, x, dtype, device)
    out = poisoned(out_in, (n, matrix.shape[1]), out_dtype or dtype, device)
    start = np.zeros(out.shape)
    if add:
        start = integers(out.shape, "float64", seed=5) * 8
        out.copy_(torch.from_numpy(start))
    (kernels.adjoint if adjoint else kernels.project)(S, given, out, add)
    compute = torch.float64 if dtype == "float64" else torch.float32
    assert_exact(out, x @ matrix, start, round(S.n_components * S.density), compute)
    assert_untouched_around(out)


@each_value(n=[1, 17, 70], sketch=EXACT, adjoint=[False, True])
def test_products_are_exact(n, sketch, adjoint, kernels_on):
    k, density = sketch
    check(Sketch(70, k, density=density, seed=-3)[:, 5:], n, adjoint, device=kernels_on)


@pairwise(n=[5, 33], dtype=list(FLOATS), adjoint=[False, True])
def test_dtypes(n, dtype, adjoint, kernels_on):
    check(Sketch(64, 64, density=0.25, seed=1), n, adjoint, dtype, device=kernels_on)
    check(Sketch(33, 64, density=0.25, seed=1), n, adjoint, dtype, "float32", device=kernels_on, add=True)


@each_value(layout=list(LAYOUTS), adjoint=[False, True])
def test_layouts(layout, adjoint, kernels_on):
    S = Sketch(48, 64, density=0.25, seed=2)
    for dtype in ("float32", "bfloat16"):
        check(S, 19, adjoint, dtype, "float32", kernels_on, x_in=layout)
        check(S, 19, adjoint, dtype, "float32", kernels_on, out_in=layout)


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_precisions_are_exact_on_small_integers(precision, adjoint, kernels_on, parts, set_precision):
    set_precision(precision)
    check(Sketch(40, 64, density=0.25, seed=2), 18, adjoint, device=kernels_on)


@pytest.mark.parametrize("dtype", exhaustive_except(["float64"], ["float32", "float64"]))
@pytest.mark.exhaustive
def test_splits_are_added_in_a_fixed_order(dtype, kernels_on):
    """Long sums, split within and across programs, have the same bits in every run."""
    d = 3000 if dtype == "float32" else 600
    S = Sketch(d, 64, density=0.25, seed=9)
    assert choose(iid_product(3, d, 64, dtype, device=Device(4, 232448))).splits > 1
    check(S, 3, dtype=dtype, device=kernels_on)
    check(S, 3, dtype=dtype, device=kernels_on, add=True, out_in="columns")
    x = torch.randn(3, d, dtype=FLOATS[dtype], device=kernels_on)
    results = [torch.empty(3, 64, dtype=x.dtype, device=kernels_on) for _ in range(2)]
    for out in results:
        kernels.project(S, x, out, False)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "density", exhaustive_except([2**-15, 1 / 3, 1.0], [2**-15, 0.01, 0.0625 - 2**-17, 0.0625, 1 / 3, 1.0]), ids=str
)
def test_entries_equal_the_cpus(density, kernels_on):
    for d, k, offset in ((70, 40, 2**32 - 20), (20, 300, 2**62)):
        S = Sketch(offset + d, k, density=density, seed=2**63 + 1)[:, offset:]
        out = torch.full((d, k), torch.nan, dtype=torch.float64, device=kernels_on)
        kernels.project(S, torch.eye(d, dtype=torch.float64, device=kernels_on), out, False)
        np.testing.assert_array_equal(out.cpu().numpy(), S.toarray().T)


@with_parts("adjoint", [(False,), (True,)], default=[(True, "triple")])
def test_fp32_accuracy_at_any_scale(adjoint, kernels_on, parts):
    """Including values far larger than those that a vector's scale is estimated from."""
    S = Sketch(600, 500, density=0.5, seed=4)
    width = 500 if adjoint else 600
    x = torch.randn(20, width, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-10, 10)[:, None]
    x[3, 7] *= 1e6
    x[:, width // 2 : width // 2 + 8] *= 1e-4
    out = torch.empty(20, 600 if adjoint else 500, device=kernels_on)
    (kernels.adjoint if adjoint else kernels.project)(S, x.to(kernels_on), out, False)
    matrix = torch.from_numpy(S.toarray() if adjoint else S.toarray().T)
    exact = x.double() @ matrix
    assert ((out.cpu() - exact).norm(dim=1) / exact.norm(dim=1)).max() <= 1e-6


@with_parts(
    "dtype, bad",
    [(dtype, bad) for dtype in FLOATS for bad in (np.nan, np.inf)],
    default=[(dtype, np.nan, "pair") for dtype in FLOATS] + [("float32", np.inf, "triple")],
)
def test_non_finite_values_stay_in_their_vector(dtype, bad, kernels_on, parts):
    S = Sketch(70, 64, density=0.25, seed=4)
    x = integers((20, 70), "float64", seed=1)
    clean, x[7, 33] = x.copy(), bad
    results = []
    for numbers in (clean, x):
        out = torch.full((20, 64), torch.nan, dtype=FLOATS[dtype], device=kernels_on)
        kernels.project(S, torch.from_numpy(numbers).to(kernels_on, FLOATS[dtype]), out, False)
        results.append(out.cpu())
    reached = torch.from_numpy(S.toarray()[:, 33] != 0)
    assert not results[1][7, reached].isfinite().any()
    others = torch.arange(20) != 7
    assert torch.equal(results[1][others], results[0][others])


def test_empty_data(kernels_on):
    for shape in ((0, 5), (4, 0)):
        S = Sketch(shape[1], 20, density=0.5)
        out = torch.full((shape[0], 20), torch.nan, device=kernels_on)
        kernels.project(S, torch.ones(shape, device=kernels_on), out, False)
        assert torch.equal(out.cpu(), torch.zeros(shape[0], 20))
        kernels.adjoint(S, torch.ones(shape[0], 20, device=kernels_on), torch.empty(shape, device=kernels_on), False)


# --------------------------------------------------------------------------------- launches


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_splits_cover_the_sum(dtype, precision):
    for n in (1, 8, 17, 1000, 1 << 20):
        for terms in (1, 15, 64, 1000, 768, 1 << 24, 1 << 40):
            for out_dim in (1, 128, 4096):
                chosen = choose(iid_product(n, terms, out_dim, dtype, precision))
                per_split = chosen.terms_per_split
                assert (chosen.splits - 1) * per_split < terms <= chosen.splits * per_split
                assert per_split % chosen.block_reduce == 0
                assert per_split <= config.MAX_SPLIT_TERMS
                assert chosen.block_reduce % 16 == chosen.block_out % 16 == 0
                assert chosen.terms_per_sum % chosen.block_reduce == 0
                if chosen.mode != arithmetic.FP64:
                    limit = config.NATIVE_TERMS if chosen.mode == arithmetic.NATIVE else config.SPLIT_FP32_TERMS
                    assert min(chosen.terms_per_sum, per_split) <= limit
                if chosen.unmasked:
                    assert terms % chosen.block_reduce == 0
