"""The command ``sjlt lstsq``."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .matrices import open_matrix, save, solving
from .options import NUMBER, MatrixColumn, SketchSeed, Threads, set_threads
from .outputs import check_output
from .terminal import note, say

if TYPE_CHECKING:
    import numpy as np


class Device(enum.StrEnum):
    cpu = "cpu"
    cuda = "cuda"


def lstsq(
    matrix_file: Annotated[Path, typer.Argument(metavar="A", help="Input matrix, m x n: .npy or another format.")],
    right_file: Annotated[Path, typer.Argument(metavar="B", help="Input .npy file: right-hand sides, m or m x c.")],
    out: Annotated[Path, typer.Argument(metavar="X", help="Output .npy file: the solution, n or n x c.")],
    damp: Annotated[
        float, typer.Option(help="Ridge regression: minimize |A x - b|^2 + damp^2 |x|^2.", **NUMBER)
    ] = 0.0,
    rcond: Annotated[
        float | None,
        typer.Option(help="Treat singular values of A up to rcond times the largest as zero. Default: 10 machine "
                     "epsilons.", show_default=False, **NUMBER),
    ] = None,
    device: Annotated[Device, typer.Option(help="Where to compute; A is read block by block.")] = Device.cpu,
    column: MatrixColumn = None,
    seed: SketchSeed = 0,
    threads: Threads = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite X.")] = False,
) -> None:  # fmt: skip
    """Solve the least-squares problem min |A x - b|.

    The solution is as accurate as one from a QR factorization of A. X is float64. If A does not have full rank, X is
    the solution of minimum norm.

    A is a float32 or float64 matrix in an .npy file, or in another format that sjlt project reads. It is read in 3 to 5
    passes and may be larger than memory. The computation needs about 100 MB, twice the size of B, and up to 16 float64
    arrays of shape n x n. If A has fewer than about 8 n rows, or fewer than 1024, two float64 copies of it are held in
    memory. A CSR matrix (from scipy.sparse.save_npz, or stored by AnnData) is loaded whole.

    The last line of output shows the rank of A, the number of passes, |A x - b|, and the backward error: the relative
    change of A and b for which X is exact.

    With --device cuda, blocks of A are copied to the GPU. A sparse A is solved on the CPU only.

    X appears only when it is complete. An interrupted run writes nothing; running it again starts from the first pass.
    If A changes between passes, the run fails.
    """
    import numpy as np

    from ..linalg import lstsq as solve

    check_output(out, [matrix_file, right_file], (".npy",), force)
    set_threads(threads)
    with open_matrix(matrix_file, column) as (A, shape):
        b = right = _right_hand_sides(right_file, matrix_file, shape)
        if on_gpu := device is Device.cuda:
            right = _on_gpu(b, A, matrix_file)
        with solving(out) as progress:
            solution = solve(A, right, damp=damp, rcond=rcond, seed=seed, callback=progress)
            x, squares = (value.cpu().numpy() if on_gpu else value for value in (solution.x, solution.residuals))
            save(out, lambda file: np.save(file, x), force)
    largest = "" if b.ndim == 1 else f" (the largest of {b.shape[1]})"
    say(
        f"{out}: rank {solution.rank} of {shape[1]}, {solution.iterations} passes, residual "
        f"{float(np.sqrt(squares).max()):.4g}{largest}, backward error {solution.backward_error:.1e}"
    )
    if solution.rank < min(shape) and damp == 0:
        note(f"A has rank {solution.rank} and shape {shape}: X is the solution of minimum norm")


def _on_gpu(b: np.ndarray, A: Any, path: Path) -> Any:
    """Return b as a CUDA tensor, if A is not a sparse matrix in memory."""
    import torch

    from ..files.device import check_cuda
    from ..files.errors import UserError
    from ..files.source import Source

    if not isinstance(A, Source):
        raise UserError(f"{path}: a sparse matrix is solved on the CPU only")
    check_cuda()
    # Other dtypes are left to `sjlt.linalg.lstsq`, which refuses them.
    return torch.from_numpy(b.astype("float64")).cuda() if b.dtype.kind in "fiub" else b


def _right_hand_sides(path: Path, matrix_file: Path, shape: tuple[int, int]) -> np.ndarray:
    import numpy as np

    from ..files.errors import UserError, one_line

    if not path.exists():
        raise UserError(f"{path}: No such file or directory")
    if not path.is_file():
        raise UserError(f"{path}: not a regular file")
    try:
        b: np.ndarray = np.lib.format.open_memmap(path, mode="r")
    except (OSError, MemoryError):  # not a fault of the file's contents
        raise
    except Exception as e:  # NumPy's parser raises many types on malformed bytes
        raise UserError(f"{path}: not a readable .npy file: {one_line(e)}") from None
    if b.ndim not in (1, 2) or b.shape[0] != shape[0] or 0 in b.shape:
        raise UserError(
            f"{path}: holds an array of shape {b.shape}; needs ({shape[0]},) or ({shape[0]}, columns) for "
            f"{matrix_file} of shape {shape}"
        )
    return np.array(b)
