"""Products of stacked sketches equal those of their matrix on every backend, exactly on integer data."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse
import torch
from helpers.cases import all_pairs, pairwise
from helpers.cli import run as run
from helpers.data import exact_adjoint, exact_project, integers, same
from helpers.kernels import launches_run
from helpers.products import PRODUCTS, matrix, numbers, product_of, whole
from sklearn.base import clone

import sjlt

SHAPES = [(128, 1), (512, 4), (600, 4), (40, 4), (1024, 16)]  # (n_components, nnz) with dyadic scales


def allowed(shape, stacks, *_):
    k, nnz = shape
    return k % stacks == 0 and nnz % stacks == 0


@pairwise(
    allowed, shape=SHAPES, stacks=[1, 2, 4], dtype=["float32", "float64", "float16"], n=[1, 7, 70], d=[5, 700, 9000],
    offset=[0, 321],
)  # fmt: skip
def test_arrays(shape, stacks, dtype, n, d, offset):
    S = sjlt.Sketch(offset + d, shape[0], nnz=shape[1], stacks=stacks, seed=1)[:, offset:]
    x = integers((n, d), dtype)
    if dtype == "float16":
        x[:, 50:] = 0  # sums that fp16 represents
    same(S.project(x), exact_project(S, x))
    same(S @ np.asfortranarray(x.T), exact_project(S, x).T)
    y = integers((n, shape[0]), dtype)
    same(S.project_adjoint(y), exact_adjoint(S, y))
    out = np.ones((n, shape[0]))
    S.project(x, out=out, accumulate=True)
    np.testing.assert_array_equal(out, exact_project(S, x).astype(float) + 1)
    half = d // 2
    parts = S[:, :half].project(x[:, :half].astype(float)) + S[:, half:].project(x[:, half:].astype(float))
    np.testing.assert_array_equal(parts, exact_project(S, x.astype(float)))


@pytest.mark.parametrize("format", ["csr", "csc"])
@pytest.mark.parametrize("stacks", [2, 4])
@pytest.mark.parametrize("d", [300, 200_000])
def test_sparse(format, stacks, d):
    S = sjlt.Sketch(d, 512, nnz=4, stacks=stacks, seed=2)
    x = scipy.sparse.random_array((20, d), density=0.002 if d > 1000 else 0.2, format=format, rng=0)
    x.data = np.round(8 * x.data)
    dense = x.toarray()
    same(S.project(x), exact_project(S, dense))
    same(S.project(x, dense_output=False).toarray(), exact_project(S, dense))
    same(S @ x.T, exact_project(S, dense).T)


def test_threads_and_batches_do_not_change_bits():
    S = sjlt.Sketch(50_000, 1024, nnz=8, stacks=4)
    x = np.random.default_rng(0).standard_normal((40, 50_000)).astype(np.float32)
    whole_ = S.project(x)
    before = sjlt.get_num_threads()
    try:
        sjlt.set_num_threads(1)
        np.testing.assert_array_equal(S.project(x), whole_)
        np.testing.assert_array_equal(np.stack([S.project(row) for row in x]), whole_)
    finally:
        sjlt.set_num_threads(before)


@pairwise(name=list(PRODUCTS), stacks=[2, 4], dtype=[torch.float32, torch.float64])
def test_tensors(name, stacks, dtype, device):
    S = sjlt.Sketch(31, 64, nnz=4, stacks=stacks)
    function, shape = product_of(name, S)
    x = whole(device, *shape, dtype=dtype)
    y = function(x)
    assert y.dtype == dtype
    np.testing.assert_array_equal(numbers(y), function(numbers(x)))


def test_gradients(device):
    S = sjlt.Sketch(31, 64, nnz=4, stacks=4)
    x = whole(device, 3, 31, requires_grad=True)
    assert torch.autograd.gradcheck(S.project, x)
    (g,) = torch.autograd.grad((x @ S.T).sum(), x)
    np.testing.assert_array_equal(
        numbers(g), numbers(torch.ones(3, 64, dtype=torch.float64, device=device) @ matrix(device, S))
    )


def test_compiled(device):
    S = sjlt.Sketch(31, 64, nnz=4, stacks=4)
    x = whole(device, 3, 31)
    compiled = torch.compile(lambda x: x @ S.T, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), x @ S.T)


def test_one_call():
    x = integers((5, 300), "float32")
    same(sjlt.project(x, 512, nnz=4, stacks=2, seed=3), sjlt.Sketch(300, 512, nnz=4, stacks=2, seed=3).project(x))


# ------------------------------------------------------------------------------------- interfaces


def test_transformer():
    x, S = integers((5, 300), "float32"), sjlt.Sketch(300, 64, nnz=8, stacks=4, seed=3)
    transformer = sjlt.SparseRandomProjection(64, nnz=8, stacks=4, random_state=3)
    same(clone(transformer).fit_transform(x), S.project(x))
    assert transformer.get_params()["stacks"] == 4
    assert "stacks=4" in repr(transformer)
    for stacks, nnz in ((3, 6), (4, 6), (0, "auto")):
        with pytest.raises(ValueError, match=f"stacks.*{stacks}"):
            transformer.set_params(stacks=stacks, nnz=nnz).fit(x)


def test_layer(device):
    x, S = whole(device, 3, 300), sjlt.Sketch(300, 64, nnz=8, stacks=4, seed=3)
    layer = sjlt.nn.SparseProjection(300, 64, nnz=8, stacks=4, seed=3).to(device)
    assert torch.equal(layer(x), x @ S.T)
    assert "stacks=4" in repr(layer)
    with pytest.raises(ValueError, match="stacks = 3 and n_components = 64"):
        sjlt.nn.SparseProjection(300, 64, stacks=3, seed=3)


def test_command_line(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, S = integers((50, 300), "float32"), sjlt.Sketch(300, 64, nnz=8, stacks=4, seed=3)
    np.save("x.npy", x)
    options = ("-k", 64, "--nnz", 8, "--seed", 3)
    assert run("project", "x.npy", "y.npy", *options, "--stacks", 4).code == 0
    same(np.load("y.npy"), S.project(x))
    for stacks in (3, 0, 65):
        result = run("project", "x.npy", "z.npy", *options, "--stacks", stacks)
        assert result.code == 2
        assert "stacks" in result.err
        assert str(stacks) in result.err
    assert not (tmp_path / "z.npy").exists()


# ------------------------------------------------------------------------------------- kernels


# Pairs of values rather than the full product, whose cases take up to half a minute each in the interpreter.
KERNEL_CASES, _ = all_pairs(
    [SHAPES, [2, 4], [torch.float32, torch.float64, torch.float16], [1, 3, 40], [70, 1500], ["features", "vectors"]],
    allowed,
)


@pytest.mark.parametrize(
    ("splits", "contiguous"),
    [
        (1, "features"),
        *(pytest.param(*c, marks=pytest.mark.exhaustive) for c in ((1, "vectors"), (3, "vectors"), (3, "features"))),
    ],
)
def test_one_launch_for_all_stacks(splits, contiguous, kernels_on, monkeypatch):
    """For many vectors, with and without split sums."""
    from sjlt.backends.triton import launcher, prepared, stacks

    S = sjlt.Sketch(200 * splits, 1024, nnz=16, stacks=4, seed=5)
    x = torch.from_numpy(integers((70, S.n_features), "float32")).to(kernels_on)
    y = torch.full((70, 1024), torch.nan, device=kernels_on)
    if contiguous == "vectors":
        x, y = x.t().contiguous().t(), y.t().contiguous().t()
    launches, run, plan = [], launcher.run, stacks._plan

    def count(kernel, grid, *rest):
        if launches_run():
            launches.append((kernel.__name__, grid))
        return run(kernel, grid, *rest)

    def split(*arguments):
        planned = plan(*arguments)
        groups = -(-planned.chosen.groups_per_split // splits)
        chosen = replace(planned.chosen, splits=splits, groups_per_split=groups)
        flags = {"SINGLE_SPLIT": splits == 1, "PROGRAMMATIC_LAUNCH": False}
        return replace(planned, chosen=chosen, constants={**planned.constants, **flags})

    monkeypatch.setattr(launcher, "run", count)
    monkeypatch.setattr(prepared, "_prepared", {})
    monkeypatch.setattr(stacks, "_plan", split)
    stacks.project(S.spec, x, y, False)
    kernel = "project_tensor_core" if contiguous == "features" else "project_row_gather"
    ((name, grid),) = [launch for launch in launches if launch[0] != "reduce_partial_sums"]
    assert name == kernel
    assert grid[0] % (4 * 2) == 0  # four stacks of two tiles
    assert grid[1] == splits
    assert torch.equal(y, (x.double() @ matrix(kernels_on, S).T).float())


@pytest.mark.exhaustive
@pytest.mark.parametrize(("shape", "stacks", "dtype", "n", "d", "contiguous"), KERNEL_CASES)
def test_kernels(shape, stacks, dtype, n, d, contiguous, kernels_on):
    """Every portable kernel that the sizes select, both directions, over outputs filled with NaN."""
    from sjlt.backends import triton_backend

    S = sjlt.Sketch(d, shape[0], nnz=shape[1], stacks=stacks, seed=5)
    x = torch.from_numpy(integers((n, d), "float32")).to(kernels_on, dtype)
    y = torch.from_numpy(integers((n, shape[0]), "float32")).to(kernels_on, dtype)
    if contiguous == "vectors":
        x, y = x.t().contiguous().t(), y.t().contiguous().t()
    if dtype == torch.float16:
        x[:, 50:] = 0
    dense, backend = matrix(kernels_on, S), triton_backend(S.spec)
    for function, data, out, expected in (
        (backend.project, x, torch.full_like(y, torch.nan), x.double() @ dense.T),
        (backend.adjoint, y, torch.full_like(x, torch.nan), y.double() @ dense),
    ):
        function(S.spec, data, out, False)
        assert torch.equal(out, expected.to(dtype))
        if dtype != torch.float16:
            function(S.spec, data, out, True)
            assert torch.equal(out, (2 * expected).to(dtype))


@pytest.mark.exhaustive
@pytest.mark.parametrize("memory", [4 * 70 * 3, 4 * 30])  # memory for three vectors, and for less than one
def test_16_bit_adjoints_in_parts(memory, kernels_on, monkeypatch):
    """The sum over stacks is in fp32, a few vectors at a time or, if one does not fit, a part of one."""
    from sjlt.backends.triton import stacks

    monkeypatch.setattr(stacks, "SCRATCH_BYTES", memory)
    S = sjlt.Sketch(70, 64, nnz=4, stacks=2, seed=5)
    y = torch.from_numpy(integers((7, 64), "float32")).to(kernels_on, torch.float16)
    out = torch.full((7, 70), torch.nan, dtype=torch.float16, device=kernels_on)
    stacks.adjoint(S.spec, y, out, False)
    assert torch.equal(out, (y.double() @ matrix(kernels_on, S)).half())


def test_slices_share_a_plan():
    """Where slices start does not affect the choice of kernel."""
    from helpers.choices import exact_product

    from sjlt.backends.triton import stacks

    first, second = (exact_product(64, 512, 128, 1, offset=offset, stacks=4) for offset in (256, 1 << 20))
    assert stacks._plan(first, None, 4) is stacks._plan(second, None, 4)
    assert stacks._plan(first, 0, 4) is not stacks._plan(first, 1, 4)


def test_largest_stacks():
    """A group of chunks has more entries than a table of the CPU kernels usually holds."""
    S = sjlt.Sketch(10, 3 * 2**21, nnz=3, stacks=3, seed=1)
    rows, signs = S.entries()
    assert (rows // 2**21 == np.arange(3)[:, None]).all()
    y = np.zeros((1, 3 * 2**21), np.float32)
    S.project(np.eye(10, dtype=np.float32)[:1], out=y)
    assert (np.flatnonzero(y) == rows[:, 0]).all()
    np.testing.assert_array_equal(y[0, rows[:, 0]], (signs[:, 0] / np.sqrt(3)).astype(np.float32))
