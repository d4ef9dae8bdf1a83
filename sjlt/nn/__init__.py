"""torch layers without parameters: projection and seeded dropout."""

from .dropout import SeededDropout as SeededDropout
from .projection import SparseProjection as SparseProjection
from .projection import SparseProjectionAdjoint as SparseProjectionAdjoint

__all__ = ["SeededDropout", "SparseProjection", "SparseProjectionAdjoint"]
