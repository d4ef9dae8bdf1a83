"""Sketches as vector transforms of faiss."""

from __future__ import annotations

from typing import Any

import numpy as np

from .sketch import Sketch

MAX_DIMENSION = 2**31 - 1  # faiss counts in int


def transform(sketch: Sketch) -> Any:
    """A `faiss.LinearTransform` that projects as the sketch does.

    It can precede any index (``faiss.IndexPreTransform``). faiss saves and loads both without sjlt.

    Parameters
    ----------
    sketch : Sketch
        Its dense matrix, n_features * n_components float32, is stored in the transform.

    Returns
    -------
    faiss.LinearTransform
        From n_features to n_components dimensions, trained.

    Raises
    ------
    TypeError
        For anything but a Sketch.
    ImportError
        Without faiss, which ``sjlt-triton[faiss]`` installs.
    ValueError
        For n_features above 2^31 - 1.

    Examples
    --------
    >>> import numpy as np, sjlt, sjlt.faiss
    >>> S = sjlt.Sketch(768, 64)
    >>> x = np.random.default_rng(0).normal(size=(10, 768)).astype(np.float32)
    >>> bool(np.allclose(sjlt.faiss.transform(S).apply(x), S.project(x), atol=1e-4))  # doctest: +SKIP
    True
    """
    if not isinstance(sketch, Sketch):
        raise TypeError(f"expected a Sketch, got {type(sketch).__name__}")
    try:
        import faiss
    except ImportError as e:
        raise ImportError("transforms of faiss need faiss: pip install 'sjlt-triton[faiss]'") from e
    if sketch.n_features > MAX_DIMENSION:
        raise ValueError(f"faiss accepts at most {MAX_DIMENSION} dimensions, got n_features = {sketch.n_features}")
    made = faiss.LinearTransform(sketch.n_features, sketch.n_components, False)
    faiss.copy_array_to_vector(sketch.toarray(np.float32).ravel(), made.A)
    made.is_trained = True
    return made
