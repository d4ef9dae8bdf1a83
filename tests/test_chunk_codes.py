"""The codes of a sketch decode to its entries, for any geometry, slice and split."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from helpers.cases import exhaustive_except
from helpers.shared_memory import emulate

from sjlt import Sketch
from sjlt.backends.triton import device
from sjlt.backends.triton.launcher import Launch
from sjlt.kernels.config.chunk_codes import LOG_RUN, MAX_LOG_BLOCK, encoding, shared_bytes
from sjlt.kernels.nvidia.encode_chunks import encode_chunks
from sjlt.kernels.nvidia.row_words import fraction_step, row_of, words_of_rows
from sjlt.kernels.nvidia.shared_memory import LIBRARIES
from sjlt.kernels.portable.chunk_codes import NO_COLUMN, NO_ENTRY, key_words, sign_words, tile_rows
from sjlt.kernels.portable.chunk_rows import entries_of_rows, row_words, sub_blocks_of_rows
from sjlt.kernels.portable.law import part_start, seed_words
from sjlt.laws import exact as law

DEVICE = "cpu" if device.INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch):
    if device.INTERPRETED:
        emulate(monkeypatch)


def decode(
    k, nnz, seed, offset, d, splits, log_block, stacks=1, per_program=8, windows=False, log_rows=7, log_run=0
):  # fmt: skip
    """The dense matrix (k, d) that the codes encode; each position is written at most once."""
    g = law.geometry(k // stacks, nnz // stacks, 0)
    n_tiles = stacks * g.n_tiles
    log_width = g.log_group + g.log_chunk
    first = offset >> log_width
    groups = ((offset + d - 1) >> log_width) + 1 - first
    per_split = -(-groups // (splits << log_run)) << log_run
    splits = -(-groups // per_split)
    capacity = per_split << (g.log_chunk - log_block + windows)
    lists = splits * n_tiles
    codes = torch.zeros((lists, capacity >> log_run, 1 << log_rows, 1 << log_run), dtype=torch.uint8, device=DEVICE)
    columns = torch.full((lists, capacity), -(1 << 20), dtype=torch.int32, device=DEVICE)
    counts = torch.full((lists + 1,), -1, dtype=torch.int32, device=DEVICE)
    sub_blocks = encoding(1, nnz // stacks).sub_blocks
    grid = (-(-per_split // per_program), n_tiles << windows, splits)
    numbers = (
        offset,
        d,
        k // stacks,
        nnz // stacks,
        g.n_tiles,
        g.log_group,
        g.log_chunk,
        log_block,
        first,
        groups,
        per_split,
        per_program,
        capacity,
        log_rows,
        log_run,
    )
    constants = {"SUB_BLOCKS": sub_blocks, "WINDOWS": windows, "PROGRAMMATIC_LAUNCH": False, "num_warps": 4}
    constants |= {"SHARED_BYTES": shared_bytes(sub_blocks), "extern_libs": LIBRARIES}
    run = Launch(encode_chunks, grid, codes.get_device(), (), numbers, (sub_blocks, windows), lambda: constants)
    run((codes, columns, counts), seed)
    assert counts[-1] == 0  # a counter for the next kernel
    matrix = np.zeros((k, d), np.int64)
    codes = codes.transpose(2, 3).reshape(lists, capacity, 1 << log_rows)
    codes, columns, counts = codes.cpu().numpy(), columns.cpu().numpy(), counts.cpu().numpy()
    for number in range(lists):
        tile = number % n_tiles
        rows = range(tile * k // n_tiles, (tile + 1) * k // n_tiles)
        if windows:
            rows = range(128 * tile, min(128 * (tile + 1), k))
        for i in range(counts[number]):
            start = columns[number, i]
            if start >= NO_COLUMN.value:
                continue
            for place, row in enumerate(rows):
                code = int(codes[number, i, place])
                column = start + (code & 127)
                if (code & 127) < 1 << log_block and 0 <= column < d:
                    assert matrix[row, column] == 0
                    matrix[row, column] = -1 if code >> 7 else 1
            assert all(codes[number, i, len(rows) :] & 127 == NO_ENTRY.value)
        rest = -int(counts[number]) % (1 << log_run)
        assert (codes[number, counts[number] :][:rest] == NO_ENTRY.value).all()
    return matrix


@pytest.mark.parametrize(
    ("k", "nnz", "offset", "d", "splits", "log_block"),
    [
        (128, 4, 0, 100, 1, 5),
        (128, 1, 0, 300, 1, 5),  # chunks of 128 columns, in blocks of 32
        (256, 1, 77, 400, 2, 6),
        (64, 3, 5, 90, 2, 4),
        pytest.param(16, 8, 3, 50, 1, 1, marks=pytest.mark.exhaustive),
        (300, 4, 1000, 333, 3, 4),
        pytest.param(1000, 8, 2**31 + 13, 200, 1, 3, marks=pytest.mark.exhaustive),
        pytest.param(640, 5, 64, 300, 2, 4, marks=pytest.mark.exhaustive),
        pytest.param(129, 64, 0, 20, 1, 0, marks=pytest.mark.exhaustive),
        (777, 2, 2**40, 500, 2, 5),
    ],
)
def test_codes_decode_to_the_entries(k, nnz, offset, d, splits, log_block):
    sketch = Sketch(offset + d, k, nnz=nnz, seed=-5)
    rows, signs = sketch.entries(offset, offset + d)
    expected = np.zeros((k, d), np.int64)
    expected[rows, np.arange(d)] = signs
    assert np.array_equal(decode(k, nnz, -5, offset, d, splits, log_block), expected)


@pytest.mark.parametrize(
    ("k", "nnz", "offset", "d", "splits", "log_block"),
    [
        (192, 4, 0, 300, 1, 4),
        (1344, 3, 5, 400, 1, 5),
        (1984, 2, 0, 700, 1, 5),  # a power of two of tiles
        (1001, 1, 77, 500, 2, 4),
        (512, 4, 0, 300, 1, 5),  # windows are tiles
        pytest.param(129, 8, 3, 100, 2, 3, marks=pytest.mark.exhaustive),
        pytest.param(3968, 8, 2**40, 900, 1, 4, marks=pytest.mark.exhaustive),
    ],
)
def test_codes_of_windows(k, nnz, offset, d, splits, log_block):
    """Every entry is in the list of the 128 aligned rows to which its row belongs."""
    rows, signs = Sketch(offset + d, k, nnz=nnz, seed=9).entries(offset, offset + d)
    expected = np.zeros((k, d), np.int64)
    expected[rows, np.arange(d)] = signs
    assert np.array_equal(decode(k, nnz, 9, offset, d, splits, log_block, windows=True), expected)


@pytest.mark.parametrize(
    ("k", "nnz", "offset", "d", "splits", "log_rows"),
    [
        (22, 8, 0, 101, 1, 6),  # blocks of 2 columns
        (32, 5, 3, 150, 2, 5),
        (60, 8, 5, 300, 2, 6),
        (100, 16, 2**31 + 13, 333, 3, 7),
        pytest.param(128, 64, 77, 100, 1, 7, marks=pytest.mark.exhaustive),
        pytest.param(20, 3, 0, 1, 1, 6, marks=pytest.mark.exhaustive),
        pytest.param(60, 8, 16, 3000, 1, 6, marks=pytest.mark.exhaustive),
    ],
)
def test_codes_in_runs(k, nnz, offset, d, splits, log_rows):
    """The codes of a row in 8 successive blocks are adjacent."""
    log_chunk = law.geometry(k, nnz, 0).log_chunk
    assert 0 < log_chunk <= MAX_LOG_BLOCK
    rows, signs = Sketch(offset + d, k, nnz=nnz, seed=4).entries(offset, offset + d)
    expected = np.zeros((k, d), np.int64)
    expected[rows, np.arange(d)] = signs
    decoded = decode(k, nnz, 4, offset, d, splits, log_chunk, log_rows=log_rows, log_run=LOG_RUN)
    assert np.array_equal(decoded, expected)


@pytest.mark.parametrize(
    ("k", "nnz", "stacks", "d", "splits"),
    [(256, 4, 4, 300, 1), (600, 6, 2, 500, 2), pytest.param(1024, 4, 2, 768, 3, marks=pytest.mark.exhaustive)],
)
def test_stacks_are_listed_consecutively(k, nnz, stacks, d, splits):
    rows, signs = Sketch(d, k, nnz=nnz, seed=7, stacks=stacks).entries()
    expected = np.zeros((k, d), np.int64)
    expected[rows, np.arange(d)] = signs
    assert np.array_equal(decode(k, nnz, 7, 0, d, splits, 4, stacks), expected)


@pytest.mark.parametrize("per_program", exhaustive_except([16], [8, 16, 64]))
def test_many_chunks_per_program(per_program):
    """One program derives the words of many chunks and encodes them in batches."""
    rows, signs = Sketch(3000, 300, nnz=6, seed=2).entries()
    expected = np.zeros((300, 3000), np.int64)
    expected[rows, np.arange(3000)] = signs
    assert np.array_equal(decode(300, 6, 2, 0, 3000, 1, 4, per_program=per_program), expected)


@triton.jit(do_not_specialize=["b", "p"])
def rows_of_columns(rows, keys, b, p, KEYS: tl.constexpr):
    """Store the rows [2^p, KEYS] of the columns of a chunk, in a sub-block of b rows."""
    columns, b, p = 1 << p, b.to(tl.uint32), p.to(tl.uint32)
    key = tl.arange(0, KEYS)
    w = tl.load(keys + key).to(tl.uint32, bitcast=True)
    first, second, row = words_of_rows(w, b * 0, b, fraction_step(b, p), p)
    for i in range(columns):
        column = (key * 0 + i).to(tl.uint32)
        tl.store(rows + i * KEYS + key, row_of(column, first, second, row, p).to(tl.int32))


@pytest.mark.parametrize("p", range(8))
def test_words_of_rows(p):
    """For every start of the rounding, which 12 bits of a key word decide, and arbitrary other bits."""
    keys = np.random.default_rng(p).integers(0, 1 << 32, 4096) & ~(0xFFF << 4) | np.arange(4096) << 4
    given = torch.from_numpy(keys.astype(np.uint32).view(np.int32)).to(DEVICE)
    for b in sorted({1 << p, (1 << p) + 1, 3 << p >> 1, (2 << p) - 1, 2 << p}):
        if b <= law.TILE_ROWS:
            rows = torch.full((1 << p, 4096), -1, dtype=torch.int32, device=DEVICE)
            rows_of_columns[(1,)](rows, given, b, p, 4096)
            assert np.array_equal(rows.cpu(), law.row_in_sub_block(np.arange(1 << p)[:, None], keys, b, p))


@triton.jit
def chunk_by_row(rows, columns, negatives, c: tl.int64, m, seed: tl.int64, k, nnz, n_tiles, log_chunk):
    """Store rows, columns and negatives [128] of the entries of tile m in chunk c; row -1 where there is none."""
    k0, k1 = seed_words(seed)
    in_tile, s, p = tile_rows(m, k, n_tiles), nnz.to(tl.uint32), log_chunk.to(tl.uint32)
    words = row_words(c + tl.arange(0, 1).to(tl.int64), in_tile, s, k0, k1, (m * 0).to(tl.uint32), 4)
    column, negative, there = entries_of_rows(tl.arange(0, 1), words, sub_blocks_of_rows(in_tile, s), p, 4)
    r = tl.arange(0, 128)[None, :]
    tl.store(rows + r, tl.where(there, r, -1))
    tl.store(columns + r, column.to(tl.int32))
    tl.store(negatives + r, negative.to(tl.int32))


@triton.jit
def chunk_by_column(rows, columns, negatives, c: tl.int64, m, seed: tl.int64, k, nnz, n_tiles, log_chunk):
    """As `chunk_by_row`."""
    k0, k1 = seed_words(seed)
    in_tile, s, p = tile_rows(m, k, n_tiles), nnz.to(tl.uint32), log_chunk.to(tl.uint32)
    e = tl.arange(0, 128)
    there = e < nnz << log_chunk
    t, i = tl.minimum(e >> log_chunk, nnz - 1).to(tl.uint32), (e & ((1 << log_chunk) - 1)).to(tl.uint32)
    chunk = c + tl.arange(0, 1).to(tl.int64)
    keys = tl.reshape(key_words(chunk, k0, k1, (m * 0).to(tl.uint32), 4), 4)
    begin = part_start(t, in_tile, s)
    b = part_start(t + 1, in_tile, s) - begin
    first, second, row = words_of_rows(tl.gather(keys, t.to(tl.int32), 0), begin, b, fraction_step(b, p), p)
    sign = tl.gather(sign_words(chunk, k0, k1, (m * 0).to(tl.uint32)), e >> 5, 0) >> (e & 31).to(tl.uint32)
    tl.store(rows + e, tl.where(there, row_of(i, first, second, row, p).to(tl.int32), -1))
    tl.store(columns + e, i.to(tl.int32))
    tl.store(negatives + e, (sign & 1).to(tl.int32))


@pytest.mark.parametrize("kernel", [chunk_by_row, chunk_by_column])
@pytest.mark.parametrize("k", [8_000_001, law.MAX_N_COMPONENTS - 1])
@pytest.mark.parametrize("where", [0.0, 0.55, 0.9999])
def test_largest_sketches(k, where, kernel):
    """Products with the tile index exceed 31 bits."""
    g = law.geometry(k, 4, 0)
    tile, seed, width = int(where * g.n_tiles), 5, 1 << g.log_chunk
    first, stop = tile * k // g.n_tiles, (tile + 1) * k // g.n_tiles
    rows, signs = Sketch(width << g.log_group + 2, k, nnz=4, seed=seed).entries()
    chunk = int(np.flatnonzero((rows >= first).all(0) & (rows < stop).all(0))[0]) // width
    found = [torch.full((128,), -2, dtype=torch.int32, device=DEVICE) for _ in range(3)]
    kernel[(1,)](*found, chunk, tile, seed, k, 4, g.n_tiles, g.log_chunk)
    columns = slice(chunk * width, (chunk + 1) * width)
    expected = {
        (int(row) - first, column, int(sign))
        for column in range(width)
        for row, sign in zip(rows[:, columns][:, column], signs[:, columns][:, column], strict=True)
    }
    entries = zip(*(values.tolist() for values in found), strict=True)
    assert {(row, column, 1 - 2 * negative) for row, column, negative in entries if row >= 0} == expected
