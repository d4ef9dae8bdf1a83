"""Sparse Johnson-Lindenstrauss transforms that are never stored: their entries are regenerated from a seed on each use.

>>> import numpy as np, sjlt
>>> S = sjlt.Sketch(n_features=1000, n_components=128, seed=7)
>>> X = np.ones((5, 1000), np.float32)  # or a torch tensor, or a SciPy sparse matrix
>>> Y = X @ S.T  # projected rows, the same as S.project(X)
>>> Y.shape, (Y @ S).shape  # the adjoint
((5, 128), (5, 1000))

`sjlt.project` does both steps in one call, `sjlt.SparseRandomProjection` is a scikit-learn transformer, `sjlt.nn` has
torch layers, `sjlt.dropout` is dropout without a stored mask, and ``python -m sjlt`` projects files.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import arrow as arrow
    from . import attribution as attribution
    from . import faiss as faiss
    from . import linalg as linalg
    from . import nn as nn
    from . import onnx as onnx
    from . import plans as plans
    from . import sentence_transformers as sentence_transformers
    from .accumulator import Accumulator as Accumulator
    from .count_sketch import CountSketch as CountSketch
    from .estimator import SparseRandomProjection as SparseRandomProjection
    from .evaluation.quality import quality as quality
    from .int8 import load_int8 as load_int8
    from .nn.stored import SJLTProjection as SJLTProjection
    from .nn.stored import get_cuda_info as get_cuda_info
    from .plans import plan as plan
    from .seeded_dropout import dropout as dropout
    from .seeded_dropout import dropout_add as dropout_add
    from .seeded_dropout import dropout_mask as dropout_mask
    from .seeded_dropout import masked_dropout as masked_dropout
    from .sketch import Sketch as Sketch
    from .sketch import project as project
    from .threads import get_num_threads as get_num_threads
    from .threads import set_num_threads as set_num_threads

__version__ = "0.2.0"

# The module of each public name, imported on first access (PEP 562): importing scikit-learn alone takes most of a
# second. No module may have the name of a function, which it would replace when imported.
_EXPORTS = {
    "Accumulator": "accumulator",
    "CountSketch": "count_sketch",
    "Sketch": "sketch",
    "project": "sketch",
    "SparseRandomProjection": "estimator",
    "dropout": "seeded_dropout",
    "dropout_add": "seeded_dropout",
    "dropout_mask": "seeded_dropout",
    "masked_dropout": "seeded_dropout",
    "load_int8": "int8",
    "SJLTProjection": "nn.stored",
    "get_cuda_info": "nn.stored",
    "plan": "plans",
    "quality": "evaluation.quality",
    "get_num_threads": "threads",
    "set_num_threads": "threads",
}

# Submodules imported when they are first accessed as an attribute, such as ``sjlt.nn``.
_MODULES = ("arrow", "attribution", "faiss", "linalg", "nn", "onnx", "plans", "sentence_transformers")

__all__ = [
    "Accumulator",
    "CountSketch",
    "SJLTProjection",
    "Sketch",
    "SparseRandomProjection",
    "dropout",
    "dropout_add",
    "dropout_mask",
    "get_num_threads",
    "linalg",
    "load_int8",
    "masked_dropout",
    "nn",
    "plan",
    "project",
    "quality",
    "set_num_threads",
]


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f".{name}", __name__)
        if name not in _EXPORTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__version__"])
