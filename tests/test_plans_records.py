"""Plans and manifests may have been written by others: any content gives a one-line error that says what is wrong."""

import json
import os
from pathlib import Path

import pytest
from helpers.cli import run as run
from helpers.plans import K, shards

import sjlt
from sjlt import plans
from sjlt.files.errors import UserError


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A committed folder of four parts."""
    monkeypatch.chdir(tmp_path)
    shards(Path("in"))
    sjlt.plan("in", "out", K).run(workers=1)
    return Path("out")


def changed(**entries):
    return lambda content: content.update(entries)


def part(**entries):
    return lambda content: content["parts"][1].update(entries)


def result(**entries):
    return lambda content: content["result"].update(entries)


HOSTILE = {
    "no plan": (lambda content: content.clear(), "the record has no 'plan'"),
    "another plan": (changed(plan=""), "plan is '', must be 64 hexadecimal digits"),
    "no inputs": (changed(inputs=[]), "inputs is empty"),
    "no parts": (changed(parts=[]), "parts is empty"),
    "inputs are numbers": (changed(inputs=[1]), "an input must be an object, got 1"),
    "rows below 0": (lambda content: content["inputs"][0].update(rows=-1), "an input's rows is -1"),
    "inputs without names": (lambda content: content["inputs"][0].pop("name"), "an input has no 'name'"),
    "batches of 0 rows": (changed(batch_rows=0), "batch_rows is 0, must be from 1"),
    "a source that is no path": (changed(source=None), "'source' must be of type str, got None"),
    "a sketch that is none": (changed(sketch={}), "law"),
    "a result that is none": (changed(result={}), "result has no 'kind'"),
    "another kind": (result(kind="x|y"), r"result's kind is 'x\|y'"),
    "no dtype": (result(dtype="x"), "data type 'x' not understood"),
    "a dtype that is no Python": (result(dtype="f4,("), "was never closed"),
    "a long dtype": (result(dtype="i4," * 50), "result's dtype is 150 characters long"),
    "a column that is none": (result(column=1), "'column' must be a string or null, got 1"),
    "no column": (lambda content: content["result"].pop("column"), "'column' must be a string or null"),
    "a part elsewhere": (part(name="../x.npy"), "a part is named '../x.npy', must be part-NUMBER.npy"),
    "a part of another kind": (part(name="part-00001.parquet"), "must be part-NUMBER.npy"),
    "a part twice": (part(name="part-00000.npy"), "two parts have the same name"),
    "a part of no input": (part(input=4), "a part's input is 4, must be from 0 to 3"),
    "a part after the end": (part(stop=1), "a part's stop is 1, must be from 0 to 0"),
    "a part before the start": (part(start=1), "a part's start is 1, must be from 0 to 0"),
    "a part of no size": (lambda content: content["parts"][1].pop("size"), "a part has no 'size'"),
    "a size of true": (part(size=True), "'size' must be of type int, got True"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_manifests(target, run, case):
    change, message = HOSTILE[case]
    content = json.loads((target / "_sjlt.json").read_text())
    change(content)
    (target / "_sjlt.json").write_text(json.dumps(content))
    for call in (lambda: plans.committed_parts(target), lambda: sjlt.plan(target, "again", 8)):
        with pytest.raises(UserError, match=rf"_sjlt\.json: not a plan of sjlt: .*{message}"):
            call()
    for arguments in (["info", "out"], ["commit", "out"], ["project", "in", "out", "-k", K]):
        done = run(*arguments)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert "_sjlt.json: not a plan of sjlt: " in done.err


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"1", b"\xff", b'{"parts": [], "inputs": []}', b"[" * 100_000, b'{"plan": NaN}']
)
def test_files_that_are_not_manifests(target, content):
    (target / "_sjlt.json").write_bytes(content)
    with pytest.raises(UserError, match=r"_sjlt\.json: not a plan of sjlt: ") as caught:
        plans.load(target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_manifests_that_are_not_regular_files(target, make):
    (target / "_sjlt.json").unlink()
    make(target / "_sjlt.json")
    with pytest.raises(UserError, match=r"_sjlt\.json: not a regular file"):
        plans.load(target)


def test_part_that_is_a_directory_is_missing(target):
    (target / "part-00001.npy").unlink()
    (target / "part-00001.npy").mkdir()
    with pytest.raises(UserError, match=r"part-00001\.npy is missing"):
        plans.committed_parts(target)
