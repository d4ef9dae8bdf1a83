"""Projectors for libraries that trace a model's behaviour to its training data: TRAK (`traker`) and `dattri`.

>>> from sjlt.attribution import TrakProjector
>>> projector = TrakProjector(grad_dim=11_689_512, proj_dim=2048, seed=0, device="cpu")
>>> projector.proj_type
'sjlt law 1, nnz 4, seed 0'
"""

from __future__ import annotations

from .projectors import DattriProjector, TrakProjector, dattri_projections

__all__ = ["DattriProjector", "TrakProjector", "dattri_projections"]
