"""The command ``sjlt svd``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .matrices import open_matrix, save, solving
from .options import INTEGER, MatrixColumn, SketchSeed, Threads, set_threads
from .outputs import check_output
from .terminal import say


def svd(
    matrix_file: Annotated[Path, typer.Argument(metavar="A", help="Input matrix, m x n: .npy or another format.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output .npz file with the arrays U, s and Vh.")],
    rank: Annotated[int, typer.Option(help="Number of singular values to compute, at most min(m, n).", **INTEGER)],
    oversampling: Annotated[
        int | None,
        typer.Option(help="Additional columns of the sketch. Default: the rank, but at least 8; with --n-iter, a "
                     "quarter of the rank, but at least 8, plus up to 15.", show_default=False, **INTEGER),
    ] = None,
    n_iter: Annotated[
        int, typer.Option(help="Further passes over A; use them if the singular values decay slowly.", **INTEGER)
    ] = 0,
    column: MatrixColumn = None,
    seed: SketchSeed = 0,
    threads: Threads = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT.")] = False,
) -> None:  # fmt: skip
    """Compute the largest singular values and vectors of A.

    A is a float32 or float64 matrix in an .npy file, or in another format that sjlt project reads. It is read in a
    single pass by default, and may be larger than memory. A CSR matrix (from scipy.sparse.save_npz, or stored by
    AnnData) is loaded whole.

    OUT contains the float64 arrays U (m x rank), s (descending) and Vh (rank x n), such that (U * s) @ Vh approximates
    A. The last line of output shows the largest and the smallest value of s. If the smallest is not far below the
    largest, use a larger rank or --n-iter.

    With the default oversampling, the computation needs about 100 MB plus up to 5 times the size of OUT if A has more
    rows than columns (9 times if rank + oversampling is the number of columns), and up to 13 times if it has fewer.
    With --n-iter, if A has fewer than about 32 (rank + oversampling) rows, two float64 copies of it are also held in
    memory.

    OUT appears only when it is complete. An interrupted run writes nothing; running it again starts from the first
    pass. If A changes while it is read, the run fails.
    """
    import numpy as np

    from ..linalg import svd_lowrank

    check_output(out, [matrix_file], (".npz",), force)
    set_threads(threads)
    with open_matrix(matrix_file, column) as (A, shape), solving(out) as progress:
        _check_size(out, shape, rank)
        U, s, Vh = svd_lowrank(A, rank, oversampling=oversampling, n_iter=n_iter, seed=seed, callback=progress)
        save(out, lambda file: np.savez(file, U=U, s=s, Vh=Vh), force)
    say(f"{out}: U {U.shape}, s {s.shape} from {s[0]:.4g} to {s[-1]:.4g}, Vh {Vh.shape}")


def _check_size(out: Path, shape: tuple[int, int], rank: int) -> None:
    """Raise an error if `rank` is out of range or there is no space for the result."""
    from ..files.names import check_space
    from ..inputs.checks import integer

    if 0 not in shape:  # `svd_lowrank` itself refuses an empty matrix
        check_space(out, 8 * integer("rank", rank, 1, min(shape), f" for shape {shape}") * (sum(shape) + 1))
