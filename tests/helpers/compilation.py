"""Compile kernels for their target architectures without a GPU.

In the tests' own process kernels are interpreted. A test file that compiles therefore runs itself as a program: it
makes calls on tensors without data, and `compile_launches` compiles what the backend would have launched.
"""

import json
import os
import subprocess
import sys

TARGETS = {  # target name: Triton's description of it, and the shared memory available to a block in bytes
    "sm_80": ("cuda", 80, 32, 163 << 10),
    "sm_86": ("cuda", 86, 32, 99 << 10),
    "sm_90": ("cuda", 90, 32, 227 << 10),
    "gfx942": ("hip", "gfx942", 64, 64 << 10),
}
TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
TYPES |= {"uint8": "u8", "uint16": "u16", "int32": "i32", "int64": "i64"}


class Compiled:
    """Stand-in for a compiled kernel."""

    run = None

    def __getitem__(self, grid):
        return lambda *arguments: None


def source_of(kernel, arguments, options):
    """The source (signature, constants and attributes) and options that Triton would compile for these arguments."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    values = dict(zip(kernel.arg_names, arguments, strict=False))
    values |= {name: value for name, value in options.items() if name in kernel.arg_names}
    options = {name: value for name, value in options.items() if name == "num_warps" or name not in kernel.arg_names}
    signature, constants, hints = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and special):
            signature[name], constants[name] = "constexpr", value
            continue
        if hasattr(value, "block_shape"):  # Gluon's tensor descriptor
            shape, kind = ", ".join(map(str, value.block_shape)), TYPES[str(value.base.dtype)[6:]]
            signature[name], divisible = f"tensordesc<{kind}[{shape}],{value.layout!r}>", False
        elif hasattr(value, "dtype"):
            signature[name], divisible = "*" + TYPES[str(value.dtype)[6:]], True
        else:
            annotated = parameter.annotation_type
            number = "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"
            signature[name] = annotated or number
            divisible = value % 16 == 0
        if divisible and special and not parameter.do_not_specialize_on_alignment:
            hints[(place,)] = [["tt.divisibility", 16]]
    rounded = [name for name, kind in signature.items() if kind == "fp32"]
    assert not rounded or "*fp64" not in signature.values(), f"{kernel.__name__} rounds {rounded} to fp32"
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return source(kernel, signature, constexprs=constants, attrs=hints), options


def compile_launches(target, make_calls):
    """Compile the kernels that ``make_calls(device)`` launches on devices of the target, and print the outcomes."""
    import triton
    from triton.backends.compiler import GPUTarget

    from sjlt.backends.triton import device, launcher, prepared
    from sjlt.kernels.config.product import Device

    launches = []

    def catch(kernel, grid):
        return lambda *arguments, **options: launches.append((kernel, arguments, options))

    def warm_up(kernel, *arguments, grid, **options):  # kernels that declare shared memory are compiled first
        launches.append((kernel, arguments, options))
        return Compiled()

    def on(hopper=False, asynchronous_copies=False):
        nvidia, shared = not target.startswith("gfx"), TARGETS[target][-1]
        described = Device(132, shared, hopper, target == "sm_90", nvidia, asynchronous_copies=asynchronous_copies)
        device.describe = lambda _: described
        prepared._prepared.clear()

    triton.JITFunction.__getitem__, triton.JITFunction.warmup = catch, warm_up
    launcher._with_shared_memory = lambda compiled, size: compiled
    launcher._start = lambda *_: None  # of a kernel that an earlier launch has compiled
    make_calls(on)
    done = set()
    for kernel, arguments, options in launches:
        name = kernel.__name__
        source, options = source_of(kernel, arguments, options)
        key = (name, source.hash(), str(options))
        if key in done:
            continue
        done.add(key)
        names = kernel.arg_names
        found = {"kernel": name, "constants": {names[i]: str(v) for (i,), v in source.constants.items()}}
        try:
            compiled = triton.compile(source, target=GPUTarget(*TARGETS[target][:3]), options=options)
            found["shared"] = compiled.metadata.shared + int(found["constants"].get("SHARED_BYTES", 0))
        except Exception as error:
            found["error"] = repr(error)
        print(json.dumps(found), flush=True)


def check_compiled(program, target, kernels, *arguments):
    """Check that the program, run for the target, launches all `kernels`, and that these compile and fit."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, program, target, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-8000:]
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    assert {each["kernel"] for each in compiled} == set(kernels), "a kernel that no call there launches"
    assert not [each for each in compiled if "error" in each]
    assert not [each for each in compiled if each["shared"] > TARGETS[target][-1]]
