"""``sjlt info``: its output for projected files, and its refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import run as run

import sjlt

N, D, K = 50, 30, 16

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in an empty directory with one valid source."""
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.ones((N, D), np.float32))


@pytest.mark.parametrize("name", ["y.npy", "y.npy.json"])
def test_info(run: Run, name: str) -> None:
    run("project", "x.npy", "y.npy", "-k", K, "--seed", 9)
    result = run("info", name)
    assert result.code == 0
    assert f"{N} x {K} float32" in result.out
    assert repr(sjlt.Sketch(D, K, seed=9)) in result.out
    assert f"{N} x {D} float32, C order, 6.1 kB" in result.out
    assert f"sjlt {sjlt.__version__}" in result.out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "a.json: No such file or directory"),
        ("{", "a.json: not JSON: "),
        ("[]", "a.json: not a description"),
        ("{}", "a.json: not a description of a projected file: the description has no 'sjlt'"),
        ('{"source": 1, "result": 2}', "a.json: not a description"),
        ("\udcff", "a.json: not JSON"),
        ("dtype", "a.json: not a description of a projected file: source.dtype is 'f4(', not the name of a dtype"),
    ],
)
def test_info_of_other_files(run: Run, content: str | None, message: str) -> None:
    if content == "dtype":
        run("project", "x.npy", "y.npy", "-k", K)
        content = Path("y.npy.json").read_text().replace('"float32"', '"f4("')
    if content is not None:
        Path("a.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    result = run("info", "a.json")
    assert result.code == 2
    assert result.err.startswith("Error: ")
    assert message in result.err
    assert result.err.count("\n") == 1


def test_info_of_another_law(run: Run) -> None:
    run("project", "x.npy", "y.npy", "-k", K)
    content = json.loads(Path("y.npy.json").read_text())
    content["sketch"]["law"] = 2
    Path("y.npy.json").write_text(json.dumps(content))
    result = run("info", "y.npy")
    assert result.code == 2
    assert "supports sketch law 1, but the description has 2" in result.err
