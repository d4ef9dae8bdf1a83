"""Versions of torch without its private names: fallbacks give the same results, or an error says what is missing.

Each case runs in a separate process in which some names are hidden while `sjlt.torch_ops.compat` is imported.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.cases import exhaustive_except

import sjlt
from sjlt.torch_ops import compat

SOURCE = Path(compat.__file__).read_text()
NAMES = sorted(set(re.findall(r'_(?:find|required)\(\s*f?"([\w.]+)"', SOURCE)) | {compat._GRAPH_TASK})
REQUIRED = sorted(set(re.findall(r'_required\(\s*"([\w.]+)"', SOURCE)))
OPTIONAL = [name for name in NAMES if name not in REQUIRED]

WITHOUT = """
import operator, sys, torch

attrgetter, hidden = operator.attrgetter, sys.argv[1:]

def without_hidden(name):
    if name in hidden:
        raise AttributeError(name)
    return attrgetter(name)

operator.attrgetter = without_hidden
import sjlt.torch_ops.compat
operator.attrgetter = attrgetter
"""


def run(code, *names):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code, *names], capture_output=True, text=True, timeout=300, env=os.environ
    )


def test_every_private_name_is_in_compat():
    """torch._C, forward_ad._current_level and the like are used nowhere else in the package."""
    private = re.compile(r"\b(torch|forward_ad|function)((\.\w+)*\._(?!_)\w+)")
    for path in Path(sjlt.__file__).parent.rglob("*.py"):
        if path.name == "compat.py":
            continue
        tree = ast.parse(path.read_text())
        attributes = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                attributes += [f"{node.module}.{alias.name}" for alias in node.names]
        assert not [name for name in attributes if private.fullmatch(name)], path


def test_private_names_are_found_in_the_source():
    assert {"_C._AutoDispatchBelowAutograd", "autograd.function._SingleLevelFunction"} <= set(REQUIRED)
    assert {"_VF._unpack_dual", "_C._current_graph_task_id", "_C._is_any_autocast_enabled"} <= set(OPTIONAL)


@pytest.mark.parametrize("name", exhaustive_except(list(REQUIRED)[:1], REQUIRED))
def test_required_names(name):
    result = run("", name)
    assert result.returncode != 0
    assert f"ImportError: torch {torch.__version__} has no torch.{name}, which sjlt needs for" in result.stderr


WORKS = """
import math, warnings
import sjlt
from torch.func import grad, jvp, vmap
warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script, by torch

S = sjlt.Sketch(50, 20, nnz=4, seed=3)
matrix = torch.from_numpy(S.toarray())
x = torch.arange(150, dtype=torch.float64).reshape(3, 50)
expected = x @ matrix.T
assert torch.equal(x @ S.T, expected)
leaf = x.clone().requires_grad_()
(leaf @ S.T).sum().backward()
assert torch.equal(leaf.grad, matrix.sum(0).expand(3, 50))
assert torch.equal(vmap(lambda row: row @ S.T)(x), expected)
assert torch.equal(jvp(lambda x: x @ S.T, (x,), (x,))[1], expected)
assert torch.equal(vmap(grad(lambda row: (row @ S.T).sum()))(x), matrix.sum(0).expand(3, 50))
with torch.autograd.forward_ad.dual_level():
    dual = torch.autograd.forward_ad.make_dual(x, x)
    assert torch.equal(torch.autograd.forward_ad.unpack_dual(dual @ S.T).tangent, expected)
with torch.autocast("cpu", torch.bfloat16):
    assert (x.float() @ S.T).dtype == torch.bfloat16
    assert (x @ S.T).dtype == torch.float64
out = torch.zeros(3, 20, dtype=torch.float64)
assert torch.equal(S.project(x, out=out), expected)

dropped = sjlt.dropout(x, 0.5, 1)
assert torch.equal(sjlt.dropout(x.clone(), 0.5, 1, inplace=True), dropped)
leaf = x.clone().requires_grad_()
in_place = sjlt.dropout((leaf * 1)[:2], 0.5, 1, inplace=True)
assert torch.equal(in_place, dropped[:2])
in_place.sum().backward()
assert torch.equal(leaf.grad[:2], sjlt.dropout(torch.ones(2, 50), 0.5, 1).double())
assert torch.equal(vmap(lambda row: sjlt.dropout(row, 0.5, 1))(x)[0], dropped[0])
print("works")
"""


@pytest.mark.parametrize(
    "names",
    [pytest.param(names, marks=pytest.mark.exhaustive) for names in (OPTIONAL, *([name] for name in OPTIONAL))],
    ids=lambda names: names[0] if len(names) == 1 else "all",
)
def test_optional_names(names):
    result = run(WORKS, *names)
    assert result.stdout == "works\n", result.stderr


@pytest.mark.exhaustive
def test_layers_that_cannot_detect_backward():
    code = """
import sjlt
layer = sjlt.nn.SeededDropout(0.5, seed=1)
assert layer(torch.ones(4), step=1).shape == (4,)
try:
    layer(torch.ones(4))
except RuntimeError as error:
    print(error)
"""
    result = run(code, compat._GRAPH_TASK)
    assert f"torch {torch.__version__} has no torch.{compat._GRAPH_TASK}" in result.stdout, result.stderr
    assert "step=" in result.stdout
