"""Sparse kernels: exact on integers for both laws, however rows are split; reproducible bits."""

import math

import numpy as np
import pytest
import torch
from helpers.cases import each_value, each_value_then_pairs
from helpers.choices import H200, all_tensors_on
from helpers.data import integers
from helpers.shared_memory import emulate

from sjlt import Sketch
from sjlt.backends import triton_backend
from sjlt.backends.triton import device, sparse, sparse_shared

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC) tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]

LAWS = {
    "one": {"n_components": 70, "nnz": 1},
    "four": {"n_components": 256, "nnz": 4},
    "uneven": {"n_components": 300, "nnz": 4},
    "stacked": {"n_components": 300, "nnz": 4, "stacks": 2},
    "eight bits": {"n_components": 150, "density": 0.25},
    "sixteen bits": {"n_components": 70, "density": 2**-6},
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def drawn(n, d=12, seed=0):
    """Integers in CSR: one empty row, one full row, few nonzeros in the others."""
    rng = np.random.default_rng(seed)
    kept = rng.random((n, d)) < 0.1
    if n > 2:
        kept[1], kept[2] = False, True
    return torch.from_numpy(integers((n, d), "float64", seed) * kept)


def parts_of(dense, dtype, index, device):
    x = dense.to_sparse_csr()
    return x.values().to(device, dtype), x.crow_indices().to(device, index), x.col_indices().to(device, index)


def check(S, actual, expected):
    """Check for exact equality, or up to three roundings for the iid law, whose scale is not a power of two."""
    if S.is_iid:
        eps = torch.finfo(actual.dtype).eps + 2 * torch.finfo(torch.promote_types(actual.dtype, torch.float32)).eps
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=eps, atol=eps)
    else:
        assert torch.equal(actual.cpu(), expected.to(actual.dtype))


@each_value_then_pairs(
    law=list(LAWS), dtype=DTYPES, n=[1, 4], index=[torch.int32, torch.int64], cut=["never", "always"], seed=[1, -1]
)
def test_products(kernels_on, monkeypatch, law, dtype, n, index, cut, seed):
    """`cut`: rows whole or split into single nonzeros; codes for all nonzeros at once, or for 10 at a time."""
    if cut == "always":
        monkeypatch.setattr(sparse, "MIN_PART", 1)
        monkeypatch.setattr(sparse, "SUMS_BYTES", 20_000 * n)
    else:
        monkeypatch.setattr(sparse, "MIN_PAIRS", 1)
    S = Sketch(2**40, seed=seed, **LAWS[law])[:, 2**39 - 3 : 2**39 + 9]
    backend, dense = triton_backend(S.spec), drawn(n)
    values, indptr, columns = parts_of(dense, dtype, index, kernels_on)
    if cut == "always" and not S.is_iid:
        monkeypatch.setattr(sparse, "CODES_BYTES", 40 * S.nnz)
    expected = S.project(dense)
    for accumulate in (False, True):
        wide = torch.promote_types(dtype, torch.float32) if accumulate else dtype
        out = torch.full((n, S.n_components), 1.0 if accumulate else math.nan, dtype=wide, device=kernels_on)
        backend.project_sparse(S.spec, values, indptr, columns, out, accumulate)
        check(S, out, expected + (1.0 if accumulate else 0.0))

    gradient = torch.from_numpy(integers((n, S.n_components), "float64", 5))
    rows = torch.repeat_interleave(torch.arange(n), indptr.cpu().diff())
    found = torch.full((len(rows),), math.nan, dtype=dtype, device=kernels_on)
    backend.gather_sparse(S.spec, gradient.to(kernels_on, dtype), rows.to(kernels_on, index), columns, found)
    exact = S.project_adjoint(gradient)[rows, columns.cpu().long()]
    check(S, found, exact)


@pytest.mark.skipif(not device.INTERPRETED, reason="shared memory is emulated in Triton's interpreter")
@each_value(
    law=["one", "four", "stacked"], dtype=[torch.bfloat16, torch.float64], n=[4], index=[torch.int64],
    cut=["never", "always"], table=[False, True],
)  # fmt: skip
def test_sums_in_shared_memory(monkeypatch, law, dtype, n, index, cut, table):
    emulate(monkeypatch)
    described = H200._replace(programmatic_launch=False, nvidia=False, interpreted=True, asynchronous_copies=True)
    all_tensors_on(monkeypatch, described)
    if cut == "always":
        monkeypatch.setattr(sparse, "MIN_PART", 1)
        monkeypatch.setattr(sparse, "SUMS_BYTES", 5000 * n)  # of two parts or more
    d, start = (12, 2**30 - 3) if table else (2000, 5)  # codes of all columns, or of all nonzeros
    S = Sketch(2**31, seed=1, **LAWS[law])[:, start : start + d]
    dense = drawn(n, d)
    if not table:
        dense[:, 200:] = 0  # fewer nonzeros than columns
    if not table and cut == "always":
        monkeypatch.setattr(sparse_shared, "CODES_BYTES", 400 * S.nnz)  # 100 nonzeros at a time
    values, indptr, columns = parts_of(dense, dtype, index, "cpu")
    assert (d <= len(values)) == table
    expected = S.project(dense)
    for accumulate in (False, True):
        wide = torch.promote_types(dtype, torch.float32) if accumulate else dtype
        out = torch.full((n, S.n_components), 1.0 if accumulate else math.nan, dtype=wide)
        triton_backend(S.spec).project_sparse(S.spec, values, indptr, columns, out, accumulate)
        check(S, out, expected + (1.0 if accumulate else 0.0))


@pytest.mark.parametrize("size", [4, 1032, 4096, 4100, 65_536])
def test_rounded_sizes(size):
    assert size <= sparse_shared._rounded_up(size) < 2 * size + 1024


def test_sixteen_nonzeros_per_column(kernels_on):
    S, dense = Sketch(6, 300, nnz=16, seed=3), drawn(2, 6)
    values, indptr, columns = parts_of(dense, torch.float64, torch.int64, kernels_on)
    out = torch.full((2, 300), math.nan, dtype=torch.float64, device=kernels_on)
    triton_backend(S.spec).project_sparse(S.spec, values, indptr, columns, out, False)
    check(S, out, S.project(dense))


@pytest.mark.parametrize("law", ["four", "eight bits"])
def test_no_nonzeros(kernels_on, law):
    S = Sketch(12, **LAWS[law])
    values, indptr, columns = parts_of(torch.zeros(3, 12), torch.float32, torch.int64, kernels_on)
    out = torch.full((3, S.n_components), math.nan, device=kernels_on)
    triton_backend(S.spec).project_sparse(S.spec, values, indptr, columns, out, False)
    assert not out.any()
    triton_backend(S.spec).gather_sparse(S.spec, out, columns, columns, values)


@pytest.mark.parametrize("law", ["four", "stacked", "eight bits"])
def test_non_finite_values(kernels_on, law):
    """They reach the components of their column, in their row, and no others."""
    S = Sketch(12, **LAWS[law])
    dense = drawn(4)
    dense[2, 9], dense[3, 11] = math.inf, math.nan
    values, indptr, columns = parts_of(dense, torch.float32, torch.int64, kernels_on)
    out = torch.empty((4, S.n_components), device=kernels_on)
    triton_backend(S.spec).project_sparse(S.spec, values, indptr, columns, out, False)
    hit = torch.zeros(4, S.n_components, dtype=torch.bool)
    for row, column in ((2, 9), (3, 11)):
        hit[row] = torch.from_numpy(S[:, column : column + 1].toarray()[:, 0] != 0)
    assert torch.equal(~out.cpu().isfinite(), hit)


def test_row_splits():
    """Enough to fill a GPU, each of sufficient length, and within the memory allowed for partial sums."""
    for rows in (1, 7, 1000, 200_000, 10**7):
        for average in (0, 1, 31, 100, 10**4, 10**7):
            for k in (1, 512, 8192):
                splits = sparse.count_splits(rows, rows * average, k, 4)
                assert splits >= 1
                assert splits == 1 or rows * splits * k * 4 <= sparse.SUMS_BYTES
                assert splits == 1 or average // splits >= sparse.MIN_PART
    assert sparse.count_splits(1, 10**7, 512, 4) > 1000
    assert sparse.count_splits(200_000, 200_000 * 100, 512, 4) == 1


# ------------------------------------------------------------------------------------- on a GPU, by the public calls


@pytest.mark.gpu
@pytest.mark.parametrize("law", list(LAWS))
@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
def test_cuda_tensors(layout, law):
    """Match the CPU's results and derivatives, to the bit where scales are powers of two; reproducible bits."""
    S = Sketch(20_000, seed=5, **LAWS[law])
    dense = drawn(200, 20_000, 3).float()
    convert = {"csr": dense.to_sparse_csr, "csc": dense.to_sparse_csc, "coo": dense.to_sparse_coo}[layout]
    x = convert()
    expected = S.project(dense)
    results = [S.project(x.cuda()) for _ in range(5)]
    assert all(torch.equal(y, results[0]) for y in results)
    rtol = 0 if S.nnz in (1, 4) else 2**-22  # the scale is rounded and applied at another point
    torch.testing.assert_close(results[0].cpu(), expected, rtol=rtol, atol=0)
    torch.testing.assert_close((S @ x.cuda().t()).cpu(), expected.T, rtol=rtol, atol=0)
    noise = torch.randn_like(dense) * (dense != 0)
    noisy = {"csr": noise.to_sparse_csr, "csc": noise.to_sparse_csc, "coo": noise.to_sparse_coo}[layout]().cuda()
    results = [S.project(noisy) for _ in range(20)]
    assert all(torch.equal(y, results[0]) for y in results)
    error = (results[0].cpu() - S.project(noise)).norm() / noise.norm()
    assert float(error) < 1e-6
    tree = [x.cuda(), torch.ones(5, device="cuda")]
    whole = Sketch(200 * 20_000 + 5, seed=5, **LAWS[law])
    torch.testing.assert_close(
        whole.project_tree(tree).cpu(), whole.project_tree([dense, torch.ones(5)]), rtol=rtol, atol=0
    )
    if layout != "csc":  # torch has no gradient for this conversion
        leaf = x.cuda().requires_grad_()
        weights = torch.randint(-3, 4, (200, S.n_components)).float()
        (S.project(leaf) * weights.cuda()).sum().backward()
        exact = S.project_adjoint(weights) * (dense != 0)
        torch.testing.assert_close(leaf.grad.to_dense().cpu(), exact)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(S.project)(torch.stack([dense.cuda()] * 2).to_sparse_coo())
