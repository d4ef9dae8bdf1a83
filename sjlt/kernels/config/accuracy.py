"""The accuracy of a launch for every input: bounds on the error of each component, derived from the order of its sums.

With u = 2^-24 (2^-53 for fp64 data) and M the largest |x_j| of the data vector,

    |result_r - exact_r| <= c u sum over j of |S_rj| max(|x_j|, floor M),

to first order in u and without underflow or overflow, plus one rounding if the result has 16 bits and one if it is
accumulated. `error_bound` computes c and the floor from the description of a launch. c is the sum of these terms:

**Ordinary cores** round to nearest. A sum in which each term passes through at most N additions has an error of at most
N u times the sum of its magnitudes (Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2).

**Tensor cores** multiply 16-bit numbers exactly. An instruction adds its products and the sum so far: it aligns them to
the largest and truncates (Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer
Science, 2021). Without extra bits, aligning q nonzero products and the sum loses at most q times 2^-23 = 2 u of the
largest, and truncating the result 2 u more: in all, 2 (q + 1) u of the magnitudes. A sum of P nonzero products, over I
instructions that each have some of them, therefore has an error of at most 2 (P + I) u. Under the exact law a row has
at most one nonzero in a chunk, so that I <= P, and the error is at most 4 P u. (Measured on an H200: 0.7 u for each
chunk of two products. AMD's matrix cores round to nearest.) With codes of windows, the chunks of a row may begin within
a step, so that the sum of steps has one addition more. This is covered: the first instruction of a step adds to zero,
and loses 2 u less than assumed above.

Products by torch (`DenseMatrix`) are sums of this kind, in fp32 because torch's settings that permit less are cleared.
Zeros of S add no error. If cuBLAS splits a sum, each further part saves 2 u, as its first instruction adds to zero, and
costs one addition.

**Splitting fp32 data.** Three bf16 values are exact. A pair of fp16 values, x s = high + low for a power of two s, has
an error of at most 2^-22 |x s| = 4 u |x s|, or of half the smallest fp16 number, 2^-25, if that is greater. If the
largest |x| s so far is at least 2^14, the latter is 2^-39 M = 4 u 2^-17 M, so the floor is 2^-17. If s comes from a
sample, which is scaled to 2^6 only, the floor is 2^-9; a pair that overflows is replaced by three bf16 values. "high"
has an error of 2^-16 |x| (two bf16 values), "medium" of 2^-9 |x| (one).

**Reduction and scaling.** Partial sums are added in groups of eight, and the sums of the groups with compensation,
whose error is one rounding and a smaller second-order term (for fewer than 4096 groups). If several lanes do this, the
sums of the lanes are then added one by one. With codes in several passes, the partial sums of each pass are reduced,
the results are added one by one, and the last pass reduces their sum together with its own partial sums. Scaling adds
3: the scale is rounded twice, and the product once.

**Range.** Sums are scaled at the end. None overflows if the sum of |x_j| over the entries of a component is less than
a quarter of the largest number of the sums' dtype, that is, 2^126 for fp32.
"""

from __future__ import annotations

from typing import NamedTuple

from . import exact
from .ampere_kernel import SLICE_COLUMNS, AmpereKernel
from .arithmetic import BF16, BF16_PAIR, BF16_TRIPLE, CHUNKS_PER_SUM, FP16_PAIR, FP64, NATIVE
from .codes import Codes
from .dense_matrix import DenseMatrix
from .exact import BATCHES_PER_SUM, FewVectors, RowGather, TensorCore
from .hopper import STEP_COLUMNS, Hopper
from .iid import Iid, IidHopper
from .lane_sums import LaneSums
from .one_tile import STEP as COLUMNS_PER_SUM
from .one_tile import OneTile
from .product import GROUPS_PER_STEP, SPLITS_PER_SUM, Product, count_groups, reduce_lanes
from .scattered_layouts import LANES
from .scattered_sums import ScatteredSums
from .staged_adjoint import StagedAdjoint
from .staged_gather import StagedGather
from .warp_tiles import WarpTiles

Launch = exact.Launch | Iid | IidHopper

# 16-bit values that represent an element of the data. A pair of fp16 values may be replaced by three of bf16.
PARTS = {NATIVE: 1, BF16: 1, BF16_PAIR: 2, BF16_TRIPLE: 3, FP16_PAIR: 3}
SPLIT_ERRORS = {BF16: 1 << 15, BF16_PAIR: 1 << 8, FP16_PAIR: 4}  # in units of u
RUNNING_FLOOR, SAMPLED_FLOOR = 2.0**-17, 2.0**-9  # for pairs of fp16 values
MIN_INSTRUCTION_TERMS = 8  # terms of a dense sum that a tensor core adds at once, at least
SCALE_ERROR = 3


class ErrorBound(NamedTuple):
    """The constants c and floor of the error bound.

    Attributes
    ----------
    c : int
        In units of u.
    floor : float
        Elements whose magnitude, relative to the largest of the data vector, is less than this have the error of one of
        this magnitude. 0 unless fp32 data is multiplied as pairs of fp16 values.
    """

    c: int
    floor: float


def error_bound(product: Product, launch: Launch) -> ErrorBound:
    """The bound for a launch that `exact.choose` or `iid.choose` returned for this product.

    If programs share products (`codes.Sharing`), additions of shares replace additions of steps, so the bound still
    holds.

    With stacks, the bound is that of one stack; an adjoint adds the stacks, with one rounding each, or all at once by
    `StagedAdjoint`.
    """
    if isinstance(launch, Iid | IidHopper):
        bound = _iid(product, launch)
    elif product.adjoint:
        return _adjoint(product, launch)  # splits are parts of the result, so nothing is reduced
    elif isinstance(launch, Hopper | Codes):
        bound = _hopper(product, launch)
    else:
        bound = _portable(product, launch)
    splits, passes = launch.splits, 1
    if isinstance(launch, Codes) and launch.passes > 1:
        splits, passes = launch.splits_per_pass + 1, launch.passes
    lanes = reduce_lanes(splits, product.n * product.out_dim)
    in_group = min(-(-splits // lanes), SPLITS_PER_SUM)
    reduction = in_group - 1 + (2 if splits > in_group * lanes else 0) + lanes - 1
    if passes > 1:
        reduction = 2 * reduction + passes
    return ErrorBound(bound.c + reduction + SCALE_ERROR, bound.floor)


def _portable(product: Product, launch: Launch) -> ErrorBound:
    """Projections under the exact law by Triton kernels: the sums of one split."""
    if isinstance(launch, TensorCore | OneTile):
        if isinstance(launch, OneTile):
            groups, longest = launch.chunks_per_split, max(1, COLUMNS_PER_SUM >> product.geometry.log_chunk)
        else:
            groups, longest = launch.groups_per_split, max(CHUNKS_PER_SUM, launch.chunks_per_dot)
        in_sum = min(groups, longest) if launch.chunked_sum else groups
        c = 4 * PARTS[launch.mode] * in_sum + _total_additions(groups, in_sum) + SPLIT_ERRORS.get(launch.mode, 0)
        return ErrorBound(c, SAMPLED_FLOOR if launch.mode == FP16_PAIR else 0.0)
    if isinstance(launch, DenseMatrix):
        return ErrorBound(4 * count_groups(product), 0.0)
    if isinstance(launch, LaneSums):  # in a step, each lane adds at most one term to a row of its copy of the sums
        sharers = launch.kernel.sharers
        return ErrorBound(launch.steps_per_split * sharers - 1 + launch.kernel.warps - 1 + LANES // sharers - 1, 0.0)
    if isinstance(launch, WarpTiles):  # a row has at most one entry in a group
        return ErrorBound(4 * launch.groups_per_split, 0.0)
    if isinstance(launch, StagedGather):  # a row has at most one entry in a group
        return ErrorBound(launch.groups_per_split - 1, 0.0)
    if isinstance(launch, ScatteredSums):  # by slot, the spare addition is that of the two sums of a row
        return ErrorBound(launch.terms - 1 + launch.kernel.layout.copies, 0.0)
    if isinstance(launch, RowGather):
        groups = launch.groups_per_split
        in_sum = GROUPS_PER_STEP if launch.chunked_sum else groups
        return ErrorBound(in_sum - 1 + _total_additions(groups, in_sum), 0.0)
    assert isinstance(launch, FewVectors)
    batches = min(BATCHES_PER_SUM, launch.batches_per_split)
    within = launch.layout.chunks_outer - 1 + launch.layout.chunks_inner - 1  # chunks of a step, then sums of threads
    additions = batches * launch.segments - 1 + _total_additions(launch.batches_per_split, batches)
    return ErrorBound(within + additions, 0.0)


def _hopper(product: Product, launch: Hopper | Codes) -> ErrorBound:
    """Projections under the exact law by Gluon kernels: the sums of one split."""
    chunk = 1 << product.geometry.log_chunk
    if isinstance(launch, Hopper):
        step, columns, blocks = STEP_COLUMNS, launch.columns, launch.blocks_per_split
    else:
        step = SLICE_COLUMNS if isinstance(launch.kernel, AmpereKernel) else STEP_COLUMNS
        columns = min(step, 1 << launch.kernel.log_block)
        blocks = launch.groups_per_split * chunk // columns
    blocks_per_step = step // columns
    if product.dtype != "float32":
        return ErrorBound(4 * (-(-blocks * columns // chunk)), 0.0)
    c = 4 * 2 * blocks_per_step + _total_additions(blocks, blocks_per_step) + SPLIT_ERRORS[FP16_PAIR]
    return ErrorBound(c, RUNNING_FLOOR)


def _adjoint(product: Product, launch: Launch) -> ErrorBound:
    """Adjoints under the exact law: sums of nnz terms."""
    if isinstance(launch, RowGather | FewVectors | StagedAdjoint):
        return ErrorBound(product.nnz * product.stacks - 1 + SCALE_ERROR, 0.0)
    mode = NATIVE if isinstance(launch, DenseMatrix) else FP16_PAIR
    if isinstance(launch, TensorCore | OneTile):
        mode = launch.mode
    pair = mode == FP16_PAIR
    c = 4 * (2 if pair else PARTS[mode]) * product.nnz + SPLIT_ERRORS.get(mode, 0) + SCALE_ERROR
    return ErrorBound(c, RUNNING_FLOOR if pair else 0.0)


def _iid(product: Product, launch: Iid | IidHopper) -> ErrorBound:
    """Products under the iid law: the sums of one split, in which every term may be nonzero."""
    if isinstance(launch, IidHopper):
        terms, in_sum, mode = product.reduce_dim, product.reduce_dim, NATIVE
    else:
        terms, mode = launch.terms_per_split, launch.mode
        in_sum = min(terms, launch.terms_per_sum)
    if mode == FP64:
        return ErrorBound(in_sum - 1 + _total_additions(terms, in_sum), 0.0)
    steps = -(-in_sum // MIN_INSTRUCTION_TERMS)
    c = 2 * PARTS[mode] * (in_sum + steps) + _total_additions(terms, in_sum) + SPLIT_ERRORS.get(mode, 0)
    return ErrorBound(c, SAMPLED_FLOOR if mode == FP16_PAIR else 0.0)


def _total_additions(terms: int, in_sum: int) -> int:
    """The number of additions of sums, of `in_sum` terms each, to a total of `terms` terms."""
    return -(-terms // in_sum) - 1
