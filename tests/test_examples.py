"""The programs of examples/ run and do what they claim."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sjlt

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_least_squares(capsys):
    """LAPACK and sjlt are backward stable at any condition number; the others are not."""
    example = load("least_squares")
    errors = {name: error for name, (_, error) in example.compare(3000, 30, 1e10).items()}
    for name in ("sjlt.linalg.lstsq", "LAPACK gelsd", "LAPACK gelsy"):
        assert errors[name] < 5e-16, name
    assert errors["sjlt.linalg.lstsq"] < 10 * errors["LAPACK gelsy"]
    assert errors["LSQR"] > 1e-12
    assert not errors["normal equations"] < 1e-12
    assert errors["LSQR, sketched preconditioner"] > 1e-15
    example.main(3000, 10)
    shown = capsys.readouterr().out
    assert "condition number 1e+02" in shown
    assert shown.count("backward error") >= 11


def test_gradient_projection(capsys):
    example = load("gradient_projection")
    model, text = example.Transformer(16, layers=1), example.examples_of_text(3)
    gradients = example.per_example_gradients(model, text)
    for i, piece in enumerate(text):  # equal to the result for one text at a time
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(piece[None, :-1])[0], piece[1:]).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name][i], parameter.grad, rtol=1e-4, atol=1e-6)
    flat = torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1)
    S = sjlt.Sketch(flat.shape[1], 256)
    torch.testing.assert_close(S.project_tree(gradients, batched=True), S.project(flat), rtol=1e-5, atol=1e-6)
    example.main(8, 16)
    assert "8 gradients of" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_sharded_gradients():
    command = [sys.executable, str(EXAMPLES / "sharded_gradients.py"), "--examples", "16", "--width", "32"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "process 0 holds 17,888 of its elements" in result.stdout
    assert "the query's original for 16 of 16" in result.stdout


@pytest.mark.exhaustive
def test_low_memory_dropout(capsys, monkeypatch):
    example = load("low_memory_dropout")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    example.main()
    shown = capsys.readouterr().out
    rows = [line.split("│")[1:-1] for line in shown.splitlines() if line.startswith("│")]
    outputs = [[float(value) for value in row[1:]] for row in rows if row[0].strip().startswith("output")]
    assert len(outputs) == 4
    assert outputs[0] == outputs[1] == outputs[2] != outputs[3]  # stored mask, seeded mask twice, another seed
    memory = [float(row[2].split()[0]) for row in rows if "dropout" in row[0].lower() and "output" not in row[0]]
    masks = example.LAYERS * 256 * 128 * 4 / 2**20  # torch on a CPU stores masks in the data's dtype
    assert memory[0] - memory[1] == pytest.approx(masks, abs=0.1)
    assert memory[2] > memory[3]

    x = torch.randn(20, 16)
    gradients = []
    for checkpointed in (False, True):
        layers = example.make(16, seeded=True)
        for _ in range(2):
            example.train_step(layers, x, checkpointed)
        gradients.append([weight.grad for weight in layers.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)
