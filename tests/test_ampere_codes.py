"""X Sᵀ and S A from codes on NVIDIA GPUs of compute capability 8 and later: the choice, and exactness on a GPU."""

import pytest
import torch
from helpers.cases import pairwise
from helpers.choices import H200, NO_WARP_TILES, changed_choices, exact_product
from helpers.codes import STORES, check_lines, check_passes, check_stores, record_calls
from helpers.data import integers
from helpers.kernels import LAYOUTS, check_project, large_first

from sjlt import Sketch
from sjlt.backends.triton import device, exact
from sjlt.kernels.config import ampere_codes, ampere_kernel
from sjlt.kernels.config.codes import Codes
from sjlt.kernels.config.exact import TensorCore, choose
from sjlt.kernels.config.hopper_loaders import slot_bytes
from sjlt.kernels.config.scattered_sums import ScatteredSums

A100 = H200._replace(multiprocessors=108, shared_memory=166912, programmatic_launch=False, asynchronous_copies=True)


def product(n, d, k, nnz, dtype, columns=False, stride=None, **changes):
    strides = (1, stride or n) if columns else (stride or d, 1)
    return exact_product(n, d, k, nnz, dtype=dtype, x_strides=strides, device=A100, **changes)


@pytest.mark.parametrize(
    ("shape", "takes"),
    [
        ((180, 671_215, 1792, 8, "float16"), True),
        ((1000, 593_877, 1728, 4, "float16", True), True),
        ((23_026, 1536, 1344, 4, "float16"), True),
        ((68_394, 1000, 192, 8, "bfloat16", False, 1013), True),
        ((295_113, 512, 512, 8, "float32", False, 513), True),
        ((313_584, 384, 1600, 4, "float32"), True),
        ((18_166, 3072, 2048, 8, "bfloat16"), False),  # every group has a chunk of every tile
        ((135_793, 768, 512, 3, "float32"), False),
        ((512, 1_627_349, 4096, 3, "float32", True), False),
        ((303, 107_768, 2770, 4, "float32", True), True),
        ((303, 107_768, 2048, 4, "float32", True), True),
        ((303, 27_768, 512, 4, "float32", True), False),
        ((196_068, 512, 1344, 1, "bfloat16", True), True),
        ((1500, 1000, 4000, 4, "float16"), False),
        ((500, 2000, 3900, 8, "float16", False, 2013), True),  # elements loaded one by one
        ((500, 2000, 3900, 8, "float16", False, 2014), False),
        ((250, 2000, 3900, 8, "float16", False, 2013), False),
    ],
)
def test_products_that_use_codes(shape, takes):
    p = product(*shape)
    assert isinstance(choose(p), Codes if takes else TensorCore)
    assert not isinstance(choose(p._replace(device=A100._replace(asynchronous_copies=False))), Codes)


@pytest.mark.parametrize(
    "changes", [{"dtype": "float64"}, {"adjoint": True}, {"precision": "medium"}, {"stacks": 2}, {"n": 16}]
)
def test_products_without_codes(changes):
    p = product(32_000, 1001, 1728, 4, "float32")
    assert ampere_codes.eligible(p)
    assert not ampere_codes.eligible(p._replace(**changes))


@pytest.mark.parametrize(
    ("shape", "takes"),
    [
        ((32, 13_643_173, 256, 4, "float16", True), True),
        ((24, 2_139_648, 4096, 3, "bfloat16", True), True),
        ((20, 2_139_648, 4000, 2, "bfloat16", True), False),
        ((16, 1_025_329, 1152, 4, "bfloat16", True), False),
        ((33, 2_228_688, 354, 4, "bfloat16", True), False),
        ((30, 2_228_688, 354, 4, "bfloat16", True), False),  # less than 8 bytes loaded at a time
        ((32, 2_623_332, 59, 4, "bfloat16", True), False),  # chunks of 8 columns
        ((32, 100_000, 229, 4, "bfloat16", True), False),  # little data
        ((32, 9_206_512, 576, 4, "bfloat16"), True),
        ((32, 9_206_511, 576, 4, "bfloat16"), False),  # elements loaded one by one
        ((32, 9_206_511, 704, 8, "bfloat16"), True),
        ((32, 9_206_512, 512, 4, "bfloat16"), False),  # a power-of-two geometry
        ((32, 9_206_512, 576, 3, "bfloat16"), False),
        ((64, 1_036_652, 1920, 3, "bfloat16"), True),
        ((64, 284_786, 184, 4, "bfloat16"), False),
        ((65, 9_206_512, 576, 4, "bfloat16"), False),
        ((32, 9_206_512, 576, 4, "float32"), False),
    ],
)
@pytest.mark.parametrize("hopper", [False, True])
def test_few_16_bit_vectors(shape, takes, hopper):
    p = product(*shape)
    p = p._replace(device=p.device._replace(hopper=hopper))
    with changed_choices(NO_WARP_TILES):
        chosen = choose(p)
    assert ampere_codes.eligible_few(p) == takes
    if takes or hopper:
        assert (isinstance(chosen, Codes) and isinstance(chosen.kernel, ampere_kernel.AmpereKernel)) == takes
    for changes in ({"adjoint": True}, {"stacks": 2}, {"dtype": "float32"}):
        assert not ampere_codes.eligible_few(p._replace(**changes))


@pytest.mark.parametrize(
    "shape",
    [
        (32, 2_228_688, 354, 2, "bfloat16", True),
        (20, 4_537_310, 448, 4, "bfloat16", True),
        (16, 1_025_329, 1152, 8, "bfloat16", True),
    ],
)
def test_columns_left_to_scattered_sums(shape):
    p = product(*shape)
    assert ampere_codes.eligible_few(p)
    with changed_choices(NO_WARP_TILES):
        assert isinstance(choose(p), ScatteredSums)


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("n", [20, 40, 100, 5000])
@pytest.mark.parametrize(("k", "nnz"), [(20, 4), (60, 1), (300, 8), (2000, 2), (200, 50)])
def test_constants(k, nnz, n, columns, dtype, shared):
    """Slots fit in shared memory; every warp has rows and vectors, and at least one element to copy."""
    p = product(n, 50_001, k, nnz, dtype, columns)
    p = p._replace(device=p.device._replace(shared_memory=shared))
    launch = ampere_codes.launch(p)
    kernel, item = launch.kernel, p.item_bytes
    codes, data = kernel.rows * max(1, 32 >> kernel.log_block), 32 * kernel.vectors * item
    staged = kernel.slots * slot_bytes(kernel) + data if kernel.line_bytes else kernel.slots * data
    assert launch.resident * (staged + kernel.slots * codes) <= shared
    assert kernel.slots >= ampere_kernel.MIN_SLOTS
    assert kernel.rows >= k // -(-k // 128)
    assert kernel.vectors % (16 * kernel.warps) == 0
    assert kernel.rows % (8 * (4 // kernel.warps)) == 0
    assert kernel.copies == (kernel.vector * item >= 4 or kernel.line_bytes > 0)
    assert (kernel.line_bytes > 0) == (item == 2 and kernel.log_block >= 3 and not columns)  # rows of odd length
    assert 1 << kernel.log_block >= kernel.vector or columns


# ------------------------------------------------------------------------------------- on a GPU


@pytest.fixture(params=[False, True], ids=["one product", "several products"])
def calls(monkeypatch, request):
    """The shape of X for each product the kernel runs, by programs with one or several products."""
    if not device.describe(torch.device("cuda")).asynchronous_copies:
        pytest.skip("needs a GPU of compute capability 8")
    monkeypatch.setattr(exact, "choose", lambda p: ampere_codes.launch(p) if ampere_codes.can_run(p) else choose(p))
    sizes = {"MAX_SLICES": 1 << 30, "MIN_PRODUCTS": 0} if request.param else {"MAX_SLICES": 0}
    with changed_choices({f"ampere_kernel.{name}": value for name, value in sizes.items()}):
        yield record_calls(monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("k", "nnz"), [(16, 4), (20, 8), (64, 1), (65, 3), (96, 3), (192, 4), (300, 4), (500, 2), (1000, 8), (130, 20)]
)
@pytest.mark.parametrize(("n", "d"), [(300, 1000), (129, 333), (50, 3002), (20, 1031)])
def test_projections_are_exact(n, d, k, nnz, dtype, calls):
    check_project(Sketch(d, k, nnz=nnz, seed=-3), n, dtype, device="cuda")
    assert calls == [(n, d)] * len(calls) != []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("n", "d", "k"), [(20_000, 300, 1000), (20_000, 301, 1000), (70_000, 600, 60)])
def test_more_products_than_programs(n, d, k, dtype, calls):
    check_project(Sketch(d, k, nnz=4, seed=5), n, dtype, device="cuda")
    assert calls


@pytest.mark.gpu
@pairwise(k=[60, 300], n=[200, 201], x_in=list(LAYOUTS), out_in=list(LAYOUTS), dtype=["float32", "bfloat16"])
def test_layouts(k, n, x_in, out_in, dtype, calls):
    check_project(Sketch(700, k, nnz=4, seed=1), n, dtype, device="cuda", x_in=x_in, out_in=out_in)
    assert calls


@pytest.mark.gpu
@pairwise(
    sketch=[(40, 3), (64, 1), (300, 4), (300, 8), (1000, 2), (2048, 1)], n=[33, 64, 101, 700], d=[31, 500, 4099],
    displaced=[0, 1, 4, 7], spacing=[0, 1, 2], contiguous=[False, True],
)  # fmt: skip
def test_staged_slices(sketch, n, d, displaced, spacing, contiguous, calls):
    """Lines of 16-bit data that begin at any element, between elements that are not numbers."""
    k, nnz = sketch
    S = Sketch(d, k, nnz=nnz, seed=4)
    lines, width = (d, n) if contiguous else (n, d)
    whole = torch.full((lines * (width + spacing) + displaced + 16,), torch.nan, device="cuda", dtype=torch.float16)
    x = whole.as_strided((lines, width), (width + spacing, 1), displaced)
    array = integers((lines, width), "float64")
    x.copy_(torch.from_numpy(array))
    check_project(S, n, "float16", device="cuda", x=(array.T, x.T) if contiguous else (array, x))
    assert calls


@pytest.mark.gpu
@pairwise(**STORES)
def test_elements_stored_at_a_time(sketch, beyond, contiguous, dtype, calls):
    check_stores(*sketch, beyond, contiguous, dtype)
    assert calls


@pytest.mark.gpu
@pairwise(
    sketch=[(30, 4, 128), (100, 16, 2), (300, 4, 128), (520, 8, 2), (384, 1, 128)],
    beyond=[0, 1, 2, 13],
    begin=[0, 1],
    contiguous=[False, True],
    dtype=["float16", "bfloat16", "float32"],
)
def test_lines_at_any_offset(sketch, beyond, begin, contiguous, dtype, calls):
    check_lines(*sketch, beyond, begin, contiguous, dtype)
    assert calls


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [1, 8, 50, 2**31 + 7, 2**50])
@pytest.mark.parametrize(("k", "nnz", "seed"), [(64, 4, 0), (300, 4, 2**63 + 1), (1000, 8, 5)])
def test_slices(k, nnz, seed, offset, calls):
    for dtype in ("float32", "bfloat16"):
        check_project(Sketch(offset + 501, k, nnz=nnz, seed=seed)[:, offset:], 200, dtype, device="cuda")
    assert calls


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("k", "nnz"), [(64, 4), (300, 3), (1000, 8)])
@pytest.mark.parametrize("steps", [2, 128])
def test_splits_add_up(steps, k, nnz, add, dtype, calls):
    with changed_choices({"codes.MAX_STEPS": steps, "codes.MAX_CHUNKS": steps}):
        check_project(Sketch(5000, k, nnz=nnz, seed=2), 150, dtype, "float32", device="cuda", add=add)
    assert calls


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("k", "nnz"), [(64, 4), (301, 8)])
@pytest.mark.parametrize("contiguous", [False, True])
def test_passes_add_up(contiguous, k, nnz, dtype, calls):
    check_passes(131, 29_999, 1, k, nnz, contiguous, dtype)
    assert calls


@pytest.mark.gpu
@pytest.mark.parametrize("k", [64, 300])
def test_sums_with_large_first_terms(k, calls):
    S = Sketch(4096, k, seed=0)
    entries = torch.from_numpy(S.toarray()).to("cuda").double().T
    data = torch.randn(304, 4096, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    for x, limit in large_first(data):
        want = x.double() @ entries
        error = ((x @ S.T).double() - want).norm(dim=1) / x.double().norm(dim=1)
        assert error.max() < limit
    assert calls


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_elements_stay_in_their_vector(value, calls):
    x = torch.ones(300, 1000, device="cuda")
    x[7, 500] = value
    result = x @ Sketch(1000, 300, nnz=4, seed=0).T
    assert result.isfinite().all(1).logical_not().nonzero().flatten().tolist() == [7]
    assert calls
