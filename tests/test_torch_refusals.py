"""Invalid tensors are refused before any work, with the values in the message, as arrays are in test_refusals."""

import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch._subclasses import FakeTensorMode

import sjlt
from sjlt import Sketch
from sjlt.torch_ops import checks

S = Sketch(50, 40, nnz=4)
torchs_own_warning = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


def products(make, device="cpu"):
    """Every call that accepts rows of 50 features or of 40 components, which `make` creates."""
    x, y, a, b = make((3, 50)), make((3, 40)), make((50, 3)), make((40, 3))
    yield lambda: x @ S.T
    yield lambda: S @ a
    yield lambda: S.project(x)
    yield lambda: S.project(x, out=torch.zeros((3, 40), device=device))
    yield lambda: sjlt.project(x, 40)
    yield lambda: y @ S
    yield lambda: S.T @ b
    yield lambda: S.project_adjoint(y)


def refused(error, message, *calls):
    for call in calls:
        with pytest.raises(error, match=message):
            call()


# --------------------------------------------------------------------------------- the data


def test_the_quick_check_accepts_the_supported_dtypes_only():
    dtypes = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    dense = {"layout": torch.strided, "is_cuda": False, "is_cpu": True, "is_nested": False}
    assert {t for t in dtypes if checks.is_supported(SimpleNamespace(dtype=t, **dense))} == set(checks.DTYPES)


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.bool, torch.complex64,
     torch.float8_e4m3fn],
    ids=str,
)  # fmt: skip
def test_dtypes(dtype):
    """With or without a GPU, on any device."""
    for place in ("cpu", "meta"):
        calls = products(lambda shape, place=place: torch.zeros(shape, dtype=dtype, device=place))
        refused(TypeError, re.escape(str(dtype)), *calls)


def test_quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is moving it to another package
        calls = list(products(lambda shape: torch.quantize_per_tensor(torch.zeros(shape), 0.1, 0, torch.quint8)))
    refused(TypeError, "quint8", *calls)


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc", "_mkldnn"])
def test_layouts(device, layout):
    if layout == "_mkldnn" and device != "cpu":
        pytest.skip("a layout of the CPU's")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "beta state"

        def make(shape):
            dense = torch.zeros(shape)
            return (dense.to_mkldnn() if layout == "_mkldnn" else dense.to_sparse(layout=getattr(torch, layout))).to(
                device
            )

        if layout == "_mkldnn":
            refused(TypeError, layout, *products(make))
        y = make((3, 40))  # the adjoint has no sparse form
        refused(TypeError, layout, lambda: y @ S, lambda: S.project_adjoint(y), lambda: S.T @ make((40, 3)))
        refused(TypeError, layout, lambda: S.project(torch.zeros((3, 50), device=device), out=make((3, 40))))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested(device, layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "prototype stage"
        x = torch.nested.nested_tensor([torch.zeros(2, 50), torch.zeros(4, 50)], layout=layout, device=device)
    refused(TypeError, r"nested|jagged", lambda: x @ S.T, lambda: S @ x, lambda: S.project(x), lambda: x @ S)


@pytest.mark.parametrize("name", ["mps", "xpu", "xla"])
def test_other_devices(name):
    with FakeTensorMode():
        refused(TypeError, f"device {name}.* CPU and CUDA", *products(lambda shape: torch.zeros(shape, device=name)))


@pytest.mark.parametrize(
    "shape", [(), (0,), (49,), (51,), (1,), (3, 49), (50, 3), (50, 1), (2, 50, 3), (3, 0)], ids=str
)
def test_wrong_widths(device, calls, shape):
    x = torch.zeros(shape, device=device)
    for function, width in ((lambda: x @ S.T, 50), (lambda: S.project(x), 50), (lambda: x @ S, 40)):
        with pytest.raises(ValueError, match=rf"\b{width}\b.*a tensor of shape {re.escape(str(shape))}"):
            function()
    assert not calls


@pytest.mark.parametrize("shape", [(), (49,), (3, 50), (49, 3), (0, 3), (50, 3, 2), (2, 50, 3)], ids=str)
def test_wrong_heights(device, calls, shape):
    a = torch.zeros(shape, device=device)
    for operator, height in ((S, 50), (S.T, 40)):
        with pytest.raises(ValueError, match=rf"\b{height}\b.*a tensor of shape {re.escape(str(shape))}"):
            operator @ a
    assert not calls


def test_scalars(device):
    refused(ValueError, "axis", lambda: sjlt.project(torch.tensor(3.0, device=device), 5))


def test_sparse_results(device):
    refused(ValueError, "dense_output", lambda: S.project(torch.zeros((3, 50), device=device), dense_output=False))


def test_other_functions_of_torch(device):
    x = torch.zeros((3, 50), device=device)
    refused(
        TypeError,
        None,
        lambda: x * S.T,
        lambda: x + S,
        lambda: S * x,
        lambda: torch.add(x, S),
        lambda: torch.mm(x, S.T),
        lambda: torch.matmul(S, S.T),
        lambda: torch.matmul(x, S.T, out=torch.zeros((3, 40), device=device)),
    )


# --------------------------------------------------------------------------------- derivatives


def test_gradients_are_not_cut_silently(device, calls):
    """out= has no derivative, of the data or of its previous value. (The rest has one: test_torch_derivatives.)"""
    x, y = (torch.zeros((5, width), device=device, requires_grad=True) for width in (50, 40))
    for which, product in (
        ("the data", lambda: S.project(x * 2, out=y.detach())),
        ("the data", lambda: S.project(x[0], out=y.detach()[0], accumulate=True)),
        ("the data", lambda: S.project_adjoint(y, out=x.detach())),
        ("the data", lambda: sjlt.project(x, 40, out=y)),
        ("out", lambda: S.project(x.detach(), out=y)),
        ("out", lambda: S.project(x.detach(), out=y * 1, accumulate=True)),
        ("out", lambda: S.project_adjoint(y.detach(), out=x)),
    ):
        refused(RuntimeError, f"out= does not support automatic differentiation, but {which} requires grad", product)
    assert not calls


def test_tensors_without_gradients(device):
    x, y = (torch.ones((5, width), device=device, requires_grad=True) for width in (50, 40))
    expected = x.detach() @ S.T
    assert expected.any()
    with torch.no_grad():
        assert torch.equal(x @ S.T, expected)
        assert torch.equal(S.project(x, out=y), expected)
    with torch.inference_mode():
        result = S.project(x)
        assert torch.equal(S.project(x, out=result), expected)
    assert torch.equal(S.project(x.detach(), out=result.clone()), expected)
    assert (result @ S).shape == (5, 50)


@torchs_own_warning
def test_forward_derivatives_are_not_cut_silently(device, calls):
    x, y = torch.zeros((5, 50), device=device), torch.zeros((5, 40), device=device)
    with torch.autograd.forward_ad.dual_level():
        dual_x, dual_y = (torch.autograd.forward_ad.make_dual(t, torch.ones_like(t)) for t in (x, y))
        refused(
            RuntimeError,
            "out= does not support automatic differentiation",
            lambda: S.project(dual_x, out=y),
            lambda: S.project(x, out=dual_y, accumulate=True),
            lambda: S.project_adjoint(dual_y, out=x),
        )
    assert not calls


@torchs_own_warning
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.vmap])
def test_out_in_functions_transformed_by_torch(device, calls, transform):
    """They pass tensors without memory: no address may be used, and no derivative may be lost."""
    x, out = torch.ones((3, 4, 50), device=device), torch.zeros((3, 4, 40), device=device)
    refused(
        RuntimeError,
        "Batching rule not" if transform is torch.func.vmap else "out= does not support automatic differentiation",
        lambda: transform(lambda rows: S.project(rows, out=out[0] if rows.ndim == 2 else out).sum())(x),
    )
    assert not calls
    assert not out.any()


# --------------------------------------------------------------------------------- out


def both(device):
    """(call with out, shape of its result) for projecting and for the adjoint."""
    x, y = torch.zeros((7, 50), device=device), torch.zeros((7, 40), device=device)
    yield lambda out, **options: S.project(x, out=out, **options), (7, 40)
    yield lambda out, **options: S.project_adjoint(y, out=out, **options), (7, 50)


def test_out_with_wrong_shape(device, calls):
    for call, (n, width) in both(device):
        for shape in ((n, width + 1), (n - 1, width), (width, n), (n * width,), (1, n, width), (n, 1), (0, width), ()):
            with pytest.raises(ValueError, match="shape") as refusal:
                call(torch.zeros(shape, device=device))
            assert str((n, width)) in str(refusal.value)
            assert str(shape) in str(refusal.value)
    assert not calls


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e5m2], ids=str)
def test_out_with_wrong_dtype(device, calls, dtype):
    for call, shape in both(device):
        refused(
            TypeError, str(dtype), lambda call=call, shape=shape: call(torch.zeros(shape, dtype=dtype, device=device))
        )
    assert not calls


def test_out_that_is_not_a_tensor(device, calls):
    for call, (n, width) in both(device):
        for out in ([[0.0] * width] * n, np.zeros((n, width), np.float32), sp.csr_array((n, width)), "out", 3):
            refused(TypeError, f"torch tensor.*{type(out).__name__}", lambda call=call, out=out: call(out))
    with pytest.raises(TypeError, match="numpy array"):
        S.project(np.zeros((7, 50)), out=torch.zeros((7, 40), device=device))
    assert not calls


def test_out_on_another_device(device, calls):
    for other in {"cpu", "meta"} - {device}:
        for call, shape in both(device):
            with pytest.raises(ValueError, match=rf"{device}.*{other}"):
                call(torch.zeros(shape, device=other))
    assert not calls


def test_accumulate_requires_out(device, calls):
    for call, shape in both(device):
        with pytest.raises(ValueError, match=re.escape(str(shape))):
            call(None, accumulate=True)
        for dtype in (torch.float16, torch.bfloat16):
            with pytest.raises(TypeError, match=f"float32, float64 .*{dtype}"):
                call(torch.zeros(shape, dtype=dtype, device=device), accumulate=True)
    assert not calls


def test_out_overlapping_itself(device, calls):
    for call, (n, width) in both(device):
        for out in (
            torch.zeros((1, width), device=device).expand(n, width),
            torch.zeros((n, 1), device=device).expand(n, width),
            torch.zeros(n + width, device=device).unfold(0, width, 1)[:n],
            torch.zeros(n * width, device=device).as_strided((n, width), (width - 1, 1)),
        ):
            with pytest.raises(ValueError, match=rf"share memory.*{re.escape(str(out.stride()))}"):
                call(out)
    assert not calls


def test_out_overlapping_the_data(device, calls):
    table = torch.zeros((20, 200), device=device)
    for call, width, result in ((S.project, 50, 40), (S.project_adjoint, 40, 50)):
        for x, out in (
            (table[:, :width], table[:, :result]),
            (table[:, :width], table[:, width - 1 : width - 1 + result]),
            (table[:10, :width], table[9:19, :result]),
            (table[:, : 2 * width : 2], table[:, : 3 * result : 3]),
        ):
            with pytest.raises(ValueError, match="shares memory"):
                call(x, out=out)
    square = Sketch(50, 50)
    x = table[:, :50]
    refused(
        ValueError, "shares memory", lambda: square.project(x, out=x), lambda: square.project(x, out=x, accumulate=True)
    )
    assert not calls


def test_freed_storage(device):
    """As for torch.matmul; an address cached from an earlier call must not be used."""

    def make(shape):
        x = torch.zeros(shape, device=device)
        x.untyped_storage().resize_(0)
        return x

    refused(RuntimeError, r"the data has \d+ elements, but no memory", *products(make, device))
    whole, gone = torch.zeros((7, 50), device=device), make((7, 40))
    refused(RuntimeError, r"out has 280 elements, but no memory", lambda: S.project(whole, out=gone))
    refused(RuntimeError, r"the data has 280 elements", lambda: S.project_adjoint(gone, out=whole))


def test_refused_calls_do_not_modify_out(device):
    out = torch.full((7, 40), 7.0, device=device)
    for x in (torch.zeros((7, 51)), torch.zeros((7, 50), dtype=torch.int32), torch.zeros((6, 50))):
        with pytest.raises((TypeError, ValueError)):
            S.project(x.to(device), out=out)
    assert (out == 7).all()
