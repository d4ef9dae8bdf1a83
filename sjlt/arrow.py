"""Projecting a column of an Arrow table: one function for parquet, datasets, Ray, Spark, DuckDB and polars."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .files.encoding import DTYPES, SCALE, Encoding
from .inputs.checks import integer
from .sketch import MAX_FEATURES, Sketch

if TYPE_CHECKING:
    import pyarrow as pa

METADATA_KEY = b"sjlt"
# By the names of Arrow's types. Arrow's own conversions (`to_pandas_dtype`, `to_numpy`, `array`) import pandas where it
# is installed, which takes half a second.
NUMBERS: dict[str, np.dtype[Any]] = {
    "halffloat": np.dtype(np.float16),
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
}


def import_pyarrow() -> Any:
    """The package pyarrow, or an ImportError that names the extra."""
    try:
        import pyarrow
    except ImportError as e:
        raise ImportError("Arrow tables and parquet files need pyarrow: pip install 'sjlt-triton[arrow]'") from e
    return pyarrow


class Projector:
    """A function that projects the vectors in one column of an Arrow table, row by row.

    Engines that hand out Arrow data run it as it is: ``dataset.with_format("arrow").map(P, batched=True)`` of
    Hugging Face, ``ds.map_batches(P, batch_format="pyarrow")`` of Ray, ``df.mapInArrow(P.map, schema)`` of Spark.
    It can be pickled, and equal arguments give equal results in every process.

    Parameters
    ----------
    column : str
        The column of vectors: lists, large lists, fixed-size lists or 1-D tensors of float16, float32, float64, int8
        or uint8, all of one length, without nulls.
    n_components : int
        Length of a projected vector.
    n_features : int, optional
        Length of the vectors in `column`. By default the length found in the first table; later tables are checked
        against it. Give it where several processes share the work, so that each refuses the same rows.
    nnz, stacks, density, seed
        As for `Sketch`.
    output_column : str, optional
        The name of a new last column for the projected vectors. By default they replace `column`, in its place.
    normalize : bool, default False
        Scale projected vectors to unit Euclidean length. Zero vectors stay zero.
    dtype : {"float16", "float32", "float64", "int8"}, optional
        The type of projected numbers. By default that of the vectors, and float32 for int8 and uint8. With "int8" a
        vector is its codes times a float32 scale, which is in the next column, named ``output_column + "_scale"``;
        cosine similarities of codes need no scales. `sjlt.load_int8` reads such files as floats.
    list_type : {"fixed", "list"}, default "fixed"
        Whether projected vectors are fixed-size lists, or lists for readers without fixed-size lists, such as Spark.

    Attributes
    ----------
    sketch : Sketch or None
        The projection; None until `n_features` is known.

    Raises
    ------
    ImportError
        Without pyarrow, which ``sjlt-triton[arrow]`` installs.
    TypeError, ValueError
        For invalid arguments; for a table without `column`, with a column of another type, with nulls, or with
        vectors of differing lengths (the message has the number of the row, counted from 0).

    Notes
    -----
    Other columns, their order and the table's metadata are kept, except the metadata key "huggingface" where the type
    of `column` changes, since it states the old type. The new field's metadata has the key "sjlt" with
    `Sketch.to_dict` as JSON. Vectors are read without a copy, and each chunk of a chunked column gives one chunk.

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
            raise ValueError(f"n_components={n_components!r} depends on the number of all rows: pass an integer")
        if dtype is not None and str(np.dtype(dtype)) not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if list_type not in ("fixed", "list"):
            raise ValueError(f"list_type must be 'fixed' or 'list', got {list_type!r}")
        self.column, self.output_column = column, column if output_column is None else output_column
        self.normalize, self.list_type = bool(normalize), list_type
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
            Sketch(MAX_FEATURES, **{**self._arguments, "density": 1.0 if density == "auto" else density})  # checks them

    def __repr__(self) -> str:
        of = repr(self.sketch) if self.sketch else ", ".join(f"{k}={v!r}" for k, v in self._arguments.items())
        return f"Projector({self.column!r} to {self.output_column!r}, {of})"

    def __call__(self, table: pa.Table | pa.RecordBatch) -> Any:
        """The table or record batch with projected vectors; the same rows in the same order."""
        return self.project(table, 0)

    def map(self, batches: Any) -> Any:
        """Project each of an iterable of record batches, as Spark's `mapInArrow` calls it."""
        return map(self, batches)

    def project(self, table: Any, first_row: int) -> Any:
        """Project a table; error messages number its rows from `first_row`."""
        import pyarrow as pa

        if not isinstance(table, pa.Table | pa.RecordBatch):
            raise TypeError(f"expected a pyarrow Table or RecordBatch, got {type(table).__name__}")
        place = self._place(table.schema)
        column = table.column(place)
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        starts = [first_row, *(first_row + np.cumsum([len(chunk) for chunk in chunks])).tolist()]
        arrays: dict[int, list[Any]] = {}
        for i in sorted(range(len(chunks)), key=lambda i: not len(chunks[i])):  # empty chunks state no length
            arrays[i] = self._project_chunk(chunks[i], column.type, starts[i])
        projected = []
        for i, field in enumerate(self.fields(column.type)):
            parts = [arrays[j][i] for j in range(len(chunks))]
            projected.append(pa.chunked_array(parts, field.type) if isinstance(column, pa.ChunkedArray) else parts[0])
        columns = list(table.columns)
        if self.output_column == self.column:
            columns[place : place + 1] = projected
        else:
            columns += projected
        return type(table).from_arrays(columns, schema=self.schema(table.schema))

    def schema(self, schema: pa.Schema) -> pa.Schema:
        """The schema of the result for tables of `schema`. `n_features` must be known, or be in the column's type."""
        place = self._place(schema)
        fields = self.fields(schema.field(place).type)
        if self.output_column != self.column:
            for field in fields:
                schema = schema.append(field)
            return schema
        schema = schema.remove(place)
        for i, field in enumerate(fields):
            schema = schema.insert(place + i, field)
        kept = {key: value for key, value in (schema.metadata or {}).items() if key != b"huggingface"}
        return schema.with_metadata(kept or None)

    def fields(self, column_type: pa.DataType) -> list[pa.Field]:
        """The field of the projected vectors, and for int8 that of their scales."""
        import pyarrow as pa

        dtype = np.dtype(self.encoding(column_type).stored)
        sketch = self.sketch_for(column_type)
        number = pa.from_numpy_dtype(dtype)
        kind = pa.list_(number, sketch.n_components) if self.list_type == "fixed" else pa.list_(number)
        metadata = {METADATA_KEY: json.dumps(sketch.to_dict()).encode()}
        vectors = pa.field(self.output_column, kind, metadata=metadata)
        return [vectors, pa.field(self.output_column + SCALE, pa.float32())] if dtype == np.int8 else [vectors]

    # --------------------------------------------------------------------------------- types

    def _place(self, schema: Any) -> int:
        places = schema.get_all_field_indices(self.column)
        if len(places) != 1:
            held = ", ".join(schema.names) or "none"
            problem = f"there are {len(places)} columns" if places else "there is no column"
            raise ValueError(f"{problem} {self.column!r}; the columns are: {held}")
        new = {self.output_column, self.output_column + SCALE} if self.dtype == np.int8 else {self.output_column}
        if taken := sorted((new - {self.column}) & set(schema.names)):
            raise ValueError(f"there is a column {taken[0]!r} already: name another output_column")
        return int(places[0])

    def sketch_for(self, column_type: Any) -> Sketch:
        """The sketch. If it is not known yet, it is made for the width in the type of the column."""
        width = fixed_width(column_type)
        if width is not None:
            self._know_width(width, "the column")
        if self.sketch is None:
            raise ValueError(f"the length of the vectors in {self.column!r} is unknown without rows: pass n_features")
        return self.sketch

    def _know_width(self, width: int, where: str) -> Sketch:
        if width < 1:
            raise ValueError(f"column {self.column!r}: {where} has 0 numbers, needs at least 1")
        if self.sketch is None:
            self.sketch = Sketch(width, **self._arguments)
        if self.sketch.n_features != width:
            raise ValueError(
                f"column {self.column!r}: {where} has vectors of {width} numbers, expected {self.sketch.n_features}"
            )
        return self.sketch

    def encoding(self, column_type: Any) -> Encoding:
        """The settings with which vectors of a column are stored."""
        dtype = numbers_of(self.column, column_type)
        stored = None if self.dtype is None else self.dtype.name
        return Encoding.of(dtype, self._arguments["n_components"], stored, self.normalize)

    # --------------------------------------------------------------------------------- numbers

    def _project_chunk(self, chunk: Any, column_type: Any, first_row: int) -> list[Any]:
        """The arrays of `fields` for one chunk."""
        import pyarrow as pa

        encoding = self.encoding(column_type)
        n, width = len(chunk), self.sketch.n_features if self.sketch else None
        vectors = vectors_of(self.column, chunk, width, first_row)
        if n:
            self._know_width(vectors.shape[1], f"row {first_row}")
        fields = self.fields(column_type)
        y = np.empty((n, encoding.n_components), encoding.computed)
        if n and self.sketch is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN pass through silently
                self.sketch.project(vectors, out=y)
        stored = encoding.encode(y)
        if encoding.stored != "int8":
            return [lists_of(stored, fields[0].type)]
        return [lists_of(stored["codes"], fields[0].type), _array_of(stored["scale"], pa.float32())]


def storage_of(column_type: Any) -> Any:
    """The type as which a column is stored if it is one of 1-D tensors, such as `pyarrow.FixedShapeTensorType`.

    Other types are returned as they are.
    """
    import pyarrow as pa

    tensors = isinstance(column_type, pa.BaseExtensionType) and len(getattr(column_type, "shape", ())) == 1
    return column_type.storage_type if tensors else column_type


def fixed_width(column_type: Any) -> int | None:
    """The length of the vectors that the type of a column states, None for lists of any length."""
    import pyarrow as pa

    kind = storage_of(column_type)
    return int(kind.list_size) if pa.types.is_fixed_size_list(kind) else None


def numbers_of(name: str, column_type: Any) -> np.dtype[Any]:
    """The dtype of the numbers in a column of vectors; TypeError for another type of column."""
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
    """Advice for passing a column of vectors of an unsupported type, or an empty text."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return "; pass its storage"
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return "; cast it to list first"
    return "; decode it first" if pa.types.is_dictionary(kind) and pa.types.is_nested(kind.value_type) else ""


def vectors_of(name: str, array: Any, width: int | None, first_row: int) -> np.ndarray:
    """The vectors of one chunk of a column as a matrix, without a copy.

    Parameters
    ----------
    name : str
        Name of the column, for errors.
    array : ListArray, LargeListArray, FixedSizeListArray, or an array of 1-D tensors
        It may be a slice.
    width : int, optional
        The length that vectors must have; by default that of the first.
    first_row : int
        The number of the first row in error messages.

    Raises
    ------
    ValueError
        For nulls and for vectors of another length, with the number of the row.
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
        start = array.offset * found  # .values is of the whole array, whatever slice of it this is
    else:
        offsets = _numbers(array.offsets, np.dtype(np.int64 if pa.types.is_large_list(array.type) else np.int32))
        lengths = np.diff(offsets)
        found = int(lengths[0]) if width is None and n else width or 0
        if (different := np.flatnonzero(lengths != found)).size:
            row = int(different[0])
            raise ValueError(
                f"column {name!r}: row {first_row + row} has {lengths[row]} numbers, "
                f"{'row ' + str(first_row) + ' has' if width is None else 'expected'} {found}"
            )
        start = int(offsets[0])
    values = array.values.slice(start, n * found)
    if values.null_count:
        row = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0]) // max(1, found)
        raise ValueError(f"column {name!r}: row {first_row + row} has a null among its numbers")
    return _numbers(values, NUMBERS[str(values.type)]).reshape(n, found)


def lists_of(rows: np.ndarray, kind: pa.DataType) -> Any:
    """The reverse of `vectors_of`: the rows of a matrix as lists, without a copy where they are contiguous."""
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
    """The numbers of an Arrow array without nulls, without a copy."""
    if not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def _array_of(numbers: np.ndarray, kind: pa.DataType) -> Any:
    """Numbers in row order as an Arrow array, without a copy where they are contiguous."""
    import pyarrow as pa

    return pa.Array.from_buffers(kind, numbers.size, [None, pa.py_buffer(np.ascontiguousarray(numbers))])
