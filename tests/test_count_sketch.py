"""CountSketch: tables, medians, and heavy hitters found without holding all features in memory."""

import statistics
import tracemalloc

import numpy as np
import pytest
import reference
import torch
from helpers.cases import each_value, pairwise
from helpers.data import integers
from hypothesis import given
from hypothesis import strategies as st

from sjlt import CountSketch
from sjlt.count_sketch import median


def reference_table(n, rows, columns, seed, x, offset=0):
    """The table of x and the (column, sign) of each element per row, by the plain-integer reference."""
    table = np.zeros((rows, columns))
    entries = np.empty((rows, n), object)
    for t in range(rows):
        row_seed = reference.table_row_seed(t, seed)
        for j in range(n):
            (column,), (sign,) = reference.entries(columns, 1, row_seed, offset + j)
            table[t, column] += sign * x[j]
            entries[t, j] = column, sign
    return table, entries


@pairwise(rows=[1, 2, 3, 5], columns=[1, 7, 128, 300], seed=[0, 2**64 - 1], dtype=["float32", "float64"])
def test_tables_and_estimates(rows, columns, seed, dtype):
    x = integers(90, dtype, seed=1)
    C = CountSketch(90, rows, columns, seed=seed)
    expected, entries = reference_table(90, rows, columns, seed, x)
    table = C.sketch(x)
    assert table.dtype == dtype
    assert np.array_equal(table, expected)
    estimates = [statistics.median(sign * expected[t, c] for t, (c, sign) in enumerate(e)) for e in entries.T]
    assert np.array_equal(C.query(table, np.arange(90)), estimates)
    assert np.array_equal(C.query(table, np.array([[5, 5], [89, 0]])), np.array(estimates)[[[5, 5], [89, 0]]])
    values, indices = C.topk(table, 90)
    assert np.array_equal(np.sort(indices), np.arange(90))
    assert np.array_equal(values, np.array(estimates)[indices])
    assert np.all(np.diff(np.abs(values)) <= 0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_heavy_hitters_are_found(device, monkeypatch):
    """20 values of magnitude 60 to 250 among 300,000 of N(0, 1), in several blocks; a 5 x 4096 table errs by 9."""
    monkeypatch.setattr("sjlt.count_sketch.CUDA_BLOCK", 1 << 16)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300_000, generator=generator)
    places = torch.randperm(300_000, generator=generator)[:20]
    x[places] = 100.0 * (1 + torch.arange(20)) / 10 + 50
    x[places[::2]] *= -1
    x = x.to(device)
    C = CountSketch(300_000, 5, 4096, seed=2)
    table = C.sketch(x)
    values, indices = C.topk(table, 20)
    assert values.device == x.device
    assert set(indices.tolist()) == set(places.tolist())
    assert torch.equal(values, C.query(table, indices))
    assert float((values - x[indices]).abs().max()) < 45
    again = C.topk(table, 20)
    assert torch.equal(values, again[0])
    assert torch.equal(C.sketch(x), table)


def test_tables_are_linear():
    x, y = integers((2, 1000), "float64")
    C = CountSketch(1000, 3, 50, seed=4)
    assert np.array_equal(C.sketch(x) + C.sketch(y), C.sketch(x + y))
    parts = [C.sketch(x[a:b], offset=a) for a, b in ((0, 300), (300, 300), (300, 999), (999, 1000))]
    assert np.array_equal(sum(parts), C.sketch(x))


@each_value(dtype=[torch.bfloat16, torch.float32])
def test_trees(dtype):
    tree = {"a": torch.from_numpy(integers((4, 5), "float32")).to(dtype).t(), "b": [torch.ones(3, dtype=dtype)]}
    flat = torch.cat([tree["a"].reshape(-1), tree["b"][0]])
    C = CountSketch(23, 3, 16)
    table = C.sketch(tree)
    assert table.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(table.double(), C.sketch(flat.double()))
    assert torch.equal(C.sketch(tree["a"].to_sparse_coo(), offset=0), C.sketch(tree["a"], offset=0))
    assert not C.sketch(flat.clone().requires_grad_()).requires_grad


@pytest.mark.filterwarnings("error")
def test_array_layouts():
    x = integers((9, 10), "float64", seed=1)
    C = CountSketch(90, 3, 16)
    for y in (x.T, x[::-1], x[:, ::-1]):
        expected = C.sketch(np.array(y, order="C"))
        assert np.array_equal(C.sketch(y), expected)
        assert np.array_equal(C.sketch(torch.from_numpy(np.array(y, order="C"))), expected)
    for dtype, of_table in ((">f8", "f8"), (">f4", "f4"), ("f2", "f4"), ("i1", "f8"), (">i2", "f8"), ("?", "f8")):
        table = C.sketch(x.astype(dtype))
        assert table.dtype == of_table
        assert np.array_equal(table, C.sketch(x.astype(dtype).astype(np.float64)))
    locked = x.copy()
    locked.flags.writeable = False
    table = C.sketch(locked)
    estimates = C.query(table, np.arange(90))
    locked = table.copy()
    locked.flags.writeable = False
    for held in (locked, table.astype(">f8"), np.asfortranarray(table), table[::-1].copy()[::-1]):
        assert np.array_equal(C.query(held, np.arange(90)), estimates)
        assert np.array_equal(C.topk(held, 3)[0], C.topk(table, 3)[0])


def test_integer_types_of_indices():
    C = CountSketch(90, 3, 16)
    table = C.sketch(integers(90, "float64", seed=1))
    expected = C.query(table, np.array([5, 89]))
    for dtype in ("i1", "u1", "i2", ">i2", "u2", "i4", "u4", "i8", "u8"):
        assert np.array_equal(C.query(table, np.array([5, 89], dtype)), expected)
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint64):
        assert np.array_equal(C.query(table, torch.tensor([5, 89], dtype=dtype)), expected)
    assert np.array_equal(C.query(table, [5, 89]), expected)
    assert C.query(table, []).shape == (0,)


def test_rows_are_independent_of_table_size():
    x = integers(100, "float64")
    table = CountSketch(100, 5, 40, seed=6).sketch(x)
    assert np.array_equal(CountSketch(2**60, 3, 40, seed=6).sketch(x, offset=0), table[:3])


@given(st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_median(rows, seed):
    x = np.random.default_rng(seed).integers(-3, 4, (rows, 20)).astype(float)
    found = median(list(torch.from_numpy(x)))
    assert np.array_equal(found.numpy(), np.median(x, axis=0))


def test_non_finite_values_propagate():
    x = np.zeros(1000, np.float32)
    x[7] = np.nan
    C = CountSketch(1000, 3, 64)
    values, _ = C.topk(C.sketch(x), 1)
    assert np.isnan(values[0])
    assert np.isnan(C.query(C.sketch(x), np.array([7])))


def test_memory_does_not_grow_with_features():
    """NumPy's peak over 10^7 features, where one float32 per feature would be 38 MiB."""
    C = CountSketch(10_000_000, 3, 1000)
    table = np.zeros((3, 1000), np.float32)
    table[0, 5] = table[1, 6] = 1
    C.topk(table, 5)
    tracemalloc.start()
    C.topk(table, 5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_refusals():
    C = CountSketch(100, 3, 10)
    table = np.zeros((3, 10))

    def refused(error, message, call, *arguments, **options):
        with pytest.raises(error, match=message):
            call(*arguments, **options)

    refused(ValueError, "rows must be from 1 to 1048576, got 0", CountSketch, 10, 0, 10)
    refused(ValueError, "columns must be from 1 to 8388480, got 8388481", CountSketch, 10, 1, 8388481)
    refused(TypeError, "seed must be an integer", CountSketch, 10, 1, 10, seed=1.5)
    refused(ValueError, "n_features = 100 got 99 elements: pass offset=", C.sketch, np.zeros(99))
    refused(ValueError, "n_features = 100 got 99 elements from 2 on", C.sketch, np.zeros(99), offset=2)
    refused(TypeError, "dtype complex128 is not supported", C.sketch, np.zeros(100, complex))
    refused(TypeError, "float128|longdouble", C.sketch, np.zeros(100, np.longdouble))
    refused(TypeError, "masked arrays are not supported", C.sketch, np.ma.array(np.zeros(100), mask=True))
    refused(TypeError, "masked arrays are not supported", C.query, np.ma.array(table), np.array([1]))
    refused(TypeError, "masked arrays are not supported", C.query, table, np.ma.array([1]))
    refused(TypeError, "got str", C.sketch, ["x"])
    refused(ValueError, r"must have shape \(3, 10\), got \(10, 3\)", C.query, table.T, np.array([1]))
    refused(TypeError, "float32 or float64, got float16", C.query, table.astype("float16"), np.array([1]))
    refused(TypeError, "must be an array or a tensor, got list", C.topk, [[0.0]], 1)
    refused(TypeError, "indices must be integers, got float64", C.query, table, np.array([1.0]))
    refused(TypeError, "indices must be integers, got bool", C.query, table, [True])
    refused(TypeError, "indices must be integers, got float32", C.query, table, torch.tensor([]))
    refused(IndexError, f"got 1 to {2**64 - 1}", C.query, table, np.array([1, 2**64 - 1], np.uint64))
    refused(IndexError, "from 0 to 99, got 1 to 100", C.query, table, np.array([1, 100]))
    refused(IndexError, "from 0 to 99, got -1 to 1", C.query, table, np.array([1, -1]))
    refused(ValueError, "k must be from 0 to 100, got 101", C.topk, table, 101)
    assert C.topk(table, 0)[0].shape == (0,)
    assert C.query(table, np.empty((2, 0), np.int64)).shape == (2, 0)


def test_negated_views():
    """Tensors with the negative bit, as of `z.conj().imag`, are negated when they are read."""
    C = CountSketch(200, 3, 16, seed=1)
    table = C.sketch(torch.randn(200))
    negated = torch._neg_view(-table)
    assert torch.equal(C.query(negated, torch.arange(9)), C.query(table, torch.arange(9)))
    for found, expected in zip(C.topk(negated, 5), C.topk(table, 5), strict=True):
        assert torch.equal(found, expected)
