"""Checksums of rows, and a record of the rows written so far."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np


class Written(NamedTuple):
    """The rows written so far. An immutable tuple, so that Ctrl-C never sees it half updated."""

    segments: list[list[int]]  # [rows, checksum] of each segment; a checkpoint ends a segment
    segment_rows: int  # rows in all segments
    rows: int  # rows since the last checkpoint
    checksum: int  # of the rows since the last checkpoint

    def added(self, rows: int, checksum: int) -> Written:
        """The record after appending `rows` rows; `checksum` covers all rows since the last checkpoint."""
        return self._replace(rows=self.rows + rows, checksum=checksum)

    def as_segment(self) -> Written:
        """The record after a checkpoint."""
        if not self.rows:
            return self
        return Written([*self.segments, [self.rows, self.checksum]], self.segment_rows + self.rows, 0, 0)


def row_checksum(content: Any, running: int) -> int:
    """CRC-32 of rows of bytes, continued from the checksum `running`.

    The CRC covers a weighted sum of the words of each row, which is 4 times faster than covering the bytes. It detects
    changed words and swapped rows, except for collisions, whose probability is about 2^-32.
    """
    if content.shape[1] % 4:
        return zlib.crc32(np.ascontiguousarray(content).data, running)
    words = content.view(np.uint32 if content.shape[1] % 8 else np.uint64)
    weights = np.arange(1, 2 * words.shape[1], 2, dtype=words.dtype)
    return zlib.crc32(np.einsum("ij,j->i", words, weights).data, running)
