"""Export sketches as modules of sentence-transformers."""

from __future__ import annotations

from typing import Any

import numpy as np

from .sketch import Sketch


def dense(sketch: Sketch) -> Any:
    """Make a `Dense` module of sentence-transformers that applies the same projection as the sketch.

    Append it to a model: ``model.append(sjlt.sentence_transformers.dense(S))``. sentence-transformers can save and
    load the model without sjlt.

    Parameters
    ----------
    sketch : Sketch
        Its n_features must be the length of the model's embeddings. It is stored in the module as a dense matrix of
        n_features * n_components float32.

    Returns
    -------
    sentence_transformers.sentence_transformer.modules.Dense
        Without bias and activation; its weight does not require a gradient.

    Raises
    ------
    TypeError
        If `sketch` is not a Sketch.
    ImportError
        If sentence-transformers is missing: install ``sjlt-triton[sentence-transformers]``.

    Examples
    --------
    >>> import sjlt, sjlt.sentence_transformers
    >>> S = sjlt.Sketch(768, 64)
    >>> sjlt.sentence_transformers.dense(S).get_sentence_embedding_dimension()  # doctest: +SKIP
    64
    """
    if not isinstance(sketch, Sketch):
        raise TypeError(f"expected a Sketch, got {type(sketch).__name__}")
    import torch

    try:
        from sentence_transformers.sentence_transformer.modules import Dense
    except ImportError:
        try:  # before version 6
            from sentence_transformers.models import Dense  # type: ignore[no-redef]
        except ImportError as e:
            extra = "pip install 'sjlt-triton[sentence-transformers]'"
            raise ImportError(f"sjlt.sentence_transformers needs sentence-transformers: {extra}") from e
    module = Dense(
        sketch.n_features,
        sketch.n_components,
        bias=False,
        activation_function=torch.nn.Identity(),
        init_weight=torch.from_numpy(sketch.toarray(np.float32)),
    )
    module.linear.weight.requires_grad_(False)
    return module
