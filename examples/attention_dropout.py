"""Attention in Triton, forward and backward, whose dropout mask is regenerated tile by tile and never stored.

    O = dropout(softmax(Q K' / sqrt(D))) V        for each of B * H heads, Q, K, V of shape (T, D)

The mask is that of the (B * H, T, T) tensor of probabilities, which is never stored either. Element (head, row, column)
has the index ``(head T + row) T' + column``, where T' is T rounded up to whole calls of Philox. Forward and backward
process the probabilities in different orders and tiles, but with the same mask,
``sjlt.dropout_mask((B * H, T, T), p, seed, step=step, row_stride=T', bits=bits)``.

One call of Philox determines the mask of 128 / bits consecutive columns: 16 with 8-bit lanes (as in FlashAttention's
dropout), 8 with 16-bit lanes. `keep_tile` makes the calls for a tile and distributes their words over its columns; copy
it into your own kernel. (`sjlt.kernels.philox.dropout_keep_lanes` gives the same mask in one line, but moves lanes
instead of words between threads: the forward pass takes 1.03 to 1.3 times as long on an H200.)

Tiles and online softmax: Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning", ICLR
2024.

    python examples/attention_dropout.py       (without a GPU: Triton's interpreter, on small tensors)
"""

from __future__ import annotations

import math
import os
from functools import partial

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import triton
import triton.language as tl

import sjlt
from sjlt.kernels.philox import dropout_words
from sjlt.laws.dropout import scale as scale_of
from sjlt.laws.dropout import threshold as threshold_of

LN_2 = tl.constexpr(math.log(2))


# ------------------------------------------------------------------------------------- kernels


@triton.jit
def keep_tile(seed, step, rows, col, row_stride, threshold, BITS: tl.constexpr, N: tl.constexpr):
    """The keep mask (M, N) of a tile: `rows` (M,) int64, and columns col, col + 1, ..., col + N - 1.

    col, N and row_stride are multiples of 128 / BITS, the number of columns per call; 0 < threshold < 2^BITS.
    """
    M: tl.constexpr = rows.shape[0]
    CALLS: tl.constexpr = N * BITS // 128
    IN_WORD: tl.constexpr = 32 // BITS
    calls = (rows * row_stride + col)[:, None] // (4 * IN_WORD) + tl.arange(0, CALLS)[None, :]
    w0, w1, w2, w3 = dropout_words(seed, calls, step)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(M, 4 * CALLS)  # in the order of their columns
    # Each word goes to the threads that hold its columns, where a shift moves the column's lane to the top bits. The
    # bits below the lane do not matter, because those of the threshold are zero.
    words = tl.broadcast_to(words[:, :, None], (M, 4 * CALLS, IN_WORD)).reshape(M, N)
    lane = (tl.arange(0, N) % IN_WORD).to(tl.uint32)[None, :]
    return (words << (32 - BITS - lane * BITS)) >= (threshold.to(tl.uint32) << (32 - BITS))


@triton.jit
def load_rows(x, head, rows, T, D: tl.constexpr):
    """Rows of a head of x (B * H, T, D), zero beyond T."""
    offsets = (head * T + rows)[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(x + offsets, mask=rows[:, None] < T, other=0.0)


@triton.jit
def store_rows(x, value, head, rows, T, D: tl.constexpr):
    offsets = (head * T + rows)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(x + offsets, value.to(x.dtype.element_ty), mask=rows[:, None] < T)


@triton.jit
def logits(q, k, cols, T, scale):
    """Q K' times `scale`, as exponents of 2 instead of e; -inf beyond T."""
    s = tl.dot(q, k.T, input_precision="ieee") * scale
    return tl.where(cols[None, :] < T, s, -float("inf"))


@triton.jit(do_not_specialize=["seed", "step", "threshold"])
def attention_forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, T, scale, seed: tl.int64, step: tl.int64, threshold, kept_scale, row_stride,
    BITS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M rows of O, and the base-2 logarithms of their softmax denominators. BITS = 0: no dropout."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    q = load_rows(q_ptr, head, rows, T, D)
    top = tl.full((M,), -float("inf"), tl.float32)  # the largest logit of each row so far
    total = tl.zeros((M,), tl.float32)
    o = tl.zeros((M, D), tl.float32)
    for col in range(0, T, N):
        cols = col + tl.arange(0, N)
        s = logits(q, load_rows(k_ptr, head, cols, T, D), cols, T, scale)
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)  # over all columns, kept or not
        keep = tl.full((1, 1), True, tl.int1)
        if BITS:
            keep = keep_tile(seed, step, head * T + rows, col, row_stride, threshold, BITS, N)
            p = tl.where(keep, p, 0.0)
        v = load_rows(v_ptr, head, cols, T, D)
        o = tl.dot(p.to(v.dtype), v, o * shrink[:, None], input_precision="ieee")
        top = new_top
    store_rows(o_ptr, o * (kept_scale / total)[:, None], head, rows, T, D)
    tl.store(lse_ptr + head * T + rows, top + tl.log2(total), mask=rows < T)


@triton.jit
def gradients(q, k, v, do, lse, delta, keep, cols, T, scale, kept_scale):
    """An (M, N) tile of the probabilities after dropout, unscaled, and one of the gradient of the logits."""
    p = tl.exp2(logits(q, k, cols, T, scale) - lse[:, None])
    dp = tl.dot(do, v.T, input_precision="ieee")
    ds = p * (tl.where(keep, dp * kept_scale, 0.0) - delta[:, None])
    return tl.where(keep, p, 0.0).to(q.dtype), ds.to(q.dtype)


@triton.jit(do_not_specialize=["seed", "step", "threshold"])
def attention_backward_q(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    T, scale, seed: tl.int64, step: tl.int64, threshold, kept_scale, row_stride,
    BITS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M rows of the gradient of Q, processing the probabilities along rows, like the forward pass."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    q, do = load_rows(q_ptr, head, rows, T, D), load_rows(do_ptr, head, rows, T, D)
    lse = tl.load(lse_ptr + head * T + rows, mask=rows < T, other=0.0)
    delta = tl.load(delta_ptr + head * T + rows, mask=rows < T, other=0.0)
    dq = tl.zeros((M, D), tl.float32)
    for col in range(0, T, N):
        cols = col + tl.arange(0, N)
        k, v = load_rows(k_ptr, head, cols, T, D), load_rows(v_ptr, head, cols, T, D)
        keep = tl.full((1, 1), True, tl.int1)
        if BITS:
            keep = keep_tile(seed, step, head * T + rows, col, row_stride, threshold, BITS, N)
        _, ds = gradients(q, k, v, do, lse, delta, keep, cols, T, scale, kept_scale)
        dq = tl.dot(ds, k, dq, input_precision="ieee")
    store_rows(dq_ptr, dq * (scale * LN_2), head, rows, T, D)


@triton.jit(do_not_specialize=["seed", "step", "threshold"])
def attention_backward_kv(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    T, scale, seed: tl.int64, step: tl.int64, threshold, kept_scale, row_stride,
    BITS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N rows of the gradients of K and V, processing the probabilities along columns."""
    head = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * N
    cols = col + tl.arange(0, N)
    k, v = load_rows(k_ptr, head, cols, T, D), load_rows(v_ptr, head, cols, T, D)
    dk = tl.zeros((N, D), tl.float32)
    dv = tl.zeros((N, D), tl.float32)
    for row in range(0, T, M):
        rows = row + tl.arange(0, M)
        q, do = load_rows(q_ptr, head, rows, T, D), load_rows(do_ptr, head, rows, T, D)
        lse = tl.load(lse_ptr + head * T + rows, mask=rows < T, other=float("inf"))  # no probability beyond T
        delta = tl.load(delta_ptr + head * T + rows, mask=rows < T, other=0.0)
        keep = tl.full((1, 1), True, tl.int1)
        if BITS:
            keep = keep_tile(seed, step, head * T + rows, col, row_stride, threshold, BITS, N)
        p, ds = gradients(q, k, v, do, lse, delta, keep, cols, T, scale, kept_scale)
        dv = tl.dot(p.T, do, dv, input_precision="ieee")
        dk = tl.dot(ds.T, q, dk, input_precision="ieee")
    store_rows(dk_ptr, dk * (scale * LN_2), head, cols, T, D)
    store_rows(dv_ptr, dv * kept_scale, head, cols, T, D)


# ---------------------------------------------------------------------------------- autograd


class Attention(torch.autograd.Function):
    """Saves Q, K, V, O and one number per row, but no tensor with the shape of the mask."""

    @staticmethod
    def forward(ctx, q, k, v, p, seed, step, bits, tile):
        B, H, T, D = q.shape
        q, k, v = (x.contiguous() for x in (q, k, v))
        o = torch.empty_like(q)
        lse = torch.empty((B, H, T), dtype=torch.float32, device=q.device)
        t = threshold_of(p, bits)
        if p and not 0 < t < 1 << bits:
            raise ValueError(f"p = {p} cannot be realised with {bits}-bit lanes")
        seed = (seed + 2**63) % 2**64 - 2**63  # the same 64 bits as a signed integer
        scalars = (T, D**-0.5 / math.log(2), seed, step, t, scale_of(t, bits), row_stride(T, bits))
        constants = {"BITS": bits if t else 0, "D": D, "M": tile[0], "N": tile[1]}
        constants["num_stages"] = 3 if D <= 64 else 2  # H200, tiles of 64 x 64: 1.3 to 1.5 times as fast at D = 128
        attention_forward[(triton.cdiv(T, tile[0]), B * H)](q, k, v, o, lse, *scalars, **constants)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.launch = scalars, constants
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        scalars, constants = ctx.launch
        B, H, T, _ = q.shape
        do = do.contiguous()
        delta = (o.float() * do.float()).sum(-1)  # sum_j P_ij dP_ij, with or without dropout
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        tensors = q, k, v, do, lse, delta
        attention_backward_q[(triton.cdiv(T, constants["M"]), B * H)](*tensors, dq, *scalars, **constants)
        attention_backward_kv[(triton.cdiv(T, constants["N"]), B * H)](*tensors, dk, dv, *scalars, **constants)
        return dq, dk, dv, None, None, None, None, None


def row_stride(T: int, bits: int) -> int:
    """T rounded up to whole calls of Philox, so that every row of the probabilities starts with a new call."""
    return triton.cdiv(T, 128 // bits) * (128 // bits)


def attention(q, k, v, p=0.0, seed=0, *, step=0, bits=8, tile=(64, 64)):
    """dropout(softmax(Q K' / sqrt(D))) V.

    q, k, v : (B, H, T, D) tensors of one floating dtype, D a power of two from 16.
    p, seed, step, bits : as in `sjlt.dropout`, for the (B * H, T, T) probabilities; 0 <= p < 1, bits 8 or 16.
    tile : rows and columns of the tiles of probabilities; powers of two from 16. The mask does not depend on it.
    """
    return Attention.apply(q, k, v, p, seed, step, bits, tile)


# ------------------------------------------------------------------------------------- verification


def reference(q, k, v, p, seed, *, step=0, bits=8):
    """The same in fp64 with torch and the mask of `sjlt.dropout_mask`."""
    B, H, T, D = q.shape
    keep = sjlt.dropout_mask(
        (B * H, T, T), p, seed, step=step, row_stride=row_stride(T, bits), bits=bits, device=q.device
    )
    probabilities = (q.double() @ k.double().mT * D**-0.5).softmax(-1)
    return sjlt.masked_dropout(probabilities, keep.view(B, H, T, T), p, bits=bits) @ v.double()


def with_gradients(function, q, k, v, do, *args, **kwargs):
    """The result, and the gradients of Q, K and V given the output gradient `do`."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    o = function(*inputs, *args, **kwargs)
    return [o.detach(), *torch.autograd.grad(o, inputs, do.to(o.dtype))]


def worst_error(shape, dtype, p, seed, device, tile, **options):
    """The largest norm-wise relative error of the result and the gradients, for random Q, K, V of `shape`."""
    q, k, v, do = torch.randn((4, *shape), device=device).to(dtype)
    actual = with_gradients(attention, q, k, v, do, p, seed, tile=tile, **options)
    expected = with_gradients(reference, q.double(), k.double(), v.double(), do, p, seed, **options)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(actual, expected, strict=True))


def show_times(shape, dtype):
    """Print the times of forward and backward, and their ratios to the same kernels without dropout."""
    q, k, v, do = torch.randn((4, *shape), device="cuda").to(dtype)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    print(f"B, H, T, D = {shape}, {dtype}: ms for forward and backward (ratio to no dropout)")
    for name, p, bits in (("no dropout", 0.0, 8), ("8-bit lanes", 0.1, 8), ("16-bit lanes", 0.1, 16)):
        o = attention(*inputs, p, 1, bits=bits)
        times = (
            triton.testing.do_bench(partial(attention, *inputs, p, 1, bits=bits)),
            triton.testing.do_bench(partial(torch.autograd.grad, o, inputs, do, retain_graph=True)),
        )
        if p == 0:
            base = times
        ratios = " ".join(f"{t:8.2f} ({t / b:4.2f})" for t, b in zip(times, base, strict=True))
        print(f"  {name:12}  {ratios}")


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, dtype = ((2, 3, 1000, 64), torch.bfloat16) if device == "cuda" else ((1, 2, 40, 16), torch.float32)
    print(f"relative error of the result and gradients: B, H, T, D = {shape}, {dtype}, p = 0.1")
    for bits in (8, 16):
        for tile in ((16, 16), (32, 64), (64, 32)):
            error = worst_error(shape, dtype, 0.1, 123, device, tile, bits=bits)
            print(f"  {bits:2}-bit lanes, tile {tile}: {error:.1e}")
    if device == "cuda":
        show_times((4, 16, 4096, 64), dtype)
        show_times((4, 8, 4096, 128), dtype)


if __name__ == "__main__":
    main()
