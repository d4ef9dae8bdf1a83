"""Launches of `encode_chunks` and `write_entries`, which store the entries of a sketch for the kernel that follows."""

from __future__ import annotations

from typing import NamedTuple

from ...laws import exact as law
from .product import next_power_of_two

CHUNKS = 8  # a program's chunks are a multiple of this
MIN_SUB_BLOCKS = 8  # one compiled kernel serves every smaller nnz
MAX_KEYS = 512  # sub-block keys that a program holds in shared memory
# A program processes several batches of CHUNKS chunks if this many programs remain: of `write_entries`, and of
# `encode_chunks`, which derives the words of MAX_KEYS sub-blocks in any case.
MIN_PROGRAMS, MIN_ENCODERS = 1024, 256
LINES = 64  # blocks whose codes lie in shared memory at a time; a chunk has at most 4
ENTRY_BYTES, SIGN_WORDS, WORD_BYTES = 16, 4, 4  # of a sub-block and of a chunk, in shared memory
LOG_RUN = 3  # of the blocks in a run; every program has whole runs, as CHUNKS is a multiple of 2^LOG_RUN
MAX_LOG_BLOCK = 2  # of blocks that form runs; runs of 8 columns take 0.97 to 1.1 times as long as single blocks (H200)


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


def encoding(chunks: int, nnz: int, programs: int = MIN_PROGRAMS) -> Encoding:
    """The launch for `chunks` pairs of a chunk and a tile, by at least `programs` programs if possible."""
    sub_blocks = max(MIN_SUB_BLOCKS, next_power_of_two(nnz))
    batches = min(max(1, MAX_KEYS // sub_blocks // CHUNKS), max(1, chunks // (CHUNKS * programs)))
    return Encoding(sub_blocks, CHUNKS * batches)


def shared_bytes(sub_blocks: int) -> int:
    """Shared memory of `encode_chunks`: codes, and the words of all sub-blocks and chunks of a program."""
    chunks = max(MAX_KEYS // sub_blocks, CHUNKS)
    return LINES * law.TILE_ROWS + chunks * (sub_blocks * ENTRY_BYTES + SIGN_WORDS * WORD_BYTES) + ENTRY_BYTES
