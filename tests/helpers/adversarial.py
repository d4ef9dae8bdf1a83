"""Data that tries to break componentwise error bounds, and the check of such a bound."""

import math

import numpy as np


def signs_of_row(S, r=0):
    """Row r of the sketch, without its scale."""
    return np.sign(S.to_scipy("csr")[[r]].toarray()[0])


def aligned(S, rng):
    """Every term of a component is positive and about 1, so each addition rounds."""
    row = signs_of_row(S)
    return np.where(row == 0, 1.0, row) * (1 + rng.random(S.n_features))


def first(S, rng):
    """A large value before small ones, each of which an addition may lose."""
    return np.where(np.arange(S.n_features) < 16, 1.0, 2.0**-24) * np.where(signs_of_row(S) < 0, -1, 1)


def last(S, rng):
    return first(S, rng)[::-1] * 1.0


def harmonic(S, rng):
    return 1.0 / np.arange(1, S.n_features + 1) * np.where(signs_of_row(S) < 0, -1, 1)


def correlated(S, rng):
    """x near the span of a few rows of S."""
    return np.asarray(S.to_scipy("csr")[:3].sum(0)).ravel() + 2.0**-20 * rng.normal(size=S.n_features)


def cancelling(S, rng):
    """Large terms that cancel, and small ones that make up the result."""
    signs = np.where(signs_of_row(S) < 0, -1, 1)
    return signs * np.resize([1e6, 1e-3, -1e6], S.n_features)


def equal(S, rng):
    return np.full(S.n_features, 1 / 3) * np.where(signs_of_row(S) < 0, -1, 1)


def elsewhere(S, rng):
    """One component with only small terms, while much larger features do not reach it."""
    row = signs_of_row(S)
    x = 2.0**-30 * aligned(S, rng)
    others = np.flatnonzero(row == 0)
    x[others[::6]] = 1 / 3
    return x


DATA = {f.__name__: f for f in (aligned, first, last, harmonic, correlated, cancelling, equal, elsewhere)}
U = {"float16": 2.0**-24, "bfloat16": 2.0**-24, "float32": 2.0**-24, "float64": 2.0**-53}  # of the sums for each dtype


def check_bound(entries, scale, x, result, c, u, floor=0.0):
    """Check |result_r - exact_r| <= c u sum over j of |S_rj| max(|x_j|, floor max |x|), for one row of data.

    Parameters
    ----------
    entries : csr_array of shape (len(result), len(x))
        The matrix, of whose values only the signs are used.
    scale : float
        The magnitude of its values.

    Returns
    -------
    float
        The largest error, as a fraction of the bound.

    Notes
    -----
    Expected sums are correctly rounded, so 3 2^-53 accounts for the expectation itself.
    """
    x, worst = np.asarray(x, np.float64), 0.0
    smallest = floor * np.abs(x).max(initial=0)
    for r in range(entries.shape[0]):
        columns = slice(entries.indptr[r], entries.indptr[r + 1])
        terms = x[entries.indices[columns]] * np.sign(entries.data[columns])
        allowed = (c * u + 3 * 2.0**-53) * scale * math.fsum(np.maximum(np.abs(terms), smallest))
        error = abs(float(result[r]) - scale * math.fsum(terms))
        assert error <= allowed, (r, error, allowed)
        worst = max(worst, error / allowed if allowed else 0)
    return worst
