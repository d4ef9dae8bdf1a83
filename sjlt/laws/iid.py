"""The iid law: independent entries, +-sqrt(1/(k density)) with probability density/2 each, else 0.

This is the distribution of scikit-learn's random projections. Entry (row r, column j) is a pure function of (density,
seed, r, j). One call of Philox decides L = 128/bits consecutive rows of a column, with a lane of `bits` bits for each:

- **Lane.** `bits` is 8 if density >= 1/16, else 16. u is lane r mod L (`dropout.lane`) of
  Philox(counter = (j low, j high, r div L, tag 4); key = seed). Let Q = bits - 1.
- **Sign.** The entry is negative if the top bit of u is 1.
- **Nonzero** if the low Q bits of u are < T = floor(density 2^Q + 1/2), 0 < T <= 2^Q.
- **Scale.** The realised density T/2^Q determines the magnitude, so that E[S'S] = I exactly.

`marks` decides all lanes of a word at once: the top bit of each lane becomes the sign, the next one "nonzero". Followed
by zeros, these are the leading bits of +-2 and +-0 in every float format from fp16 to fp64: kernels multiply by these
values, and by half the scale.

Density 1 is the dense Rademacher transform; 1/3 is due to Achlioptas, "Database-friendly random projections", JCSS
66(4), 2003; 1/sqrt(n_features) to Li, Hastie, Church, "Very sparse random projections", KDD 2006.
"""

from __future__ import annotations

from math import nextafter, sqrt
from numbers import Real
from typing import Any, NamedTuple

from .dropout import lane
from .exact import select_word
from .philox import HALF, LOW, philox

TAG_ENTRIES = 4
DENSE = 1 / 16  # the smallest density for which lanes of 8 bits are fine enough
ONE = 1


class Lanes(NamedTuple):
    """The parameters of the law.

    Attributes
    ----------
    bits : {8, 16}
        Width of a lane.
    threshold : int
        T, 0 < T <= 2^(bits - 1).
    """

    bits: int
    threshold: int

    @property
    def per_call(self) -> int:
        """L, the number of rows that one call of Philox decides."""
        return 128 // self.bits

    @property
    def density(self) -> float:
        """The realised density T/2^Q, which `lanes_of` maps back to these lanes.

        For lanes of 16 bits, 1/16 is returned as the float below it, because `lanes_of(1/16)` has 8 bits.
        """
        realised = self.threshold / (1 << (self.bits - 1))
        return nextafter(DENSE, 0) if self.bits == 16 and realised == DENSE else realised

    @property
    def signs(self) -> int:
        """A word with the top bit of every lane set."""
        return {8: 0x80808080, 16: 0x80008000}[self.bits]

    @property
    def complement(self) -> int:
        """A word with 2^Q - T in every lane."""
        return {8: 0x01010101, 16: 0x00010001}[self.bits] * ((1 << (self.bits - 1)) - self.threshold)

    def scale(self, n_components: int) -> float:
        """The magnitude of the entries of a sketch."""
        return sqrt((1 << (self.bits - 1)) / (n_components * self.threshold))


def lanes_of(density: Any, n_features: int) -> Lanes:
    """The lanes for a density in (0, 1], or for "auto", which is 1/sqrt(n_features).

    Raises TypeError for anything but a number or "auto", ValueError for a number that is out of range.
    """
    if isinstance(density, str) and density == "auto":
        density = 1 / sqrt(max(1, n_features))
    if not isinstance(density, Real) or isinstance(density, bool):
        raise TypeError(f'density must be a number above 0 and at most 1, or "auto", got {density!r}')
    density = float(density)
    if not 0 < density <= 1:
        raise ValueError(f'density must be above 0 and at most 1, or "auto", got {density}')
    bits = 8 if density >= DENSE else 16
    scaled = density * (1 << (bits - 1))  # exact, as is its fractional part
    threshold = int(scaled) + int(scaled - int(scaled) >= 0.5)
    if threshold == 0:
        raise ValueError(
            f"density = {density} is too small for lanes of 16 bits: the smallest that works is 2^-16 = {2**-16}, "
            "which is realised as 2^-15"
        )
    return Lanes(bits, threshold)


def checked(bits: Any, threshold: Any) -> Lanes:
    """The lanes with these parameters; ValueError if no density has them."""
    lowest, highest = {8: (8, 128), 16: (1, 2048)}.get(bits, (1, 0))
    if not lowest <= threshold <= highest:
        raise ValueError(f"no density has lanes of bits = {bits} with threshold = {threshold}")
    return Lanes(int(bits), int(threshold))


# Word functions, which `define(FUNCTIONS, jit, word)` binds to a backend.


def entry_words(j, call, k0, k1):
    """The four words that decide rows L call to L call + L - 1 of column j."""
    return philox(j & LOW, j >> HALF, call, TAG_ENTRIES, k0, k1)


def marks(w, signs, complement):
    """Decide all lanes of word w: the top bit of a lane becomes 1 if negative, the next 1 if nonzero, the rest 0.

    (The low Q bits of a lane plus 2^Q - T carry into its top bit if they are >= T, and never beyond it.)
    """
    dropped = ((w & (signs ^ LOW)) + complement) & signs
    return (w & signs) ^ ((dropped ^ signs) >> ONE)


FUNCTIONS = (philox, select_word, lane, entry_words, marks)
