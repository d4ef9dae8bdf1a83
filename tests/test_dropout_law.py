"""The dropout law: golden lanes, the independent reference, every binding of the one source, thresholds and scales."""

import inspect
import json
import sys
from fractions import Fraction
from pathlib import Path

import dropout_reference as witness
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

import sjlt
from sjlt.kernels.philox import dropout_keep, dropout_keep_lanes, dropout_lane, dropout_lanes, dropout_words
from sjlt.laws import dropout as dropout_law
from sjlt.laws import exact as law
from sjlt.laws.philox import define

VECTORS = json.loads((Path(__file__).parent / "vectors" / "dropout_and_iid_laws.json").read_text())["dropout"]
golden = pytest.mark.parametrize("v", VECTORS, ids=lambda v: "-".join(str(x) for x in list(v.values())[:4]))
PLAIN = define(dropout_law.FUNCTIONS, lambda f: f, int)
ARRAYS = define(dropout_law.FUNCTIONS, lambda f: f, np.uint64)


def key(seed):
    return seed & 0xFFFFFFFF, seed >> 32


@golden
def test_golden_lanes(v):
    bits, step, seed, first = v["bits"], v["step"], v["seed"], v["first_index"]
    places = range(first, first + len(v["lanes"]))
    assert [witness.lane(e, step, bits, seed) for e in places] == v["lanes"]
    log_lanes = dropout_law.log_lanes(bits)
    assert [PLAIN.lane_of(e, step, *key(seed), log_lanes) for e in places] == v["lanes"]
    words = (np.uint64(w) for w in (step, *key(seed), log_lanes))
    assert ARRAYS.lane_of(np.array(places, np.uint64), *words).tolist() == v["lanes"]


@golden
def test_golden_lanes_on_the_cpu_backend(v):
    """Thresholds recover the value u of a lane: it is kept for T = u and dropped for T = u + 1."""
    bits, lanes = v["bits"], v["lanes"]
    given = {"seed": v["seed"], "step": v["step"], "offset": v["first_index"], "bits": bits}
    for i, u in enumerate(lanes[:6]):
        for t, lives in ((u, True), (u + 1, False)):
            if 0 < t < 1 << bits:
                mask = sjlt.dropout_mask(len(lanes), t / (1 << bits), **given)
                assert mask[i] == lives
                assert mask.tolist() == [each >= t for each in lanes]


@triton.jit(do_not_specialize=["seed", "first", "step", "threshold"])
def device_functions(
    one, many, keep_one, keep_many, words, seed: tl.int64, first: tl.int64, step: tl.int64, threshold: tl.int64,
    BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The public functions on a tile [ROWS, COLUMNS] of consecutive elements starting at `first`, or at its call."""
    LANES: tl.constexpr = 128 // BITS
    CALLS: tl.constexpr = COLUMNS // LANES
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(one + at, dropout_lane(seed, first + at, step, BITS).to(tl.int64))
    tl.store(keep_one + at, dropout_keep(seed, first + at, step, threshold, BITS))
    calls = tl.arange(0, ROWS)[:, None] * CALLS + tl.arange(0, CALLS)[None, :]
    index = first // LANES + calls
    tl.store(many + at, dropout_lanes(seed, index, step, BITS).to(tl.int64))
    tl.store(keep_many + at, dropout_keep_lanes(seed, index, step, threshold, BITS))
    w0, w1, w2, w3 = dropout_words(seed, index, step)
    tl.store(words + calls * 4, w0.to(tl.int64))
    tl.store(words + calls * 4 + 1, w1.to(tl.int64))
    tl.store(words + calls * 4 + 2, w2.to(tl.int64))
    tl.store(words + calls * 4 + 3, w3.to(tl.int64))


@golden
def test_golden_lanes_in_triton(v, kernels_on):
    bits, step, first, seed = v["bits"], v["step"], v["first_index"], v["seed"]
    lanes, n = 128 // bits, 64
    one, many, words = (torch.zeros(n, dtype=torch.int64, device=kernels_on) for _ in range(3))
    keep_one, keep_many = (torch.zeros(n, dtype=torch.bool, device=kernels_on) for _ in range(2))
    signed, t = seed - (seed >> 63 << 64), v["lanes"][3]
    device_functions[(1,)](one, many, keep_one, keep_many, words, signed, first, step, t, bits, 2, n // 2)
    begin = first // lanes * lanes
    expected = [witness.lane(e, step, bits, seed) for e in range(begin, begin + 2 * n)]
    assert one.tolist() == expected[first - begin :][:n]
    assert one.tolist()[: len(v["lanes"])] == v["lanes"]
    assert many.tolist() == expected[:n]
    assert keep_one.tolist() == [u >= t for u in one.tolist()]
    assert keep_many.tolist() == [u >= t for u in expected[:n]]
    calls = [witness.call(begin // lanes + i, step, seed) for i in range(n // lanes)]
    assert words.tolist()[: 4 * len(calls)] == [c >> 32 * i & 0xFFFFFFFF for c in calls for i in range(4)]


@triton.jit
def row_seeds(out, seeds, steps, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row seeds and a step in memory; plain Python integers for the rest."""
    LANES: tl.constexpr = 128 // BITS
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    seed, step = tl.load(seeds + row), tl.load(steps)
    slow = dropout_keep(seed, column + row * 0, step, 77, BITS)
    fast = dropout_keep_lanes(seed, tl.arange(0, COLUMNS // LANES)[None, :] + row * 0, step, 77, BITS)
    tl.store(out + row * COLUMNS + column, slow.to(tl.int8) + 2 * fast.to(tl.int8))


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_seeds_and_steps_in_a_user_kernel(bits, kernels_on):
    seeds = torch.tensor([5, -3, 2**63 - 1, -(2**63)], device=kernels_on)
    out = torch.zeros(4, 32, dtype=torch.int8, device=kernels_on)
    row_seeds[(1,)](out, seeds, torch.tensor([9], device=kernels_on), bits, 4, 32)
    expected = [[3 * (witness.lane(e, 9, bits, s) >= 77) for e in range(32)] for s in seeds.tolist()]
    assert out.tolist() == expected


@triton.jit(do_not_specialize=["seed", "threshold"])
def drop(x, out, n, seed: tl.int64, threshold, scale, BLOCK: tl.constexpr):
    """The example of `sjlt.kernels.philox`."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start // 8 + tl.arange(0, BLOCK // 8)
    keep = dropout_keep_lanes(seed, index, 0, threshold, 16)
    i = start + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    tl.store(out + i, tl.where(keep, value * scale, 0.0), mask=i < n)


def test_philox_example(kernels_on):
    x = torch.randn(300, device=kernels_on)
    out, t = torch.empty_like(x), dropout_law.threshold(0.3, 16)
    drop[(3,)](x, out, 300, 5, t, dropout_law.scale(t, 16), BLOCK=128)
    assert torch.equal(out, sjlt.dropout(x, 0.3, 5))
    code = [line.strip() for line in inspect.getsource(drop.fn).splitlines() if '"""' not in line]
    shown = [line.strip() for line in sys.modules["sjlt.kernels.philox"].__doc__.splitlines()]
    assert all(line in shown for line in code)


# --------------------------------------------------------------------------------- thresholds


@given(st.floats(0, 1) | st.integers(0, 2**18).map(lambda n: n / 2**18), st.sampled_from([8, 16, 32]))
def test_threshold_is_exact(p, bits):
    """Equals floor(p 2^bits + 1/2) in rational arithmetic: no intermediate sum is rounded."""
    assert dropout_law.threshold(p, bits) == witness.threshold(p, bits)
    assert abs(Fraction(dropout_law.threshold(p, bits), 2**bits) - Fraction(p)) <= Fraction(1, 2 ** (bits + 1))


def test_threshold_at_ties():
    below_half = 0.5 - 2**-54  # adding 1/2 rounds to 1
    assert dropout_law.threshold(below_half / 2**8, 8) == 0
    assert dropout_law.threshold(0.5 / 2**8, 8) == 1
    assert dropout_law.threshold(1.5 / 2**32, 32) == 2


def test_scale():
    assert dropout_law.scale(1 << 15, 16) == 2
    assert dropout_law.scale(26, 8) == 256 / 230
    assert dropout_law.scale(1, 32) == 2**32 / (2**32 - 1)


# --------------------------------------------------------------------------------- streams


def test_streams_are_disjoint_from_the_projection():
    """For the same seed, no Philox call of dropout, at any index or step, is one of the sketch's."""
    assert dropout_law.TAG_DROPOUT == 0
    assert 0 not in {value for name, value in vars(law).items() if name.startswith("TAG_")}
    sketching = define(law.FUNCTIONS, lambda f: f, int)
    k = key(12345)
    for index in (0, 7, 2**35):
        dropped = {PLAIN.lane_words(index, step, *k) for step in range(4)}
        sketched = {sketching.chunk_keys(index, quad, *k, t) for quad in range(4) for t in range(3)}
        sketched |= {words(index, *k, t) for words in (sketching.chunk_signs, sketching.group_words) for t in range(3)}
        assert len(dropped) + len(sketched) == len(dropped | sketched)
