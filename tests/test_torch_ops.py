"""The operators as torch sees them: opcheck, one operator per product, and tensors without memory."""

import itertools

import pytest
import torch
from helpers.cases import each_value
from helpers.products import DTYPES, each_product, normal, product_of, whole
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from sjlt import Sketch
from sjlt.torch_ops import projection as ops

S = Sketch(50, 20, nnz=4, seed=2**64 - 3)  # its entries are dyadic: small integers give exact results
IRREGULAR = Sketch(40, 11, nnz=3, seed=5)[:, 7:30]
INDEPENDENT = Sketch(40, 11, density=0.3, seed=5)[:, 7:30]


# --------------------------------------------------------------------------------- opcheck

# (shaper of tensors whose last axis, or first if axis is 0, has the requested length; axis; dtype of the result)
SAMPLES = {
    "rows": (lambda t, w: t(5, w), -1, None),
    "one row": (lambda t, w: t(1, w), -1, None),
    "no rows": (lambda t, w: t(0, w), -1, None),
    "vector": (lambda t, w: t(w), -1, None),
    "columns": (lambda t, w: t(w, 5).t(), -1, None),
    "part of columns": (lambda t, w: t(9, 2 * w + 3)[::2, 3::2], -1, None),
    "expanded": (lambda t, w: t(1, w).expand(5, w), -1, None),
    "leading axes": (lambda t, w: t(2, 3, w), -1, None),
    "leading axes transposed": (lambda t, w: t(3, 2, w).transpose(0, 1), -1, None),
    "vectors in the middle": (lambda t, w: t(3, w, 2).transpose(1, 2), -1, None),
    "from the left": (lambda t, w: t(w, 5), 0, None),
    "from the left, transposed": (lambda t, w: t(5, w).t(), 0, None),
    "from the left, a vector": (lambda t, w: t(w), 0, None),
    "wider result": (lambda t, w: t(5, w), -1, torch.float64),
    "wider result from the left": (lambda t, w: t(w, 5), 0, torch.float64),
    "narrower result": (lambda t, w: t(2, 5, w), -1, torch.bfloat16),
}


@each_value(sample=list(SAMPLES), requires_grad=[False, True])
def test_opcheck(device, sample, requires_grad):
    view, axis, dtype = SAMPLES[sample]
    for op, width in ((ops.project, 50), (ops.project_adjoint, 20)):
        x = view(lambda *shape: normal(device, *shape), width).requires_grad_(requires_grad)
        torch.library.opcheck(op, (x, *S.spec, axis, dtype))


@each_value(dtype=DTYPES, law=["exact", pytest.param("independent", marks=pytest.mark.exhaustive)])
def test_opcheck_dtypes(device, dtype, law):
    sketch = IRREGULAR if law == "exact" else INDEPENDENT
    for op, width in ((ops.project, 23), (ops.project_adjoint, 11)):
        x = normal(device, 3, width, dtype=dtype, requires_grad=True)
        torch.library.opcheck(op, (x, *sketch.spec, -1, None), rtol=1e-2, atol=1e-2)


@each_value(accumulate=[False, True], x_in=["rows", "vector", "part of columns", "leading axes transposed"])
def test_opcheck_out(device, x_in, accumulate):
    view = SAMPLES[x_in][0]
    for op, width, result in ((ops.project_into, 50, 20), (ops.project_adjoint_into, 20, 50)):
        x = view(lambda *shape: normal(device, *shape), width)
        for out in (
            normal(device, *x.shape[:-1], result, dtype=torch.float64),
            normal(device, result, *x.shape[:-1]).movedim(0, -1),
        ):
            torch.library.opcheck(op, (x, out, *S.spec, accumulate))


def test_one_operator_per_product(device):
    """A product is one operator, and so is its derivative, without copies, padding or casts."""
    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x, y = normal(device, 3, 50, requires_grad=True), normal(device, 3, 20, requires_grad=True)
    with Record():
        for product, gradient in (
            (lambda: x @ S.T, "project_adjoint"),
            (lambda: S @ x.t(), "project_adjoint"),
            (lambda: y @ S, "project"),
            (lambda: S.T @ y.t(), "project"),
        ):
            result = product()
            weights = torch.ones_like(result)
            seen.clear()
            torch.autograd.grad(result, (x if gradient == "project_adjoint" else y,), weights)
            assert [name for name in seen if "aten.t" not in name and "detach" not in name] == [
                f"sjlt.{gradient}.default"
            ]
            seen.clear()
            product()
            assert len([name for name in seen if "sjlt" in name]) == 1
            assert all("sjlt" in name or name in ("aten.t.default", "aten.detach.default") for name in seen)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # raised by torch
def test_profilers_see_the_operators(device):
    x, y = normal(device, 3, 50), normal(device, 3, 20)
    x @ S.T  # load lazily loaded parts before profiling
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        x @ S.T, S @ x.t(), y @ S
    names = {event.key for event in seen.key_averages()}
    assert {"sjlt::project", "sjlt::project_adjoint"} <= names


@each_product
def test_zero_tensors(device, name):
    """torch represents some zero tensors without memory."""
    product, shape = product_of(name, S)
    zeros = torch._efficientzerotensor(shape, device=device)
    assert zeros._is_zerotensor()
    expected = product(torch.zeros(shape, device=device))
    assert torch.equal(product(zeros).clone(), expected)


def test_zero_tensors_with_out(device):
    out = normal(device, 3, 20)
    before = out.clone()
    zeros = torch._efficientzerotensor((3, 50), device=device)
    assert torch.equal(S.project(zeros, out=out, accumulate=True), before)
    assert not S.project(zeros, out=out).any()


# --------------------------------------------------------------------------------- tensors without memory


@each_product
def test_meta_and_fake_tensors(device, name):
    """On the meta device and as a compiler's fakes: shape, strides, dtype and gradients as for real tensors."""
    product, shape = product_of(name, S)
    for view, dtype in itertools.product((lambda x: x, lambda x: x.mT.contiguous().mT if x.ndim > 1 else x), DTYPES):
        x = view(whole(device, *shape, dtype=dtype)).detach().requires_grad_()
        real = product(x)
        without = product(view(torch.empty(shape, device="meta", dtype=dtype)).detach().requires_grad_())
        with FakeTensorMode():
            fake = product(view(torch.empty(shape, device=device, dtype=dtype)))
        for result in (without, fake):
            assert (result.shape, result.dtype, result.stride()) == (real.shape, real.dtype, real.stride())
        assert without.device.type == "meta"
        assert fake.device.type == device
        assert without.requires_grad


def test_fakes_of_a_missing_device():
    with FakeTensorMode():
        for product in (lambda x: x @ S.T, lambda x: S @ x.t(), lambda x: S.project(x)):
            assert product(torch.empty(3, 50, device="cuda")).device.type == "cuda"


def test_out_without_memory(device):
    out = torch.empty(3, 20, device="meta")
    assert S.project(torch.empty(3, 50, device="meta"), out=out, accumulate=True) is out
    with FakeTensorMode():
        out = torch.empty(3, 50, device=device)
        assert S.project_adjoint(torch.empty(3, 20, device=device), out=out) is out
