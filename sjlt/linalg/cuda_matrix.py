"""CUDA tensors, and files whose blocks are copied to a CUDA device, as matrices that are read in passes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from ..sketch import Sketch
from .matrix import FileMatrix, Matrix, Progress, one_pass
from .tensor_products import multiply

# Bytes of a block in float64, if blocks are converted or their products are wide. For (2^20, 512), blocks of half the
# size take 1.03 times as long on an H100, and of twice the size 0.96 times.
GPU_BYTES = 512 << 20
# Columns up to which "passes" is faster than "cg": at any condition number, and for a well-conditioned A. On an H100,
# "passes" and "cg" take 34 and 60 ms for (2^20, 512) at a condition number of 1e10; 87 and 77 ms for (2^18, 2048) at
# 1e10, and 45 and 63 ms at 1e2.
MAX_COLUMNS, MAX_WELL_CONDITIONED_COLUMNS = 1024, 4096


def _in_own_dtype(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a pass in A's own dtype, or by `Matrix`'s method of the same name, in float64, if that would lose precision.

    Converting float32 to float64 moves another three times as many bytes as A has.
    """
    direct = one_pass(method)

    @functools.wraps(method)
    def dispatched(self: CudaMatrix, *arguments: Any) -> Any:
        return (direct if self.keeps_precision() else getattr(Matrix, method.__name__))(self, *arguments)

    return dispatched


class CudaMatrix(Matrix):
    """A 2-D CUDA tensor, float32 or float64."""

    def __init__(self, a: Any, progress: Progress | None = None):
        import torch

        super().__init__(tuple(a.shape), a.dtype, torch, a.device, progress)
        self._a = a.detach()
        self.max_gram_columns = math.inf if a.shape[1] <= MAX_COLUMNS else MAX_WELL_CONDITIONED_COLUMNS

    def blocks(self, width: int) -> Iterator[tuple[int, Any]]:
        is_whole = self._a.dtype == self.xp.float64 and width <= 64
        rows = self.shape[0] if is_whole else self._block_rows()
        for i in range(0, self.shape[0], rows):
            yield i, self._a[i : i + rows].double()

    def _block_rows(self) -> int:
        """Rows per block, if blocks are converted or their products are wide."""
        return max(1, GPU_BYTES // (8 * self.shape[1]))

    def sketch_into(self, S: Sketch, transposed: Any) -> None:
        if self._a.dtype != self.xp.float64:
            super().sketch_into(S, transposed)
            return
        S.project(self._a.T, out=transposed)
        self.count_pass()

    @_in_own_dtype
    def quick_sketch(self, S: Sketch) -> Any:
        return S.project(self._a.T).double().T

    def sketch_both(self, omega: Sketch, psi: Sketch) -> tuple[Any, Any]:
        return self.project(omega), self.quick_sketch(psi)

    @_in_own_dtype
    def project(self, omega: Sketch) -> Any:
        return omega.project(self._a).double()

    @_in_own_dtype
    def times(self, V: Any) -> Any:
        return multiply(self._a, V).double()

    @_in_own_dtype
    def normal_times(self, V: Any) -> Any:
        rows = self._block_rows()
        pairs = zip(self._a.split(rows), multiply(self._a, V).split(rows), strict=True)
        return sum((block.T @ products).double() for block, products in pairs)

    @one_pass
    def dense(self) -> Any:
        return self._a.double()

    def random(self, shape: tuple[int, int], seed: int) -> Any:
        if not self._a.is_cuda:
            return super().random(shape, seed)
        generator = self.xp.Generator(self.device).manual_seed(seed)
        return self.xp.randn(shape, dtype=self.xp.float64, device=self.device, generator=generator)

    def keeps_precision(self) -> bool:
        """Whether products in A's dtype have its full accuracy.

        For float32, torch may be set to compute in TF32 or bfloat16, which keep 3 digits; autocast does the same.
        """
        from ..backends.triton.device import precision  # Triton is slow to import

        if self._a.dtype == self.xp.float64:
            return True
        return precision(self._a.dtype) == "highest" and not self.xp.is_autocast_enabled(self._a.device.type)


class StreamedMatrix(Matrix):
    """A `FileMatrix` whose blocks are copied to a CUDA device while the next ones are read."""

    max_gram_columns = math.inf

    def __init__(self, file: FileMatrix, device: Any, progress: Progress | None = None):
        import torch

        super().__init__(file.shape, file.dtype, torch, device, progress)
        self._file = file

    def close(self) -> None:
        self._file.close()

    def blocks(self, width: int) -> Iterator[tuple[int, Any]]:
        for i, block in self._file.blocks(width, self._page_locked):
            yield i, self.xp.from_numpy(block).to(self.device).double()

    def _page_locked(self, shape: tuple[int, int], dtype: str, order: str) -> Any:
        """Return an uninitialized array in page-locked memory, which a GPU reads at the full speed of its bus."""
        shape = shape if order == "C" else shape[::-1]
        memory = self.xp.empty(shape, dtype=getattr(self.xp, dtype), pin_memory=self.device.type == "cuda").numpy()
        return memory if order == "C" else memory.T

    @one_pass
    def dense(self) -> Any:
        return self.array(self._file.dense())
