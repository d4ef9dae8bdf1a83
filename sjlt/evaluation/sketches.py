"""The sketches and transformers that `sjlt.quality` compares: defaults, names and seeds."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from ..inputs.containers import is_sparse
from ..laws.exact import max_nnz
from ..sketch import Sketch


def standard_sketches(n_features: int, n_components: int) -> list[tuple[str, Any]]:
    """All laws, with names: exact nnz of 1, 2, 4 and 8, 4 stacks of nnz 1, independent entries, and scikit-learn's."""
    from sklearn.random_projection import SparseRandomProjection

    k = Sketch(n_features, n_components).n_components  # checks the arguments
    exact = [nnz for nnz in (1, 2, 4, 8) if nnz <= max_nnz(k)]
    stacked = [("4 stacks", Sketch(n_features, k, nnz=4, stacks=4))] if k % 4 == 0 else []
    densities: dict[str, Any] = {"iid auto": "auto", "iid 1/3": 1 / 3, "Rademacher": 1}
    return [
        *((f"nnz {nnz}", Sketch(n_features, k, nnz=nnz)) for nnz in exact),
        *stacked,
        *((name, Sketch(n_features, k, density=density)) for name, density in densities.items()),
        ("scikit-learn", SparseRandomProjection(k, dense_output=True)),
    ]


def named(sketch: Any, n_features: int) -> tuple[str, Any]:
    """Check one element of the list of sketches; return its name and the sketch or transformer."""
    name, item = sketch if isinstance(sketch, tuple) and len(sketch) == 2 else (None, sketch)
    if isinstance(item, Sketch):
        if item.n_features != n_features:
            raise ValueError(f"{item!r} projects {item.n_features} features, X has {n_features}")
    elif not hasattr(item, "fit_transform") or "random_state" not in item.get_params():
        raise TypeError(
            "sketches must be sjlt.Sketch objects or scikit-learn transformers with a random_state, alone or as "
            f"(name, sketch), got {sketch!r}" + (": see n_components" if isinstance(sketch, int) else "")
        )
    return (_name(item) if name is None else str(name)), item


def _name(item: Any) -> str:
    if not isinstance(item, Sketch):
        return type(item).__name__
    if item.is_iid:
        return f"density {item.density:.3g}"
    return f"nnz {item.nnz}" + (f", stacks {item.stacks}" if item.stacks > 1 else "")


def projected(item: Any, X: Any, number: int) -> np.ndarray:
    """Project X by a sketch or transformer whose seed is increased by `number`."""
    if isinstance(item, Sketch):
        reseeded = Sketch.from_dict({**item.to_dict(), "seed": (item.seed + number) % 2**64})
        return np.asarray(reseeded.project(X))
    from sklearn.base import clone

    own = item.get_params()["random_state"]
    transformer = clone(item).set_params(random_state=(own if isinstance(own, int | np.integer) else 0) + number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about more components than features
        Y = transformer.fit_transform(X)
    return np.asarray(Y.toarray() if is_sparse(Y) else Y)
