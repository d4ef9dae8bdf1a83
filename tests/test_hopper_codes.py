"""X Sᵀ and S A from codes on Hopper: splits, passes, and exactness for any k, nnz and strides."""

import itertools
import math

import pytest
import torch
import triton
from helpers.cases import pairwise
from helpers.choices import (
    HOPPER,
    all_tensors_on,
    changed_choices,
    chosen,
    exact_product,
    in_three_passes,
)
from helpers.codes import (
    STORES,
    all_sizes_on_hopper,
    check_lines,
    check_passes,
    check_stores,
    integer_product,
    no_encoding,
    record_calls,
)
from helpers.kernels import LAYOUTS, check_project, large_first

from sjlt import Sketch
from sjlt.backends.triton import device
from sjlt.kernels.config import codes, hopper_codes
from sjlt.kernels.config.product import count_groups


@pytest.mark.skipif(not triton.__version__.startswith(device.GLUON_VERSIONS), reason="Gluon differs in this version")
@pytest.mark.parametrize("programs", [7, 114, 132])
@pytest.mark.parametrize("n_tiles", [1, 2, 3, 4, 6, 11, 12, 13, 14, 132, 200])
def test_turns_of_programs(monkeypatch, n_tiles, programs):
    """Products are numbered one to one, and a program's products belong to different tiles."""
    from sjlt.kernels.hopper import produce_codes

    monkeypatch.setattr(produce_codes.gl, "num_programs", lambda axis: programs)
    monkeypatch.setattr(produce_codes.gl, "where", lambda condition, yes, no: yes if condition else no)
    splits, blocks = 3, 40
    parts = [produce_codes.parts_of.fn(i, splits, n_tiles) for i in range(n_tiles * splits * blocks)]
    assert sorted(parts) == list(itertools.product(range(n_tiles), range(splits), range(blocks)))
    if n_tiles < programs and n_tiles & (n_tiles - 1):
        own = [tile for tile, _, _ in parts[programs // 2 :: programs]]
        assert all(a != b for a, b in itertools.pairwise(own))
        assert len(set(own)) == min(n_tiles, len(own))


@pytest.mark.parametrize("d", [1000, 20_000, 300_000])
@pytest.mark.parametrize("n", [64, 100, 1000, 20_000])
@pytest.mark.parametrize(("k", "nnz"), [(20, 4), (300, 4), (1000, 8), (2000, 3)])
def test_splits_cover_the_columns(k, nnz, n, d):
    product = exact_product(n=n, d=d, k=k, nnz=nnz, device=HOPPER)
    if not hopper_codes.eligible(product):
        pytest.skip("taken by other kernels")
    launch = hopper_codes.launch(product)
    groups = count_groups(product)
    assert (launch.splits - 1) * launch.groups_per_split < groups <= launch.splits * launch.groups_per_split
    width = 1 << product.geometry.log_group << product.geometry.log_chunk
    tile_columns = launch.groups_per_split * width / product.geometry.n_tiles
    assert tile_columns <= 1.1 * codes.MAX_STEPS * 64 + 64


@pytest.mark.parametrize(
    ("n", "d", "k", "dtype", "splits"),
    [
        (3651, 39_325, 576, "float16", 1),  # 145 products: two rounds, and programs share those of the second
        (18_000, 4096, 100, "float32", 1),  # 141 products
        (10_000, 4096, 100, "float32", 3),  # 79 programs
        (18_000, 900, 100, "float32", 1),  # sums too short to be split
        (16_896, 4096, 100, "float32", 1),  # 132 programs, one on each multiprocessor
        (1427, 4096, 832, "float16", 1),  # 84 programs, for which partial sums would take longer
        (302, 5420, 1344, "float32", 2),  # 33 programs
        (100, 183_628, 26, "bfloat16", 131),  # one program
    ],
)
def test_splits_with_the_least_estimated_time(n, d, k, dtype, splits):
    product = exact_product(n=n, d=d, k=k, dtype=dtype, device=HOPPER)
    assert hopper_codes.launch(product).splits == splits
    with changed_choices({"codes.MAX_SPLITS": 1}):
        fewest = hopper_codes.launch(product).splits  # for accuracy
    assert fewest == (1 if d < 100_000 else 3)


@pytest.mark.parametrize("offset", [0, 8, 4096 + 40, (1 << 40) + 8])
@pytest.mark.parametrize(
    ("n", "d", "k", "nnz"), [(100, 15_264_884, 64, 4), (64, 16_000_000, 20, 2), (100, 9_999_999, 999, 8)]
)
def test_passes_cover_the_columns(n, d, k, nnz, offset):
    """Codes that do not fit in memory are written and used in parts, which begin at multiples of 16 bytes."""
    from sjlt.backends.triton.codes import _parts

    product = exact_product(n=n, d=d, k=k, nnz=nnz, dtype="float16", offset=offset, device=HOPPER)
    assert hopper_codes.eligible(product)
    launch = hopper_codes.launch(product)
    assert launch.splits > launch.splits_per_pass
    parts = list(_parts(launch, Sketch(offset + d, k, nnz=nnz)[:, offset:].spec, d))
    assert [p.begin for p in parts] == [0, *(p.end for p in parts[:-1])]
    assert parts[-1].end == d
    assert all(p.begin % 8 == 0 for p in parts)
    assert sum(p.splits for p in parts) == launch.splits
    assert {p.splits for p in parts[1:]} == {launch.splits_per_pass}
    assert launch.splits_per_pass % 4 == 0
    codes = launch.splits_per_pass * product.geometry.n_tiles * launch.capacity * (launch.kernel.rows + 4)
    assert codes + 4 * (launch.splits_per_pass + 1) * n * k <= 64 << 20


@pytest.mark.parametrize(
    ("n", "d", "k", "nnz", "dtype"),
    [
        (257, 1_295_709, 354, 16, "float32"),  # codes of 61 MiB, and 53 splits for accuracy
        (77, 3_048_809, 524, 8, "float32"),
        (98, 2_857_730, 561, 8, "float32"),
        (108, 2_893_948, 1682, 16, "float32"),
        (123, 5_422_416, 1483, 8, "bfloat16"),
        (100, 15_264_884, 64, 4, "float16"),
    ],
)
def test_codes_and_sums_fit_in_memory(n, d, k, nnz, dtype):
    product = exact_product(n=n, d=d, k=k, nnz=nnz, dtype=dtype, device=HOPPER)
    assert hopper_codes.eligible(product)
    launch = hopper_codes.launch(product)
    per_pass = min(launch.splits, launch.splits_per_pass)
    codes = (launch.kernel.rows + 4) * per_pass * product.geometry.n_tiles * launch.capacity
    sums = per_pass + (launch.splits > per_pass)
    assert codes + 4 * sums * n * k <= 64 << 20


def test_what_is_prefetched():
    assert chosen(n=5000, d=2000, k=300).prefetch
    assert chosen(n=1000, d=2200, k=300).prefetch
    assert not chosen(n=1000, d=2000, k=300, x_strides=(4000, 2)).prefetch


@pytest.mark.skipif(not device.INTERPRETED, reason="the reduction runs in Triton's interpreter")
@pytest.mark.parametrize(("order", "accumulate"), [("rows", False), ("rows", True), ("columns", True)])
@pytest.mark.parametrize(("n", "d", "k", "nnz"), [(11, 3000, 64, 4), (7, 5001, 140, 3)])
def test_partial_sums_of_passes(n, d, k, nnz, order, accumulate, monkeypatch):
    """The passes of a product with a stand-in for the kernel."""
    from sjlt.backends.triton import codes as backend

    all_tensors_on(monkeypatch, HOPPER._replace(programmatic_launch=False))
    S, entries, x, out = integer_product(n, d, k, nnz, order)
    before = out.clone()
    product = exact_product(n, d, k, nnz, y_strides=out.stride(), device=HOPPER)
    with changed_choices(in_three_passes()):
        launch = hopper_codes.launch(product)
    width = product.geometry.log_group + product.geometry.log_chunk

    class Kernel:
        def __init__(self, chosen, part, spec, x, target, scale, accumulate):
            self.part, self.target = part, target

        def start(self, addresses, *numbers):
            return False

        def search(self, tensors, *numbers):
            data, sums, *_ = tensors
            assert data.data_ptr() == x[:, self.part.begin :].data_ptr()
            if self.part.begin == 0:
                sums.fill_(float("nan"))
            for split in range(self.part.splits):
                first = self.part.first_group + split * launch.groups_per_split
                columns = slice(first << width, min(self.part.end, (first + launch.groups_per_split) << width))
                place = sums.as_strided((n, k), self.target.strides[1:], split * self.target.strides[0])
                place.copy_(x[:, columns] @ entries[columns])

    monkeypatch.setattr(backend, "_project", Kernel)
    monkeypatch.setattr(backend, "_encode", no_encoding)
    call = backend.prepare(launch, S.spec, x, out, accumulate)
    assert len(call.passes) == 3
    call(S.spec, x, out)
    want = x @ entries * nnz**-0.5 + (before if accumulate else 0)
    torch.testing.assert_close(out, want, rtol=2**-22, atol=2**-18)


# ------------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def kernel_calls(monkeypatch):
    """The shapes of X of the products that the kernel runs; it is chosen for all sizes."""
    with all_sizes_on_hopper():
        yield record_calls(monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("k", "nnz"), [(16, 4), (20, 8), (64, 1), (65, 3), (96, 3), (192, 4), (300, 4), (500, 2), (1000, 8), (130, 65)]
)
@pytest.mark.parametrize(("n", "d"), [(300, 1000), (129, 333), (50, 3002)])
def test_projections_are_exact(n, d, k, nnz, dtype, kernel_calls):
    check_project(Sketch(d, k, nnz=nnz, seed=-3), n, dtype, device="cuda")
    assert kernel_calls == [(n, d)] * len(kernel_calls)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("x_in", "out_in"), [("rows", "rows"), ("columns", "aligned part"), ("padded rows", "rows")])
@pytest.mark.parametrize(("k", "nnz"), [(296, 1), (424, 4), (1344, 3), (1832, 2), (1000, 8), (3008, 16)])
@pytest.mark.parametrize(("n", "d", "offset"), [(300, 200, 0), (129, 77, 5), (150, 1111, 2**33 + 40), (20_000, 90, 0)])
def test_windows(n, d, offset, k, nnz, x_in, out_in, dtype, kernel_calls, monkeypatch):
    """Windows of rows across tiles, the last of them incomplete, in results surrounded by other data."""
    from sjlt.backends.triton import codes as backend

    windows, encode = [], backend._encode
    note = lambda chosen, *rest: windows.append(chosen.kernel.windows) or encode(chosen, *rest)  # noqa: E731
    monkeypatch.setattr(backend, "_encode", note)
    always = (0, math.inf)
    limits = {"stores.WINDOWS": (always,), "stores.WINDOWS_STAGED": (always,), "codes.MAX_SPLITS": 1}
    with changed_choices(limits):
        sketch = Sketch(offset + d, k, nnz=nnz, seed=5)[:, offset:]
        check_project(sketch, n, dtype, device="cuda", x_in=x_in, out_in=out_in)
    assert kernel_calls
    assert all(windows)


@pytest.mark.gpu
@pairwise(**STORES)
def test_elements_stored_at_a_time(sketch, beyond, contiguous, dtype, kernel_calls):
    check_stores(*sketch, beyond, contiguous, dtype)
    assert kernel_calls


@pytest.mark.gpu
@pytest.mark.parametrize("out_in", ["rows", "columns"])
@pytest.mark.parametrize(("dtype", "offset"), [("float16", 0), ("bfloat16", 5), ("bfloat16", 2**33 + 40)])
@pytest.mark.parametrize(("k", "nnz"), [(300, 8), (300, 4), (384, 4), (500, 2), (260, 1), (1001, 3)])
def test_entries_as_the_first_operand(k, nnz, dtype, offset, out_in, kernel_calls):
    sketch = Sketch(offset + 3333, k, nnz=nnz, seed=7)[:, offset:]
    check_project(sketch, 200, dtype, device="cuda", x_in="columns", out_in=out_in)
    assert kernel_calls


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("n", "d", "k"), [(20_000, 300, 1000), (20_000, 301, 1000), (70_000, 600, 60), (3000, 5000, 700)]
)
def test_more_tiles_than_multiprocessors(n, d, k, dtype, kernel_calls):
    """More output tiles than multiprocessors."""
    check_project(Sketch(d, k, nnz=4, seed=5), n, dtype, device="cuda")
    assert kernel_calls


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("k", "nnz", "stacks"), [(240, 4, 4), (512, 4, 4), (600, 6, 2), (1024, 4, 2), (2000, 8, 4)])
@pytest.mark.parametrize(("n", "d"), [(300, 1000), (20_000, 601)])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_stacks(layout, n, d, k, nnz, stacks, dtype, kernel_calls, monkeypatch):
    monkeypatch.setattr("sjlt.backends.triton.stacks.gathers", lambda _: False)
    monkeypatch.setattr("sjlt.kernels.config.staged_gather.eligible", lambda _: False)
    sketch = Sketch(d, k, nnz=nnz, stacks=stacks, seed=-3)
    check_project(sketch, n, dtype, device="cuda", x_in=layout, out_in=layout)
    assert kernel_calls


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("k", [60, 300, 1000])
@pytest.mark.parametrize("out_in", LAYOUTS)
@pytest.mark.parametrize("x_in", LAYOUTS)
def test_layouts(x_in, out_in, k, dtype, kernel_calls):
    check_project(Sketch(700, k, nnz=4, seed=1), 200, dtype, device="cuda", x_in=x_in, out_in=out_in)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("begin", [0, 1, 5])
@pytest.mark.parametrize("beyond", [0, 1, 2, 6, 8, 13])
@pytest.mark.parametrize(
    ("k", "nnz", "steps"), [(30, 4, 128), (100, 16, 2), (101, 4, 128), (300, 4, 128), (520, 8, 2), (384, 1, 128)]
)
def test_lines_at_any_offset(k, nnz, steps, beyond, begin, contiguous, dtype, kernel_calls):
    check_lines(k, nnz, steps, beyond, begin, contiguous, dtype)
    assert kernel_calls


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [1, 8, 50, 2**31 + 7, 2**50])
@pytest.mark.parametrize(("k", "nnz", "seed"), [(64, 4, 0), (300, 4, 2**63 + 1), (1000, 8, 5)])
def test_slices(k, nnz, seed, offset, kernel_calls):
    for dtype in ("float32", "bfloat16"):
        check_project(Sketch(offset + 501, k, nnz=nnz, seed=seed)[:, offset:], 200, dtype, device="cuda")
    assert kernel_calls


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("k", "nnz"), [(64, 4), (300, 3), (1000, 8)])
@pytest.mark.parametrize("steps", [2, 128])
def test_splits_add_up(steps, k, nnz, dtype, kernel_calls):
    with changed_choices({"codes.MAX_STEPS": steps, "codes.MAX_CHUNKS": steps}):
        check_project(Sketch(5000, k, nnz=nnz, seed=2), 150, dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("k", "nnz"), [(64, 4), (300, 3), (301, 8), (1000, 8)])
@pytest.mark.parametrize(("n", "d", "beyond"), [(150, 30_000, 0), (131, 29_999, 1), (160, 30_001, 8)])
@pytest.mark.parametrize("contiguous", [False, True])
def test_passes_add_up(contiguous, n, d, beyond, k, nnz, dtype, kernel_calls):
    check_passes(n, d, beyond, k, nnz, contiguous, dtype)
    assert kernel_calls


@pytest.mark.gpu
@pytest.mark.parametrize("k", [64, 300])
def test_sums_with_large_first_terms(k, kernel_calls):
    S = Sketch(4096, k, seed=0)
    entries = torch.from_numpy(S.toarray()).to("cuda").double().T
    data = torch.randn(304, 4096, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    for x, limit in large_first(data):
        error = ((x @ S.T).double() - x.double() @ entries).norm(dim=1) / x.double().norm(dim=1)
        assert error.max() < limit


@pytest.mark.gpu
def test_nan_stays_in_its_vector(kernel_calls):
    x = torch.randn(200, 700, device="cuda")
    x[3, 100], x[150, 699] = float("nan"), float("inf")
    y = x @ Sketch(700, 300, seed=0).T
    assert not y[3].isfinite().all()
    assert not y[150].isfinite().all()
    assert y[[i for i in range(200) if i not in (3, 150)]].isfinite().all()
