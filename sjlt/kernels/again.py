"""What overflowed in `project_hopper`, projected again."""

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
    """What those programs of `project_tiles` do whose flag is not 0. A program here stands for up to SPAN of them.

    (To launch them all, so that each looks at its own flag, would take a tenth of the time of a projection.) Where
    flags are neighbours, as large numbers often are, it is for different programs to look at them.
    """
    blocks = N_TILES * tl.cdiv(n, V)
    i = tl.arange(0, SPAN)
    block = i * tl.num_programs(0) + tl.program_id(0)
    flagged = tl.load(flags + block, mask=block < blocks, other=0)
    if tl.max(flagged, 0) != 0:
        for which in range(SPAN):
            if tl.max(tl.where(i == which, flagged, 0), 0) != 0:
                project_block(
                    which * tl.num_programs(0) + tl.program_id(0), tl.program_id(1).to(tl.int64),
                    x, out, flags, n, d, stride_xv, stride_xf, stride_os, stride_ov, stride_or, seed, feature_offset,
                    groups_per_split, K, NNZ, N_TILES, LOG_GROUP, LOG_CHUNK, WHOLE, KEYS, SIGNS, V, U, EVEN, ALIGN,
                    FOLD, MODE, FINAL, ACCUMULATE, INTERPRETED,
                )  # fmt: skip
