"""Sparse torch tensors: exact dense results in every layout, derivatives with respect to values, clear refusals."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from helpers.cases import each_value, pairwise
from helpers.data import exact_project, integers

from sjlt import Sketch
from sjlt.torch_ops import sparse as ops

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC) tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]

EXACT, INDEPENDENT = Sketch(300, 70, nnz=4, seed=3)[:, 5:205], Sketch(300, 70, density=0.25, seed=3)[:, 5:205]
SKETCHES = {"exact": EXACT, "independent": INDEPENDENT}
LAYOUTS = {
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "coo": lambda x: x.to_sparse_coo(),
    "uncoalesced": lambda x: uncoalesced(x),
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def uncoalesced(x):
    """x in COO with every value split into two, the last first."""
    x = x.to_sparse_coo().coalesce()
    indices = torch.cat([x.indices().flip(1), x.indices()], 1)
    return torch.sparse_coo_tensor(indices, torch.cat([x.values().flip(0) * 2, -x.values()]), x.shape)


def drawn(shape, density=0.2, seed=0):
    kept = np.random.default_rng(seed + 1).random(shape) < density
    return torch.from_numpy(integers(shape, "float64", seed) * kept)


def same(actual, expected, dtype):
    assert type(actual) is torch.Tensor
    assert actual.layout is torch.strided
    assert actual.dtype == dtype
    np.testing.assert_array_equal(actual.detach().double().numpy(), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("side", ["X @ S.T", "S @ A"])
def test_gradient_penalties(layout, side):
    """Derivatives of derivatives with respect to a sparse tensor itself, as in a penalty on its gradient."""
    dense = drawn((5, 200), 0.05)

    def penalised(x):
        result = x @ EXACT.T if side == "X @ S.T" else EXACT @ x.transpose(0, 1)
        loss = result.pow(2).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        at_nonzeros = gradient.to_dense() if gradient.layout is not torch.strided else gradient * (dense != 0)
        return torch.autograd.grad(loss + at_nonzeros.pow(2).sum(), x)[0]

    found = penalised(LAYOUTS[layout](dense).requires_grad_())
    expected = penalised(dense.clone().requires_grad_())
    found = found.to_dense() if found.layout is not torch.strided else found
    torch.testing.assert_close(found[dense != 0], expected[dense != 0])


@pairwise(layout=list(LAYOUTS), dtype=DTYPES, n=[0, 1, 3, 60], index=[torch.int32, torch.int64])
def test_products(layout, dtype, n, index):
    dense = drawn((n, 200))
    x = LAYOUTS[layout](dense.to(dtype))
    if layout in ("csr", "csc"):
        make = torch.sparse_csr_tensor if layout == "csr" else torch.sparse_csc_tensor
        parts = (x.crow_indices(), x.col_indices()) if layout == "csr" else (x.ccol_indices(), x.row_indices())
        x = make(*(part.to(index) for part in parts), x.values(), x.shape)
    expected = exact_project(EXACT, dense.numpy(), "float64")
    same(x @ EXACT.T, expected, dtype)
    same(EXACT.project(x), expected, dtype)
    same(torch.matmul(x, EXACT.T), expected, dtype)
    same(EXACT @ x.t(), expected.T, dtype)
    out = torch.full((n, 70), torch.nan, dtype=torch.float64)
    assert EXACT.project(x, out=out) is out
    same(out, expected, torch.float64)
    EXACT.project(x, out=out, accumulate=True)
    same(out, 2 * expected, torch.float64)


@pytest.mark.parametrize("law", SKETCHES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_equal_scipys(law, layout):
    S, dense = (
        SKETCHES[law],
        torch.from_numpy(np.random.default_rng(0).normal(size=(40, 200))) * drawn((40, 200)).sign(),
    )
    expected = sp.csr_array(dense.numpy()) @ S.T
    result = S.project(LAYOUTS[layout](dense))
    if layout == "uncoalesced":  # 2 x - x
        np.testing.assert_allclose(result.numpy(), expected, rtol=0, atol=1e-13)
    else:
        np.testing.assert_array_equal(result.numpy(), expected)


def test_few_nonzeros_among_huge_feature_counts():
    S = Sketch(2**60, 300, nnz=4)
    columns = torch.tensor([0, 1, 2**33, 2**40, 2**60 - 1])
    values = torch.arange(1.0, 6, dtype=torch.float64, requires_grad=True)
    x = torch.sparse_coo_tensor(torch.stack([torch.tensor([0, 1, 0, 1, 0]), columns]), values, (2, 2**60))
    entries = torch.from_numpy(np.concatenate([S[:, j : j + 1].toarray() for j in columns.tolist()], axis=1))
    rows = torch.zeros((2, 5), dtype=torch.float64)
    rows[[0, 1, 0, 1, 0], range(5)] = values.detach()
    y = S.project(x)
    assert torch.equal(y, rows @ entries.T)
    weights = torch.from_numpy(integers((2, 300), "float64"))
    (y * weights).sum().backward()
    assert torch.equal(values.grad, (weights @ entries)[[0, 1, 0, 1, 0], range(5)])


# --------------------------------------------------------------------------------- derivatives


@pytest.mark.parametrize("law", SKETCHES)
@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "uncoalesced"])
def test_gradients_of_the_values(layout, law):
    S, dense = SKETCHES[law], drawn((6, 200), density=0.05)
    x = LAYOUTS[layout](dense).requires_grad_()
    weights = torch.from_numpy(integers((6, 70), "float64", seed=4))
    # torch's backward() cannot store the gradient of a CSC tensor in its `grad`, whatever computed it.
    (gradient,) = torch.autograd.grad((S.project(x) * weights).sum(), x)
    expected = weights @ torch.from_numpy(S.toarray())
    assert gradient.layout == x.layout
    torch.testing.assert_close(gradient.to_dense(), expected * (dense != 0), rtol=1e-14, atol=1e-14)


@each_value(by_columns=[False, True], law=list(SKETCHES))
def test_derivatives(law, by_columns):
    S = SKETCHES[law][:, :20]
    parts = drawn((4, 20))
    parts = parts.to_sparse_csc() if by_columns else parts.to_sparse_csr()
    indptr, indices = (
        (parts.ccol_indices(), parts.row_indices()) if by_columns else (parts.crow_indices(), parts.col_indices())
    )
    rest = (indptr, indices, by_columns, 4, *S.spec)
    values = parts.values().clone().requires_grad_()
    torch.library.opcheck(ops.project_sparse, (values, *rest))
    torch.library.opcheck(ops.adjoint_at, (torch.ones(4, 70, dtype=torch.float64, requires_grad=True), *rest))
    project = lambda values: ops.project_sparse(values, *rest)  # noqa: E731
    assert torch.autograd.gradcheck(project, values, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda values: project(values).sin(), values)
    assert torch.equal(torch.func.jvp(project, (values.detach(),), (values.detach(),))[1], project(values.detach()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_have_the_dtype_of_the_data(dtype):
    x = drawn((5, 200)).to(dtype).to_sparse_csr().requires_grad_()
    EXACT.project(x).sum().backward()
    assert x.grad.dtype == dtype


# --------------------------------------------------------------------------------- trees


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batched", [False, True])
def test_trees(layout, batched):
    a, b = drawn((3, 20), seed=1), drawn((3, 50), seed=2)
    S = Sketch(70 if batched else 210, 40, nnz=4)
    expected = S.project_tree([a, b], batched=batched)
    assert torch.equal(S.project_tree([LAYOUTS[layout](a), b], batched=batched), expected)
    assert torch.equal(S.project_tree({"a": a, "b": LAYOUTS[layout](b)}, batched=batched), expected)


@pytest.mark.parametrize("batched", [False, True])
def test_trees_of_multidimensional_tensors(batched):
    a = drawn((3, 4, 5, 2))
    S = Sketch(40 if batched else 120, 30, nnz=4)
    result = S.project_tree([a.to_sparse_coo()], batched=batched)
    assert torch.equal(result, S.project_tree([a], batched=batched))


# --------------------------------------------------------------------------------- refusals


def test_refusals():
    x = drawn((3, 200)).to_sparse_csr()
    for error, message, call in (
        (ValueError, "last axis of n_features = 200, got a tensor of shape \\(3, 199\\)",
         lambda: EXACT.project(drawn((3, 199)).to_sparse_csr())),
        (ValueError, "S @ A needs A of shape \\(200,\\)", lambda: EXACT @ x),
        (ValueError, "must have 2 dimensions", lambda: EXACT.project(drawn((2, 3, 200)).to_sparse_coo())),
        (ValueError, "hybrid sparse tensors are not supported", lambda: EXACT.project(drawn((3, 200)).to_sparse(1))),
        (TypeError, "torch.int64 is not supported", lambda: EXACT.project(drawn((3, 200)).long().to_sparse_csr())),
        (TypeError, "layout torch.sparse_csr is not supported", lambda: EXACT.project_adjoint(x)),
        (TypeError, "layout torch.sparse_bsr is not supported",
         lambda: EXACT.project(drawn((4, 200)).to_sparse_bsr((2, 2)))),
        (RuntimeError, "out= does not support automatic differentiation, but the data requires grad",
         lambda: EXACT.project(x.clone().requires_grad_(), out=torch.zeros(3, 70))),
        (RuntimeError, "vmap", lambda: torch.func.vmap(EXACT.project)(torch.stack([x.to_dense()] * 2).to_sparse_coo())),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


def test_vmap_over_the_values():
    x = drawn((3, 200)).to_sparse_csr()
    rest = (x.crow_indices(), x.col_indices(), False, 3, *EXACT.spec)
    with pytest.raises(RuntimeError, match="vmap of sparse tensors is not supported: loop over them"):
        torch.func.vmap(lambda values: ops.project_sparse(values, *rest))(torch.stack([x.values()] * 2))


@pytest.mark.parametrize("damage", [200, -1, 10**9])
def test_indices_out_of_range(damage):
    """torch does not check them by default, and a kernel would read out of bounds."""
    x = drawn((3, 200)).to_sparse_csr()
    indices = x.col_indices().clone()
    indices[3] = damage
    with pytest.raises(ValueError, match="malformed CSR: indices"):
        EXACT.project(torch.sparse_csr_tensor(x.crow_indices(), indices, x.values(), x.shape))


@pytest.mark.parametrize("rows", [[0, 9], [-1, 1], [1, 0]])
def test_rows_of_coalesced_tensors(rows):
    """torch does not check tensors that are said to be coalesced."""
    options = {"check_invariants": False, "is_coalesced": True}
    x = torch.sparse_coo_tensor(torch.tensor([rows, [1, 2]]), torch.ones(2), (2, 100), **options)
    with pytest.raises(ValueError, match="malformed COO: row indices must ascend from 0 to 1"):
        Sketch(100, 16).project(x)
