"""User code checked by mypy --strict and pyright for the types of results. It is never run."""

# pyright: strict

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import numpy as np
import torch
from numpy.typing import NDArray

import sjlt
from sjlt import Sketch
from sjlt.nn import SeededDropout, SparseProjection

S = Sketch(1000, 128, nnz="auto", seed=7)
assert_type(S, Sketch)
assert_type(Sketch(1000, 128, nnz=4, seed=7).nnz, int | None)
assert_type(Sketch(1000, 128, density=0.1).density, float | None)
Sketch(1000, 128, density="auto")

x: NDArray[np.float32] = np.ones((5, 1000), np.float32)
integers: NDArray[np.int64] = np.ones((5, 1000), np.int64)
t = torch.ones(5, 1000)

# Products with arrays.
assert_type(x @ S.T, NDArray[np.float32])
assert_type(S @ x.T, NDArray[np.float32])
assert_type(S.project(x), NDArray[np.float32])
assert_type(S.project(integers), NDArray[Any])
assert_type(S.project([[1.0] * 1000]), NDArray[Any])
assert_type(S.project(x, out=np.empty((5, 128))), NDArray[np.float64])
assert_type(S.project_adjoint(S.project(x)), NDArray[np.float32])
assert_type(S.project(x) @ S, NDArray[np.float32])
assert_type(S.T @ (S @ x.T), NDArray[np.float32])
assert_type(sjlt.project(x, 64, seed=1), NDArray[Any])
assert_type(S[:, 3:9].toarray(np.float32), NDArray[Any])

# Products with tensors.
assert_type(t @ S.T, torch.Tensor)
assert_type(S @ t.T, torch.Tensor)
assert_type(S.project(t), torch.Tensor)
assert_type(S.project(t, out=torch.empty(5, 128)), torch.Tensor)
assert_type(S.project_adjoint(S.project(t)), torch.Tensor)
assert_type(sjlt.project(t, 64, nnz=4), torch.Tensor)
assert_type(S.project_tree({"weight": t}), torch.Tensor)

# Tables and modules that are loaded lazily.
tables = sjlt.CountSketch(1000, 3, 64)
assert_type(tables.sketch(x.ravel()), NDArray[Any])
assert_type(tables.sketch(t.ravel()), torch.Tensor)
assert_type(tables.query(tables.sketch(t.ravel()), [3, 5]), torch.Tensor)
assert_type(tables.topk(tables.sketch(x.ravel()), 3), tuple[NDArray[Any], NDArray[Any]])
assert_type(sjlt.plans.committed_parts("folder"), list[Path])
modules = sjlt.arrow, sjlt.attribution, sjlt.faiss, sjlt.linalg, sjlt.onnx, sjlt.sentence_transformers

# Dropout.
assert_type(sjlt.dropout(x, 0.1, 3), NDArray[Any])
assert_type(sjlt.dropout(t, 0.1, 3, step=2, inplace=True), torch.Tensor)
assert_type(sjlt.dropout_add(t, t, 0.1, 3), torch.Tensor)
assert_type(sjlt.masked_dropout(t, t > 0, 0.1), torch.Tensor)
assert_type(sjlt.dropout_mask((3, 4), 0.1, 3), NDArray[np.bool_])
assert_type(sjlt.dropout_mask((3, 4), 0.1, 3, device="cpu"), torch.Tensor)

# Descriptions, entries, layers.
assert_type(S.to_dict(), dict[str, Any])
assert_type(Sketch.from_dict(S.to_dict()), Sketch)
rows, signs = S.entries(0, 3)
assert_type(rows, NDArray[np.int64])
assert_type(signs, NDArray[np.int8])
assert_type(SparseProjection(1000, 128, nnz=4, seed=7).T.sketch, Sketch)
SeededDropout(0.1, seed=3)
assert_type(sjlt.nn.SparseProjection(1000, 128, seed=7), SparseProjection)
