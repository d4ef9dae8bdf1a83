"""`sjlt.arrow.Projector`: equal to `Sketch.project`, other columns untouched, bad rows named in errors."""

import json
import pickle
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from helpers.cases import each_value, exhaustive_except

import sjlt
from sjlt.arrow import Projector

pa = pytest.importorskip("pyarrow")

N, D, K = 57, 40, 12


def vectors(n=N, d=D, dtype="float32", seed=0):
    return (np.random.default_rng(seed).normal(size=(n, d)) * 50).astype(dtype)


def as_lists(x, kind):
    values = pa.array(x.reshape(-1))
    offsets = np.arange(len(x) + 1) * x.shape[1]
    if kind == "fixed":
        return pa.FixedSizeListArray.from_arrays(values, x.shape[1])
    if kind == "list":
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)


def matrix_of(column):
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    width = column.type.list_size
    return np.concatenate([chunk.flatten().to_numpy().reshape(len(chunk), width) for chunk in chunks])


def table_of(x, kind="fixed", **options):
    n = len(x)
    columns = {"id": np.arange(n), "v": as_lists(x, kind), "text": [str(i) if i % 3 else None for i in range(n)]}
    return pa.table(columns, **options)


@each_value(
    kind=["fixed", "list", "large"],
    dtype=["float16", "float32", "float64", "int8", "uint8"],
    form=["table", "batch", "chunks", "slice"],
    law=[{"nnz": 3}, {"density": 0.25}],
    output=[None, "w"],
)
def test_rows_equal_project(kind, dtype, form, law, output):
    x = vectors(dtype=dtype)
    table = table_of(x, kind)
    if form == "batch":
        table = table.to_batches()[0]
    elif form == "chunks":
        table = pa.concat_tables([table.slice(0, 11), table.slice(11, 0), table.slice(11, 30), table.slice(41)])
    elif form == "slice":
        table, x = table.slice(5, 31), x[5:36]
    result = Projector("v", K, seed=9, output_column=output, **law)(table)
    assert type(result) is type(table)
    name = output or "v"
    expected = np.empty((len(x), K), dtype if dtype.startswith("float") else "float32")
    sjlt.Sketch(D, K, seed=9, **law).project(x, out=expected)
    assert result.schema.names == (["id", "v", "text"] if output is None else ["id", "v", "text", "w"])
    assert np.array_equal(matrix_of(result.column(name)), expected)
    assert result.schema.field(name).type == pa.list_(pa.from_numpy_dtype(expected.dtype), K)
    for other in {"id", "v", "text"} - {name}:
        assert result.column(other).equals(table.column(other))
    result.validate(full=True)


def test_field_metadata_describes_the_sketch():
    P = Projector("v", K, seed=3)
    table = table_of(vectors()).replace_schema_metadata({"pandas": "{}", "huggingface": "{}", "mine": "1"})
    result = P(table)
    described = json.loads(result.schema.field("v").metadata[b"sjlt"])
    assert sjlt.Sketch.from_dict(described) == P.sketch == sjlt.Sketch(D, K, seed=3)
    assert result.schema.metadata == {b"pandas": b"{}", b"mine": b"1"}
    assert P.schema(table.schema) == result.schema
    assert Projector("v", K, output_column="w")(table).schema.metadata == table.schema.metadata


def test_nested_slices_of_fixed_size_lists():
    x = vectors()
    array = as_lists(x, "fixed").slice(7).slice(3, 20)
    result = Projector("v", K)(pa.table({"v": array}))
    assert np.array_equal(matrix_of(result["v"]), sjlt.Sketch(D, K).project(x[10:30]))


def test_vectors_are_not_copied():
    """The projected matrix is the memory of the Arrow buffer."""
    from sjlt.arrow import vectors_of

    array = as_lists(vectors(), "list").slice(4)
    matrix = vectors_of("v", array, None, 0)
    assert matrix.ctypes.data == array.values.buffers()[1].address + 4 * D * 4
    result = Projector("v", K)(pa.table({"v": array}))
    assert result["v"].num_chunks == 1


GIVEN_AND_RESULT = list(product(["float16", "float32", "float64", "int8"], ["float64", "float32", "float16"]))
# Each pair of dtypes has kernels of its own: the default run has pairs that it compiles for other tests, too.
COMPILED_ANYWAY = [("float16", "float32"), ("float32", "float16"), ("float64", "float32"), ("int8", "float64")]


@pytest.mark.parametrize("dtypes", exhaustive_except(COMPILED_ANYWAY, GIVEN_AND_RESULT), ids="-".join)
def test_dtype(dtypes):
    given, dtype = dtypes
    x = vectors(dtype=given)
    expected = np.empty((N, K), dtype)
    sjlt.Sketch(D, K).project(x, out=expected)
    assert np.array_equal(matrix_of(Projector("v", K, dtype=dtype)(table_of(x))["v"]), expected)


def test_normalized_rows():
    x = vectors()
    x[3] = 0
    y = matrix_of(Projector("v", K, normalize=True)(table_of(x))["v"])
    plain = sjlt.Sketch(D, K).project(x)
    norms = np.linalg.norm(plain, axis=1, keepdims=True)
    assert np.allclose(y, np.divide(plain, norms, where=norms > 0, out=np.zeros_like(plain)), rtol=1e-6, atol=0)
    assert not y[3].any()
    assert np.allclose(np.linalg.norm(np.delete(y, 3, axis=0), axis=1), 1, rtol=1e-6)


def test_variable_size_lists():
    x = vectors()
    result = Projector("v", K, list_type="list")(table_of(x))
    assert result.schema.field("v").type == pa.list_(pa.float32())
    assert np.array_equal(np.stack(result["v"].to_numpy()), sjlt.Sketch(D, K).project(x))


def test_pickling_before_and_after_use():
    table = table_of(vectors(), "list")
    P = Projector("v", K, seed=2)
    before = pickle.loads(pickle.dumps(P))
    expected = P(table)
    assert before(table).equals(expected)
    assert pickle.loads(pickle.dumps(P))(table).equals(expected)
    assert next(P.map(iter(table.to_batches()))).equals(expected.to_batches()[0])


def test_empty_first_chunk():
    x = vectors()
    lists = as_lists(x, "list")
    column = pa.chunked_array([lists.slice(0, 0), lists.slice(0, 20), lists.slice(20, 0), lists.slice(20)])
    P = Projector("v", K, seed=4)
    result = P(pa.table({"v": column}))["v"]
    assert np.array_equal(matrix_of(result), sjlt.Sketch(D, K, seed=4).project(x))
    assert [len(chunk) for chunk in result.chunks] == [0, 20, 0, N - 20]
    bad = pa.chunked_array([lists.slice(0, 0), pa.array([[1.0], None], lists.type)])
    with pytest.raises(ValueError, match="row 1 is null"):
        Projector("v", K)(pa.table({"v": bad}))


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_one_dimensional_tensors(dtype):
    x = vectors(dtype=dtype)
    lists = as_lists(x, "fixed")
    tensors = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(lists.type.value_type, [D]), lists)
    table = pa.table({"v": pa.chunked_array([tensors.slice(0, 7), tensors.slice(7)]), "id": np.arange(N)})
    P = Projector("v", K, seed=4)
    assert P.schema(table.schema).field("v").type.list_size == K
    expected = Projector("v", K, seed=4)(table_of(x).select(["v", "id"]))
    assert np.array_equal(matrix_of(P(table)["v"]), matrix_of(expected["v"]))
    null = pa.ExtensionArray.from_storage(tensors.type, pa.array([[1] * D, None], lists.type))
    with pytest.raises(ValueError, match="row 1 is null"):
        P(pa.table({"v": null}))


def test_empty_tables():
    empty = table_of(vectors()).slice(0, 0)
    assert Projector("v", K)(empty).schema == Projector("v", K)(table_of(vectors())).schema
    lists = table_of(vectors(), "list").slice(0, 0)
    assert Projector("v", K, n_features=D)(lists).num_rows == 0
    with pytest.raises(ValueError, match="unknown without rows: pass n_features"):
        Projector("v", K)(lists)


@pytest.mark.parametrize(
    ("column", "error", "message"),
    [
        (pa.array([[1.0, 2.0], [3.0, 4.0], [5.0]]), ValueError, "row 2 has length 1, row 0 has 2"),
        (pa.array([[1.0, 2.0], None]), ValueError, "row 1 is null"),
        (pa.array([[1.0, 2.0], None], pa.list_(pa.float64(), 2)), ValueError, "row 1 is null"),
        (pa.array([[1.0, 2.0], [1.0, None]]), ValueError, "row 1 contains a null"),
        (pa.array([[1.0, 2.0], [1.0, None]], pa.list_(pa.float64(), 2)), ValueError, "row 1 contains a null"),
        (pa.array([[[1.0]]]), TypeError, "nested lists"),
        (pa.array([[], []], pa.list_(pa.float32())), ValueError, "row 0 has a vector of length 0, needs at least 1"),
        (pa.array([["a"]]), TypeError, "needs lists of float16, float32"),
        (pa.array([[1]]), TypeError, "list<item: int64>.*cast it"),
        (pa.array([1.0]), TypeError, "of type double: needs lists of .* or uint8$"),
        (pa.array([[1.0]], pa.list_view(pa.float32())), TypeError, "list_view.*; cast it to list first$"),
        (
            pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array([[1.0]])),
            TypeError,
            "dictionary.*; decode it first$",
        ),
        (pa.array(["a"]).dictionary_encode(), TypeError, "needs lists of .* or uint8$"),
        (
            pa.ExtensionArray.from_storage(
                pa.fixed_shape_tensor(pa.float32(), [1, 2]), pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2))
            ),
            TypeError,
            "fixed_shape_tensor.*; pass its storage$",
        ),
    ],
)
def test_bad_columns(column, error, message):
    with pytest.raises(error, match=message) as caught:
        Projector("v", 2)(pa.table({"v": column}))
    assert "'v'" in str(caught.value)


@pytest.mark.parametrize("table", [None, [1.0], np.ones((2, 3)), {"v": [1.0]}])
def test_non_tables_are_refused(table):
    with pytest.raises(TypeError, match="expected a pyarrow Table or RecordBatch, got "):
        Projector("v", 4)(table)


def test_row_numbers_in_errors_span_chunks_and_slices():
    good, bad = pa.array([[1.0, 2.0]] * 5), pa.array([[0.0, 0.0], [1.0, 2.0], [1.0]])
    table = pa.table({"v": pa.chunked_array([good.slice(2), bad.slice(1)])})
    with pytest.raises(ValueError, match="row 4 has length 1, expected 2"):
        Projector("v", 2)(table)


def test_later_tables_must_match_the_first_width():
    P = Projector("v", K)
    P(table_of(vectors()))
    for kind in ("fixed", "list"):
        with pytest.raises(ValueError, match=f"length {D + 1}, expected {D}"):
            P(table_of(vectors(d=D + 1), kind))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n_components": "auto"}, ValueError, "auto"),
        ({"n_components": 0}, ValueError, "n_components must be from 1"),
        ({"n_components": 2, "nnz": 9}, ValueError, "nnz must be from 1 to 2"),
        ({"n_components": 2, "dtype": "uint8"}, ValueError, "dtype must be one of"),
        ({"n_components": 2, "column": 3}, TypeError, "must be strings"),
        ({"n_components": 2, "list_type": "large"}, ValueError, "list_type"),
        ({"n_components": 2, "n_features": 0}, ValueError, "n_features must be from 1"),
        ({"n_components": 2, "normalize": "no"}, TypeError, "normalize must be True or False, got 'no'"),
    ],
)
def test_bad_arguments_are_refused_early(arguments, error, message):
    with pytest.raises(error, match=message):
        Projector(**{"column": "v", **arguments})


def test_columns_are_selected_by_name():
    table = table_of(vectors())
    with pytest.raises(ValueError, match="no column 'w'; the columns are: id, v, text"):
        Projector("w", 2)(table)
    with pytest.raises(ValueError, match="a column 'id' already"):
        Projector("v", 2, output_column="id")(table)
    with pytest.raises(ValueError, match="there are 2 columns 'v'"):
        Projector("v", 2)(pa.Table.from_arrays([table["v"]] * 2, names=["v", "v"]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["list", "fixed"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_pandas_is_not_imported(kind, dtype):
    """Importing it takes half a second, most of the run time for a small file."""
    code = f"""
import sys
from itertools import product
import numpy as np, pyarrow as pa
from sjlt.arrow import Projector
x, kind = np.ones(({N}, {D}), np.float32), {kind!r}
values = pa.Array.from_buffers(pa.float32(), x.size, [None, pa.py_buffer(x)])
starts = np.arange(len(x) + 1, dtype=np.int32) * {D}
offsets = pa.Array.from_buffers(pa.int32(), len(starts), [None, pa.py_buffer(starts)])
lists = pa.ListArray.from_arrays(offsets, values) if kind == "list" else pa.FixedSizeListArray.from_arrays(values, {D})
Projector("v", {K}, dtype={dtype!r})(pa.table([lists], names=["v"]))
print("pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")
