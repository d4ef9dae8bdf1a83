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
    matrix_file: Annotated[Path, typer.Argument(metavar="A", help="The matrix, m x n: .npy, or another file.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The result, .npz: arrays U, s and Vh.")],
    rank: Annotated[int, typer.Option(help="Singular values to find, at most min(m, n).", **INTEGER)],
    oversampling: Annotated[
        int | None,
        typer.Option(help="Further columns of the sketch; default: as many as the rank, at least 8; with --n-iter a "
                     "quarter of the rank, at least 8, and up to 15 more.", show_default=False, **INTEGER),
    ] = None,
    n_iter: Annotated[
        int, typer.Option(help="Passes over A after the first, for singular values that decay slowly.",
                          **INTEGER)
    ] = 0,
    column: MatrixColumn = None,
    seed: SketchSeed = 0,
    threads: Threads = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT.")] = False,
) -> None:  # fmt: skip
    """Find the largest singular values and vectors of A, in one pass over it.

    A is a float32 or float64 matrix in an .npy file, or in another format that sjlt project reads. It may be larger
    than memory. A CSR matrix (of scipy.sparse.save_npz, or stored by AnnData) is loaded whole.

    With the default oversampling, the computation takes about 100 MB and up to 5 times the size of OUT where A has more
    rows than columns (9 times if rank + oversampling is the number of columns), and up to 13 times where it has fewer.
    With --n-iter, an A with fewer than about 32 (rank + oversampling) rows is also loaded whole, twice, in float64.

    OUT has the float64 arrays U (m x rank), s (descending) and Vh (rank x n): (U * s) @ Vh is close to A. The last line
    shows the largest and smallest of s. If that is not far below the largest, a larger rank or --n-iter helps.

    OUT appears when it is complete. An interrupted run leaves nothing, and starts with the first pass again. If A
    changes while it is read, the run ends with an error.
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
    """Refuse a rank out of range, and a result for which there is no space."""
    from ..files.names import check_space
    from ..inputs.checks import integer

    if 0 not in shape:  # else `svd_lowrank` refuses the matrix
        check_space(out, 8 * integer("rank", rank, 1, min(shape), f" for shape {shape}") * (sum(shape) + 1))
