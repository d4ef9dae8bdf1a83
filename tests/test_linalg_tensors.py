"""The code for CUDA tensors, run on CPU tensors, is as accurate as the code for arrays."""

import os

import numpy as np
import pytest
import torch
from helpers.cases import each_value, exhaustive_except
from helpers.matrices import backward_error, orthonormal

from sjlt import Sketch
from sjlt.backends.triton import residual, tall_product
from sjlt.linalg import containers, cuda_matrix, least_squares, lstsq, svd_lowrank, tensor_products
from sjlt.linalg import matrix as matrix_module
from sjlt.linalg.cholesky_qr import cholesky_qr
from sjlt.linalg.cuda_matrix import CudaMatrix
from sjlt.linalg.matrix import DenseMatrix
from sjlt.linalg.sums import Gram
from sjlt.linalg.triangular import MIN_SUM_SHIFT, r_factor, reduced_qr, shifted_factor
from sjlt.linalg.whitening import Whitening

SHAPES = [(40, 5), (300, 24), (1024, 150)]


@pytest.fixture
def as_cuda(monkeypatch):
    def tensor_matrix(a, progress=None):
        return CudaMatrix(torch.from_numpy(a), progress)

    monkeypatch.setattr(containers, "DenseMatrix", tensor_matrix)
    monkeypatch.setattr(cuda_matrix, "GPU_BYTES", 8000 * 30)


@pytest.mark.parametrize("n", [1, 3, 127, 128, 300, 600])
@pytest.mark.parametrize("least", [0, tensor_products.MIN_PRODUCTS], ids=["blocks", "whole"])
def test_gram_matrices_by_blocks_of_columns(n, least, monkeypatch):
    """Sums of integers are exact."""
    monkeypatch.setattr(tensor_products, "MIN_PRODUCTS", least)
    rng = np.random.default_rng(n)
    A, W = rng.integers(-8, 9, (700, n)).astype(float), rng.integers(-8, 9, (n, n)).astype(float)
    for basis, is_triangular in ((None, False), (W, False), (np.triu(W), True)):
        total = Gram(None if basis is None else torch.from_numpy(basis), is_triangular)
        for start in (0, 400):
            total.add(start, torch.from_numpy(A)[start : start + 400])
        product = A if basis is None else A @ basis
        np.testing.assert_array_equal(total.value, product.T @ product)


# ------------------------------------------------------------------------------------- gradients in one read of A


WITH_GAPS = [(301, 37, 3), (1, 1, 0), (2000, 512, 0), (5, 4096, 1)]  # (m, n, elements between rows)


@pytest.mark.parametrize("layout", exhaustive_except(WITH_GAPS[:2], WITH_GAPS))
def test_gradients_in_one_read_are_exact(kernels_on, layout):
    """Sums of integers are exact, for any number of rows per block and per program, and gaps are not read."""
    m, n, gap = layout
    rng = np.random.default_rng(n)
    memory = torch.full((m, n + gap), torch.nan, dtype=torch.float64, device=kernels_on)
    A, x, b = (
        torch.from_numpy(rng.integers(-8, 9, shape).astype(float)).to(kernels_on) for shape in ((m, n), (n, 1), (m, 2))
    )
    memory[:, :n] = A
    right = b[:, 1:]
    gradient, squares = residual.residual_gradient(memory[:, :n], x, right)
    exact = right - A @ x
    assert torch.equal(gradient, A.T @ exact)
    assert torch.equal(squares, (exact * exact).sum(0))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels are compiled in this process")
@pytest.mark.parametrize("method", ["cg", "passes"])
def test_least_squares_with_gradients_in_one_read(as_cuda, monkeypatch, method):
    made = []

    def recorded(a, x):
        made.append(x.shape)
        return x.shape[1] == 1

    monkeypatch.setattr(residual, "eligible", recorded)
    rng = np.random.default_rng(0)
    A = orthonormal(rng, 1200, 15) * np.geomspace(1, 1e-8, 15) @ orthonormal(rng, 15, 15).T
    b = rng.standard_normal(1200)
    solution = lstsq(A, b, method=method)
    assert made
    assert solution.backward_error < 1e-16
    assert backward_error(A, b, np.asarray(solution.x)) < 2e-16


@pytest.mark.gpu
@pytest.mark.parametrize("condition", [1e2, 1e10])
@pytest.mark.parametrize("n", [130, 1500])
def test_large_problems_on_a_gpu(n, condition):
    """Sizes at which the kernel is used by itself."""
    rng = np.random.default_rng(n)
    A = orthonormal(rng, 20_000, n) * np.geomspace(1, 1 / condition, n) @ orthonormal(rng, n, n).T
    b = rng.standard_normal(20_000)
    for method in ("cg", "passes"):
        assert residual.eligible(torch.from_numpy(A).cuda(), torch.zeros((n, 1), device="cuda"))
        solution = lstsq(torch.from_numpy(A).cuda(), b, method=method)
        assert backward_error(A, b, solution.x.cpu().numpy()) < 2e-16


# ------------------------------------------------------------------------------------- Cholesky QR


def check_qr(A, Q, R):
    """Check that A = Q R column by column and Q is orthonormal, up to rounding."""
    scales = np.abs(A).max(0)
    np.testing.assert_allclose(Q @ (R / scales), A / scales, atol=1e-14)
    np.testing.assert_allclose(Q.T @ Q, np.eye(A.shape[1]), atol=1e-14)
    np.testing.assert_array_equal(np.tril(R, -1), 0)


@pytest.mark.parametrize("shape", exhaustive_except(SHAPES[:2], SHAPES))
@pytest.mark.parametrize("are_scaled", [False, True])
def test_cholesky_qr_at_any_condition_number(shape, are_scaled):
    rng = np.random.default_rng(0)
    m, n = shape
    for digits in range(17):
        A = orthonormal(rng, m, n) * np.geomspace(1, 10.0**-digits, n) @ orthonormal(rng, n, n).T
        A = A * 10.0 ** rng.integers(-150, 151, n) if are_scaled else A
        tensor = torch.from_numpy(A)
        assert cholesky_qr(torch, tensor) is not None or digits >= 13
        check_qr(A, *(factor.numpy() for factor in reduced_qr(torch, tensor)))


@pytest.mark.parametrize("shape", SHAPES)
def test_rank_deficient_matrices_are_left_to_householder(shape):
    rng = np.random.default_rng(0)
    m, n = shape
    A = rng.standard_normal((m, n))
    zero_column, twice, dependent, infinite = A.copy(), A.copy(), A.copy(), A.copy()
    zero_column[:, 2] = 0
    twice[:, 2] = A[:, 0]
    dependent[:, 2] = 1e-5 * A[:, 0] + A[:, 1]
    infinite[3, 1] = np.inf
    low_rank = rng.standard_normal((m, n - 1)) @ rng.standard_normal((n - 1, n))
    outer = np.outer(rng.standard_normal(m), rng.standard_normal(n))
    for deficient in (zero_column, twice, dependent, infinite, low_rank, outer, np.ones((m, n)), np.zeros((m, n)), A.T):
        assert cholesky_qr(torch, torch.from_numpy(deficient)) is None


@pytest.mark.parametrize("condition", [1, 1e6, 1e10, 1e16])
@pytest.mark.parametrize("shape", [*SHAPES, (5, 40)])
def test_the_r_factor_of_some_columns_agrees_with_numpy(shape, condition):
    """Up to the signs of its rows. The last columns lie in the span of the first, as in a consistent problem."""
    rng = np.random.default_rng(0)
    m, n = shape
    A = rng.standard_normal((m, n)) * np.geomspace(1, 1 / condition, n)
    A = np.concatenate([A, A @ rng.standard_normal((n, 2))], 1)
    R, expected = r_factor(torch, torch.from_numpy(A.copy()), n).numpy(), r_factor(np, A.copy(), n)
    assert R.shape == expected.shape == (min(m, n), n + 2)
    signs = np.sign(np.diagonal(R)) * np.sign(np.diagonal(expected))
    norms = np.linalg.norm(A, axis=0)
    np.testing.assert_allclose(signs[:, None] * R / norms, expected / norms, atol=1e-12)


# ------------------------------------------------------------------------------------- shifted factors


@pytest.mark.parametrize("digits", [0, 3, 6, 9, 12])
def test_shifted_norms_agree_with_qr(digits):
    """Shifts and condition numbers that select each of the three ways, for several kinds of gradients."""
    rng = np.random.default_rng(digits)
    n = 40
    U, V = orthonormal(rng, n, n), orthonormal(rng, n, n)
    for sigma in (np.geomspace(1, 10.0**-digits, n), np.r_[np.ones(n - 1), 10.0**-digits]):
        R = np.linalg.qr(U * sigma @ V.T)[1]
        whitening = Whitening.triangular(torch, torch.from_numpy(R))
        z = rng.standard_normal(n)
        G = np.stack([z, R.T @ z, R.T @ (R @ z), V[:, 0], V[:, -1]], 1)
        for eta in 10.0 ** np.arange(-16, 1):
            factor = np.linalg.qr(np.concatenate([R, eta * np.eye(n)]), mode="r")
            expected = np.linalg.norm(np.linalg.solve(factor.T, G), axis=0)
            for j in range(G.shape[1]):
                g, zero = torch.from_numpy(G[:, j : j + 1]), np.zeros(1)
                found = whitening.weighted_norms(g, zero, zero + eta, zero)
                assert expected[j] * (1 - 1e-3) <= float(found[0]) <= expected[j] * 1.1


@pytest.mark.parametrize("eta", [1e-9, MIN_SUM_SHIFT / 2, 2 * MIN_SUM_SHIFT, 1.0])
def test_shifted_factors(eta):
    R = np.triu(np.random.default_rng(0).standard_normal((30, 30)))
    R /= np.linalg.norm(R)
    factor = shifted_factor(torch, torch.from_numpy(R), eta).numpy()
    np.testing.assert_allclose(factor.T @ factor, R.T @ R + eta**2 * np.eye(30), atol=1e-15)


# ------------------------------------------------------------------------------------- passes in A's own dtype


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_passes_agree_with_those_over_arrays(as_cuda, dtype):
    rng = np.random.default_rng(0)
    A, V = rng.standard_normal((2500, 30)).astype(dtype), rng.standard_normal((30, 70))
    S, omega = Sketch(2500, 64, stacks=4), Sketch(30, 12, stacks=4)
    tensor, array = CudaMatrix(torch.from_numpy(A)), DenseMatrix(A)
    expected = [array.quick_sketch(S), array.project(omega), array.times(V), array.normal_times(V)]
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    found = [tensor.quick_sketch(S), tensor.project(omega), tensor.times(torch.from_numpy(V))]
    found.append(tensor.normal_times(torch.from_numpy(V)))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float64
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max())
    assert tensor.passes == array.passes == 4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("reason", ["precision", "autocast"])
def test_float32_products_of_reduced_precision_are_not_used(device, reason):
    rng = np.random.default_rng(0)
    A, V = rng.standard_normal((2500, 30)).astype(np.float32), rng.standard_normal((30, 70))
    matrix, wide = CudaMatrix(torch.from_numpy(A).to(device)), A.astype(np.float64)
    S, before = Sketch(2500, 64, stacks=4), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high" if reason == "precision" else before)
        with torch.autocast(device, torch.bfloat16, enabled=reason == "autocast"):
            assert not matrix.keeps_precision()
            Vs = torch.from_numpy(V).to(device)
            found = matrix.quick_sketch(S), matrix.times(Vs), matrix.normal_times(Vs)
    finally:
        torch.set_float32_matmul_precision(before)
    for a, b in zip(found, (S.project(wide.T).T, wide @ V, wide.T @ (wide @ V)), strict=True):
        np.testing.assert_allclose(a.cpu(), b, atol=1e-12 * np.abs(b).max())


@each_value(dtype=["float32", "float64"], n_iter=[0, 1, 2])
def test_low_rank_factors_agree_with_those_of_arrays(dtype, n_iter):
    """Singular values that decay slowly, quickly, and to 0; the signs of singular vectors are arbitrary."""
    rng = np.random.default_rng(0)
    for sigma in (1 / np.arange(1, 81.0), 10.0 ** -(np.arange(80) / 8), np.arange(80) < 5, np.zeros(80)):
        A = (orthonormal(rng, 1500, 80) * sigma @ orthonormal(rng, 80, 80).T).astype(dtype)
        expected = svd_lowrank(A, 10, n_iter=n_iter)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(containers, "DenseMatrix", lambda a, progress=None: CudaMatrix(torch.from_numpy(a), progress))
            U, s, Vh = (factor.numpy() for factor in svd_lowrank(A, 10, n_iter=n_iter))
        tolerance = 1e-5 if dtype == "float32" else 1e-11
        np.testing.assert_allclose(s, expected[1], atol=tolerance)
        np.testing.assert_allclose((U * s) @ Vh, (expected[0] * expected[1]) @ expected[2], atol=tolerance)
        np.testing.assert_allclose(U.T @ U, np.eye(10), atol=1e-12)
        np.testing.assert_allclose(Vh @ Vh.T, np.eye(10), atol=1e-12)


@pytest.mark.parametrize("n_iter", [0, 1, 2])
def test_float32_data_near_the_largest(as_cuda, n_iter):
    """If float32 sums overflow, the error is the same as for arrays."""
    A = np.zeros((3000, 40))
    A[:, 7] = np.finfo(np.float32).max
    U, s, Vh = svd_lowrank((A / 100).astype(np.float32), 5, n_iter=n_iter)
    np.testing.assert_allclose((U * s) @ Vh, A / 100, atol=1e-5 * A.max())
    with pytest.raises(ValueError, match="too close to the largest float32"):
        svd_lowrank((0.9 * A).astype(np.float32), 5, n_iter=n_iter)


# ------------------------------------------------------------------------------------- products in TF32 parts


@pytest.mark.parametrize(
    ("m", "n", "width", "gap"),
    [(300, 70, 65, 0), (129, 64, 128, 3), pytest.param(70_001, 333, 150, 5, marks=pytest.mark.gpu)],
)
def test_tall_products_are_exact(kernels_on, m, n, width, gap):
    """Products of integers are exact, with partial blocks on every side, and gaps are not read."""
    rng = np.random.default_rng(n)
    memory = torch.full((m, n + gap), torch.nan, device=kernels_on)
    A = torch.from_numpy(rng.integers(-4000, 4001, (m, n)).astype(np.float32)).to(kernels_on)
    V = torch.from_numpy(rng.integers(-9, 10, (n, width)).astype(float)).to(kernels_on)
    memory[:, :n] = A
    product = tall_product.multiply(memory[:, :n], V)
    assert product.dtype == torch.float32
    assert torch.equal(product.double(), A.double() @ V)


def test_tall_products_have_the_accuracy_of_fp32(kernels_on):
    """Also where all terms have one sign, so that roundings toward zero would add up, and for V in fp64."""
    rng = np.random.default_rng(0)
    A, V = np.abs(rng.standard_normal((200, 1000))).astype(np.float32), np.abs(rng.standard_normal((1000, 64)))
    product = tall_product.multiply(torch.from_numpy(A).to(kernels_on), torch.from_numpy(V).to(kernels_on))
    exact = A.astype(float) @ V
    assert np.abs(product.cpu().numpy() - exact).max() < 2e-6 * exact.max()


@pytest.mark.gpu
def test_tall_products_are_used_on_a_gpu():
    rng = np.random.default_rng(0)
    A = torch.from_numpy(rng.standard_normal((70_000, 200)).astype(np.float32)).cuda()
    V = torch.from_numpy(rng.standard_normal((200, 64))).cuda()
    assert tall_product.eligible(A, V)
    matrix, exact = CudaMatrix(A), A.double() @ V
    assert float((matrix.times(V) - exact).norm() / exact.norm()) < 1e-6
    normal = A.double().T @ exact
    assert float((matrix.normal_times(V) - normal).norm() / normal.norm()) < 1e-6


# ------------------------------------------------------------------------------------- files on a GPU


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("m", "order"), [(300, "C"), (20_000, "C"), (20_000, "F")])
def test_files_in_blocks_on_the_device_of_b(tmp_path, monkeypatch, m, order, dtype, device):
    """A file's blocks are copied to the device of b; here also to the CPU, as tensors."""
    rng = np.random.default_rng(m)
    A = (orthonormal(rng, m, 12) * np.geomspace(1, 1e-5, 12) @ orthonormal(rng, 12, 12).T).astype(dtype)
    b = rng.standard_normal((m, 2))
    np.save(tmp_path / "A.npy", np.asarray(A, order=order))
    monkeypatch.setattr(matrix_module, "FILE_BYTES", 1 << 16)
    right = torch.from_numpy(b).to(device)
    if device == "cpu":
        monkeypatch.setattr(least_squares, "_device_for_files", lambda b: b.device)
    seen = []
    solution = lstsq(tmp_path / "A.npy", right, callback=lambda *progress: seen.append(progress))
    assert solution.x.device.type == solution.residuals.device.type == device
    for j in range(2):
        assert backward_error(A.astype(float), b[:, j], solution.x[:, j].cpu().numpy()) < 2e-16
    assert seen[-1] == (solution.iterations, m, m)


def test_negated_views_and_byte_orders():
    A, b = torch.randn(200, 5, dtype=torch.float64), torch.randn(200, dtype=torch.float64)
    expected = lstsq(A, b).x
    assert torch.equal(lstsq(torch._neg_view(-A), b).x, expected)
    swapped = b.numpy().astype(">f8")
    assert np.array_equal(lstsq(A.numpy(), swapped).x, expected.numpy())
