"""Dense products compared exactly with the materialized sketch, on integer data: dtypes, orders, strides, shapes.

nnz is always 1, 4, 16 or 64, so the scale 1/sqrt(nnz) is a power of two and every product is exact.
"""

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.cases import exhaustive_except, pairwise
from helpers.data import DTYPES, FLOATS, exact_adjoint, exact_project, integers, poisoned, result_dtype, same

import sjlt
from sjlt import Sketch
from sjlt.backends.cpu import exact as backend
from sjlt.backends.cpu import plan


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads, no codes kept"])
def num_threads(request, monkeypatch):
    before = sjlt.get_num_threads()
    sjlt.set_num_threads(request.param)
    if request.param == 3:  # compute small products like large ones
        plan.exact_plan.cache_clear()  # plans remember how they computed earlier products
        monkeypatch.setattr(plan, "KEPT_CODES", 0)
        monkeypatch.setattr(plan, "REUSED_CODES", 0)
        monkeypatch.setattr(plan, "REUSED_WORDS", 0)
    yield request.param
    sjlt.set_num_threads(before)


def check_project(S, x, **options):
    expected = exact_project(S, x)
    out = poisoned(expected.shape, expected.dtype)
    assert S.project(x, out=out, **options) is out
    same(out, expected)


def check_adjoint(S, y):
    expected = exact_adjoint(S, y)
    out = poisoned(expected.shape, expected.dtype)
    assert S.project_adjoint(y, out=out) is out
    same(out, expected)


# --------------------------------------------------------------------------------- dtypes


# Few and many rows may run in different kernels, which compile for each dtype; many rows run in one dtype of each kind.
ROWS_AND_DTYPES = [*((3, t) for t in DTYPES), *((70, t) for t in (*FLOATS, "int8", "uint64", "bool"))]
IN_DEFAULT_RUN = [(3, "float16"), (70, "float32"), (3, "float64"), (70, "int8")]


@pytest.mark.parametrize(
    ("n", "dtype"),
    [pytest.param(*case, marks=() if case in IN_DEFAULT_RUN else pytest.mark.exhaustive) for case in ROWS_AND_DTYPES],
)
def test_dtypes(n, dtype):
    S = Sketch(200, 64, nnz=4, seed=1)
    x = integers((n, 200), dtype, seed=n)
    same(x @ S.T, exact_project(S, x))
    check_project(S, x)
    y = integers((n, 64), dtype, seed=n)
    same(y @ S, exact_adjoint(S, y))
    check_adjoint(S, y)


@pytest.mark.parametrize("extreme", [2**53, -(2**53), 2**40 + 1])
def test_large_integers_are_computed_in_fp64(extreme):
    S = Sketch(3, 64, nnz=1)
    x = np.array([[extreme, 0, 0], [0, 0, extreme]])
    same(x @ S.T, exact_project(S, x))


OTHER_DTYPES = [("float16", "float32"), ("float64", "float32"), ("int8", "float32")]


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        ("float32", "float16"),
        ("float32", "float64"),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHER_DTYPES),
    ],
)
def test_out_may_have_another_float_dtype(dtype, out_dtype):
    S = Sketch(200, 64, nnz=16, seed=1)
    for n in (2, 70):
        x, y = integers((n, 200), dtype), integers((n, 64), dtype)
        same(S.project(x, out=poisoned((n, 64), out_dtype)), exact_project(S, x, out_dtype))
        same(S.project_adjoint(y, out=poisoned((n, 200), out_dtype)), exact_adjoint(S, y, out_dtype))


@pytest.mark.parametrize("n", [3, 70])
def test_overflow_of_fp16_gives_infinities(n):
    """Without a warning, as in the other dtypes."""
    S = Sketch(200, 64, nnz=4, seed=1)
    for dtype in ("float16", "float32"):
        x, y = np.full((n, 200), 60_000, dtype), np.full((n, 64), 60_000, dtype)
        x[:, ::2] *= -1
        results = (
            S.project(x, out=poisoned((n, 64), "float16")),
            S.project_adjoint(y, out=poisoned((n, 200), "float16")),
        )
        wide = x.astype("float64") @ S.T, y.astype("float64") @ S
        for result, exact in zip(results, wide, strict=True):
            with np.errstate(over="ignore"):
                same(result, exact.astype(np.float16))
            assert np.isinf(result).any()
            assert np.isfinite(result).any()
    same(S.project(sp.csr_array(x), out=poisoned((n, 64), "float16")), results[0])
    same(x.astype("float16") @ S.T, results[0])


# --------------------------------------------------------------------------------- shapes

# Features: none, one, less than a chunk, about a tile of features, a prime, many blocks of the sums for small k.
FEATURES = [0, 1, 31, 63, 65, 509, 3001]
# (k, nnz): one row, k < 128, full tiles, partial tiles, a prime, chunks of one column, of the whole tile.
COMPONENTS = [(1, 1), (6, 4), (64, 64), (100, 16), (128, 1), (256, 4), (300, 16), (1009, 4)]


@pytest.mark.parametrize("d", FEATURES)
@pytest.mark.parametrize(("k", "nnz"), COMPONENTS)
def test_shapes(k, nnz, d):
    S = Sketch(d, k, nnz=nnz, seed=d)
    for n in (1, 2, 9, 33):
        check_project(S, integers((n, d), seed=n))
        check_adjoint(S, integers((n, k), seed=n))
    check_project(S, integers(d))
    check_adjoint(S, integers(k))


@pytest.mark.parametrize("dtype", exhaustive_except(["float32"], ["float16", "float32", "float64", "int16"]))
@pytest.mark.parametrize(
    "sketch",
    [
        (4096, 1, 1, 0),
        (300, 3, 1, 77),
        (16, 8, 1, 1),
        (254, 1, 1, 70),  # sub-blocks of 127 rows, of which a chunk uses 64
        (190, 2, 1, 33),  # of 47 and 48 rows
        (256, 2, 1, 7),
        (1000, 8, 2, 2**33 + 11),
        (128, 128, 1, 9),
        (1, 1, 1, 5),
    ],
)
def test_single_vectors_equal_batches(sketch, dtype):
    """One or two vectors are summed by another method, 16 rows of a sub-block at a time."""
    k, nnz, stacks, offset = sketch
    d = 40_001
    S = Sketch(offset + d, k, nnz=nnz, stacks=stacks, seed=k)[:, offset:]
    x = (np.random.default_rng(k).normal(size=(9, d)) * 50).astype(dtype)
    all_of_them = S.project(x)
    same(S.project(x[:2]), all_of_them[:2])
    for i in (0, 8):
        same(S.project(x[i]), all_of_them[i])
    same(S.project(np.asfortranarray(x)[1]), all_of_them[1])


@pytest.mark.parametrize("n", [*range(1, 12), 31, 32, 33, 63, 64, 65, 100, 257])
def test_row_counts(n, num_threads):
    S = Sketch(333, 40, nnz=4, seed=n)
    for dtype in ("float32", "float64"):
        check_project(S, integers((n, 333), dtype))
        check_adjoint(S, integers((n, 40), dtype))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
@pytest.mark.parametrize("d", [0, 1, 77])
def test_zero_rows(shape, d):
    S = Sketch(d, 40, nnz=4)
    for x, product, check in (
        (np.empty((*shape, d), np.float32), lambda x: x @ S.T, check_project),
        (np.empty((*shape, 40), np.float32), lambda y: y @ S, check_adjoint),
    ):
        assert product(x).shape == (*shape, sum(S.shape) - x.shape[-1])
        assert product(x).dtype == np.float32
        check(S, x)


def sliding(n, d, dtype, seed=0):
    """(n, d) whose row i starts one element after row i - 1: a wide matrix in the memory of a single row."""
    line = integers(n + d, dtype, seed)
    return np.lib.stride_tricks.as_strided(line, (n, d), (line.itemsize, line.itemsize), writeable=False)


@pytest.mark.parametrize("dtype", exhaustive_except(["float32"], ["float32", "int8"]))
@pytest.mark.parametrize("n", [2, 40])
def test_wide(n, dtype, num_threads):
    """More features than fit in one task's table of entries or range of features."""
    for S in (Sketch(140_000, 128, nnz=64), Sketch(300_001, 50, nnz=4)[:, 7:]):
        x = sliding(n, S.n_features, dtype)
        check_project(S, x)
        check_project(S, np.asfortranarray(x))


@pytest.mark.parametrize("n", [2, 40])
def test_wide_adjoint(n, num_threads):
    for S in (Sketch(140_000, 128, nnz=64), Sketch(300_001, 50, nnz=4)[:, 7:]):
        check_adjoint(S, integers((n, S.n_components)))


@pytest.mark.parametrize(("n", "k"), [(1, 8192), (40, 8192), (300, 8192), (1, 65_536), (150, 65_536), (5, 1_000_003)])
def test_many_components(n, k, num_threads):
    """Columns around 2^33, where blocks of features begin for any block size."""
    S = Sketch(2**34, k, nnz=4)[:, 2**33 - 100 : 2**33 + 155]
    check_project(S, integers((n, 255)))
    check_adjoint(S, integers((n, k)))


@pytest.mark.parametrize("k", [3, 128, 700])
@pytest.mark.parametrize("n", [3, 50])
def test_features_beyond_2_33(k, n):
    S = Sketch(2**63 - 1, k, nnz=1, seed=-1)
    for start in (2**33 - 40, 2**33 + 1, 2**62 - 11, 2**63 - 1 - 100):
        part = S[:, start : start + 100]
        check_project(part, integers((n, 100), seed=k))
        check_adjoint(part, integers((n, k), seed=k))


# --------------------------------------------------------------------------------- layouts

LAYOUTS = {
    "C": lambda x: x,
    "F": np.asfortranarray,
    "every second row": lambda x: np.repeat(x, 2, axis=0)[::2],
    "every third column": lambda x: np.repeat(x, 3, axis=1)[:, ::3],
    "inner part": lambda x: np.pad(x, 5)[5:-5, 5:-5],
    "inner part of F": lambda x: np.asfortranarray(np.pad(x, 5))[5:-5, 5:-5],
    "rows backwards": lambda x: x[::-1].copy()[::-1],
    "columns backwards": lambda x: x[:, ::-1].copy()[:, ::-1],
    "F backwards": lambda x: np.asfortranarray(x[::-1, ::-1])[::-1, ::-1],
    "field of records": lambda x: np.rec.fromarrays([x, x + 1], names="a,b")["a"],
}


@pairwise(
    layout=list(LAYOUTS),
    dtype=["float16", "float32", *(pytest.param(t, marks=pytest.mark.exhaustive) for t in ("float64", "int16"))],
    n=[5, 70],
)
def test_input_layouts(layout, dtype, n, num_threads):
    S = Sketch(301, 40, nnz=4)
    for rows, check in ((integers((n, 301), dtype), check_project), (integers((n, 40), dtype), check_adjoint)):
        view = LAYOUTS[layout](rows)
        assert np.array_equal(view, rows)
        before = view.copy()
        check(S, view)
        assert np.array_equal(view, before), "the input was written to"


@pairwise(layout=list(LAYOUTS), dtype=FLOATS, n=[5, 70])
def test_out_layouts(layout, dtype, n, num_threads):
    S = Sketch(301, 40, nnz=4)
    x, y = integers((n, 301), dtype), integers((n, 40), dtype)
    out = LAYOUTS[layout](poisoned((n, 40), dtype))
    assert S.project(x, out=out) is out
    same(out, exact_project(S, x))
    out = LAYOUTS[layout](poisoned((n, 301), dtype))
    assert S.project_adjoint(y, out=out) is out
    same(out, exact_adjoint(S, y))


def test_only_the_elements_of_a_strided_out_are_written():
    S = Sketch(301, 40, nnz=4)
    whole = np.full((70, 3, 120), 7, np.float32)
    S.project(integers((70, 301)), out=whole[:, 1, ::3])
    whole[:, 1, ::3] = 7
    assert (whole == 7).all()


@pytest.mark.parametrize("n", [5, 70])
def test_zero_strides(n):
    S = Sketch(301, 40, nnz=4)
    for dtype in ("float16", "float32", "int8"):
        check_project(S, np.broadcast_to(integers(301, dtype), (n, 301)))
        check_project(S, np.broadcast_to(integers((n, 1), dtype), (n, 301)))
        check_project(S, np.broadcast_to(np.ones((), dtype), (n, 301)))
        check_adjoint(S, np.broadcast_to(integers(40, dtype), (n, 40)))
        check_adjoint(S, np.broadcast_to(integers((n, 1), dtype), (n, 40)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_leading_axes(dtype):
    S = Sketch(77, 40, nnz=4)
    for x, check in ((integers((4, 6, 5, 77), dtype), check_project), (integers((4, 6, 5, 40), dtype), check_adjoint)):
        check(S, x)
        check(S, x.transpose(2, 0, 1, 3))  # its rows cannot be described as one axis by strides
        check(S, x[::2, ::-1, 1:3])
        check(S, np.moveaxis(np.ascontiguousarray(np.moveaxis(x, -1, 0)), 0, -1))
        check(S, np.broadcast_to(x[:, :1], x.shape))


@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (2, 1, 0, 3), (1, 2, 0, 3), (1, 0, 2, 3)], ids=str)
def test_unmergeable_leading_axes_need_few_calls(axes, monkeypatch):
    calls = []
    for name in ("project", "adjoint"):
        function = getattr(backend, name)
        monkeypatch.setattr(backend, name, lambda *a, function=function: calls.append(a) or function(*a))
    S = Sketch(32, 32, nnz=3)
    x = np.random.default_rng(0).normal(size=(4, 64, 8, 32)).astype(np.float32).transpose(axes)
    for function in (S.project, S.project_adjoint):
        expected = function(np.ascontiguousarray(x))
        assert len(calls) == 1
        calls.clear()
        result = function(x)
        assert 1 <= len(calls) <= 4 * 8
        assert result.tobytes() == expected.tobytes()
        out = np.empty((4, 64, 8, 32), np.float32).transpose(axes)
        assert function(np.ascontiguousarray(x), out=out).tobytes() == expected.tobytes()
        calls.clear()


def test_unmergeable_leading_axes_of_out():
    S = Sketch(77, 40, nnz=4)
    x = integers((4, 6, 77))
    out = poisoned((6, 4, 40), "float32").transpose(1, 0, 2)
    same(S.project(x, out=out), exact_project(S, x))
    out = poisoned((40, 6, 4), "float32").transpose(2, 1, 0)
    same(S.project(x, out=out), exact_project(S, x))


# --------------------------------------------------------------------------------- left and right products


FOUR = ["float16", "float32", "float64", "int32", "bool"]


@pytest.mark.parametrize("dtype", exhaustive_except(FOUR[:3], FOUR))
@pytest.mark.parametrize("order", ["C", "F"])
def test_four_products(dtype, order):
    S = Sketch(301, 40, nnz=4, seed=6)
    for n in (1, 5, 70):
        X, Y = (np.asarray(integers((n, m), dtype, seed=n), order=order) for m in S.shape[::-1])
        A, B = (np.asarray(integers((m, n), dtype, seed=n), order=order) for m in S.shape[::-1])
        same(X @ S.T, exact_project(S, X))
        same(Y @ S, exact_adjoint(S, Y))
        same(S @ A, exact_project(S, A.T).T)
        same(S.T @ B, exact_adjoint(S, B.T).T)
        for product, vector in ((S.T.__rmatmul__, X[0]), (S.__matmul__, X[0])):
            same(product(vector), exact_project(S, vector))
        for product, vector in ((S.__rmatmul__, Y[0]), (S.T.__matmul__, Y[0])):
            same(product(vector), exact_adjoint(S, vector))


@pytest.mark.parametrize("width", [1, 7, 64, 200])
def test_left_products(width, num_threads):
    S = Sketch(5000, 6, nnz=4)  # chunks of one column: many blocks of features
    A, B = integers((5000, width)), integers((6, width))
    same(S @ A, exact_project(S, A.T).T)
    same(S.T @ B, exact_adjoint(S, B.T).T)


def test_zero_columns():
    S = Sketch(77, 40, nnz=4)
    assert (S @ np.empty((77, 0), np.float32)).shape == (40, 0)
    assert (S.T @ np.empty((40, 0), np.float32)).shape == (77, 0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("k", "nnz"), COMPONENTS)
def test_adjoint_identity(k, nnz, seed):
    """<S x, y> = <x, S' y>, without the materialized sketch, to the bit."""
    S = Sketch(777, k, nnz=nnz, seed=seed)[:, 10 * seed :]
    x = integers((4, S.n_features), "float64", seed)
    y = integers((4, k), "float64", seed + 9)
    left, right = (x @ S.T) @ y.T, x @ (y @ S).T
    assert np.abs(left).max() > 0
    np.testing.assert_array_equal(left, right)


def test_linearity():
    S = Sketch(777, 100, nnz=4)
    a, b = integers((50, 777), "float64", 1), integers((50, 777), "float64", 2)
    np.testing.assert_array_equal((3 * a - b) @ S.T, 3 * (a @ S.T) - b @ S.T)


def test_results_are_new_arrays():
    S = Sketch(20, 20, nnz=1)
    x = integers((5, 20))
    for result in (x @ S.T, x @ S, S @ x.T, S.T @ x.T):
        assert result.flags.writeable
        assert not np.shares_memory(result, x)
        assert result.dtype == result_dtype(x)
