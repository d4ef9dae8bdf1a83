"""Layers whose state is a seed."""

from .projection import SparseProjection as SparseProjection
from .projection import SparseProjectionAdjoint as SparseProjectionAdjoint

__all__ = ["SparseProjection", "SparseProjectionAdjoint"]
