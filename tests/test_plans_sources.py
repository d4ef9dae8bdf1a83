"""Sources of plans: the named matrix is used, and source files are kept apart from the result."""

import os
from pathlib import Path

import numpy as np
import pytest
from helpers.cli import run as run
from helpers.plans import D, K, left, result, shards

import sjlt
from sjlt import plans
from sjlt.files.errors import UserError


def rows(seed=0):
    return np.random.default_rng(seed).normal(size=(20, D)).astype(np.float32)


def save_h5ad(path, first, second):
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file["X"], file["layers/counts"] = first, second


def save_safetensors(path, first, second):
    torch = pytest.importorskip("safetensors.numpy")
    torch.save_file({"X": first, "layers/counts": second}, path)


def save_zarr(path, first, second):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(path, mode="w")
    group.create_array("X", data=first)
    group.create_array("layers/counts", data=second)


SAVE = {".h5ad": save_h5ad, ".safetensors": save_safetensors, ".zarr": save_zarr}


@pytest.mark.parametrize("suffix", SAVE)
def test_named_matrix_is_projected(tmp_path, suffix):
    (tmp_path / "in").mkdir()
    for i in range(2):
        SAVE[suffix](tmp_path / "in" / f"{i}{suffix}", rows(i), rows(i + 2))

    def planned(target, **options):
        return sjlt.plan(tmp_path / "in", tmp_path / target, K, **options)

    for column, first in (("X", 0), ("layers/counts", 2)):
        planned(f"of {first}", column=column).run(workers=1)
        expected = sjlt.Sketch(D, K).project(np.concatenate([rows(first), rows(first + 1)]))
        assert np.array_equal(result(tmp_path / f"of {first}"), expected)
    if suffix == ".h5ad":  # X is the default
        assert planned("of 0").committed
    with pytest.raises(UserError, match=r"different plan: result\.column is X, was layers/counts"):
        planned("of 2", column="X")


def test_command_line_projects_the_named_matrix(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    save_h5ad("a.h5ad", rows(0), rows(1))
    assert run("project", "a.h5ad", "out", "-k", K, "--column", "layers/counts", "--workers", 1).code == 0
    assert np.array_equal(result(tmp_path / "out"), sjlt.Sketch(D, K).project(rows(1)))


def test_single_matrices_with_different_names(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    (tmp_path / "in").mkdir()
    for name in "ab":
        numpy.save_file({name: rows()}, tmp_path / "in" / f"{name}.safetensors")
    with pytest.raises(UserError, match=r"b\.safetensors: vectors in column 'b', not 'a' as in .*a\.safetensors"):
        sjlt.plan(tmp_path / "in", tmp_path / "out", K)


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (lambda path: np.save(path, np.ones((D, 20), np.float32)), rf"shape is \[{D}, 20\], was \[20, {D}\]"),
        (lambda path: np.save(path, np.ones((20, D), np.int32)), "dtype is int32, was float32"),
    ],
)
def test_attempt_checks_shape_and_dtype(tmp_path, replacement, message):
    """Neither the size nor the modification time of the file has changed."""
    path = tmp_path / "x.npy"
    np.save(path, rows())
    plan, status = sjlt.plan(path, tmp_path / "out", K, part_rows=20), path.stat()
    replacement(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    with pytest.raises(UserError, match=rf"x\.npy: changed since it was planned: {message}"):
        plan.run_part(0)
    assert left(tmp_path / "out") == ["_sjlt.plan.json"]


# ------------------------------------------------------------------------------------- which files


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("in", "in/out", "in/out: is inside the source folder .*in: put the result elsewhere"),
        ("in", "link/out", "link/out: is inside the source folder"),
        ("in/**/*.npy", "in/out", r"in/out: its files would match the source .*in/\*\*/\*\.npy"),
        ("**/*", "in/out", "its files would match the source"),
        ("in/*/*.npy", "link/out", "its files would match the source"),
        ("*/*.npy", "out", "its files would match the source"),
    ],
)
def test_target_among_the_sources_is_refused(tmp_path, source, target, message):
    shards(tmp_path / "in")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for _ in range(2):  # the second time, the folder exists
        with pytest.raises(UserError, match=message):
            sjlt.plan(tmp_path / source, tmp_path / target, K)
        (tmp_path / target).mkdir(exist_ok=True)


def test_target_not_among_the_sources(tmp_path):
    x = shards(tmp_path / "in")
    for source, target in {"in": "in/_out", "in/x*.npy": "in/out", "**/x*.npy": "deep", "in/x10.npy": "in/one"}.items():
        for _ in range(2):
            sjlt.plan(tmp_path / source, tmp_path / target, K).run_part(0)
        sjlt.plan(tmp_path / source, tmp_path / target, K).run(workers=1)
        assert len(result(tmp_path / target)) == (31 if "x10" in source else len(x))


def test_target_in_a_zarr_store(tmp_path):
    save_zarr(tmp_path / "x.zarr", rows(), rows(1))
    for source in ("x.zarr", "*.zarr"):
        with pytest.raises(UserError, match=r"x\.zarr/out: is inside the source"):
            sjlt.plan(tmp_path / source, tmp_path / "x.zarr/out", K, column="X")


# ------------------------------------------------------------------------------------- damaged results


def damage(folder):
    (folder / "part-00001.npy").unlink()
    (folder / "part-00002.npy").write_bytes(b"short")
    (folder / "part-00003.npy").rename(folder / "three.npy")


def test_damaged_result_names_its_parts(tmp_path):
    shards(tmp_path / "in")
    plan = sjlt.plan(tmp_path / "in", tmp_path / "out", K)
    plan.run(workers=1)
    damage(tmp_path / "out")
    message = (
        r"out: 3 of 4 parts are damaged: part-00001\.npy is missing \(_sjlt\.json lists it with 128 bytes\), "
        r"part-00002\.npy has 5 bytes \(_sjlt\.json lists it with \d+ bytes\), part-00003\.npy is missing"
    )
    for call in (plan.run, plan.commit, lambda: plans.committed_parts(tmp_path / "out")):
        with pytest.raises(UserError, match=message):
            call()
    with pytest.raises(UserError, match="part-00003"):
        plan.run_part(3)
    plan.run_part(0)


def test_commands_refuse_damaged_results(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    shards(Path("in"))
    sjlt.plan("in", "out", K).run(workers=1)
    damage(Path("out"))
    for arguments in (
        ["project", "in", "out", "-k", K],
        ["project", "in", "out", "-k", K, "--resume"],
        ["commit", "out"],
    ):
        done = run(*arguments)
        assert (done.code, "3 of 4 parts are damaged" in done.err) == (2, True)
    assert "3 of 4 parts" in run("info", "out").out


# ------------------------------------------------------------------------------------- names


def test_order_of_names_with_equal_numbers(tmp_path, monkeypatch):
    """Regardless of the order in which the file system lists them."""
    (tmp_path / "in").mkdir()
    for name in ("1.npy", "01.npy", "001.npy", "\u00b2.npy"):
        np.save(tmp_path / "in" / name, rows())
    iterdir, names = Path.iterdir, []
    for order in (sorted, lambda paths: sorted(paths, reverse=True)):
        monkeypatch.setattr(Path, "iterdir", lambda folder, order=order: order(iterdir(folder)))
        names.append([path.name for path in plans.shards.find(tmp_path / "in")])
    assert names == [["001.npy", "01.npy", "1.npy", "\u00b2.npy"]] * 2


def test_folder_of_described_results_as_source(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    x = shards(Path("in"))
    Path("projected").mkdir()
    for name in left(Path("in")):
        assert run("project", f"in/{name}", f"projected/{name}", "-k", K).code == 0
    assert "x1.npy.json" in left(Path("projected"))
    for source in ("projected", "projected/*"):
        plan = sjlt.plan(source, "out", 8)
    plan.run(workers=1)
    assert np.array_equal(result(Path("out")), sjlt.Sketch(K, 8).project(sjlt.Sketch(D, K).project(x)))
    Path("projected/x2.npy").rename("projected/x2.npy.partial")
    Path("projected/x2.npy.json").rename("projected/x2.npy.partial.json")
    with pytest.raises(UserError, match=r"x2\.npy\.partial: an unfinished result"):
        sjlt.plan("projected", "again", 8)
    Path("projected/x2.npy.partial").unlink()
    with pytest.raises(UserError, match=r"x2\.npy\.partial\.json: neither"):  # the file it describes is missing
        sjlt.plan("projected", "again", 8)
