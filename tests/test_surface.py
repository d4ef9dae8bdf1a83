"""Names, refused implicit conversions, and messages that tell new users what to do instead."""

import copy
import subprocess
import sys

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse as sp
import torch

import sjlt
from sjlt import Sketch

S = Sketch(4, 3, nnz=2, seed=1)


# --------------------------------------------------------------------------------- names


def test_dir_has_public_names_only():
    names = [name for name in dir(sjlt) if not name.startswith("__")]
    assert names == sorted(sjlt.__all__)
    assert all(hasattr(sjlt, name) for name in names)


@pytest.mark.exhaustive
def test_layers_are_loaded_on_first_access():
    code = """
import sys, sjlt
assert "torch" not in sys.modules
assert sjlt.nn.SparseProjection is sys.modules["sjlt.nn"].SparseProjection
assert "torch" in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_unknown_names():
    with pytest.raises(AttributeError, match="module 'sjlt' has no attribute 'Scetch'"):
        sjlt.Scetch  # noqa: B018


# --------------------------------------------------------------------------------- implicit conversions

FRAME = pd.DataFrame(np.ones((2, 4)))


@pytest.mark.parametrize("operator", [S, S.T], ids=["S", "S.T"])
@pytest.mark.parametrize(
    "convert",
    [
        np.asarray,
        np.array,
        lambda operator: np.asarray(operator, np.float32),
        lambda operator: np.linalg.norm(operator),
        lambda operator: sp.vstack([operator, operator]),
        lambda operator: FRAME @ operator,
        lambda operator: sp.csr_array(np.eye(4)).multiply(operator),
    ],
    ids=["asarray", "array", "dtype", "norm", "vstack", "frame", "multiply"],
)
def test_implicit_conversions_are_refused(operator, convert):
    with pytest.raises(TypeError, match=r"S\.toarray\(\).*S\.project\(df\)"):
        convert(operator)


def test_products_delegated_by_scipy():
    x = np.arange(8.0).reshape(2, 4)
    for kind in (sp.csr_array, sp.csc_matrix, sp.coo_array):
        if kind is not sp.coo_array:
            np.testing.assert_array_equal(kind(x) @ S.T, x @ S.T)
            np.testing.assert_array_equal(kind(x).dot(S.T), x @ S.T)
        else:
            with pytest.raises(TypeError, match="CSR or CSC, got COO"):
                kind(x) @ S.T


@pytest.mark.parametrize("library", [pd, pl], ids=["pandas", "polars"])
def test_data_frames(library):
    x = np.arange(8.0).reshape(2, 4)
    frame = library.DataFrame(dict(zip("abcd", x.T, strict=True)))
    np.testing.assert_array_equal(S.project(frame), x @ S.T)
    np.testing.assert_array_equal(S.T.rmatmat(x.T), (S.project(frame)).T)


# --------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("x", [None, "abc", {"a": 1}], ids=["None", "str", "dict"])
def test_no_data(x):
    for function in (S.project, S.project_adjoint, S.__matmul__, S.T.__matmul__):
        with pytest.raises(TypeError, match=f"got {x!r} of type {type(x).__name__}|dtype <U3"):
            function(x)
    with pytest.raises(TypeError, match=f"got {x!r} of type {type(x).__name__}|got <U3"):
        sjlt.dropout(x, 0.5, 1)


@pytest.mark.parametrize(
    ("column", "dtype"),
    [
        (["x", "y"], "str|object"),
        ([1 + 2j, 3j], "complex128"),
        (pd.to_datetime(["2020-01-01", "2021-01-01"]), "datetime64"),
        ([None, object()], "object"),
        (pd.Categorical(["u", "v"]), "category"),
    ],
    ids=["strings", "complex", "dates", "objects", "categories"],
)
def test_frames_of_mixed_columns(column, dtype):
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [1, 2], "name": column, "d": [0.5, 0.5]})
    with pytest.raises(TypeError, match=f"column 'name' has dtype .*({dtype})"):
        S.project(frame)


@pytest.mark.parametrize("dtype", ["Float64", "Float32", "Int64", "boolean"])
def test_frames_of_nullable_dtypes(dtype):
    """pandas converts frames of them to objects, but columns to numbers."""
    plain = pd.DataFrame({name: [1, 0, 1] for name in "abcd"})
    frame = plain.astype(dtype)
    expected = S.project(plain.to_numpy(dtype.lower().replace("boolean", "bool")))
    result = S.project(frame)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result, expected)
    same_names = frame.set_axis(["a"] * 4, axis=1)
    np.testing.assert_array_equal(S.project(same_names), expected)
    with pytest.raises(TypeError, match="column 'a' has dtype"):
        S.project(same_names.assign(b="text").set_axis(["a"] * 5, axis=1))
    frame.loc[1, "c"] = pd.NA
    if dtype == "boolean":
        with pytest.raises(TypeError, match="column 'c' has dtype boolean"):
            S.project(frame)
    else:
        assert np.isnan(S.project(frame)[1]).any()
        np.testing.assert_array_equal(S.project(frame)[[0, 2]], expected[[0, 2]])


def test_polars_frames_of_mixed_columns():
    with pytest.raises(TypeError, match="column 'name' has dtype String"):
        S.project(pl.DataFrame({"a": [1.0], "b": [1], "name": ["x"], "d": [0.5]}))


def test_nnz_as_a_string():
    with pytest.raises(TypeError, match="nnz must be an integer or \"auto\", got 'int8'"):
        Sketch(4, 3, nnz="int8")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x @ S.T,
        lambda x: S @ x.T,
        lambda x: S.project(x),
        lambda x: torch.matmul(x, S.T),
        lambda x: sjlt.dropout(x, 0.5, 1),
        sjlt.nn.SparseProjection(4, 3, nnz=2, seed=1),
    ],
    ids=["@", "S @", "project", "matmul", "dropout", "layer"],
)
def test_symbolic_tracing(function):
    with pytest.raises(
        TypeError, match=r"torch\.fx\.symbolic_trace.*torch\.export\.export, torch\.compile or.*make_fx"
    ):
        torch.fx.symbolic_trace(function)


def test_alternatives_to_symbolic_tracing():
    x = torch.arange(8.0).reshape(2, 4)
    layer = sjlt.nn.SparseProjection(4, 3, nnz=2, seed=1)
    expected = layer(x)
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), expected)
    assert torch.equal(torch.fx.experimental.proxy_tensor.make_fx(layer)(x)(x), expected)


# --------------------------------------------------------------------------------- descriptions

INDEPENDENT = Sketch(40, 12, density=0.3, seed=5)[:, 3:20]


def test_descriptions_carry_the_density():
    description = INDEPENDENT.to_dict()
    assert description["density"] == INDEPENDENT.density
    assert Sketch.from_dict(description) == INDEPENDENT
    without = {k: v for k, v in description.items() if k != "density"}
    assert Sketch.from_dict(without) == INDEPENDENT
    with pytest.raises(ValueError, match=r"density 0\.25 contradicts"):
        Sketch.from_dict({**description, "density": 0.25})


@pytest.mark.parametrize(
    ("description", "error", "message"),
    [
        ({}, ValueError, 'must have the key "law", got no keys'),
        (None, TypeError, "a dict from Sketch.to_dict.*got None"),
        ([("law", 1)], TypeError, "a dict from Sketch.to_dict"),
        ({"law": 1}, ValueError, "lacks the keys 'feature_offset', 'n_components', 'n_features', 'nnz', 'seed'"),
        ({"law": True}, ValueError, "the description has True"),
        ({**S.to_dict(), "density": 0.5}, ValueError, "also has the key 'density'"),
        ({**S.to_dict(), "nnz": "auto"}, TypeError, "nnz must be an integer, got 'auto'"),
        ({**INDEPENDENT.to_dict(), "threshold": 38.0}, TypeError, "threshold must be an integer, got 38.0"),
        ({**INDEPENDENT.to_dict(), "bits": True}, TypeError, "bits must be an integer, got the bool True"),
        ({**INDEPENDENT.to_dict(), "threshold": 0}, ValueError, "bits = 8 with threshold = 0"),
        ({**INDEPENDENT.to_dict(), "nnz": 4}, ValueError, "also has the keys 'bits', 'density', 'threshold'"),
    ],
)
def test_invalid_descriptions(description, error, message):
    with pytest.raises(error, match=message):
        Sketch.from_dict(description)


# --------------------------------------------------------------------------------- shared memory, indices, bits


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex64", "bool"])
@pytest.mark.parametrize("part", ["indices", "indptr"])
def test_non_integer_indices(dtype, part):
    x = sp.csr_array(np.eye(4))
    setattr(x, part, getattr(x, part).astype(dtype))
    for product in (lambda: S.project(x), lambda: S.project(x, dense_output=False), lambda: Sketch(4, 3) @ x):
        with pytest.raises(TypeError, match=f"malformed CSR: {part} must be integers, got {dtype}"):
            product()


@pytest.mark.parametrize("kind", [sp.csr_array, sp.csc_array])
def test_out_overlapping_sparse_arrays(kind):
    dense = np.ones((6, 4))
    for part in ("data", "indices", "indptr"):
        x = kind(dense)
        memory = np.zeros(64)
        size = getattr(x, part).size
        values = memory.view(getattr(x, part).dtype)[:size]
        values[...] = getattr(x, part)
        setattr(x, part, values)
        before = memory.copy()
        with pytest.raises(ValueError, match="shares memory"):
            S.project(x, out=memory[:18].reshape(6, 3))
        with pytest.raises(ValueError, match="shares memory"):
            Sketch(5, 4, nnz=2).project_adjoint(x, out=memory[:30].reshape(6, 5))
        np.testing.assert_array_equal(memory, before)
        np.testing.assert_array_equal(S.project(x, out=memory[40:58].reshape(6, 3)), dense @ S.T)


def aliased(name):
    """x in fp64 whose first elements are reinterpreted as an array of seeds, or as one step."""
    x = np.ones((5, 4))
    alias = x.reshape(-1).view(np.int64)[:5]
    alias[...] = np.arange(5)
    return x, {"seed": alias, "step": 0} if name == "seed" else {"seed": 1, "step": alias[:1]}


@pytest.mark.parametrize("container", ["numpy", "torch"])
@pytest.mark.parametrize("name", ["seed", "step"])
def test_seeds_sharing_memory_with_in_place_dropout(name, container):
    x, options = aliased(name)
    if container == "torch":
        options = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    given = torch.from_numpy(x) if container == "torch" else x
    before = x.copy()
    with pytest.raises(ValueError, match="seed or step shares memory with x"):
        sjlt.dropout(given, 0.5, **options, inplace=True)
    assert x.tobytes() == before.tobytes()
    copied = {k: copy.deepcopy(v) for k, v in options.items()}
    expected = sjlt.dropout(given, 0.5, **copied)
    result = sjlt.dropout(given, 0.5, **copied, inplace=True)
    assert np.asarray(result).tobytes() == np.asarray(expected).tobytes()


def test_integer_types_of_bits():
    x = np.ones(64)
    for bits in (np.int64(16), np.uint8(8), np.int32(32)):
        np.testing.assert_array_equal(sjlt.dropout(x, 0.5, 1, bits=bits), sjlt.dropout(x, 0.5, 1, bits=int(bits)))
        t = torch.ones(64)
        assert torch.equal(sjlt.dropout(t, 0.5, 1, bits=bits), sjlt.dropout(t, 0.5, 1, bits=int(bits)))
        assert type(sjlt.nn.SeededDropout(0.5, bits=bits).bits) is int
    for bits in (True, 16.0, np.float64(16), "16", 12, np.int64(12)):
        with pytest.raises(ValueError, match="bits must be 8, 16 or 32"):
            sjlt.dropout(x, 0.5, 1, bits=bits)
