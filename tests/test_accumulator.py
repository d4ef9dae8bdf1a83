"""Accumulators: any order, split, merge, retry or kill gives the exact sum, and no block is counted twice."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from helpers.cases import each_value
from helpers.data import integers

from sjlt import Accumulator, Sketch

S = Sketch(500, 40, nnz=4, seed=3)
X = integers((3, 500), "float64")


def blocks(rng, n=500):
    """Ranges that cover all features exactly once, in random order; some are empty."""
    cuts = np.sort(rng.integers(0, n + 1, rng.integers(0, 12)))
    ranges = list(zip([0, *cuts], [*cuts, n], strict=True))
    return [(int(a), int(b)) for a, b in rng.permutation(ranges)]


def run_once(rng, ranges, x):
    """Distribute the ranges over workers that randomly retry and are saved, lost, restored and merged."""
    workers = [Accumulator(S, (3,)) for _ in range(rng.integers(1, 5))]
    order = rng.integers(0, len(workers), len(ranges))
    for which, (start, stop) in zip(order, ranges, strict=True):
        worker = workers[which]
        before = worker.state_dict()
        worker.update(start, x[:, start:stop])
        if rng.random() < 0.3:  # the worker is lost and retries
            worker = workers[which] = Accumulator.from_state_dict(before)
            worker.update(start, x[:, start:stop])
        if rng.random() < 0.3 and stop > start:
            kept = worker.sum
            with pytest.raises(ValueError, match=f"{start} to {stop} .exclusive. overlaps {start} to {stop}"):
                worker.update(start, x[:, start:stop])
            assert np.array_equal(worker.sum, kept)
    total = workers[0]
    for other in workers[1:]:
        total.merge(other)
        if len(other.seen):
            with pytest.raises(ValueError, match="added before"):
                total.merge(other)
    return total


@pytest.mark.parametrize("trials", [5, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_order_merges_and_retries_do_not_matter(trials):
    noise = np.random.default_rng(0).normal(size=X.shape)
    for seed in range(trials):
        ranges = blocks(np.random.default_rng(seed))
        total = run_once(np.random.default_rng(seed), ranges, X)
        assert total.missing() == []
        assert np.array_equal(total.sum, X @ S.T)
        # The sums of these values depend on the order; the same order gives the same bits.
        twice = [run_once(np.random.default_rng(seed), ranges, noise).sum for _ in range(2)]
        assert np.array_equal(*twice)
        np.testing.assert_allclose(twice[0], noise @ S.T, rtol=0, atol=1e-12)


@each_value(
    dtype=["float32", "float64", np.float32, torch.float32],
    device=[None, "cpu"],
    kind=["dense", "strided", "csr"],
)
def test_containers(dtype, device, kind):
    def block(a, b):
        part = np.array(X[:, a:b])
        if kind == "strided":
            part = np.asfortranarray(part)
        if device is None:
            return sp.csr_array(part) if kind == "csr" else part
        return torch.from_numpy(part).to_sparse_coo() if kind == "csr" else torch.from_numpy(part)

    accumulator = Accumulator(S, (3,), dtype=dtype, device=device)
    accumulator.update(200, block(200, 500))
    accumulator.update(0, block(0, 200))
    assert np.array_equal(np.asarray(accumulator.sum), X @ S.T)
    assert accumulator.dtype in str(accumulator.sum.dtype)
    assert "500 of 500" in repr(accumulator)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    x = torch.from_numpy(X).cuda()
    first, second = (Accumulator(S, (3,), dtype="float32", device="cuda") for _ in range(2))
    first.update(0, x[:, :123].half())
    second.update(123, x[:, 123:].float())
    first.merge(second)
    assert first.sum.is_cuda
    assert np.array_equal(first.sum.cpu(), X @ S.T)
    first.save(tmp_path / "sum.npz")
    assert torch.equal(Accumulator.load(tmp_path / "sum.npz", device="cuda").sum, first.sum)
    with pytest.raises(ValueError, match="the sum is on cuda:0, the block on cpu"):
        Accumulator(S, (3,), device="cuda").update(0, x.cpu())


def test_columns_of_a_left_product():
    A = integers((500, 7), "float64")
    accumulator = Accumulator(S, (7,))
    for start in range(0, 500, 100):
        accumulator.update(start, A[start : start + 100].T)
    assert np.array_equal(accumulator.sum.T, S @ A)


def test_single_vector_and_sliced_sketch():
    part = S[:, 100:400]
    accumulator = Accumulator(part)
    accumulator.update(0, X[0, 100:400])
    assert np.array_equal(accumulator.sum, part.project(X[0, 100:400]))


@pytest.mark.parametrize("device", [None, "cpu"])
def test_files(tmp_path, device):
    path = tmp_path / "sum.npz"
    accumulator = Accumulator(S, (3,), dtype="float32", device=device)
    half = X[:, :250].astype("float32")
    accumulator.update(0, half if device is None else torch.from_numpy(half))
    for _ in range(2):  # the second save overwrites an earlier file
        accumulator.save(path)
    assert os.listdir(tmp_path) == ["sum.npz"]
    restored = Accumulator.load(path, device=device)
    assert restored.seen == accumulator.seen
    assert restored.missing() == [(250, 500)]
    assert restored.sketch == S
    assert type(restored.sum) is type(accumulator.sum)
    assert np.array_equal(np.asarray(restored.sum), np.asarray(accumulator.sum))
    with pytest.raises(ValueError, match=r"0 to 250 .exclusive. overlaps 0 to 250"):
        restored.update(0, half if device is None else torch.from_numpy(half))
    state = torch.load(io.BytesIO(_saved(accumulator.state_dict())), weights_only=device is not None)
    assert Accumulator.from_state_dict(state).seen == accumulator.seen


def _saved(state):
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def test_state_byte_order_and_gradients():
    accumulator = Accumulator(S, (3,))
    accumulator.update(0, X)
    state = accumulator.state_dict()
    swapped = Accumulator.from_state_dict({**state, "sum": state["sum"].astype(">f8")})
    assert swapped.sum.dtype == np.float64
    assert swapped.sum.dtype.isnative
    assert np.array_equal(swapped.sum, accumulator.sum)
    total = torch.from_numpy(state["sum"]).requires_grad_()
    tensor = Accumulator.from_state_dict({**state, "sum": total, "ranges": []})
    assert not tensor.sum.requires_grad
    tensor.update(0, torch.from_numpy(X))
    assert np.array_equal(tensor.sum, 2 * accumulator.sum)
    assert np.array_equal(total.detach(), accumulator.sum)


WRITER = """
import sys
import numpy as np
from sjlt import Accumulator, Sketch
path, S = sys.argv[1], Sketch(100_000, 40, nnz=4, seed=3)
accumulator = Accumulator(S)
print("ready", flush=True)
for start in range(0, 100_000, 50):
    accumulator.update(start, np.arange(start, start + 50, dtype=float))
    accumulator.save(path)
"""


@pytest.mark.exhaustive
def test_killed_writer_leaves_a_complete_state(tmp_path):
    path, big = tmp_path / "sum.npz", Sketch(100_000, 40, nnz=4, seed=3)
    for i in range(20):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(np.random.default_rng(i).uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        restored = Accumulator.load(path)
        ((start, stop),) = restored.seen
        assert start == 0
        assert np.array_equal(restored.sum, big[:, :stop].project(np.arange(stop, dtype=float)))
        path.unlink()


def test_interrupted_update_is_detected():
    accumulator = Accumulator(S, (3,))

    def interrupted():
        yield 0, 10
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        accumulator._add(np.ones((3, 40)), interrupted())
    for call in (lambda: accumulator.sum, accumulator.state_dict, lambda: accumulator.update(10, X[:, 10:20])):
        with pytest.raises(RuntimeError, match="interrupted"):
            call()


def test_refusals(tmp_path):
    accumulator = Accumulator(S, (3,))
    accumulator.update(100, X[:, 100:200])

    def refused(error, message, call, *arguments):
        with pytest.raises(error, match=message):
            call(*arguments)

    update = accumulator.update
    refused(ValueError, r"150 to 250 .exclusive. overlaps 150 to 200", update, 150, X[:, 150:250])
    refused(ValueError, "features 450 to 550 .exclusive. go beyond n_features = 500", update, 450, X[:, :100])
    refused(ValueError, r"must have shape \(3, features\), got \(4, 5\)", update, 0, np.zeros((4, 5)))
    refused(ValueError, "got \\(500,\\)", update, 0, X[0])
    refused(ValueError, "offset must be from 0 to 500, got -1", update, -1, X[:, :5])
    refused(TypeError, "sums arrays or SciPy matrices .tensors with device=., got Tensor", update, 0, torch.zeros(3, 5))
    refused(TypeError, "complex", update, 0, np.zeros((3, 5), complex))
    refused(TypeError, "float32 or float64, got float16", lambda: Accumulator(S, dtype="float16"))
    refused(TypeError, "needs a Sketch, got int", Accumulator, 3)
    refused(TypeError, r"shape must be a sequence of integers, such as \(5,\), got 5", Accumulator, S, 5)
    refused(TypeError, "merges with another, got int", accumulator.merge, 3)
    refused(ValueError, "accumulators differ", accumulator.merge, Accumulator(Sketch(500, 40, nnz=4, seed=4), (3,)))
    refused(ValueError, "accumulators differ", accumulator.merge, Accumulator(S, (3,), dtype="float32"))
    assert list(accumulator.seen) == [(100, 200)]
    assert np.array_equal(accumulator.sum, S[:, 100:200].project(X[:, 100:200]))

    state = accumulator.state_dict()
    bad = [("format", 2), ("format", True), ("shape", [4]), ("shape", [3.0]), ("sketch", {})]
    bad += [("ranges", ranges) for ranges in ([[0, 501]], [[0, 10.5]], [[0.0, 10]], [[False, 10]], [["0", "10"]])]
    bad += [("sum", total) for total in ("none", np.ma.array(state["sum"]), torch.zeros(3, 40).to_sparse())]
    for name, value in bad:
        refused(ValueError, "not the state of an Accumulator", Accumulator.from_state_dict, {**state, name: value})
    refused(ValueError, "added before", Accumulator.from_state_dict, {**state, "ranges": [[0, 10], [5, 15]]})
    path = tmp_path / "sum.npz"
    accumulator.save(path)
    whole = path.read_bytes()
    for content in (b"", whole[: len(whole) // 2], json.dumps({"format": 1}).encode()):
        path.write_bytes(content)
        refused(ValueError, "not a file that Accumulator.save wrote", Accumulator.load, path)
    refused(FileNotFoundError, "absent", Accumulator.load, tmp_path / "absent")


def test_a_link_to_a_file_is_kept(tmp_path):
    path, link = tmp_path / "real", tmp_path / "link"
    a = Accumulator(S, (3,))
    a.save(path)
    link.symlink_to(path)
    a.update(0, X)
    a.save(link)
    assert link.is_symlink()
    np.testing.assert_array_equal(Accumulator.load(path).sum, a.sum)


def test_tensors_that_require_a_gradient_and_other_devices():
    a, x = Accumulator(S, (3,), device="cpu"), torch.from_numpy(X).requires_grad_()
    a.update(0, x)
    np.testing.assert_allclose(a.sum.numpy(), X @ S.T, rtol=1e-12)
    with pytest.raises(ValueError, match="the sum is on cpu, the block on meta"):
        Accumulator(S, (3,), device="cpu").update(0, torch.empty(3, 500, device="meta"))
