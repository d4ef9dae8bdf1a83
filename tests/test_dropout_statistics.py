"""The distribution of masks: the law's exact probability, and no dependence between elements, rows, seeds or steps.

Seeds are fixed, so a test always passes or always fails. FALSE_ALARMS is the probability that a comparison would fail
for a correct mask if the seeds were drawn anew; a test with several comparisons divides it among them.
"""

import numpy as np
import pytest
from scipy import stats

import sjlt
from sjlt.laws.dropout import threshold

FALSE_ALARMS = 1e-6
BITS = [8, 16, 32]


def limit(comparisons=1):
    """A bound on the absolute value of a standard normal variable."""
    return stats.norm.isf(FALSE_ALARMS / comparisons / 2)


def signs(mask, keep):
    """The mask standardized to mean 0 and variance 1, where `keep` is the probability of keeping."""
    return ((mask - keep) / np.sqrt(keep * (1 - keep))).astype(np.float32)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.999])
def test_rate_and_mean(p, bits):
    """The realized rate is T/2^bits, within 2^-(bits+1) of p, and the mean of the result is unbiased for that rate."""
    t, n = threshold(p, bits), 1 << 22
    if t in (0, 1 << bits):
        with pytest.raises(ValueError, match="use bits=16"):
            sjlt.dropout_mask(5, p, 0, bits=bits)
        return
    keep = 1 - t / 2**bits
    assert abs(1 - keep - p) <= 2.0 ** -(bits + 1)
    deviation = np.sqrt(keep * (1 - keep) / n)
    out = sjlt.dropout(np.ones(n, np.float32), p, 42, bits=bits)
    assert abs((out != 0).mean() - keep) < limit() * deviation
    assert abs(out.mean(dtype=np.float64) - 1) < limit() * deviation / keep + 2**-23


@pytest.mark.parametrize("bits", BITS)
def test_patterns_of_neighbours(bits):
    """All 256 patterns of eight neighbours are equally frequent at T half the range (chi-squared test)."""
    mask = sjlt.dropout_mask(1 << 22, 0.5, 7, bits=bits)
    counts = np.bincount(np.packbits(mask), minlength=256)
    assert stats.chisquare(counts).pvalue > FALSE_ALARMS


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_lags(bits, p):
    """No correlation at lags up to 40, nor at 128, 1024 and 4096, which reach other rows."""
    n = 1 << 20
    z = signs(sjlt.dropout_mask(n, p, 3, bits=bits), 1 - threshold(p, bits) / 2**bits)
    lags = [*range(1, 41), 128, 1024, 4096]
    found = [np.dot(z[:-lag], z[lag:]) / np.sqrt(n - lag) for lag in lags]
    assert np.abs(found).max() < limit(len(lags))


@pytest.mark.parametrize("vary", ["seed", "high seed", "step", "offset", "row"])
def test_masks_are_independent(vary):
    """64 masks of neighbouring seeds, steps, offsets or rows: no pair is correlated."""
    n, k = 1 << 14, 64
    masks = {
        "seed": lambda i: sjlt.dropout_mask(n, 0.5, i),
        "high seed": lambda i: sjlt.dropout_mask(n, 0.5, i << 32),
        "step": lambda i: sjlt.dropout_mask(n, 0.5, 5, step=i),
        "offset": lambda i: sjlt.dropout_mask(n, 0.5, 5, offset=i << 32),
        "row": lambda i: sjlt.dropout_mask((k, n), 0.5, np.arange(k))[i],
    }
    z = np.stack([signs(masks[vary](i), 0.5) for i in range(k)])
    correlations = (z @ z.T / np.sqrt(n))[np.triu_indices(k, 1)]
    assert np.abs(correlations).max() < limit(correlations.size)
    # The correlations as a whole have the expected variance.
    assert abs((correlations**2).mean() - 1) < limit() * np.sqrt(2 / correlations.size)


def test_dropout_and_sketch_with_the_same_seed():
    """The signs of a sketch and the mask of the same seed are uncorrelated."""
    n, seed = 1 << 14, 11
    _, drawn = sjlt.Sketch(n, 1024, nnz=4, seed=seed).entries()
    z = signs(sjlt.dropout_mask(n, 0.5, seed), 0.5)
    assert np.abs(drawn @ z / np.sqrt(n)).max() < limit(4)
