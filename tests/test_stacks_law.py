"""Stacked sketches: every way to obtain entries gives those of the specification."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import reference
from helpers.cases import pairwise

import sjlt

VECTORS = json.loads((Path(__file__).parent / "vectors" / "stacked_sketches.json").read_text())["sketch"]
each_vector = pytest.mark.parametrize(
    "vector", VECTORS, ids=lambda v: f"k={v['n_components']} nnz={v['nnz']} stacks={v['stacks']}"
)


def sketch_of(vector):
    size = vector["first_column"] + len(vector["rows"])
    parameters = {name: vector[name] for name in ("nnz", "stacks", "seed")}
    return sjlt.Sketch(size, vector["n_components"], **parameters)[:, vector["first_column"] :]


@each_vector
def test_reference_gives_the_golden_entries(vector):
    for c, golden in enumerate(zip(vector["rows"], vector["signs"], strict=True)):
        column = vector["first_column"] + c
        found = reference.entries(vector["n_components"], vector["nnz"], vector["seed"], column, vector["stacks"])
        assert found == golden


@each_vector
def test_entries(vector):
    rows, signs = sketch_of(vector).entries()
    np.testing.assert_array_equal(rows.T, vector["rows"])
    np.testing.assert_array_equal(signs.T, vector["signs"])


@each_vector
def test_matrices(vector):
    S = sketch_of(vector)
    expected = np.zeros(S.shape)
    for j, (rows, signs) in enumerate(zip(vector["rows"], vector["signs"], strict=True)):
        expected[rows, j] = np.array(signs) * (1 / np.sqrt(vector["nnz"]))
    np.testing.assert_array_equal(S.toarray(), expected)
    matrix = S.to_scipy()
    assert matrix.has_sorted_indices
    np.testing.assert_array_equal(matrix.toarray(), expected)


@pairwise(k=[40, 128, 600, 1024, 4096], stacks=[1, 2, 4, 8], nnz=[1, 2, 4, 8], first=[0, 1000, 2**40 + 3])
def test_entries_equal_the_reference(k, stacks, nnz, first):
    if nnz % stacks or k % stacks:
        with pytest.raises(ValueError, match="stacks must divide"):
            sjlt.Sketch(10, k, nnz=nnz, stacks=stacks)
        return
    rows, signs = sjlt.Sketch(first + 40, k, nnz=nnz, stacks=stacks, seed=9).entries(first)
    for j in range(40):
        expected = reference.entries(k, nnz, 9, first + j, stacks)
        assert (rows[:, j].tolist(), signs[:, j].tolist()) == expected


def test_stacks_are_separate_sketches():
    """Each stack has its own rows and nonzeros; the first has the entries of the unstacked sketch of the same seed."""
    S = sjlt.Sketch(3000, 512, nnz=8, stacks=4, seed=3)
    rows, signs = S.entries()
    for t in range(4):
        own = rows[2 * t : 2 * t + 2]
        assert own.min() >= 128 * t
        assert own.max() < 128 * (t + 1)
    alone = sjlt.Sketch(3000, 128, nnz=2, seed=3).entries()
    np.testing.assert_array_equal(rows[:2], alone[0])
    np.testing.assert_array_equal(signs[:2], alone[1])
    agreement = [(signs[2 * t : 2 * t + 2] == alone[1]).mean() for t in (1, 2, 3)]
    assert all(abs(a - 0.5) < 5 * 0.5 / np.sqrt(6000) for a in agreement)  # 5 standard deviations of fair coins


def test_one_stack_equals_no_stacks():
    a, b = sjlt.Sketch(5000, 700, nnz=5, seed=4), sjlt.Sketch(5000, 700, nnz=5, stacks=1, seed=4)
    assert a == b
    assert a.to_dict() == b.to_dict()
    assert "stacks" not in a.to_dict()
    assert "stacks" not in repr(a)


# ------------------------------------------------------------------------------------- the parameter


@pytest.mark.parametrize(
    ("k", "stacks", "nnz"),
    [(256, 1, 4), (256, 2, 4), (256, 4, 4), (255, 3, 6), (250, 5, 5), (256, 8, 8), (8, 4, 4), (6, 3, 6), (3, 3, 3)],
)
def test_auto_is_a_multiple_of_stacks(k, stacks, nnz):
    assert sjlt.Sketch(100, k, stacks=stacks).nnz == nnz


def test_descriptions():
    S = sjlt.Sketch(1000, 256, nnz=8, stacks=4, seed=2)
    assert S.to_dict()["stacks"] == 4
    assert "stacks=4" in repr(S)
    part = S[:, 100:]
    for copy in (
        sjlt.Sketch.from_dict(S.to_dict()),
        pickle.loads(pickle.dumps(S)),
        eval(repr(S), {"Sketch": sjlt.Sketch}),
    ):
        assert copy == S
        assert hash(copy) == hash(S)
    assert eval(repr(part), {"Sketch": sjlt.Sketch}) == part
    assert part.stacks == part[:, 5:].stacks == 4
    assert sjlt.Sketch(1000, 256, nnz=8, stacks=2, seed=2) != S
    assert sjlt.Sketch.from_dict({**sjlt.Sketch(9, 8).to_dict(), "stacks": 1}) == sjlt.Sketch(9, 8)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"stacks": 3}, ValueError, "stacks = 3 and n_components = 256"),
        ({"stacks": 4, "nnz": 6}, ValueError, "stacks = 4 and nnz = 6"),
        ({"stacks": 0}, ValueError, "from 1 to 256.*got 0"),
        ({"stacks": -2}, ValueError, "got -2"),
        ({"stacks": 257}, ValueError, "got 257"),
        ({"stacks": 2.0}, TypeError, "2.0"),
        ({"stacks": True}, TypeError, "True"),
        ({"stacks": "auto"}, TypeError, "auto"),
        ({"stacks": 4, "nnz": 1024}, ValueError, "from 1 to 256 for n_components = 256 and stacks = 4, got 1024"),
        ({"stacks": 2, "density": 0.1}, ValueError, "stacks=2 and density=0.1"),
    ],
)
def test_refusals(options, error, match):
    with pytest.raises(error, match=match):
        sjlt.Sketch(1000, 256, **options)
    if "density" not in options:
        with pytest.raises(error, match=match):
            sjlt.project(np.ones(1000), 256, **options)
