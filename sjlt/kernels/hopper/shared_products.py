"""Products that several programs of `project_codes_hopper` share, so that no program is idle in the last round.

Programs take products in rounds. In the last, there may be fewer products than programs: each product is then shared by
several programs, which sum shares of its blocks. Their sums are partial sums of the last vectors.
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..config import hopper

STEP = gl.constexpr(hopper.STEP_COLUMNS)


@gluon.jit
def share_of(task, whole, sharers, SHARED: gl.constexpr):
    """(product, its share, number of shares) of a program's task. Products from `whole` on have `sharers` shares.

    SHARED : whether there are such products.
    """
    product, share, shares = task, task * 0, task * 0 + 1
    if SHARED:
        beyond = gl.maximum(task - whole, 0)
        product = gl.where(task < whole, task, whole + beyond // sharers)
        share = gl.where(task < whole, 0, beyond % sharers)
        shares = gl.where(task < whole, 1, sharers)
    return product, share, shares


@gluon.jit
def blocks_of_share(count, share, shares, CHOSEN: gl.constexpr, SHARED: gl.constexpr):
    """(first, end) of the blocks of a share, of a list of `count` blocks. All shares but the last have whole steps."""
    BLOCKS: gl.constexpr = STEP >> CHOSEN.log_block
    begin, end = count * 0, count
    if SHARED:
        steps = (count + BLOCKS - 1) // BLOCKS
        begin = share * steps // shares * BLOCKS
        end = gl.minimum((share + 1) * steps // shares * BLOCKS, count)
    return begin, end
