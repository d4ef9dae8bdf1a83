"""Few long vectors whose columns add to sums in shared memory: eligible products, and exactness."""

import itertools
import random

import numpy as np
import pytest
import reference
import torch
from helpers.cases import each_value_then_pairs, exhaustive_except, pairwise
from helpers.choices import (
    A100,
    EMULATED,
    HOPPER,
    SMALL_DEVICE,
    all_tensors_on,
    changed_choices,
    exact_product,
    forget_choices,
)
from helpers.kernels import check_project, product_error
from helpers.races import Races
from helpers.shared_memory import emulate
from hypothesis import example, given
from hypothesis import strategies as st

from sjlt import Sketch
from sjlt.backends.triton import device, exact
from sjlt.backends.triton import scattered_sums as backend
from sjlt.kernels.config import scattered_layouts, scattered_rules, scattered_sums
from sjlt.kernels.config.exact import choose
from sjlt.kernels.config.product import SCRATCH_BYTES, count_groups
from sjlt.kernels.nvidia.scattered_loads import spread_out
from sjlt.laws import exact as law

LONG = {"n": 4, "d": 1 << 22, "k": 300, "device": HOPPER}
SMALL = {"scattered_rules.MIN_BYTES": 0, "scattered_rules.MIN_FEATURES": 0}


@pytest.mark.parametrize(
    ("dtype", "n", "stride", "aligned", "width"),
    [
        ("float16", 32, 32, True, 8),
        ("float16", 32, 34, True, 2),
        ("float16", 30, 32, True, 2),  # a word would extend past the last element
        ("float16", 32, 32, False, 1),
        ("float32", 6, 6, True, 2),
        ("float32", 5, 6, True, 1),
        ("float64", 4, 4, True, 1),
    ],
)
def test_width_of_loads_of_contiguous_vectors(dtype, n, stride, aligned, width):
    product = exact_product(n, 1 << 22, 20, 2, x_strides=(1, stride), dtype=dtype, device=HOPPER, data_aligned=aligned)
    assert scattered_layouts.contiguous_vectors(product) == width
    kernel = scattered_sums.launch(product).kernel
    assert kernel.width == min(width, kernel.layout.lane_vectors)


@given(
    n=st.integers(1, 100), d=st.integers(1, (1 << 30) - 1), k=st.integers(1, 20_000), nnz=st.integers(1, 16),
    stacks=st.sampled_from([1, 2, 4]), dtype=st.sampled_from(["bfloat16", "float32", "float64"]), columns=st.booleans(),
    offset=st.sampled_from([0, 64, 12_345, 1 << 40]), described=st.sampled_from([HOPPER, A100, SMALL_DEVICE]),
    seed=st.integers(0, 1 << 30),
)  # fmt: skip
@example(21, 2_008_615, 26_488, 16, 1, "float64", True, 0, HOPPER, 0)  # more chunks than threads at first
@example(28, 11_491_868, 9, 9, 1, "float32", False, 0, A100, 0)
@example(29, 7_318_991, 17_301, 16, 1, "bfloat16", False, 0, A100, 0)
@example(13, 4_962_418, 16, 11, 1, "float64", False, 33, SMALL_DEVICE, 0)
@example(14, 603_825, 20_597, 9, 1, "bfloat16", False, 0, SMALL_DEVICE, 0)
def test_launches_cover_the_product(n, d, k, nnz, stacks, dtype, columns, offset, described, seed):
    if nnz > law.max_nnz(k):
        return
    strides = (1, n) if columns else (d, 1)
    product = exact_product(n, d, k, nnz, offset, x_strides=strides, dtype=dtype, device=described, stacks=stacks)
    every = [every_launch(product, by_slot) for by_slot in (False, True)]
    if scattered_sums.can_run(product):
        check_launch(product, scattered_sums.launch(product))
        found = scattered_sums._fastest(product)
        by_slot = found.kernel.layout.by_slot
        times = [[scattered_sums._time(product, launch) for launch in launches] for launches in every]
        # The first of those with the least estimate; with sums by slot if that is less and needs enough fewer lines.
        best = [found[times.index(min(times))] for found, times in zip(every, times, strict=True) if times]
        assert found == best[by_slot]
        gains = len(best) == 2 and scattered_layouts.may_be_by_slot(product) and min(times[1]) < min(times[0])
        if gains:
            lines = [scattered_sums._work(product, launch.kernel.layout)[0] for launch in best]
            gains = lines[1] < scattered_sums.MAX_SLOT_LINES * lines[0]
        assert by_slot == gains
    launches = every[0] + every[1]
    for launch in random.Random(seed).sample(launches, min(8, len(launches))):
        check_launch(product, launch)


def every_launch(product, by_slot):
    layouts = scattered_layouts.layouts(product, by_slot)
    return [launch for layout in layouts if (launch := scattered_sums._launch(product, layout)) is not None]


def check_launch(product, launch):
    kernel, layout, g, item = launch.kernel, launch.kernel.layout, product.geometry, max(4, product.item_bytes)
    n, d, nnz, rows = product.n, product.d, product.nnz * product.stacks, product.k * product.stacks
    batch = kernel.chunks << g.log_chunk
    batches = (product.offset + d - 1) // batch - product.offset // batch + 1
    assert (launch.splits - 1) * launch.batches_per_split < batches <= launch.splits * launch.batches_per_split
    assert launch.terms >= min(count_groups(product), launch.batches_per_split * max(1, kernel.chunks >> g.log_group))
    places = (4 << g.log_chunk) * g.n_tiles * nnz if layout.by_slot else rows
    assert kernel.rows >= places
    assert kernel.spread.lanes > 1 or not layout.by_slot
    assert kernel.rows % 32 == 0
    # A warp's lanes, and the window between two barriers, cover columns of one group, or use replicas.
    group = 1 << g.log_group + g.log_chunk
    window = layout.columns * kernel.together * (layout.sets if layout.shared else 1)
    assert kernel.groups == max(1, layout.columns // group)
    assert layout.replicas % kernel.groups == layout.vectors % layout.unit == 0
    assert layout.unit * item <= 16
    assert kernel.rotations in (1, 2, 4, 8, 16)
    assert layout.lane_vectors // layout.unit % kernel.rotations == 0
    assert window <= group or (kernel.together == 1 and not layout.shared)
    # Spread columns are in one chunk, and columns are permuted within a block, or within a step of all warps.
    assert kernel.spread.lanes * kernel.spread.stride <= 1 << g.log_chunk or kernel.spread.lanes == 1
    permuted = kernel.spread.lanes * max(kernel.spread.stride, layout.replicas * kernel.rotations // kernel.groups)
    assert kernel.spread.lanes == 1 or permuted <= layout.columns * (layout.sets if kernel.groups == 1 else 1)
    assert kernel.spread.lanes == 1 or permuted * kernel.groups <= layout.columns or kernel.groups == 1
    assert layout.copies == layout.replicas * (1 if layout.shared else layout.sets)
    assert nnz % layout.team == layout.warps % layout.team == 0
    # Batches consist of whole steps.
    assert kernel.chunks in (32, 64, 128, 256, 512)
    assert kernel.chunks <= 32 * layout.warps
    assert batch % (layout.columns * kernel.loaded * layout.sets) == 0
    assert kernel.loaded % kernel.together == 0
    assert kernel.width == 0 or layout.lane_vectors % kernel.width == n % kernel.width == 0
    assert layout.column_lanes == 1 or kernel.width > 0
    table = (kernel.chunks << kernel.log_parts) * nnz * 16
    sums = layout.copies * layout.vectors * kernel.rows * item
    assert table + sums + 16 <= kernel.shared_bytes <= product.device.shared_memory - 1024
    assert 32 << kernel.log_parts == max(32, 1 << g.log_chunk)
    assert launch.splits * n * rows * item <= max(SCRATCH_BYTES, product.x_bytes // 16)


@pytest.mark.parametrize("nnz", [1, 3, 4, 8])
@pytest.mark.parametrize("d", [70, 1000, 3000, 20_000])
def test_short_vectors_have_few_chunks(d, nnz):
    """A batch that contains all columns has no more than twice the chunks of the data, or 32."""
    product = exact_product(5000, d, 300, nnz, device=HOPPER)
    launch, chunks = scattered_sums.launch(product), -(-d >> product.geometry.log_chunk)
    assert launch.splits * launch.batches_per_split > 1 or launch.kernel.chunks < max(33, 2 * chunks)


def test_similar_numbers_of_rows_share_a_layout(monkeypatch):
    """Batches of different sizes neither search all layouts again, nor need another kernel each time."""
    assert [scattered_layouts.round_up(n, 3) for n in (1, 7, 8, 9, 129, 160, 161, 1000, 1025)] == [
        1, 7, 8, 10, 160, 160, 192, 1024, 1280
    ]  # fmt: skip
    forget_choices()
    searched, search = [], scattered_sums.layouts
    monkeypatch.setattr(
        scattered_sums, "layouts", lambda product, **kind: searched.append(product.n) or search(product, **kind)
    )
    launches = [scattered_sums.launch(exact_product(n, 1001, 577, 3, device=HOPPER)) for n in range(897, 1025)]
    assert len({launch.kernel.layout for launch in launches}) == 1
    assert searched == [1024, 1024]  # sums by row and by slot


def test_banks():
    """Lanes served at a time use different banks where a layout is said to avoid conflicts.

    They do for any rows if their columns are in order, otherwise for the rows, or the slots, of the law.
    """
    rng, free, spread = random.Random(7), 0, 0
    sketches = [(k, nnz) for k in (300, 5, 16, 2000, 100, 1024, 640) for nnz in (4, 1, 2, 5, 8) if nnz <= k]
    kinds = list(itertools.product([7, 16], ["float32", "float16"], [False, True]))
    for k, nnz in sketches:
        rows, _ = Sketch(256, k, nnz=nnz, seed=k).entries()  # (nnz, columns)
        slots = slots_of_columns(256, k, nnz, seed=k)
        for n, dtype, columns in kinds:
            strides = (1, n) if columns else (1 << 20, 1)
            product = exact_product(n, 1 << 20, k, nnz, x_strides=strides, dtype=dtype, device=HOPPER)
            by_row, by_slot = (scattered_layouts.layouts(product, by_slot) for by_slot in (False, True))
            for layout in [*by_row, *by_slot]:
                conflicts, rotations, (lanes, _) = kernel = scattered_layouts.bank_conflicts(product, layout)
                assert rotations == 1 or layout.unit > 1 or conflicts == 1 or layout.column_lanes > 1
                if conflicts == 1:
                    free += 1
                    spread += lanes > 1
                    places = (slots if layout.by_slot else rows)[rng.randrange(nnz)]
                    places = places if lanes > 1 else [rng.randrange(k) for _ in range(256)]
                    check_banks(product, layout, kernel, places, rng.randrange(1 << 10))
    assert free > 5000
    assert spread > 1500


def slots_of_columns(d, k, nnz, seed):
    """The slots that columns meet in each sub-block, (nnz, d)."""
    p, slots = reference.chunk_log2(k, nnz), np.empty((nnz, d), int)
    for t, column in itertools.product(range(nnz), range(d)):
        w = reference.words(column >> p, t // 4, reference.TAG_KEYS, seed)[t % 4]
        slots[t, column] = reference.beta(column % (1 << p), w, w >> 8, w >> 16, w >> 24, p)
    return slots


def check_banks(product, layout, kernel, rows, block):
    """Simulate one access to the sums of a sub-block, whose `rows` are those of consecutive columns, or their slots."""
    _, rotations, (spread, stride) = kernel
    groups = layout.groups(product)
    adjacent, banks = rotations * layout.column_lanes > 1, []
    for lane in range(128 // (4 * layout.unit)):
        own, share = lane // layout.column_lanes, lane % layout.column_lanes
        place = block * layout.columns + own % groups * (layout.columns // groups) + own // groups
        column = spread_out.fn(place, layout.replicas * rotations // groups, spread, stride)
        unit = own // layout.replicas % rotations
        row = int(rows[column % len(rows)])
        place = row * (layout.lane_vectors // layout.unit) + unit if adjacent else row
        place = (place * layout.replicas + own % layout.replicas) * layout.column_lanes + share
        banks.append(place * 4 * layout.unit % 128)
    assert len(set(banks)) == len(banks)


def test_columns_are_permuted_within_their_step():
    for kept, lanes, stride in itertools.product([1, 2, 4], [1, 2, 8, 32], [1, 4, 16]):
        run = lanes * max(kept, stride)
        for first in (0, run, 7 * run):
            columns = [spread_out.fn(first + i, kept, lanes, stride) for i in range(run)]
            assert sorted(columns) == list(range(first, first + run))
            assert [columns[i * kept] for i in range(lanes)] == [first + i * stride for i in range(lanes)]


CASES = [  # (k, nnz, stacks, n): each follows another path through the kernel
    (300, 4, 1, 3),
    (20, 4, 1, 2),  # replicas
    (20, 1, 1, 9),
    (1, 1, 1, 1),  # chunks of one column
    (100, 1, 1, 5),  # chunks of 64 columns
    (2000, 3, 1, 6),  # sums shared by the warps
    (2000, 1, 1, 1),
    (1000, 16, 1, 8),
    (320, 8, 1, 8),  # teams
    (256, 4, 2, 3),
    (384, 4, 1, 8),  # spread columns
    (512, 2, 1, 16),  # the same, in chunks of 64
    (1200, 12, 4, 1),
]


@pytest.mark.skipif(not device.INTERPRETED, reason="shared memory is emulated in Triton's interpreter")
@each_value_then_pairs(
    case=CASES, dtype=["float32", "float64", "bfloat16", "float16"], d=[300, 1, 6000], offset=[0, 345],
    x_in=["rows", "inner part", "columns"], out_in=["rows", "columns"], add=[False, True],
)  # fmt: skip
def test_products_emulated(monkeypatch, case, dtype, d, offset, x_in, out_in, add):
    k, nnz, stacks, n = case
    emulate(monkeypatch)
    all_tensors_on(monkeypatch, EMULATED)
    S = Sketch(offset + d, k, nnz=nnz, stacks=stacks, seed=3)[:, offset:]
    with changed_choices(SMALL):
        check_project(S, n, dtype, x_in=x_in, out_in=out_in, add=add and dtype in ("float32", "float64"))


MORE_CASES = [(23, 2, 1, 32), (40, 8, 1, 16), (700, 4, 1, 16), (640, 5, 1, 4), (900, 6, 1, 8), (600, 14, 2, 3)]
KINDS = [  # of layouts: (column_lanes, shared, several warps per team, warps, spread columns)
    (1, True, True, 8, True),
    (2, False, False, 8, False),
    (4, True, False, 16, False),
    (1, False, True, 16, True),
    (2, True, True, 16, True),
    (1, True, False, 8, False),
    (1, False, False, 4, True),
]


@pytest.fixture
def any_layout(monkeypatch):
    """A function (seed) -> (random sketch, number of vectors, dtype, order); it prefers layouts of KINDS[seed]."""
    used = []
    prepare = backend.prepare
    monkeypatch.setattr(backend, "prepare", lambda chosen, *rest: (used.append(chosen), prepare(chosen, *rest))[1])
    monkeypatch.setattr(exact, "choose", scattered_sums.launch)

    def draw(seed, d):
        rng, kind = random.Random(seed), KINDS[seed % len(KINDS)]

        def time(_, launch):
            layout, spread = launch.kernel.layout, launch.kernel.spread.lanes > 1
            its_kind = (layout.column_lanes, layout.shared, layout.team > 1, layout.warps, spread)
            return rng.random() + sum(a != b for a, b in zip(its_kind, kind, strict=True))

        monkeypatch.setattr(scattered_sums, "_time", time)
        monkeypatch.setattr(scattered_sums, "_least_time", lambda *_: 0)
        monkeypatch.setattr(scattered_sums, "MAX_SLOT_LINES", 100)
        k, nnz, stacks, n = rng.choice([*CASES, *MORE_CASES])
        dtype = rng.choice(["float32", "float64", "float16"])
        x_in = "columns" if kind[0] > 1 else rng.choice(["rows", "columns"])
        return Sketch(d, k, nnz=nnz, stacks=stacks, seed=seed)[:, rng.choice([0, 33]) :], n, dtype, x_in

    yield draw
    assert used


@pytest.mark.skipif(not device.INTERPRETED, reason="shared memory is emulated in Triton's interpreter")
@pytest.mark.parametrize("seed", exhaustive_except([0, 1, 2, 3, 4], range(70)))
def test_any_layout_of_sums_emulated(monkeypatch, any_layout, seed):
    races = Races(monkeypatch)
    emulate(monkeypatch)
    all_tensors_on(monkeypatch, EMULATED)
    S, n, dtype, x_in = any_layout(seed, 700)
    with changed_choices(SMALL):
        check_project(S, n, dtype, x_in=x_in)
    assert races.found == []


@pytest.mark.skipif(not device.INTERPRETED, reason="shared memory is emulated in Triton's interpreter")
@pytest.mark.parametrize(
    ("n", "k", "nnz", "dtype"),
    [(45, 40, 4, "float16"), pytest.param(150, 13, 2, "float32", marks=pytest.mark.exhaustive)],
)
def test_many_unaligned_rows_emulated(monkeypatch, n, k, nnz, dtype):
    emulate(monkeypatch)
    all_tensors_on(monkeypatch, EMULATED)
    with changed_choices(SMALL):
        assert scattered_rules.eligible(exact_product(n, 1301, k, nnz, dtype=dtype, device=EMULATED))
        check_project(Sketch(1301, k, nnz=nnz, seed=3), n, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k", "nnz", "dtype"), [(45, 90, 4, "float16"), (2000, 32, 3, "bfloat16")])
def test_many_unaligned_rows(n, k, nnz, dtype):
    d = 3001
    always = {"scattered_rules.MAX_CYCLES": dict.fromkeys(scattered_rules.MAX_CYCLES, 1 << 40)}
    with changed_choices(SMALL | always):
        assert isinstance(choose(exact_product(n, d, k, nnz, dtype=dtype, device=HOPPER)), scattered_sums.ScatteredSums)
        check_project(Sketch(d, k, nnz=nnz, seed=3), n, dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(70))
def test_any_layout_of_sums(any_layout, seed):
    S, n, dtype, x_in = any_layout(seed, 8_000 if seed % 2 else 100_000)
    with changed_choices(SMALL):
        check_project(
            S, n, "float32" if dtype == "float16" and S.shape[1] > 10_000 else dtype, device="cuda", x_in=x_in
        )


@pytest.mark.gpu
@pairwise(
    lambda case, dtype, d, *_: "16" not in dtype or d < 10_000,  # its results are exact in 16 bits
    case=[*CASES, (4096, 4, 4, 2), (1088, 8, 1, 1), (23, 2, 1, 32), (16_000, 2, 1, 1), (383, 3, 1, 17)],
    dtype=["float32", "float64", "bfloat16", "float16"], d=[3000, 100_000, 1_234_567],
    offset=[0, 12_345, (1 << 40) + 7], x_in=["rows", "inner part", "columns", "inner part of columns"],
    out_in=["rows", "columns"], add=[False, True],
)  # fmt: skip
def test_products(case, dtype, d, offset, x_in, out_in, add):
    k, nnz, stacks, n = case
    S = Sketch(offset + d, k, nnz=nnz, stacks=stacks, seed=-3)[:, offset:]
    with changed_choices(SMALL):
        check_project(S, n, dtype, device="cuda", x_in=x_in, out_in=out_in, add=add and dtype in ("float32", "float64"))


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "nnz", "stacks", "n"), CASES)
def test_non_finite_values_reach_only_their_rows(k, nnz, stacks, n):
    S = Sketch(50_000, k, nnz=nnz, stacks=stacks, seed=3)
    x = torch.randn(n, 50_000, device="cuda")
    x[n - 1, 4000] = torch.inf
    with changed_choices(SMALL):
        y = S.project(x)
    rows, _ = S.entries(4000, 4001)
    expected = np.zeros((n, k), bool)
    expected[n - 1, rows.ravel()] = True
    np.testing.assert_array_equal(~y.isfinite().cpu().numpy(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize(("k", "nnz", "stacks", "n"), [(16, 3, 1, 1), (300, 4, 1, 8), (2048, 4, 4, 2)])
def test_errors(k, nnz, stacks, n, dtype, limit):
    S = Sketch(20_000_000, k, nnz=nnz, stacks=stacks, seed=3)
    x = torch.randn(n, S.n_features, device="cuda", dtype=dtype)
    exact = torch.from_numpy(S.project(x.double().cpu().numpy())).cuda()
    first = S.project(x)
    assert product_error(first, exact) < limit
    assert torch.equal(S.project(x), first)
