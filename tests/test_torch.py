"""Products with torch tensors, exact on integer data: dtypes, shapes, strides, `out`; results stay on their device."""

import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.cases import each_value, exhaustive_except
from helpers.data import exact_adjoint, exact_project, integers

import sjlt
from sjlt import Sketch

S = Sketch(200, 64, nnz=4, seed=1)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def same(actual, expected, dtype=torch.float32, device=None):
    """Check for a plain tensor of the given dtype with exactly the expected values, which the dtype must represent."""
    assert type(actual) is torch.Tensor
    assert actual.dtype == dtype
    assert not actual.requires_grad
    if device is not None:
        assert actual.device.type == device
    expected = torch.from_numpy(np.ascontiguousarray(expected, np.float64))
    assert torch.equal(expected.to(dtype).double(), expected), "choose data that the dtype holds exactly"
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(actual.detach().cpu().double().numpy(), expected.numpy())


def on(device, array, dtype=torch.float32):
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)


def data_of(device, shape, dtype=torch.float32, seed=0):
    """Integers as a tensor, and as the array to compute exact answers from."""
    array = integers(shape, seed=seed)
    return on(device, array, dtype), array


def to_numpy(x):
    return x.detach().cpu().double().numpy()


def poisoned(device, shape, dtype=torch.float32):
    return torch.full(shape, math.nan, device=device, dtype=dtype)


def is_view_of(view, tensor):
    return view.numel() == 0 or view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


# --------------------------------------------------------------------------------- products


@each_value(dtype=DTYPES, n=[3, 70])
def test_every_product(device, dtype, n):
    x, rows = data_of(device, (n, 200), dtype)
    y, components = data_of(device, (n, 64), dtype)
    projected, adjoint = exact_project(S, rows, "float64"), exact_adjoint(S, components, "float64")
    for product in (
        lambda: x @ S.T,
        lambda: S.project(x),
        lambda: sjlt.project(x, 64, nnz=4, seed=1),
        lambda: torch.matmul(x, S.T),
        lambda: S.project(x, out=poisoned(device, (n, 64), dtype)),
        lambda: (S @ x.T).T,
        lambda: torch.matmul(S, x.T).T,
    ):
        same(product(), projected, dtype, device)
    for product in (
        lambda: y @ S,
        lambda: S.project_adjoint(y),
        lambda: torch.matmul(y, S),
        lambda: S.project_adjoint(y, out=poisoned(device, (n, 200), dtype)),
        lambda: (S.T @ y.T).T,
    ):
        same(product(), adjoint, dtype, device)


@each_dtype
def test_vectors(device, dtype):
    x, row = data_of(device, 200, dtype)
    y, components = data_of(device, 64, dtype)
    for product in (lambda: x @ S.T, lambda: S @ x, lambda: S.project(x), lambda: sjlt.project(x, 64, seed=1)):
        same(product(), exact_project(S, row, "float64"), dtype, device)
    for product in (lambda: y @ S, lambda: S.T @ y, lambda: S.project_adjoint(y)):
        same(product(), exact_adjoint(S, components, "float64"), dtype, device)


@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (2, 3), (1, 2, 1, 3), (0, 4), (2, 0, 3), (3, 1)], ids=str)
def test_leading_shapes(device, shape):
    x, rows = data_of(device, (*shape, 200))
    y, components = data_of(device, (*shape, 64))
    same(x @ S.T, exact_project(S, rows))
    same(y @ S, exact_adjoint(S, components))
    assert (x @ S.T).is_contiguous()


def test_no_features(device):
    empty = Sketch(0, 64, nnz=4)
    for shape in ((0,), (3, 0), (2, 3, 0)):
        x = torch.empty(shape, device=device)
        same(x @ empty.T, np.zeros((*shape[:-1], 64)))
        out = torch.ones((*shape[:-1], 64), device=device)
        same(empty.project(x, out=out, accumulate=True), np.ones((*shape[:-1], 64)))
        same(torch.ones((*shape[:-1], 64), device=device) @ empty, np.zeros(shape))
    same(empty @ torch.empty((0, 3), device=device), np.zeros((64, 3)))


def test_streamed_features(device):
    x, rows = data_of(device, (7, 200))
    y, components = data_of(device, (7, 64))
    out, back = torch.zeros((7, 64), device=device, dtype=torch.float64), poisoned(device, (7, 200))
    cuts = [0, 0, 1, 33, 34, 129, 200]
    for a, b in itertools.pairwise(cuts):
        assert S[:, a:b].project(x[:, a:b], out=out, accumulate=True) is out
        S[:, a:b].project_adjoint(y, out=back[:, a:b])
    same(out, exact_project(S, rows), torch.float64)
    same(back, exact_adjoint(S, components))
    same(sum(S[:, a:b] @ x.T[a:b] for a, b in itertools.pairwise(cuts)), exact_project(S, rows).T)


# --------------------------------------------------------------------------------- strides

# Views with every kind of strides in torch; the last axis has the requested length.
VIEWS = {
    "columns": lambda t, width: t((width, 9)).T,
    "column slice": lambda t, width: t((9, width + 7))[:, 3 : 3 + width],
    "every second": lambda t, width: t((9, 2 * width))[::2, 1::2],
    "one row expanded": lambda t, width: t((1, width)).expand(9, width),
    "one number expanded": lambda t, width: t((9, 1)).expand(9, width),
    "overlapping windows": lambda t, width: t(width + 8).unfold(0, width, 1),
    "leading axes transposed": lambda t, width: t((4, 3, width)).transpose(0, 1),
    "leading axes rotated": lambda t, width: t((2, 3, 4, width)).permute(2, 0, 1, 3),
    "features first": lambda t, width: t((width, 4, 3)).permute(2, 1, 0),
    "features in the middle": lambda t, width: t((4, width, 3)).transpose(1, 2),
    "leading axis expanded": lambda t, width: t((4, 1, width)).expand(4, 3, width),
    "steps in each axis": lambda t, width: t((8, 6, 2 * width))[::2, 1::3, ::2],
    "axes of length 1": lambda t, width: t((1, 4, 1, width)).permute(2, 1, 0, 3)[:, ::2],
    "diagonal": lambda t, width: t((5, width, 5)).diagonal(0, 0, 2).T,
    "a vector with steps": lambda t, width: t((width, 3))[:, 1],
    "a vector expanded": lambda t, width: t(1).expand(width),
}
each_view = pytest.mark.parametrize("view", VIEWS)


@each_view
def test_strides_of_the_data(device, calls, view):
    for function, exact, width in ((S.project, exact_project, 200), (S.project_adjoint, exact_adjoint, 64)):
        x = VIEWS[view](lambda shape: data_of(device, shape)[0], width)
        same(function(x), exact(S, to_numpy(x), "float32"))
        assert all(is_view_of(rows, x) for rows, _ in calls)
        calls.clear()


@each_value(
    view=[v for v in VIEWS if "expanded" not in v and "overlapping" not in v], dtype=[torch.float32, torch.float64]
)
def test_strides_of_the_result(device, view, dtype):
    for function, exact, before, after in (
        (S.project, exact_project, 200, 64),
        (S.project_adjoint, exact_adjoint, 64, 200),
    ):
        memory = []

        def kept(shape, memory=memory, dtype=dtype):
            memory.append(torch.full((shape,) if isinstance(shape, int) else shape, 5.0, device=device, dtype=dtype))
            return memory[0]

        out = VIEWS[view](kept, after)
        x, rows = data_of(device, (*out.shape[:-1], before))
        expected = exact(S, rows)
        assert function(x, out=out, accumulate=True) is out
        same(out, expected + 5, dtype)
        assert function(x, out=out) is out
        same(out, expected, dtype)
        out.fill_(5)
        assert (memory[0] == 5).all(), "what lies beside out was written to"


@pytest.mark.parametrize("view", [v for v in VIEWS if VIEWS[v](torch.empty, 2).ndim <= 2])
def test_strides_of_left_products(device, calls, view):
    x = VIEWS[view](lambda shape: data_of(device, shape)[0], 200)
    same(S @ x.T if x.ndim == 2 else S @ x, exact_project(S, to_numpy(x), "float32").T)
    assert all(is_view_of(rows, x) for rows, _ in calls)


@pytest.mark.parametrize("seed", exhaustive_except(range(6), range(20)))
def test_any_strides(device, calls, seed):
    """Random views of data and out: results are correct, and no two calls could have been merged."""
    rng = np.random.default_rng(seed)
    shape = rng.integers(1, 4, rng.integers(2, 5)).tolist()

    def view(width, values, may_repeat):
        order = rng.permutation(len(shape)).tolist()
        steps = rng.integers(1, 3, len(shape)).tolist()
        repeated = [may_repeat and bool(rng.random() < 0.3) for _ in shape]
        lengths = [1 if repeated[a] else shape[a] * steps[a] for a in order]
        x = values((*lengths, width)).permute(*[order.index(a) for a in range(len(shape))], -1)
        x = x[tuple(slice(None, None, 1 if again else step) for again, step in zip(repeated, steps, strict=True))]
        return x.expand(*shape, width)

    x = view(200, lambda shape: data_of(device, shape)[0], True)
    out = view(64, lambda shape: poisoned(device, shape), False)
    expected = exact_project(S, to_numpy(x), "float32")
    same(S.project(x, out=out), expected)
    assert len(calls) <= math.prod(shape) // max(shape)
    assert sum(len(rows) for rows, _ in calls) == math.prod(shape)
    calls.clear()
    same(S.project(x), expected)
    assert all(is_view_of(rows, x) for rows, _ in calls)


@pytest.mark.parametrize(
    ("view", "number"),
    [
        (lambda t: t((3, 4, 200)), 1),
        (lambda t: t((3, 4, 200)).transpose(0, 1), 1),  # sequence before batch
        (lambda t: t((2, 3, 4, 200)).permute(2, 0, 1, 3), 1),
        (lambda t: t((2, 3, 4, 400))[..., ::2].permute(1, 2, 0, 3), 1),
        (lambda t: t((200, 4, 3)).permute(2, 1, 0), 1),
        (lambda t: t((3, 200, 4)).transpose(1, 2), 3),
        (lambda t: t((3, 8, 200))[:, :5], 3),
        (lambda t: t((8, 6, 200))[:2, :5], 2),
        (lambda t: t((4, 1, 200)).expand(4, 3, 200), 3),
        (lambda t: t((1, 1, 200)).expand(4, 3, 200), 1),
        (lambda t: t((2, 5, 7, 200))[:, :3], 2),
    ],
)
def test_number_of_calls(device, calls, view, number):
    x = view(lambda shape: data_of(device, shape)[0])
    result = S.project(x)
    assert len(calls) == number
    same(result, exact_project(S, to_numpy(x), "float32"))


def test_results_follow_the_memory_order_of_the_data(device):
    x = data_of(device, (4, 3, 5, 200))[0]
    assert S.project(x.permute(2, 0, 1, 3)).permute(1, 2, 0, 3).is_contiguous()
    for contiguous in (x, x[:, :, ::2], x[:1].expand(4, 3, 5, 200), x.mT.contiguous().mT):
        assert S.project(contiguous).is_contiguous()
    matrix = x[0, 0]
    assert (S @ matrix.T).is_contiguous()
    assert (S @ matrix.T.contiguous()).is_contiguous()


# --------------------------------------------------------------------------------- out


@each_value(dtype=DTYPES, out_dtype=DTYPES)
def test_out_may_have_another_dtype(device, dtype, out_dtype):
    x, rows = data_of(device, (5, 200), dtype)
    y, components = data_of(device, (5, 64), dtype)
    same(S.project(x, out=poisoned(device, (5, 64), out_dtype)), exact_project(S, rows), out_dtype)
    same(S.project_adjoint(y, out=poisoned(device, (5, 200), out_dtype)), exact_adjoint(S, components), out_dtype)
    if out_dtype in (torch.float32, torch.float64):
        out = torch.full((5, 64), 7.0, device=device, dtype=out_dtype)
        same(S.project(x, out=out, accumulate=True), exact_project(S, rows) + 7, out_dtype)


def test_out_of_sjlt_project(device):
    x, rows = data_of(device, (2, 3, 200))
    out = poisoned(device, (2, 3, 64))
    assert sjlt.project(x, 64, nnz=4, seed=1, out=out) is out
    same(out, exact_project(S, rows))


def test_out_adjacent_to_the_data(device):
    """The memory between and around its elements may hold other data, such as other columns of one table."""
    table = torch.zeros((7, 600), device=device)
    for x, out in (
        (table[:, :200], table[:, 200:264]),
        (table[:, :400:2], table[:, 1:129:2]),
        (table[:3, :200], table[3:6, :64]),
    ):
        rows = integers((len(x), 200))
        x.copy_(torch.from_numpy(rows))
        same(S.project(x, out=out), exact_project(S, rows))
        same(x, rows)


def test_autograd_tracks_writes_to_out(device):
    weight = torch.ones((5, 64), device=device, requires_grad=True)
    out = torch.ones((5, 64), device=device)
    loss = (weight * out).sum()
    S.project(data_of(device, (5, 200))[0], out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --------------------------------------------------------------------------------- kinds of tensors


class Tagged(torch.Tensor):
    """A subclass that only renames tensors."""


def test_parameters_and_subclasses(device):
    x, rows = data_of(device, (5, 200))
    expected = exact_project(S, rows)
    parameter, tagged = torch.nn.Parameter(x), x.as_subclass(Tagged)
    with torch.no_grad():
        for result in (parameter @ S.T, S.project(parameter), (S @ parameter.T).T):
            same(result, expected)
        out = torch.nn.Parameter(poisoned(device, (5, 64)))
        assert S.project(x, out=out) is out
        same(out.data, expected)
    for result in (tagged @ S.T, S.project(tagged), (S @ tagged.T).T, torch.matmul(tagged, S.T)):
        assert type(result) is Tagged  # as from torch's own functions
        same(result.as_subclass(torch.Tensor), expected)
    out = poisoned(device, (5, 64)).as_subclass(Tagged)
    assert S.project(x, out=out) is out
    same(out.as_subclass(torch.Tensor), expected)


def test_negative_views(device):
    z = torch.complex(*(data_of(device, (5, 200), seed=seed)[0] for seed in (0, 1)))
    x, rows = torch.imag(z.conj()), -integers((5, 200), seed=1)
    assert x.is_neg()
    projected = exact_project(S, rows)
    same(x @ S.T, projected)
    same((S @ x.T).T, projected)
    for data in (x, on(device, rows).clone()):
        for out in (torch._neg_view(poisoned(device, (5, 64))), poisoned(device, (5, 64))):
            assert S.project(data, out=out) is out
            same(out.clone(), projected)
            S.project(data, out=out, accumulate=True)
            same(out.clone(), 2 * projected)
            S.project_adjoint(out, out=data)
            same(data.clone(), exact_adjoint(S, 2 * projected))
            data.copy_(on(device, rows))


# --------------------------------------------------------------------------------- lazy imports


def run(code, **environment):
    command, environment = [sys.executable, "-c", code], {**os.environ, **environment}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_arrays_load_neither_torch_nor_triton():
    code = """
import sys, numpy as np, sjlt
np.ones((3, 50), np.float32) @ sjlt.Sketch(50, 40).T
assert not {"torch", "triton"} & set(sys.modules)
"""
    run(code)


@pytest.mark.exhaustive
def test_without_triton():
    """The CPU does not need Triton; for CUDA tensors an error says what to install."""
    code = """
import sys, torch
sys.modules["triton"] = None
import sjlt
assert (torch.ones(3, 50) @ sjlt.Sketch(50, 40).T).shape == (3, 40)
from sjlt.backends import triton_backend
for S in (sjlt.Sketch(50, 40), sjlt.Sketch(50, 40, density=0.1)):
    try:
        triton_backend(S.spec)
    except ImportError as error:
        assert "pip install triton" in str(error), error
        print("refused")
"""
    assert run(code).split() == ["refused"] * 2


@pytest.mark.exhaustive
def test_unrelated_module_named_torch():
    code = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")  # as while another thread imports it
import numpy as np, sjlt
assert (np.ones((3, 50)) @ sjlt.Sketch(50, 40).T).shape == (3, 40)
"""
    run(code)
