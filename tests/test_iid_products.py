"""Products with independent-entries sketches on the CPU: exact on integer data in every container."""

import math

import numpy as np
import pytest
import scipy.sparse
import torch
from helpers.cases import exhaustive_except
from helpers.data import FLOATS, exact_adjoint, exact_project, integers, poisoned, result_dtype, same

import sjlt
from sjlt import Sketch
from sjlt.backends.cpu import iid_dense, iid_sparse

# (d, k, density) whose scale is a power of two; codes and floats, both lane widths, partial ranges.
SKETCHES = [(300, 64, 1.0), (1000, 64, 0.25), (131, 256, 0.0625), (700, 1024, 2**-8), (5, 16, 0.25), (2, 1, 1.0)]
ROWS = [1, 8, 9, 45, 100]


def sketch(d, k, density, seed=11):
    """A slice, with features before its own."""
    return Sketch(d + 37, k, density=density, seed=seed)[:, 37:]


@pytest.fixture(params=SKETCHES, ids=str)
def S(request):
    return sketch(*request.param)


@pytest.mark.parametrize("n", ROWS)
def test_project_and_adjoint_are_exact(S, n):
    x, y = integers((n, S.n_features), seed=n), integers((n, S.n_components), seed=n + 1)
    same(x @ S.T, exact_project(S, x))
    same(y @ S, exact_adjoint(S, y))
    same(S @ x.T, exact_project(S, x).T)
    same(S.T @ y.T, exact_adjoint(S, y).T)


@pytest.mark.parametrize("density", [0.25, 2**-8])
@pytest.mark.parametrize("dtype", exhaustive_except(["float16"], [*FLOATS, "int16", "bool", "bfloat16"]))
def test_dtypes(dtype, density):
    S = sketch(200, 256 if density < 0.1 else 64, density)
    for n in (3, 40):
        if dtype == "bfloat16":
            x = torch.from_numpy(integers((n, 200))).bfloat16()
            expected = torch.from_numpy(exact_project(S, x.float().numpy(), np.float32)).bfloat16()
            assert torch.equal(x @ S.T, expected)
        else:
            x = integers((n, 200), dtype)
            same(x @ S.T, exact_project(S, x, result_dtype(x)))


@pytest.mark.parametrize("layout", ["F", "reversed", "strided", "swapped", "unaligned", "expanded"])
def test_layouts(layout):
    S = sketch(150, 64, 0.25)
    x = integers((33, 150))
    laid = {
        "F": np.asfortranarray,
        "reversed": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
        "strided": lambda x: np.repeat(np.repeat(x, 2, 0), 3, 1)[::2, ::3],
        "swapped": lambda x: x.astype(">f4"),
        "unaligned": lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view("<f4").reshape(x.shape),
        "expanded": lambda x: np.broadcast_to(x[:1], x.shape),
    }[layout](x)
    same(laid @ S.T, exact_project(S, laid))
    y = laid[:, :64]
    same(y @ S, exact_adjoint(S, y))


@pytest.mark.parametrize("form", ["csr_matrix", "csc_matrix", "csr_array"])
def test_sparse_input(S, form):
    dense = integers((37, S.n_features), seed=3) * (integers((37, S.n_features), seed=4) > 1)
    x = getattr(scipy.sparse, form)(dense)
    same(x @ S.T, exact_project(S, dense))
    reduced = S.project(x, dense_output=False)
    same(reduced.toarray(), exact_project(S, dense))
    assert reduced.has_canonical_format
    assert isinstance(reduced, scipy.sparse.csr_array if form == "csr_array" else scipy.sparse.csr_matrix)
    y = getattr(scipy.sparse, form)(integers((9, S.n_components), seed=5))
    same(y @ S, exact_adjoint(S, y.toarray()))


@pytest.mark.parametrize("batch", [3, 70, 10**6])
@pytest.mark.parametrize("codes_per_nonzero", [100, 0])
def test_sparse_input_in_parts_and_with_duplicates(codes_per_nonzero, batch, monkeypatch):
    S = sketch(60, 256, 0.0625)
    x = integers((50, 60), "float64")
    expected = exact_project(S, x)
    monkeypatch.setattr(iid_sparse, "BATCH_NONZEROS", batch)
    monkeypatch.setattr(iid_sparse, "SCRATCH_BYTES", 400_000)
    monkeypatch.setattr(iid_sparse, "STAGE_NUMBERS", 5000)
    monkeypatch.setattr(iid_sparse, "STEP_WORK", 40_000)
    monkeypatch.setattr(iid_sparse, "MAX_CODES_PER_NONZERO", codes_per_nonzero)
    for matrix in (scipy.sparse.csr_matrix(x), scipy.sparse.csc_matrix(x)):
        same(matrix @ S.T, expected)
        same(S.project(matrix, dense_output=False).toarray(), expected)
    twice = scipy.sparse.csr_matrix((np.ones(4), [5, 5, 5, 0], [0, 3, 4]), shape=(2, 60))
    same(twice @ S.T, exact_project(S, twice.toarray()))


@pytest.mark.parametrize("density", [0.25, 0.0625])
def test_sparse_input_of_very_many_features(density):
    d, k = 2**40, 64 if density == 0.25 else 256
    x = scipy.sparse.csr_matrix(([2.0, 1.0, -3.0], [d - 1, 5, 7], [0, 2, 3]), shape=(2, d))
    S = Sketch(d, k, density=density, seed=6)
    columns = [S[:, j : j + 1].toarray()[:, 0] for j in (d - 1, 5, 7)]
    np.testing.assert_array_equal(x @ S.T, [2 * columns[0] + columns[1], -3 * columns[2]])
    assert S.project(x, dense_output=False).shape == (2, k)


@pytest.mark.parametrize("density", [0.25, 2**-8])
def test_out_and_accumulate(density):
    S = sketch(90, 64 if density > 0.1 else 1024, density)
    x, y = integers((20, 90)), integers((20, S.n_components))
    out = poisoned((20, S.n_components), np.float64)
    assert S.project(x, out=out) is out
    np.testing.assert_array_equal(out, exact_project(S, x))
    S.project(x, out=out, accumulate=True)
    np.testing.assert_array_equal(out, 2 * exact_project(S, x))
    parts = np.zeros((20, S.n_components), np.float32)
    for a, b in ((0, 1), (1, 50), (50, 50), (50, 90)):
        S[:, a:b].project(x[:, a:b], out=parts, accumulate=True)
    np.testing.assert_array_equal(parts, exact_project(S, x))
    back = poisoned((90, 20), np.float32).T
    S.project_adjoint(y, out=back)
    np.testing.assert_array_equal(back, exact_adjoint(S, y))


@pytest.mark.parametrize("shape", [(0, 30), (4, 0), (0, 0)])
def test_empty_data(shape):
    S = Sketch(shape[1], 20, density=0.5)
    same(np.ones(shape, np.float32) @ S.T, np.zeros((shape[0], 20), np.float32))
    same(np.ones((shape[0], 20)) @ S, np.zeros(shape))


@pytest.mark.parametrize("density", [1 / 3, 0.01])
def test_results_do_not_depend_on_threads_or_batches(density, monkeypatch):
    rng = np.random.default_rng(0)
    S = sketch(3000, 300, density)
    x, y = rng.normal(size=(70, 3000)).astype(np.float32), rng.normal(size=(70, 300)).astype(np.float32)
    products = [lambda x, y: x @ S.T, lambda x, y: y @ S, lambda x, y: scipy.sparse.csr_matrix(x) @ S.T]
    whole = [product(x, y) for product in products]
    few = slice(3, 7)
    for product, expected in zip(products, whole, strict=True):
        np.testing.assert_array_equal(product(x[few], y[few]), expected[few])
    monkeypatch.setattr(iid_dense, "TASK_BYTES", 1 << 16)
    monkeypatch.setattr(iid_dense, "STEP_WORK", 1 << 16)
    monkeypatch.setattr(iid_sparse, "BATCH_NONZEROS", 30_000)
    before = sjlt.get_num_threads()
    try:
        sjlt.set_num_threads(3)
        for product, expected in zip(products, whole, strict=True):
            np.testing.assert_array_equal(product(x, y), expected)
    finally:
        sjlt.set_num_threads(before)


@pytest.mark.parametrize("density", [1.0, 0.01])
def test_accuracy(density):
    """Norm-wise against float64, with far more terms than one block."""
    S = Sketch(100_000, 48, density=density, seed=2)
    x = np.random.default_rng(1).normal(size=(3, 100_000))
    exact = (S.to_scipy() @ x.T).T
    for dtype, allowed in ((np.float32, 1e-6), (np.float64, 1e-14)):
        rounded = x.astype(dtype)
        exact = (S.to_scipy() @ rounded.T.astype(np.float64)).T
        error = np.linalg.norm(rounded @ S.T - exact, axis=1) / np.linalg.norm(exact, axis=1)
        assert error.max() <= allowed


def test_adjoint_is_the_adjoint_and_accurate():
    S = Sketch(300, 5000, density=1, seed=3)
    y = np.random.default_rng(2).normal(size=(4, 5000)).astype(np.float32)
    exact = (S.to_scipy().T @ y.T.astype(np.float64)).T
    assert np.linalg.norm(y @ S - exact) <= 1e-6 * np.linalg.norm(exact)


@pytest.mark.parametrize("density", [1 / 3, 0.01])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_values_reach_only_their_components(density, bad):
    S = sketch(400, 100, density)
    x = integers((40, 400))
    x[17, 123] = bad
    result = x @ S.T
    reached = S.toarray()[:, 123] != 0
    assert not np.isfinite(result[17, reached]).any()
    others = np.arange(40) != 17
    clean = np.where(np.isfinite(x), x, 0)
    np.testing.assert_allclose(result[others], (clean @ S.T)[others], rtol=1e-6)


def test_gradients():
    S = Sketch(30, 12, density=0.25, seed=4)[:, 5:25]
    x = torch.randn(2, 20, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(S.project, x)
    assert torch.autograd.gradcheck(S.project_adjoint, y)
    for op, tensor in ((torch.ops.sjlt.project, x), (torch.ops.sjlt.project_adjoint, y)):
        torch.library.opcheck(op.default, (tensor, *S.spec, -1, None))
    matrix = torch.from_numpy(S.toarray())
    (torch.matmul(S, x.mT) * 2).sum().backward()
    torch.testing.assert_close(x.grad, 2 * matrix.sum(0).expand(2, 20))


def test_torch_compile():
    x = torch.ones(3, 40)
    project = torch.compile(
        lambda x, seed: Sketch(40, 16, density=0.25, seed=seed).project(x), fullgraph=True, backend="eager"
    )
    for seed in (5, 6):
        assert torch.equal(project(x, seed), Sketch(40, 16, density=0.25, seed=seed).project(x))


def test_trees_and_vmap():
    S = Sketch(12, 16, density=0.25)
    parts = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(6)}
    torch.testing.assert_close(S.project_tree(parts), S @ torch.cat([parts["a"].reshape(-1), parts["b"]]))
    x = torch.ones(3, 4, 12)
    torch.testing.assert_close(torch.vmap(S.project)(x), x @ S.T)


def test_memory_is_bounded():
    """Neither the matrix (3.2 GB in fp64) nor all rows of a column are ever in memory."""
    import tracemalloc

    S = Sketch(50, 8_000_000, density=0.0001)
    x = np.ones((1, 50), np.float32)
    out = np.empty((1, 8_000_000), np.float32)
    S[:, :1].project(x[:, :1], out=out)
    tracemalloc.start()
    S.project(x, out=out)
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()
    assert math.isclose((out != 0).mean(), 1 - (1 - S.density) ** 50, rel_tol=0.1)
