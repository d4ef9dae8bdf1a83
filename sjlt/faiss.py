"""Export sketches as vector transforms of faiss."""

from __future__ import annotations

from typing import Any

import numpy as np

from .sketch import Sketch

MAX_DIMENSION = 2**31 - 1  # faiss stores dimensions as int


def transform(sketch: Sketch) -> Any:
    """Make a `faiss.LinearTransform` that applies the same projection as the sketch.

    It can precede any index (``faiss.IndexPreTransform``). faiss can save and load both without sjlt.

    Parameters
    ----------
    sketch : Sketch
        It is stored in the transform as a dense matrix of n_features * n_components float32.

    Returns
    -------
    faiss.LinearTransform
        Trained, from n_features to n_components dimensions.

    Raises
    ------
    TypeError
        If `sketch` is not a Sketch.
    ImportError
        If faiss is missing: install ``sjlt-triton[faiss]``.
    ValueError
        If n_features exceeds 2^31 - 1.

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
        raise ImportError("sjlt.faiss needs faiss: pip install 'sjlt-triton[faiss]'") from e
    if sketch.n_features > MAX_DIMENSION:
        raise ValueError(f"faiss accepts at most {MAX_DIMENSION} dimensions, got n_features = {sketch.n_features}")
    linear = faiss.LinearTransform(sketch.n_features, sketch.n_components, False)
    faiss.copy_array_to_vector(sketch.toarray(np.float32).ravel(), linear.A)
    linear.is_trained = True
    return linear
