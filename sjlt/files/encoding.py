"""How results are stored: as floats, or as int8 with one scale per vector; optionally of unit length.

One scale per vector, its largest magnitude / 127, keeps the directions of vectors of any length, never saturates, and
does not depend on other rows. Measured recall@10 by cosine similarity of 256 components in int8, beside one scale per
component: vectors whose lengths vary by 10^4, 99.0 % against 47 %; Gaussian clusters, 99.0 against 98.7; image patches,
which all resemble each other, 91.6 against 92.6 (82.6 against 89.3 by inner product).

The scale is stored beside the codes: in one structured ``.npy`` array, so that a result remains one file, or in a
parquet column of its own, so that databases see plain vectors of int8. It does not affect cosine similarities: int8
codes alone can be searched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..inputs.containers import result_dtype
from .errors import UserError

DTYPES = ("float16", "float32", "float64", "int8")
SCALE = "_scale"  # ends the name of the parquet column that holds the scales
StoredDtype = Literal["float16", "float32", "float64", "int8"]


def quantized_dtype(n_components: int) -> np.dtype:
    """The dtype of one vector: its int8 codes, and the float32 by which to multiply them."""
    return np.dtype([("codes", np.int8, (n_components,)), ("scale", "<f4")])


def quantized(y: np.ndarray) -> np.ndarray:
    """The rows of y (n, k) as n elements of `quantized_dtype`."""
    result = np.empty(len(y), quantized_dtype(y.shape[1]))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale = np.max(np.abs(y), axis=1, initial=0) / 127
        codes = np.rint(y / np.where(scale > 0, scale, 1)[:, None])
        codes[~np.isfinite(scale)] = 0
        result["codes"], result["scale"] = codes, np.where(np.isfinite(scale), scale, np.nan)
    return result


def to_unit_length(y: np.ndarray) -> None:
    """Divide each row of y by its norm, in place. Rows of zeros stay; rows that are not finite become NaN."""
    largest = np.max(np.abs(y), axis=1, initial=0)[:, None]
    with np.errstate(invalid="ignore"):
        y /= np.where(largest > 0, largest, 1)  # so that no square over- or underflows
        norms = np.sqrt(np.einsum("ij,ij->i", y, y))[:, None]
        y /= np.where(norms > 0, norms, 1)


@dataclass(frozen=True)
class Encoding:
    """The settings with which the results of a file are computed and stored.

    Attributes
    ----------
    n_components : int
    computed : dtype
        In which `Sketch.project` returns them.
    stored : str
        One of `DTYPES`.
    normalize : bool
        Whether each row is divided by its norm.
    """

    n_components: int
    computed: np.dtype
    stored: str
    normalize: bool

    @classmethod
    def of(cls, source: np.dtype, n_components: int, stored: str | None, normalize: bool) -> Encoding:
        """The encoding of results for data of dtype `source`; `stored` None stands for the natural one."""
        natural = natural_dtype(source)
        if stored is not None and stored not in DTYPES:
            raise UserError(f"results are stored as {', '.join(DTYPES)}, not as {stored}")
        name = stored or natural.name
        computed = natural if name == "int8" else np.dtype(name)
        if normalize or name == "int8":
            computed = np.promote_types(computed, np.float32)
        return cls(n_components, computed, name, normalize)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the stored array's elements."""
        return quantized_dtype(self.n_components) if self.stored == "int8" else np.dtype(self.stored)

    def shape(self, rows: int) -> tuple[int, ...]:
        """The shape of the stored array."""
        return (rows,) if self.stored == "int8" else (rows, self.n_components)

    def description(self, rows: int, column: str | None = None) -> dict[str, Any]:
        """The entry "result" of the JSON; `column` is that of a parquet file."""
        content: dict[str, Any] = {"shape": [rows, self.n_components], "dtype": self.stored}
        if self.stored == "int8":
            fields = "the field scale; the codes are in the field codes"
            content["scale"] = f"one float32 per vector, in {f'the column {column}{SCALE}' if column else fields}"
        if self.normalize:
            content["normalized"] = True
        return content

    def encode(self, y: np.ndarray) -> np.ndarray:
        """The rows y, computed in `computed`, as they are stored. May overwrite y."""
        if self.normalize:
            to_unit_length(y)
        if self.stored == "int8":
            return quantized(y)
        with np.errstate(over="ignore"):
            return y.astype(self.stored, copy=False)


def natural_dtype(source: np.dtype) -> np.dtype:
    """The dtype of results if none is given: float32 for numbers of one byte, else that of `Sketch.project`."""
    if source.kind in "iub" and source.itemsize == 1:
        return np.dtype(np.float32)
    return result_dtype(source)
