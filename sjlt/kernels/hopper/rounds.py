"""The rounds of kernels that read codes: products that all programs compute at the same time."""

# (No `from __future__ import annotations`: Gluon would not see the annotations of kernel arguments.)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

EVERY = gl.constexpr(4)  # rounds
MAX_POLLS = gl.constexpr(1 << 8)  # of a counter, about 200 microseconds


@gluon.jit
def parts_of(product, splits, n_tiles):
    """(tile, split, block of vectors) of a product.

    Unless the number of tiles is a power of two, tiles have different numbers of chunks. If all products of a program
    had the same tile, as they would where n_tiles divides the number of programs, programs would end at very different
    times: in every round of products, a program therefore has the tile after its previous one.
    """
    programs = gl.num_programs(0)
    rest = product // n_tiles
    rounds = gl.where((n_tiles & (n_tiles - 1)) == 0, 0, rest * n_tiles // programs)
    return (product - rounds * (programs - 1)) % n_tiles, rest % splits, rest // splits


@gluon.jit
def begin_round(started, task, tasks, polls):
    """In every fourth round, wait until all programs have begun it: the number of polls for the next round.

    Neighbouring tiles share sectors of the result's lines, as do neighbouring blocks of contiguous vectors. If the two
    programs that write a sector do so at different times, it may leave the L2 cache in between, and memory is read to
    complete it.

    started : a counter, initially zero, of how often a program has begun such a round.  polls : MAX_POLLS. If this many
    do not suffice, not all programs run at the same time, and this one waits no more.
    """
    programs = gl.num_programs(0)
    done = task // programs
    left = polls
    if (done % EVERY == 0) & ((done + 1) * programs <= tasks):  # all programs have a product in this round
        gl.atomic_add(started, 1, sem="relaxed")
        all_started = (done // EVERY + 1) * programs
        while (gl.load(started, volatile=True) < all_started) & (left > 0):
            left -= 1
    return gl.where(left > 0, polls, 0)
