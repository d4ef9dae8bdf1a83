"""`SketchSpec`, the description of a sketch that operators and backends accept: plain numbers that fix every entry."""

from __future__ import annotations

from typing import NamedTuple

from .iid import Lanes


class SketchSpec(NamedTuple):
    """A checked description of a sketch.

    Attributes
    ----------
    n_features, n_components : int
        The shape of S is (n_components, n_features).
    nnz : int
        Nonzeros per column under the exact law; 0 under the iid law.
    stacks : int
        Number of stacked sketches under the exact law; 1 under the iid law.
    lane_bits, threshold : int
        The parameters of the iid law (`sjlt.laws.iid.Lanes`); both 0 under the exact law.
    seed : int
        The 64-bit seed as a signed integer, as torch and Triton accept it.
    feature_offset : int
        The law's index of column 0, nonnegative.
    """

    n_features: int
    n_components: int
    nnz: int
    stacks: int
    lane_bits: int
    threshold: int
    seed: int
    feature_offset: int

    @property
    def is_iid(self) -> bool:
        """Whether the entries are independent (the iid law) rather than exactly nnz per column."""
        return self.nnz == 0

    @property
    def lanes(self) -> Lanes:
        """The parameters of the iid law."""
        return Lanes(self.lane_bits, self.threshold)

    @property
    def entries_per_column(self) -> float:
        """Nonzeros per column; their expected number under the iid law."""
        return self.nnz or self.n_components * self.lanes.density

    def one_stack(self) -> SketchSpec:
        """The description with n_components and nnz of a single stack; `stacks` does not change."""
        return self._replace(n_components=self.n_components // self.stacks, nnz=self.nnz // self.stacks)

    def stack_rows(self, stack: int) -> slice:
        """The rows that belong to a stack, 0 <= stack < stacks."""
        rows = self.n_components // self.stacks
        return slice(stack * rows, (stack + 1) * rows)

    def columns(self, start: int, stop: int) -> SketchSpec:
        """The description of columns `start` to `stop` - 1, with 0 <= start <= stop <= n_features."""
        return self._replace(n_features=stop - start, feature_offset=self.feature_offset + start)
