"""The choice of a launch, a pure function of a product, and a product for each kind of launch."""

import dataclasses
import math
from itertools import product as grid

import pytest
from helpers.choices import HOPPER, NO_FEW_READS, NONE_GENERATED, changed_choices, exact_product
from helpers.kernels import check_adjoint, check_project
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from sjlt import Sketch
from sjlt.backends.triton import exact as triton_exact
from sjlt.kernels.config import (
    ampere_codes,
    arithmetic,
    dense_matrix,
    hopper,
    hopper_codes,
    one_tile,
    scattered_layouts,
    scattered_rules,
    staged_adjoint,
    staged_gather,
)
from sjlt.kernels.config import exact as config
from sjlt.kernels.config.ampere_kernel import AmpereKernel
from sjlt.kernels.config.arithmetic import BF16_TRIPLE, FP16_PAIR, NATIVE
from sjlt.kernels.config.product import (
    GROUPS_PER_STEP,
    ITEM_BYTES,
    VECTOR_BYTES,
    Device,
    Product,
    count_groups,
    is_power_of_two,
    kernel_geometry,
)
from sjlt.laws import exact as law


@st.composite
def wide_products(draw):
    """Arbitrary products of up to 2^50 elements."""
    k = draw(st.integers(1, 1300) | st.integers(0, 12).map(lambda a: 128 << a) | st.integers(1, law.MAX_N_COMPONENTS))
    nnz = draw(st.integers(1, law.max_nnz(k)) | st.integers(0, 7).map(lambda a: min(1 << a, law.max_nnz(k))))
    n = draw(st.integers(1, 300) | st.integers(1, 2**24))
    d = draw(st.integers(1, 5000) | st.integers(1, 2**31) | st.integers(0, 26).map(lambda a: 1 << a))
    offset = draw(st.just(0) | st.integers(0, 2**62) | st.integers(0, 2**50).map(lambda i: 4096 * i))
    padding = draw(st.integers(0, 70))
    strides = draw(st.sampled_from([(d + padding, 1), (1, n + padding), (2 * d, 2), (0, 1), (1, 1), (d, 0)]))
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    precision = draw(st.sampled_from(["highest", "high", "medium"]))
    y_strides = draw(st.sampled_from([(k + padding, 1), (1, n + padding), (2 * k, 2)]))
    copies = {"asynchronous_copies": True}
    devices = [Device(1, 65536), Device(4, 101376), Device(108, 166912), HOPPER]
    devices += [Device(58, 101376, **copies), Device(108, 166912, **copies)]
    device = draw(st.sampled_from(devices))
    adjoint, plain = draw(st.booleans()), draw(st.booleans())
    matmul = draw(st.booleans())
    return Product(adjoint, n, d, k, nnz, offset, strides, y_strides, dtype, precision, plain, device, matmul=matmul)


CASES = settings(max_examples=200, derandomize=True)
LARGE = exact_product(8, 2**27, 4096, 4, dtype="bfloat16")


def columns_of_group(p):
    g = law.geometry(p.k, p.nnz, 0)
    return 1 << (g.log_group + g.log_chunk)


def every_launch(p):
    """The launches of all portable kernels that could run a product."""
    yield config.few_vectors(p)
    if p.dtype != "float64":
        yield config.tensor_core(p)
        if not p.adjoint or is_power_of_two(p.k, p.nnz):
            yield config.row_gather(p)


@CASES
@given(p=wide_products())
@example(p=LARGE)
def test_chosen_kernel_can_run_the_product(p):
    chosen = config.choose(p)
    if isinstance(chosen, config.DenseMatrix):
        assert dense_matrix.eligible(p)
        assert 2 * p.k * ((p.d + 15) // 16 * 16) <= min(64 << 20, p.n * (p.d + p.k) * 2 // 16)
    elif isinstance(chosen, config.Hopper):
        assert p.plain
        assert p.device.hopper
        assert hopper.eligible(p)
    elif isinstance(chosen, config.Codes):
        if isinstance(chosen.kernel, AmpereKernel):
            assert ampere_codes.eligible_few(p) or (ampere_codes.eligible(p) and not p.device.hopper)
        else:
            assert hopper_codes.eligible(p)
            assert p.device.hopper
        assert not p.adjoint
        assert chosen.splits * chosen.groups_per_split >= count_groups(p)
        assert chosen.splits <= 65_535
    elif isinstance(chosen, config.OneTile):
        assert one_tile.is_small(p) if chosen.sub_blocks else one_tile.eligible(p)
        assert 1 <= chosen.splits <= 65_535
    elif isinstance(chosen, config.ScatteredSums):
        rules = ("eligible", "eligible_small", "eligible_many", "eligible_long_rows")
        assert any(getattr(scattered_rules, rule)(p) for rule in rules)
        assert chosen.kernel.shared_bytes + scattered_layouts.TRITON_BYTES <= p.device.shared_memory
        assert 4 * chosen.splits * p.n * p.k <= max(64 << 20, p.x_bytes // 16)
    elif isinstance(chosen, config.StagedGather):
        assert staged_gather.eligible(p)
    elif isinstance(chosen, config.StagedAdjoint):
        assert staged_adjoint.eligible(p)
    elif config.is_small_gather(p):
        assert chosen == config.few_vectors(p)
    else:
        assert chosen == config.choose_on_the_fly(p)
        assert chosen in list(every_launch(p))


@CASES
@given(p=wide_products())
@example(p=LARGE)
def test_splits_cover_the_columns_once(p):
    width = columns_of_group(p)
    groups = (p.offset + p.d - 1) // width - p.offset // width + 1
    p = p._replace(adjoint=False)
    c = config.few_vectors(p)
    batches = -(-groups // (c.segments * c.layout.chunks_outer * c.layout.chunks_inner))
    assert (c.splits - 1) * c.batches_per_split < batches <= c.splits * c.batches_per_split
    assert c.splits <= 65_535


@CASES
@given(p=wide_products())
@example(p=LARGE)
def test_splits_of_groups_cover_the_columns_once(p):
    assume(p.dtype != "float64")
    width = columns_of_group(p)
    groups = (p.offset + p.d - 1) // width - p.offset // width + 1
    assert count_groups(p) == groups
    for c in every_launch(p):
        if not isinstance(c, config.FewVectors):
            assert (c.splits - 1) * c.groups_per_split < groups <= c.splits * c.groups_per_split
            assert c.splits <= 65_535  # limit of a grid axis
            if isinstance(c, config.TensorCore):
                assert c.groups_per_split % c.chunks_per_dot == 0


@CASES
@given(p=wide_products())
@example(p=LARGE)
def test_memory_beyond_input_and_output(p):
    """At most 64 MiB or 5 % of the data, for partial sums and for entries or codes written beforehand."""
    p = p._replace(adjoint=False)
    launches = list(every_launch(p))
    if one_tile.eligible(p):
        launches.append(one_tile.launch(p))
    if p.device.hopper and hopper.eligible(p):
        launches.append(hopper.launch(p))
    if p.device.hopper and hopper_codes.eligible(p):
        launches.append(hopper_codes.launch(p))
    if ampere_codes.eligible(p):
        launches.append(ampere_codes.launch(p))
    if one_tile.is_small(p):
        launches.append(one_tile.launch(p))
    for c in launches:
        sums = c.splits if c.splits > 1 else 0
        if isinstance(c, config.Codes) and c.splits > c.splits_per_pass:
            sums = c.splits_per_pass + 1
        allocated = max(4, p.item_bytes) * sums * p.n * p.k
        if isinstance(c, config.OneTile) and not c.sub_blocks:
            allocated += (count_groups(p) << p.geometry.log_chunk) * c.rows * 2
        elif isinstance(c, config.Codes):
            lists = min(c.splits, c.splits_per_pass) * p.geometry.n_tiles
            allocated += lists * c.capacity * (law.TILE_ROWS + 4)  # and block offsets
        assert allocated <= max(64 << 20, p.n * p.d * p.item_bytes // 20) + 4096


@CASES
@given(p=wide_products(), stacks=st.integers(1, 32))
def test_partial_sums_of_stacks_use_little_memory(p, stacks):
    """When one launch covers all stacks, their programs together fill the device with that many splits."""
    p = p._replace(adjoint=False, stacks=stacks)
    for c in every_launch(p):
        if c.splits > 1 and not isinstance(c, config.FewVectors):  # runs stack by stack
            assert 4 * c.splits * p.n * p.k * stacks <= 64 << 20
            programs = stacks * p.geometry.n_tiles * -(-p.n // c.block_vectors)
            assert c.splits * programs <= 4 * p.device.multiprocessors


@CASES
@given(p=wide_products())
def test_alignment_divides_offsets_and_strides(p):
    assume(p.dtype != "float64")
    c = config.tensor_core(p)
    assert c.align.bit_count() == 1
    assert c.align * ITEM_BYTES[p.dtype] <= VECTOR_BYTES
    if c.align > 1:
        assert p.x_strides[1] == 1
        assert p.n == 1 or p.x_strides[0] % c.align == 0
        assert p.d % c.align == p.offset % c.align == 0  # otherwise masks would split an access
        assert (1 << law.geometry(p.k, p.nnz, 0).log_chunk) % c.align == 0


@CASES
@given(p=wide_products())
@example(p=LARGE)
def test_unmasked_launches_have_no_partial_blocks(p):
    width = columns_of_group(p)
    for c in every_launch(p):
        if c.unmasked and (isinstance(c, config.FewVectors) or (p.adjoint and isinstance(c, config.RowGather))):
            assert p.n % c.block_vectors == 0  # the columns are tested in any case
        elif c.unmasked:
            assert is_power_of_two(p.k, p.nnz)
            assert p.offset % width == p.d % width == 0
            # The last split is as complete as the others.
            assert (p.d // width) % getattr(c, "chunks_per_dot", 1) == 0
            assert isinstance(c, config.TensorCore) or p.n % c.block_vectors == 0


@pytest.mark.exhaustive
@CASES
@given(p=wide_products())
def test_tensor_core_constants(p):
    assume(p.dtype != "float64")
    c = config.tensor_core(p)
    g = law.geometry(p.k, p.nnz, 0)
    chunk, tiles = 1 << g.log_chunk, g.n_tiles
    geometry = kernel_geometry(p.k, p.nnz)
    assert geometry.power_of_two == (p.k == tiles * 128 == 128 << g.log_group and chunk * p.nnz == 128)
    for size in (c.block_vectors, c.chunks_per_dot, geometry.n_keys, geometry.n_sign_words):
        assert size.bit_count() == 1
    assert c.chunks_per_dot <= GROUPS_PER_STEP
    assert c.chunks_per_dot * chunk >= 16  # inner dimension of a dot
    assert 16 <= c.block_vectors <= 128
    if geometry.power_of_two:
        assert geometry.n_keys == max(1, p.nnz // 4)  # for 32 rows
        assert geometry.n_sign_words == max(1, 4 // p.nnz)
    else:
        assert geometry.n_keys >= p.nnz
        assert geometry.n_sign_words == 4
    assert not (p.adjoint and c.chunked_sum)


@CASES
@given(p=wide_products())
def test_few_vectors_constants(p):
    c = config.few_vectors(p)
    g = law.geometry(p.k, p.nnz, 0)
    axes = dataclasses.astuple(c.layout)
    for size in (c.block_vectors, c.segments, *axes):
        assert size.bit_count() == 1
    assert c.layout.sub_blocks >= p.nnz
    rows = c.layout.rows_outer * c.layout.rows_inner
    if p.adjoint:
        assert rows == 1 << g.log_chunk
    else:
        assert rows * p.nnz >= -(-p.k // g.n_tiles)  # rows of a tile
        width = columns_of_group(p) * c.segments * c.layout.chunks_outer * c.layout.chunks_inner
        assert c.offsets_64 or width * p.x_strides[1] < 1 << 32
    assert c.fp64 == (p.dtype == "float64")
    assert c.block_vectors * math.prod(axes) <= 1 << 20  # Triton's limit on the elements of a tensor
    if c.vectors_contiguous:
        assert p.x_strides[1] % c.align == 0
    assert p.n % c.block_vectors == 0 or not c.unmasked


def test_fp32_modes():
    modes = {
        (dtype, precision, adjoint): config.tensor_core(
            exact_product(1 << 16, 512, dtype=dtype, precision=precision, adjoint=adjoint)
        ).mode
        for dtype, precision, adjoint in grid(("float32", "bfloat16"), ("highest", "high", "medium"), (False, True))
    }
    for adjoint in (False, True):
        assert modes["float32", "highest", adjoint] in (arithmetic.FP16_PAIR, arithmetic.BF16_TRIPLE)
        assert modes["float32", "high", adjoint] == arithmetic.BF16_PAIR
        assert modes["float32", "medium", adjoint] == arithmetic.BF16
        assert {modes["bfloat16", p, adjoint] for p in ("highest", "high", "medium")} == {arithmetic.NATIVE}


def test_chunked_sums():
    """Sums of more chunks than the required accuracy allows are split; a dot then covers 64 features."""

    def chunked(chunks, dtype="float32", precision="highest", adjoint=False, nnz=4):
        c = config.tensor_core(
            exact_product(10**6, chunks * 128 // nnz, 128, nnz, dtype=dtype, precision=precision, adjoint=adjoint)
        )
        return c.chunked_sum, c.block_vectors, c.chunks_per_dot

    for precision in ("highest", "high"):
        assert chunked(16, precision=precision) == (False, 128, 1)
        assert chunked(17, precision=precision) == (True, 64, 2)
    assert chunked(17, nnz=16) == (True, 64, 4)  # 32 features: more would need too many keys
    assert chunked(32, precision="medium") == (False, 128, 1)
    assert chunked(33, precision="medium") == (True, 64, 2)
    assert chunked(1024, "bfloat16") == (False, 64, 2)
    assert chunked(1025, "float16") == (True, 64, 2)
    assert chunked(5000, adjoint=True) == (False, 64, 2)


def test_small_products_with_long_sums_are_split():
    """A projection's splits are added by a second launch; an adjoint needs no splits."""
    assert config.tensor_core(exact_product(192, 4096, 128)).splits > 1
    assert config.tensor_core(exact_product(1000, 768, 128)).splits == 1
    assert config.tensor_core(exact_product(192, 4096, 4096)).splits == 1  # 128 columns per tile
    assert config.tensor_core(exact_product(131, 768, 128, adjoint=True)).splits > 1


def test_launches_are_hashable_values():
    """Equal products have equal launches, and a launch can be a dictionary key."""
    first = config.choose(LARGE)
    assert first is not config.choose(LARGE)
    assert first == config.choose(Product(*LARGE))
    assert hash(first) == hash(config.choose(LARGE))
    with pytest.raises(AttributeError):
        first.splits = 2


# --------------------------------------------------------------------------------- variants

# The expected launch, and a product that leads to it: (n, d, k, nnz, offset, dtype, layout), cut into `splits`.
P2, UNMASKED, CHUNKED, LOADS = "power_of_two", "unmasked", "chunked_sum", "load_chunks"
CONTIGUOUS = "vectors_contiguous"
VARIANTS = [
    ({"mode": NATIVE, P2: True, UNMASKED: True}, (65, 256, 256, 4, 128, "bfloat16", "rows"), 1),
    ({"mode": NATIVE, P2: True, UNMASKED: False}, (66, 200, 128, 4, 7, "bfloat16", "rows"), 2),
    ({"mode": NATIVE, P2: False, UNMASKED: False}, (66, 100, 300, 4, 7, "float16", "rows"), 1),
    ({"mode": NATIVE, P2: True, CHUNKED: True}, (65, 8300, 128, 16, 7, "float16", "rows"), 1),
    ({"mode": FP16_PAIR, P2: True, UNMASKED: True}, (130, 128, 128, 4, 64, "float32", "rows"), 1),
    ({"mode": FP16_PAIR, P2: True, UNMASKED: False}, (130, 100, 128, 4, 3, "float32", "rows"), 1),
    ({"mode": FP16_PAIR, UNMASKED: True, CHUNKED: True}, (65, 2048, 128, 4, 0, "float32", "rows"), 1),
    ({"mode": FP16_PAIR, P2: False, CHUNKED: True}, (70, 1300, 100, 4, 5, "float32", "rows"), 1),
    ({"mode": BF16_TRIPLE, P2: False, CHUNKED: False}, (70, 250, 300, 4, 5, "float32", "rows"), 2),
    ({"mode": BF16_TRIPLE, P2: True, CHUNKED: True}, (66, 1500, 128, 4, 5, "float32", "rows"), 1),
    ({"mode": FP16_PAIR, UNMASKED: True, CHUNKED: False}, (66, 512, 128, 4, 64, "float32", "rows"), 2),
    ({"mode": FP16_PAIR, UNMASKED: False, CHUNKED: True}, (66, 3300, 128, 4, 3, "float32", "rows"), 3),
    ({"align": 4, P2: True, UNMASKED: True, CHUNKED: False}, (64, 256, 256, 4, 128, "float32", "columns"), 1),
    ({"align": 1, P2: True, UNMASKED: False}, (67, 200, 256, 2, 7, "float32", "columns"), 1),
    ({"n_keys": 2, P2: True, UNMASKED: True}, (64, 256, 256, 8, 64, "float32", "columns"), 2),
    ({"n_keys": 2, P2: True, UNMASKED: False}, (66, 150, 128, 8, 7, "float32", "columns"), 1),
    ({"mode": NATIVE, P2: True, UNMASKED: False}, (66, 150, 128, 8, 7, "bfloat16", "columns"), 1),
    ({"align": 2, P2: False, UNMASKED: False}, (66, 200, 300, 3, 7, "float32", "columns"), 2),
    ({LOADS: True, P2: True, CONTIGUOUS: False}, (3, 700, 128, 4, 7, "float32", "rows"), 1),
    ({LOADS: True, P2: False, CONTIGUOUS: True}, (4, 700, 300, 4, 7, "bfloat16", "columns"), 1),
    ({LOADS: False, P2: True, CONTIGUOUS: False}, (1, 3000, 128, 1, 7, "float32", "rows"), 2),
    ({LOADS: False, P2: False, CONTIGUOUS: True, "fp64": True}, (20, 300, 300, 5, 7, "float64", "columns"), 1),
    ({LOADS: False, "fp64": True, CONTIGUOUS: False}, (20, 300, 100, 33, 7, "float64", "rows"), 1),
    ({"mode": NATIVE, "vector_align": 2, P2: False}, (66, 200, 300, 3, 7, "bfloat16", "columns"), 2),
    ({"mode": NATIVE, "vector_align": 4, P2: True}, (68, 200, 128, 4, 7, "float16", "columns"), 1),
]


# Variants that the interpreter runs by default: each kernel and arithmetic mode, with splits and chunked sums.
DEFAULT_VARIANTS = (0, 4, 12, 18, 20)
SLOW = pytest.mark.exhaustive
CHOSEN = [pytest.param(*v, marks=() if i in DEFAULT_VARIANTS else SLOW) for i, v in enumerate(VARIANTS)]


@pytest.mark.parametrize(("wanted", "shape", "splits"), CHOSEN)
def test_every_variant(wanted, shape, splits, monkeypatch, kernels_on):
    n, d, k, nnz, offset, dtype, layout = shape
    chosen, choose, in_halves = [], triton_exact.choose, "16" in dtype

    def choice(product):
        made = choose(product)
        if isinstance(made, config.FewVectors) and not product.adjoint:
            batches = -(-made.splits * made.batches_per_split // splits)
            made = dataclasses.replace(made, splits=splits, batches_per_split=batches)
        chosen.append(made)
        return made

    def cut(product, block_vectors, groups, programs_per_multiprocessor, unit):
        each = math.ceil(math.ceil(groups / splits) / unit) * unit
        return -(-groups // each), each

    monkeypatch.setattr(triton_exact, "choose", choice)
    fewest = 0 if wanted.get("mode") == arithmetic.FP16_PAIR else math.inf
    S = Sketch(offset + d, k, nnz=nnz, seed=d)[:, offset:]
    out_dtype = "float32" if in_halves else dtype
    settings = {"arithmetic.MIN_PAIR_ELEMENTS": fewest, "exact.split_groups": cut}
    settings |= NONE_GENERATED | NO_FEW_READS | {"product.NARROW_BYTES": 0, "hopper_codes.MIN_BYTES": 1 << 40}
    with changed_choices(settings):
        check_project(S, n, dtype, out_dtype, kernels_on, layout, layout, add=not in_halves)
        if d < 1000:
            check_adjoint(S, n, dtype, out_dtype, kernels_on, layout, layout)
    kinds = {"load_chunks": config.FewVectors, "mode": config.TensorCore}
    kind = next((kinds[name] for name in kinds if name in wanted), config.RowGather)
    assert isinstance(chosen[0], kind)
    assert chosen[0].splits == splits
    found = dataclasses.asdict(kernel_geometry(k, nnz)) | dataclasses.asdict(chosen[0])
    assert {name: found[name] for name in wanted} == wanted
