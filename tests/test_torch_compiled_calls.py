"""What a call costs in compiled code besides the product: guards, and the way to the backend."""

import pytest
import torch
from helpers.products import normal

from sjlt import Sketch

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
