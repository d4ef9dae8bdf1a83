"""``sjlt`` with given arguments, in this process."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sjlt.cli import app


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function of the arguments that returns the exit code and both outputs."""

    def call(*arguments: object) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["sjlt", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            app.main()
        captured = capsys.readouterr()
        return SimpleNamespace(code=ended.value.code or 0, out=captured.out, err=captured.err)

    return call
