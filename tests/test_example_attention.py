"""examples/attention_dropout.py: its exact mask for all tile sizes, its result and gradients, and compilation.

Run as a program, this file compiles the kernels; in pytest's own process they are interpreted.
"""

import os
import subprocess
import sys

import pytest
import torch
from helpers.cases import each_value
from test_examples import load

import sjlt

SHAPE = (1, 2, 40, 64)  # T is a multiple of neither the tiles nor, with 8-bit lanes, a Philox call
TILES = [(16, 16), (32, 16), (16, 64)]
P, SEED, STEP = 0.25, 2**63 + 99, 5


@pytest.fixture(scope="module")
def example():
    return load("attention_dropout")


def masks(example, bits, tile, device):
    """The masks (B * H, T, T) that forward, dV and dQ applied, recovered from results on known inputs."""
    B, H, T, D = SHAPE
    unit = torch.eye(T, D, device=device).expand(B, H, T, D)
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(SHAPE, generator=generator).to(device) for _ in range(2))

    # V and dO of unit rows: O is the dropped-out probabilities, dV their transpose. (No probability is 0.)
    v = unit.contiguous().requires_grad_()
    o = example.attention(q, k, v, P, SEED, step=STEP, bits=bits, tile=tile)
    (dv,) = torch.autograd.grad(o, v, unit.contiguous())

    # dP = 1 throughout: the logits' gradient is positive for kept elements and negative for dropped ones. K of unit
    # rows exposes it.
    q.requires_grad_()
    ones = torch.ones(SHAPE, device=device)
    o_of_ones = example.attention(q, unit, ones / D, P, SEED, step=STEP, bits=bits, tile=tile)
    (dq,) = torch.autograd.grad(o_of_ones, q, ones)
    found = o[..., :T] != 0, dv[..., :T].mT != 0, dq[..., :T] > 0
    return [mask.reshape(B * H, T, T) for mask in found]


@each_value(bits=[8, 16], tile=TILES)
def test_mask(example, tile, bits, kernels_on):
    B, H, T, _ = SHAPE
    row_stride = 48 if bits == 8 else 40
    expected = sjlt.dropout_mask((B * H, T, T), P, SEED, step=STEP, bits=bits, row_stride=row_stride, device=kernels_on)
    assert not expected.all(-1).any()  # otherwise dQ would not reveal it
    for mask in masks(example, bits, tile, kernels_on):
        assert torch.equal(mask, expected)


def test_aligned_mask_needs_no_row_stride(example, kernels_on):
    v = torch.eye(32, device=kernels_on).view(1, 1, 32, 32)
    o = example.attention(v, v, v, P, SEED, tile=(16, 32))
    assert torch.equal(o[0] != 0, sjlt.dropout_mask((1, 32, 32), P, SEED, bits=8, device=kernels_on))


@pytest.mark.parametrize(("p", "bits"), [(0.0, 8), (0.5, 8), (0.1, 16)])
def test_result_and_gradients(example, p, bits, kernels_on):
    for tile in TILES[: 1 if kernels_on == "cpu" else None]:
        error = example.worst_error((1, 2, 40, 16), torch.float32, p, SEED, kernels_on, tile, bits=bits, step=STEP)
        assert error < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("D", "tile"), [(16, (16, 32)), (64, (128, 64)), (64, (32, 128)), (128, (64, 64))], ids=str)
def test_tensor_cores(example, D, tile, bits):
    for dtype, error in ((torch.bfloat16, 1.2e-2), (torch.float16, 2e-3)):  # operands with 8 and 11 bits of precision
        assert example.worst_error((2, 3, 203, D), dtype, 0.2, SEED, "cuda", tile, bits=bits) < error


@pytest.mark.gpu
def test_more_than_2_32_probabilities(example):
    B, H, T, D = 32, 33, 2048, 16
    assert B * H * T * T > 2**32
    q = torch.zeros(B, H, T, D, device="cuda", dtype=torch.float16)
    v = torch.zeros_like(q)
    v[:, :, 500 : 500 + D] = torch.eye(D, device="cuda")
    o = example.attention(q, q, v, 0.5, SEED, bits=8)
    first = (B * H - 1) * T * T
    expected = sjlt.dropout_mask((T, T), 0.5, SEED, bits=8, offset=first, device="cuda")
    assert torch.equal(o[-1, -1] != 0, expected[:, 500 : 500 + D])


@pytest.mark.parametrize(("p", "bits"), [(1.0, 16), (0.001, 8)])
def test_refusals(example, p, bits):
    x = torch.zeros(1, 1, 16, 16)
    with pytest.raises(ValueError, match=f"p = {p} cannot be realised with {bits}-bit lanes"):
        example.attention(x, x, x, p, bits=bits)


# ------------------------------------------------------------------------------------ compilation


def compile_all():
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    torch.cuda.is_available = lambda: True  # keep the example from selecting the interpreter
    example, target = load("attention_dropout"), GPUTarget("cuda", 90, 32)
    types = {"seed": "i64", "step": "i64"} | dict.fromkeys(("scale", "kept_scale"), "fp32")
    types |= dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32")
    for kernel in (example.attention_forward, example.attention_backward_q, example.attention_backward_kv):
        for bits in (0, 8, 16):
            constants = {"BITS": bits, "D": 64, "M": 64, "N": 64}
            signature = {
                name: "constexpr" if name in constants else types.get(name, "*bf16" if name.endswith("_ptr") else "i32")
                for name in kernel.arg_names
            }
            compiled = triton.compile(ASTSource(kernel, signature, constexprs=constants), target=target)
            assert compiled.metadata.shared <= 227 << 10
            print("compiled")


@pytest.mark.exhaustive
def test_kernels_compile():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-8000:]
    assert result.stdout.split() == ["compiled"] * 9


if __name__ == "__main__":
    compile_all()
