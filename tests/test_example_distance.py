"""examples/distance_preservation.py: its data and its claims."""

import json
import sys
import sysconfig

import numpy as np
import pytest
import scipy.sparse
from test_examples import load


@pytest.fixture(scope="module")
def example():
    return load("distance_preservation")


def test_docstrings_are_parsed_without_importing(example, tmp_path, monkeypatch):
    sources = {
        "a/__init__.py": '"""Two words."""\ndef f():\n "one two three"\nclass C:\n async def g(self):\n  "a b c d"',
        "a/tests/test_a.py": '"""A long docstring of a test."""',
        "b.py": 'r"""When imported it raises, \\d."""\nraise SystemExit',
        "broken.py": 'def f(:\n    """Never to be parsed."""',
        "escape.py": '"""An \\\\d and an invalid \\d."""',
        "latin.py": '"""A byte that no UTF-8 has: \xff."""',
        "empty.py": "",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(source.encode("latin-1"))
    paths = dict.fromkeys(("purelib", "platlib", "stdlib"), str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    modules = set(sys.modules)
    found = sorted(example.docstrings(least_words=3))
    assert found == ["An \\d and an invalid \\d.", "When imported it raises, \\d.", "a b c d", "one two three"]
    assert set(sys.modules) == modules


@pytest.mark.exhaustive
def test_text(example):
    X = example.text(documents=400)
    assert isinstance(X, scipy.sparse.csr_matrix)
    assert X.shape[0] == 400
    assert X.shape[1] > 400
    np.testing.assert_allclose(scipy.sparse.linalg.norm(X, axis=1), 1, rtol=1e-5)


def test_adversarial_inputs(example):
    two, local, power = example.two_sparse(50, 300), example.local(50, 300, 20), example.power_law(50, 300)
    assert two.shape == local.shape == power.shape == (50, 300)
    assert all(two.indptr == np.arange(0, 101, 2))
    assert all(two.indices[::2] != two.indices[1::2])
    assert all(np.diff(local.indices.reshape(50, 20), axis=1).ravel() == 1)
    assert {*two.data, *local.data} == {-1, 1}
    assert np.array_equal(np.sort(power, axis=1), np.tile(1 / np.arange(300, 0, -1.0), (50, 1)))
    assert not np.array_equal(power[0], power[1])
    assert example.patches(stride=100).shape == (2 * 5 * 7, 768)


@pytest.mark.exhaustive
def test_whole_example(example, tmp_path, capsys):
    """Exact sketches win on sparse rows; all sketches agree on spread-out ones.

    False-alarm rate below 1e-4: on 2-sparse rows the standard deviations differ 8-fold; on the others, 10 matrices
    on 200
    nearly orthogonal rows are compared with the theory within 6 standard errors.
    """
    spread = np.random.default_rng(0).normal(size=(200, 1024))
    data = {"2-sparse": example.two_sparse(200, 16_384), "[spread]": spread}
    plot = tmp_path / "plot.png"
    reports = example.main(plot, data, (64,), rows=200, pairs=1000, queries=20, seeds=10)
    assert plot.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "2-sparse: 200 x 16,384" in said
    assert "[spread]: 200 x 1,024" in said
    written = json.loads(json.dumps(example.record(reports)))
    assert {name: entry["features"] for name, entry in written.items()} == {"2-sparse": 16_384, "[spread]": 1024}
    assert all(len(entry["sketches"]) == 9 and len(entry["theory"]) == 1 for entry in written.values())
    sparse, dense = ({sketch.name: sketch for sketch in report.sketches} for report in reports.values())
    assert sparse.keys() == dense.keys()
    for thin in ("iid auto", "scikit-learn"):
        assert sparse["nnz 4"].norm_std < sparse[thin].norm_std / 4
    (theory,) = reports["[spread]"].theory
    for sketch in dense.values():
        # nnz 1 is 3 % better than theory: the 64 features of a row do not collide.
        assert abs(sketch.ratio_std - theory.ratio_std) < 6 * sketch.ratio_std_error + 0.03 * theory.ratio_std
        assert sketch.ratio_quantiles == pytest.approx(theory.ratio_quantiles, rel=0.1)
