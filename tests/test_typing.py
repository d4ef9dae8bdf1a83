"""The types of results in user code, as seen by mypy --strict and pyright."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "typing"
CHECKERS = {
    "mypy": ["-m", "mypy", "--strict", "--no-error-summary", "--config-file="],
    "pyright": ["-m", "pyright", "--pythonpath", sys.executable],
}


def check(checker, name, tmp_path):
    """The output of a type checker for a file, and the lines of the file that it reports."""
    command = [sys.executable, *CHECKERS[checker]]
    command += ["--cache-dir", str(tmp_path)] if checker == "mypy" else []
    result = subprocess.run([*command, str(HERE / name)], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    output = result.stdout + result.stderr
    return output, {int(n) for n in re.findall(rf"{re.escape(name)}:(\d+)(?::\d+)?[ -:]+ error", output)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("checker", CHECKERS)
def test_types_of_results(checker, tmp_path):
    output, mistakes = check(checker, "sample.py", tmp_path)
    assert mistakes == set(), output
    assert "0 errors" in output if checker == "pyright" else not output, output


@pytest.mark.exhaustive
@pytest.mark.parametrize("checker", CHECKERS)
def test_mistakes_are_found(checker, tmp_path):
    lines = (HERE / "errors.py").read_text().splitlines()
    expected = {n for n, line in enumerate(lines, 1) if line.endswith("# error")}
    output, mistakes = check(checker, "errors.py", tmp_path)
    assert mistakes == expected, output


@pytest.mark.exhaustive
def test_types_of_sparse_results(tmp_path):
    output, mistakes = check("pyright", "sparse.py", tmp_path)
    assert mistakes == set(), output
    assert "0 errors" in output, output
