"""User code with SciPy's sparse matrices, whose types pyright infers from SciPy's sources. mypy needs scipy-stubs."""

from typing import Any, assert_type

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

import sjlt

S = sjlt.Sketch(1000, 128)


def products(array: sp.csr_array, matrix: sp.csr_matrix) -> None:
    assert_type(S.project(array), NDArray[Any])
    assert_type(S.project(array, dense_output=False), sp.csr_array)
    assert_type(S.project(matrix, dense_output=False), sp.csr_matrix)
    assert_type(S.project(array, out=np.empty((3, 128))), NDArray[np.float64])
