"""Launches of `encode_chunks` and `write_entries`, which store the entries of a sketch for the kernel that follows."""

from __future__ import annotations

from typing import NamedTuple

from .product import next_power_of_two

CHUNKS = 8  # chunks that a program encodes at a time
MIN_SUB_BLOCKS = 8  # one compiled kernel serves every smaller nnz
MAX_KEYS = 512  # sub-block keys that a program holds in shared memory
MIN_PROGRAMS = 1024  # a program encodes several batches of CHUNKS chunks if this many programs remain


class Encoding(NamedTuple):
    """The distribution of chunks over programs.

    Attributes
    ----------
    sub_blocks : int
        A constant of the kernels: a power of two, at least MIN_SUB_BLOCKS and nnz.
    chunks_per_program : int
        A multiple of CHUNKS, and at most MAX_KEYS // sub_blocks unless it is CHUNKS.
    """

    sub_blocks: int
    chunks_per_program: int


def encoding(chunks: int, nnz: int) -> Encoding:
    """The launch for `chunks` pairs of a chunk and a tile."""
    sub_blocks = max(MIN_SUB_BLOCKS, next_power_of_two(nnz))
    batches = min(max(1, MAX_KEYS // sub_blocks // CHUNKS), max(1, chunks // (CHUNKS * MIN_PROGRAMS)))
    return Encoding(sub_blocks, CHUNKS * batches)
