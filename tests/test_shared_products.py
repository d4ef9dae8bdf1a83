"""Products of the last round that several programs of `project_codes_hopper` share."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import triton
from helpers.cases import each_value, pairwise
from helpers.choices import HOPPER, all_tensors_on, changed_choices, exact_product
from helpers.codes import all_sizes_on_hopper, integer_product, no_encoding, record_calls
from helpers.kernels import check_project

from sjlt import Sketch
from sjlt.backends.triton import device
from sjlt.kernels.config import hopper_codes

ALWAYS = {"codes.STEP_TIME": 1e3, "codes.MAX_SPLITS": 0}  # programs share products if they can


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_choice(dtype):
    """Programs share only products of the last round; codes and all sums fit in memory."""
    chosen = []
    sizes = (500, 3000, 9000, 17_000, 20_001, 33_800, 50_000, 102_400, 180_000)
    sketches = (20, 1), (100, 4), (300, 4), (1700, 8), (600, 4)
    for n, d, (k, nnz) in itertools.product(sizes, (768, 3000, 20_000), sketches):
        product = exact_product(n=n, d=d, k=k, nnz=nnz, dtype=dtype, device=HOPPER)
        if not hopper_codes.eligible(product):
            continue
        launch, tiles = hopper_codes.launch(product), product.geometry.n_tiles
        rounds, rest = divmod(launch.products, 132)
        chosen.append(launch.sharers > 1)
        if launch.sharers == 1:
            assert launch.tasks == launch.unshared == launch.products
            continue
        assert launch.splits == 1
        assert 0 < launch.products - launch.unshared < rest + tiles
        assert launch.unshared % tiles == 0
        assert 132 * rounds < launch.tasks <= 132 * (rounds + 1)
        assert launch.sharers * 2 * 64 * tiles < d + 2 * 64 * tiles
        codes = tiles * launch.capacity * (launch.kernel.rows + 4)
        sums = 4 * launch.sharers * (launch.products - launch.unshared) // tiles * 128 * k
        assert codes + sums <= 64 << 20
    assert 20 < sum(chosen) < len(chosen) // 2


@pytest.mark.skipif(not triton.__version__.startswith(device.GLUON_VERSIONS), reason="Gluon differs in this version")
@pytest.mark.parametrize(
    ("products", "unshared", "sharers"), [(300, 264, 3), (133, 132, 66), (10, 10, 1), (145, 130, 8)]
)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100, 771])
def test_shares_cover_all_blocks(products, unshared, sharers, count, monkeypatch):
    """Tasks cover every block of every product exactly once, in steps of 8 blocks."""
    from sjlt.kernels.hopper import shared_products

    monkeypatch.setattr(shared_products.gl, "where", lambda condition, yes, no: yes if condition else no)
    monkeypatch.setattr(shared_products.gl, "maximum", max)
    monkeypatch.setattr(shared_products.gl, "minimum", min)
    monkeypatch.setattr(shared_products, "STEP_COLUMNS", 64)
    kernel, shared, blocks = SimpleNamespace(log_block=3), sharers > 1, [[] for _ in range(products)]
    for task in range(unshared + (products - unshared) * sharers):
        product, share, shares = shared_products.share_of.fn(task, unshared, sharers, shared)
        begin, end = shared_products.blocks_of_share.fn(count, share, shares, kernel, shared)
        assert begin % 8 == 0
        assert end % 8 == 0 or end == count
        blocks[product] += range(begin, end)
    assert all(each == list(range(count)) for each in blocks)


@pytest.mark.skipif(not device.INTERPRETED, reason="the reduction runs in Triton's interpreter")
@each_value(sketch=[(64, 4), (140, 3)], layout=[("rows", False), ("columns", True)])
def test_partial_sums_of_shares(sketch, layout, monkeypatch):
    """The last vectors are the sums of their shares, which a stand-in for the kernel writes to the memory's start."""
    from sjlt.backends.triton import codes as backend

    (k, nnz), (order, accumulate), n, d = sketch, layout, 886, 1200
    all_tensors_on(monkeypatch, HOPPER._replace(programmatic_launch=False))
    S, entries, x, out = integer_product(n, d, k, nnz, order)
    before = out.clone()
    product = exact_product(n, d, k, nnz, y_strides=out.stride(), device=HOPPER._replace(multiprocessors=6))
    with changed_choices(ALWAYS):
        launch = hopper_codes.launch(product)
    first = launch.unshared // product.geometry.n_tiles * 128
    assert launch.sharers > 1
    assert 0 < first < n

    class Kernel:
        def __init__(self, *_):
            pass

        def start(self, addresses, address, sums):
            return False

        def search(self, tensors, address, sums):
            out[:first] = x[:first] @ entries * nnz**-0.5 + (before[:first] if accumulate else 0)
            memory, shares = memories[-1][: launch.sharers * (n - first) * k], launch.sharers
            rest = memory.view(shares, k, -1).mT if order == "columns" else memory.view(-1, shares, k).transpose(0, 1)
            assert sums == memory.data_ptr()
            for share, columns in enumerate(torch.arange(d).tensor_split(shares)):
                rest[share] = x[first:, columns] @ entries[columns]

    def note(*arguments, **options):
        memories.append(new_empty(*arguments, **options))
        return memories[-1]

    memories, new_empty = [], torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", note)
    monkeypatch.setattr(backend, "_project", Kernel)
    monkeypatch.setattr(backend, "_encode", no_encoding)
    call = backend.prepare(launch, S.spec, x, out, accumulate)
    call(S.spec, x, out)
    want = x @ entries * nnz**-0.5 + (before if accumulate else 0)
    torch.testing.assert_close(out, want, rtol=2**-22, atol=2**-18)


@pytest.fixture
def reductions(monkeypatch):
    """The partial sums that are added; memory is filled with NaN first."""
    from sjlt.backends.triton import codes as backend

    new_empty, reduce, found = torch.Tensor.new_empty, backend._reduction_of_shares, []

    def poisoned(*arguments, **options):
        memory = new_empty(*arguments, **options)
        return memory.fill_(float("nan")) if memory.is_floating_point() else memory

    def note(*arguments):
        found.append(arguments)
        return reduce(*arguments)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    monkeypatch.setattr(backend, "_reduction_of_shares", note)
    return found


@pytest.mark.gpu
@pairwise(
    dtype=["float32", "float16", "bfloat16"],
    out_dtype=[None, "float32"],
    x_in=["rows", "columns", "padded rows"],
    out_in=["rows", "columns", "aligned part"],
    add=[False, True],
    rounds=[1, 2],
    beyond=[1, 128, 900],
    more=[0, 1],
    offset=[0, 1024],
    k=[20, 64, 100, 300, 600],
    nnz=[1, 4, 8],
)
def test_exact_results(
    dtype, out_dtype, x_in, out_in, add, rounds, beyond, more, offset, k, nnz, reductions, monkeypatch
):
    """more : features after a multiple of 8, so that rows begin anywhere."""
    tiles, programs = -(-k // 128), device.describe(torch.device("cuda")).multiprocessors
    n, d = rounds * programs // tiles * 128 + beyond, 600 * tiles + more
    sketch = Sketch(offset + d, k, nnz=nnz, seed=beyond)[:, offset:]
    with all_sizes_on_hopper(), changed_choices(ALWAYS):
        calls = record_calls(monkeypatch)
        check_project(sketch, n, dtype, out_dtype, device="cuda", x_in=x_in, out_in=out_in, add=add)
        assert calls == [(n, d)]
    assert reductions


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_results_of_stacks(dtype, reductions):
    n = device.describe(torch.device("cuda")).multiprocessors // 4 * 128 + 100  # four tiles, one of each stack
    sketch = Sketch(1201, 480, nnz=8, stacks=4, seed=1)
    with all_sizes_on_hopper(), changed_choices(ALWAYS):
        check_project(sketch, n, dtype, device="cuda")
    assert reductions
