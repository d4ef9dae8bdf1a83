"""Accepted data: SciPy's sparse formats, foreign byte orders, unaligned and mapped memory, lists, subclasses."""

import itertools
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.cases import each_value, exhaustive_except, pairwise
from helpers.data import DTYPES, exact_adjoint, exact_project, integers, poisoned, result_dtype, same

import sjlt
from sjlt import Sketch

KINDS = [sp.csr_array, sp.csr_matrix, sp.csc_array, sp.csc_matrix]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)


def sparse_integers(shape, dtype="float32", density=0.1, seed=0):
    """A dense array of integers, mostly zeros, with an empty row and an empty column."""
    kept = np.random.default_rng(seed + 100).random(shape) < density
    kept[len(kept) // 2] = kept[:, shape[1] // 3] = False
    return integers(shape, dtype, seed) * kept


def sparse(kind, dense, index=np.int32):
    x = kind(dense)
    x.indices, x.indptr = x.indices.astype(index), x.indptr.astype(index)
    return x


def check(S, x, dense):
    """Compare all products with the sparse x (rows are data vectors) and its transpose with those of `dense`."""
    expected = exact_project(S, dense)
    same(x @ S.T, expected)
    same(S @ x.T, expected.T)
    same(S.project(x), expected)
    same(S.project(x, out=poisoned(expected.shape, expected.dtype)), expected)
    same(S.project(x, out=np.full(expected.shape, 5.0), accumulate=True), expected.astype(np.float64) + 5)
    result = S.project(x, dense_output=False)
    assert result.format == "csr"
    assert isinstance(result, sp.sparray) == isinstance(x, sp.sparray)
    for a, b in itertools.pairwise(result.indptr):
        assert (np.diff(result.indices[a:b]) > 0).all(), "indices ascend in each row"
    same(result.toarray(), expected)
    # One entry for each component that some nonzero reaches, and no others.
    reached = (np.abs(dense.astype(np.float64)) @ np.abs(S.toarray()).T != 0).sum()
    assert result.nnz >= reached if (x.data == 0).any() else result.nnz == reached


def check_adjoint(S, y, dense):
    expected = exact_adjoint(S, dense)
    same(y @ S, expected)
    same(S.T @ y.T, expected.T)
    same(S.project_adjoint(y, out=poisoned(expected.shape, expected.dtype)), expected)
    same(S.project_adjoint(y, out=np.full(expected.shape, 5.0), accumulate=True), expected.astype(np.float64) + 5)


@each_kind
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_sparse_formats(kind, index):
    for k, nnz in ((40, 4), (300, 16), (1, 1)):
        S = Sketch(301, k, nnz=nnz)
        for n in (1, 3, 70):
            dense = sparse_integers((n, 301), seed=n)
            x = sparse(kind, dense, index)
            assert x.indices.dtype == index
            check(S, x, dense)
            dense = sparse_integers((n, k), seed=n)
            check_adjoint(S, sparse(kind, dense, index), dense)


# SciPy has no fp16 sparse matrices.
@pytest.mark.parametrize(
    "dtype", exhaustive_except(["float32", "float64", "int8"], [t for t in DTYPES if t != "float16"])
)
def test_sparse_dtypes(dtype):
    S = Sketch(120, 40, nnz=4)
    dense = sparse_integers((20, 120), dtype)
    x = sp.csr_array(dense)
    assert x.dtype == dtype
    same(x @ S.T, exact_project(S, dense))
    if dtype in ("float64", "int16", "bool"):  # kernels compile for each dtype, so one dtype of each kind
        same(x.tocsc() @ S.T, exact_project(S, dense))
        result = S.project(x, dense_output=False)
        assert result.dtype == result_dtype(dense)
        same(result.toarray(), exact_project(S, dense))


@each_value(out_dtype=["float16", "float32", "float64"], kind=KINDS)
def test_sparse_into_another_dtype(kind, out_dtype):
    S = Sketch(120, 40, nnz=4)
    dense = sparse_integers((20, 120))
    same(S.project(kind(dense), out=poisoned((20, 40), out_dtype)), exact_project(S, dense, out_dtype))
    dense = sparse_integers((20, 40))
    same(S.project_adjoint(kind(dense), out=poisoned((20, 120), out_dtype)), exact_adjoint(S, dense, out_dtype))


@each_kind
def test_empty_sparse_matrices(kind):
    for shape in ((0, 301), (3, 301)):
        check(Sketch(301, 40, nnz=4), kind(shape, dtype=np.float32), np.zeros(shape, np.float32))
    for shape in ((0, 0), (3, 0)):
        check(Sketch(0, 40, nnz=4), kind(shape, dtype=np.float32), np.zeros(shape, np.float32))


@each_kind
def test_unsorted_indices_and_duplicates(kind):
    S = Sketch(50, 40, nnz=4)
    rng = np.random.default_rng(3)
    rows, columns, data = rng.integers(0, 9, 400), rng.integers(0, 50, 400), integers(400)
    major, minor = (rows, columns) if kind(sp.eye_array(1)).format == "csr" else (columns, rows)
    order = np.argsort(major, kind="stable")
    indptr = np.searchsorted(major[order], np.arange((9 if minor is columns else 50) + 1))
    x = kind((data[order], minor[order], indptr), shape=(9, 50))
    assert not x.has_sorted_indices
    kept = [a.copy() for a in (x.data, x.indices, x.indptr)]
    dense = np.zeros((9, 50), np.float32)
    np.add.at(dense, (rows, columns), data)
    same(x @ S.T, exact_project(S, dense))
    same(S.project(x, dense_output=False).toarray(), exact_project(S, dense))
    same(x.T @ Sketch(9, 5, nnz=4).T, exact_project(Sketch(9, 5, nnz=4), dense.T))
    adjoint = Sketch(7, 50, nnz=4)
    same(x @ adjoint, exact_adjoint(adjoint, dense))
    for before, after in zip(kept, (x.data, x.indices, x.indptr), strict=True):
        np.testing.assert_array_equal(after, before, "the input was written to")


@each_kind
@pytest.mark.parametrize("threads", [1, 3])
def test_indices_modified_in_place(kind, threads):
    """SciPy caches that indices are sorted and does not notice when they change."""
    before = sjlt.get_num_threads()
    sjlt.set_num_threads(threads)
    S = Sketch(50, 40, nnz=4)
    x = kind(sparse_integers((30, 50), density=0.5))
    assert x.has_sorted_indices
    for a, b in itertools.pairwise(x.indptr):
        x.indices[a:b] = x.indices[a:b][::-1].copy()
    dense = x.toarray()
    assert x.has_sorted_indices, "the case that is to be tested"
    try:
        same(x @ S.T, exact_project(S, dense))
        same(S.project(x, dense_output=False).toarray(), exact_project(S, dense))
    finally:
        sjlt.set_num_threads(before)


def strided(a):
    """`a` with a stride of two elements."""
    return np.repeat(a, 2)[::2]


def backwards(a):
    return a[::-1].copy()[::-1]


def unaligned(a):
    view = np.zeros(a.nbytes + 1, np.uint8)[1:].view(a.dtype)
    view[...] = a
    assert not view.flags.aligned
    return view


@pairwise(
    kind=KINDS,
    layout=[strided, backwards, unaligned],
    parts=["data", "indices", "indptr", "data indices indptr"],
)
def test_memory_layouts_of_sparse_parts(kind, layout, parts):
    S, parts = Sketch(50, 40, nnz=4), parts.split()
    for dense, check_products in (
        (sparse_integers((20, 50)), check),
        (sparse_integers((20, 40)), check_adjoint),
    ):
        x = kind(dense)
        for part in parts:
            setattr(x, part, layout(getattr(x, part)))
        kept = [getattr(x, part).copy() for part in parts]
        check_products(S, x, dense)
        for part, before in zip(parts, kept, strict=True):
            np.testing.assert_array_equal(getattr(x, part), before, "the input was written to")


@pytest.mark.parametrize("start", [0, 2**33 - 20, 2**40])
def test_few_nonzeros_among_huge_feature_counts(start):
    """There are too many columns for a table of entries: each nonzero generates its own."""
    width, columns = 2**40, np.sort(np.random.default_rng(0).integers(0, 2**40, 60))
    columns[:3], columns[-1] = (0, 1, 2**33), width - 1
    columns.sort()
    S = Sketch(2**63 - 1, 300, nnz=4)[:, start : start + width]
    x = sp.csr_array((integers(60), columns, np.arange(0, 61, 6)), shape=(10, width))
    narrow = sp.csr_array((x.data, np.arange(60), x.indptr), shape=(10, 60)).toarray()
    entries = np.concatenate([S[:, j : j + 1].toarray() for j in columns.tolist()], axis=1)
    expected = (narrow @ entries.T).astype(np.float32)
    same(x @ S.T, expected)
    same(S.project(x, dense_output=False).toarray(), expected)


def test_results_do_not_depend_on_the_table():
    S = Sketch(60_000, 100, nnz=4, seed=2)
    dense = sparse_integers((40, 60_000), density=0.01)
    x = sp.csr_array(dense)
    expected = exact_project(S, dense)
    same(x @ S.T, expected)  # many nonzeros: with a table
    for i in (0, 7, 39):  # few: without
        same(sp.csr_array(dense[i : i + 1] * (np.arange(60_000) < 300)) @ S.T,
             exact_project(S, dense[i : i + 1] * (np.arange(60_000) < 300)))  # fmt: skip
    same(x.tocsc() @ S.T, expected)


@each_value(dtype=["float32", "float64", "int16"], kind=KINDS)
def test_sparse_foreign_byte_order(kind, dtype):
    dense = sparse_integers((9, 50), dtype)
    x = kind(dense)
    x.data = x.data.astype(x.dtype.newbyteorder())
    S = Sketch(50, 40, nnz=4)
    same(x @ S.T, exact_project(S, dense))


# --------------------------------------------------------------------------------- operands of @


def matrix(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        return np.matrix(x)


def test_numpy_and_scipy_defer_to_the_sketch():
    S = Sketch(50, 40, nnz=4)
    x, y = integers((9, 50)), integers((9, 40))
    for left in (np.asarray, matrix, sp.csr_array, sp.csr_matrix, sp.csc_array, sp.csc_matrix):
        same(np.asarray(left(x) @ S.T), exact_project(S, x))
        same(np.asarray(left(y) @ S), exact_adjoint(S, y))
        same(np.asarray(S @ left(x.T)), exact_project(S, x).T)
        same(np.asarray(S.T @ left(y.T)), exact_adjoint(S, y).T)


def test_other_arithmetic_with_arrays_is_refused():
    # NumPy would otherwise build an object array, element by element.
    S = Sketch(50, 40, nnz=4)
    for operation in ("__add__", "__mul__", "__truediv__", "__sub__"):
        assert getattr(np.ones((40, 50)), operation)(S) is NotImplemented
    with pytest.raises(TypeError):
        np.ones((40, 50)) * S
    with pytest.raises(TypeError):
        np.matmul(np.ones((9, 50)), S.T)


# --------------------------------------------------------------------------------- dense memory


@each_value(
    dtype=["float16", "float32", "float64", "int8", pytest.param("uint64", marks=pytest.mark.exhaustive)], n=[3, 70]
)
def test_foreign_byte_order(dtype, n):
    S = Sketch(301, 40, nnz=4)
    foreign = np.dtype(dtype).newbyteorder()
    x, y = integers((n, 301), dtype), integers((n, 40), dtype)
    for order in "CF":
        same(np.asarray(x.astype(foreign), order=order) @ S.T, exact_project(S, x))
        same(np.asarray(y.astype(foreign), order=order) @ S, exact_adjoint(S, y))
    same(S @ x.T.astype(foreign), exact_project(S, x).T)
    same(np.stack([x, x]).astype(foreign) @ S.T, exact_project(S, np.stack([x, x])))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("n", [3, 70])
def test_unaligned(dtype, n):
    S = Sketch(301, 40, nnz=4)
    x = integers((n, 301), dtype)
    memory = np.zeros(x.nbytes + 1, np.uint8)
    unaligned = memory[1:].view(dtype).reshape(x.shape)
    unaligned[...] = x
    packed = np.zeros(x.shape, np.dtype({"names": ["a", "b"], "formats": ["i1", dtype], "offsets": [0, 1]}))["b"]
    packed[...] = x
    for view in (unaligned, packed):
        assert not view.flags.aligned
        same(view @ S.T, exact_project(S, x))
        same(S.project(view, out=np.full((n, 40), 5.0), accumulate=True), exact_project(S, x, "float64") + 5)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_unaligned_out(dtype):
    S = Sketch(301, 40, nnz=4)
    x = integers((70, 301), dtype)
    out = np.zeros(70 * 40 * x.itemsize + 1, np.uint8)[1:].view(dtype).reshape(70, 40)
    assert not out.flags.aligned
    same(S.project(x, out=out), exact_project(S, x))


def test_read_only():
    S = Sketch(301, 40, nnz=4)
    for n in (3, 70):
        x, y = integers((n, 301)), integers((n, 40))
        x.flags.writeable = y.flags.writeable = False
        same(x @ S.T, exact_project(S, x))
        same(y @ S, exact_adjoint(S, y))
        same(S @ x.T, exact_project(S, x).T)
        sparse = sp.csr_array(x)
        sparse.data.flags.writeable = sparse.indices.flags.writeable = sparse.indptr.flags.writeable = False
        same(sparse @ S.T, exact_project(S, x))
        same(S.project(sparse, dense_output=False).toarray(), exact_project(S, x))
        same(sparse.T.tocsr().T @ S.T, exact_project(S, x))


@pytest.mark.parametrize("dtype", ["float16", "float32", ">f4", "int8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_memory_maps(tmp_path, dtype, order):
    S = Sketch(301, 40, nnz=4)
    x = np.asarray(integers((70, 301), dtype), order=order)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    native = x.astype(x.dtype.newbyteorder("="))
    result = mapped @ S.T
    same(result, exact_project(S, native))
    assert type(result) is np.ndarray
    if result.dtype == np.float32:
        written = np.lib.format.open_memmap(tmp_path / "y.npy", "w+", np.float32, (70, 40))
        assert S.project(mapped, out=written) is written
        written.flush()
        same(np.load(tmp_path / "y.npy"), exact_project(S, native))


def test_lists_and_subclasses():
    class Tagged(np.ndarray):
        pass

    S = Sketch(3, 40, nnz=4)
    same(S.project([[1, 2, 3]]), exact_project(S, np.array([[1, 2, 3]])))
    same(S @ [1.0, 2.0, 3.0], exact_project(S, np.array([1.0, 2.0, 3.0])))
    x = integers((5, 3))
    same(np.asarray(x.view(Tagged) @ S.T), exact_project(S, x))
