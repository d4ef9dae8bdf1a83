"""Random public calls: correct results for supported data, TypeError or ValueError for everything else.

Hypothesis draws the calls within a fixed budget; a failure is shrunk and printed as a reproducible call.
"""

import math

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import sjlt
from sjlt import Sketch
from sjlt.files.errors import UserError

pytestmark = pytest.mark.exhaustive
budget = settings(max_examples=100, derandomize=True, suppress_health_check=list(HealthCheck))

EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


# --------------------------------------------------------------------------------- valid calls


@st.composite
def sketches(draw):
    k = draw(st.integers(1, 300))
    n_features = draw(st.integers(0, 200))
    if draw(st.booleans()):
        stacks = draw(st.sampled_from([t for t in (1, 1, 2, 3, 4, 8) if k % t == 0]))
        part = k // stacks
        law = {"nnz": stacks * draw(st.integers(1, part // -(-part // 128))), "stacks": stacks}
    else:
        law = {"density": draw(st.sampled_from([0.001, 0.03, 1 / 16, 0.3, 1.0]))}
    S = Sketch(n_features + 7, k, seed=draw(st.integers(-(2**63), 2**64 - 1)), **law)
    start = draw(st.integers(0, 7))
    return S[:, start : start + n_features]


@st.composite
def strided(draw, shape, dtype, writable=False):
    """An array of the given shape in any memory order, with steps of either sign, unaligned, or broadcast."""
    axes = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 2, -1, -2])) for _ in shape]
    memory = np.zeros([shape[a] * abs(steps[a]) for a in axes], dtype)
    if draw(st.integers(0, 5)) == 0:
        memory = np.zeros(memory.nbytes + 1, np.uint8)[1:].view(dtype).reshape(memory.shape)
    array = memory.transpose([axes.index(a) for a in range(len(shape))])
    array = array[tuple(slice(None, None, step) for step in steps)]
    values = np.random.default_rng(draw(st.integers(0, 99))).integers(-3, 4, shape)
    array[...] = np.abs(values) if np.dtype(dtype).kind in "ub" else values
    if not writable and len(shape) > 1 and shape[0] and draw(st.integers(0, 5)) == 0:
        array = np.broadcast_to(array[:1], shape)
    return array


def exact(matrix, x, width):
    """(x @ matrix.T, the sums of absolute terms) in fp64, for x with any leading shape."""
    rows = np.asarray(x).astype(np.float64).reshape(math.prod(np.shape(x)[:-1]), matrix.shape[1])
    shape = (*np.shape(x)[:-1], width)
    return (rows @ matrix.T).reshape(shape), (np.abs(rows) @ np.abs(matrix).T).reshape(shape)


def assert_close(actual, expected, terms, *dtypes):
    eps = max(EPS[name] for name in dtypes)
    assert actual.shape == expected.shape
    bound = eps * (np.abs(expected) + 64 * terms) if eps < 2.0**-20 else 2 * eps * np.abs(expected) + 2.0**-18 * terms
    assert (np.abs(actual.astype(np.float64) - expected) <= bound + 1e-7 * (eps > 2.0**-12)).all()


def name_of(dtype):
    return np.dtype(dtype).newbyteorder("=").name if np.dtype(dtype).kind == "f" else "float64"


@given(data=st.data(), S=sketches(), adjoint=st.booleans())
@budget
def test_arrays(data, S, adjoint):
    function, width, height = (S.project_adjoint, *S.shape) if adjoint else (S.project, *S.shape[::-1])
    matrix = S.toarray().T if adjoint else S.toarray()
    lead = data.draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = data.draw(st.sampled_from(["f2", "f4", "f8", ">f2", ">f4", ">f8", "i1", "u2", ">i8", "?"]))
    x = data.draw(strided((*lead, width), dtype))
    before = x.copy()
    expected, terms = exact(matrix, x, height)
    assert_close(function(x), expected, terms, name_of(dtype))
    if len(lead) <= 1:
        product = (S.T @ x.T if adjoint else S @ x.T).T
        assert_close(product, expected, terms, name_of(dtype))
    out_dtype = data.draw(st.sampled_from(["float32", "float64"]))
    out = data.draw(strided(expected.shape, out_dtype, writable=True))
    start = out.astype(np.float64)
    assert function(x, out=out, accumulate=True) is out
    assert_close(out, start + expected, np.abs(start) + terms, name_of(dtype), out_dtype)
    np.testing.assert_array_equal(x, before)


@given(data=st.data(), S=sketches(), adjoint=st.booleans())
@budget
def test_sparse_matrices(data, S, adjoint):
    function, width, height = (S.project_adjoint, *S.shape) if adjoint else (S.project, *S.shape[::-1])
    n = data.draw(st.integers(0, 6))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    dense = rng.integers(-3, 4, (n, width)) * (rng.random((n, width)) < data.draw(st.sampled_from([0, 0.1, 0.7])))
    dtype = data.draw(st.sampled_from(["f4", "f8", "i4", "u1", ">f8"]))
    dense = np.abs(dense) if dtype == "u1" else dense
    kind = data.draw(st.sampled_from([sp.csr_array, sp.csr_matrix, sp.csc_array, sp.csc_matrix]))
    x = kind(dense.astype(np.dtype(dtype).newbyteorder("=")))
    x.data = x.data.astype(dtype)
    index = data.draw(st.sampled_from(["i4", "i8"]))
    x.indices, x.indptr = x.indices.astype(index), x.indptr.astype(index)
    expected, terms = exact(S.toarray().T if adjoint else S.toarray(), dense, height)
    assert_close(function(x), expected, terms, name_of(dtype))
    if not adjoint:
        result = S.project(x, dense_output=False)
        assert_close(result.toarray(), expected, terms, name_of(dtype))
    product = (S.T @ x.T if adjoint else S @ x.T).T
    assert_close(product, expected, terms, name_of(dtype))


@given(data=st.data(), S=sketches(), adjoint=st.booleans())
@budget
def test_tensors(data, S, adjoint):
    function, width, height = (S.project_adjoint, *S.shape) if adjoint else (S.project, *S.shape[::-1])
    lead = data.draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = data.draw(st.sampled_from(["float16", "bfloat16", "float32", "float64"]))
    array = np.abs(data.draw(strided((*lead, width), "float64")))
    memory = torch.from_numpy(array.copy()).to(getattr(torch, dtype))
    axes = data.draw(st.permutations(range(memory.ndim)))
    x = memory.permute(axes).contiguous().permute([axes.index(a) for a in range(memory.ndim)])
    expected, terms = exact(S.toarray().T if adjoint else S.toarray(), array, height)
    assert_close(function(x).double().numpy(), expected, terms, dtype)
    out = torch.full(expected.shape, 3.0, dtype=torch.float64)
    assert function(x, out=out, accumulate=True) is out
    assert_close(out.numpy(), 3 + expected, 3 + terms, "float32" if dtype != "float64" else dtype)


@given(
    data=st.data(), p=st.floats(0.01, 0.99), seed=st.integers(-(2**63), 2**64 - 1), bits=st.sampled_from([8, 16, 32])
)
@budget
def test_dropout(data, p, seed, bits):
    lead = data.draw(st.lists(st.integers(0, 5), max_size=2))
    shape = (*lead, data.draw(st.integers(0, 40)))
    x = data.draw(strided(shape, "float64", writable=True))
    options = {"step": data.draw(st.integers(0, 2**32 - 1)), "offset": data.draw(st.integers(0, 2**62)), "bits": bits}
    mask = sjlt.dropout_mask(shape, p, seed, **options)
    expected = sjlt.masked_dropout(x, mask, p, bits)
    np.testing.assert_array_equal(sjlt.dropout(x, p, seed, **options), expected)
    tensor = sjlt.dropout(torch.from_numpy(x.copy()), p, seed, **options)
    np.testing.assert_array_equal(tensor.numpy(), expected)
    assert sjlt.dropout(x, p, seed, **options, inplace=True) is x
    np.testing.assert_array_equal(x, expected)


# --------------------------------------------------------------------------------- invalid calls

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 300),
    st.floats(allow_nan=True),
    st.complex_numbers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from(["auto", "int8", "cuda", np.nan, np.inf, np.float32(3), np.int8(-1), np.uint64(2**63), ...]),
    st.lists(st.integers(-3, 3), max_size=3),
    st.tuples(st.integers(-3, 300), st.integers(-3, 300)),
    st.sampled_from([slice(None), slice(3, 1, -1), range(3), {}, {"law": 1}, set(), object, print, int, np.float64]),
    st.builds(lambda shape, dtype: np.zeros(shape, dtype),
              st.lists(st.integers(0, 5), max_size=3),
              st.sampled_from(["f4", "f8", "i8", "c16", "O", "U1", "M8[s]", ">f4", "i4,f4", "g", "?"])),
    st.builds(lambda shape, dtype: torch.zeros(shape, dtype=dtype),
              st.lists(st.integers(0, 5), max_size=3),
              st.sampled_from([torch.float32, torch.int64, torch.complex64, torch.bool, torch.bfloat16])),
    st.builds(lambda kind: kind(np.eye(4)), st.sampled_from([sp.csr_array, sp.coo_array, sp.csc_matrix, sp.lil_array])),
    st.sampled_from([Sketch(5, 4), Sketch(5, 4).T, torch.zeros(3, device="meta"), torch.eye(4).to_sparse()]),
)  # fmt: skip
X, T, A = np.ones((2, 5)), torch.ones(2, 5), np.random.default_rng(0).normal(size=(60, 5))
CALLS = {
    "Sketch": lambda a, b, c: Sketch(a, b, nnz=c),
    "density": lambda a, b, c: Sketch(a, 7, density=b, feature_offset=c),
    "seed": lambda a, b, c: Sketch(a, 7, seed=b, nnz=c),
    "from_dict": lambda a, b, c: Sketch.from_dict({**Sketch(5, 4).to_dict(), "nnz": a, "seed": b, "law": c}),
    "threshold": lambda a, b, c: Sketch.from_dict({**Sketch(5, 4, density=1).to_dict(), "bits": a, "threshold": b}),
    "any dict": lambda a, b, c: Sketch.from_dict(a),
    "slice": lambda a, b, c: Sketch(5, 4)[a, b],
    "bounds": lambda a, b, c: Sketch(5, 4)[:, a:b:c],
    "entries": lambda a, b, c: Sketch(5, 4).entries(a, b),
    "to_scipy": lambda a, b, c: Sketch(5, 4).to_scipy(a, b),
    "project": lambda a, b, c: Sketch(5, 4).project(a, out=b),
    "out": lambda a, b, c: Sketch(5, 4).project(X, out=a, accumulate=b is True),
    "out of tensors": lambda a, b, c: Sketch(5, 4).project(T, out=a, accumulate=b is True),
    "adjoint": lambda a, b, c: Sketch(5, 4).project_adjoint(a, out=b),
    "S @": lambda a, b, c: Sketch(5, 4) @ a,
    "S.T @": lambda a, b, c: Sketch(5, 4).T @ a,
    "@ S": lambda a, b, c: a @ Sketch(5, 4),
    "tree": lambda a, b, c: Sketch(5, 4).project_tree([a, {"b": b}], batched=c is True),
    "one call": lambda a, b, c: sjlt.project(a, b, nnz=c),
    "dropout": lambda a, b, c: sjlt.dropout(a, b, c),
    "dropout of arrays": lambda a, b, c: sjlt.dropout(X, a, b, step=c),
    "dropout of tensors": lambda a, b, c: sjlt.dropout(T, 0.5, a, step=b, bits=c),
    "offset": lambda a, b, c: sjlt.dropout(X, 0.5, 1, offset=a, row_stride=b, bits=c),
    "in place": lambda a, b, c: sjlt.dropout(a, 0.5, b, inplace=True),
    "residual": lambda a, b, c: sjlt.dropout_add(X, a, 0.5, 1),
    "mask": lambda a, b, c: sjlt.dropout_mask(a, b, c) if small(a) else None,
    "masked": lambda a, b, c: sjlt.masked_dropout(a, b, 0.5, c),
    "stacks": lambda a, b, c: Sketch(5, a, nnz=b, stacks=c),
    "data of stacks": lambda a, b, c: Sketch(5, 4, nnz=4, stacks=2).project(a, out=b),
    "adjoint of stacks": lambda a, b, c: Sketch(5, 4, nnz=4, stacks=2).project_adjoint(a, out=b),
    "least squares": lambda a, b, c: sjlt.linalg.lstsq(A, a, damp=b, seed=c),
    "matrices": lambda a, b, c: sjlt.linalg.lstsq(a, np.ones(60), rcond=b),
    "low rank": lambda a, b, c: sjlt.linalg.svd_lowrank(A, a, oversampling=b, n_iter=0, seed=c),
    "qr": lambda a, b, c: sjlt.linalg.qr(A, seed=a, pivoting=b is True),
    "leverage": lambda a, b, c: sjlt.linalg.leverage_scores(A, rcond=a, seed=b),
    "SVDSketch": lambda a, b, c: sjlt.linalg.SVDSketch((60, 5), 2).update(a, b),
    "bytes": lambda a, b, c: sjlt.linalg.SVDSketch.from_bytes(a),
    "adjoint tree": lambda a, b, c: Sketch(5, 4).adjoint_tree(a, b),
    "faiss": lambda a, b, c: sjlt.faiss.transform(a) if not isinstance(a, Sketch) else None,
    "Dense": lambda a, b, c: sjlt.sentence_transformers.dense(a) if not isinstance(a, Sketch) else None,
    "arrow": lambda a, b, c: sjlt.arrow.Projector(a, b, n_features=c),
    "table": lambda a, b, c: sjlt.arrow.Projector("v", 4)(a),
    "threads": lambda a, b, c: sjlt.set_num_threads(a) if not isinstance(a, int) or a < 1 else None,
    "layer": lambda a, b, c: sjlt.nn.SparseProjection(a, b, seed=c) if small(a) and small(b) else None,
    "dropout layer": lambda a, b, c: sjlt.nn.SeededDropout(a, seed=b, bits=c)(T),
}  # fmt: skip


def small(value):
    """Whether a number or shape is too small to exhaust memory."""
    lengths = value if isinstance(value, (list, tuple)) else [value]
    return math.prod(n for n in lengths if isinstance(n, (int, np.integer))) < 10**6


def is_a_refusal(error):
    """Whether an error is of a refusal type and has a message; anything else is a crash."""
    kinds = (TypeError, ValueError, RuntimeError, FileNotFoundError, UserError)  # the text may be a path
    return (
        isinstance(error, kinds) and bool(str(error)) and not isinstance(error, (RecursionError, NotImplementedError))
    )


@given(name=st.sampled_from(sorted(CALLS)), a=JUNK, b=JUNK, c=JUNK)
@settings(budget, max_examples=2_000)
@example("project", None, None, None)
@example("dropout", None, None, None)
@example("any dict", {}, None, None)
def test_random_calls_are_refused_or_correct(name, a, b, c):
    try:
        CALLS[name](a, b, c)
    except Exception as error:
        if not is_a_refusal(error):
            raise
