"""Derivatives of every order and kind, and batching: exact on integer data."""

import itertools
import math
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from helpers.cases import each_value, exhaustive_except
from helpers.data import exact_adjoint, exact_project
from helpers.products import DTYPES, PRODUCTS, each_product, matrix, normal, numbers, product_of, whole
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import sjlt
from sjlt import Sketch
from sjlt.torch_ops import projection as ops

# raised by torch's imports for forward derivatives
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

S = Sketch(50, 20, nnz=4, seed=2**64 - 3)  # its entries are dyadic: small integers give exact results
IRREGULAR = Sketch(40, 11, nnz=3, seed=5)[:, 7:30]
INDEPENDENT = Sketch(40, 11, density=0.3, seed=5)[:, 7:30]


# --------------------------------------------------------------------------------- gradients


@each_value(name=list(PRODUCTS), law=["exact", "independent"])
def test_gradcheck(device, name, law):
    product, shape = product_of(name, IRREGULAR if law == "exact" else INDEPENDENT)
    x = normal(device, *shape, dtype=torch.float64, requires_grad=True)
    every = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(product, x, **every)
    assert torch.autograd.gradgradcheck(lambda x: product(x).sin(), x, check_fwd_over_rev=True, check_rev_over_rev=True)


@each_product
def test_jacobians(device, name):
    """torch.func Jacobians equal the matrix exactly, in forward and reverse mode."""
    product, shape = product_of(name, S)
    x = whole(device, *shape)
    for n in range(math.prod(shape)):  # by definition, from unit vectors
        unit = torch.zeros(math.prod(shape), device=device, dtype=torch.float64)
        unit[n] = 1
        column = product(unit.view(shape)).flatten()
        if n == 0:
            expected = column.new_empty(len(column), math.prod(shape))
        expected[:, n] = column
    for jacobian in (jacrev(product)(x), jacfwd(product)(x), torch.autograd.functional.jacobian(product, x)):
        assert torch.equal(jacobian.reshape(expected.shape), expected)
    result, tangent = jvp(product, (x,), (2 * x,))
    assert torch.equal(result, product(x))
    assert torch.equal(tangent, product(2 * x))
    result, pullback = vjp(product, x)
    assert torch.equal(pullback(result)[0].flatten(), expected.T @ result.flatten())


def test_jacobian_is_the_matrix(device):
    x, M = whole(device, 50), matrix(device, S)
    for jacobian in (jacrev, jacfwd):
        assert torch.equal(jacobian(lambda x: x @ S.T)(x), M)
        assert torch.equal(jacobian(lambda y: S.T @ y)(whole(device, 20)), M.T)
        assert torch.equal(jacobian(lambda x: x[9:] @ S[:, 9:].T)(x)[:, 9:], M[:, 9:])


FUNCTIONS = {
    "quadratic": lambda A, x: A(x).square().sum(),
    "cubic": lambda A, x: A(x).pow(3).sum(),
    "of squares": lambda A, x: (A(x * x) * A(x)).sum(),
    "of a product of two": lambda A, x: A(A(x * x)[0] * x).square().sum(),
    "of its own derivative": lambda A, x: A(grad(lambda x: A(x * x).square().sum())(x)).sum(),
    "of its own tangent": lambda A, x: jvp(lambda x: A(x * x).square().sum(), (x,), (x * x,))[1],
    "in part without gradients": lambda A, x: A(x.detach() * x).pow(3).sum() * detached(A, x).sum(),
}


def detached(A, x):
    with torch.no_grad():
        return A(x * x)


@each_value(function=list(FUNCTIONS), order=[2, 3])
def test_higher_derivatives(device, function, order):
    """Forward and reverse mode nested in any order, compared with the matrix."""
    small = Sketch(6, 5, nnz=4, seed=3)
    x, M = whole(device, 6, seed=4), matrix(device, small)
    for transforms in itertools.product((jacfwd, jacrev), repeat=order):
        derived = []
        for apply in (lambda x: small @ x, lambda x: M @ x):
            derivative = partial(FUNCTIONS[function], apply)
            for transform in transforms:
                derivative = transform(derivative)
            derived.append(derivative(x))
        torch.testing.assert_close(*derived, rtol=1e-13, atol=1e-10)
        assert derived[1].any() or function == "quadratic"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_have_the_dtype_of_the_data(device, dtype):
    for sketch_of, before, after, exact in (
        (lambda x: x @ S.T, 50, 20, exact_adjoint),
        (lambda x: (S @ x.t()).t(), 50, 20, exact_adjoint),
        (lambda y: y @ S, 20, 50, exact_project),
        (lambda y: (S.T @ y.t()).t(), 20, 50, exact_project),
    ):
        x = whole(device, 7, before, dtype=dtype, requires_grad=True)
        weights = whole(device, 7, after, dtype=dtype, seed=1)
        (sketch_of(x) * weights).sum().backward()
        assert x.grad.dtype == dtype
        assert x.grad.device.type == device
        np.testing.assert_array_equal(numbers(x.grad), exact(S, numbers(weights)))


@pytest.mark.parametrize("dtype", exhaustive_except([torch.float32], DTYPES), ids=str)
def test_gradients_of_wider_results(device, dtype):
    """The gradient of a wider result is not narrowed before it is summed."""
    x = whole(device, 3, 50, dtype=dtype, requires_grad=True)
    weights = torch.full((3, 20), 1 + 2.0**-40, device=device, dtype=torch.float64)
    ops.project(x, *S.spec, -1, torch.float64).backward(weights)
    assert x.grad.dtype == dtype
    assert torch.equal(x.grad, (weights @ S).to(dtype))


def test_expanded_gradients(device, calls):
    """`y.sum().backward()` sends a stride-0 gradient, which is read as such and not materialized."""
    x = whole(device, 7, 3, 50, requires_grad=True)
    y = x @ S.T
    calls.clear()
    y.sum().backward()
    assert all(rows.stride() == (0, 0) for rows, _ in calls)
    expected = exact_adjoint(S, np.ones((7, 3, 20)))
    np.testing.assert_array_equal(numbers(x.grad), expected)
    x.grad = None
    (S @ x[:, 0].t()).sum(0).backward(torch.arange(7.0, dtype=torch.float64, device=device))
    np.testing.assert_array_equal(numbers(x.grad[:, 0]), expected[:, 0] * np.arange(7)[:, None])


def test_nothing_is_saved_for_backward(device):
    def never(tensor):
        raise AssertionError(f"saved {tuple(tensor.shape)}")

    x, y = whole(device, 3, 50, requires_grad=True), whole(device, 3, 20, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(never, never):
        results = [x @ S.T, S @ x.t(), S.project(x[0]), y @ S, S.T @ y.t(), sjlt.project(x, 20), x @ S.T @ S]
    for result in results:
        result.sum().backward()


def test_data_is_freed(device):
    x = whole(device, 3, 50, requires_grad=True)
    doubled = 2 * x
    gone = weakref.ref(doubled)
    y = doubled @ S.T
    del doubled
    assert gone() is None
    y.sum().backward()
    np.testing.assert_array_equal(numbers(x.grad), 2 * exact_adjoint(S, np.ones((3, 20))))


def test_repeated_use(device):
    """As for torch's linear functions, gradients add up, and a graph that saved nothing can run again."""
    x = whole(device, 3, 50, requires_grad=True)
    once = exact_adjoint(S, np.ones((3, 20)))
    (x @ S.T + S.project(x)).sum().backward()
    np.testing.assert_array_equal(numbers(x.grad), 2 * once)
    x.grad = None
    y = (x @ S.T).sum()
    y.backward()
    y.backward()
    np.testing.assert_array_equal(numbers(x.grad), 2 * once)
    z = (x @ S.T).square().sum()
    z.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        z.backward()


def test_in_place_modifications(device):
    """Tensors that no derivative needs may be overwritten; others may not, including by out=."""
    x = whole(device, 3, 50, requires_grad=True)
    once = exact_adjoint(S, np.ones((3, 20)))
    data = x * 1
    y = data @ S.T
    data.zero_()
    y.mul_(3)
    y.sum().backward()
    np.testing.assert_array_equal(numbers(x.grad), 3 * once)
    y = (x @ S.T).exp()
    with torch.no_grad():
        S.project(x, out=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    weights = whole(device, 3, 20)
    loss = (weights * (x @ S.T)).sum()
    S.project(x.detach(), out=weights, accumulate=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x.mul_(2)


def test_disabled_gradients(device):
    x = whole(device, 3, 50, requires_grad=True)
    assert (x @ S.T).requires_grad
    assert not (x.detach() @ S.T).requires_grad
    with torch.no_grad():
        assert not (x @ S.T).requires_grad
    with torch.inference_mode():
        assert (x @ S.T).is_inference()
    frozen = torch.autograd.grad((x @ S.T).sum(), x)[0]
    assert not frozen.requires_grad
    assert torch.autograd.grad((x @ S.T).square().sum(), x, create_graph=True)[0].requires_grad


def test_checkpoints_and_hooks(device):
    x = whole(device, 3, 50, requires_grad=True)
    plain = torch.autograd.grad((x @ S.T).square().sum(), x)[0]
    again = checkpoint(lambda x: (x @ S.T).square(), x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.sum(), x)[0], plain)
    y = x @ S.T
    y.register_hook(lambda gradient: 2 * gradient)
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], 2 * plain)


# --------------------------------------------------------------------------------- batches


@each_value(name=list(PRODUCTS), in_dim=[0, 1, -1])
def test_vmap(device, name, in_dim):
    product, shape = product_of(name, S)
    batch = whole(device, 4, *shape)
    expected = torch.stack([product(x) for x in batch])
    for out_dim in (0, -1):
        result = vmap(product, in_dims=in_dim, out_dims=out_dim)(batch.movedim(0, in_dim))
        assert torch.equal(result.movedim(out_dim, 0), expected)


def test_batch_is_one_call(device, calls):
    x, a, y = whole(device, 4, 3, 50), whole(device, 4, 50, 3), whole(device, 4, 20)
    for number, function, batch in (
        (1, lambda x: x @ S.T, x),
        (1, lambda x: S @ x, x[:, 0]),
        (1, lambda y: y @ S, y),
        (1, lambda y: S.T @ y, y),
        (3, lambda a: S @ a, a),  # consecutive row-major matrices: no strides describe all their columns
        (1, vmap(lambda x: x @ S.T), x),
        (1, vmap(lambda x: S @ x), x),
        (1, vmap(lambda a: S @ a, in_dims=1, out_dims=1), a.permute(1, 2, 0).contiguous().permute(2, 0, 1)),
    ):
        calls.clear()
        vmap(function)(batch)
        assert len(calls) == number


def test_batches_of_batches(device):
    x = whole(device, 2, 3, 4, 50)
    expected = S.project(x)
    assert torch.equal(vmap(vmap(vmap(lambda x: x @ S.T)))(x), expected)
    assert torch.equal(vmap(vmap(lambda x: (S @ x.T).T), in_dims=1, out_dims=1)(x), expected)
    assert torch.equal(vmap(vmap(vmap(lambda x: S @ x, in_dims=0), in_dims=1, out_dims=1))(x), expected)
    assert torch.equal(vmap(lambda x: x @ S.T, chunk_size=1)(x), expected)
    assert torch.equal(vmap(lambda x, weight: weight * (x @ S.T), in_dims=(0, None))(x, x.new_ones(20)), expected)
    assert torch.equal(vmap(lambda _: x[0] @ S.T)(torch.arange(2)), expected[:1].expand(2, 3, 4, 20))


def test_per_example_gradients(device):
    """vmap of grad, as for per-example gradients; grad of vmap; and both for a module that ends in a sketch."""
    x, M = whole(device, 6, 50), matrix(device, S)

    def square(x):
        return (x @ S.T).square().sum()

    assert torch.equal(vmap(grad(square))(x), 2 * x @ M.T @ M)
    assert torch.equal(grad(lambda x: vmap(square)(x).sum())(x), 2 * x @ M.T @ M)
    assert torch.equal(vmap(hessian(square))(x), (2 * M.T @ M).expand(6, 50, 50))
    assert torch.equal(vmap(lambda x, t: jvp(square, (x,), (t,))[1])(x, x), 2 * (x @ M.T).square().sum(1))
    linear = torch.nn.Linear(5, 50, device=device, dtype=torch.float64)
    inputs = whole(device, 6, 5)

    def loss(parameters, one):
        return (functional_call(linear, parameters, one) @ S.T).square().sum()

    parameters = dict(linear.named_parameters())
    each = vmap(grad(loss), in_dims=(None, 0))(parameters, inputs)
    for n, one in enumerate(inputs):
        gradients = torch.autograd.grad(loss(parameters, one), linear.parameters())
        for gradient, exact in zip((each["weight"][n], each["bias"][n]), gradients, strict=True):
            torch.testing.assert_close(gradient, exact)
