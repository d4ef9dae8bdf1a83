"""The gradient of a least-squares problem, in a single read of A.

For (40000, 1500) in float64 on 2 cores of a Xeon it takes 20 ms, which is the memory bandwidth of 23 GB/s. Two BLAS
products, block by block, take 31 to 48 ms, and several times as long if other processes keep the BLAS threads waiting.
"""

from __future__ import annotations

import numpy as np

from .. import threads
from . import products

TASK_BYTES = 2 << 20  # of A per task, whatever the number of threads
MIN_COLUMNS = 100  # with fewer, BLAS is as fast


def residual_gradient(A: np.ndarray, X: np.ndarray, B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return A'(B - A X) and the squared column norms of B - A X, in float64, whatever the number of threads."""
    if not is_compiled_for(A, X.shape[1]):
        return products.residual_gradient(A.astype(np.float64, copy=False), X, B)

    from ..backends.cpu.jit import compiled
    from .residual_kernels import ROWS, add_gradient  # Numba is slow to import

    m, n = A.shape
    rows = max(ROWS, TASK_BYTES // (A.itemsize * n) // ROWS * ROWS)
    starts = range(0, m, rows)
    gradients, squares = np.zeros((len(starts), n)), np.zeros(len(starts))
    add, x, b = compiled(add_gradient, data=A.dtype), X[:, 0], B[:, 0]

    def task(i: int) -> None:
        part = slice(starts[i], starts[i] + rows)
        squares[i] = add(A[part], x, b[part], gradients[i])

    threads.run(task, [(i,) for i in range(len(starts))], threads.get_num_threads())
    return gradients.sum(0)[:, None], squares.sum(keepdims=True)


def normal_product(A: np.ndarray, Z: np.ndarray) -> np.ndarray:
    """Return A' A Z in float64, whatever the number of threads."""
    if not is_compiled_for(A, Z.shape[1]):
        return products.normal_product(A.astype(np.float64, copy=False), Z)
    return -residual_gradient(A, Z, np.zeros((A.shape[0], 1)))[0]


def is_compiled_for(A: np.ndarray, columns: int) -> bool:
    """Whether the compiled kernel can read A, and is faster than BLAS for this number of right-hand sides."""
    is_plain = A.dtype.isnative and A.flags.c_contiguous and A.flags.aligned
    return columns == 1 and is_plain and A.shape[1] >= MIN_COLUMNS
