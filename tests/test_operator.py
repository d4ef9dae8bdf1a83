"""`Sketch` as a value (equality, hash, pickle, repr, dict, slices) and as a SciPy linear operator."""

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
import scipy.sparse.linalg
from helpers.data import exact_project, integers, same

import sjlt
from sjlt import Sketch

LAST = 2**63 - 1

SKETCHES = [
    Sketch(1000, 128),
    Sketch(1000, 128, nnz=1, seed=2**64 - 1),
    Sketch(0, 1, seed=-5),
    Sketch(LAST, 8_388_480, nnz=128),
    Sketch(1000, 128)[:, 10:90],
    Sketch(LAST, 129, seed=7)[:, 2**40 :],
    Sketch(1000, 128)[:, 40:40],
    Sketch(1000, 128)[:, 1000:],
]
each_sketch = pytest.mark.parametrize("S", SKETCHES, ids=repr)


# --------------------------------------------------------------------------------- value semantics


@each_sketch
def test_copies_are_equal(S):
    copies = [
        pickle.loads(pickle.dumps(S)),
        copy.copy(S),
        copy.deepcopy(S),
        eval(repr(S), {"Sketch": Sketch}),
        Sketch.from_dict(S.to_dict()),
        Sketch.from_dict(json.loads(json.dumps(S.to_dict()))),
        S[:, :],
        S.T.T,
    ]
    for other in copies:
        assert other == S
        assert hash(other) == hash(S)
        assert other.shape == S.shape == (S.n_components, S.n_features)
        assert other.feature_offset == S.feature_offset
    assert pickle.loads(pickle.dumps(S.T)) == S.T
    assert eval(repr(S.T), {"Sketch": Sketch}) == S.T
    assert len(pickle.dumps(S)) < 400


@each_sketch
def test_unequal_sketches(S):
    others = [Sketch(77, 128), *(T for T in SKETCHES if T is not S), S.T, None, S.to_dict()]
    assert all(other != S for other in others)
    assert len({*SKETCHES, S}) == len(SKETCHES)


def test_equality_depends_on_each_argument():
    S = Sketch(1000, 128, nnz=4, seed=1)
    for other in (
        Sketch(1001, 128, nnz=4, seed=1),
        Sketch(1000, 129, nnz=4, seed=1),
        Sketch(1000, 128, nnz=3, seed=1),
        Sketch(1000, 128, nnz=4, seed=2),
        Sketch(1001, 128, nnz=4, seed=1)[:, 1:],
    ):
        assert other != S


@pytest.mark.parametrize("name", ["n_features", "n_components", "nnz", "seed", "feature_offset", "shape", "new"])
def test_frozen(name):
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
        setattr(Sketch(10, 5), name, 1)


@pytest.mark.parametrize(("seed", "same_seed"), [(-1, 2**64 - 1), (-(2**63), 2**63), (-2, 2**64 - 2), (5, 5)])
def test_seeds_are_reduced_modulo_2_64(seed, same_seed):
    a, b = Sketch(300, 64, seed=seed), Sketch(300, 64, seed=same_seed)
    assert a == b
    assert hash(a) == hash(b)
    assert (a.to_scipy() != b.to_scipy()).nnz == 0


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint64", "int32"])
def test_numpy_integers_are_accepted(dtype):
    number = np.dtype(dtype).type
    assert Sketch(number(100), number(64), nnz=number(2), seed=number(3)) == Sketch(100, 64, nnz=2, seed=3)
    assert json.dumps(Sketch(number(100), number(64), nnz=number(2), seed=number(3)).to_dict())
    assert Sketch(100, 64)[:, number(3) : number(50)] == Sketch(100, 64)[:, 3:50]


def test_feature_offset():
    assert Sketch(5, 128, seed=2, feature_offset=7) == Sketch(1000, 128, seed=2)[:, 7:12]
    assert Sketch(5, 128, feature_offset=np.int64(7)).to_dict() == Sketch(1000, 128)[:, 7:12].to_dict()
    assert Sketch(10, 5, feature_offset=LAST - 10)[:, 3:].feature_offset == LAST - 7
    part = dataclasses.replace(Sketch(1000, 128)[:, 5:10], seed=9)
    assert part == Sketch(1000, 128, seed=9)[:, 5:10]
    np.testing.assert_array_equal(part.toarray(), Sketch(1000, 128, seed=9).toarray()[:, 5:10])
    with pytest.raises(TypeError):
        Sketch(10, 5, 1)  # the options are keyword-only


class Named(Sketch):
    """A subclass with a method of its own."""

    def name(self):
        return f"sketch of {self.n_components}"


def test_subclasses_are_preserved():
    S = Named(1000, 128, seed=3)
    for other in (S[:, 5:10], S[:, 5:10][:, 1:], pickle.loads(pickle.dumps(S)), pickle.loads(pickle.dumps(S[:, 5:])),
                  copy.deepcopy(S), Named.from_dict(S.to_dict()), dataclasses.replace(S, seed=4), S.T.T):  # fmt: skip
        assert type(other) is Named
        assert other.name() == "sketch of 128"
    assert S[:, 5:10].to_dict() == Sketch(1000, 128, seed=3)[:, 5:10].to_dict()
    assert pickle.loads(pickle.dumps(S[:, 5:])) == S[:, 5:]
    assert pickle.loads(pickle.dumps(S.T)) == S.T


def test_auto_nnz():
    assert Sketch(10, 128, nnz="auto") == Sketch(10, 128, nnz=4) == Sketch(10, 128)
    assert Sketch(10, 3) == Sketch(10, 3, nnz=3)


def test_dict_of_a_slice_has_its_offset():
    assert Sketch(1000, 128, seed=-1)[:, 10:90].to_dict() == {
        "law": 1,
        "n_features": 80,
        "n_components": 128,
        "nnz": 4,
        "seed": 2**64 - 1,
        "feature_offset": 10,
    }


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_dict_of_an_unknown_law_is_refused(version):
    with pytest.raises(ValueError, match=rf"law 1.*{version!r}"):
        Sketch.from_dict({**Sketch(10, 5).to_dict(), "law": version})


def test_dict_with_missing_or_unknown_keys_is_refused():
    good = Sketch(10, 5).to_dict()
    for key in good:
        with pytest.raises(ValueError, match=r"law|keys"):
            Sketch.from_dict({k: v for k, v in good.items() if k != key})
    with pytest.raises(ValueError, match="density"):
        Sketch.from_dict({**good, "density": 0.1})


@pytest.mark.parametrize(
    ("key", "value"),
    [("n_features", -1), ("n_features", 1.0), ("n_components", "5"), ("nnz", 6), ("seed", 2**64), ("seed", None),
     ("feature_offset", -1), ("feature_offset", LAST - 9), ("feature_offset", 0.5), ("n_features", True)],
)  # fmt: skip
def test_dict_with_bad_values_is_refused(key, value):
    with pytest.raises((TypeError, ValueError), match=key):
        Sketch.from_dict({**Sketch(10, 5).to_dict(), key: value})


# --------------------------------------------------------------------------------- slices

BOUNDS = [(None, None), (None, 7), (7, None), (3, 9), (0, 0), (9, 3), (99, 100), (100, 100)]
BOUNDS += [(-5, None), (None, -5), (-9, -2), (50, 999), (-999, 4), (-(2**70), 2**70)]


@pytest.mark.parametrize(("a", "b"), BOUNDS)
def test_slice_bounds_match_python(a, b):
    S = Sketch(100, 64, seed=2)
    part = S[:, a:b]
    np.testing.assert_array_equal(part.toarray(), S.toarray()[:, a:b])
    assert part.n_features == len(range(100)[a:b])
    assert part == S[:, slice(a, b, 1)]
    np.testing.assert_array_equal(part[:, 2:-2].toarray(), S.toarray()[:, a:b][:, 2:-2])


def test_slices_of_slices():
    S = Sketch(LAST, 500, seed=3)
    assert S[:, 2**34 :][:, 100:200][:, 5:15] == S[:, 2**34 + 105 : 2**34 + 115]
    assert S[:, 5:5].feature_offset == 5
    assert S[:, LAST - 3 :].n_features == 3


@pytest.mark.parametrize(
    "key",
    [5, slice(0, 5), (slice(0, 5), slice(None)), (slice(None), 3), (slice(None), [1, 2]), (slice(None),) * 3, ...,
     None, (0, slice(None)), np.arange(3), "a", (slice(None), slice(0, 9, 2)), (slice(None), slice(None, None, -1)),
     (slice(None, None, 1), slice(0, 0, 3)), (np.array([1, 2]), slice(None)), (slice(None), np.array([1, 2])),
     (np.zeros((2, 2)), slice(0, 5))],
    ids=str,
)  # fmt: skip
def test_other_slices_are_refused(key):
    with pytest.raises((TypeError, ValueError), match=r"column|step"):
        Sketch(100, 64)[key]


def test_sketch_is_not_a_sequence():
    # It has __getitem__, so iter() would otherwise count rows forever.
    with pytest.raises(TypeError):
        list(Sketch(100, 64))


# --------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("name", ["n_features", "n_components", "nnz", "seed", "feature_offset"])
@pytest.mark.parametrize("value", [True, np.True_, 1.0, np.float64(2), "3", None, 2j, [4], np.array([4])], ids=repr)
def test_non_integer_arguments_are_refused(name, value):
    arguments = {"n_features": 10, "n_components": 5, name: value}
    with pytest.raises(TypeError, match=name):
        Sketch(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [("n_features", -1), ("n_features", 2**63), ("n_components", 0), ("n_components", -3),
     ("n_components", 8_388_481), ("nnz", 0), ("nnz", -1), ("nnz", 6), ("seed", 2**64), ("seed", -(2**63) - 1),
     ("feature_offset", -1), ("feature_offset", LAST - 9), ("feature_offset", 2**63)],
)  # fmt: skip
def test_arguments_out_of_range_are_refused(name, value):
    arguments = {"n_features": 10, "n_components": 5, name: value}
    with pytest.raises(ValueError, match=rf"{name}.*{value}"):
        Sketch(**arguments)


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (0, 101), (6, 5), (1.0, 5), (0, "5"), (True, 5)])
def test_entries_outside_the_sketch_are_refused(start, stop):
    with pytest.raises((TypeError, ValueError), match=r"start|stop"):
        Sketch(100, 64).entries(start, stop)


def test_one_call_form():
    x = integers((4, 3, 200))
    same(sjlt.project(x, 64, nnz=16, seed=-3), exact_project(Sketch(200, 64, nnz=16, seed=-3), x))
    out = np.empty((4, 3, 64), np.float64)
    assert sjlt.project(x, 64, out=out) is out
    same(out, exact_project(Sketch(200, 64), x, "float64"))


# --------------------------------------------------------------------------------- conversion to matrices


@pytest.mark.parametrize("format", ["csc", "csr", "coo"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("S", [Sketch(300, 100, nnz=3), Sketch(0, 5), Sketch(900, 257, seed=4)[:, 37:120]], ids=repr)
def test_to_scipy_has_the_entries(S, format, dtype):
    rows, signs = S.entries()
    dense = np.zeros(S.shape)
    dense[rows, np.arange(S.n_features)] = signs / np.sqrt(S.nnz)
    for operator, expected in ((S, dense), (S.T, dense.T)):
        matrix = operator.to_scipy(format, dtype)
        assert isinstance(matrix, scipy.sparse.sparray)
        assert matrix.format == format
        assert matrix.nnz == S.nnz * S.n_features
        if format != "coo":
            assert matrix.has_canonical_format
        same(matrix.toarray(), expected.astype(dtype))
        same(operator.toarray(dtype), expected.astype(dtype))


@pytest.mark.parametrize("dtype", [int, "int8", "uint64", bool, complex, object])
def test_integer_dtypes_are_refused(dtype):
    # Integer dtypes would round all entries to 0 for nnz > 1.
    for operator in (Sketch(20, 10, nnz=4), Sketch(20, 10, nnz=1), Sketch(20, 10).T):
        for call in (operator.toarray, lambda dtype, operator=operator: operator.to_scipy(dtype=dtype)):
            with pytest.raises(TypeError, match="float"):
                call(dtype)


@pytest.mark.parametrize("dtype", ["float16", ">f4", ">f8"])
def test_dtypes_that_scipy_does_not_support(dtype):
    """Sparse matrices refuse them; dense arrays are rounded once."""
    S = Sketch(20, 10, nnz=3)
    with pytest.raises(TypeError, match="use float32 or float64"):
        S.to_scipy(dtype=dtype)
    same(S.toarray(dtype), S.toarray().astype(dtype))
    same(S.T.toarray(dtype), S.T.toarray().astype(dtype))


# --------------------------------------------------------------------------------- SciPy's operator protocol


@pytest.mark.parametrize("transposed", [False, True])
def test_linear_operator_protocol(transposed):
    S = Sketch(300, 64)
    operator = S.T if transposed else S
    dense = operator.toarray()
    m, n = operator.shape
    A, B = integers((n, 5), "float64"), integers((m, 5), "float64")
    for linear in (operator, scipy.sparse.linalg.aslinearoperator(operator)):
        assert linear.shape == (m, n)
        assert linear.dtype == np.float64
        same(linear.matmat(A), dense @ A)
        same(linear.rmatmat(B), dense.T @ B)
        same(linear.matvec(A[:, 0]), dense @ A[:, 0])
        same(linear.rmatvec(B[:, 0]), dense.T @ B[:, 0])
    # Including columns, which SciPy's own operators accept up to version 1.18.
    same(operator.matvec(A[:, :1]), dense @ A[:, :1])
    same(operator.rmatvec(B[:, :1]), dense.T @ B[:, :1])


def test_lsqr_solves_with_the_operator():
    S = Sketch(400, 60, nnz=4, seed=3)  # S.T y = b: 400 equations for 60 unknowns
    b = np.random.default_rng(0).normal(size=400)
    expected = np.linalg.lstsq(S.toarray().T, b)[0]
    solution = scipy.sparse.linalg.lsqr(S.T, b, atol=1e-14, btol=1e-14)[0]
    np.testing.assert_allclose(solution, expected, rtol=0, atol=1e-11)


def test_sketched_least_squares_with_lsqr():
    # min ||S (A x - b)|| by composing the operators.
    rng = np.random.default_rng(1)
    S, A, b = Sketch(2000, 200), rng.normal(size=(2000, 10)), rng.normal(size=2000)
    composed = scipy.sparse.linalg.aslinearoperator(S) @ scipy.sparse.linalg.aslinearoperator(A)
    solution = scipy.sparse.linalg.lsqr(composed, S @ b, atol=1e-14, btol=1e-14)[0]
    np.testing.assert_allclose(solution, np.linalg.lstsq(S @ A, S @ b)[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("transposed", [False, True])
def test_svds_accepts_the_operator(transposed):
    S = Sketch(150, 40, seed=5)
    operator = S.T if transposed else S
    v0 = np.ones(min(operator.shape))
    values = scipy.sparse.linalg.svds(operator, k=5, v0=v0, return_singular_vectors=False)
    expected = np.linalg.svd(operator.toarray(), compute_uv=False)[:5]
    np.testing.assert_allclose(np.sort(values)[::-1], expected, rtol=1e-10)
