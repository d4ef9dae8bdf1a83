"""16-bit results of `project_codes_hopper` that other warps than the consumers store, and programs kept in step."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
from helpers.cases import pairwise
from helpers.choices import HOPPER, changed_choices, exact_product
from helpers.codes import all_sizes_on_hopper
from helpers.kernels import check_project, project

from sjlt import Sketch
from sjlt.backends.triton import device
from sjlt.kernels.config import hopper_codes

gluon_only = pytest.mark.skipif(
    not triton.__version__.startswith(device.GLUON_VERSIONS), reason="Gluon differs in this version"
)


@pytest.mark.parametrize(
    ("changed", "staged"),
    [
        ({}, True),
        ({"dtype": "float32"}, False),
        ({"k": 768}, False),  # tiles are aligned: stored by the TMA
        ({"k": 768, "y_strides": (769, 1)}, True),
        ({"plain": False}, False),  # accumulates, or rounds to another dtype
        ({"y_strides": (2 * 777, 2)}, False),
        ({"x_strides": (777, 1)}, True),
        ({"x_strides": (1, 100_000)}, False),  # each consumer has half of a tile's rows, which are contiguous
        ({"k": 778, "x_strides": (1, 100_000), "y_strides": (1, 100_000)}, True),
        ({"x_strides": (1, 100_001), "y_strides": (1, 100_001)}, True),
        ({"n": 1000, "d": 100_000}, False),  # splits
        ({"n": 20_000, "d": 8000, "k": 101}, False),  # shared products
        ({"n": 300_000, "d": 3072, "k": 74, "nnz": 8}, False),  # two expanders
    ],
)
def test_choice(changed, staged):
    product = exact_product(**{"n": 100_000, "d": 768, "k": 777, "dtype": "bfloat16", "device": HOPPER} | changed)
    kernel = hopper_codes.launch(product).kernel
    assert (kernel.result_line_bytes > 0) == staged
    if staged:
        shape = kernel.part_vectors, kernel.part_rows
        assert (kernel.part_lines, kernel.part_run) == (shape[::-1] if kernel.out_vectors_contiguous else shape)
        assert kernel.result_line_bytes == 2 * kernel.part_run + 16


@pytest.mark.parametrize(
    ("changed", "in_step"),
    [
        ({}, True),
        ({"dtype": "float32"}, True),
        ({"dtype": "float32", "x_strides": (1, 472_599)}, False),
        ({"x_strides": (1, 472_600)}, False),  # consumers store the result
        ({"k": 1792}, False),  # tiles are aligned
        ({"k": 1760}, False),  # windows are aligned
        ({"k": 1752}, True),
        ({"k": 1752, "n": 60_000}, False),
        ({"k": 1756, "dtype": "float32", "n": 60_000}, True),
        ({"k": 1756, "dtype": "float32", "n": 30_000}, False),
        ({"k": 1759, "dtype": "float32", "n": 60_000}, True),  # stored by threads
        ({"k": 1568, "y_strides": (1576, 1)}, True),  # 14 tiles of 224 bytes; rows begin within sectors
        ({"k": 1568}, False),
        ({"d": 768}, False),
        ({"n": 100_000}, False),  # few rounds
        ({"d": 40, "k": 120}, False),  # one tile
        ({"plain": False}, False),
        ({"y_strides": (2 * 1759, 2)}, False),
        ({"x_strides": (1, 472_599), "y_strides": (1, 472_599)}, True),
        ({"x_strides": (1, 472_599), "y_strides": (1, 472_608)}, False),  # blocks of vectors share no sectors
        ({"k": 586, "stacks": 3}, True),
        ({"k": 300, "stacks": 3}, False),
    ],
)
def test_choice_of_programs_in_step(changed, in_step):
    product = exact_product(**{"n": 472_599, "d": 384, "k": 1759, "dtype": "float16", "device": HOPPER} | changed)
    assert hopper_codes.launch(product).kernel.in_step == in_step


class _Array(np.ndarray):
    def to(self, *_, **__):
        return self


def _shifted(words, shift, count, align):
    """As `warp_loads.shifted`."""
    assert align == 2
    shift = np.broadcast_to(shift % 16, words[0].shape).astype(np.uint64)
    word, bits = (shift // 4).astype(int), shift % 4 * 8
    at = [np.choose(word + i, [*words, words[-1]]).astype(np.uint64) for i in range(count + 1)]
    return tuple(((at[i] | at[i + 1] << np.uint64(32)) >> bits).astype(np.uint32) for i in range(count))


@gluon_only
@pytest.mark.parametrize(
    ("vectors", "rows", "contiguous"),
    [
        (64, 64, False),
        pytest.param(64, 128, False, marks=pytest.mark.exhaustive),
        pytest.param(64, 128, True, marks=pytest.mark.exhaustive),
    ],
)
def test_lines_are_stored_exactly(vectors, rows, contiguous, monkeypatch):
    """Every element of every line is stored, once, and nothing else; lines begin and end anywhere."""
    from sjlt.kernels.hopper import staged_results

    lines, run = (rows, vectors) if contiguous else (vectors, rows)
    line_bytes, before = 2 * run + 16, 64
    kernel = SimpleNamespace(part_lines=lines, part_run=run, result_line_bytes=line_bytes)
    shared = np.random.default_rng(0).integers(0, 1 << 16, (before + lines * line_bytes + 32) // 2, dtype=np.uint16)
    stored, times = np.zeros(1 << 16, np.uint16), np.zeros(1 << 16, int)

    def load_words(address):
        assert (address % 16 == 0).all()
        return tuple(shared.view(np.uint32)[address // 4 + i] for i in range(4))

    def store(address, values, mask):
        at = np.broadcast_to(address // 2, mask.shape)[mask]
        stored[at] = np.broadcast_to(values, mask.shape)[mask]
        np.add.at(times, at, 1)

    def store_four(address, words, keep):
        assert (np.broadcast_to(address, keep.shape)[keep] % 16 == 0).all()
        for i, word in enumerate(words):
            store(address + 4 * i, word & 0xFFFF, keep)
            store(address + 4 * i + 2, word >> 16, keep)

    fake = SimpleNamespace(
        arange=lambda begin, end, layout: np.arange(begin, end).view(_Array),
        BlockedLayout=lambda *_: None, SliceLayout=lambda *_: None, where=np.where, static_range=range,
        constexpr=int, int32=None, uint16=None, pointer_type=lambda _: None, store=store,
    )  # fmt: skip
    for name, value in {"gl": fake, "UNIT": 16, "ITEM": 2, "WARPS": 4, "_shifted": _shifted}.items():
        monkeypatch.setattr(staged_results, name, value)
    monkeypatch.setattr(staged_results, "_load_words", load_words)
    monkeypatch.setattr(staged_results, "_load_half", lambda address: shared[address // 2].view(_Array))
    monkeypatch.setattr(staged_results, "_store_four", store_four)
    strides = run, run + 1, run + 2, run + 3, run + 8
    for begin, stride, length in itertools.product((0, 1, 2, 7, 8, 13), strides, (0, 1, 7, 8, 17, run - 3, run)):
        for count in (0, 33, lines):
            stored[:], times[:] = 0, 0
            at = (begin + stride * np.arange(count)[:, None] + np.arange(length)).ravel()
            staged_results._store_lines.fn(2 * begin, before, stride, count, length, kernel)
            want = (before // 2 + line_bytes // 2 * np.arange(count)[:, None] + np.arange(length)).ravel()
            assert (stored[at] == shared[want]).all()
            assert (times[at] == 1).all()
            assert times.sum() == len(at)


@gluon_only
def test_programs_that_do_not_run_at_once_wait_once(monkeypatch):
    """A program whose others never begin a round waits for at most MAX_POLLS, and not again."""
    from sjlt.kernels.hopper import rounds

    programs, tasks, limit, started, polled = 10, 1000, 50, [], []

    def begin_all(begun_at_once):
        """Begin the rounds of the program with index 3, while so many programs begin each: the polls that remain."""
        started.clear(), polled.clear()
        monkeypatch.setattr(fake, "load", lambda *_, **__: polled.append(1) or len(started) * begun_at_once)
        polls = limit
        for task in range(3, tasks, programs):
            polls = rounds.begin_round.fn(None, task, tasks, polls)
        return polls

    fake = SimpleNamespace(
        num_programs=lambda _: programs, where=lambda condition, yes, no: yes if condition else no,
        atomic_add=lambda *_, **__: started.append(1), load=None,
    )  # fmt: skip
    for name, value in {"gl": fake, "EVERY": 4}.items():
        monkeypatch.setattr(rounds, name, value)
    assert begin_all(programs) == limit
    assert len(polled) == len(started) == 25
    assert begin_all(1) == 0
    assert len(polled) == limit + 1 + 24
    started.clear()
    rounds.begin_round.fn(None, 43, 45, limit)  # the last round, in which not all programs have a product
    assert not started


@pytest.fixture
def kernels(monkeypatch):
    """The constants of the kernels that are prepared."""
    from sjlt.backends.triton import codes as backend

    project, found = backend._project, []

    def note(chosen, *arguments):
        found.append(chosen.kernel)
        return project(chosen, *arguments)

    monkeypatch.setattr(backend, "_project", note)
    return found


@pytest.mark.gpu
@pairwise(
    dtype=["float16", "bfloat16"],
    x_in=["rows", "columns", "padded rows", "inner part", "inner part of columns"],
    out_in=["rows", "columns", "aligned part", "padded rows"],
    beyond=[0, 1, 33, 64, 65, 127],
    rounds=[0, 1, 3],
    in_step=[False, True],
    more=[0, 1, 8],
    k=[20, 63, 101, 300, 777, 1352],
    nnz=[1, 3, 4, 8],
)
def test_exact_results(dtype, x_in, out_in, beyond, rounds, in_step, more, k, nnz, kernels):
    """beyond : vectors after whole blocks.  rounds : of products.  more : features after a multiple of 64."""
    tiles, programs = -(-k // 128), device.describe(torch.device("cuda")).multiprocessors
    n, d = max(1, rounds * programs // tiles) * 128 + beyond, 64 * tiles + more
    limits = {"MIN_RESULTS": 0 if in_step else 1 << 60, "MIN_ROUNDS": 0}
    changed = {f"hopper_loaders.{name}": value for name, value in limits.items()} | {"codes.SHARE_TIME": 1e9}
    with all_sizes_on_hopper(), changed_choices(changed):
        check_project(Sketch(d, k, nnz=nnz, seed=beyond), n, dtype, device="cuda", x_in=x_in, out_in=out_in)
    for kernel in kernels:
        whole_sectors = kernel.out_vectors_contiguous and n % 16 == 0
        assert kernel.in_step == (in_step and k > 128 and kernel.result_line_bytes > 0 and not whole_sectors)


@pytest.mark.gpu
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize(("k", "dtype"), [(777, "float16"), (1001, "bfloat16"), (1759, "float32")])
def test_exact_results_of_many_rounds(k, dtype, contiguous, kernels):
    """Programs that are kept in step, with results between NaNs."""
    n, d, dtype = 60_037, 300, getattr(torch, dtype)
    S = Sketch(d, k, nnz=4, seed=k)
    entries = torch.from_numpy(S.toarray()).to("cuda", torch.float32)
    x = torch.randint(-2, 3, (d, n) if contiguous else (n, d), device="cuda").to(dtype)
    with changed_choices({"hopper_loaders.MIN_ROUNDS": 20}):
        for _ in range(2):
            shape = (k, n + 16) if contiguous else (n, k + 16)
            memory = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
            out = memory[:, 8:-8]
            project(S, x.T if contiguous else x, out.T if contiguous else out)
            want = entries @ x.float() if contiguous else x.float() @ entries.T  # halves of integers: exact
            assert torch.equal(out.float(), want)
            assert memory[:, :8].isnan().all()
            assert memory[:, -8:].isnan().all()
    if device.describe(torch.device("cuda")).hopper:
        assert {kernel.in_step for kernel in kernels} == {dtype != torch.float32 or not contiguous}
