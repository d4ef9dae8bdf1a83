"""Sparse Johnson-Lindenstrauss transforms that are never stored: a seed regenerates them while they are applied."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .estimator import SparseRandomProjection as SparseRandomProjection
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
    "get_num_threads": "threads",
    "set_num_threads": "threads",
}

__all__ = ["Sketch", "SparseRandomProjection", "get_num_threads", "project", "set_num_threads"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
