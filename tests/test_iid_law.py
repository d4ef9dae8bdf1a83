"""The iid law: golden vectors, an independent reference, the sketch's interface, entry statistics, refusals."""

import copy
import dataclasses
import json
import math
import pickle
from fractions import Fraction
from pathlib import Path

import iid_reference as reference
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sjlt import Sketch
from sjlt.laws import iid as iid_law
from sjlt.laws.philox import define

VECTORS = json.loads((Path(__file__).parent / "vectors" / "dropout_and_iid_laws.json").read_text())["iid"]
LAST = 2**63 - 1
BOUNDARY = Fraction(1, 16)

# Smallest and largest density of both lane widths, both sides of the boundary, and scikit-learn's usual values.
DENSITIES = [2**-16, 2**-15, 0.001, 0.01, float(BOUNDARY) - 2**-17, float(BOUNDARY), 0.1, 1 / 3, 0.5, 1.0]

densities = st.one_of(st.sampled_from(DENSITIES), st.floats(2**-16, 1))


def unscaled(S):
    """S as an integer matrix."""
    matrix = S.toarray() * math.sqrt(S.n_components * S.density)
    rounded = np.rint(matrix)
    np.testing.assert_allclose(matrix, rounded, rtol=1e-14, atol=0)
    return rounded.astype(np.int64)


# --------------------------------------------------------------------------------- golden vectors, reference


@pytest.mark.parametrize("v", VECTORS, ids=lambda v: str(v["density"])[:6])
def test_golden_vectors(v):
    k, density, seed, first = v["n_components"], v["density"], v["seed"], v["first_column"]
    stop = first + len(v["entries"])
    assert reference.columns(k, density, seed, first, stop) == v["entries"]
    S = Sketch(stop, k, density=density, seed=seed)
    assert S.density == v["realised_density"]
    assert unscaled(S[:, first:]).T.tolist() == v["entries"]


@given(
    k=st.integers(1, 300),
    density=densities,
    seed=st.integers(-(2**63), 2**64 - 1),
    start=st.one_of(st.integers(0, LAST - 3), st.sampled_from([2**32 - 1, LAST - 3])),
)
@example(k=129, density=1.0, seed=2**64 - 1, start=LAST - 3)
@example(k=65, density=float(BOUNDARY), seed=-1, start=2**32 - 2)
@settings(max_examples=60)
def test_entries_equal_the_reference(k, density, seed, start):
    S = Sketch(LAST, k, density=density, seed=seed)[:, start : start + 3]
    assert math.isclose(S.density, reference.realised(density), rel_tol=1e-15)
    assert unscaled(S).T.tolist() == reference.columns(k, density, seed, start, start + 3)


@given(word=st.integers(0, 2**32 - 1), bits=st.sampled_from([8, 16]), data=st.data())
def test_marks_of_every_lane(word, bits, data):
    lanes = iid_law.Lanes(bits, data.draw(st.integers(1, 2 ** (bits - 1))))
    for number in (int, np.uint64):
        bound = define(iid_law.FUNCTIONS, lambda f: f, number)
        marks = int(bound.marks(number(word), number(lanes.signs), number(lanes.complement)))
        for i in range(32 // bits):
            lane, mark = ((w >> bits * i) & (2**bits - 1) for w in (word, marks))
            kept = lane % 2 ** (bits - 1) < lanes.threshold
            assert mark == (lane >> (bits - 1) << (bits - 1)) + (kept << (bits - 2))


def test_stream_tags_are_distinct():
    from sjlt.laws import dropout as dropout_law
    from sjlt.laws import exact as law

    assert len({dropout_law.TAG_DROPOUT, law.TAG_KEYS, law.TAG_SIGNS, law.TAG_TILES, iid_law.TAG_ENTRIES}) == 5


# --------------------------------------------------------------------------------- interface


@given(density=densities, n=st.integers(0, 10**6), k=st.integers(1, 1000), seed=st.integers(-(2**63), 2**64 - 1))
def test_descriptions_round_trip(density, n, k, seed):
    S = Sketch(n, k, density=density, seed=seed)
    part = S[:, n // 3 : n // 2]
    assert S.nnz is None
    for sketch in (S, part):
        copies = [
            pickle.loads(pickle.dumps(sketch)),
            Sketch.from_dict(json.loads(json.dumps(sketch.to_dict()))),
            eval(repr(sketch), {"Sketch": Sketch}),
            copy.deepcopy(sketch),
            dataclasses.replace(sketch),
        ]
        for other in copies:
            assert other == sketch
            assert hash(other) == hash(sketch)
            assert (other.density, other.nnz, other.spec) == (sketch.density, None, sketch.spec)


def test_inequality_across_laws_and_densities():
    sketches = [Sketch(100, 32, nnz=4), *(Sketch(100, 32, density=d) for d in (0.125, 0.25, 0.0625, 0.0625 - 2**-17))]
    assert math.isclose(sketches[3].density, sketches[4].density)  # with lanes of 8 and of 16 bits
    assert len(set(sketches)) == len(sketches)


def test_auto_density():
    S = Sketch(10_000, 64, density="auto", seed=3)
    assert Sketch(10_000, 64, density=0.01, seed=3) == S
    part = S[:, 1000:3000]
    assert part.density == S.density
    np.testing.assert_array_equal(part.toarray(), S.toarray()[:, 1000:3000])
    assert Sketch(0, 5, density="auto").density == 1
    assert Sketch(2**32, 5, density="auto").density == 2**-15


def test_density_of_the_exact_law():
    S = Sketch(100, 64, nnz=4)
    assert S.density is None
    assert dataclasses.replace(S, n_components=128).density is None
    assert Sketch(100, 64, density=4 / 64).nnz is None


def test_entries_is_refused_with_a_hint():
    with pytest.raises(ValueError, match=r"differ in their number of nonzeros.*to_scipy"):
        Sketch(10, 5, density=0.5).entries()


def test_to_scipy_is_canonical_and_built_in_parts(monkeypatch):
    from sjlt.backends.cpu import iid_sparse

    S = Sketch(300, 100, density=0.2, seed=1)
    whole = S.to_scipy()
    assert whole.has_canonical_format
    monkeypatch.setattr(iid_sparse, "PART_CODES", 1000)  # many parts
    assert (S.to_scipy() != whole).nnz == 0
    assert S.to_scipy("csr").format == "csr"
    assert S.to_scipy(dtype=np.float32).dtype == np.float32
    assert Sketch(0, 7, density=0.5).toarray().shape == (7, 0)


# --------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("density", [0, 0.0, -0.1, 1.0000001, 2, math.nan, math.inf, -math.inf])
def test_densities_out_of_range_are_refused(density):
    with pytest.raises(ValueError, match=rf"density.*{density if density else 0}"):
        Sketch(10, 5, density=density)


@pytest.mark.parametrize("density", [True, "Auto", "0.5", [0.5], 1j])
def test_densities_of_other_types_are_refused(density):
    with pytest.raises(TypeError, match="density"):
        Sketch(10, 5, density=density)


def test_too_small_density_names_the_smallest():
    with pytest.raises(ValueError, match=rf"1e-05.*2\^-16 = {2**-16}.*2\^-15"):
        Sketch(10, 5, density=1e-5)
    assert Sketch(10, 5, density=2**-16).density == 2**-15
    with pytest.raises(ValueError, match="smallest"):
        Sketch(2**33, 5, density="auto")


@pytest.mark.parametrize("nnz", [1, 4])
def test_nnz_and_density_are_exclusive(nnz):
    with pytest.raises(ValueError, match=rf"nnz={nnz}.*density=0.5"):
        Sketch(10, 5, nnz=nnz, density=0.5)


@pytest.mark.parametrize(
    "change",
    [{"bits": 32}, {"bits": 8, "threshold": 0}, {"bits": 8, "threshold": 7}, {"threshold": 129}, {"nnz": 4}],
    ids=str,
)
def test_invalid_descriptions_are_refused(change):
    description = Sketch(10, 5, density=0.5).to_dict() | change
    with pytest.raises(ValueError, match=r"lanes|keys"):
        Sketch.from_dict(description)


# --------------------------------------------------------------------------------- statistics of the entries


def tolerated(variance, n):
    """A deviation of a mean of n values that chance exceeds once in 10^9 (six standard deviations)."""
    return 6.2 * math.sqrt(variance / n)


@pytest.mark.parametrize("density", [1.0, 1 / 3, 0.0625, 0.01], ids=str)
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_frequencies_of_nonzeros_and_signs(density, seed):
    """False-alarm rate: 1e-9 per comparison, about 2600 comparisons, so 3e-6 per test."""
    S = Sketch(2000, 512, density=density, seed=seed)
    E, p = unscaled(S), S.density
    nonzero = E != 0
    for axis in (None, 0, 1):
        n = E.size if axis is None else E.shape[axis]
        # The nonzero count of a sparse column or row is nearly Poisson; 12 / n allows for its longer tail.
        assert (np.abs(nonzero.mean(axis) - p) <= tolerated(p * (1 - p), n) + 12 / n).all()
        assert (np.abs(E.mean(axis)) <= tolerated(p, n) + 12 / n).all()


@pytest.mark.parametrize("density", [1.0, 1 / 3, 0.05], ids=str)
def test_entries_are_uncorrelated(density):
    """False-alarm rate: 1e-9 per comparison, about 300 comparisons."""
    S = Sketch(3000, 256, density=density, seed=5)
    E, p = unscaled(S), S.density
    centred = (E != 0) - p
    for shift in (1, 2, 4, 8, 16, 32, 128):
        for a, b in ((E[shift:], E[:-shift]), (E[:, shift:], E[:, :-shift])):
            assert abs((a * b).mean()) <= tolerated(p * p, a.size)
            assert abs((a * b * b).mean()) <= tolerated(p * p, a.size)
        for a, b in ((centred[shift:], centred[:-shift]), (centred[:, shift:], centred[:, :-shift])):
            assert abs((a * b).mean()) <= tolerated((p * (1 - p)) ** 2, a.size) + 1e-12
    other = unscaled(Sketch(3000, 256, density=density, seed=6))
    assert abs((E * other).mean()) <= tolerated(p * p, E.size)


@pytest.mark.parametrize("density", [1.0, 1 / 3, 0.05, 2**-15], ids=str)
def test_squared_norms_are_unbiased(density):
    """E[S'S] = I: diagonal and off-diagonal, over seeds, within six standard deviations."""
    k, d, seeds = 64, 24, 400
    total = np.zeros((d, d))
    for seed in range(seeds):
        S = Sketch(d, k, density=density, seed=seed).toarray()
        total += S.T @ S
    p = Sketch(d, k, density=density).density
    mean = total / seeds
    off = mean[~np.eye(d, dtype=bool)]
    assert np.abs(off).max() <= tolerated(1 / k, seeds) + 1e-12
    # The nonzero count of a column is binomial, nearly Poisson at small densities: allow 12 more.
    assert np.abs(np.diag(mean) - 1).max() <= tolerated((1 - p) / (k * p), seeds) + 12 * (p < 1e-3) / (k * p * seeds)


def test_density_one_has_no_zeros():
    assert (np.abs(unscaled(Sketch(500, 300, density=1, seed=8))) == 1).all()
