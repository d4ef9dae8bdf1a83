"""Norm-wise accuracy of the kernels against fp64: every arithmetic mode, data of every scale, non-finite data."""

import math

import numpy as np
import pytest
import torch
from helpers import kernels
from helpers.cases import each_value
from helpers.choices import with_parts
from helpers.data import integers
from helpers.kernels import FLOATS, filled, integral_matrix, large_first

from sjlt import Sketch
from sjlt.backends.triton import exact as triton_exact
from sjlt.backends.triton.device import precision
from sjlt.backends.triton.vector_scales import vector_scales
from sjlt.kernels.config import arithmetic
from sjlt.kernels.config.exact import choose

pytestmark = pytest.mark.filterwarnings(  # NumPy's, when an fp16 sum overflows in the interpreter
    "ignore:overflow encountered in (cast|multiply):RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning"
)
S = Sketch(2500, 256, nnz=4, seed=5)[:, 100:2404]  # more groups of chunks than one partial sum covers
SHORT = S[:, :150]
NON_FINITE = (math.nan, math.inf, -math.inf)


def normal(n, d, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)


def project(S, x, out_dtype=None):
    out = torch.full((x.shape[0], S.n_components), math.nan, dtype=out_dtype or x.dtype, device=x.device)
    kernels.project(S, x, out, False)
    return out.cpu().double().numpy()


def adjoint(S, y, out_dtype=None):
    out = torch.full((y.shape[0], S.n_features), math.nan, dtype=out_dtype or y.dtype, device=y.device)
    kernels.adjoint(S, y, out, False)
    return out.cpu().double().numpy()


def products(S, x, y, dtype, device):
    """Yield (result, exact) of both products, for the arrays x and y converted to dtype."""
    x, y = filled("rows", x, dtype, device), filled("rows", y, dtype, device)
    scale = S.nnz**-0.5
    yield project(S, x), (integral_matrix(S) @ x.cpu().double().numpy().T).T * scale
    yield adjoint(S, y), (integral_matrix(S).T @ y.cpu().double().numpy().T).T * scale


def errors(result, exact):
    """Norm-wise error of each vector."""
    assert np.isfinite(result).all()
    return np.linalg.norm(result - exact, axis=1) / np.linalg.norm(exact, axis=1)


# --------------------------------------------------------------------------------- fp32


def scaled_rows(z):
    return z * np.logspace(-30, 30, len(z))[:, None]


def scaled_features(z):
    return z * np.exp(8 * normal(*z.shape, seed=1))


def with_zeros(first, last):
    """Set zeros from one fraction of the width to another: padding, or all features that a sample sees."""

    def make(z):
        z = z.copy()
        z[:, int(first * z.shape[1]) : math.ceil(last * z.shape[1])] = 0
        return z

    return make


def with_outlier(place, factor):
    def make(z):
        z = z.copy()
        z[:, int(place * z.shape[1])] *= factor
        return z

    return make


NUMBERS = {
    "normal": lambda z: z,
    "rows of all scales": scaled_rows,
    "features of many scales": scaled_features,
    "zeros first": with_zeros(0, 0.9),
    "zeros last": with_zeros(0.1, 1),
    "zeros in the middle": with_zeros(0.3, 0.8),
    "outlier": with_outlier(0.1, 1e9),
    "outlier in the middle": with_outlier(0.501, 1e9),
    "small outlier": with_outlier(0.1, 300),
    "one vector with an outlier": lambda z: np.concatenate([with_outlier(0.1, 1e30)(z[:1]), z[1:]]),
    "integers": lambda z: np.rint(100 * z),
    "positive": np.abs,
    "tiny": lambda z: z * 1e-30,
    "huge": lambda z: z * 1e35,
}


@with_parts(
    "numbers",
    [(name,) for name in NUMBERS],
    default=[(name, "pair") for name in list(NUMBERS)[::16]] + [(name, "triple") for name in list(NUMBERS)[1::16]],
)
def test_fp32(numbers, parts, kernels_on):
    n = 66
    x, y = NUMBERS[numbers](normal(n, 150)), NUMBERS[numbers](normal(n, 256))
    for result, exact in products(SHORT, x, y, "float32", kernels_on):
        assert errors(result, exact).max() <= 1e-6


def scales_of(x):
    return vector_scales(arithmetic.FP16_PAIR, x)(x)


@pytest.mark.parametrize("d", [8, 33, 100, 250])
def test_scales_ignore_zeros(d, kernels_on):
    """All features of vectors this short are examined before a vector counts as zero."""
    x = normal(300, d) * (np.random.default_rng(1).random((300, d)) < 0.03)
    x[::2], x[1] = normal(150, d), 0
    scales = scales_of(torch.from_numpy(x).float().to(kernels_on)).cpu().double().numpy()
    zeros = (x == 0).all(axis=1)
    assert (scales[zeros] == 2.0**126).all()
    seen = (np.abs(x).max(axis=1) * scales)[~zeros]
    assert ((seen >= 2**6) & (seen < 2**15)).all()  # neither lost in fp16 nor overflowing it at 2^16


def test_scale_needs_more_than_one_sampled_value(kernels_on):
    """If the sample of a vector has a single small nonzero value, more features are examined."""
    x = torch.zeros(3, 768, device=kernels_on)
    x[0, 386] = x[2, 386] = 1e-4
    x[1, 200:260] = x[2, 200:260] = 1
    scales = scales_of(x).cpu()
    assert scales.tolist() == [2.0**20, 2.0**6, 2.0**6]


@pytest.mark.gpu
def test_reduction_waits_for_the_partial_sums():
    """The reduction is launched before the partial sums are written; consecutive calls have different data."""
    S = Sketch(2**14, 1024)
    torch.manual_seed(0)
    data = [torch.randn(512, 2**14, device="cuda") for _ in range(3)]
    for transposed in (False, True):  # both kinds of kernel
        data = [x.t().contiguous().t() if transposed else x for x in data]
        product = triton_exact.describe(S.spec, data[0], S.project(data[0]), False, adjoint=False)
        assert choose(product).splits > 1
        expected = []
        for x in data:
            torch.cuda.synchronize()
            expected.append(S.project(x))
            exact = S.project(x.double())
            assert errors(expected[-1].cpu().double().numpy(), exact.cpu().numpy()).max() <= 1e-6
        results = [S.project(x) for _ in range(50) for x in data]
        for i, result in enumerate(results):
            assert torch.equal(result, expected[i % 3])


@with_parts("numbers", [("normal",), ("positive",)], default=[("positive", "triple")])
def test_long_sums(numbers, parts, kernels_on):
    x, y = NUMBERS[numbers](normal(2, S.n_features)), normal(2, 256)
    for result, exact in products(S, x, y, "float32", kernels_on):
        assert errors(result, exact).max() <= 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("k", [128, 1000])
@pytest.mark.parametrize("n", [1, 8, 70])
def test_very_long_sums(n, k, parts):
    S = Sketch(2**20, k, nnz=4)
    torch.manual_seed(0)
    for make in (torch.randn, torch.rand):
        x = make(n, 2**20)
        exact = (integral_matrix(S) @ x.double().numpy().T).T / 2
        assert errors(project(S, x.cuda()), exact).max() <= 1e-6
        assert errors(project(S, x.T.contiguous().cuda().T), exact).max() <= 1e-6


@pytest.mark.gpu  # the interpreter's dots differ
@pytest.mark.parametrize(("d", "k"), [(2048, 256), (4096, 512), (50_000, 256)])
@pytest.mark.parametrize("entries", [{"nnz": nnz} for nnz in (1, 2, 3, 4, 8, 16)] + [{"density": 1.0}], ids=str)
def test_sums_with_large_first_terms(entries, d, k, parts):
    """Tensor cores round such a sum down at every step; splitting it loses less."""
    S = Sketch(d, k, **entries)
    for x, bound in large_first(torch.from_numpy(normal(100, d)).cuda()):
        exact = S.project(x.double()).cpu().numpy()
        for x_in_memory in (x, x.t().contiguous().t()):
            assert errors(project(S, x_in_memory), exact).max() <= bound


def test_largest_values(parts, kernels_on):
    """Up to bf16's largest value, results are finite wherever fp32 can represent them."""
    x, y = np.zeros((66, 150)), np.zeros((66, 256))
    x[:, 7] = y[:, 7] = np.linspace(3.3e38, 3.389e38, 66)
    x[::2], y[::2] = -x[::2], -y[::2]
    for result, exact in products(SHORT, x, y, "float32", kernels_on):
        assert errors(result, exact).max() <= 1e-6


@pytest.mark.gpu  # the interpreter mishandles bf16 subnormals
@pytest.mark.parametrize("scale", [1e-34, 1e-36, 1e-38, 1e-41])
def test_subnormal_values(scale, parts):
    """bf16 resolves 2^-133, which limits the accuracy near and below fp32's smallest normal values."""
    x, y = normal(66, 150) * scale, normal(66, 256) * scale
    for result, exact in products(SHORT, x, y, "float32", "cuda"):
        assert np.abs(result - exact).max() <= 20 * 2.0**-133 + 1e-6 * np.abs(exact).max()


@with_parts(
    "name, bound",
    [("highest", 1e-6), ("high", 2e-5), ("medium", 5e-3)],
    default=[("medium", 5e-3, "pair")],
)
def test_precision_follows_torchs_setting(name, bound, parts, set_precision, kernels_on):
    set_precision(name)
    results = products(SHORT, normal(66, 150), normal(66, 256), "float32", kernels_on)
    projected, back = (errors(result, exact).max() for result, exact in results)
    assert max(projected, back) <= bound
    if name != "highest":  # no more precise than requested; but on CUDA, `staged_adjoint` adds in fp32
        assert (projected if kernels_on == "cuda" else min(projected, back)) > bound / 100
    x, y = scaled_rows(normal(66, 150)), scaled_rows(normal(66, 256))
    for result, exact in products(SHORT, x, y, "float32", kernels_on):
        assert errors(result, exact).max() <= bound


# --------------------------------------------------------------------------------- other dtypes


@pytest.mark.parametrize("n", [2, pytest.param(66, marks=pytest.mark.exhaustive)])
def test_fp64(n, set_precision, kernels_on):
    rng = np.random.default_rng(0)
    set_precision("medium")  # affects fp32 only
    for result, exact in products(SHORT, rng.random((n, 150)) - 0.5, rng.random((n, 256)), "float64", kernels_on):
        assert errors(result, exact).max() <= 1e-14


@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        (2, "float16"),
        (66, "bfloat16"),
        pytest.param(2, "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param(66, "float16", marks=pytest.mark.exhaustive),
    ],
)
def test_16_bit_results_are_rounded_once(n, dtype, set_precision, kernels_on):
    set_precision("medium")
    rounding = torch.finfo(FLOATS[dtype]).eps / (1 if kernels_on == "cpu" else 2)  # the interpreter truncates bf16
    for result, exact in products(SHORT, normal(n, 150), normal(n, 256), dtype, kernels_on):
        assert (np.abs(result - exact) <= rounding * np.abs(exact) * (1 + 1e-5) + 1e-5).all()


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.exhaustive), 66])
def test_overflow_of_fp16_gives_infinities(n, kernels_on):
    x = np.full((n, 150), 60_000.0)
    x[:, ::2] *= -1
    x = filled("rows", x, "float16", kernels_on)
    wide, narrow = project(SHORT, x, torch.float32), project(SHORT, x)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(narrow, wide.astype(np.float16))
    assert np.isinf(narrow).any()
    assert np.isfinite(narrow).any()


# --------------------------------------------------------------------------------- non-finite values


@with_parts(
    "n, dtype, value",
    [(n, t, v) for n, t in ((66, "float32"), (66, "bfloat16"), (2, "float32"), (2, "float64")) for v in NON_FINITE],
    default=[
        (66, "float32", -math.inf, "triple"),
        (2, "float64", math.inf, "pair"),
    ],
)
def test_non_finite_values(n, dtype, value, kernels_on, parts):
    """They reach each of their entries, no other tile, and no other vector, whose results stay exact."""
    row, feature = n // 2, 77
    array = integers((n, 150), "float64")
    x = filled("rows", array, dtype, kernels_on)
    x[row, feature] = value
    reached = SHORT.entries(feature, feature + 1)[0][:, 0]
    tile = np.arange(256) // 128
    others = np.arange(n) != row
    result = project(SHORT, x)
    assert not np.isfinite(result[row, reached]).any()
    assert np.isfinite(result[row, tile != tile[reached[0]]]).all()
    np.testing.assert_array_equal(result[others], (SHORT.to_scipy() @ array[others].T).T)

    array = integers((n, 256), "float64")
    y = filled("rows", array, dtype, kernels_on)
    y[row, reached[0]] = value
    result = adjoint(SHORT, y)
    assert not np.isfinite(result[row, SHORT.to_scipy("csr")[[reached[0]]].indices]).any()
    assert np.isfinite(result[row, ~np.isin(tile[SHORT.entries()[0][0]], tile[reached[0]])]).all()
    np.testing.assert_array_equal(result[others], (SHORT.to_scipy().T @ array[others].T).T)


@each_value(lambda n, dtype, width: n == 2 or width == 150, n=[2, 70], dtype=["float32", "bfloat16"], width=[150, 2304])
def test_fp64_accumulation_is_not_rounded(n, dtype, width, kernels_on):
    x = torch.zeros((n, width), dtype=FLOATS[dtype], device=kernels_on)
    y = torch.zeros((n, S.n_components), dtype=FLOATS[dtype], device=kernels_on)
    for product, data, size in ((kernels.project, x, S.n_components), (kernels.adjoint, y, width)):
        out = torch.tensor([1 / 3, 1e300], dtype=torch.float64, device=kernels_on).repeat(n, size // 2)
        before = out.clone()
        product(S[:, :width], data, out, True)
        assert torch.equal(out, before)


def test_precision_by_torchs_newer_settings(set_precision):
    """Newer settings make the older query raise for fp32; "tf32" is treated like "high"."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has the older names alone")
    before = matmul.fp32_precision
    try:
        for value in ("tf32", "ieee"):
            matmul.fp32_precision = value
            assert precision(torch.float64) == precision(torch.bfloat16) == "highest"
            assert precision(torch.float32) in ("highest", "high")
    finally:
        matmul.fp32_precision = before
