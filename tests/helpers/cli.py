"""``sjlt`` with given arguments, in this process or on a pseudo-terminal."""

import contextlib
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sjlt.cli import app


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs ``sjlt`` with its arguments and returns the exit code and both outputs."""

    def call(*arguments: object) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["sjlt", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            app.main()
        captured = capsys.readouterr()
        return SimpleNamespace(code=ended.value.code or 0, out=captured.out, err=captured.err)

    return call


def on_a_terminal(*arguments: object, **environment: str) -> tuple[int, str]:
    """The exit code, and what the command writes to a terminal of 60 columns, without escape sequences."""
    import pty  # POSIX only

    ours, theirs = pty.openpty()
    variables = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "60", **environment}
    shown = b""
    command = [sys.executable, "-m", "sjlt", *map(str, arguments)]
    with subprocess.Popen(command, stderr=theirs, env=variables) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # Linux reports that the other end is closed
            while part := os.read(ours, 4096):
                shown += part
    os.close(ours)
    return process.returncode, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).replace("\r", "\n")
