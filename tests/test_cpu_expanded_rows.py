"""CPU projections to more components than there are entries: bitwise equal to those by other paths."""

import numpy as np
import pytest
from helpers.cases import pairwise

import sjlt
from sjlt import Sketch, threads
from sjlt.backends.cpu import expanded_rows, plan
from sjlt.backends.cpu.dense import project_exact
from sjlt.backends.cpu.plan import exact_plan

pytestmark = pytest.mark.usefixtures("restored_num_threads")
SENTINEL = 777


@pytest.mark.skipif(not expanded_rows.HAS_FAST_GATHERS, reason="gathers are slow on this processor")
@pairwise(
    n=[1, 5, 64, 1000],
    d=[1, 7, 93],
    sizes=[(200, 1, 1), (256, 4, 1), (1000, 2, 1), (802, 4, 2)],
    dtypes=[("float32", "float32"), ("float16", "float16"), ("float64", "float64"), ("float16", "float32")],
    layout=[(1, 0, 0), (2, 5, 1234), (-1, 5, 0)],
    threads=[1, 3],
)
def test_results_are_bitwise_those_of_other_paths(n, d, sizes, dtypes, layout, threads, monkeypatch):
    (dtype, out_dtype), (k, nnz, stacks), (step, padding, offset) = dtypes, sizes, layout
    sjlt.set_num_threads(threads)
    monkeypatch.setattr(expanded_rows, "REUSED_WORK", 1 << 12)  # so that threads share the rows
    sketch = Sketch(offset + d, k, nnz=nnz, stacks=stacks, seed=d)[:, offset:]
    rng = np.random.default_rng(n)
    x = (rng.normal(size=(n, 2 * d + padding)) * 2.0 ** rng.integers(-6, 6, (n, 1))).astype(dtype)
    x = x[:, : abs(step) * d : step] if step > 0 else x[:, d - 1 :: -1]
    x[0, 0], x[-1, d // 2] = np.inf, np.nan
    assert x.shape == (n, d)
    results = []
    for expands in (False, True):
        monkeypatch.setattr(expanded_rows, "eligible", lambda *_, expands=expands: expands)
        exact_plan(sketch.spec).calls.clear()
        whole = np.full((n + 1, k + padding), SENTINEL, out_dtype)
        out = whole[:n, :k]
        out[...] = np.nan
        with np.errstate(invalid="ignore"):
            project_exact(sketch.spec, x, out, False)
        assert (whole[n:] == SENTINEL).all()
        assert (whole[:, k:] == SENTINEL).all()
        results.append(out)
    np.testing.assert_array_equal(*results)
    np.testing.assert_array_equal(*(np.signbit(r) | np.isnan(r) for r in results))


@pytest.mark.skipif(not expanded_rows.HAS_FAST_GATHERS, reason="gathers are slow on this processor")
def test_many_rows_are_divided_also_on_one_thread(monkeypatch):
    """Interrupts are checked between tasks."""
    sjlt.set_num_threads(1)
    run, tasks = threads.run, []

    def run_and_note(task, ranges, workers):
        tasks.extend(ranges := list(ranges))
        run(task, ranges, workers)

    monkeypatch.setattr(threads, "run", run_and_note)
    monkeypatch.setattr(plan, "STEP_WORK", 1 << 16)
    S, x = Sketch(64, 1000, nnz=1), np.random.default_rng(0).integers(-8, 9, (1000, 64)).astype(np.float32)
    np.testing.assert_array_equal(x @ S.T, x @ S.toarray().T)
    assert len(tasks) > 10


def test_where_rows_are_expanded(monkeypatch):
    """Where there are few entries, rows are contiguous, and gathers are fast."""
    monkeypatch.setattr(expanded_rows, "HAS_FAST_GATHERS", True)
    x, out = np.zeros((100, 100), np.float32), np.zeros((100, 400), np.float32)
    single, double = np.dtype(np.float32), np.dtype(float)
    plan = exact_plan(Sketch(100, 400, nnz=2).spec)
    assert expanded_rows.eligible(plan, x, out, single)
    assert not expanded_rows.eligible(plan, np.asfortranarray(x), out, single)
    assert not expanded_rows.eligible(plan, x, np.asfortranarray(out), single)
    more = exact_plan(Sketch(100, 400, nnz=4).spec)
    assert not expanded_rows.eligible(more, x, out, single)
    assert expanded_rows.eligible(more, x.astype(float), out.astype(float), double)
    monkeypatch.setattr(expanded_rows, "HAS_FAST_GATHERS", False)
    assert not expanded_rows.eligible(plan, x, out, single)
