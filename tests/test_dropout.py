"""Dropout's values: every backend against the independent reference, in every memory layout, dtype and width."""

import math
import os

import dropout_reference as witness
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from helpers.cases import each_value, pairwise

import sjlt
from sjlt.inputs.dropout import checked_arguments, rule_of
from sjlt.kernels.portable.dropout import _place

BITS = [8, 16, 32]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


BACKENDS = ["numpy", "torch", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def device_of(backend):
    if backend == "interpreter" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the kernels are compiled in this process")
    return "cuda" if backend == "cuda" else "cpu"


def make_rule(x, p, seed, *, step=0, offset=0, row_stride=None, bits=16):
    return rule_of(checked_arguments(x, x.shape, p, seed, step, offset, row_stride, bits))[0]


def call(backend, x, out, p, seed, residual=None, **given):
    """Write dropout of x (plus the residual) to out by the given backend, and return the mask."""
    out.fill_(math.nan)
    mask = torch.ones(x.shape, dtype=torch.bool, device=x.device)
    if backend == "numpy":
        from sjlt.backends.cpu import dropout as functions
        from sjlt.backends.cpu.bits import BFLOAT16

        def array(t):
            return t.view(torch.int16).numpy().view(BFLOAT16) if t.dtype == torch.bfloat16 else t.numpy()

        if torch.is_tensor(seed):
            seed = seed.numpy()
        x, out, mask = array(x), array(out), mask.numpy()
        residual = None if residual is None else array(residual)
    else:
        if backend == "torch":
            result = sjlt.dropout(x, p, seed, **given) if residual is None else sjlt.dropout_add(
                x, residual, p, seed, **given
            )  # fmt: skip
            out.copy_(result)
            return sjlt.dropout_mask(x.shape, p, seed, **given, device="cpu")
        from sjlt.backends.triton import dropout as functions
    rule = make_rule(x, p, seed, **given)
    if residual is None:
        functions.drop(rule, x, out)
    else:
        functions.drop_add(rule, x, residual, out)
    functions.mask(rule, mask)
    return torch.as_tensor(mask)


def check(backend, x, out, p, seed, residual=None, **given):
    """Check the result to the bit, and that nothing is written around it."""
    assert x.shape == out.shape
    before, memory = x.clone(), out if out._base is None else out._base
    plain = seed.tolist() if torch.is_tensor(seed) else seed
    bits = given.get("bits", 16)
    kept = witness.mask(tuple(x.shape), p, plain, **given)
    kept = torch.tensor(kept, dtype=torch.bool).reshape(x.shape).to(x.device)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    factor = torch.tensor(witness.scale(p, bits), dtype=torch.float64).to(compute).to(x.device)
    expected = torch.where(kept, x.to(compute) * factor, torch.zeros((), dtype=compute, device=x.device))
    if residual is not None:
        expected = expected + residual.to(compute)
    mask = call(backend, x, out, p, seed, residual, **given)
    assert torch.equal(mask, kept)
    assert torch.equal(out, expected.to(x.dtype))
    assert torch.equal(x, before), "the input was written to"
    if memory.numel() > out.numel():
        memory = memory.clone()
        torch.as_strided(memory, out.shape, out.stride(), out.storage_offset()).fill_(math.nan)
        assert memory.isnan().all() or backend == "torch", "written outside of the result"


def data(shape, dtype, device, seed=0):
    """Small integers for bf16, which the interpreter truncates; otherwise normal values, whose products are rounded."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bfloat16:
        return torch.randint(-9, 10, shape, generator=generator).to(dtype).to(device)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def probability(dtype):
    return 0.5 if dtype == torch.bfloat16 else 0.3


@each_value(backend=BACKENDS, dtype=DTYPES, bits=BITS)
def test_dtypes(backend, dtype, bits):
    x = data((3, 67), dtype, device_of(backend))
    check(backend, x, torch.empty_like(x), probability(dtype), -5, bits=bits)


@pairwise(backend=BACKENDS, offset=[0, 1, 3, 64, 2**33 + 5, 2**35 - 1, 2**63 - 1 - 210], bits=BITS)
def test_offsets(backend, offset, bits):
    """Any position of the first element's lane in its call; indices and calls beyond 2^32."""
    x = data((210,), torch.float32, device_of(backend))
    check(backend, x, torch.empty_like(x), 0.3, 2**64 - 1, bits=bits, offset=offset, step=2**32 - 1)


SHAPES = [(), (1,), (0,), (3, 0), (5,), (1, 7), (7, 1), (2, 3, 5), (1, 1, 40), (127,), (3, 1, 17, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(backend, shape):
    x = data(shape, torch.float32, device_of(backend))
    check(backend, x, torch.empty_like(x), 0.3, 1)


LAYOUTS = {
    "transposed": lambda t: t.t(),
    "columns": lambda t: t[:, 3:20],
    "aligned columns": lambda t: t[:, 16:32],
    "every second": lambda t: t[::2, ::2],
    "rows": lambda t: t[1:5],
    "transposed part": lambda t: t.t()[5:22, 1:],
}


@pairwise(backend=BACKENDS, layout=list(LAYOUTS), out_in=["dense", "same"], bits=BITS)
def test_layouts(backend, layout, out_in, bits):
    device = device_of(backend)
    x = LAYOUTS[layout](data((18, 48), torch.float32, device))
    memory = torch.full((18, 48), math.nan, device=device)
    out = LAYOUTS[layout](memory) if out_in == "same" else torch.empty(x.shape, device=device)
    check(backend, x, out, 0.3, 9, bits=bits, offset=4)
    check(backend, x, out, 0.3, 9, bits=bits, row_stride=48, residual=data(x.shape, torch.float32, device, seed=1))


def test_many_axes(backend):
    """Axes in any order that cannot be merged and outnumber the kernels' axes; expanded axes."""
    device = device_of(backend)
    x = data((2, 3, 4, 5, 3), torch.float32, device).permute(4, 0, 2, 1, 3)[:, :, ::2]
    check(backend, x, torch.empty(x.shape, device=device), 0.3, 2, offset=3)
    check(backend, x, torch.empty(x.shape[::-1], device=device).permute(4, 3, 2, 1, 0), 0.3, 2)
    x = data((1, 4, 1), torch.float32, device).expand(3, 4, 9)
    check(backend, x, torch.empty(x.shape, device=device), 0.3, 2)
    check(backend, x, torch.empty(9, 4, 3, device=device).permute(2, 1, 0), 0.3, 2, row_stride=0)


@pytest.mark.parametrize("bits", BITS)
def test_one_seed_per_row(backend, bits):
    device = device_of(backend)
    x = data((6, 3, 21), torch.float32, device)
    generator = torch.Generator().manual_seed(0)
    for shape in ((6,), (6, 3), ()):
        seeds = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator).to(device)
        check(backend, x, torch.empty_like(x), 0.3, seeds, bits=bits, step=3)
        check(backend, x, torch.empty_like(x), 0.3, seeds, bits=bits, offset=5, row_stride=32)
    seeds = torch.randint(0, 99, (21, 12), generator=generator).to(device)[::1, ::2].t()  # strided
    check(backend, x.transpose(1, 2)[..., :2], torch.empty(6, 21, 2, device=device), 0.3, seeds, bits=bits)
    x = data((7,), torch.float32, device)  # one seed per element
    check(backend, x, torch.empty_like(x), 0.3, seeds[0, :7], bits=bits)


def test_equal_seeds_give_equal_rows(backend):
    x = torch.ones(4, 50, device=device_of(backend))
    out = torch.empty_like(x)
    call(backend, x, out, 0.5, torch.full((4,), 8, device=x.device))
    assert (out == out[0]).all()
    call(backend, x[0], expected := torch.empty_like(x[0]), 0.5, 8)
    assert torch.equal(out[0], expected)


def test_relations_between_calls():
    """Relations that the law guarantees: transposes, shards by rows and columns, broadcast seeds."""
    x = np.random.default_rng(0).normal(size=(24, 40)).astype(np.float32)
    whole = sjlt.dropout(x, 0.4, 6)
    assert np.array_equal(sjlt.dropout(x.T.copy().T, 0.4, 6), whole)
    logical = sjlt.dropout(np.ascontiguousarray(x.T), 0.4, 6)
    assert np.array_equal(sjlt.dropout(x.T, 0.4, 6), logical)  # by logical position, not by address
    assert not np.array_equal(logical.T, whole)
    assert np.array_equal(sjlt.dropout(x[9:], 0.4, 6, offset=9 * 40), whole[9:])
    assert np.array_equal(sjlt.dropout(x[9:, 7:30], 0.4, 6, offset=9 * 40 + 7, row_stride=40), whole[9:, 7:30])
    assert np.array_equal(sjlt.dropout(x.reshape(2, 12, 40), 0.4, 6).reshape(24, 40), whole)
    assert np.array_equal(sjlt.dropout(x.reshape(-1), 0.4, 6).reshape(24, 40), whole)
    mask = sjlt.dropout_mask((24, 40), 0.4, 6)
    assert np.array_equal(sjlt.masked_dropout(x, mask, 0.4, bits=16), whole)
    assert np.array_equal(sjlt.dropout(x[:, :1], 0.4, 6, row_stride=0) != 0, np.full((24, 1), mask[0, 0]))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_all_containers_agree(dtype):
    x = np.random.default_rng(0).normal(size=(30, 41)).astype(dtype)
    expected = sjlt.dropout(x, 0.2, 3, step=2, bits=8)
    assert expected.dtype == dtype
    assert np.array_equal(sjlt.dropout(torch.from_numpy(x), 0.2, 3, step=2, bits=8).numpy(), expected)
    assert np.array_equal(sjlt.dropout(x.astype(x.dtype.newbyteorder()), 0.2, 3, step=2, bits=8), expected)
    assert np.array_equal(
        sjlt.dropout(x[::-1], 0.2, 3, step=2, bits=8), sjlt.dropout(x[::-1].copy(), 0.2, 3, step=2, bits=8)
    )
    shifted = np.frombuffer(b"." + x.tobytes(), np.uint8)[1:].view(dtype).reshape(x.shape)
    assert np.array_equal(sjlt.dropout(shifted, 0.2, 3, step=2, bits=8), expected)
    for step in (np.int8(2), np.array([2]), np.array(2, np.uint64)):
        assert np.array_equal(sjlt.dropout(x, 0.2, np.int64(3), step=step, bits=8), expected)
    assert np.array_equal(sjlt.dropout(x, 0.2, np.array(3), step=2, bits=8), expected)
    assert np.array_equal(sjlt.dropout(x, np.float64(0.2), 3 - 2**64 + 2**64, step=2, bits=8), expected)
    assert sjlt.dropout(x, 0.2, 3, training=False) is x


def test_thread_count_does_not_matter():
    x = np.random.default_rng(0).normal(size=(3, 700_001)).astype(np.float32)
    threads = sjlt.get_num_threads()
    try:
        results = []
        for n in (1, 3):
            sjlt.set_num_threads(n)
            results.append((sjlt.dropout(x, 0.3, 5), sjlt.dropout(x.T, 0.3, 5), sjlt.dropout_mask(x.shape, 0.3, 5)))
    finally:
        sjlt.set_num_threads(threads)
    for one, three in zip(*results, strict=True):
        assert np.array_equal(one, three)
    part = sjlt.dropout(x[1:2, 500_000:500_100], 0.3, 5, offset=x.shape[1] + 500_000)
    assert np.array_equal(part, results[0][0][1:2, 500_000:500_100])


@triton.jit
def place(out, rows, columns, ROWS_FIRST: tl.constexpr):
    row, column, _, _ = _place(rows, columns, 1, ROWS_FIRST, 1, 64, 64)
    tl.store(out + 2 * tl.program_id(0), row)
    tl.store(out + 2 * tl.program_id(0) + 1, column)


@pytest.mark.parametrize("rows_first", [False, True])
def test_axis_length_near_2_31(rows_first, kernels_on):
    """The number of its tiles is computed in 32 bits."""
    out = torch.full((3, 2), -1, device=kernels_on)
    sizes = (2**31 - 1, 5) if rows_first else (5, 2**31 - 1)
    place[(3,)](out, *sizes, rows_first)
    assert out.tolist() == [[i, 0] if rows_first else [0, i] for i in range(3)]


def test_dropped_values_are_positive_zero(backend):
    for value in (math.nan, math.inf, -math.inf, -1.0):
        x = torch.full((200,), value, device=device_of(backend))
        kept = call(backend, x, out := torch.empty_like(x), 0.5, 3)
        assert torch.equal(out[~kept], torch.zeros_like(out[~kept]))
        assert not out[~kept].signbit().any()
        assert torch.equal(out[kept].isnan(), x[kept].isnan())
        assert (out[kept] == 2 * value).all() or math.isnan(value)
