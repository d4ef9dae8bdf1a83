"""The examples run, and do what they say."""

import importlib.util
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_least_squares(capsys):
    example = load("least_squares")
    rng = np.random.default_rng(1)
    A = rng.standard_normal((3000, 20)) * np.geomspace(1, 1e-6, 20)
    b = rng.standard_normal(3000)
    x, steps = example.solve(A, b)
    best = np.linalg.lstsq(A, b, rcond=None)[0]
    assert np.linalg.norm(A @ x - b) <= (1 + 1e-12) * np.linalg.norm(A @ best - b)
    # A R^-1 has a condition number below 4 (embedding distortion sqrt(20/80) = 1/2: at most 3), and LSQR gains its
    # square root's logarithm a step: 14 digits take fewer than 60 steps, where A itself would take thousands.
    assert steps < 60
    example.main(2000, 10)
    assert "condition number 1e+06" in capsys.readouterr().out
