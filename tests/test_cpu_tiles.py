"""Products on the CPU whose data does not consist of whole squares: the last squares overlap, or have few vectors."""

import numpy as np
import pytest
from helpers.cases import pairwise

from sjlt import Sketch, threads

SENTINEL = 777


def view(rows, columns, layout, dtype):
    """(An array of this shape within a larger one that is filled with SENTINEL, that array)."""
    shape = (rows + 3, columns + 5) if layout == "rows" else (columns + 3, rows + 5)
    whole = np.full(shape, SENTINEL, dtype)
    return (whole[:rows, :columns] if layout == "rows" else whole[:columns, :rows].T), whole


@pytest.fixture(params=[1, 2])
def count(request):
    before = threads.get_num_threads()
    threads.set_num_threads(request.param)
    yield request.param
    threads.set_num_threads(before)


@pairwise(
    n=[1, 3, 7, 8, 15, 16, 17, 33, 100],
    d=[17, 40, 65, 1000, 3000],
    k=[16, 25, 129, 400],
    dtype=["float32", "float64", "float16"],
    layouts=[("rows", "rows"), ("rows", "columns"), ("columns", "rows"), ("columns", "columns")],
    adjoint=[False, True],
)
def test_sums_of_integers_are_exact_and_nothing_else_is_written(n, d, k, dtype, layouts, adjoint, count):
    S = Sketch(d, k, nnz=4, seed=n)
    rng = np.random.default_rng(d)
    x, _ = view(n, k if adjoint else d, layouts[0], dtype)
    x[...] = rng.integers(-4, 5, x.shape)
    out, whole = view(n, d if adjoint else k, layouts[1], dtype)
    (S.project_adjoint if adjoint else S.project)(x, out=out)
    want = x.astype(float) @ (S.to_scipy("csr").toarray() if adjoint else S.to_scipy("csr").toarray().T)
    np.testing.assert_array_equal(out, want.astype(dtype))
    assert np.count_nonzero(whole == SENTINEL) >= whole.size - out.size
    out[...] = SENTINEL
    assert (whole == SENTINEL).all()
