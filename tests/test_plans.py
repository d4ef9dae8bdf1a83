"""Plans: the same bytes from every executor, exactly one visible file per part, one-line errors."""

import json
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
import scipy.sparse
from helpers.cases import pairwise
from helpers.plans import D, K, contents, left, result, shards

import sjlt
from sjlt import plans
from sjlt.files.errors import UserError

# ------------------------------------------------------------------------------------- results


@pairwise(
    kind=["npy", "npz", "parquet"],
    dtype=["float32", "float64", "int8"],
    part_rows=[None, 7, 1000],
    batch_rows=[None, 4],
    normalize=[False, True],
)
def test_parts_form_the_projection(tmp_path, kind, dtype, part_rows, batch_rows, normalize):
    x = shards(tmp_path / "in", kind=kind, dtype=dtype)
    plan = sjlt.plan(
        tmp_path / "in", tmp_path / "out", K, seed=8, nnz=3, part_rows=part_rows, batch_rows=batch_rows,
        normalize=normalize,
    )  # fmt: skip
    plan.run(workers=1)
    expected = np.empty((len(x), K), np.float64 if dtype == "float64" else np.float32)
    data = x.astype(expected.dtype)  # CSR rows are summed in another order than dense ones
    sjlt.Sketch(D, K, nnz=3, seed=8).project(scipy.sparse.csr_array(data) if kind == "npz" else data, out=expected)
    if normalize:
        norms = np.linalg.norm(expected, axis=1, keepdims=True)
        assert np.allclose(result(tmp_path / "out"), expected / norms, rtol=1e-5, atol=1e-6)
    else:
        assert np.array_equal(result(tmp_path / "out"), expected)
    assert plan.committed
    assert len(plan) == len(plans.committed_parts(tmp_path / "out"))


def executor_threads():
    return ThreadPoolExecutor(3)


def executor_processes():
    import multiprocessing

    return ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["npy", pytest.param("parquet", marks=pytest.mark.exhaustive)])
def test_executors_write_the_same_bytes(tmp_path, kind):
    shards(tmp_path / "in", kind=kind)

    def planned(name):
        return sjlt.plan(tmp_path / "in", tmp_path / name, K, part_rows=6)

    planned("here").run(workers=1)
    expected = contents(tmp_path / "here")
    planned("own").run(workers=2)
    assert contents(tmp_path / "own") == expected
    for make in (executor_threads, executor_processes):
        with make() as executor:
            planned(make.__name__).run(executor)
        assert contents(tmp_path / make.__name__) == expected
    array = planned("array")
    for i in reversed(range(len(array))):
        array.run_part(i)
    array.commit()
    assert contents(tmp_path / "array") == expected


def test_manifest(tmp_path):
    shards(tmp_path / "in")
    plan = sjlt.plan(tmp_path / "in", tmp_path / "out", K, part_rows=20, seed=3)
    plan.run(workers=1)
    manifest = json.loads((tmp_path / "out" / "_sjlt.json").read_text())
    assert [(each["name"], each["rows"]) for each in manifest["inputs"]] == [
        ("x1.npy", 40), ("x2.npy", 0), ("x10.npy", 31), ("x11.npy", 5),
    ]  # fmt: skip
    for each in manifest["inputs"]:
        status = (tmp_path / "in" / each["name"]).stat()
        assert (each["size"], each["mtime_ns"]) == (status.st_size, status.st_mtime_ns)
    assert [(part["input"], part["start"], part["stop"]) for part in manifest["parts"]] == [
        (0, 0, 20), (0, 20, 40), (1, 0, 0), (2, 0, 20), (2, 20, 31), (3, 0, 5),
    ]  # fmt: skip
    assert [part["name"] for part in manifest["parts"]] == [f"part-{i:05d}.npy" for i in range(6)]
    assert all((tmp_path / "out" / part["name"]).stat().st_size == part["size"] for part in manifest["parts"])
    assert sjlt.Sketch.from_dict(manifest["sketch"]) == sjlt.Sketch(D, K, seed=3)
    assert left(tmp_path / "out") == ["_sjlt.json", *(part["name"] for part in manifest["parts"])]


def test_plan_is_a_description(tmp_path):
    shards(tmp_path / "in")
    a, b = (sjlt.plan(tmp_path / "in", tmp_path / "out", K) for _ in range(2))
    assert a.record == b.record
    assert not (tmp_path / "out").exists()
    a.run_part(2)
    assert plans.load(tmp_path / "out").record == a.record
    assert "4 files, 76 rows, 4 parts" in repr(a)


def test_files_and_globs(tmp_path):
    x = shards(tmp_path / "in")
    sjlt.plan(tmp_path / "in" / "x1*.npy", tmp_path / "glob", K).run(workers=1)
    assert np.array_equal(result(tmp_path / "glob"), sjlt.Sketch(D, K).project(x))  # x2 is empty
    sjlt.plan(tmp_path / "in" / "x10.npy", tmp_path / "file", K, part_rows=10).run(workers=1)
    assert np.array_equal(result(tmp_path / "file"), sjlt.Sketch(D, K).project(x[40:71]))
    sjlt.plan(tmp_path / "*" / "x11.npy", tmp_path / "deep", K).run(workers=1)
    assert np.array_equal(result(tmp_path / "deep"), sjlt.Sketch(D, K).project(x[71:]))


def test_hidden_names_and_committed_folders_as_sources(tmp_path):
    x = shards(tmp_path / "in")
    (tmp_path / "in" / "_SUCCESS").touch()
    (tmp_path / "in" / ".part.crc").write_bytes(b"x")
    first = sjlt.plan(tmp_path / "in", tmp_path / "out", K)
    first.run_part(0)
    with pytest.raises(UserError, match=r"not committed: _sjlt\.json is missing"):
        sjlt.plan(tmp_path / "out", tmp_path / "again", 8)
    first.run(workers=1)
    sjlt.plan(tmp_path / "out", tmp_path / "again", 8, seed=1).run(workers=1)
    y = sjlt.Sketch(D, K).project(x)
    assert np.array_equal(result(tmp_path / "again"), sjlt.Sketch(K, 8, seed=1).project(y))
    (tmp_path / "out" / "part-00003.npy").unlink()
    with pytest.raises(UserError, match=r"part-00003\.npy is missing \(_sjlt\.json lists it with \d+ bytes\)"):
        plans.committed_parts(tmp_path / "out")


@pytest.mark.parametrize("kind", ["npy", "parquet"])
def test_note_when_nothing_is_compressed(tmp_path, kind):
    shards(tmp_path / "in", kind=kind, dtype="int8")
    notes = []
    sjlt.plan(tmp_path / "in", tmp_path / "out", D + 10, note=notes.append).run(workers=1)
    assert f"n_components = {D + 10} is not below the {D} features: nothing is compressed" in notes
    assert any("out: will take" in note and "bytes, more than the" in note for note in notes)
    notes.clear()
    sjlt.plan(tmp_path / "in", tmp_path / "out", D + 10, note=notes.append)  # the plan exists already
    assert notes == []


def test_note_on_sparse_files_is_shown_once(tmp_path):
    shards(tmp_path / "in", kind="npz")
    notes = []
    sjlt.plan(tmp_path / "in", tmp_path / "out", K, note=notes.append)
    assert [note for note in notes if "sparse" in note] == [
        f"{tmp_path}/in/x1.npz: sparse, so it is loaded whole into memory"
    ]


def test_progress_of_a_resumed_run(tmp_path):
    shards(tmp_path / "in")
    plan, seen = sjlt.plan(tmp_path / "in", tmp_path / "out", K), []
    plan.run_part(0)
    plan.run(workers=1, progress=lambda rows, of: seen.append((rows, of)))
    assert seen == [(40, 76), (40, 76), (71, 76), (76, 76)]
    plan.run(progress=lambda rows, of: seen.append((rows, of)))
    assert seen[4:] == [(76, 76)]


# ------------------------------------------------------------------------------------- resuming


def test_run_writes_only_missing_parts(tmp_path):
    shards(tmp_path / "in")
    plan = sjlt.plan(tmp_path / "in", tmp_path / "out", K, part_rows=9)
    for i in (0, 3, 5):
        plan.run_part(i)
    before = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in left(tmp_path / "out")}
    plan.run(workers=1)
    after = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in left(tmp_path / "out")}
    kept = [name for name in before if name.startswith("part")]
    assert len(kept) == 3
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    plan.run()
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in left(tmp_path / "out")} == after


def test_different_plan_is_refused(tmp_path):
    shards(tmp_path / "in")
    target = tmp_path / "out"
    for commit in (False, True):
        plan = sjlt.plan(tmp_path / "in", target, K)
        plan.run_part(0)
        if commit:
            plan.run(workers=1)
        with pytest.raises(UserError, match=r"belongs to a different plan: sketch\.seed is 1, was 0"):
            sjlt.plan(tmp_path / "in", target, K, seed=1)
        with pytest.raises(UserError, match=r"batch_rows is 3"):
            sjlt.plan(tmp_path / "in", target, K, batch_rows=3)
        with pytest.raises(UserError, match="11 parts, was 4"):
            sjlt.plan(tmp_path / "in", target, K, part_rows=9)


def test_changed_source_is_refused(tmp_path):
    shards(tmp_path / "in")
    plan = sjlt.plan(tmp_path / "in", tmp_path / "out", K)
    plan.run_part(0)
    np.save(tmp_path / "in" / "x10.npy", np.ones((31, D), np.float32))
    with pytest.raises(UserError, match=r"x10\.npy: changed since it was planned"):
        plan.run_part(2)
    with pytest.raises(UserError, match=r"x10\.npy: changed since it was planned.*; 2 of 4 parts are done"):
        plan.run(workers=1)
    with pytest.raises(UserError, match=r"the source has changed: x10\.npy: mtime_ns is"):
        sjlt.plan(tmp_path / "in", tmp_path / "out", K)
    np.save(tmp_path / "in" / "x3.npy", np.ones((1, D), np.float32))
    with pytest.raises(UserError, match=r"the source has changed|5 inputs, was 4"):
        sjlt.plan(tmp_path / "in", tmp_path / "out", K)
    assert not (tmp_path / "out" / "_sjlt.json").exists()


def test_commit_needs_all_parts_and_sweeps_orphans(tmp_path):
    shards(tmp_path / "in")
    plan = sjlt.plan(tmp_path / "in", tmp_path / "out", K)
    with pytest.raises(UserError, match="4 of 4 parts are missing: 0, 1, 2, 3"):
        plan.commit()
    plan.run_part(1)
    with pytest.raises(UserError, match="3 of 4 parts are missing: 0, 2, 3"):
        plan.commit()
    orphan = tmp_path / "out" / ".sjlt-part-00000.npy~host-1-abc.tmp"
    orphan.write_bytes(b"half")
    for i in (0, 2, 3):
        plan.run_part(i)
    assert orphan.exists()
    plan.commit()
    plan.commit()
    assert left(tmp_path / "out") == ["_sjlt.json", *(f"part-0000{i}.npy" for i in range(4))]
    plan.run_part(0)  # a late duplicate
    assert left(tmp_path / "out") == ["_sjlt.json", *(f"part-0000{i}.npy" for i in range(4))]


@pytest.mark.parametrize("finish", ["commit", "run"])
def test_killed_commit_is_finished_by_the_next(tmp_path, finish):
    """The manifest exists, along with the plan's record and an orphan."""
    shards(tmp_path / "in")
    plan = sjlt.plan(tmp_path / "in", tmp_path / "out", K)
    plan.run_part(0)
    record = (tmp_path / "out" / "_sjlt.plan.json").read_bytes()
    plan.run(workers=1)
    (tmp_path / "out" / "_sjlt.plan.json").write_bytes(record)
    (tmp_path / "out" / ".sjlt-part-00000.npy~host-1-abc.tmp").touch()
    getattr(plans.load(tmp_path / "out"), finish)()
    assert left(tmp_path / "out") == ["_sjlt.json", *(f"part-0000{i}.npy" for i in range(4))]


def test_attempt_of_a_replaced_plan_writes_nothing(tmp_path):
    shards(tmp_path / "in")
    old = sjlt.plan(tmp_path / "in", tmp_path / "out", K)
    old.run_part(0)
    job, part = old._job(), old._part(2)
    for name in left(tmp_path / "out"):
        (tmp_path / "out" / name).unlink()
    sjlt.plan(tmp_path / "in", tmp_path / "out", K, seed=1).run_part(0)
    with pytest.raises(UserError, match="no longer holds this plan"):
        plans.planning.attempt(job, part)
    assert "part-00002.npy" not in left(tmp_path / "out")
