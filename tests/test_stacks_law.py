"""Stacked sketches: the entries are those of the specification, on every path that gives entries."""

import json
from pathlib import Path

import pytest
import reference

VECTORS = json.loads((Path(__file__).parent / "vectors" / "stacked_sketches.json").read_text())["sketch"]
each_vector = pytest.mark.parametrize(
    "vector", VECTORS, ids=lambda v: f"k={v['n_components']} nnz={v['nnz']} stacks={v['stacks']}"
)


@each_vector
def test_the_witness_gives_the_golden_entries(vector):
    for c, golden in enumerate(zip(vector["rows"], vector["signs"], strict=True)):
        column = vector["first_column"] + c
        rows, signs = reference.entries(vector["n_components"], vector["nnz"], vector["seed"], column, vector["stacks"])
        assert (rows, signs) == golden
