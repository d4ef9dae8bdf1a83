"""An interrupt is handled within half a second, however large the product.

The inputs are far too large to be multiplied here; most are one element in memory, repeated by strides of 0.
"""

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from helpers.cases import exhaustive_except
from helpers.looks import longest_between_looks

import sjlt
from sjlt import Sketch

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")  # torch's
SECONDS = 1.0


@pytest.fixture(autouse=True)
def _one_thread(restored_num_threads):
    """Do all work on the main thread. (Steps are no longer with more threads.)"""
    sjlt.set_num_threads(1)


def dense(S, n, dtype="f4", columns=False):
    x = np.broadcast_to(np.ones((), dtype), (n, S.n_features))
    if columns:
        x = np.broadcast_to(np.ones((), dtype), (S.n_features, n)).T
    return lambda: S.project(x)


def adjoint(S, n, dtype="f4"):
    y = np.broadcast_to(np.ones((), dtype), (n, S.n_components))
    out = np.full((n, S.n_features), 1.0, "f4")  # memory already in use, so that clearing pages is not counted
    return lambda: S.project_adjoint(y, out=out)


def csr(n, d, each, index="i4"):
    columns = np.tile(np.arange(each, dtype=index) * (d // each), n)
    return sp.csr_array((np.ones(n * each, "f4"), columns, np.arange(0, n * each + 1, each, index)), shape=(n, d))


def csc(n, d, each):
    return csr(d, n, each).T


def sparse(S, x):
    return lambda: S.project(x)


def to_sparse(S, x):
    return lambda: S.project(x, dense_output=False)


def torch_csr(x):
    parts = (torch.from_numpy(a) for a in (x.indptr.astype("i8"), x.indices.astype("i8"), x.data))
    return torch.sparse_csr_tensor(*parts, x.shape, check_invariants=True)


def mixed(x):
    """CSR with indices of two dtypes."""
    x.indptr = x.indptr.astype("i8")
    return x


CASES = {
    "dense": lambda: dense(Sketch(2**31, 1000, nnz=8), 500),
    "dense, one component": lambda: dense(Sketch(2**31, 1), 5000),
    "dense, most components": lambda: dense(Sketch(2**26, 65536, nnz=64), 5000),
    "dense, most nonzeros": lambda: dense(Sketch(2**31, 128, nnz=128), 5000, "f8"),
    "dense, fp16": lambda: dense(Sketch(2**31, 1000, nnz=8), 500, "f2"),
    "dense, another byte order": lambda: dense(Sketch(2**31, 1000, nnz=8), 500, ">f4"),
    "dense, integers": lambda: dense(Sketch(2**31, 1000, nnz=8), 500, "i1"),
    "dense, columns": lambda: dense(Sketch(2**26, 64, nnz=8), 5000, columns=True),
    "dense, many rows": lambda: dense(Sketch(64, 64, nnz=8), 2**21),
    "dense, many rows by component": lambda: dense(Sketch(4000, 200, nnz=4), 2**19),
    "dense, stacks": lambda: dense(Sketch(2**31, 1024, nnz=8, stacks=4), 500),
    "few rows": lambda: dense(Sketch(2**33, 1000, nnz=8), 3),
    "few rows, most nonzeros": lambda: dense(Sketch(2**33, 65536, nnz=128), 31, "f8"),
    "few rows, stacks": lambda: dense(Sketch(2**33, 1024, nnz=8, stacks=8), 3),
    "adjoint": lambda: adjoint(Sketch(2**19, 1000, nnz=8), 200),
    "adjoint, most nonzeros": lambda: adjoint(Sketch(2**20, 65536, nnz=128), 32, "f8"),
    "adjoint, few rows": lambda: adjoint(Sketch(2**25, 1000, nnz=64), 3),
    "adjoint, stacks": lambda: adjoint(Sketch(2**19, 1024, nnz=8, stacks=4), 200),
    "CSR": lambda: sparse(Sketch(2**20, 1000, nnz=8), csr(20_000, 2**20, 500)),
    "CSR, most nonzeros": lambda: sparse(Sketch(2**20, 1024, nnz=128), csr(20_000, 2**20, 500)),
    "CSR, a long row": lambda: sparse(Sketch(2**40, 64, nnz=16), csr(1, 2**40, 10**7, "i8")),
    "CSR, empty rows": lambda: sparse(Sketch(2**20, 64), sp.csr_array((2**21, 2**20), dtype="f4")),
    "CSR, mixed indices": lambda: sparse(Sketch(2**20, 100), mixed(csr(20_000, 2**20, 500))),
    "CSR, stacks": lambda: sparse(Sketch(2**20, 1024, nnz=8, stacks=4), csr(20_000, 2**20, 500)),
    "CSR of torch": lambda: sparse(Sketch(2**20, 1000, nnz=8), torch_csr(csr(20_000, 2**20, 500))),
    "CSR to CSR": lambda: to_sparse(Sketch(2**20, 1000, nnz=8), csr(20_000, 2**20, 500)),
    "CSR to CSR, a long row": lambda: to_sparse(Sketch(2**40, 64, nnz=16), csr(1, 2**40, 10**7, "i8")),
    "CSC": lambda: sparse(Sketch(2**18, 1000, nnz=8), csc(20_000, 2**18, 50)),
    "CSC, a long column": lambda: sparse(Sketch(4, 8, nnz=8), csc(2**23, 4, 2**23)),
    "CSC, empty columns": lambda: sparse(Sketch(10**8, 64, nnz=8), sp.csc_array((1, 10**8), dtype="f4")),
    "independent entries": lambda: dense(Sketch(2**30, 128, density=0.3), 64),
    "independent entries, most components": lambda: dense(Sketch(2**30, 65536, density=0.3), 64),
    "independent entries, many rows": lambda: dense(Sketch(64, 128, density=0.3), 2**20),
    "independent entries, one row": lambda: dense(Sketch(2**33, 128, density=0.3), 1),
    "independent entries, few": lambda: dense(Sketch(2**33, 1024, density=0.0001), 64),
    "independent entries, integers": lambda: dense(Sketch(2**30, 128, density=0.3), 3, "i1"),
    "independent entries, another byte order": lambda: dense(Sketch(2**30, 128, density=0.3), 3, ">f4"),
    "independent entries, adjoint": lambda: adjoint(Sketch(2**19, 1000, density=0.3), 200),
    "independent entries, CSR": lambda: sparse(Sketch(2**20, 1000, density=0.01), csr(20_000, 2**20, 500)),
    "independent entries, a table": lambda: sparse(Sketch(2**12, 1000, density=0.01), csr(20_000, 2**12, 500)),
    "independent entries, a long row": lambda: sparse(Sketch(2**40, 64, density=0.3), csr(1, 2**40, 10**7, "i8")),
    "independent entries, CSC": lambda: sparse(Sketch(2**18, 1000, density=0.01), csc(20_000, 2**18, 50)),
    "independent entries, CSR to CSR": lambda: to_sparse(Sketch(2**20, 1000, density=0.01), csr(20_000, 2**20, 500)),
    "a tensor": lambda: lambda: Sketch(2**31, 1000, nnz=8).project(torch.ones(()).expand(500, 2**31)),
    "a tensor of bf16": lambda: (
        lambda: Sketch(2**31, 100).project(torch.ones(1, dtype=torch.bfloat16).expand(9, 2**31))
    ),
    "entries": lambda: Sketch(2**25, 1000, nnz=8).entries,
    "to_scipy": lambda: Sketch(2**23, 1000, nnz=8).to_scipy,
    "to_scipy, independent entries": lambda: Sketch(2**20, 1000, density=0.01).to_scipy,
    "dropout": lambda: lambda: sjlt.dropout(np.broadcast_to(np.float32(1), 2**28), 0.5, 1),
    "dropout, columns": lambda: lambda: sjlt.dropout(np.broadcast_to(np.float32(1), (2**14, 2**14)).T, 0.5, 1),
}
DEFAULT = ["independent entries", "few rows"]


@pytest.mark.parametrize("case", exhaustive_except(DEFAULT, list(CASES)))
def test_interrupts_are_checked_every_half_second(case):
    call = CASES[case]()
    longest, looks = longest_between_looks(call, SECONDS)
    assert looks > 1
    assert longest < 0.5
