"""The choice of a launch, a pure function of a product's shapes, and a product for each kind of launch."""

import dataclasses
import math
from itertools import product as grid

import pytest
from helpers.kernels import check_adjoint, check_project
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from sjlt import Sketch
from sjlt.kernels.config import exact as launch
from sjlt.laws import exact as law

SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
each_side = pytest.mark.parametrize("adjoint", [False, True], ids=["project", "adjoint"])


@st.composite
def wide_products(draw):
    """Products as they come, of up to 2^50 elements."""
    k = draw(st.integers(1, 1300) | st.integers(0, 12).map(lambda a: 128 << a) | st.integers(1, law.MAX_N_COMPONENTS))
    nnz = draw(st.integers(1, law.max_nnz(k)) | st.integers(0, 7).map(lambda a: min(1 << a, law.max_nnz(k))))
    n = draw(st.integers(1, 300) | st.integers(1, 2**24))
    d = draw(st.integers(1, 5000) | st.integers(1, 2**31) | st.integers(0, 26).map(lambda a: 1 << a))
    offset = draw(st.just(0) | st.integers(0, 2**62) | st.integers(0, 2**50).map(lambda i: 4096 * i))
    padding = draw(st.integers(0, 70))
    strides = draw(st.sampled_from([(d + padding, 1), (1, n + padding), (2 * d, 2), (0, 1), (1, 1), (d, 0)]))
    dtype = draw(st.sampled_from(sorted(SIZES)))
    precision = draw(st.sampled_from(["highest", "high", "medium"]))
    narrow = draw(st.sampled_from([(k + padding, 1), (1, n + padding), (2 * k, 2)]))
    device = draw(st.sampled_from([(1, 65536), (4, 101376), (108, 166912), (132, 232448)]))
    return launch.Product(n, d, k, nnz, offset, strides, narrow, dtype, precision, *device)


CASES = settings(max_examples=400, deadline=None, derandomize=True)
LARGE = launch.Product(8, 2**27, 4096, 4, 0, (2**27, 1), (4096, 1), "bfloat16", "highest", 132, 232448)


def columns_of_group(p):
    g = law.geometry(p.k, p.nnz, 0)
    return 1 << (g.log_group + g.log_chunk)


def every_launch(p, adjoint):
    """All kernels' launches, whichever of them would be chosen."""
    yield launch.gather(p, adjoint)
    if p.dtype != "float64":
        yield launch.tiles(p, adjoint)
        if not adjoint or launch.is_whole(p.k, p.nnz):
            yield launch.rows(p, adjoint)


@each_side
@CASES
@given(p=wide_products())
@example(p=LARGE)
def test_the_choice_is_one_of_them(adjoint, p):
    assert launch.choose(p, adjoint) in list(every_launch(p, adjoint))


@CASES
@given(p=wide_products())
@example(p=LARGE)
def test_splits_cover_the_columns_once(p):
    width = columns_of_group(p)
    groups = (p.offset + p.d - 1) // width - p.offset // width + 1
    c = launch.gather(p)
    batches = -(-groups // (c.parts * c.qi * c.qw))
    assert (c.splits - 1) * c.batches < batches <= c.splits * c.batches
    assert c.splits <= 65_535


@each_side
@CASES
@given(p=wide_products())
@example(p=LARGE)
def test_splits_of_groups_cover_the_columns_once(adjoint, p):
    assume(p.dtype != "float64")
    width = columns_of_group(p)
    groups = (p.offset + p.d - 1) // width - p.offset // width + 1
    assert launch.groups_of(p, law.geometry(p.k, p.nnz, 0)) == groups
    for c in every_launch(p, adjoint):
        if not isinstance(c, launch.Gather):
            assert (c.splits - 1) * c.groups_per_split < groups <= c.splits * c.groups_per_split
            assert c.splits <= 65_535  # of an axis of a grid
            if isinstance(c, launch.Tiles):
                assert c.groups_per_split % c.chunks == 0  # a program's steps are of whole `chunks`


@CASES
@given(p=wide_products())
@example(p=LARGE)
def test_partial_results_take_little_memory(p):
    for c in every_launch(p, False):
        if c.splits > 1:
            data = p.n * p.d * SIZES[p.dtype]
            item = max(4, SIZES[p.dtype])
            assert item * c.splits * p.n * p.k <= max(64 << 20, data // 20)


@each_side
@CASES
@given(p=wide_products())
def test_alignment_divides_all_that_an_address_is_made_of(adjoint, p):
    assume(p.dtype != "float64")
    c = launch.tiles(p, adjoint)
    assert c.align.bit_count() == 1
    assert c.align * SIZES[p.dtype] <= launch.VECTOR_BYTES
    if c.align > 1:
        assert p.strides[1] == 1
        assert p.n == 1 or p.strides[0] % c.align == 0
        assert p.d % c.align == p.offset % c.align == 0  # or masks would cut an access
        assert (1 << law.geometry(p.k, p.nnz, 0).log_chunk) % c.align == 0


@each_side
@CASES
@given(p=wide_products())
@example(p=LARGE)
def test_masks_are_left_out_only_where_all_columns_exist(adjoint, p):
    width = columns_of_group(p)
    for c in every_launch(p, adjoint):
        if c.even and (isinstance(c, launch.Gather) or (adjoint and isinstance(c, launch.Rows))):
            assert p.n % c.vectors == 0  # the columns are tested in any case
        elif c.even:
            assert c.whole
            assert p.offset % width == p.d % width == 0
            # The last split is as whole as the others.
            assert (p.d // width) % getattr(c, "chunks", 1) == 0
            assert isinstance(c, launch.Tiles) or p.n % c.vectors == 0


@each_side
@CASES
@given(p=wide_products())
def test_constants_of_the_tile_kernels(adjoint, p):
    assume(p.dtype != "float64")
    c = launch.tiles(p, adjoint)
    g = law.geometry(p.k, p.nnz, 0)
    chunk, tiles = 1 << g.log_chunk, g.n_tiles
    assert c.whole == (p.k == tiles * 128 == 128 << g.log_group and chunk * p.nnz == 128)
    for size in (c.vectors, c.chunks, c.keys, c.signs):
        assert size.bit_count() == 1
    assert c.chunks <= launch.BATCH
    # A dot's inner length is at least 16.
    assert c.chunks * chunk >= 16
    assert 16 <= c.vectors <= 128
    if c.whole:
        assert c.keys == max(1, p.nnz // 4)  # of 32 rows
        assert c.signs == max(1, 4 // p.nnz)
    else:
        assert c.keys >= p.nnz
        assert c.signs == 4
    assert not (adjoint and c.fold)


@each_side
@CASES
@given(p=wide_products())
def test_constants_of_the_gather_kernels(adjoint, p):
    c = launch.gather(p, adjoint)
    g = law.geometry(p.k, p.nnz, 0)
    for size in (c.vectors, c.t, c.h, c.lane, c.parts, c.qi, c.qw):
        assert size.bit_count() == 1
    assert c.t >= p.nnz
    if adjoint:
        assert c.h * c.lane == 1 << g.log_chunk
    else:
        assert c.h * c.lane * p.nnz >= -(-p.k // g.n_tiles)  # rows of a tile
        width = columns_of_group(p) * c.parts * c.qi * c.qw
        assert c.long or width * p.strides[1] < 1 << 32
    assert c.wide == (p.dtype == "float64")
    assert c.vectors * c.t * c.h * c.qi * c.qw * c.lane <= 1 << 20  # of a tensor in Triton
    if c.vectors_last:
        assert p.strides[1] % c.align == 0
    assert p.n % c.vectors == 0 or not c.even


def test_how_fp32_is_multiplied():
    size = {"n": 1 << 16, "d": 512, "k": 256, "nnz": 4, "offset": 0, "strides": (512, 1), "narrow": (256, 1)}
    size |= {"multiprocessors": 132, "shared_memory": 232_448}
    modes = {
        (dtype, precision, adjoint): launch.tiles(
            launch.Product(dtype=dtype, precision=precision, **size), adjoint
        ).mode
        for dtype, precision, adjoint in grid(("float32", "bfloat16"), ("highest", "high", "medium"), (False, True))
    }
    for adjoint in (False, True):
        assert modes["float32", "highest", adjoint] in (launch.FP16_PAIR, launch.BF16_TRIPLE)
        assert modes["float32", "high", adjoint] == launch.BF16_PAIR
        assert modes["float32", "medium", adjoint] == launch.BF16
        assert {modes["bfloat16", p, adjoint] for p in ("highest", "high", "medium")} == {launch.NATIVE}


def test_which_sums_are_made_in_parts():
    """Those of more chunks than keep the accuracy that is asked for; then 64 features are a step."""

    def parts(chunks, dtype="float32", precision="highest", adjoint=False, nnz=4):
        d = chunks * 128 // nnz
        c = launch.tiles(
            launch.Product(10**6, d, 128, nnz, 0, (d, 1), (128, 1), dtype, precision, 132, 232_448), adjoint
        )
        return c.fold, c.vectors, c.chunks

    for precision in ("highest", "high"):
        assert parts(16, precision=precision) == (False, 128, 1)
        assert parts(17, precision=precision) == (True, 64, 2)
    assert parts(17, nnz=16) == (True, 64, 4)  # 32 features: more would have too many keys
    assert parts(32, precision="medium") == (False, 128, 1)
    assert parts(33, precision="medium") == (True, 64, 2)
    assert parts(1024, "bfloat16") == (False, 64, 2)
    assert parts(1025, "float16") == (True, 64, 2)
    assert parts(5000, adjoint=True) == (False, 64, 2)


def test_columns_next_to_each_other():
    """As in a row-major A: rows of A are read nnz times, or multiplied by tensor cores."""
    product = launch.Product(512, 2**18, 1024, 4, 0, (1, 512), (1, 512), "float32", "highest", 132, 232_448)
    for changes, adjoint, kind in (
        ({}, False, launch.Rows),
        ({"nnz": 8}, False, launch.Rows),
        ({"nnz": 16}, False, launch.Tiles),
        ({"nnz": 8, "k": 1000}, False, launch.Tiles),
        ({"nnz": 8, "dtype": "bfloat16"}, False, launch.Tiles),
        ({"nnz": 4, "dtype": "bfloat16"}, False, launch.Rows),
        ({}, True, launch.Rows),
        ({"nnz": 8}, True, launch.Tiles),
    ):
        assert isinstance(launch.choose(product._replace(**changes), adjoint), kind), (changes, adjoint)


def test_choices_are_values():
    """Equal products have equal launches, and a launch can be a key."""
    launch.choose.cache_clear()
    first = launch.choose(LARGE)
    launch.choose.cache_clear()
    assert first == launch.choose(launch.Product(*LARGE))
    assert hash(first) == hash(launch.choose(LARGE))
    with pytest.raises(AttributeError):
        first.splits = 2


# --------------------------------------------------------------------------------- variants

# What a launch shall be, and the product that has it: (n, d, k, nnz, offset, dtype, layout), cut into `splits`.
VARIANTS = [
    ({"mode": launch.NATIVE, "whole": True, "even": True}, (65, 256, 256, 4, 128, "bfloat16", "rows"), 1),
    ({"mode": launch.NATIVE, "whole": True, "even": False}, (66, 200, 128, 4, 7, "bfloat16", "rows"), 2),
    ({"mode": launch.NATIVE, "whole": False, "even": False}, (66, 100, 300, 4, 7, "float16", "rows"), 1),
    ({"mode": launch.NATIVE, "whole": True, "fold": True}, (65, 8300, 128, 16, 7, "float16", "rows"), 1),
    ({"mode": launch.FP16_PAIR, "whole": True, "even": True}, (130, 128, 128, 4, 64, "float32", "rows"), 1),
    ({"mode": launch.FP16_PAIR, "whole": True, "even": False}, (130, 100, 128, 4, 3, "float32", "rows"), 1),
    ({"mode": launch.FP16_PAIR, "even": True, "fold": True}, (65, 2048, 128, 4, 0, "float32", "rows"), 1),
    ({"mode": launch.FP16_PAIR, "whole": False, "fold": True}, (70, 1300, 100, 4, 5, "float32", "rows"), 1),
    ({"mode": launch.BF16_TRIPLE, "whole": False, "fold": False}, (70, 250, 300, 4, 5, "float32", "rows"), 2),
    ({"mode": launch.BF16_TRIPLE, "whole": True, "fold": True}, (66, 1500, 128, 4, 5, "float32", "rows"), 1),
    ({"mode": launch.FP16_PAIR, "even": True, "fold": False}, (66, 512, 128, 4, 64, "float32", "rows"), 2),
    ({"mode": launch.FP16_PAIR, "even": False, "fold": True}, (66, 3300, 128, 4, 3, "float32", "rows"), 3),
    ({"align": 4, "whole": True, "even": True, "fold": False}, (64, 256, 256, 4, 128, "float32", "columns"), 1),
    ({"align": 1, "whole": True, "even": False}, (67, 200, 256, 2, 7, "float32", "columns"), 1),
    ({"keys": 2, "whole": True, "even": True}, (64, 256, 256, 8, 64, "float32", "columns"), 2),
    ({"keys": 2, "whole": True, "even": False}, (66, 150, 128, 8, 7, "float32", "columns"), 1),
    ({"mode": launch.NATIVE, "whole": True, "even": False}, (66, 150, 128, 8, 7, "bfloat16", "columns"), 1),
    ({"align": 2, "whole": False, "even": False}, (66, 200, 300, 3, 7, "bfloat16", "columns"), 2),
    ({"lines": True, "whole": True, "vectors_last": False}, (3, 700, 128, 4, 7, "float32", "rows"), 1),
    ({"lines": True, "whole": False, "vectors_last": True}, (4, 700, 300, 4, 7, "bfloat16", "columns"), 1),
    ({"lines": False, "whole": True, "vectors_last": False}, (1, 3000, 128, 1, 7, "float32", "rows"), 2),
    (
        {"lines": False, "whole": False, "vectors_last": True, "wide": True},
        (20, 300, 300, 5, 7, "float64", "columns"),
        1,
    ),
    ({"lines": False, "wide": True, "vectors_last": False}, (20, 300, 100, 33, 7, "float64", "rows"), 1),
]


@pytest.mark.parametrize(("wanted", "shape", "splits"), VARIANTS)
def test_every_variant(wanted, shape, splits, monkeypatch, kernels_on):
    n, d, k, nnz, offset, dtype, layout = shape
    chosen, choose = [], launch.choose

    def choice(product, adjoint=False):
        made = choose(product, adjoint)
        if isinstance(made, launch.Gather) and not adjoint:
            batches = -(-made.splits * made.batches // splits)
            made = dataclasses.replace(made, splits=splits, batches=batches)
        chosen.append(made)
        return made

    def cut(product, geometry, vectors, groups, programs_each, unit, adjoint):
        each = math.ceil(math.ceil(groups / splits) / unit) * unit
        return -(-groups // each), each

    monkeypatch.setattr(launch, "PAIR_ELEMENTS", 0 if wanted.get("mode") == launch.FP16_PAIR else math.inf)
    monkeypatch.setattr(launch, "split", cut)
    monkeypatch.setattr(launch, "choose", choice)
    choose.cache_clear()
    S = Sketch(offset + d, k, nnz=nnz, seed=d)[:, offset:]
    check_project(
        S,
        n,
        dtype,
        "float32" if "16" in dtype else dtype,
        kernels_on,
        layout,
        layout,
        add=dtype in ("float32", "float64"),
    )
    kind = launch.Gather if "lines" in wanted else launch.Tiles if "mode" in wanted else launch.Rows
    assert isinstance(chosen[0], kind)
    assert chosen[0].splits == splits
    assert {name: getattr(chosen[0], name) for name in wanted} == wanted
    if d < 1000:
        check_adjoint(S, n, dtype, "float32" if "16" in dtype else dtype, kernels_on, layout, layout)
    choose.cache_clear()
