"""Sparse Johnson-Lindenstrauss transforms that are never stored: a seed regenerates them while they are applied."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .estimator import SparseRandomProjection as SparseRandomProjection
    from .evaluation.quality import quality as quality
    from .seeded_dropout import dropout as dropout
    from .seeded_dropout import dropout_add as dropout_add
    from .seeded_dropout import dropout_mask as dropout_mask
    from .seeded_dropout import masked_dropout as masked_dropout
    from .sketch import Sketch as Sketch
    from .sketch import project as project
    from .threads import get_num_threads as get_num_threads
    from .threads import set_num_threads as set_num_threads

__version__ = "0.1.0"

# Loaded when first asked for (PEP 562): scikit-learn alone takes most of a second to import.
_EXPORTS = {
    "Sketch": "sketch",
    "project": "sketch",
    "SparseRandomProjection": "estimator",
    "dropout": "seeded_dropout",  # no module has a function's name: loaded, it would take the function's place
    "dropout_add": "seeded_dropout",
    "dropout_mask": "seeded_dropout",
    "masked_dropout": "seeded_dropout",
    "quality": "evaluation.quality",
    "get_num_threads": "threads",
    "set_num_threads": "threads",
}

__all__ = [
    "Sketch",
    "SparseRandomProjection",
    "dropout",
    "dropout_add",
    "dropout_mask",
    "get_num_threads",
    "masked_dropout",
    "project",
    "quality",
    "set_num_threads",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
