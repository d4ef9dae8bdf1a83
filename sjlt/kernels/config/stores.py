"""Stores of results by kernels that read codes, above all by windows: pure functions of a `Product`."""

from __future__ import annotations

import math

from .product import VECTOR_BYTES, Product

# Pairs (log_chunk, columns): if chunks have at least 2^log_chunk columns, windows are faster up to so many columns of
# the data per row of the sketch. The first pair that applies decides.
Limits = tuple[tuple[int, float], ...]
WINDOWS: Limits = (6, 0.85), (4, 0.6), (0, 0.35)
WINDOWS_STAGED: Limits = (6, 0.75), (4, 0.38), (0, 0.25)
WINDOWS_BY_THREADS: Limits = (4, 0.42), (0, 0.2)


def tma_stores(product: Product, splits: int, windows: bool = False) -> bool:
    """Whether the TMA can store the sums of all tiles, or windows: boxes of one size, at multiples of 16 bytes.

    It stores whole units of 16 bytes, also where a line ends within one: the rest may be someone else's memory.
    """
    n_tiles, contiguous = product.geometry.n_tiles, stores_vectors(product)
    if (splits == 1 and not product.plain) or not (windows or product.k % n_tiles == 0):
        return False
    item, far, near = _strides(product, splits)
    run = product.n if contiguous else product.k if windows else product.k // n_tiles
    return near == 1 and far > 0 and far * item % VECTOR_BYTES == 0 and run * item % VECTOR_BYTES == 0


def store_width(product: Product, splits: int, windows: bool = False) -> int:
    """The number of adjacent elements that a thread can store at a time: up to 16 bytes, all of one tile or window."""
    n_tiles, k = product.geometry.n_tiles, product.k
    item, far, near = _strides(product, splits)
    if near != 1 or (splits == 1 and not product.plain):
        return 1
    if stores_vectors(product):
        return math.gcd(VECTOR_BYTES // item, product.n, far)
    if k % n_tiles and not windows:
        return 1
    return math.gcd(VECTOR_BYTES // item, k, far, 0 if windows else k // n_tiles)


def _strides(product: Product, splits: int) -> tuple[int, int, int]:
    """(bytes of an element, stride between lines, stride within a line) of the result or of partial sums."""
    contiguous = stores_vectors(product)
    if splits > 1:  # in fp32, without gaps
        return 4, product.n if contiguous else product.k * product.stacks, 1
    far, near = product.y_strides[::-1] if contiguous else product.y_strides
    return product.item_bytes, far, near


def stores_vectors(product: Product) -> bool:
    """Whether consecutive elements of the result belong to consecutive vectors."""
    return product.n > 1 and product.y_strides[0] < product.y_strides[1]


def favors_windows(product: Product, splits: int, staged: bool, entries_first: bool) -> bool:
    """Whether windows, whose rows are stored several at a time, are faster than tiles, whose data is loaded only once.

    They are where results outweigh data. With tiles and with windows, in microseconds on an H200: X (1009585, 384) ->
    1344 with nnz 3 in bf16 1927 and 1118, (165410, 1024) -> 2752 with nnz 1 in fp16, contiguous vectors, 670 and 419,
    (237576, 512) -> 2368 with nnz 4 in fp32 1312 and 859, (19996, 262) -> 2368 with nnz 4 in fp16 69 and 52; but
    (87859, 1024) -> 1192 with nnz 4 in bf16 153 and 173, (397743, 1024) -> 1064 with nnz 8 724 and 970. Staged rows
    are loaded more slowly: (67101, 384) -> 2552 with nnz 3 233 and 171, but (150308, 1000) -> 1216 316 and 353. Of 84
    products with 0.1 to 2.5 columns per row of the sketch, 50 take 0.58 to 0.99 of the time. With tiles and
    `staged_results`, four such products in 16 bits take 1.16 to 1.31 times as long as with windows; six whose windows
    the TMA cannot store take 0.91 to 1.0 times as long.

    Parameters
    ----------
    staged : bool
        Whether rows of the data are loaded by STAGE.
    entries_first : bool
        As in `KernelChoice`: consumers then store results that the TMA cannot.
    """
    if splits > 1 or product.stacks > 1 or product.geometry.n_tiles == 1 or stores_vectors(product):
        return False
    if tma_stores(product, 1, windows=True):
        gains, limits = not tma_stores(product, 1), WINDOWS_STAGED if staged else WINDOWS
    else:
        wider = store_width(product, 1, windows=True) > store_width(product, 1)
        gains, limits = wider and entries_first, WINDOWS_BY_THREADS
    log_chunk = product.geometry.log_chunk
    return gains and product.d <= product.k * next(columns for least, columns in limits if log_chunk >= least)
