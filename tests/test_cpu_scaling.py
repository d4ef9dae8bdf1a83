"""Results of at most 32 bits are rounded once from fp64 on the CPU, although most of them are computed in fp32."""

import math

import numpy as np
import pytest
from helpers.cases import exhaustive_except

from sjlt import Sketch
from sjlt.backends.cpu import by_component, dense, look_up, permuted
from sjlt.backends.cpu.bits import BFLOAT16
from sjlt.backends.cpu.dense_kernels import fold_blocks
from sjlt.backends.cpu.jit import compiled
from sjlt.backends.cpu.plan import ExactPlan, exact_plan
from sjlt.backends.cpu.scaling import MAX_NNZ

FORMATS = {"float16": (11, -14), "bfloat16": (8, -126)}  # bits of a significand; exponent of the smallest normal number
SKETCHES = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1), (16, 1), (8, 4), (63, 1)]  # nnz, stacks


def from_bfloats(bits):
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def rounded(products, dtype):
    """fp64 rounded to the nearest 16-bit number, ties to even, as fp32."""
    bits, smallest = FORMATS[dtype]
    quantum = np.exp2(np.maximum(np.frexp(products)[1] - 1, smallest) - (bits - 1.0))
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = np.rint(products / quantum) * quantum
        largest = (2 - 2.0 ** (1 - bits)) * 2.0 ** (15 if dtype == "float16" else 127)
        numbers = np.where(np.abs(numbers) > largest, np.copysign(np.inf, numbers), numbers)
        return np.where(np.isfinite(products), numbers, products).astype(np.float32)


def hard_sums(scale, dtype):
    """fp32 whose products by the scale are next to, or equal to, halfway numbers of the format; and special values."""
    steps = np.random.default_rng(0).choice(1 << 16, 3000, replace=False).astype(np.uint16)
    halfway = steps.view(np.float16) if dtype == "float16" else from_bfloats(steps)
    halfway = halfway[np.isfinite(halfway)].astype(float)
    bits, smallest = FORMATS[dtype]
    halfway = halfway + np.exp2(np.maximum(np.frexp(halfway)[1] - 1, smallest) - float(bits))
    with np.errstate(over="ignore"):
        sums = (halfway / scale).astype(np.float32)
        both = [np.nextafter(sums, np.float32(limit)) for limit in (-np.inf, np.inf)]
    special = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-38, 3e38, 65519.9, 65520, 1, -1])
    return np.concatenate([sums, *both, special])


# The function of each path; where it is looked up; whether it computes adjoints; the paths before it, not to be taken.
PATHS = {
    "adjoint_by_look_up": (look_up, True, []),
    "adjoint_contiguous": (dense, True, ["look_up", "small"]),
    "_adjoint_many": (dense, True, ["look_up", "small"]),
    "project_by_permutation": (permuted, False, []),
    "project_by_component": (by_component, False, ["permuted"]),
    "project_contiguous": (dense, False, ["permuted", "by_component"]),
    "_project_many": (dense, False, ["permuted", "by_component"]),
}
MOST_TERMS = {  # for which a path is certainly taken; any number for the others
    "adjoint_by_look_up": 8 if look_up._HAS_LOOK_UPS else 0,
    "project_by_permutation": 4 if permuted._HAS_PERMUTATIONS else 0,
}


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """A path that is forced, and a list of its calls."""
    module, _, others = PATHS[request.param]
    exact_plan.cache_clear()  # plans remember the paths of earlier products
    for other in others:
        if other == "small":
            monkeypatch.setattr(ExactPlan, "is_small", lambda *_: False)
        else:
            monkeypatch.setattr(getattr(dense, other), "eligible", lambda *_: False)
    called, function = [], getattr(module, request.param)

    def spy(*arguments):
        called.append(request.param)
        return function(*arguments)

    monkeypatch.setattr(module, request.param, spy)
    return request.param, called


@pytest.mark.parametrize("sizes", SKETCHES, ids=str)
@pytest.mark.parametrize("dtype", exhaustive_except(["float16"], FORMATS))
def test_rounded_once(path, dtype, sizes):
    (name, called), (nnz, stacks) = path, sizes
    is_adjoint, order = PATHS[name][1], "F" if name.endswith("contiguous") else "C"
    S = Sketch(96, 64, nnz=nnz, stacks=stacks, seed=5)
    sums = hard_sums(exact_plan(S.spec).scale, dtype)
    signs = np.sign(S.toarray()).astype(np.float32)  # (components, features)
    signs = signs if is_adjoint else signs.T
    chosen = np.arange(sums.size) % signs.shape[0]
    data = np.zeros((sums.size, signs.shape[0]), np.float32)
    data[np.arange(sums.size), chosen] = sums
    data = np.asarray(data, order=order)
    out = np.zeros((sums.size, signs.shape[1]), np.float16 if dtype == "float16" else BFLOAT16, order=order)
    with np.errstate(all="ignore"):
        (dense.adjoint_exact if is_adjoint else dense.project_exact)(S.spec, data, out, False)
        expected = rounded((sums[:, None] * signs[chosen]).astype(float) * (1 / math.sqrt(nnz)), dtype)
    assert called or nnz > MOST_TERMS.get(name, nnz)
    has_term = signs[chosen] != 0
    actual = out.astype(np.float32) if dtype == "float16" else from_bfloats(np.ascontiguousarray(out))
    np.testing.assert_array_equal(actual[has_term], expected[has_term])
    is_number = has_term & ~np.isnan(expected) & (sums != 0)[:, None]  # the sum of zeros of both signs is +0
    np.testing.assert_array_equal(np.signbit(actual)[is_number], np.signbit(expected)[is_number])


def scaled_singles(sums, scale, order):
    """fp32 sums, a multiple of 16 x 16 in number, times a scale: stored in vectors, with or without transposition."""
    tile = np.ascontiguousarray(sums.reshape(-1, 16))
    out = np.full((16, tile.shape[0]), np.nan, np.float32, order=order)
    fold = compiled(fold_blocks, compute=np.float32, out=np.float32)
    fold(tile, np.empty((1, 0, 16)), (True, True), out, scale, False)
    return out.T.reshape(-1)


def expected_singles(sums, scale):
    with np.errstate(all="ignore"):
        return (sums * np.float64(scale)).astype(np.float32)


@pytest.mark.parametrize("nnz", range(1, MAX_NNZ + 2))
def test_all_significands(nnz):
    scale = 1 / math.sqrt(nnz)
    below = np.float32(scale)
    below = below if below < scale else np.nextafter(below, np.float32(0))
    assert scale - below > 2.0**-46  # lest products of this part, which `scaling` adds, be subnormal
    for start in range(1 << 23, 1 << 24, 1 << 20):
        sums = np.arange(start, start + (1 << 20), dtype=np.int32).astype(np.float32)
        assert (scaled_singles(sums, scale, "C") == expected_singles(sums, scale)).all()


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("scale", [1 / math.sqrt(m) for m in range(1, 70)] + [0.7, 1.5, 3e-5, 1e-30, 1e-45])
def test_tiny_and_special_singles(scale, order):
    rng = np.random.default_rng(1)
    magnitudes = rng.choice([1e-45, 3e-44, 1e-41, 1e-38, 2e-38, 1e-31, 1e-24, 1, 1e38], 2048)
    sums = (magnitudes * rng.uniform(0.5, 3, 2048)).astype(np.float32) * np.float32(rng.choice([-1, 1], 2048))
    sums[:1000] = 0  # vectors of normal numbers, of tiny ones, and of both
    sums[200:800] = rng.normal(size=600)
    special = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e-45, 4e-45, 3.4e38])
    sums[: 64 * special.size : 64] = special
    actual, expected = scaled_singles(sums, scale, order), expected_singles(sums, scale)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual)[~np.isnan(actual)], np.signbit(expected)[~np.isnan(actual)])
