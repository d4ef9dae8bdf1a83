"""The products of a sketch and its transpose in every form, and tensors for them."""

import numpy as np
import pytest
import torch

from helpers.cases import exhaustive_except
from helpers.data import integers

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

# (product, shape of its operand for a sketch of d features and k components)
PRODUCTS = {
    "X @ S.T": (lambda S, x: x @ S.T, lambda d, k: (3, d)),
    "x @ S.T": (lambda S, x: x @ S.T, lambda d, k: (d,)),
    "batches @ S.T": (lambda S, x: x @ S.T, lambda d, k: (2, 2, d)),
    "project": (lambda S, x: S.project(x), lambda d, k: (1, 3, d)),
    "S @ A": (lambda S, a: S @ a, lambda d, k: (d, 3)),
    "S @ a": (lambda S, a: S @ a, lambda d, k: (d,)),
    "Y @ S": (lambda S, y: y @ S, lambda d, k: (3, k)),
    "y @ S": (lambda S, y: y @ S, lambda d, k: (k,)),
    "project_adjoint": (lambda S, y: S.project_adjoint(y), lambda d, k: (2, 2, k)),
    "S.T @ B": (lambda S, b: S.T @ b, lambda d, k: (k, 3)),
    "S.T @ b": (lambda S, b: S.T @ b, lambda d, k: (k,)),
    "slices": (lambda S, x: x[:, :9] @ S[:, :9].T + x[:, 9:] @ S[:, 9:].T, lambda d, k: (3, d)),
    "there and back": (lambda S, x: x @ S.T @ S, lambda d, k: (3, d)),
}
# One for each way to call the operators.
WAYS = ["X @ S.T", "x @ S.T", "batches @ S.T", "S @ A", "Y @ S", "S.T @ b", "slices", "there and back"]
each_product = pytest.mark.parametrize("name", exhaustive_except(WAYS, PRODUCTS))


def product_of(name, sketch):
    function, shape = PRODUCTS[name]
    return (lambda x: function(sketch, x)), shape(sketch.n_features, sketch.n_components)


def normal(device, *shape, dtype=torch.float32, requires_grad=False, seed=0):
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=shape))
    return x.to(device, dtype).requires_grad_(requires_grad)


def whole(device, *shape, dtype=torch.float64, requires_grad=False, seed=0):
    """Small integers: if the sketch's entries are dyadic, results are exact."""
    return torch.from_numpy(integers(shape, "float64", seed)).to(device, dtype).requires_grad_(requires_grad)


def matrix(device, sketch, dtype=torch.float64):
    return torch.from_numpy(sketch.toarray()).to(device, dtype)


def numbers(x):
    return x.detach().cpu().double().numpy()
