"""Dropout's kernels compile, without a GPU, for the architectures that they are meant for.

Run as a program, this file makes calls on tensors without data, compiles what the backend would have launched, and
prints what came of it. (In the tests' own process, kernels are interpreted.)
"""

import json
import os
import subprocess
import sys

import pytest
from test_kernels_compilation import TARGETS, Launches

TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "uint8": "u8", "int64": "i64"}

CALLS = [  # shape, dtype, layout, bits, what else is given
    *(((1 << 20,), dtype, "rows", bits, {}) for dtype in ("bfloat16", "float32", "uint8") for bits in (8, 16, 32)),
    ((1 << 20,), "float16", "rows", 16, {}),
    ((1 << 20,), "float64", "rows", 16, {}),
    ((999,), "bfloat16", "rows", 16, {"offset": 3}),
    ((999,), "float32", "rows", 32, {"steps": True}),
    ((4096, 1024), "bfloat16", "rows", 16, {"seeds": True}),
    ((4096, 1000), "float32", "rows", 8, {"seeds": True, "steps": True}),
    ((1024, 4096), "bfloat16", "columns", 16, {}),
    ((1024, 4096), "float32", "columns", 32, {}),
    ((1000, 333), "float16", "columns", 8, {"offset": 1}),
    ((64, 200), "float32", "part", 16, {"row_stride": 203}),
    ((3, 5, 7, 9, 4), "float64", "axes", 16, {}),
    ((1024, 4096), "bfloat16", "mixed", 16, {}),
    ((5000,), "float32", "every second", 16, {}),  # one row, which Triton makes a constant of
]


def source_of(kernel, arguments):
    """What Triton's launcher would compile for these arguments: types, constants, divisibility by 16."""
    from triton.compiler import ASTSource

    signature, constants, hints = {}, {}, {}
    for place, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or (type(value) is int and value == 1 and special):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if hasattr(value, "dtype"):
            signature[parameter.name], divisible = "*" + TYPES[str(value.dtype)[6:]], True
        else:
            annotated = parameter.annotation_type
            signature[parameter.name] = annotated or ("i32" if abs(value) < 2**31 else "i64")
            divisible = value % 16 == 0
        if divisible and special:
            hints[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constexprs=constants, attrs=hints)


def make_calls(backend):
    import torch

    from sjlt.dropout_law import Rule

    def new(shape, dtype, layout):
        dtype = getattr(torch, dtype)
        if layout == "columns":
            return torch.empty(shape[::-1], dtype=dtype, device="meta").t()
        if layout == "part":
            return torch.empty((shape[0], shape[1] + 3), dtype=dtype, device="meta")[:, 3:]
        if layout == "every second":
            return torch.empty((*shape, 2), dtype=dtype, device="meta")[..., 0]
        if layout == "axes":
            return torch.empty(shape[::-1], dtype=dtype, device="meta").permute(1, 3, 0, 2, 4)[:, ::2]
        return torch.empty(shape, dtype=dtype, device="meta")

    for shape, dtype, layout, bits, given in CALLS:
        given = dict(given)
        for name, size in (("seeds", shape[:1]), ("steps", ())):
            if given.get(name):
                given[name] = torch.empty(size, dtype=torch.int64, device="meta")
        rule = Rule(bits, 77, 1.5, **given)
        if dtype == "uint8":
            backend.mask(rule, torch.empty(shape, dtype=torch.bool, device="meta"))
            continue
        x = new(shape, dtype, "columns" if layout == "mixed" else layout)
        out = torch.empty(x.shape, dtype=x.dtype, device="meta") if layout == "mixed" else torch.empty_like(x)
        backend.drop(rule, x, out)
        if layout != "rows" or bits == 16:
            backend.drop_add(rule, x, new(x.shape, "float32", "rows"), out)
            backend.drop_stored(1.5, x, torch.empty(x.shape, dtype=torch.bool, device="meta"), out)


def compile_all(target):
    import triton
    from triton.backends.compiler import GPUTarget

    from sjlt.backends import triton_dropout as backend

    launches = {}
    for name, value in list(vars(backend).items()):
        if isinstance(value, triton.JITFunction):
            launches[name] = Launches(value)
            setattr(backend, name, launches[name])
    make_calls(backend)
    print(json.dumps(list(launches)))
    done = set()
    for name, made in launches.items():
        for arguments, options in made:
            source = source_of(made.kernel, arguments)
            key = (name, source.hash(), str(options))
            if key in done:
                continue
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
    assert {each["kernel"] for each in compiled} == set(kernels), "a kernel that no call here takes"
    assert not [each for each in compiled if "error" in each]
    assert not [each for each in compiled if each["shared"] > TARGETS[target][-1]]


if __name__ == "__main__":
    compile_all(sys.argv[1])
