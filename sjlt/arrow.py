"""Project the vectors in a column of an Arrow table, for parquet, Hugging Face, Ray, Spark, DuckDB and polars."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .files.encoding import DTYPES, SCALE, Encoding
from .inputs.checks import flag, integer
from .sketch import MAX_FEATURES, Sketch

if TYPE_CHECKING:
    import pyarrow as pa

METADATA_KEY = b"sjlt"
# Keyed by Arrow type names. Arrow's own conversions (`to_pandas_dtype`, `to_numpy`, `array`) import pandas if it is
# installed, which takes half a second.
NUMBERS: dict[str, np.dtype[Any]] = {
    "halffloat": np.dtype(np.float16),
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
}


def import_pyarrow() -> Any:
    """Import pyarrow; raise an ImportError that names the extra to install if it is missing."""
    try:
        import pyarrow
    except ImportError as e:
        raise ImportError("Arrow tables and parquet files need pyarrow: pip install 'sjlt-triton[arrow]'") from e
    return pyarrow


class Projector:
    """A callable that projects the vectors in one column of an Arrow table.

    It can be passed directly to engines that provide Arrow data: ``dataset.with_format("arrow").map(P, batched=True)``
    (Hugging Face), ``ds.map_batches(P, batch_format="pyarrow")`` (Ray), ``df.mapInArrow(P.map, schema)`` (Spark). It
    can be pickled, and equal arguments give equal results in every process.

    Parameters
    ----------
    column : str
        The column of vectors: lists, large lists, fixed-size lists or 1-D tensors of float16, float32, float64, int8
        or uint8, all of the same length, without nulls.
    n_components : int
        Length of each projected vector.
    n_features : int, optional
        Length of the vectors in `column`. By default the length found in the first table; later tables must match it.
        Pass it if several processes share the work, so that all refuse the same rows.
    nnz, stacks, density, seed
        As for `Sketch`.
    output_column : str, optional
        Name of a new last column for the projected vectors. By default they replace `column`.
    normalize : bool, default False
        Scale projected vectors to unit Euclidean length. Zero vectors stay zero.
    dtype : {"float16", "float32", "float64", "int8"}, optional
        Dtype of the projected vectors. By default that of the vectors in `column`, or float32 if that is int8 or uint8.
        With "int8", a vector is represented by int8 codes and a float32 scale, which is stored in the next column,
        named ``output_column + "_scale"``. Cosine similarities of the codes do not need the scale. `sjlt.load_int8`
        reads such files as floats.
    list_type : {"fixed", "list"}, default "fixed"
        Whether projected vectors are fixed-size lists, or variable-size lists for readers without fixed-size lists,
        such as Spark.

    Attributes
    ----------
    sketch : Sketch or None
        The projection; None until the length of the vectors is known.

    Raises
    ------
    ImportError
        If pyarrow is missing; ``sjlt-triton[arrow]`` installs it.
    TypeError, ValueError
        For invalid arguments; when called, for a table without `column`, or with a column of another type, with nulls,
        or with vectors of different lengths (the message gives the row, counted from 0).

    Notes
    -----
    The other columns, their order and the table's metadata are kept, except that the metadata key "huggingface" is
    dropped if `column` is replaced, because it records the old type. The metadata of the new field contains
    `Sketch.to_dict` as JSON under the key "sjlt". Vectors are read without a copy, and the chunks of a chunked column
    are preserved.

    Examples
    --------
    >>> import numpy as np, pyarrow as pa
    >>> from sjlt.arrow import Projector
    >>> vectors = pa.FixedSizeListArray.from_arrays(np.ones(3 * 1000, np.float32), 1000)
    >>> table = pa.table({"id": [1, 2, 3], "vector": vectors})
    >>> Projector("vector", 64, seed=1)(table).schema.field("vector").type.list_size
    64
    """

    def __init__(
        self,
        column: str,
        n_components: int,
        *,
        n_features: int | None = None,
        nnz: int | Literal["auto"] = "auto",
        stacks: int = 1,
        density: float | Literal["auto"] | None = None,
        seed: int = 0,
        output_column: str | None = None,
        normalize: bool = False,
        dtype: str | None = None,
        list_type: Literal["fixed", "list"] = "fixed",
    ) -> None:
        import_pyarrow()
        if not isinstance(column, str) or not isinstance(output_column, str | None):
            raise TypeError(f"column and output_column must be strings, got {column!r} and {output_column!r}")
        if isinstance(n_components, str):
            raise ValueError(f"n_components={n_components!r} depends on the total number of rows: pass an integer")
        if dtype is not None and str(np.dtype(dtype)) not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if list_type not in ("fixed", "list"):
            raise ValueError(f"list_type must be 'fixed' or 'list', got {list_type!r}")
        self.column, self.output_column = column, column if output_column is None else output_column
        self.normalize, self.list_type = flag("normalize", normalize), list_type
        self.dtype = None if dtype is None else np.dtype(dtype)
        self._arguments: dict[str, Any] = {
            "n_components": n_components,
            "nnz": nnz,
            "stacks": stacks,
            "density": density,
            "seed": seed,
        }
        self.sketch: Sketch | None = None
        if n_features is not None:
            self.sketch = Sketch(integer("n_features", n_features, 1, MAX_FEATURES), **self._arguments)
        else:
            # Only checks the arguments.
            Sketch(MAX_FEATURES, **{**self._arguments, "density": 1.0 if density == "auto" else density})

    def __repr__(self) -> str:
        sketch = repr(self.sketch) if self.sketch else ", ".join(f"{k}={v!r}" for k, v in self._arguments.items())
        return f"Projector({self.column!r} to {self.output_column!r}, {sketch})"

    def __call__(self, table: pa.Table | pa.RecordBatch) -> Any:
        """Project a table or record batch.

        Parameters
        ----------
        table : pyarrow.Table or pyarrow.RecordBatch

        Returns
        -------
        pyarrow.Table or pyarrow.RecordBatch
            Of the same type, with the same rows in the same order.
        """
        return self.project(table, 0)

    def map(self, batches: Any) -> Any:
        """Project each record batch of an iterable; the signature that Spark's `mapInArrow` expects."""
        return map(self, batches)

    def project(self, table: Any, first_row: int) -> Any:
        """Like calling the projector, but error messages number the rows from `first_row`."""
        import pyarrow as pa

        if not isinstance(table, pa.Table | pa.RecordBatch):
            raise TypeError(f"expected a pyarrow Table or RecordBatch, got {type(table).__name__}")
        position = self._position(table.schema)
        column = table.column(position)
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        starts = [first_row, *(first_row + np.cumsum([len(chunk) for chunk in chunks])).tolist()]
        arrays: dict[int, list[Any]] = {}
        # Empty chunks last: they do not show the length of the vectors.
        for i in sorted(range(len(chunks)), key=lambda i: not len(chunks[i])):
            arrays[i] = self._project_chunk(chunks[i], column.type, starts[i])
        projected = []
        for i, field in enumerate(self.fields(column.type)):
            parts = [arrays[j][i] for j in range(len(chunks))]
            projected.append(pa.chunked_array(parts, field.type) if isinstance(column, pa.ChunkedArray) else parts[0])
        columns = list(table.columns)
        if self.output_column == self.column:
            columns[position : position + 1] = projected
        else:
            columns += projected
        return type(table).from_arrays(columns, schema=self.schema(table.schema))

    def schema(self, schema: pa.Schema) -> pa.Schema:
        """The schema of the result for tables of `schema`.

        `n_features` must be known, or the column must have fixed-size lists.
        """
        position = self._position(schema)
        fields = self.fields(schema.field(position).type)
        if self.output_column != self.column:
            for field in fields:
                schema = schema.append(field)
            return schema
        schema = schema.remove(position)
        for i, field in enumerate(fields):
            schema = schema.insert(position + i, field)
        kept = {key: value for key, value in (schema.metadata or {}).items() if key != b"huggingface"}
        return schema.with_metadata(kept or None)

    def fields(self, column_type: pa.DataType) -> list[pa.Field]:
        """The field of the projected vectors, followed by the field of their scales for int8."""
        import pyarrow as pa

        dtype = np.dtype(self.encoding(column_type).stored)
        sketch = self.sketch_for(column_type)
        number = pa.from_numpy_dtype(dtype)
        kind = pa.list_(number, sketch.n_components) if self.list_type == "fixed" else pa.list_(number)
        metadata = {METADATA_KEY: json.dumps(sketch.to_dict()).encode()}
        vectors = pa.field(self.output_column, kind, metadata=metadata)
        return [vectors, pa.field(self.output_column + SCALE, pa.float32())] if dtype == np.int8 else [vectors]

    # --------------------------------------------------------------------------------- types

    def _position(self, schema: Any) -> int:
        """The index of the column of vectors; ValueError if it is missing or not unique, or a new name is taken."""
        positions = schema.get_all_field_indices(self.column)
        if len(positions) != 1:
            held = ", ".join(schema.names) or "none"
            problem = f"there are {len(positions)} columns" if positions else "there is no column"
            raise ValueError(f"{problem} {self.column!r}; the columns are: {held}")
        new = {self.output_column, self.output_column + SCALE} if self.dtype == np.int8 else {self.output_column}
        if taken := sorted((new - {self.column}) & set(schema.names)):
            raise ValueError(f"there is a column {taken[0]!r} already: choose another output_column")
        return int(positions[0])

    def sketch_for(self, column_type: Any) -> Sketch:
        """The sketch; if it does not exist yet, it is created for the length fixed by the column's type."""
        width = fixed_width(column_type)
        if width is not None:
            self._set_width(width, "has vectors")
        if self.sketch is None:
            raise ValueError(f"the length of the vectors in {self.column!r} is unknown without rows: pass n_features")
        return self.sketch

    def _set_width(self, width: int, where: str) -> Sketch:
        """Create the sketch for vectors of this length, or check that the existing one matches."""
        if width < 1:
            raise ValueError(f"column {self.column!r}: {where} of length 0, needs at least 1")
        if self.sketch is None:
            self.sketch = Sketch(width, **self._arguments)
        if self.sketch.n_features != width:
            raise ValueError(f"column {self.column!r}: {where} of length {width}, expected {self.sketch.n_features}")
        return self.sketch

    def encoding(self, column_type: Any) -> Encoding:
        """How the projected vectors of a column of this type are stored."""
        dtype = numbers_of(self.column, column_type)
        stored = None if self.dtype is None else self.dtype.name
        return Encoding.of(dtype, self._arguments["n_components"], stored, self.normalize)

    # --------------------------------------------------------------------------------- values

    def _project_chunk(self, chunk: Any, column_type: Any, first_row: int) -> list[Any]:
        """Project one chunk; return an array for each of `fields`."""
        import pyarrow as pa

        encoding = self.encoding(column_type)
        n, width = len(chunk), self.sketch.n_features if self.sketch else None
        vectors = vectors_of(self.column, chunk, width, first_row)
        if n:
            self._set_width(vectors.shape[1], f"row {first_row} has a vector")
        fields = self.fields(column_type)
        y = np.empty((n, encoding.n_components), encoding.computed)
        if n and self.sketch is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # no warnings for inf and NaN
                self.sketch.project(vectors, out=y)
        stored = encoding.encode(y)
        if encoding.stored != "int8":
            return [lists_of(stored, fields[0].type)]
        return [lists_of(stored["codes"], fields[0].type), _array_of(stored["scale"], pa.float32())]


def storage_of(column_type: Any) -> Any:
    """The storage type of a column of 1-D tensors, such as `pyarrow.FixedShapeTensorType`; other types unchanged."""
    import pyarrow as pa

    tensors = isinstance(column_type, pa.BaseExtensionType) and len(getattr(column_type, "shape", ())) == 1
    return column_type.storage_type if tensors else column_type


def fixed_width(column_type: Any) -> int | None:
    """The length of vectors fixed by a column's type; None for variable-size lists."""
    import pyarrow as pa

    kind = storage_of(column_type)
    return int(kind.list_size) if pa.types.is_fixed_size_list(kind) else None


def numbers_of(name: str, column_type: Any) -> np.dtype[Any]:
    """The dtype of the values in a column of vectors; TypeError for other column types."""
    import pyarrow as pa

    types, kind = pa.types, storage_of(column_type)
    wanted = "needs lists of float16, float32, float64, int8 or uint8"
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        raise TypeError(f"column {name!r} is of type {column_type}: {wanted}{_advice(kind)}")
    values = kind.value_type
    if types.is_nested(values):
        raise TypeError(f"column {name!r} has nested lists ({column_type}): {wanted}, one vector per row")
    if str(values) not in NUMBERS:
        raise TypeError(f"column {name!r} is of type {column_type}: {wanted}; cast it")
    return NUMBERS[str(values)]


def _advice(kind: pa.DataType) -> str:
    """How to convert a column of this unsupported type, as the end of a message; empty if there is no simple way."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return "; pass its storage"
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return "; cast it to list first"
    return "; decode it first" if pa.types.is_dictionary(kind) and pa.types.is_nested(kind.value_type) else ""


def vectors_of(name: str, array: Any, width: int | None, first_row: int) -> np.ndarray:
    """View the vectors in one chunk of a column as a matrix, without a copy.

    Parameters
    ----------
    name : str
        Name of the column, for messages.
    array : ListArray, LargeListArray, FixedSizeListArray, or an array of 1-D tensors
        May be a slice.
    width : int or None
        Required length of the vectors; None means the length of the first one.
    first_row : int
        Number of the first row, for messages.

    Returns
    -------
    ndarray of shape (rows, width)

    Raises
    ------
    ValueError
        For nulls and for vectors of a different length; the message gives the row.
    """
    import pyarrow as pa

    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    n = len(array)
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise ValueError(f"column {name!r}: row {first_row + row} is null ({array.null_count} of {n} rows here are)")
    if pa.types.is_fixed_size_list(array.type):
        found = array.type.list_size
        start = array.offset * found  # .values ignores slicing
    else:
        offsets = _numbers(array.offsets, np.dtype(np.int64 if pa.types.is_large_list(array.type) else np.int32))
        lengths = np.diff(offsets)
        found = int(lengths[0]) if width is None and n else width or 0
        if (different := np.flatnonzero(lengths != found)).size:
            row = int(different[0])
            raise ValueError(
                f"column {name!r}: row {first_row + row} has length {lengths[row]}, "
                f"{'row ' + str(first_row) + ' has' if width is None else 'expected'} {found}"
            )
        start = int(offsets[0])
    values = array.values.slice(start, n * found)
    if values.null_count:
        row = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0]) // max(1, found)
        raise ValueError(f"column {name!r}: row {first_row + row} contains a null")
    return _numbers(values, NUMBERS[str(values.type)]).reshape(n, found)


def lists_of(rows: np.ndarray, kind: pa.DataType) -> Any:
    """The inverse of `vectors_of`: the rows of a matrix as lists, without a copy if the matrix is contiguous."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, lists_of(rows, kind.storage_type))
    values = _array_of(rows, kind.value_type)
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(values, type=kind)
    large = pa.types.is_large_list(kind)
    offsets = np.arange(len(rows) + 1, dtype=np.int64 if large else np.int32) * rows.shape[1]
    return (pa.LargeListArray if large else pa.ListArray).from_arrays(pa.array(offsets), values, type=kind)


def _numbers(array: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """The values of an Arrow array that has no nulls, without a copy."""
    if not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def _array_of(values: np.ndarray, kind: pa.DataType) -> Any:
    """The values in row order as an Arrow array, without a copy if they are contiguous."""
    import pyarrow as pa

    return pa.Array.from_buffers(kind, values.size, [None, pa.py_buffer(np.ascontiguousarray(values))])
