"""Invalid data is refused before any work, with the values in the message. (Arguments: see test_operator.)"""

import re

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from helpers.data import integers
from scipy.sparse.linalg import aslinearoperator

import sjlt
from sjlt import Sketch

S = Sketch(50, 40, nnz=4)


def products(x, y):
    """Every call that accepts rows x of 50 features or y of 40 components."""
    yield lambda: x @ S.T
    yield lambda: S @ x.T
    yield lambda: S.project(x)
    yield lambda: y @ S
    yield lambda: S.T @ y.T
    yield lambda: S.project_adjoint(y)


@pytest.mark.parametrize(
    "dtype", ["complex64", "complex128", "object", "longdouble", "U3", "S3", "datetime64[s]", "timedelta64[s]", "i4,f4"]
)
def test_dtypes(dtype):
    x, y = (np.zeros((3, width), dtype) for width in (50, 40))
    for product in products(x, y):
        with pytest.raises(TypeError, match=re.escape(str(np.dtype(dtype)))):
            product()


@pytest.mark.parametrize("dtype", ["complex64", "longdouble"])
@pytest.mark.parametrize("kind", [sp.csr_array, sp.csc_matrix])
def test_sparse_dtypes(dtype, kind):
    for product in products(kind((3, 50), dtype=dtype), kind((3, 40), dtype=dtype)):
        with pytest.raises(TypeError, match=str(np.dtype(dtype))):
            product()


@pytest.mark.parametrize("kind", [sp.csr_array, sp.csr_matrix, sp.csc_array], ids=lambda k: k.__name__)
def test_sparse_float16(kind):
    """SciPy creates none, but the values can be assigned."""
    x, y = kind(integers((3, 50))), kind(integers((3, 40)))
    for matrix in (x, y):
        matrix.data = matrix.data.astype(np.float16)
    calls = [lambda: x @ S.T, lambda: y @ S, lambda: S.project(x), lambda: S.project_adjoint(y)]
    for call in [*calls, lambda: S.project(x, out=np.zeros((3, 40))), lambda: S.project(x, dense_output=False)]:
        with pytest.raises(TypeError, match="float16"):
            call()


@pytest.mark.parametrize("x", ["abc", None, object(), {1: 2}, [[1, 2], ["a", "b"]]], ids=lambda x: type(x).__name__)
def test_missing_data(x):
    for function in (S.project, S.project_adjoint, S.__matmul__, S.T.__matmul__):
        with pytest.raises((TypeError, ValueError)):
            function(x)


def test_masked_arrays():
    x, y = (np.ma.masked_equal(integers((3, width)), 0) for width in (50, 40))
    for function, argument in ((S.project, x), (S.project_adjoint, y), (S.__matmul__, x.T), (S.T.__matmul__, y.T)):
        with pytest.raises(TypeError, match="masked"):
            function(argument)
    with pytest.raises(TypeError, match="out is a masked array"):
        S.project(np.ones((3, 50)), out=np.ma.zeros((3, 40)))


def test_sparse_vectors():
    for S_or_T, width in ((S, 50), (S.T, 40)):
        with pytest.raises(ValueError, match=rf"2 dimensions, got a sparse matrix of shape \({width},\)"):
            S_or_T @ sp.csr_array(np.ones(width))


@pytest.mark.parametrize("part", [slice(2.0, 4), slice(True, 3), slice(0, "4")])
def test_slices_that_are_not_integers(part):
    with pytest.raises(TypeError, match=r"sliced by integers, got (2\.0|True|'4')"):
        S[:, part]


@pytest.mark.parametrize(
    "shape", [(), (0,), (49,), (51,), (1,), (3, 49), (50, 3), (50, 1), (2, 50, 3), (3, 0)], ids=str
)
def test_wrong_widths(shape):
    x = np.zeros(shape, np.float32)
    for function, width in ((lambda: x @ S.T, 50), (lambda: S.project(x), 50), (lambda: x @ S, 40)):
        with pytest.raises(ValueError, match=rf"\b{width}\b") as refusal:
            function()
        assert str(shape) in str(refusal.value)


@pytest.mark.parametrize("shape", [(), (49,), (3, 50), (49, 3), (0, 3), (50, 3, 2), (2, 50, 3)])
def test_wrong_heights(shape):
    for operator, height, a in ((S, 50, np.zeros(shape)), (S.T, 40, np.zeros(shape))):
        with pytest.raises(ValueError, match=rf"\b{height}\b") as refusal:
            operator @ a
        assert str(shape) in str(refusal.value)


@pytest.mark.parametrize("kind", [sp.csr_array, sp.csc_matrix])
def test_wrong_sparse_shapes(kind):
    x = kind((7, 49))
    for function, width in ((lambda: x @ S.T, 50), (lambda: S @ x, 50), (lambda: x @ S, 40), (lambda: S.T @ x, 40)):
        with pytest.raises(ValueError, match=rf"\b{width}\b") as refusal:
            function()
        assert "7" in str(refusal.value)
        assert "49" in str(refusal.value)


def test_messages_suggest_the_matching_product():
    x, y = np.zeros((3, 50)), np.zeros((3, 40))
    for product, hint in (
        (lambda: x @ S, "use X @ S.T or S.project(X)"),
        (lambda: torch.zeros(3, 50) @ S, "use X @ S.T or S.project(X)"),
        (lambda: y @ S.T, "use Y @ S"),
        (lambda: S @ x, "for vectors in rows, use X @ S.T"),
        (lambda: S.T @ y, "for vectors in rows, use X @ S"),
    ):
        with pytest.raises(ValueError, match=re.escape(hint) + "$"):
            product()
    with pytest.raises(ValueError, match=r"\(3, 49\)$"):
        np.zeros((3, 49)) @ S.T


def test_scalars():
    for product in (lambda: 2.0 @ S, lambda: S @ 2.0, lambda: sjlt.project(np.float32(3), 5), lambda: S.T @ 3):
        with pytest.raises((TypeError, ValueError)):
            product()


def test_operator_times_operator():
    linear = aslinearoperator(np.ones((50, 50)))
    for product in (lambda: S @ S.T, lambda: S.T @ S, lambda: S @ linear, lambda: S.project(linear)):
        with pytest.raises(TypeError, match="aslinearoperator"):
            product()


@pytest.mark.parametrize("format", ["coo", "lil", "dok", "dia", "bsr"])
def test_other_sparse_formats(format):
    for product in products(
        sp.random_array((3, 50), format=format, rng=0), sp.random_array((3, 40), format=format, rng=0)
    ):
        with pytest.raises(TypeError, match=format.upper()):
            product()


# --------------------------------------------------------------------------------- malformed indices

DAMAGE = {
    "index too large": lambda x: x.indices.__setitem__(3, 10**6),
    "index at the end": lambda x: x.indices.__setitem__(3, 50),
    "negative index": lambda x: x.indices.__setitem__(3, -1),
    "pointer past the end": lambda x: x.indptr.__setitem__(-1, len(x.indices) + 10**6),
    "pointer backwards": lambda x: x.indptr.__setitem__(4, 0),
    "pointer far in the middle": lambda x: x.indptr.__setitem__(4, 10**8),
    "negative pointer": lambda x: x.indptr.__setitem__(1, -5),
    "first pointer": lambda x: x.indptr.__setitem__(0, 2),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", [sp.csr_array, sp.csr_matrix, sp.csc_array, sp.csc_matrix], ids=lambda k: k.__name__)
def test_malformed_indices(damage, kind):
    """A kernel that trusted such indices would read or write out of bounds."""
    x = kind(np.ones((50, 50), np.float32))
    DAMAGE[damage](x)
    square = Sketch(50, 50)
    for product in (
        lambda: square.project(x),
        lambda: square.project(x, out=np.zeros((50, 50)), accumulate=True),
        lambda: square.project(x, dense_output=False),
        lambda: square.project_adjoint(x),
        lambda: square @ x,
        lambda: square.T @ x,
    ):
        with pytest.raises(ValueError, match=r"."):
            product()


@pytest.mark.parametrize("kind", [sp.csr_array, sp.csc_array], ids=lambda k: k.__name__)
def test_missing_indices(kind):
    x = kind(np.ones((50, 50), np.float32))
    x.data = x.data[:-5]
    with pytest.raises(ValueError, match=r"."):
        x @ Sketch(50, 50).T


# --------------------------------------------------------------------------------- out


def both(x, y):
    """(name, call with out, shape of the result) for projecting x and for the adjoint of y."""
    yield lambda out, **o: S.project(x, out=out, **o), (*x.shape[:-1], 40)
    yield lambda out, **o: S.project_adjoint(y, out=out, **o), (*y.shape[:-1], 50)


DENSE = integers((7, 50)), integers((7, 40))
each_input = pytest.mark.parametrize(
    "data", [DENSE, tuple(map(sp.csr_array, DENSE)), tuple(map(sp.csc_array, DENSE))], ids=["dense", "csr", "csc"]
)


@each_input
def test_out_with_wrong_shape(data):
    for call, (n, width) in both(*data):
        for shape in ((n, width + 1), (n - 1, width), (width, n), (n * width,), (1, n, width), (n, 1), (0, width)):
            with pytest.raises(ValueError, match="shape") as refusal:
                call(np.zeros(shape, np.float32))
            assert str((n, width)) in str(refusal.value)
            assert str(shape) in str(refusal.value)


@each_input
@pytest.mark.parametrize("dtype", ["int64", "int32", "bool", "complex128", "longdouble", "object", ">f4", ">f8"])
def test_out_with_wrong_dtype(data, dtype):
    for call, shape in both(*data):
        with pytest.raises(TypeError, match="dtype"):
            call(np.zeros(shape, dtype))


@each_input
def test_out_that_is_not_an_array(data):
    for call, (n, width) in both(*data):
        for out in ([[0.0] * width] * n, sp.csr_array((n, width)), "out", 3):
            with pytest.raises(TypeError, match="out"):
                call(out)


@each_input
def test_read_only_or_overlapping_out(data):
    for call, shape in both(*data):
        out = np.zeros(shape, np.float32)
        out.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            call(out)
        for narrow in (np.zeros(shape[1:], np.float32), np.zeros((shape[0], 1), np.float32)):
            # Writeable zero strides (np.broadcast_to would be read-only).
            repeated = np.lib.stride_tricks.as_strided(
                narrow, shape, (0, 4) if narrow.ndim == 1 else (4, 0), writeable=True
            )
            with pytest.raises(ValueError, match="memory"):
                call(repeated)
            assert not narrow.any()
        line = np.zeros(sum(shape), np.float32)  # overlapping windows
        windows = np.lib.stride_tricks.as_strided(line, shape, (4, 4), writeable=True)
        with pytest.raises(ValueError, match="memory"):
            call(windows)
        assert not line.any()


@each_input
def test_accumulate_requires_out(data):
    for call, shape in both(*data):
        with pytest.raises(ValueError, match="out"):
            call(None, accumulate=True)
        with pytest.raises(TypeError, match="float32, float64"):
            call(np.zeros(shape, np.float16), accumulate=True)


def test_out_overlapping_the_input():
    memory = np.zeros((20, 200), np.float32)
    for call_of, width, result in ((S.project, 50, 40), (S.project_adjoint, 40, 50)):
        for x, out in (
            (memory[:, :width], memory[:, :result]),
            (memory[:, :width], memory[:, width - 1 : width - 1 + result]),
            (memory[:10, :width], memory[9:19, :result]),
            (memory[:, : 2 * width : 2], memory[:, : 3 * result : 3]),
        ):
            with pytest.raises(ValueError, match="memory"):
                call_of(x, out=out)
    # The memory between its elements may belong to another array.
    x, out = memory[:, :100:2], memory[:, 1:81:2]
    x[...] = integers(x.shape)
    np.testing.assert_array_equal(S.project(x, out=out), x @ S.T)


def test_refused_calls_do_not_modify_out():
    out = np.full((7, 40), 7, np.float32)
    for x in (np.zeros((7, 51)), np.zeros((7, 50), complex), np.zeros((6, 50))):
        with pytest.raises((TypeError, ValueError)):
            S.project(x, out=out)
    assert (out == 7).all()


def test_sparse_results_do_not_accept_out():
    x = sp.csr_array(integers((7, 50)))
    for options in ({"out": np.zeros((7, 40))}, {"accumulate": True}, {"out": np.zeros((7, 40)), "accumulate": True}):
        with pytest.raises(ValueError, match="dense_output"):
            S.project(x, dense_output=False, **options)


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        S.project(integers((7, 50)), np.zeros((7, 40)))


@pytest.mark.parametrize(
    "n",
    [0, -1, 1.5, 2.0, "2", None, True, np.True_, np.float64(2), np.int64(0), [2], -(2**70)],
    ids=repr,
)
def test_thread_counts(n):
    before = sjlt.get_num_threads()
    with pytest.raises((TypeError, ValueError), match="threads"):
        sjlt.set_num_threads(n)
    assert sjlt.get_num_threads() == before


@pytest.mark.parametrize("value", ["no", None, 1, 2.0])
def test_flags(value):
    x, out, S = np.ones((2, 30)), np.zeros((2, 8)), Sketch(30, 8)
    message = re.escape(f"must be True or False, got {value!r} of type")
    for call in (
        lambda: S.project(x, out=out, accumulate=value),
        lambda: S.project(torch.from_numpy(x), out=torch.from_numpy(out), accumulate=value),
        lambda: S.project(x, dense_output=value),
        lambda: S.project_adjoint(out, accumulate=value),
        lambda: S.project_tree([torch.ones(30)], batched=value),
        lambda: S.adjoint_tree(torch.ones(8), [torch.ones(30)], batched=value),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    assert (out == 0).all()
    S.project(x, out=out, accumulate=np.True_)
    np.testing.assert_array_equal(out, S.project(x))
