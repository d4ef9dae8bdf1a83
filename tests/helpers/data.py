"""Integer-valued data, for which every order of summation gives the same floats, and its exact results."""

import ctypes
import math
import mmap

import numpy as np

FLOATS = ("float16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *INTEGERS, "bool")


def integers(shape, dtype="float32", seed=0):
    """Small integers of the dtype, chosen such that sums are also exact in fp16."""
    values = np.random.default_rng(seed).integers(-3, 4, shape)
    return (np.abs(values) if np.dtype(dtype).kind in "ub" else values).astype(dtype)


def result_dtype(x):
    """The dtype of results for x: fp16, fp32 and fp64 are kept, integers and bool become fp64."""
    return np.dtype(x.dtype.newbyteorder("=") if x.dtype.kind == "f" else np.float64)


def rounds_to_itself(exact, dtype):
    """`exact` in the dtype, which must represent it exactly, as the comparison would otherwise not be exact."""
    rounded = np.asarray(exact).astype(dtype)
    assert np.array_equal(rounded.astype(np.float64), exact), "choose data that the dtype holds exactly"
    return rounded


def exact_project(S, x, dtype=None):
    """x S' along the last axis, by SciPy in fp64; exact for integer x and nnz 1, 4, 16 or 64."""
    rows = np.asarray(x).astype(np.float64).reshape(math.prod(x.shape[:-1]), S.n_features)
    exact = (S.to_scipy() @ rows.T).T.reshape(*x.shape[:-1], S.n_components)
    return rounds_to_itself(exact, dtype or result_dtype(x))


def exact_adjoint(S, y, dtype=None):
    """y S along the last axis, with the same method."""
    rows = np.asarray(y).astype(np.float64).reshape(math.prod(y.shape[:-1]), S.n_components)
    exact = (S.to_scipy().T @ rows.T).T.reshape(*y.shape[:-1], S.n_features)
    return rounds_to_itself(exact, dtype or result_dtype(y))


def poisoned(shape, dtype):
    """An output filled with NaN, so that unwritten elements are detected."""
    return np.full(shape, np.nan, dtype)


def same(actual, expected):
    """Assert equal dtype, shape and values (NaNs are equal; signs of zeros are ignored)."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(actual, expected)


def before_protected_page(shape, dtype):
    """Zeros that end where a protected page begins: reading beyond them ends the process."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, length + mmap.PAGESIZE)
    guard = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + length
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(guard, mmap.PAGESIZE, 0) == 0
    return np.frombuffer(memory, dtype, math.prod(shape), length - size).reshape(shape)


def sliced(data, slices):
    """All or some columns of a row-major matrix."""
    if slices == "part":
        return data[::3, 5:-8]
    if slices == "backwards":
        return data[::-1]
    return np.broadcast_to(data[:1], data.shape) if slices == "repeated" else data
