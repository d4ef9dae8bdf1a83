"""Sketches and objects with sketches, copied, pickled, and used in other processes, DataLoader workers and threads."""

import copy
import io
import multiprocessing
import pickle
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.cases import exhaustive_except
from helpers.products import normal
from torch.utils.data import DataLoader, Dataset

from sjlt import Sketch

S = Sketch(300, 20, nnz=3, seed=2**64 - 3)
PART = S[:, 7:57]


class Projected(torch.nn.Module):
    def __init__(self, sketch):
        super().__init__()
        self.linear, self.sketch = torch.nn.Linear(9, sketch.n_features), sketch

    def forward(self, x):
        return self.linear(x) @ self.sketch.T


class ProjectedRows(Dataset):
    """Rows projected when read, some with the gradient of their squared length."""

    def __init__(self, sketch, x, gradients):
        self.sketch, self.x, self.gradients = sketch, x, gradients

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        y = self.x[i] @ self.sketch.T
        if not self.gradients:
            return y
        row = self.x[i].requires_grad_()
        return torch.cat([y, torch.autograd.grad((row @ self.sketch.T).square().sum(), row)[0]])


def answer(module, x):
    """Run a module on a tensor in another process, including the gradient."""
    x.requires_grad_()
    y = module(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    return y.detach().numpy(), gradient.numpy()


@pytest.mark.parametrize("sketch", [S, PART], ids=["whole", "slice"])
def test_copies(device, sketch):
    model = Projected(sketch).to(device)
    x = normal(device, 4, 9)
    expected = model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    expected.square().sum().backward()
    optimizer.step()
    for other in copies:  # copies do not share parameters
        assert other.sketch == sketch
        assert torch.equal(other(x), expected)
    for again in (copy.deepcopy(sketch), copy.copy(sketch), pickle.loads(pickle.dumps(sketch))):
        assert (again, hash(again), again.spec) == (sketch, hash(sketch), sketch.spec)
        assert copy.deepcopy(again.T) == sketch.T


def test_copies_of_results_and_gradients(device):
    x = normal(device, 4, 300, requires_grad=True)
    y = x @ S.T
    assert torch.equal(pickle.loads(pickle.dumps(y.detach())), y)
    with pytest.raises(RuntimeError, match="deepcopy"):  # as for every non-leaf tensor
        copy.deepcopy(y)


@pytest.mark.parametrize("method", exhaustive_except(["fork"], ["fork", "spawn"]))
def test_data_loader_workers(method):
    """Before a fork the parent has projected, so its threads are missing in the workers.

    torch refuses backward passes after a fork, in which its own threads are missing.
    """
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip("a way of starting that this system lacks")
    x = normal("cpu", 12, 300)
    expected = x @ S.T
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)  # raised by Python for any fork
        loader = DataLoader(
            ProjectedRows(S, x, gradients=method == "spawn"),
            batch_size=4,
            num_workers=2 if method == "fork" else 1,
            multiprocessing_context=method,
        )
        batches = torch.cat(list(loader))
    assert torch.equal(batches[:, :20], expected)
    if method == "spawn":
        assert torch.equal(batches[:, 20:], 2 * (expected @ S))


@pytest.mark.exhaustive
def test_another_process():
    module = Projected(PART)
    x = normal("cpu", 4, 9)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        y, gradient = pool.apply(answer, (module, x))
    here = answer(module, x)
    assert (y == here[0]).all()
    assert (gradient == here[1]).all()


def test_threads(device):
    """Concurrent calls and backward passes of several threads."""
    x = normal(device, 8, 300)
    expected = x @ S.T, 2 * (x @ S.T @ S)

    def run(_):
        leaf = x.clone().requires_grad_()
        y = leaf @ S.T
        return y.detach(), torch.autograd.grad(y.square().sum(), leaf)[0]

    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(run, range(32)):
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


# --------------------------------------------------------------------------------- first calls

FIRST_CALLS = {  # calls that import what tensors need
    "compiled": """
faster = torch.compile(lambda x: x @ S.T, fullgraph=True, backend="aot_eager")
print([tuple(faster(torch.ones(3, 50)).shape)])
""",
    "by many threads": """
with ThreadPoolExecutor(30) as pool:
    print(list({tuple(y.shape) for y in pool.map(lambda _: S.project(torch.ones(3, 50)), range(30))}))
""",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("call", FIRST_CALLS)
def test_first_call_of_a_process(call):
    program = f"""
import torch
from concurrent.futures import ThreadPoolExecutor
from sjlt import Sketch
S = Sketch(50, 20)
{FIRST_CALLS[call]}"""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout == "[(3, 20)]\n"
