"""Products of random shapes, sketches, dtypes and layouts on a GPU, whichever kernel is chosen for them."""

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

CASES = 12  # per test
MAX_ELEMENTS, MAX_ENTRIES = 1 << 24, 1 << 22  # of a tensor, of the sketch


def log_uniform(rng, low, high):
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def draw_sketch(rng):
    """A sketch without some of its first features."""
    while True:
        stacks = rng.choice([1, 1, 1, 2, 4])
        k = stacks * rng.choice([2 ** rng.randint(0, 11), 64 * rng.randint(1, 24), log_uniform(rng, 1, 3000)])
        nnz = stacks * rng.choice([1, 1, 2, 3, 4, 4, 5, 8, 16])
        d = log_uniform(rng, 1, 1 << 21)
        if nnz // stacks <= max_nnz(k // stacks) and d * nnz <= MAX_ENTRIES:
            first = rng.choice([0, 0, rng.randint(1, 5000)])
            return Sketch(first + d, k, nnz=nnz, stacks=stacks, seed=rng.getrandbits(64))[:, first:]


def draw(rng):
    """(sketch, number of vectors, dtypes of data and result, their layouts, whether to add to the result)."""
    S = draw_sketch(rng)
    most = max(1, min(1 << 17, MAX_ELEMENTS // max(S.shape), (1 << 27) // (S.n_features * S.nnz)))
    n = max(log_uniform(rng, 1, most), log_uniform(rng, 1, most))
    dtype = rng.choice(list(FLOATS))
    out_dtype = rng.choice([dtype, dtype, dtype, "float32"])
    layouts = [rng.choice(["rows", "rows", "columns", "columns", *LAYOUTS]) for _ in range(2)]
    return S, n, dtype, out_dtype, layouts, rng.random() < 0.2


@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("product", [project, adjoint])
def test_products_of_integers(product, seed):
    """Sums of integers are exact, so the result has the rounding errors of the scale and of its dtype only."""
    rng = random.Random(seed)
    for _ in range(CASES):
        S, n, dtype, out_dtype, (layout, out_layout), add = case = draw(rng)
        matrix = integral_matrix(S) if product is project else integral_matrix(S).T
        array = integers((n, matrix.shape[1]), "float64", seed=n)
        start = integers((n, matrix.shape[0]), "float64", seed=5) if add else np.zeros((n, matrix.shape[0]))
        x, out = filled(layout, array, dtype, "cuda"), poisoned(out_layout, start.shape, out_dtype, "cuda")
        if add:
            out.copy_(torch.from_numpy(start))
        product(S, x, out, add)
        expected = start + (matrix @ array.T).T * S.nnz**-0.5
        compute = torch.float64 if dtype == "float64" else torch.float32
        rounding = 2 * torch.finfo(compute).eps + torch.finfo(FLOATS[out_dtype]).eps
        error = np.abs(out.cpu().double().numpy() - expected)
        assert (error <= rounding * (np.abs(start) + np.abs(expected))).all(), case
        assert_untouched_around(out)
