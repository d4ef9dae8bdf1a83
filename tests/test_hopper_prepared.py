"""Prepared products for the Hopper kernels launch exactly what unprepared calls would; checked without a GPU.

The test runs this file as a program, without the interpreter and with stand-ins for compiled kernels. `expected_codes`
and `expected_exact` define the expected launches, using a view for every tensor that has one.
"""

import os
import subprocess
import sys

import pytest
import triton

LOADERS = "TMA", "COPY", "LOAD", "STAGE"


def test_prepared_calls_equal_unprepared_calls():
    from sjlt.backends.triton.device import GLUON_VERSIONS

    if not triton.__version__.startswith(GLUON_VERSIONS):
        pytest.skip("the kernels do not run in this version")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-8000:]
    found = {tuple(line.split()) for line in result.stdout.splitlines()}
    kinds = {(loader, f"store={store}", "codes") for loader in LOADERS for store in (True, False)}
    assert {kind[:3] for kind in found} == kinds | {("TMA", "store=True", "project"), ("TMA", "store=True", "adjoint")}
    for which in ("codes", "project"):
        assert {kind[3] for kind in found if kind[2] == which} == {"one", "splits", *(["shares"] * (which == "codes"))}
    assert {kind[4] for kind in found} == {"overwrites", "adds"}
    assert {kind[5] for kind in found} == {"staged", "direct"}


# ------------------------------------------------------------------------------------- the program


class Launches:
    """Record launches (kernel name, grid, arguments, constants), whether through Triton's lookup or bypassing it."""

    def __init__(self):
        self.searched, self.started, self.allocated = [], [], []

    def replace_kernels(self):
        """Replace Triton's lookup and launch by stand-ins, and record what calls allocate."""
        from types import SimpleNamespace

        import torch

        from sjlt.backends.triton import device, launcher
        from sjlt.kernels.config.product import Device

        new_empty = torch.Tensor.new_empty

        def note(*arguments, **options):
            self.allocated.append(new_empty(*arguments, **options))
            return self.allocated[-1]

        torch.Tensor.new_empty = note
        triton.JITFunction.__getitem__ = lambda kernel, grid: self.search(kernel, grid)
        triton.JITFunction.warmup = lambda kernel, *given, grid, **constants: self.search(kernel, grid)(
            *given, **constants
        )
        triton.AsyncCompileMode = refuse  # as within this mode: kernels are not compiled before they are launched
        launcher._with_shared_memory = lambda compiled, size: compiled
        launcher.driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _: 0))
        device.describe = lambda _: Device(132, 227 << 10, hopper=True, programmatic_launch=True)

    def search(self, kernel, grid):
        def launch(*arguments, **constants):
            self.searched.append((kernel.__name__, grid, tuple(map(described, arguments)), constants))
            return Compiled(self, kernel.__name__)

        return launch


class Compiled:
    """Stand-in for a compiled kernel."""

    function, packed_metadata = None, None

    def __init__(self, launches, name):
        self.launches, self.name = launches, name

    def __getitem__(self, grid):
        """A launch of a kernel that `warmup` has compiled, which was recorded there."""
        return lambda *arguments: None

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        arguments = tuple(map(described, arguments))
        self.launches.started.append((self.name, (x, y, z), arguments))


def refuse(_):
    raise RuntimeError


def described(argument):
    """An argument, with descriptors and tensors converted to plain values."""
    if hasattr(argument, "block_shape"):
        shapes = tuple(argument.shape), tuple(argument.strides), tuple(argument.block_shape)
        rest = argument.padding, getattr(argument, "round_f32_to_tf32", None), repr(argument.layout)
        return "blocks", argument.base.data_ptr(), argument.base.dtype, shapes, rest
    return (argument.data_ptr(), argument.dtype) if hasattr(argument, "data_ptr") else argument


def blocks(x, *block):
    """A tensor descriptor as Triton itself creates and checks it."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if len(block) == 3:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.element_size(), rank=3)
    else:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, str(x.dtype)[6:]))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)


def parts(memory, *sizes):
    """Contiguous parts of memory of the given sizes in bytes, each aligned to 512 bytes."""
    import torch

    data, start, found = memory.flatten().view(torch.uint8), 0, []
    for size in sizes:
        assert start + size <= len(data), "too little memory"
        found.append(data[start : start + size])
        start += -(-size // 512) * 512
    return found


def sums_in(memory, splits, out):
    """Partial sums (splits, n, k) at the start of the memory, in the memory order of `out`."""
    import torch

    n, k = out.shape
    sums = parts(memory, 4 * splits * n * k)[0].view(torch.float32)
    return sums.view(splits, k, n).mT if out.stride(0) < out.stride(1) else sums.view(n, splits, k).transpose(0, 1)


def expected_codes(chosen, spec, x, out, add, memory):
    """The launches that compute X Sᵀ, or its partial sums, from codes."""
    import torch
    from triton.experimental.gluon import language as gl

    from sjlt.kernels.config.chunk_codes import shared_bytes
    from sjlt.kernels.config.hopper_loaders import slot_bytes
    from sjlt.kernels.nvidia.shared_memory import LIBRARIES
    from sjlt.laws import exact as law

    kernel, splits, (n, d), k = chosen.kernel, chosen.splits, x.shape, spec.n_components
    geometry = law.geometry(k, spec.nnz, 0)
    n_tiles, width = geometry.n_tiles, geometry.log_group + geometry.log_chunk
    lists = splits * n_tiles
    room = lists * chosen.capacity
    sums_bytes = 4 * splits * n * k if splits > 1 else 4 * chosen.sharers * (n - first_shared(chosen, n_tiles, n)) * k
    log_rows = 6 if k <= 64 else 7
    _, codes, columns, counts = parts(memory, sums_bytes, room << log_rows, 4 * room, 4 * (lists + 1))
    codes = codes, columns.view(torch.int32), counts.view(torch.int32)
    first = spec.feature_offset >> width
    groups = ((spec.feature_offset + d - 1) >> width) + 1 - first
    numbers = (spec.seed, spec.feature_offset, d, k, spec.nnz, n_tiles, geometry.log_group, geometry.log_chunk)
    numbers += (kernel.log_block, first, groups, chosen.groups_per_split, 8, chosen.capacity)  # 8: groups per program
    numbers += (log_rows, 3 if n_tiles == 1 and kernel.log_block <= 2 else 0)
    grid = (-(-chosen.groups_per_split // 8), 2 * n_tiles if kernel.windows else n_tiles, splits)
    sub_blocks = 8 if spec.nnz <= 8 else 1 << (spec.nnz - 1).bit_length()
    constants = {"SUB_BLOCKS": sub_blocks, "PROGRAMMATIC_LAUNCH": True, "SHARED_BYTES": shared_bytes(sub_blocks)}
    constants |= {"num_warps": 4, "extern_libs": LIBRARIES, "WINDOWS": kernel.windows}
    yield "encode_chunks", grid, (*codes, *numbers), constants

    target = sums_in(memory, splits, out) if splits > 1 else out.as_strided((1, n, k), (0, *out.stride()))
    data, result = x, target
    if kernel.loader == 0:
        panel = 1 << kernel.log_panel
        data = blocks(x.t(), panel, 128 // x.element_size()) if kernel.vectors_contiguous else blocks(x, 64, panel)
    if kernel.tma_store:
        rows = k // n_tiles
        if kernel.windows:
            all_rows = target.as_strided((n, 1, k), (out.stride(0), out.stride(0), 1))
            result = blocks(all_rows, kernel.part_vectors, 1, kernel.part_rows)
        elif kernel.out_vectors_contiguous:
            result = blocks(target.mT.reshape(lists, rows, n), 1, kernel.part_rows, kernel.part_vectors)
        else:
            lists_of_rows = target.transpose(0, 1).unflatten(2, (n_tiles, rows)).flatten(1, 2)
            result = blocks(lists_of_rows, kernel.part_vectors, 1, kernel.part_rows)
    scale = spec.nnz**-0.5 if splits == 1 else 1.0
    tasks = chosen.unshared + (chosen.products - chosen.unshared) * chosen.sharers
    sizes = (n, d, k, tasks * splits, chosen.unshared * splits, chosen.sharers, splits, n_tiles, chosen.capacity)
    constants = {"DTYPE": getattr(gl, str(x.dtype)[6:]), "CHOSEN": kernel, "ACCUMULATE": add and splits == 1}
    constants |= {"SHARES_PRODUCTS": chosen.sharers > 1}
    arguments = (data, result, *codes, *sizes, *x.stride(), *target.stride(), scale)
    width = chosen.groups_per_split << geometry.log_group + geometry.log_chunk
    arguments += (width, x.data_ptr() if chosen.prefetch else 0, memory.data_ptr())
    memory = {"SHARED_BYTES": kernel.slots * slot_bytes(kernel) + kernel.other_bytes, "extern_libs": LIBRARIES}
    constants |= {**memory, "num_warps": 4, "launch_pdl": True}
    yield "project_codes_hopper", (min(tasks * splits, 132), 1, 1), arguments, constants


def first_shared(chosen, n_tiles, n):
    """The first vector whose products are shared."""
    return n if chosen.sharers == 1 else chosen.unshared // n_tiles * 128


def expected_exact(chosen, spec, data, out, adjoint, memory):
    """The launch of a kernel that generates its own entries."""
    from sjlt.kernels.config.product import kernel_geometry

    n, splits, box = len(data), chosen.splits, (64, chosen.columns)
    constants = {"GEOMETRY": kernel_geometry(spec.n_components, spec.nnz), "SLOTS": chosen.slots, "num_warps": 4}
    numbers, grid = (spec.seed, spec.feature_offset), (chosen.programs, 1, 1)
    if adjoint:
        tensors = blocks(data, 64, 128), blocks(out, *box)
        yield "adjoint_hopper", grid, (*tensors, n, chosen.blocks, *numbers), {**constants, "TILES": chosen.tiles}
        return
    target = sums_in(memory, splits, out) if splits > 1 else out[None]
    if chosen.vectors_contiguous:
        tensors = blocks(data.t(), *box[::-1]), blocks(target.mT.reshape(-1, n), 128, 64)
    else:
        tensors = blocks(data, *box), blocks(target.transpose(0, 1).reshape(n, -1), 64, 128)
    sizes = (n, splits, chosen.blocks, chosen.blocks_per_split)
    constants |= {"VECTORS_CONTIGUOUS": chosen.vectors_contiguous, "SINGLE_SPLIT": splits == 1}
    yield "project_hopper", grid, (*tensors, *sizes, *numbers), constants


def check_calls(launches, case):
    """Run calls with several seeds and tensors, of which only the first uses the lookup; print the launch kinds."""
    import torch
    from helpers.choices import forget_choices
    from helpers.kernels import LAYOUTS, adjoint, project

    from sjlt import Sketch
    from sjlt.backends.triton import exact, launcher
    from sjlt.kernels.config.codes import Codes

    n, d, k, nnz, offset, dtypes, layouts, way = case
    add, back = way == "add", way == "adjoint"
    forget_choices()
    launcher._compiled.clear()

    def new(width, which):
        dtype = getattr(torch, dtypes[which])
        return LAYOUTS[layouts[which]](n, width, lambda *shape: torch.empty(shape, dtype=dtype))

    for call, seed in enumerate((0, 5, 2**64 - 1)):
        spec = Sketch(offset + d, k, nnz=nnz, seed=seed)[:, offset:].spec
        x, y = new(d, 0), new(k, 1)
        chosen = exact.make_plan(exact.describe(spec, x, y, add, back)).chosen
        for noted in (launches.searched, launches.started, launches.allocated):
            noted.clear()
        data, out = (y, x) if back else (x, y)
        (adjoint if back else project)(Sketch(offset + d, k, nnz=nnz, seed=seed)[:, offset:], data, out, add)
        memory = launches.allocated[-1] if launches.allocated else None
        codes = isinstance(chosen, Codes)
        shared = codes and chosen.sharers > 1
        passes = 2 if call == 0 else 1  # the first call also runs in order to find what to compile
        assert len(launches.allocated) == passes * (codes or chosen.splits > 1), "one allocation at most"
        expect = expected_codes if codes else expected_exact
        expected = list(expect(chosen, spec, data, out, add if codes else back, memory))
        check(launches, expected, call)
        if chosen.splits > 1:
            check_sum(launches, call, sums_in(memory, chosen.splits, out), out, nnz**-0.5, add)
        if shared:
            rest = out[first_shared(chosen, -(-k // 128), n) :]
            check_sum(launches, call, sums_in(memory, chosen.sharers, rest), rest, nnz**-0.5, add)
    kernel = getattr(chosen, "kernel", None)
    loader = LOADERS[kernel.loader] if kernel else "TMA"
    store, which = kernel.tma_store if kernel else True, "codes" if codes else "adjoint" if back else "project"
    parts = "splits" if chosen.splits > 1 else "shares" if shared else "one"
    staged = "staged" if kernel and kernel.result_line_bytes else "direct"
    print(loader, f"store={store}", which, parts, "adds" if add else "overwrites", staged)


def check(launches, expected, call):
    for place, (name, grid, arguments, constants) in enumerate(expected):
        plain = tuple(map(described, arguments))
        if call == 0:
            assert launches.searched[place] == (name, grid, plain, {**constants, "sanitize_overflow": False}), name
            continue
        found, found_grid, given = launches.started[place]
        assert (found, found_grid) == (name, grid)
        addresses = tuple(a.data_ptr() if hasattr(a, "data_ptr") else described(a) for a in arguments)
        assert given[: len(addresses)] == addresses, name
        values = [value for key, value in constants.items() if not key.startswith(("num_", "launch_", "extern_"))]
        assert sorted(map(str, given[len(addresses) :])) == sorted(map(str, values))
    assert not (launches.started if call == 0 else launches.searched)


def check_sum(launches, call, sums, out, scale, add):
    """Check that the last launch adds these partial sums."""
    name, _, arguments, *constants = (launches.started if call else launches.searched)[-1]
    pointers = (sums.data_ptr(), out.data_ptr())
    assert name == "reduce_partial_sums"
    assert arguments[:3] == (*(pointers if call else zip(pointers, (sums.dtype, out.dtype), strict=True)), len(sums))
    assert scale in arguments
    assert call or constants[0]["ACCUMULATE"] == add


SAME, BF16, WIDENED = ("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")
ROWS, COLUMNS = ("rows", "rows"), ("columns", "columns")
CASES = [  # (n, d, k, nnz, offset, dtypes and layouts of X and Y, direction)
    (200, 512, 64, 4, 0, SAME, ROWS, "write"),
    (200, 512, 64, 4, 1 << 40, SAME, ROWS, "write"),
    (200, 3000, 32, 8, 0, SAME, ROWS, "write"),
    (200, 3000, 32, 8, 0, SAME, ROWS, "add"),
    (200, 512, 99, 4, 0, SAME, ROWS, "write"),
    (200, 512, 384, 4, 32, SAME, COLUMNS, "write"),
    (200, 9000, 384, 4, 64, SAME, COLUMNS, "write"),
    (200, 9000, 777, 4, 0, SAME, ("rows", "columns"), "add"),
    (201, 333, 300, 4, 1000, SAME, ROWS, "write"),
    (201, 333, 300, 4, 1000, SAME, ROWS, "add"),
    (201, 9000, 301, 4, 0, SAME, ("every third row", "every second column"), "write"),
    (200, 9001, 64, 3, 0, BF16, ROWS, "write"),
    (200, 9001, 64, 3, 5, BF16, ROWS, "add"),
    (200, 61, 64, 3, 5, BF16, ROWS, "add"),
    (200, 333, 1000, 4, 0, BF16, ROWS, "write"),
    (2000, 160, 332, 1, 7, SAME, ("rows", "aligned part"), "write"),
    (200, 9001, 64, 3, 16, BF16, ROWS, "write"),
    (20_000, 333, 1001, 4, 0, BF16, ROWS, "write"),
    (200, 333, 300, 4, 0, BF16, ROWS, "add"),
    (200, 512, 64, 4, 0, BF16, ("every second column", "rows"), "write"),
    (200, 9000, 64, 4, 0, WIDENED, ROWS, "write"),
    (20_000, 1000, 64, 4, 0, SAME, ROWS, "write"),
    (20_000, 1000, 64, 4, 0, SAME, ROWS, "add"),
    (6000, 3000, 300, 4, 0, SAME, COLUMNS, "write"),
    (256, 768, 256, 4, 0, SAME, ROWS, "write"),
    (256, 768, 256, 4, 1 << 40, SAME, ROWS, "write"),
    (256, 768, 256, 4, 0, SAME, ("aligned part", "aligned part"), "write"),
    (256, 1 << 15, 256, 4, 0, SAME, ROWS, "write"),
    (256, 1 << 15, 256, 4, 0, SAME, COLUMNS, "write"),
    (256, 768, 256, 4, 0, SAME, COLUMNS, "write"),
    (256, 768, 256, 4, 0, SAME, ROWS, "adjoint"),
    (256, 768, 256, 4, 1 << 40, SAME, ("aligned part", "rows"), "adjoint"),
]


def main():
    from helpers.choices import NONE_GENERATED, changed_choices

    launches = Launches()
    launches.replace_kernels()
    names = ("hopper.MIN_ELEMENTS", "hopper.MIN_VECTORS", "hopper_codes.MIN_BYTES", "hopper_codes.MIN_VECTORS")
    sizes = dict.fromkeys(names, 1)
    sizes |= NONE_GENERATED | {"hopper_codes.MIN_BYTES_PER_CODE": 0}
    sizes |= {"hopper.MIN_UTILIZATION": {2: 0, 4: 0}, "hopper.MIN_PRODUCTS": 0}
    with changed_choices(sizes):
        for case in CASES:
            check_calls(launches, case)


if __name__ == "__main__":
    main()
