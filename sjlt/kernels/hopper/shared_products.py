"""Products that several programs of `project_codes_hopper` share, so that few programs are idle in the last round.

Programs compute products in rounds. If the last of several rounds has few products, each of these is shared: several
programs sum parts (shares) of its blocks, and another kernel adds their sums. Shared products are those of the last
vectors, for all tiles.
"""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .common import STEP_COLUMNS


@gluon.jit
def share_of(task, unshared, sharers, SHARES_PRODUCTS: gl.constexpr):
    """(product, share, number of shares) of a program's task. Products from `unshared` on have `sharers` shares each.

    SHARES_PRODUCTS : whether there are such products.
    """
    product, share, shares = task, task * 0, task * 0 + 1
    if SHARES_PRODUCTS:
        beyond = gl.maximum(task - unshared, 0)
        product = gl.where(task < unshared, task, unshared + beyond // sharers)
        share = gl.where(task < unshared, 0, beyond % sharers)
        shares = gl.where(task < unshared, 1, sharers)
    return product, share, shares


@gluon.jit
def blocks_of_share(count, share, shares, CHOSEN: gl.constexpr, SHARES_PRODUCTS: gl.constexpr):
    """(begin, end) of a share of a list of `count` blocks. Every share but the last consists of whole steps."""
    BLOCKS: gl.constexpr = STEP_COLUMNS >> CHOSEN.log_block
    begin, end = count * 0, count
    if SHARES_PRODUCTS:
        steps = (count + BLOCKS - 1) // BLOCKS
        begin = share * steps // shares * BLOCKS
        end = gl.minimum((share + 1) * steps // shares * BLOCKS, count)
    return begin, end
