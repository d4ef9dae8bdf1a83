"""Products of random shapes, sketches, dtypes and layouts, whichever kernel is chosen for them."""

import math
import random

import numpy as np
import pytest
import torch
from helpers.data import integers
from helpers.kernels import (
    FLOATS,
    LAYOUTS,
    adjoint,
    assert_untouched_around,
    filled,
    integral_matrix,
    poisoned,
    project,
)

from sjlt import Sketch
from sjlt.laws.exact import max_nnz

CASES = {"cuda": 12, "cpu": 2}  # per test
MAX_ELEMENTS = {"cuda": 1 << 24, "cpu": 1 << 13}  # of a tensor, and a quarter of the maximum number of nonzeros of S
MAX_TERMS = {"cuda": 1 << 27, "cpu": 1 << 15}


def log_uniform(rng, low, high):
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def draw_sketch(rng, max_entries):
    """A sketch without some of its first features."""
    while True:
        stacks = rng.choice([1, 1, 1, 2, 4])
        k = stacks * rng.choice([2 ** rng.randint(0, 11), 64 * rng.randint(1, 24), log_uniform(rng, 1, 3000)])
        nnz = stacks * rng.choice([1, 1, 2, 3, 4, 4, 5, 8, 16])
        d = log_uniform(rng, 1, 1 << 21)
        if nnz // stacks <= max_nnz(k // stacks) and d * nnz <= max_entries:
            first = rng.choice([0, 0, rng.randint(1, 5000)])
            return Sketch(first + d, k, nnz=nnz, stacks=stacks, seed=rng.getrandbits(64))[:, first:]


def draw(rng, device):
    """(sketch, number of vectors, dtypes of data and result, their layouts, whether to add to the result)."""
    S = draw_sketch(rng, MAX_ELEMENTS[device] // 4)
    most = max(1, min(1 << 17, MAX_ELEMENTS[device] // max(S.shape), MAX_TERMS[device] // (S.n_features * S.nnz)))
    n = max(log_uniform(rng, 1, most), log_uniform(rng, 1, most))
    dtype = rng.choice(list(FLOATS))
    out_dtype = rng.choice([dtype, dtype, dtype, "float32"])
    layouts = [rng.choice(["rows", "rows", "columns", "columns", *LAYOUTS]) for _ in range(2)]
    return S, n, dtype, out_dtype, layouts, out_dtype in ("float32", "float64") and rng.random() < 0.2


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("product", [project, adjoint])
def test_products_of_integers(product, seed, kernels_on):
    """Sums of integers are exact, so the result has the rounding errors of the scale and of its dtype only.

    Sums over several stacks may be rounded once for each.
    """
    rng = random.Random(seed)
    for _ in range(CASES[kernels_on]):
        S, n, dtype, out_dtype, (layout, out_layout), add = case = draw(rng, kernels_on)
        matrix = integral_matrix(S) if product is project else integral_matrix(S).T
        array = integers((n, matrix.shape[1]), "float64", seed=n)
        start = integers((n, matrix.shape[0]), "float64", seed=5) if add else np.zeros((n, matrix.shape[0]))
        x, out = filled(layout, array, dtype, kernels_on), poisoned(out_layout, start.shape, out_dtype, kernels_on)
        if add:
            out.copy_(torch.from_numpy(start))
        product(S, x, out, add)
        expected = start + (matrix @ array.T).T * S.nnz**-0.5
        compute = torch.float64 if dtype == "float64" else torch.float32
        rounding = 2 * torch.finfo(compute).eps + torch.finfo(FLOATS[out_dtype]).eps
        error, size = np.abs(out.cpu().double().numpy() - expected), np.abs(start) + np.abs(expected)
        if S.stacks > 1:
            size += (abs(matrix) @ abs(array).T).T * S.nnz**-0.5
        assert (error <= rounding * size).all(), case
        assert_untouched_around(out)
