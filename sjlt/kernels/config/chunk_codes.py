"""Launches of the kernels that write a sketch's entries for later: `encode_chunks` and `write_entries`."""

from __future__ import annotations

from typing import NamedTuple

from .product import next_power_of_two

CHUNKS = 8  # chunks whose rows a program encodes at a time
MIN_SUB_BLOCKS = 8  # one compiled kernel serves all smaller nnz
MAX_KEYS = 512  # keys of sub-blocks that a program holds in shared memory
MIN_PROGRAMS = 1024  # that have more to do than one batch of CHUNKS chunks


class Encoding(NamedTuple):
    """The division of chunks among programs.

    Attributes
    ----------
    sub_blocks : int
        A constant of the kernels: at least MIN_SUB_BLOCKS and nnz, a power of two.
    chunks_per_program : int
        A multiple of CHUNKS, at most MAX_KEYS // sub_blocks or CHUNKS.
    """

    sub_blocks: int
    chunks_per_program: int


def encoding(chunks: int, nnz: int) -> Encoding:
    """The launch for so many pairs of a chunk and a tile in all."""
    sub_blocks = max(MIN_SUB_BLOCKS, next_power_of_two(nnz))
    batches = min(max(1, MAX_KEYS // sub_blocks // CHUNKS), max(1, chunks // (CHUNKS * MIN_PROGRAMS)))
    return Encoding(sub_blocks, CHUNKS * batches)
