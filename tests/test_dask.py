"""dask arrays: lazy, with known shapes, dtypes and chunks, and equal to the results on NumPy arrays."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse
from helpers.cases import each_value

import sjlt

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

N, D, K = 60, 48, 12


def integers(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


@pytest.fixture(autouse=True)
def scheduler():
    with dask.config.set(scheduler="threads", num_workers=2):
        yield


@pytest.fixture
def no_compute(monkeypatch):
    """Make any computation an error until the fixture's value is called."""

    def refuse(*arguments, **options):
        raise AssertionError("computed early")

    with dask.config.set(scheduler=refuse):
        yield lambda: dask.config.set(scheduler="threads")


def check(lazy, expected, chunks):
    assert isinstance(lazy, da.Array)
    assert (lazy.shape, lazy.dtype, lazy.chunks) == (expected.shape, expected.dtype, chunks)
    with dask.config.set(scheduler="threads"):
        computed = lazy.compute()
    assert (computed.shape, computed.dtype) == (expected.shape, expected.dtype)
    assert np.array_equal(computed, expected)


@each_value(
    product=["project", "x @ S.T", "S @ a", "adjoint", "y @ S", "S.T @ b"],
    dtype=["float16", "float32", "float64", "int8"],
    rows=[(60,), (20, 20, 20), (7, 53)],
    features=[(48,), (16, 16, 16), (5, 43), (1, 2, 3, 4, 38)],
    law=[{"nnz": 4}, {"density": 0.25}],
    part=[False, True],
)
def test_lazy_products(no_compute, product, dtype, rows, features, law, part):
    """Integer data, so partial sums are exact in any order."""
    S = sjlt.Sketch(D, K, seed=3, **law) if not part else sjlt.Sketch(100, K, seed=3, **law)[:, 30 : 30 + D]
    result = dtype if dtype.startswith("float") else "float64"
    x, y = integers((N, D), dtype) * 4, integers((N, K), dtype) * 4
    X = da.from_array(x, chunks=(rows, features))
    Y = da.from_array(y, chunks=(rows, 5))
    dense = S.toarray()
    if product in ("project", "x @ S.T"):
        lazy = S.project(X) if product == "project" else X @ S.T
        expected, chunks = (x @ dense.T).astype(result), (rows, (K,))
    elif product == "S @ a":
        lazy, expected, chunks = S @ X.T, (dense @ x.T).astype(result), ((K,), rows)
    elif product in ("adjoint", "y @ S"):
        lazy = S.project_adjoint(Y) if product == "adjoint" else Y @ S
        expected, chunks = (y @ dense).astype(result), (rows, (D,))
    else:
        lazy, expected, chunks = S.T @ Y.T, (dense.T @ y.T).astype(result), ((D,), rows)
    if S.is_iid:
        with no_compute():
            assert (lazy.shape, lazy.dtype, lazy.chunks) == (expected.shape, expected.dtype, chunks)
            tolerance = {"float16": 1e-2, "float32": 1e-5}.get(dtype, 1e-12)
            assert np.allclose(lazy.compute(), expected, rtol=tolerance, atol=tolerance * 50)
    else:
        check(lazy, expected, chunks)


@pytest.mark.parametrize("kind", [scipy.sparse.csr_matrix, scipy.sparse.csr_array, scipy.sparse.csc_array])
@pytest.mark.parametrize("features", [(48,), (16, 32)])
def test_sparse_blocks(no_compute, kind, features):
    x = integers((N, D)) * (integers((N, D), seed=1) > 1) * 4
    blocks = [[kind(x[i : i + 20, a:b]) for a, b in _ranges(features)] for i in (0, 20, 40)]
    X = da.concatenate(
        [
            da.concatenate(
                [da.from_delayed(dask.delayed(b), b.shape, meta=kind((0, 0), dtype=np.float32)) for b in row], axis=1
            )
            for row in blocks
        ]
    )
    S = sjlt.Sketch(D, K, nnz=4)
    expected = (x @ S.toarray().T).astype(np.float32)
    check(S.project(X), expected, ((20, 20, 20), (K,)))
    check(S.T.__rmatmul__(X), expected, ((20, 20, 20), (K,)))
    lazy = S.project(X, dense_output=False)
    assert scipy.sparse.issparse(lazy._meta)
    with no_compute():
        for i in range(3):
            block = lazy.blocks[i].compute()
            assert block.format == "csr"
            assert np.array_equal(block.toarray(), expected[20 * i : 20 * i + 20])


def _ranges(sizes):
    stops = np.cumsum(sizes).tolist()
    return [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def test_other_dimensions():
    S = sjlt.Sketch(D, K)
    x = integers((4, 5, D)) * 2
    check(S.project(da.from_array(x, chunks=(2, 3, 20))), S.project(x), ((2, 2), (3, 2), (K,)))
    check(S.project(da.from_array(x[0, 0], chunks=20)), S.project(x[0, 0]), ((K,),))
    check(S @ da.from_array(x[0, 0], chunks=20), S @ x[0, 0], ((K,),))
    check(S.T @ da.from_array(x[0, 0, :K], chunks=5), S.T @ x[0, 0, :K], ((D,),))


@pytest.mark.parametrize("shape", [(0, K), (3, 0, K)])
def test_empty_adjoints(shape):
    S = sjlt.Sketch(D, K)
    check(S.project_adjoint(da.zeros(shape)), np.empty((*shape[:-1], D)), ((*((n,) for n in shape[:-1]), (D,))))
    check(S.T @ da.zeros((K, 0)), np.empty((D, 0)), ((D,), (0,)))


def test_adjoint_blocks_have_dasks_chunk_size():
    S = sjlt.Sketch(100_000, K)
    with dask.config.set({"array.chunk-size": "1MiB"}):
        lazy = S.project_adjoint(da.ones((100, K), chunks=(50, K), dtype=np.float32))
    assert lazy.chunks[0] == (50, 50)
    assert max(lazy.chunks[1]) * 50 * 4 <= 2**20
    assert np.allclose(lazy.compute(), S.project_adjoint(np.ones((100, K), np.float32)))


def test_unknown_row_counts():
    S, x = sjlt.Sketch(D, K), integers((N, D))
    X = da.from_array(x, chunks=(20, D))
    unknown = X[X[:, 0] > -10]
    lazy = S.project(unknown)
    assert np.isnan(lazy.shape[0])
    assert lazy.chunks[1] == (K,)
    assert np.array_equal(lazy.compute(), S.project(x))
    with pytest.raises(ValueError, match=r"unknown sizes|needs A of shape"):
        S @ unknown


def test_refusals_are_immediate(no_compute):
    S, X = sjlt.Sketch(D, K), da.ones((N, D), chunks=20, dtype=np.float32)
    with pytest.raises(ValueError, match="n_features = 48"):
        S.project(X[:, 1:])
    with pytest.raises(ValueError, match="out= and accumulate="):
        S.project(X, out=np.empty((N, K), np.float32))
    with pytest.raises(ValueError, match="dense_output=False requires blocks"):
        S.project(X, dense_output=False)
    with pytest.raises(TypeError, match="complex128"):
        S.project(X.astype(complex))
    with pytest.raises(ValueError, match="S @ A needs A of shape"):
        S @ X


def test_results_and_names_are_deterministic():
    S, X = sjlt.Sketch(D, K), da.random.default_rng(0).normal(size=(N, D), chunks=(20, 16))
    assert S.project(X).name == S.project(X).name
    assert S.project(X).name != sjlt.Sketch(D, K, seed=1).project(X).name
    assert np.array_equal(S.project(X).compute(), S.project(X).compute())
    assert np.allclose(S.project(X).compute(), S.project(X.compute()), rtol=1e-12, atol=1e-12)
    pickle.dumps(S.project(X))


# ------------------------------------------------------------------------------------- the transformer


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16"])
@pytest.mark.parametrize("chunks", [(20, D), (20, 16)])
def test_transformer_is_lazy(no_compute, dtype, chunks):
    x = integers((N, D), dtype) * 4
    X = da.from_array(x, chunks=chunks)
    transformer = sjlt.SparseRandomProjection(K, random_state=0).fit(X)
    assert transformer.sketch_ == sjlt.SparseRandomProjection(K, random_state=0).fit(x).sketch_
    assert transformer.n_features_in_ == D
    check(transformer.transform(X), transformer.transform(x), ((20, 20, 20), (K,)))


def test_transformer_inverts_lazily(no_compute):
    x = integers((N, D), "float64")
    for inverse in (False, True):
        transformer = sjlt.SparseRandomProjection(K, random_state=0, compute_inverse_components=inverse).fit(x)
        y = transformer.transform(x)
        lazy = transformer.inverse_transform(da.from_array(y, chunks=(20, K)))
        with no_compute():
            assert np.allclose(lazy.compute(), transformer.inverse_transform(y))


def test_transformer_checks_blocks_when_computed():
    x = integers((N, D))
    x[33, 5] = np.nan
    X = da.from_array(x, chunks=(20, 16))
    transformer = sjlt.SparseRandomProjection(K, random_state=0).fit(X)
    lazy = transformer.transform(X)
    lazy[:20].compute()
    with pytest.raises(ValueError, match="contains NaN"):
        lazy.compute()
    import sklearn

    with sklearn.config_context(assume_finite=True):
        assert np.isnan(transformer.transform(X).compute()[33]).any()


def test_transformer_refusals_are_immediate(no_compute):
    X = da.ones((N, D), chunks=20)
    transformer = sjlt.SparseRandomProjection(K).fit(X)
    with pytest.raises(ValueError, match="expecting 48 features"):
        transformer.transform(X[:, 1:])
    with pytest.raises(ValueError, match="2-D dask array"):
        transformer.transform(X[0])
    with pytest.raises(ValueError, match="does not apply to dask arrays"):
        transformer.set_output(transform="pandas").transform(X)
    with no_compute():
        unknown = X[X[:, 0] > -1]
    with pytest.raises(ValueError, match="needs the number of rows"):
        sjlt.SparseRandomProjection().fit(unknown)


@pytest.mark.parametrize("compute_inverse_components", [False, True])
@pytest.mark.parametrize("dtype", ["int64", "bool", "float16", "float32", "float64"])
@pytest.mark.parametrize("sparse", [False, True])
def test_inverse_transform(compute_inverse_components, dtype, sparse):
    fitted = sjlt.SparseRandomProjection(K, random_state=0, compute_inverse_components=compute_inverse_components).fit(
        np.ones((3, D))
    )
    y = (integers((N, K)) % 3).astype(dtype)
    blocks = da.from_array(y, chunks=(20, -1))
    if sparse:
        if dtype == "float16":
            return  # SciPy has no such matrices
        blocks = blocks.map_blocks(scipy.sparse.csr_matrix)
    expected, lazy = fitted.inverse_transform(y), fitted.inverse_transform(blocks)
    assert lazy.dtype == expected.dtype
    found = lazy.compute()
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="Input X contains NaN"):
        fitted.inverse_transform(da.full((3, K), np.nan)).compute()


# ------------------------------------------------------------------------------------- other containers


def test_foreign_containers_are_refused_by_name():
    S, x = sjlt.Sketch(D, K), integers((N, D))
    pa = pytest.importorskip("pyarrow")
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), D)
    for foreign in (lists, pa.table({"v": lists}), pa.chunked_array([lists])):
        with pytest.raises(TypeError, match=r"pyarrow's \w+ is not supported: call sjlt\.arrow\.Projector"):
            S.project(foreign)


@pytest.mark.integrations
def test_xarray_and_polars():
    xr, pl = pytest.importorskip("xarray"), pytest.importorskip("polars")
    S, x = sjlt.Sketch(D, K), integers((N, D))
    array = xr.DataArray(x, dims=["row", "feature"])
    with pytest.raises(TypeError, match=r"xarray's DataArray is not supported.*apply_ufunc"):
        S.project(array)
    projected = xr.apply_ufunc(S.project, array, input_core_dims=[["feature"]], output_core_dims=[["component"]])
    assert projected.dims == ("row", "component")
    assert np.array_equal(projected.data, S.project(x))
    lazy = array.chunk(row=20).data @ S.T
    assert isinstance(lazy, da.Array)
    assert np.array_equal(S.project(pl.DataFrame(x)), S.project(x))
    with pytest.raises(TypeError, match=r"polars's LazyFrame is not supported: collect it first"):
        S.project(pl.DataFrame(x).lazy())
    with pytest.raises(TypeError, match="polars's Series is not supported"):
        S.project(pl.Series("v", x))
    frame = pl.DataFrame({"v": x}).to_arrow()
    result = pl.from_arrow(sjlt.arrow.Projector("v", K)(frame))
    assert np.array_equal(result["v"].to_numpy(), S.project(x))


def test_dask_arrays_are_refused_rather_than_loaded():
    with pytest.raises(TypeError, match=r"dask's Array is not supported: compute it first \(x.compute\(\)\)"):
        sjlt.dropout(da.ones((N, D)), 0.5, 1)


def test_dask_frames_are_refused_by_name():
    dd = pytest.importorskip("dask.dataframe")
    import pandas as pd

    frame = dd.from_pandas(pd.DataFrame(integers((N, D))), npartitions=3)
    S = sjlt.Sketch(D, K)
    with pytest.raises(TypeError, match=r"dask's DataFrame is not supported.*to_dask_array"):
        S.project(frame)
    lazy = S.project(frame.to_dask_array(lengths=True))
    assert np.array_equal(lazy.compute(), S.project(integers((N, D))))


@pytest.mark.exhaustive
def test_dask_is_imported_lazily():
    code = "import sys, sjlt, numpy as np; sjlt.project(np.ones((2, 50)), 8); sys.exit('dask' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
