"""Costs of a call in compiled code besides the product: guards, and the way to the backend."""

import pytest
import torch
import torch._functorch.config as functorch_config
from helpers.products import normal
from torch import _inductor as inductor
from torch._inductor import ir, lowering
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sjlt import Sketch
from sjlt.torch_ops import compat
from sjlt.torch_ops import projection as ops

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # raised by torch
S = Sketch(50, 20, nnz=3, seed=2**64 - 3)


@pytest.fixture(autouse=True)
def _compile_anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


GUARDED = {  # without the names that torch's own dispatch of S @ A adds
    "project": (lambda x, S: S.project(x), 50),
    "project_adjoint": (lambda x, S: S.project_adjoint(x), 20),
    "S @ A": (lambda x, S: S._multiply(x.t()), 50),
    "S.T @ B": (lambda x, S: S.T._multiply(x.t()), 20),
}


@pytest.mark.parametrize("name", GUARDED)
def test_few_guards_per_call(device, name):
    """Compiled code looks up few names of the package in each call, and no module under two names."""
    function, width = GUARDED[name]
    guards = []

    def keep_all(entries):
        guards.extend(entries)
        return [True] * len(entries)

    faster = torch.compile(function, fullgraph=True, backend="eager", options={"guard_filter_fn": keep_all})
    x = normal(device, 3, width)
    assert torch.equal(faster(x, S), function(x, S))
    names = {guard.name for guard in guards if guard.is_global}
    assert 0 < len(names) <= 20, sorted(names)
    assert "DUPLICATE_INPUT" not in {guard.guard_type for guard in guards}


# --------------------------------------------------------------------------------- the operators in compiled code


def compiled_by_inductor(function, *arguments, **options):
    """The compiled function, and the source of the code that calls the kernels."""
    with inductor.config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        faster = torch.compile(function, fullgraph=True, **options)
        _, code = run_and_get_code(faster, *arguments)
    return faster, "\n".join(code)


def round_trip(x, S):
    """Both operators, of rows and of columns, with strides that must be kept."""
    y = S.project(x.t().contiguous().t() + 1)
    return S._multiply(S.project_adjoint(y).t().relu()), y


def test_inductor_calls_the_backend_directly(device):
    function = round_trip
    faster, code = compiled_by_inductor(function, normal(device, 6, 50), S, dynamic=True)
    assert code.count("torch.ops.sjlt.project.default.direct(") == 2
    assert code.count("torch.ops.sjlt.project_adjoint.default.direct(") == 1
    for n, seed in ((3, 5), (8, 2**63 + 5), (5, -3)):
        x, sketch = normal(device, n, 50).requires_grad_(), Sketch(50, 20, seed=seed)
        results = []
        for f in (function, faster):
            (gradient,) = torch.autograd.grad(sum(y.square().sum() for y in f(x, sketch)), x)
            results.append((*f(x, sketch), gradient))
        for expected, result in zip(*results, strict=True):
            assert result.stride() == expected.stride()
            torch.testing.assert_close(result, expected)


def test_versions_without_the_private_names_call_the_operator(device, monkeypatch):
    for op in (ops.project, ops.project_adjoint):
        monkeypatch.delitem(lowering.lowerings, op, raising=False)
    monkeypatch.setattr(ops, "_called_directly", set())
    for module, name in ((lowering, "make_fallback"), (ir, "FallbackKernel"), (lowering, "tag_to_layout_constraint")):
        with monkeypatch.context() as patch:
            patch.delattr(module, name)
            assert not compat.call_directly_in_compiled_code(ops.project)
    monkeypatch.setattr(compat, "call_directly_in_compiled_code", lambda op: False)
    function, x = round_trip, normal(device, 6, 50)
    faster, code = compiled_by_inductor(function, x, S)
    assert "torch.ops.sjlt.project.default(" in code
    assert ".direct(" not in code
    torch.testing.assert_close(faster(x, S), function(x, S))


@pytest.mark.exhaustive
def test_cpp_wrappers_call_the_operator(device):
    function, x = round_trip, normal(device, 6, 50)
    faster, code = compiled_by_inductor(function, x, S, options={"cpp_wrapper": True})
    assert ".direct" not in code
    torch.testing.assert_close(faster(x, S), function(x, S))


def test_modes_see_direct_calls(device):
    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    x, arguments = normal(device, 3, 50), (*S.spec, -1, None)
    seen = []
    with Recorded():
        result = ops.project.direct(x, *arguments)
    assert ops.project in seen
    assert torch.equal(result, S.project(x))
    assert torch.equal(ops.project.direct(x, *arguments), result)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = ops.project.direct(mode.from_tensor(x), *arguments)
    assert type(fake) is FakeTensor
    assert fake.shape == (3, 20)
