"""Invalid input to `sjlt.linalg` is refused, with the values in the message, before any work or in the first pass."""

import numpy as np
import pytest
import scipy.sparse
import torch

from sjlt.linalg import SVDSketch, leverage_scores, lstsq, qr, svd_lowrank

A = np.random.default_rng(0).standard_normal((2000, 6))
b = np.ones(2000)
ALL = {
    "lstsq": lambda a: lstsq(a, np.ones(a.shape[0])),
    "qr": qr,
    "leverage_scores": leverage_scores,
    "svd_lowrank": lambda a: svd_lowrank(a, 2),
    "SVDSketch": lambda a: SVDSketch(a.shape, 2).update(0, a),
}
each = pytest.mark.parametrize("name", ALL)


def with_value(i, j, value):
    bad = A.copy()
    bad[i, j] = value
    return bad


@each
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(name, value):
    with pytest.raises(ValueError, match=r"1234"):
        ALL[name](with_value(1234, 5, value))


@each
@pytest.mark.parametrize("dtype", ["complex128", "complex64", "int64", "int8", "bool", "float16", ">f8", "O"])
def test_dtypes(name, dtype):
    with pytest.raises(TypeError, match=f"float32 or float64.*{np.dtype(dtype)}|dtype"):
        ALL[name](np.ones((2000, 6)).astype(dtype))


@each
def test_other_containers(name):
    for bad in (scipy.sparse.coo_array(A), np.ma.masked_array(A), torch.ones(50, 6, dtype=torch.int64)):
        with pytest.raises(TypeError):
            ALL[name](bad)


@each
def test_malformed_sparse_matrices(name):
    """Indices outside A would make a kernel access memory out of bounds."""
    for index in (9, -1, 100_000_000):
        bad = scipy.sparse.csr_array(A[:300])
        bad.indices[777] = index
        with pytest.raises(ValueError, match=f"malformed CSR: indices must be from .*{index}"):
            ALL[name](bad)
    bad = scipy.sparse.csc_array(A[:300])
    bad.indptr[3] = 10_000_000
    with pytest.raises(ValueError, match="malformed CSC: indptr"):
        ALL[name](bad)


@each
def test_arrays_that_are_not_in_memory(name):
    dask = pytest.importorskip("dask.array")
    with pytest.raises(TypeError, match="is a dask array: load it"):
        ALL[name](dask.from_array(A))


@pytest.mark.parametrize("name", ["lstsq", "qr", "leverage_scores", "svd_lowrank"])
def test_callbacks_that_cannot_be_called(name):
    call = {"qr": qr, "leverage_scores": leverage_scores}.get(name) or {
        "lstsq": lambda a, callback: lstsq(a, b, callback=callback),
        "svd_lowrank": lambda a, callback: svd_lowrank(a, 2, callback=callback),
    }[name]
    with pytest.raises(TypeError, match="callback must be callable, got 3"):
        call(A, callback=3)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (5,), (2, 3, 4), ()])
def test_shapes_of_a(shape):
    for function in (qr, leverage_scores, lambda a: svd_lowrank(a, 1), lambda a: lstsq(a, b)):
        with pytest.raises(ValueError, match=str(shape).replace("(", r"\(").replace(")", r"\)")):
            function(np.ones(shape))


@pytest.mark.parametrize("bad", [np.ones(1999), np.ones((2000, 0)), np.ones((1, 2000)), np.ones((2000, 1, 1)), 3.0])
def test_shapes_of_b(bad):
    with pytest.raises(ValueError, match=r"b must have shape \(2000,\) or \(2000, columns\)"):
        lstsq(A, bad)


def test_values_and_dtypes_of_b():
    for dtype in (complex, object, str):
        with pytest.raises(TypeError, match="b must be real"):
            lstsq(A, b.astype(dtype))
    for value in (np.nan, np.inf):
        bad = b.copy()
        bad[77] = value
        with pytest.raises(ValueError, match=r"b\[77\] is"):
            lstsq(A, bad)
        with pytest.raises(ValueError, match=r"b\[77, 1\] is"):
            lstsq(A, np.stack([b, bad], 1))
    with pytest.raises(TypeError, match=r"b is a masked array: .*b\.filled"):
        lstsq(A, np.ma.masked_array(b, b > 2))
    with pytest.raises(TypeError, match=r"path 'b\.npy'"):
        lstsq(A, "b.npy")


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"method": "lsqr"}, ValueError, "'lsqr'"),
        ({"damp": -1.0}, ValueError, "-1"),
        ({"damp": [1.0, np.nan]}, ValueError, "nan"),
        ({"damp": []}, TypeError, r"\[\]"),
        ({"damp": "much"}, TypeError, "'much'"),
        ({"damp": [[1.0]]}, TypeError, "damp"),
        ({"rcond": 1.0}, ValueError, "1.0"),
        ({"rcond": -1e-3}, ValueError, "-0.001"),
        ({"rcond": np.nan}, ValueError, "nan"),
        ({"seed": 2**64}, ValueError, str(2**64)),
        ({"seed": 1.5}, TypeError, "1.5"),
    ],
)
def test_parameters_of_lstsq(options, error, match):
    with pytest.raises(error, match=match):
        lstsq(A, b, **options)


def test_more_columns_than_a_sketch_supports():
    """If 4 n components exceed the maximum, this is raised before anything of that size is allocated."""
    from sjlt.linalg.sketching import embedding

    n = 3_000_000
    with pytest.raises(ValueError, match=r"12000256 components.*8388480"):
        embedding(10 * 4 * n, n, 4 * n, 0)


def test_parameters_of_the_other_functions():
    with pytest.raises(ValueError, match="'full'"):
        qr(A, mode="full")
    with pytest.raises(ValueError, match=r"\(6, 2000\)"):
        qr(A.T)
    with pytest.raises(np.linalg.LinAlgError, match=r"a fraction .*e-1[56] of column 1 lies outside the span"):
        qr(A[:, [0, 0, 1]], pivoting=False)
    with pytest.raises(ValueError, match="rcond"):
        leverage_scores(A, rcond=2)
    with pytest.raises(TypeError, match="rcond must be a number, got array"):
        leverage_scores(A, rcond=np.ones(2))
    for options in ({"rank": 0}, {"rank": 7}, {"rank": 2, "oversampling": 5}, {"rank": 2, "n_iter": -1}):
        with pytest.raises(ValueError, match="must be from"):
            svd_lowrank(A, **options)
    for shape in ((0, 5), (5, 0)):
        with pytest.raises(ValueError, match="shape"):
            SVDSketch(shape, 1)
    for shape in (5, (5,), (5, 5, 5), "55"):
        with pytest.raises(TypeError, match=r"shape.*, got "):
            SVDSketch(shape, 1)


def test_files(tmp_path):
    from sjlt.files.errors import UserError

    with pytest.raises(FileNotFoundError):
        lstsq(tmp_path / "none.npy", b)
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(UserError, match=r"neither \.npy nor \.npz"):
        lstsq(tmp_path / "text.npy", b)
    np.save(tmp_path / "vector.npy", b)
    with pytest.raises(UserError, match=r"\(2000,\)"):
        lstsq(tmp_path / "vector.npy", b)
    np.save(tmp_path / "integers.npy", np.ones((2000, 3), int))
    with pytest.raises(TypeError, match="int64"):
        lstsq(tmp_path / "integers.npy", b)
    np.save(tmp_path / "nan.npy", with_value(1234, 5, np.nan))
    with pytest.raises(ValueError, match=r"A\[1234, 5\] is nan"):
        lstsq(tmp_path / "nan.npy", b)


@pytest.mark.parametrize("function", [qr, leverage_scores])
@pytest.mark.parametrize("columns", [[2], range(6)])
def test_columns_of_subnormal_numbers(function, columns):
    """Their norms have no finite reciprocals; zero columns, and small normal ones, are allowed."""
    bad = A.copy()
    bad[:, columns] *= 1e-310
    for small in (bad, bad[:40], torch.from_numpy(bad)):
        with pytest.raises(ValueError, match=r"column \d of A has a norm of about \d.\de-3\d\d, and at least 4.5e-308"):
            function(small)
    zero, scaled = A.copy(), A * 1e-305
    zero[:, columns] = 0
    assert leverage_scores(zero).sum() == pytest.approx(6 - len(columns), abs=1e-9)
    assert leverage_scores(scaled).sum() == pytest.approx(6)


def test_subnormal_numbers_are_solved():
    small, x = A * 1e-310, lstsq(A * 1e-310, A[:, 0] * 1e-310).x
    np.testing.assert_allclose(x, [1, 0, 0, 0, 0, 0], atol=1e-12)
    s = svd_lowrank(small, 2, n_iter=2)[1]
    np.testing.assert_allclose(s * 1e155 * 1e155, svd_lowrank(A, 2, n_iter=2)[1], rtol=1e-10)
