"""Products from codes on a GPU, for the tests of both kernels that read them."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from helpers.choices import NONE_GENERATED, changed_choices, in_three_passes
from helpers.kernels import LAYOUTS, check_project, launches_run
from sjlt import Sketch
from sjlt.backends.triton import device, exact

# For data of integers, whose sums are exact: results are only scaled and rounded to the dtype.
RTOL = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-22}


def record_calls(monkeypatch):
    """The shapes of X, as a list that grows with each product from codes that runs."""
    from sjlt.backends.triton.codes import ProjectCodes

    shapes, call = [], ProjectCodes.__call__

    def record(self, spec, x, out):
        if launches_run():
            shapes.append(tuple(x.shape))
        call(self, spec, x, out)

    monkeypatch.setattr(ProjectCodes, "__call__", record)
    return shapes


@contextmanager
def all_sizes_on_hopper():
    """Choose `project_codes_hopper` for products of all sizes; skip the test on other devices."""
    if not device.describe(torch.device("cuda")).hopper:
        pytest.skip("needs a GPU of compute capability 9")
    names = ("MIN_BYTES", "MIN_VECTORS", "MIN_BYTES_PER_CODE", "MIN_COLUMNS")
    sizes = NONE_GENERATED | {f"hopper_codes.{name}": 0 for name in names}
    with changed_choices(sizes | {"gathers.MIN_SMALL": 1 << 60, "scattered_rules.MIN_BYTES": 1 << 60}):
        yield


def integer_product(n, d, k, nnz, order):
    """(sketch, its unscaled entries (d, k), data, a result that holds integers), all of integers, in fp32.

    order : of the result in memory, "rows" or "columns".
    """
    S = Sketch(d, k, nnz=nnz, seed=1)
    entries = torch.from_numpy(S.toarray() * nnz**0.5).float().T.round()
    x, out = torch.randint(-2, 3, (n, d)).float(), torch.randint(-2, 3, (n, k)).float()
    return S, entries, x, out.T.contiguous().T if order == "columns" else out


def no_encoding(*_):
    """In place of `backends.triton.codes._encode`, for tests without the kernels: a launch that does nothing."""
    return SimpleNamespace(start=lambda addresses, seed: True)


def check_lines(k, nnz, steps, beyond, begin, contiguous, dtype):
    """Lines that begin anywhere, between NaNs that no result may contain; integers, so that sums are exact.

    begin, beyond : NaNs before and after each line.  steps : the most in one sum.
    """
    n, d = 203, 781
    lines, width = (d, n) if contiguous else (n, d)
    memory = torch.full((lines, begin + width + beyond), float("nan"), dtype=getattr(torch, dtype), device="cuda")
    x = memory[:, begin : begin + width]
    x.copy_(torch.randint(-2, 3, x.shape, device="cuda"))
    x = x.T if contiguous else x
    S = Sketch(d, k, nnz=nnz, seed=beyond)
    entries = torch.from_numpy(S.toarray() * nnz**0.5).to("cuda").double()
    want = (x.double() @ entries.T * nnz**-0.5).to(x.dtype)
    with changed_choices({"codes.MAX_STEPS": steps, "codes.MAX_CHUNKS": steps}):
        torch.testing.assert_close(x @ S.T, want, rtol=RTOL[dtype], atol=0)


def check_passes(n, d, beyond, k, nnz, contiguous, dtype):
    """Codes that are written and used in three parts; integers, so that sums are exact.

    beyond : elements after each line.
    """
    shape = (d, n + beyond) if contiguous else (n, d + beyond)
    x = torch.randint(-2, 3, shape, device="cuda").to(getattr(torch, dtype))
    x = x[:, :n].T if contiguous else x[:, :d]
    S = Sketch(d, k, nnz=nnz, seed=3)
    want, other = x @ S.T, S @ x.T
    with changed_choices(in_three_passes()):
        launch = exact.choose(exact.describe(S.spec, x, want, False, False))
        assert launch.splits > 2 * launch.splits_per_pass
        for _ in range(2):  # prepared, and again
            torch.testing.assert_close(x @ S.T, want, rtol=RTOL[dtype], atol=0)
            torch.testing.assert_close(S @ x.T, other, rtol=RTOL[dtype], atol=0)


STORES = {
    "sketch": [(100, 4), (620, 2), (1342, 3), (1340, 8), (384, 1)],
    "beyond": [0, 1, 2, 4, 8],
    "contiguous": [False, True],
    "dtype": ["float16", "float32"],
}


def check_stores(k, nnz, beyond, contiguous, dtype):
    """Check results whose lines lie `beyond` elements apart, which decides how many are stored at a time."""
    rows, columns = (lambda n, d, new: new(n, d + beyond)[:, :d]), (lambda n, d, new: new(d, n + beyond).t()[:n])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LAYOUTS, "apart", columns if contiguous else rows)
        for n in (203, 20_000):
            check_project(Sketch(90, k, nnz=nnz, seed=4), n, dtype, device="cuda", out_in="apart")
