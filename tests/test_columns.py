"""Products of columns (S A and Sᵀ B) are computed by the kernels without transposing the tensors on every call."""

import torch
from helpers.cases import pairwise
from helpers.data import integers
from helpers.kernels import LAYOUTS, assert_untouched_around, integral_matrix

from sjlt import Sketch
from sjlt.backends import triton_backend
from sjlt.backends.triton import prepared

LAWS = [{"nnz": 4}, {"nnz": 4, "stacks": 2}, {"density": 1.0}]


@pairwise(
    vectors=[(3, torch.float32), (40, torch.float32), (5, torch.float16)],
    law=LAWS,
    layout=["rows", "columns", "inner part", "every second column"],
)
def test_columns(vectors, law, layout, kernels_on):
    """Twice each, as the second call is looked up; results are exact over NaN."""
    n, dtype = vectors
    S = Sketch(70, 64, seed=5, **law)
    scale = S.nnz**-0.5 if S.nnz else (S.n_components * S.density) ** -0.5
    matrix, backend = torch.from_numpy(integral_matrix(S).toarray()), triton_backend(S.spec)
    for function, by in ((backend.project, matrix), (backend.adjoint, matrix.T)):
        for call in range(2):
            a = torch.from_numpy(integers((by.shape[1], n), "float64", seed=call) // 4)

            def new(*shape):
                return torch.full(shape, torch.nan, dtype=dtype, device=kernels_on)

            given, out = LAYOUTS[layout](*a.shape, new).copy_(a), LAYOUTS[layout](len(by), n, new)
            function(S.spec, given, out, False, 0)
            assert torch.equal(out.cpu(), ((by.double() @ a) * scale).to(dtype))
            assert_untouched_around(out)


def test_rows_and_columns_of_square_matrices(kernels_on):
    """The axis is part of what identifies a product: all shapes and strides are equal."""
    S = Sketch(64, 64, nnz=4, seed=5)
    matrix, backend = torch.from_numpy(integral_matrix(S).toarray()) / 2, triton_backend(S.spec)
    x = torch.from_numpy(integers((64, 64), "float64")).to(kernels_on, torch.float32)
    out = torch.empty_like(x)
    for axis in (1, 0, 1, 0):
        backend.project(S.spec, x, out, False, axis)
        expected = x.cpu().double() @ matrix.T if axis else matrix @ x.cpu().double()
        assert torch.equal(out.cpu().double(), expected)


def test_views_are_created_once(monkeypatch):
    """Whoever prepares a product sees rows; later calls receive the tensors themselves."""
    monkeypatch.setattr(prepared, "_prepared", {})
    prepared_for, called_with = [], []

    def prepare(spec, data, out, accumulate):
        prepared_for.append((data.shape, out.shape, data.stride()))
        return lambda spec, data, out: called_with.append((data, out))

    a, out = torch.empty(50, 4), torch.empty(16, 4)
    for _ in range(2):
        prepared.multiply(prepare, Sketch(50, 16).spec, a, out, False, 0)
    assert prepared_for == [((4, 50), (4, 16), (1, 4))]
    assert all(data is a and result is out for data, result in called_with)
    assert len(called_with) == 2
