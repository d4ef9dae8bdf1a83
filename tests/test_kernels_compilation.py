"""The kernels compile, without a GPU, for the architectures that they are meant for, and fit their shared memory.

Run as a program, this file makes products of tensors without data, compiles what the backend would have launched, and
prints what came of it. (In the tests' own process, kernels are interpreted.)
"""

import json
import os
import subprocess
import sys

import pytest

TARGETS = {  # a target's name: Triton's description of it, and the bytes of shared memory that a block can have
    "sm_80": ("cuda", 80, 32, 163 << 10),
    "sm_90": ("cuda", 90, 32, 227 << 10),
    "gfx942": ("hip", "gfx942", 64, 64 << 10),
}

# (n, d, k, nnz, dtype, layout): tall, square, wide and narrow data; whole and broken tiles; one and many vectors.
PRODUCTS = [
    (65_536, 768, 256, 4, "float32", "rows"),
    (65_536, 4096, 512, 4, "bfloat16", "rows"),
    (512, 262_144, 1024, 4, "float32", "columns"),
    (2000, 301, 300, 5, "float32", "rows"),
    (2000, 4096, 128, 1, "float32", "rows"),
    (2000, 4096, 128, 1, "bfloat16", "rows"),
    (100, 128, 64, 64, "float16", "columns"),
    (70, 500, 1000, 3, "float64", "rows"),
    (8, 1 << 27, 4096, 4, "float32", "rows"),
    (1, 1 << 28, 4096, 1, "float32", "rows"),
    (8, 1 << 24, 4096, 4, "float32", "columns"),
]


class Launches(list):
    """Stands for a kernel, and keeps what it is launched with."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.__name__, self.arg_names = kernel.__name__, kernel.arg_names

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.append((arguments, options))


def source_of(kernel, arguments, options):
    """What Triton's launcher would compile for these arguments: types, constants, divisibility by 16."""
    from triton.compiler import ASTSource

    options = dict(options)
    values = dict(zip(kernel.arg_names, arguments, strict=False))
    values |= {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
    types = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
    signature, constants, hints = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or (type(value) is int and value == 1 and special):
            signature[name], constants[name] = "constexpr", value
            continue
        if hasattr(value, "dtype"):
            signature[name], divisible = "*" + types[str(value.dtype)[6:]], True
        else:
            annotated = parameter.annotation_type
            signature[name] = annotated or ("i32" if abs(value) < 2**31 else "i64")
            divisible = value % 16 == 0
        if divisible and special:
            hints[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constexprs=constants, attrs=hints), options


def compile_all(target):
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    from sjlt import Sketch
    from sjlt.backends import triton as backend

    backend._resources = lambda device: (132, TARGETS[target][-1])
    backend.NVIDIA = not target.startswith("gfx")
    launches = {}
    for name, value in list(vars(backend).items()):
        if isinstance(value, triton.JITFunction):
            launches[name] = Launches(value)
            setattr(backend, name, launches[name])

    def empty(rows, columns, dtype, layout):
        new = torch.empty((rows, columns) if layout == "rows" else (columns, rows), dtype=dtype, device="meta")
        return new if layout == "rows" else new.t()

    for n, d, k, nnz, dtype, layout in PRODUCTS:
        S = Sketch(d, k, nnz=nnz)
        dtype = getattr(torch, dtype)
        x, y = empty(n, d, dtype, layout), empty(n, k, dtype, layout)
        for precision in ("highest", "high") if (n, dtype) == (2000, torch.float32) else ("highest",):
            torch.set_float32_matmul_precision(precision)
            backend.project(S, x, y, False)
            backend.adjoint(S, y, x, False)

    print(json.dumps(list(launches)))
    done = set()
    for name, made in launches.items():
        for arguments, options in made:
            source, options = source_of(made.kernel, arguments, options)
            key = (name, source.hash(), str(options))
            if key not in done:
                done.add(key)
                found = {
                    "kernel": name,
                    "constants": {made.kernel.arg_names[i]: str(v) for (i,), v in source.constants.items()},
                }
                try:
                    compiled = triton.compile(source, target=GPUTarget(*TARGETS[target][:3]), options=options)
                    found["shared"] = compiled.metadata.shared
                except Exception as error:
                    found["error"] = repr(error)
                print(json.dumps(found), flush=True)


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, __file__, target], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-8000:]
    kernels, *compiled = map(json.loads, result.stdout.splitlines())
    assert kernels
    assert {each["kernel"] for each in compiled} == set(kernels), "a kernel that no product here takes"
    assert not [each for each in compiled if "error" in each]
    assert not [each for each in compiled if each["shared"] > TARGETS[target][-1]]


if __name__ == "__main__":
    compile_all(sys.argv[1])
