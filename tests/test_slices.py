"""Features streamed slice by slice: products of slices add up, exactly on integer data."""

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.data import exact_adjoint, exact_project, integers, same

from sjlt import Sketch

WIDTH = 1000
CUTS = {
    "one by one": range(WIDTH + 1),
    "halves": [0, 500, WIDTH],
    "uneven": [0, 0, 1, 33, 34, 129, 640, 999, WIDTH, WIDTH],
}
SKETCHES = [
    Sketch(WIDTH, 1, nnz=1),
    Sketch(WIDTH, 6, nnz=4),
    Sketch(WIDTH, 300, nnz=16, seed=5),
    Sketch(2**40, 128)[:, 2**33 - 500 : 2**33 + 500],
]
each_sketch = pytest.mark.parametrize("S", SKETCHES, ids=repr)
each_cut = pytest.mark.parametrize("cut", CUTS)


def pairs(cut):
    return zip(CUTS[cut], CUTS[cut][1:], strict=False)


@each_sketch
@each_cut
@pytest.mark.parametrize("out_dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 40])
def test_streamed_features_add_up(S, cut, out_dtype, n):
    x = integers((n, WIDTH))
    out = np.zeros((n, S.n_components), out_dtype)
    for a, b in pairs(cut):
        assert S[:, a:b].project(x[:, a:b], out=out, accumulate=True) is out
    same(out, exact_project(S, x, out_dtype))


@each_sketch
@each_cut
def test_slices_of_left_products(S, cut):
    A = integers((WIDTH, 9), "float64")
    same(sum(S[:, a:b] @ A[a:b] for a, b in pairs(cut)), exact_project(S, A.T).T)


@each_sketch
@each_cut
@pytest.mark.parametrize("format", ["csr", "csc"])
def test_streamed_sparse_features_add_up(S, cut, format):
    x = integers((7, WIDTH)) * (np.random.default_rng(0).random((7, WIDTH)) < 0.1)
    columns = sp.csc_array(x)
    out = np.zeros((7, S.n_components), np.float32)
    for a, b in pairs(cut):
        S[:, a:b].project(columns[:, a:b].asformat(format), out=out, accumulate=True)
    same(out, exact_project(S, x, "float32"))


@each_sketch
@each_cut
@pytest.mark.parametrize("n", [1, 40])
def test_slices_of_the_adjoint(S, cut, n):
    y = integers((n, S.n_components))
    out = np.full((n, WIDTH), np.nan, np.float32)
    for a, b in pairs(cut):
        S[:, a:b].project_adjoint(y, out=out[:, a:b])
    same(out, exact_adjoint(S, y))


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        ("float16", "float32"),
        ("float32", "float32"),
        ("float32", "float64"),
        pytest.param("float64", "float32", marks=pytest.mark.exhaustive),
        pytest.param("int8", "float64", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("n", [3, 70])
def test_accumulate(dtype, out_dtype, n):
    S = Sketch(301, 40, nnz=4)
    for order in "CF":
        x, y = integers((n, 301), dtype), integers((n, 40), dtype)
        start = np.asarray(integers((n, 40), out_dtype, seed=8), order=order)
        same(S.project(x, out=start.copy("K"), accumulate=True), exact_project(S, x, out_dtype) + start)
        start = np.asarray(integers((n, 301), out_dtype, seed=8), order=order)
        same(S.project_adjoint(y, out=start.copy("K"), accumulate=True), exact_adjoint(S, y, out_dtype) + start)


@pytest.mark.parametrize("n", [3, 70])
def test_accumulating_zero_features(n):
    S = Sketch(0, 40, nnz=4)
    out = integers((n, 40))
    for x in (
        np.empty((n, 0), np.float32),
        sp.csr_array((n, 0), dtype=np.float32),
        sp.csc_array((n, 0), dtype=np.float32),
    ):
        same(S.project(x, out=out.copy(), accumulate=True), out)
        same(S.project(x, out=np.full((n, 40), np.nan, np.float32)), np.zeros((n, 40), np.float32))


def test_accumulate_in_leading_axes_and_strided_out():
    S = Sketch(77, 40, nnz=4)
    x = integers((4, 6, 77))
    whole = integers((6, 4, 80), "float64", seed=3)
    before = whole.copy()
    out = whole.transpose(1, 0, 2)[..., ::2]
    expected = exact_project(S, x, "float64") + out
    same(S.project(x, out=out, accumulate=True), expected)
    np.testing.assert_array_equal(whole[..., 1::2], before[..., 1::2])
