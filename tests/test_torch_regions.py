"""Autocast and deterministic-algorithm regions."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from helpers.cases import each_value
from helpers.products import DTYPES, PRODUCTS, each_product, normal, numbers, product_of, whole
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, jvp, vmap

from sjlt import Sketch

S = Sketch(50, 20, nnz=3, seed=2**64 - 3)
REGIONS = [torch.bfloat16, torch.float16]
each_region = pytest.mark.parametrize("region", REGIONS, ids=str)


# --------------------------------------------------------------------------------- autocast


@each_value(name=list(PRODUCTS), region=REGIONS)
def test_autocast(device, name, region):
    """As for torch.matmul: everything but fp64 is cast to the region's dtype, and so are results; gradients are not."""
    product, shape = product_of(name, S)
    make = normal if device == "cpu" else whole  # sums may run in another order for other strides
    for dtype in DTYPES:
        x = make(device, *shape, dtype=dtype, requires_grad=True)
        inside = dtype if dtype == torch.float64 else region
        with torch.autocast(device, region):
            y = product(x)
            one = torch.ones(1, 1, device=device, dtype=dtype)
            assert y.dtype == inside == (one @ one).dtype
        cast = x.detach().to(inside).requires_grad_()
        expected = product(cast)
        assert torch.equal(y, expected)
        weights = make(device, *y.shape, dtype=inside, seed=1)
        y.backward(weights)
        expected.backward(weights)
        assert x.grad.dtype == dtype
        assert torch.equal(x.grad, cast.grad.to(dtype))


@each_region
def test_trees_under_autocast(device, region, calls):
    """Trees have a guaranteed dtype and are never copied, regardless of the region."""
    for tree in ([normal(device, 30), normal(device, 4, 5)], [normal(device, 50, dtype=torch.bfloat16)]):
        expected = S.project_tree(tree)
        calls.clear()
        with torch.autocast(device, region):
            result = S.project_tree(tree)
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)
        assert {x.data_ptr() for x, _ in calls} == {x.data_ptr() for x in tree}


@each_region
def test_layers_under_autocast(device, region):
    """No casts between torch layers, and fp32 parameters get fp32 gradients."""
    linear = torch.nn.Linear(50, 50, device=device)
    x = normal(device, 4, 50)
    with torch.autocast(device, region):
        hidden = linear(x)
        y = torch.nn.functional.linear(hidden @ S.T, torch.ones(7, 20, device=device))
        assert hidden.dtype == (hidden @ S.T).dtype == y.dtype == region
        loss = (y.float() - 1).square().mean()
    loss.backward()
    assert linear.weight.grad.dtype == torch.float32
    assert linear.weight.grad.isfinite().all()
    assert linear.weight.grad.any()


def test_disabled_regions(device):
    x = normal(device, 4, 50)
    expected = x @ S.T
    with torch.autocast(device, torch.bfloat16, enabled=False):
        assert torch.equal(x @ S.T, expected)
    with torch.autocast(device, torch.bfloat16):
        with torch.autocast(device, enabled=False):
            assert torch.equal(x @ S.T, expected)
        assert (x @ S.T).dtype == torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no such device
        with torch.autocast("cuda" if device == "cpu" else "cpu", torch.bfloat16):
            assert torch.equal(x @ S.T, expected)
    assert torch.equal(x @ S.T, expected)


@each_region
def test_out_under_autocast(device, region):
    """out= determines the dtype, and nothing is cast."""
    x = normal(device, 4, 50)
    expected = x @ S.T
    out = torch.zeros(4, 20, device=device)
    with torch.autocast(device, region):
        assert S.project(x, out=out) is out
        assert torch.equal(out, expected)
        S.project(x, out=out, accumulate=True)
    assert torch.equal(out, 2 * expected)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@each_region
def test_transformed_and_compiled_functions_under_autocast(device, region):
    x = normal(device, 4, 50)

    def square(x):
        return (x @ S.T).float().square().sum()

    def inside(function):
        def run(x):
            with torch.autocast(device, region):
                return function(x)

        return run

    with torch.autocast(device, region):
        expected = x @ S.T
        slope = torch.autograd.grad(square(leaf := x.clone().requires_grad_()), leaf)[0]
    for result, exact in (
        (inside(vmap(lambda x: x @ S.T))(x), expected),
        (vmap(inside(lambda x: x @ S.T))(x), expected),
        (inside(grad(square))(x), slope),
        (inside(vmap(grad(square)))(x), slope),
        (inside(lambda x: jvp(lambda x: x @ S.T, (x,), (x,))[1])(x), expected),
    ):
        assert result.dtype == exact.dtype
        assert torch.equal(result, exact)
    for function in (inside(lambda x: x @ S.T), lambda x: x @ S.T):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        faster = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
        with torch.autocast(device, region):
            assert torch.equal(faster(x), expected)
            assert torch.equal(faster(x[:3]), expected[:3])
        assert counter.frame_count == 1
    torch._dynamo.reset()


# --------------------------------------------------------------------------------- deterministic algorithms


@pytest.fixture
def deterministic():
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@each_product
def test_deterministic_algorithms(device, name, request):
    product, shape = product_of(name, S)
    x = normal(device, *shape, requires_grad=True)

    def everything():
        y = product(x)
        return y.detach(), torch.autograd.grad(y.square().sum(), x)[0]

    before = everything()
    request.getfixturevalue("deterministic")
    for fill in (True, False):  # torch fills new memory with NaN first
        torch.utils.deterministic.fill_uninitialized_memory = fill
        assert all(torch.equal(a, b) for a, b in zip(everything(), before, strict=True))


def test_out_with_deterministic_algorithms(device, deterministic):
    x = whole(device, 4, 50)
    out = torch.zeros(4, 20, device=device)
    S.project(x, out=out, accumulate=True)
    np.testing.assert_array_equal(numbers(out), numbers((x @ S.T).float()))


def test_default_dtypes_and_devices(device):
    """The data decides, not torch's default dtype or device."""
    x = normal(device, 4, 50)
    expected = x @ S.T
    before = torch.get_default_dtype()
    try:
        for dtype, place in itertools.product((torch.float64, torch.bfloat16), ("meta", None)):
            torch.set_default_dtype(dtype)
            torch.set_default_device(place)
            assert torch.equal(x @ S.T, expected)
            assert (expected @ S).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
