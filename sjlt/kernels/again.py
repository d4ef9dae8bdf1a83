"""What a kernel for Hopper could not hold as pairs of fp16 numbers, projected again."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import project_block


@triton.jit(do_not_specialize=["seed", "feature_offset", "groups_per_split"])
def project_flagged_tiles(
    x,
    out,
    flags,
    n,
    d,
    stride_xv,
    stride_xf,
    stride_os,
    stride_ov,
    stride_or,
    seed: tl.int64,
    feature_offset: tl.int64,
    groups_per_split,
    K: tl.constexpr,
    NNZ: tl.constexpr,
    N_TILES: tl.constexpr,
    LOG_GROUP: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
    KEYS: tl.constexpr,
    SIGNS: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGN: tl.constexpr,
    FOLD: tl.constexpr,
    MODE: tl.constexpr,
    SPAN: tl.constexpr,
    FINAL: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """What those programs of `project_tiles` do whose number in `flags` is not 0; each program here looks at SPAN.

    (To launch them all, so that each looks at its own, would take a tenth of the time of a projection.)
    """
    blocks = N_TILES * tl.cdiv(n, V)
    first = tl.program_id(0) * SPAN
    i = tl.arange(0, SPAN)
    flagged = tl.load(flags + first + i, mask=first + i < blocks, other=0)
    if tl.max(flagged, 0) != 0:
        for which in range(SPAN):
            if tl.max(tl.where(i == which, flagged, 0), 0) != 0:
                project_block(
                    first + which, tl.program_id(1).to(tl.int64),
                    x, out, flags, n, d, stride_xv, stride_xf, stride_os, stride_ov, stride_or, seed, feature_offset,
                    groups_per_split, K, NNZ, N_TILES, LOG_GROUP, LOG_CHUNK, WHOLE, KEYS, SIGNS, V, U, EVEN, ALIGN,
                    FOLD, MODE, FINAL, ACCUMULATE, INTERPRETED,
                )  # fmt: skip
