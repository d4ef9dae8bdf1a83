"""16-bit products with a dense matrix of the entries, which torch multiplies."""

import math

import pytest
import torch
from helpers.cases import exhaustive_except
from helpers.choices import DENSE_MATRICES, H200, HOPPER, changed_choices, exact_product, forget_choices
from helpers.kernels import FLOATS, adjoint, check_adjoint, check_project, project

from sjlt import Sketch
from sjlt.backends import triton_backend
from sjlt.backends.triton import dense_matrix as backend
from sjlt.kernels.config import dense_matrix
from sjlt.kernels.config.dense_matrix import DenseMatrix
from sjlt.kernels.config.exact import choose


@pytest.fixture
def launches(monkeypatch):
    """Record whether each prepared product is an adjoint; whatever torch can compute is eligible."""
    launches, prepare = [], backend.prepare

    def record(*arguments, adjoint):
        launches.append(adjoint)
        return prepare(*arguments, adjoint=adjoint)

    with changed_choices(DENSE_MATRICES):
        monkeypatch.setattr(backend, "prepare", record)
        yield launches


def check_both(S, n, dtype, device, launches, layouts=("rows", "rows")):
    forget_choices()
    launches.clear()
    check_project(S, n, dtype, dtype, device, *layouts)
    check_adjoint(S, n, dtype, dtype, device, *layouts)
    assert launches == ([False, True] if S.n_components <= 128 else [True])


SKETCHES = [(8, 1), (64, 8), (128, 4), (136, 3), (264, 32), (1000, 5), (1024, 2)]
CASES = [  # every sketch in both dtypes, cycling through the other parameters
    (k, nnz, dtype, (2, 33, 130)[(i + j) % 3], (8, 72, 200)[(i + 2 * j) % 3], (0, 5, 2**33 + 7)[i % 3])
    for i, (k, nnz) in enumerate(SKETCHES)
    for j, dtype in enumerate(("float16", "bfloat16"))
]


@pytest.mark.parametrize("case", exhaustive_except(CASES[:6:2] + CASES[-1:], CASES), ids=str)
def test_products_are_exact(kernels_on, launches, case):
    k, nnz, dtype, n, d, offset = case
    S = Sketch(2**40, k, nnz=nnz, seed=2**63 + k)[:, offset : offset + d]
    check_both(S, n, dtype, kernels_on, launches)


@pytest.mark.parametrize("data", ["rows", "columns", "aligned part", "padded rows"])
@pytest.mark.parametrize("result", ["rows", "padded rows"])
def test_layouts(kernels_on, launches, data, result):
    check_both(Sketch(96, 48, nnz=4, seed=1), 40, "bfloat16", kernels_on, launches, (data, result))


A100 = H200._replace(asynchronous_copies=True, programmatic_launch=False)
POSSIBLE_PRODUCT = exact_product(1 << 16, 768, 104, nnz=4, dtype="bfloat16", device=A100)._replace(matmul=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"matmul": False},
        {"dtype": "float32"},
        {"plain": False},
        {"stacks": 2},
        {"nnz": 33},
        {"k": 200, "y_strides": (200, 1)},  # two tiles
        {"k": 103},
        {"d": 767, "x_strides": (768, 1)},
        {"x_strides": (772, 1)},
        {"x_strides": (1, (1 << 16) - 1), "n": (1 << 16) - 1},
        {"x_strides": (1536, 2)},
        {"y_strides": (1, 1 << 16)},  # a transposed result
        {"d": 1 << 17, "x_strides": (1 << 17, 1)},  # too long a sum
        {"d": 1 << 20, "x_strides": (1 << 20, 1), "adjoint": True},  # too large a matrix
        {"x_strides": (8, 1)},  # overlapping rows
        {"x_strides": (1, (1 << 16) + 8), "n": (1 << 16) - 2},  # lines that end within 16 bytes
        {"x_strides": (1, 8)},
    ],
    ids=str,
)
def test_products_that_torch_does_not_compute(changes):
    product = POSSIBLE_PRODUCT
    assert isinstance(choose(product), DenseMatrix)
    assert isinstance(choose(product._replace(x_strides=(1, 1 << 16))), DenseMatrix)
    product = product._replace(**changes)
    assert not dense_matrix.is_possible(product)
    assert not isinstance(choose(product), DenseMatrix)


@pytest.mark.parametrize(
    ("changes", "hopper", "others"),
    [
        ({}, False, True),
        ({"k": 16, "nnz": 1}, False, True),
        ({"k": 200}, False, False),  # several tiles
        ({"k": 128}, False, True),  # a power-of-two geometry
        ({"k": 128, "n": 1 << 15}, False, False),
        ({"k": 128, "nnz": 8}, False, True),
        ({"k": 128, "nnz": 8, "n": 1 << 19}, True, True),
        ({"k": 128, "nnz": 8, "n": 1 << 19, "x_strides": (1, 1 << 19)}, False, True),
        ({"n": 1 << 13}, False, False),  # little data
        ({"d": 1536, "k": 128, "adjoint": True}, True, True),
        ({"d": 1536, "k": 32, "adjoint": True}, False, False),
        ({"d": 1536, "k": 128, "nnz": 3, "adjoint": True}, False, False),
        ({"d": 64, "k": 1024, "nnz": 8, "n": 1 << 20, "adjoint": True}, False, False),  # many components
        ({"n": 560, "d": 60_000, "k": 240, "nnz": 8, "adjoint": True}, False, False),  # a large matrix
        ({"n": 256, "d": 1 << 17, "k": 120, "nnz": 1}, False, False),
        ({"d": 1000, "k": 128, "adjoint": True}, False, False),  # rows begin within sectors
        ({"d": 1000, "k": 128, "nnz": 8, "adjoint": True}, True, True),
        ({"d": 1536, "k": 240, "nnz": 8, "adjoint": True}, True, True),
        ({"d": 1536, "k": 240, "nnz": 4, "adjoint": True}, False, False),
    ],
    ids=str,
)
def test_choice(changes, hopper, others):
    for device, expected in ((HOPPER, hopper), (A100, others)):
        product = exact_product(**{"n": 1 << 16, "d": 768, "k": 104, "dtype": "float16", "device": device} | changes)
        assert isinstance(choose(product._replace(matmul=True)), DenseMatrix) == expected
    other = exact_product(**{"n": 1 << 16, "d": 768, "k": 104, "dtype": "float16"} | changes)  # AMD, or too old
    assert not isinstance(choose(other._replace(matmul=True)), DenseMatrix)


def test_deterministic_algorithms(kernels_on, launches, monkeypatch):
    """Torch may refuse to multiply matrices if it must be deterministic: calls made before do not matter then."""
    S, addmm, calls = Sketch(96, 48, nnz=4, seed=1), torch.addmm, []

    def record(*arguments, **options):
        calls.append(arguments)
        return addmm(*arguments, **options)

    monkeypatch.setattr(torch, "addmm", record)
    forget_choices()
    for deterministic in (False, True, False):
        calls.clear()
        torch.use_deterministic_algorithms(deterministic)
        try:
            check_project(S, 40, "bfloat16", "bfloat16", kernels_on)
            check_adjoint(S, 40, "bfloat16", "bfloat16", kernels_on)
        finally:
            torch.use_deterministic_algorithms(False)
        assert bool(calls) != deterministic


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fails", [False, True])
def test_sums_are_complete_before_they_are_rounded(kernels_on, launches, monkeypatch, dtype, fails):
    """Torch's settings that allow less hold for its other products, whether or not this one raises an error."""
    matmul, names = torch.backends.cuda.matmul, backend.ROUNDED_SUMS[FLOATS[dtype]]
    before = {name: getattr(matmul, name) for name in names}
    seen, addmm = [], torch.addmm

    def record(*arguments, **options):
        seen.append([getattr(matmul, name) for name in names])
        if fails:
            raise RuntimeError("no memory")
        return addmm(*arguments, **options)

    monkeypatch.setattr(torch, "addmm", record)
    try:
        for name in names:
            setattr(matmul, name, True)
        if fails:
            with pytest.raises(RuntimeError, match="no memory"):
                check_project(Sketch(96, 48, seed=1), 40, dtype, dtype, kernels_on)
        else:
            check_project(Sketch(96, 48, seed=1), 40, dtype, dtype, kernels_on)
        assert all(getattr(matmul, name) for name in names)
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)
    assert seen
    assert not any(any(allowed) for allowed in seen)
    monkeypatch.setattr(torch, "addmm", addmm)
    check_both(Sketch(96, 48, nnz=4, seed=1), 40, dtype, kernels_on, launches)  # after an error, too


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_elements_stay_in_their_vector(kernels_on, launches, value):
    S = Sketch(96, 48, nnz=4, seed=1)
    for product, width, out_width in ((project, 96, 48), (adjoint, 48, 96)):
        x = torch.ones(40, width, dtype=torch.bfloat16, device=kernels_on)
        x[7, 5] = value
        out = torch.zeros(40, out_width, dtype=torch.bfloat16, device=kernels_on)
        product(S, x, out)
        reached = torch.from_numpy(S.toarray() if product is project else S.toarray().T)[:, 5] != 0
        assert not out[7, reached.to(out.device)].isfinite().any()
        assert out[torch.arange(40) != 7].isfinite().all()
    assert launches == [False, True]


def test_transposed_tensors(kernels_on, launches):
    """The tensors of S A and S' B, whose vectors are columns, may be views of contiguous rows."""
    S, backend_of_law = Sketch(96, 48, nnz=4, seed=1), triton_backend(Sketch(96, 48).spec)
    matrix = torch.from_numpy(S.toarray()).to(kernels_on)
    for product, factor in ((backend_of_law.project, matrix), (backend_of_law.adjoint, matrix.t())):
        a = torch.randint(-2, 3, (40, factor.shape[1]), device=kernels_on).to(torch.bfloat16).t()
        out = torch.full((40, factor.shape[0]), math.nan, dtype=torch.bfloat16, device=kernels_on).t()
        product(S.spec, a, out, False, 0)
        assert torch.equal(out.double(), factor @ a.double())
    assert launches == [False, True]


def test_inference_tensors(kernels_on, launches):
    """Results may be inference tensors, in and outside of inference mode, as with other kernels."""
    S, x = Sketch(96, 48, nnz=4, seed=1), torch.ones(40, 96, dtype=torch.bfloat16, device=kernels_on)
    with torch.inference_mode():
        out = torch.zeros(40, 48, dtype=torch.bfloat16, device=kernels_on)
        project(S, x, out)
        first = out.clone()
        out.zero_()
    project(S, x, out)
    assert torch.equal(first, out)
    assert launches == [False]


def test_first_call_multiplies_once(kernels_on, launches, monkeypatch):
    """A new call is made twice, but the first time only for its kernels to be compiled."""
    addmm, calls = torch.addmm, []
    monkeypatch.setattr(torch, "addmm", lambda *a, **options: calls.append(a) or addmm(*a, **options))
    forget_choices()
    check_project(Sketch(96, 48, nnz=4, seed=1), 40, "bfloat16", "bfloat16", kernels_on)
    assert len(calls) == len(launches) == 1
