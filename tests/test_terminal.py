"""Terminal output during a run: the progress bar, why it waits, hints, and the last line."""

import re
from pathlib import Path

import numba
import numpy as np
import pytest
from helpers.cases import exhaustive_except
from helpers.cli import on_a_terminal
from helpers.cli import run as run
from helpers.plans import D, shards, write_parquet

from sjlt.cli.terminal import HINT_CACHE, watch_compilation

K = 16


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def save(kind):
    if kind == "folder":
        shards(Path("in"))
        return "in", "out", 76
    x = np.ones((60, D), np.float32)
    if kind == "parquet":
        write_parquet(Path("x.parquet"), x)
    else:
        np.save("x.npy", x)
    return f"x.{kind}", f"y.{kind}", 60


@pytest.mark.parametrize("kind", exhaustive_except(["parquet"], ["parquet", "folder", "npy"]))
def test_progress_bar_and_last_line(kind):
    source, out, rows = save(kind)
    code, shown = on_a_terminal("project", source, out, "-k", K)
    assert code == 0
    assert f"0/{rows}" in shown
    assert f"{rows}/{rows}" in shown
    assert re.fullmatch(r"[\d.]+ (bytes|[kM]B) → [\d.]+ (bytes|[kM]B) in [\d.]+ s", shown.strip().splitlines()[-1])


@pytest.mark.exhaustive
def test_progress_bar_while_workers_start():
    shards(Path("in"))
    code, shown = on_a_terminal("project", "in", "out", "-k", K, "--workers", 2)
    assert code == 0
    assert "starting workers ..." in shown
    assert "76/76" in shown


@pytest.mark.parametrize("kind", ["parquet", pytest.param("folder", marks=pytest.mark.exhaustive)])
def test_errors_are_shown_alone(kind):
    """No progress bar is left above it."""
    source, out, _ = save(kind)
    code, shown = on_a_terminal("project", source, out, "-k", 0)
    assert code == 2
    assert shown.strip().count("\n") == 0
    assert shown.startswith("Error: ")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["npy", "parquet", "folder"])
def test_compilation_is_announced_once(kind, tmp_path):
    source, out, _ = save(kind)
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    code, shown = on_a_terminal("project", source, out, "-k", K, **cache)
    assert code == 0
    assert "compiling, once (about 6 s) ..." in shown
    assert HINT_CACHE not in shown
    code, shown = on_a_terminal("project", source, f"2{out}", "-k", K, **cache)
    assert code == 0
    assert "compiling" not in shown


def test_long_paths_are_not_wrapped_without_a_terminal(run):
    np.save(f"{'long' * 60}.npy", np.ones((6, D), np.float32))
    assert run("project", f"{'long' * 60}.npy", "y.npy", "-k", K).code == 0
    shown = run("info", "y.npy").out
    assert f"{'long' * 60}.npy" in shown
    assert max(map(len, shown.splitlines())) < 300


@pytest.mark.parametrize("cached", [False, True])
def test_hint_without_a_cache(cached, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    started = []
    with watch_compilation(lambda: started.append(1)):
        numba.njit(numba.int64(numba.int64), cache=cached)(_next)
    assert started
    assert (HINT_CACHE in capsys.readouterr().err) == (not cached)
    with watch_compilation(lambda: started.append(2)):
        pass
    assert 2 not in started
    assert capsys.readouterr().err == ""


def _next(x):
    return x + 1
