"""Checksums of rows, and the record of what has been written."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np


class Written(NamedTuple):
    """The state after appending. It is replaced as one object, so that Ctrl-C finds its parts consistent."""

    segments: list[list[int]]  # [rows, checksum] of the rows up to the last checkpoint
    segment_rows: int
    rows: int  # since then
    checksum: int

    def added(self, rows: int, checksum: int) -> Written:
        return self._replace(rows=self.rows + rows, checksum=checksum)

    def as_segment(self) -> Written:
        if not self.rows:
            return self
        return Written([*self.segments, [self.rows, self.checksum]], self.segment_rows + self.rows, 0, 0)


def row_checksum(content: Any, running: int) -> int:
    """The CRC of rows of bytes, continued from `running`.

    It is taken of a weighted sum of the words in each row, which is 4 times faster than of the bytes. It changes when
    words are changed or rows are swapped, but for collisions, whose chance is about 2^-32.
    """
    if content.shape[1] % 4:
        return zlib.crc32(np.ascontiguousarray(content).data, running)
    words = content.view(np.uint32 if content.shape[1] % 8 else np.uint64)
    weights = np.arange(1, 2 * words.shape[1], 2, dtype=words.dtype)
    return zlib.crc32(np.einsum("ij,j->i", words, weights).data, running)
