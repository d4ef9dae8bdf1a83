"""Least squares, QR and low-rank approximation from sketches, as accurate as the classical methods."""

from .factor import leverage_scores, qr
from .least_squares import LstsqResult, lstsq
from .low_rank import SVDSketch, svd_lowrank

__all__ = ["LstsqResult", "SVDSketch", "leverage_scores", "lstsq", "qr", "svd_lowrank"]
