"""CPU adjoints that add columns in place give bit for bit the products of row-major data."""

import numpy as np
import pytest
from helpers.cases import pairwise
from helpers.data import before_protected_page, sliced

import sjlt
from sjlt.backends.cpu import columns_in_place
from sjlt.backends.cpu.plan import exact_plan


@pytest.mark.usefixtures("restored_num_threads")
@pairwise(
    n=[7, 16, 129, 300, 1031],
    sizes=[(33, 700, 3), (300, 900, 1), (600, 500, 2), (90, 4000, 8)],
    dtypes=[("float32", "float32"), ("float64", "float64"), ("float32", "float16"), ("float64", "float32")],
    slices=["whole", "part", "backwards", "repeated"],
    layout=["rows", "reversed rows", "every other column"],
    accumulate=[False, True],
    threads=[1, 3],
)
def test_bitwise_equal_to_row_major(n, sizes, dtypes, slices, layout, accumulate, threads, monkeypatch):
    (d, k, nnz), (dtype, out_dtype) = sizes, dtypes
    accumulate = accumulate and out_dtype != "float16"  # which kernels do not support
    monkeypatch.setattr(columns_in_place, "MAX_READS_LOOKED_UP", 100)
    S = sjlt.Sketch(d, k, nnz=nnz, seed=3)
    rng, rows = np.random.default_rng(1), (3 * k, n + 13) if slices == "part" else (k, n)
    columns = (rng.standard_normal(rows) * 2.0 ** rng.integers(-8, 8, rows)).astype(dtype)
    columns[:30, 5:7], columns[30:60, 5], columns[60:90, 6] = -np.finfo(dtype).smallest_subnormal, np.inf, np.nan
    y, results = sliced(columns, slices).T, []
    for data in (y, np.ascontiguousarray(y)):
        whole = np.full((n + 1, 2 * d + 2), 777, out_dtype)
        out = whole[:n, : 2 * d : 2] if layout == "every other column" else whole[:n, :d]
        out = out[::-1] if layout == "reversed rows" else out
        if not accumulate:
            out[...] = np.nan
        plan = exact_plan(S.spec)
        plan.calls.clear()
        in_place = data is y and n >= 64 // y.itemsize
        assert columns_in_place.eligible(plan, data, out, data.dtype, True) == in_place
        sjlt.set_num_threads(threads)
        with np.errstate(invalid="ignore", over="ignore"):
            S.project_adjoint(data, out=out, accumulate=accumulate)
        results.append(whole)
    np.testing.assert_array_equal(*results)
    np.testing.assert_array_equal(*(np.signbit(r) | np.isnan(r) for r in results))
    written = np.zeros_like(results[0], bool)
    written[:n, : 2 * d : 2] = layout == "every other column"
    written[:n, :d] |= layout != "every other column"
    assert (results[0][~written] == 777).all()


@pytest.mark.parametrize("n", [16, 21, 129, 263])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nothing_is_read_beyond_the_data(dtype, n):
    """The data ends where a protected page begins, and so does the result."""
    S = sjlt.Sketch(30, 200, nnz=2, seed=1)
    y, out = before_protected_page((200, n), dtype).T, before_protected_page((n, 30), dtype)
    assert columns_in_place.eligible(exact_plan(S.spec), y, out, y.dtype, True)
    out[...] = 1
    S.project_adjoint(y, out=out)
    assert not out.any()


def test_choice():
    y, out = np.zeros((200, 40), np.float32).T, np.zeros((40, 500), np.float32)

    def is_chosen(y=y, n_features=70, out=out, compute=np.float32, can_look_up=False):
        plan = exact_plan(sjlt.Sketch(n_features, 200, nnz=2).spec)
        return columns_in_place.eligible(plan, y, out[:, :n_features], np.dtype(compute), can_look_up)

    assert is_chosen()
    assert is_chosen(can_look_up=True)
    assert is_chosen(n_features=400)
    assert not is_chosen(n_features=80, can_look_up=True)
    assert not is_chosen(n_features=410)
    assert not is_chosen(y=np.ascontiguousarray(y))
    assert not is_chosen(y=y[:15])
    assert not is_chosen(y=y.astype(np.uint16, order="F"))
    assert not is_chosen(out=np.asfortranarray(out))
    assert not is_chosen(y=y[::2])
