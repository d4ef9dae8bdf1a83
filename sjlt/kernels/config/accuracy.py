"""How accurate a launch is for every input: bounds on the error of each component, derived from how its sums run.

With u = 2^-24 (2^-53 for fp64 data) and M the largest |x_j| of the data vector,

    |result_r - exact_r| <= c u sum over j of |S_rj| max(|x_j|, floor M),

to first order in u, underflow and overflow aside, plus one rounding to a result of 16 bits and one where the result is
accumulated. `error_bound` computes c and the floor for a launch; both follow from its description alone. c adds up:

**Ordinary cores** round to nearest. A sum in which each term passes through at most N additions is off by at most N u
times the sum of its magnitudes (Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2).

**Tensor cores** multiply 16-bit numbers exactly. An instruction adds its products and the sum so far: it aligns all
to the largest and truncates (Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ
Computer Science, 2021). With no bits to spare, q nonzero products beside the sum cost q times 2^-23 = 2 u of the
largest, and the truncation of the result as much again: 2 (q + 1) u of the magnitudes. A sum of P nonzero products in
I instructions that meet any is therefore off by at most 2 (P + I) u. Under the exact law a row has at most one
nonzero in a chunk, so that I <= P, and the sum is off by at most 4 P u. (Measured on an H200: 0.7 u for each chunk,
of two products. AMD's matrix cores round to nearest.)

**Splitting fp32 data.** Three bf16 numbers are exact. A pair of fp16 numbers x s = high + low, where s is a power of
two, is off by at most 2^-22 |x s| = 4 u |x s|, or by half of the smallest fp16 number, 2^-25, if that is more. Where
the largest |x| s seen so far is at least 2^14, the latter is 2^-39 M = 4 u 2^-17 M: the floor is 2^-17. Where s comes
from a sample, which is scaled to 2^6 only, it is 2^-9; a pair that overflows is replaced by three bf16 numbers.
"high" is off by 2^-16 |x| (two bf16 numbers), "medium" by 2^-9 |x| (one).

**The end.** Partial sums are added eight at a time, and the sums of eight with compensation, whose error is one
rounding and a second-order term that is less (for fewer than 4096 of them). Where such sums run side by side, these
are added one by one. The scale is rounded twice and multiplied: 3.

**Range.** Sums are scaled at the end. None overflows while the sum of |x_j| over the entries of a component is below
a quarter of the largest number of the sums' dtype, 2^126 for fp32.
"""

from __future__ import annotations

from typing import NamedTuple

from .arithmetic import BF16, BF16_PAIR, BF16_TRIPLE, CHUNKS_PER_SUM, FP16_PAIR, FP64, NATIVE
from .exact import BATCHES_PER_SUM, FewVectors, RowGather, TensorCore
from .hopper import STEP_COLUMNS, Hopper
from .hopper_codes import HopperCodes
from .iid import Iid, IidHopper
from .one_tile import OneTile
from .product import GROUPS_PER_STEP, SPLITS_PER_SUM, Product, reduce_lanes
from .scattered_sums import ScatteredSums
from .staged_gather import StagedGather

OnTheFly = TensorCore | RowGather | FewVectors | Hopper
Launch = OnTheFly | OneTile | HopperCodes | StagedGather | ScatteredSums | Iid | IidHopper

# Numbers that a number of the data is multiplied as. A pair of fp16 numbers may have to be repeated in three of bf16.
PARTS = {NATIVE: 1, BF16: 1, BF16_PAIR: 2, BF16_TRIPLE: 3, FP16_PAIR: 3}
SPLIT_ERRORS = {BF16: 1 << 15, BF16_PAIR: 1 << 8, FP16_PAIR: 4}  # of the splitting, in u
RUNNING_FLOOR, SAMPLED_FLOOR = 2.0**-17, 2.0**-9  # of pairs of fp16 numbers
MIN_INSTRUCTION_TERMS = 8  # terms of a dense sum that a tensor core adds in one step, at least
SCALE_ERROR = 3


class ErrorBound(NamedTuple):
    """The numbers c and floor of a launch.

    Attributes
    ----------
    c : int
        In units of u.
    floor : float
        The magnitude that each number of a data vector counts as at least, relative to the largest; 0 unless fp32 data
        is multiplied in pairs of fp16 numbers.
    """

    c: int
    floor: float


def error_bound(product: Product, launch: Launch) -> ErrorBound:
    """The bound for a launch that `exact.choose` or `iid.choose` made for this product.

    With stacks, the product is that of one stack; an adjoint adds the stacks, at one rounding each.
    """
    if isinstance(launch, Iid | IidHopper):
        bound = _iid(product, launch)
    elif product.adjoint:
        return _adjoint(product, launch)  # whose splits share out the columns
    elif isinstance(launch, Hopper | HopperCodes):
        bound = _hopper(product, launch)
    else:
        bound = _portable(launch)
    lanes = reduce_lanes(launch.splits, product.n * product.out_dim)
    together = min(-(-launch.splits // lanes), SPLITS_PER_SUM)
    reduced = together - 1 + (2 if launch.splits > together * lanes else 0) + lanes - 1
    return ErrorBound(bound.c + reduced + SCALE_ERROR, bound.floor)


def _portable(launch: Launch) -> ErrorBound:
    """Projections of the exact law: the sums of one split."""
    if isinstance(launch, TensorCore | OneTile):
        if isinstance(launch, OneTile):
            groups, longest = launch.chunks_per_split, launch.chunks_per_sum
        else:
            groups, longest = launch.groups_per_split, max(CHUNKS_PER_SUM, launch.chunks_per_dot)
        in_sum = min(groups, longest) if launch.chunked_sum else groups
        c = 4 * PARTS[launch.mode] * in_sum + _more(groups, in_sum) + SPLIT_ERRORS.get(launch.mode, 0)
        return ErrorBound(c, SAMPLED_FLOOR if launch.mode == FP16_PAIR else 0.0)
    if isinstance(launch, StagedGather):  # a row has at most one entry in a group
        return ErrorBound(launch.groups_per_split - 1, 0.0)
    if isinstance(launch, ScatteredSums):
        return ErrorBound(launch.terms - 1 + launch.kernel.parts, 0.0)
    if isinstance(launch, RowGather):
        groups = launch.groups_per_split
        in_sum = GROUPS_PER_STEP if launch.chunked_sum else groups
        return ErrorBound(in_sum - 1 + _more(groups, in_sum), 0.0)
    assert isinstance(launch, FewVectors)
    batches = min(BATCHES_PER_SUM, launch.batches_per_split)
    within = launch.layout.chunks_outer - 1 + launch.layout.chunks_inner - 1  # a step's chunks; the threads' sums
    return ErrorBound(within + batches * launch.segments - 1 + _more(launch.batches_per_split, batches), 0.0)


def _hopper(product: Product, launch: Hopper | HopperCodes) -> ErrorBound:
    """Projections of the exact law by Gluon kernels: the sums of one split."""
    chunk = 1 << product.geometry.log_chunk
    if isinstance(launch, Hopper):
        columns, blocks = launch.columns, launch.blocks_per_split
    else:
        columns = 1 << launch.kernel.log_block
        blocks = launch.groups_per_split * chunk // columns
    blocks_per_step = STEP_COLUMNS // columns
    if product.dtype != "float32":
        return ErrorBound(4 * (-(-blocks * columns // chunk)), 0.0)
    c = 4 * 2 * blocks_per_step + _more(blocks, blocks_per_step) + SPLIT_ERRORS[FP16_PAIR]
    return ErrorBound(c, RUNNING_FLOOR)


def _adjoint(product: Product, launch: Launch) -> ErrorBound:
    """Adjoints of the exact law: nnz terms."""
    if isinstance(launch, RowGather | FewVectors):
        return ErrorBound(product.nnz - 1 + SCALE_ERROR, 0.0)
    mode = launch.mode if isinstance(launch, TensorCore | OneTile) else FP16_PAIR
    pair = mode == FP16_PAIR
    c = 4 * (2 if pair else PARTS[mode]) * product.nnz + SPLIT_ERRORS.get(mode, 0) + SCALE_ERROR
    return ErrorBound(c, RUNNING_FLOOR if pair else 0.0)


def _iid(product: Product, launch: Iid | IidHopper) -> ErrorBound:
    """Independent entries: the sums of one split, all of whose terms may be nonzero."""
    if isinstance(launch, IidHopper):
        terms, in_sum, mode = product.reduce_dim, product.reduce_dim, NATIVE
    else:
        terms, mode = launch.terms_per_split, launch.mode
        in_sum = min(terms, launch.terms_per_sum)
    if mode == FP64:
        return ErrorBound(in_sum - 1 + _more(terms, in_sum), 0.0)
    steps = -(-in_sum // MIN_INSTRUCTION_TERMS)
    c = 2 * PARTS[mode] * (in_sum + steps) + _more(terms, in_sum) + SPLIT_ERRORS.get(mode, 0)
    return ErrorBound(c, SAMPLED_FLOOR if mode == FP16_PAIR else 0.0)


def _more(terms: int, in_sum: int) -> int:
    """The additions of sums of `in_sum` terms to a total of all."""
    return -(-terms // in_sum) - 1
