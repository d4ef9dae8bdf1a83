"""The cases of the CPU benchmark: data, and the methods to compare.

A method is a function of the case and its data. It prepares what a user would have available (a stored matrix, a
converted input) and returns the call to time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import sjlt

SEED = 0


@dataclass(frozen=True)
class Case:
    """A title for the table, a function that creates the data, the sketch's parameters, and the methods to compare."""

    title: str
    make: Callable[[], Any]
    n_components: int
    nnz: int
    methods: dict[str, Callable[[Case, Any], Callable[[], Any]]]
    axis: int = 1  # axis of the features in the data
    density: float | None = None  # independent entries of this density, instead of nnz


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(SEED).standard_normal(shape, dtype=np.float32)


def sparse_rows(n: int, d: int, per_row: int) -> Any:
    import scipy.sparse

    rng = np.random.default_rng(SEED)
    indices = np.sort(rng.integers(0, d // per_row, (n, per_row)) + np.arange(per_row) * (d // per_row), axis=1)
    data = rng.standard_normal(n * per_row, dtype=np.float32)
    indptr = np.arange(0, n * per_row + 1, per_row, dtype=np.int32)
    return scipy.sparse.csr_matrix((data, indices.ravel().astype(np.int32), indptr), shape=(n, d))


def sketch_of(case: Case, x: Any) -> sjlt.Sketch:
    entries: dict[str, Any] = {"density": case.density} if case.density else {"nnz": case.nnz}
    return sjlt.Sketch(x.shape[case.axis], case.n_components, seed=SEED, **entries)


# ------------------------------------------------------------------------------------- methods


def sjlt_project(case: Case, x: Any) -> Callable[[], Any]:
    return lambda: x @ sketch_of(case, x).T


def sjlt_multiply(case: Case, a: Any) -> Callable[[], Any]:
    return lambda: sketch_of(case, a) @ a


def sjlt_transformer(case: Case, x: Any) -> Callable[[], Any]:
    def run() -> Any:
        return sjlt.SparseRandomProjection(
            case.n_components, nnz=case.nnz, dense_output=True, random_state=SEED
        ).fit_transform(x)

    return run


def sklearn_fit_transform(case: Case, x: Any) -> Callable[[], Any]:
    from sklearn.random_projection import SparseRandomProjection

    density = case.density or case.nnz / case.n_components
    return lambda: SparseRandomProjection(
        case.n_components, density=density, dense_output=True, random_state=SEED
    ).fit_transform(x)


def torch_operands(case: Case, x: Any) -> tuple[Any, Any]:
    """X in fp32 and S' stored in bf16."""
    import torch

    torch.set_num_threads(sjlt.get_num_threads())
    stored = torch.from_numpy(sketch_of(case, x).toarray(np.float32)).bfloat16().T.contiguous()
    return torch.from_numpy(x), stored


def torch_bf16(case: Case, x: Any) -> Callable[[], Any]:
    left, right = torch_operands(case, x)
    left = left.bfloat16()
    return lambda: left @ right


def torch_bf16_from_fp32(case: Case, x: Any) -> Callable[[], Any]:
    left, right = torch_operands(case, x)
    return lambda: left.bfloat16() @ right


def scipy_stored(case: Case, a: Any) -> Callable[[], Any]:
    stored = sketch_of(case, a).to_scipy("csr", np.float32)
    return lambda: stored @ a


def memcpy(case: Case, x: Any) -> Callable[[], Any]:
    target = np.empty_like(x)
    return lambda: np.copyto(target, x)


CASES = {
    "embeddings": Case(
        "X (20000, 768) fp32 → 256, nnz 8",
        lambda: normal(20_000, 768),
        256,
        8,
        {
            "sjlt": sjlt_project,
            "sjlt transformer, fit+transform": sjlt_transformer,
            "scikit-learn fit+transform": sklearn_fit_transform,
            "torch bf16 GEMM, stored S, bf16 X": torch_bf16,
            "torch bf16 GEMM, stored S, fp32 X": torch_bf16_from_fp32,
            "memcpy of X, one thread": memcpy,
        },
    ),
    "iid": Case(
        "X (20000, 768) fp32 → 256, independent entries, density 1/3",
        lambda: normal(20_000, 768),
        256,
        0,
        {
            "sjlt": sjlt_project,
            "scikit-learn fit+transform": sklearn_fit_transform,
            "torch bf16 GEMM, stored S, bf16 X": torch_bf16,
            "memcpy of X, one thread": memcpy,
        },
        density=1 / 3,
    ),
    "wide": Case(
        "X (2000, 100000) fp32 → 1024, nnz 8",
        lambda: normal(2_000, 100_000),
        1024,
        8,
        {
            "sjlt": sjlt_project,
            "scikit-learn fit+transform": sklearn_fit_transform,
            "memcpy of X, one thread": memcpy,
        },
    ),
    "sparse": Case(
        "CSR (20000, 100000), 100 a row → 1024 dense, nnz 8",
        lambda: sparse_rows(20_000, 100_000, 100),
        1024,
        8,
        {"sjlt": sjlt_project, "scikit-learn fit+transform": sklearn_fit_transform},
    ),
    "sketch": Case(
        "S A, A (200000, 256) fp32 C-order, k=1024, nnz 4",
        lambda: normal(200_000, 256),
        1024,
        4,
        {
            "sjlt": sjlt_multiply,
            "scipy CSR S (stored) @ A": scipy_stored,
            "memcpy of A, one thread": memcpy,
        },
        axis=0,
    ),
}
