"""Export sketches to ONNX as matrix products with a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .laws.spec import SketchSpec
from .sketch import Sketch

MAX_BYTES = 2**31  # of a constant: protobuf messages are limited to 2 GiB


def translations() -> dict[Any, Callable[..., Any]]:
    """Return the translation table with which `torch.onnx.export` can export models that contain sketches.

    Returns
    -------
    dict
        The argument `custom_translation_table`. Each product with a sketch, as in `sjlt.nn.SparseProjection` or
        ``x @ S.T``, becomes a MatMul with the dense matrix as a constant, so the exported model runs without sjlt.

    Raises
    ------
    ImportError
        If onnxscript is missing: install ``sjlt-triton[onnx]``.

    Notes
    -----
    The matrix has n_features * n_components entries, of float64 if the data is float64, otherwise of float32. The
    export fails if they take more than 2 GiB.

    Examples
    --------
    Export a model that ends with a projection::

        model = torch.nn.Sequential(torch.nn.Linear(384, 4096), sjlt.nn.SparseProjection(4096, 64, seed=0))
        torch.onnx.export(
            model.eval(), (torch.ones(1, 384),), "model.onnx", dynamo=True,
            custom_translation_table=sjlt.onnx.translations(),
        )
    """
    try:
        import onnxscript
    except ImportError as e:
        raise ImportError("exporting to ONNX needs onnx and onnxscript: pip install 'sjlt-triton[onnx]'") from e
    import torch

    from .torch_ops import projection  # noqa: F401  # defines the operators

    op: Any = onnxscript.opset18

    def translation(adjoint: bool) -> Callable[..., Any]:
        def translate(
            x: Any,
            n_features: int,
            n_components: int,
            nnz: int,
            stacks: int,
            lane_bits: int,
            threshold: int,
            seed: int,
            feature_offset: int,
            axis: int,
            dtype: int | None = None,
        ) -> Any:
            stored = np.dtype(np.float64 if x.dtype == onnxscript.ir.DataType.DOUBLE else np.float32)
            if n_features * n_components * stored.itemsize > MAX_BYTES:
                raise ValueError(
                    f"the matrix of a sketch of shape ({n_components}, {n_features}) has more than "
                    f"{MAX_BYTES // stored.itemsize} entries of {stored}: it cannot be a constant of an ONNX graph"
                )
            spec = SketchSpec(n_features, n_components, nnz, stacks, lane_bits, threshold, seed, feature_offset)
            matrix = sketch_of(spec).toarray(stored)
            operator = matrix if adjoint == (axis == -1) else np.ascontiguousarray(matrix.T)
            value = onnxscript.ir.tensor(operator)
            constant = op.CastLike(op.Constant(value=value), x)
            product = op.MatMul(x, constant) if axis == -1 else op.MatMul(constant, x)
            return product if dtype is None else op.Cast(product, to=dtype)

        return translate

    ops = torch.ops.sjlt
    return {ops.project.default: translation(False), ops.project_adjoint.default: translation(True)}


def sketch_of(spec: SketchSpec) -> Sketch:
    """The sketch that a specification describes."""
    return Sketch(
        spec.n_features,
        spec.n_components,
        nnz=None if spec.is_iid else spec.nnz,
        stacks=spec.stacks,
        density=spec.lanes.density if spec.is_iid else None,
        seed=spec.seed,
        feature_offset=spec.feature_offset,
    )
