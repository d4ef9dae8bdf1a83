"""`Sketch.project_tree`: several tensors as if concatenated, exact on integer data."""

import math
import re
from collections import OrderedDict

import numpy as np
import pytest
import torch
from helpers.data import exact_project, integers

from sjlt import Sketch


def leaf(device, *shape, dtype=torch.float32, seed=0):
    return torch.from_numpy(np.array(integers(shape, seed=seed + len(shape)))).to(device, dtype)


def expected(leaves, batch_ndim=0, nnz=4, dtype=torch.float32):
    at_least = [x.cpu().double() if x.ndim > batch_ndim else x.cpu().double().unsqueeze(-1) for x in leaves]
    flat = np.concatenate([x.flatten(batch_ndim).numpy() for x in at_least], axis=-1)
    S = Sketch(flat.shape[-1], 96, nnz=nnz, seed=5)
    return S, torch.from_numpy(np.array(exact_project(S, flat, "float64"))).to(dtype)


def same(actual, exact):
    assert actual.dtype == exact.dtype
    assert torch.equal(actual.cpu(), exact)


SHAPES = [(10, 6), (0,), (7,), (), (3, 1, 5), (1,), (4, 0, 2), (129,)]


@pytest.mark.parametrize("nnz", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_as_if_concatenated(device, dtype, nnz):
    leaves = [leaf(device, *shape, dtype=dtype, seed=i) for i, shape in enumerate(SHAPES)]
    S, exact = expected(leaves, nnz=nnz, dtype=dtype)
    for tree in (
        leaves,
        tuple(leaves),
        {str(i): x for i, x in enumerate(leaves)},
        {"b": leaves[:3], "a": {"z": leaves[3], "y": OrderedDict(x=leaves[4:6])}, "c": (tuple(leaves[6:]), [])},
    ):
        same(S.project_tree(tree), exact)
    same(S.project_tree([torch.cat([x.flatten() for x in leaves])]), exact)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_per_example(device, n):
    leaves = [leaf(device, n, *shape, seed=i) for i, shape in enumerate(SHAPES)]
    S, exact = expected(leaves, 1)
    same(S.project_tree(leaves, batched=True), exact)
    out = torch.full((n, 96), math.nan, device=device)
    assert S.project_tree(leaves, batched=True, out=out) is out
    same(out, exact)
    if n:
        same(torch.func.vmap(S.project_tree)(leaves), exact)


def test_strides(device):
    """In the logical order of each tensor for any memory layout; the tensors are not modified."""
    matrix, cube = leaf(device, 12, 9), leaf(device, 4, 5, 6)
    leaves = [
        matrix.T,
        matrix[2:7, 1:8:3],
        matrix[3:4].expand(3, 9),
        cube.permute(2, 0, 1),
        cube[:, ::2].mT,
        cube[..., 1],
    ]
    before = [x.clone() for x in leaves]
    S, exact = expected(leaves)
    same(S.project_tree(leaves), exact)
    assert all(torch.equal(a, b) for a, b in zip(leaves, before, strict=True))
    batches = [cube, cube[:, :, 0], cube[:, 1:3, 2:4], cube.mT]
    S, exact = expected(batches, 1)
    same(S.project_tree(batches, batched=True), exact)


def test_no_concatenation_or_copies(device, calls):
    leaves = [leaf(device, *shape, seed=i) for i, shape in enumerate([(10, 6), (7,), (3, 1, 5)])]
    S, _ = expected(leaves)
    S.project_tree(leaves)
    assert [x.data_ptr() for x, _ in calls] == [x.data_ptr() for x in leaves]


def test_dtypes(device):
    """Results have the common promoted dtype; 16-bit data is summed in fp32 and rounded once."""
    leaves = [leaf(device, 300, dtype=torch.bfloat16, seed=i) for i in range(4)]
    S, exact = expected(leaves, dtype=torch.bfloat16)
    same(S.project_tree(leaves), exact)
    mixed = [leaves[0], leaves[1].to(torch.float16), leaves[2]]
    S, exact = expected(mixed)
    same(S.project_tree(mixed), exact)
    out = torch.full((96,), math.nan, device=device, dtype=torch.float64)
    same(S.project_tree(mixed, out=out), exact.double())


def test_gradients(device):
    leaves = {name: leaf(device, *shape).requires_grad_() for name, shape in (("a", (4, 5)), ("b", (6,)))}
    S, _ = expected([x.detach() for x in leaves.values()])
    weight = leaf(device, 96)
    (S.project_tree(leaves) @ weight).backward()
    gradient = weight @ S
    assert torch.equal(leaves["a"].grad, gradient[:20].view(4, 5))
    assert torch.equal(leaves["b"].grad, gradient[20:])


def test_out_does_not_drop_gradients(device):
    leaves, out = [leaf(device, 4, 5).requires_grad_(), leaf(device, 6)], torch.zeros(96, device=device)
    S, exact = expected([x.detach() for x in leaves])
    plain = [x.detach() for x in leaves]
    for tree, result in ((leaves, out), (plain, out.clone().requires_grad_())):
        with pytest.raises(RuntimeError, match="out= does not support automatic differentiation"):
            S.project_tree(tree, out=result)
        with torch.no_grad():
            same(S.project_tree(tree, out=result).detach(), exact)
    assert not out.requires_grad


def test_plans_of_equal_layouts_only(device):
    """A second call reuses what was computed for the first only if the layout, the sketch and the options are equal."""
    a, b = leaf(device, 6, 4), leaf(device, 6, 4, seed=1)
    for tree in ([a, b], [b, a], [a.T, b], [a, b.T.contiguous().T], [a.double(), b], [a[:3], a[3:], b], [a.T, b.T]):
        for _ in range(2):
            S, exact = expected(tree, dtype=torch.promote_types(tree[0].dtype, torch.float32))
            same(S.project_tree(tree), exact)
            if len({len(x) for x in tree}) == 1:
                S, exact = expected(tree, 1, dtype=exact.dtype)
                same(S.project_tree(tree, batched=True), exact)
    for other in (Sketch(48, 96, nnz=4, seed=seed) for seed in (6, 0, 6, -1)):
        assert torch.equal(other.project_tree([a, b]), torch.cat([a.flatten(), b.flatten()]) @ other.T)
    wide = torch.cat([a, b], 1)
    S, exact = expected([wide[:, :4], wide[:, 4:]])
    same(S.project_tree([wide[:, :4], wide[:, 4:]]), exact)  # at different offsets of one memory
    S.project_tree([a, b])
    x = a.clone().requires_grad_()
    S.project_tree([x, b]).sum().backward()
    assert torch.equal(x.grad.flatten(), torch.ones(96, device=device) @ S[:, :24])


def test_kept_plans_are_bounded(device):
    from sjlt.frontends import tree_plans

    for n in range(1, 2 * tree_plans.MAX_KEPT):
        Sketch(n, 8).project_tree([torch.zeros(n, device=device)])
        assert len(tree_plans._kept) <= tree_plans.MAX_KEPT


def test_released_memory(device):
    """A tensor without memory, as of sharded parameters between uses, raises an error."""
    x, S = torch.ones(6, 4, device=device), Sketch(24, 8)
    x.untyped_storage().resize_(0)
    S.project_tree([torch.ones(6, 4, device=device)])
    with pytest.raises(RuntimeError, match="24 elements, but no memory is allocated"):
        S.project_tree([x])


def test_compiled(device):
    leaves = {"a": leaf(device, 3, 4, 5), "b": leaf(device, 3, 6)}
    S, exact = expected(leaves.values(), 1)
    compiled = torch.compile(lambda tree: S.project_tree(tree, batched=True), fullgraph=True, backend="aot_eager")
    same(compiled(leaves), exact)


def test_refusals(device):
    a, b = torch.zeros((3, 4), device=device), torch.zeros(5, device=device)
    S = Sketch(17, 40)
    for error, message, call in (
        (ValueError, r"n_features = 17 elements, got 12", lambda: S.project_tree([a])),
        (ValueError, r"n_features = 17 elements, got 29", lambda: S.project_tree({"a": a, "b": b, "c": a})),
        (ValueError, r"\[\(3,\), \(5,\)\]", lambda: S.project_tree([a, b], batched=True)),
        (ValueError, r"leading dimension", lambda: S.project_tree([torch.tensor(1.0, device=device)], batched=True)),
        (ValueError, r"17 elements per element of the batch, got 8", lambda: S.project_tree([a, a], batched=True)),
        (ValueError, r"at least one tensor", lambda: S.project_tree({})),
        (TypeError, r"ndarray", lambda: S.project_tree([a, np.zeros(5)])),
        (TypeError, r"int64", lambda: S.project_tree([a, b.long()])),
        (ValueError, r"one device.*meta", lambda: S.project_tree([a, torch.zeros(5, device="meta")])),
        (ValueError, re.escape("(40,), got (39,)"), lambda: S.project_tree([a, b], out=b.new_zeros(39))),
        (TypeError, r"int32", lambda: S.project_tree([a, b], out=torch.zeros(40, dtype=torch.int32, device=device))),
        (TypeError, r"list", lambda: S.project_tree([a, b], out=[0.0] * 40)),
    ):
        with pytest.raises(error, match=message):
            call()


# --------------------------------------------------------------------------------- the adjoint


@pytest.mark.parametrize("batched", [False, True])
def test_adjoint_trees(device, batched):
    leaves = [leaf(device, *([3] if batched else []), *shape, seed=i) for i, shape in enumerate(SHAPES)]
    S, exact = expected(leaves, int(batched))
    tree = {"b": leaves[:3], "a": {"z": leaves[3].to(torch.bfloat16), "y": tuple(leaves[4:])}}
    y = exact.to(device) / 8
    back = S.adjoint_tree(y, like=tree, batched=batched)
    flat = [*back["b"], back["a"]["z"], *back["a"]["y"]]
    assert type(back["a"]["y"]) is tuple
    whole = y @ S
    start = 0
    for result, like in zip(flat, [*leaves[:3], tree["a"]["z"], *leaves[4:]], strict=True):
        n = math.prod(like.shape[int(batched) :])
        assert (result.shape, result.dtype, result.device) == (like.shape, like.dtype, like.device)
        assert torch.equal(result, whole[..., start : start + n].to(like.dtype).reshape(like.shape))
        start += n
    assert start == S.n_features


def test_adjoint_trees_transpose_project_tree(device):
    like = [torch.zeros(4, 5, device=device, dtype=torch.float64), torch.zeros(7, device=device, dtype=torch.float64)]
    S = Sketch(27, 11, nnz=3, seed=2)
    gradient = [torch.randn_like(t) for t in like]
    y = torch.randn(11, device=device, dtype=torch.float64, requires_grad=True)
    back = S.adjoint_tree(y, like)
    left = sum((a * b).sum() for a, b in zip(back, gradient, strict=True))
    assert torch.allclose(left, y.detach() @ S.project_tree(gradient))
    left.backward()
    assert torch.allclose(y.grad, S.project_tree(gradient))


def test_adjoint_tree_refusals(device):
    S, like = Sketch(6, 4), [torch.zeros(2, 3, device=device)]
    for error, message, call in (
        (ValueError, r"needs y of shape \(4,\) for this tree, got \(5,\)",
         lambda: S.adjoint_tree(torch.zeros(5, device=device), like)),
        (ValueError, r"n_features = 6 elements, got 7", lambda: S.adjoint_tree(torch.zeros(4), [torch.zeros(7)])),
        (TypeError, "got ndarray", lambda: S.adjoint_tree(np.zeros(4), like)),
        (TypeError, "dtype torch.int64 is not supported", lambda: S.adjoint_tree(torch.zeros(4).long(), like)),
        (ValueError, "y must be on", lambda: S.adjoint_tree(torch.zeros(4, device="meta"), like)),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
