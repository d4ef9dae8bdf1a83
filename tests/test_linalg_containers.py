"""Every container gives the same solution: arrays of all layouts, sparse matrices, tensors, files."""

import os

import numpy as np
import pytest
import scipy.sparse
import torch

from sjlt.linalg import containers, cuda_matrix, leverage_scores, lstsq, qr, svd_lowrank

M, N = 3000, 20


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    A = rng.standard_normal((M, N)) * (rng.random((M, N)) < 0.3)
    return A, rng.standard_normal((M, 2))


def as_container(kind, A, folder):
    """Return A in a container."""
    if kind == "npy" or kind == "npy, column-major":
        np.save(folder / "A.npy", A if kind == "npy" else np.asfortranarray(A))
        return str(folder / "A.npy") if kind == "npy" else folder / "A.npy"
    return {
        "array": lambda: A,
        "column-major": lambda: np.asfortranarray(A),
        "strided": lambda: np.repeat(A, 2, 1)[::-1, ::2][::-1],
        "csr": lambda: scipy.sparse.csr_array(A),
        "csc": lambda: scipy.sparse.csc_matrix(A),
        "tensor": lambda: torch.from_numpy(A),
        "tensor with gradient": lambda: torch.from_numpy(A).requires_grad_(),
        "cuda": lambda: torch.from_numpy(A).cuda(),
    }[kind]()


KINDS = ["array", "column-major", "strided", "csr", "csc", "tensor", "tensor with gradient", "npy", "npy, column-major"]
each_kind = pytest.mark.parametrize("kind", [*KINDS, pytest.param("cuda", marks=pytest.mark.gpu)])


def plain(x):
    return x.cpu().numpy() if isinstance(x, torch.Tensor) else x


@each_kind
@pytest.mark.parametrize("method", ["cg", "passes", "auto"])
def test_lstsq(kind, method, data, tmp_path):
    A, B = data
    A_in = as_container(kind, A, tmp_path)
    solution = lstsq(A_in, B, method=method)
    np.testing.assert_allclose(plain(solution.x), np.linalg.lstsq(A, B)[0], atol=1e-14)
    is_tensor = isinstance(A_in, torch.Tensor)
    assert isinstance(solution.x, torch.Tensor) == isinstance(solution.residuals, torch.Tensor) == is_tensor
    if is_tensor:
        assert solution.x.device == A_in.device
        assert solution.x.dtype == torch.float64
        assert not solution.x.requires_grad


@each_kind
def test_qr_leverage_scores_and_svd(kind, data, tmp_path):
    A, _ = data
    A_in = as_container(kind, A, tmp_path)
    Q, R, J = qr(A_in)
    np.testing.assert_allclose(plain(Q) @ plain(R), A[:, J], atol=1e-12)
    np.testing.assert_allclose(plain(leverage_scores(A_in)), (plain(Q) ** 2).sum(1), atol=1e-12)
    for n_iter in (0, 1):
        U, s, Vh = (plain(x) for x in svd_lowrank(A_in, N, n_iter=n_iter))
        np.testing.assert_allclose((U * s) @ Vh, A, atol=1e-10)


@pytest.fixture
def as_cuda(monkeypatch):
    """Run the code for CUDA tensors on CPU tensors."""

    def tensor_matrix(a, progress=None):
        return cuda_matrix.CudaMatrix(torch.from_numpy(a), progress)

    monkeypatch.setattr(containers, "DenseMatrix", tensor_matrix)
    monkeypatch.setattr(cuda_matrix, "GPU_BYTES", 8000 * 30)


@pytest.mark.parametrize("condition", [1, 1e6, 1e12])
@pytest.mark.parametrize("method", ["cg", "passes", "auto"])
def test_lstsq_as_on_a_gpu(request, data, method, condition):
    A, B = data
    A = A * np.geomspace(1, 1 / condition, N) @ np.linalg.qr(np.random.default_rng(1).standard_normal((N, N)))[0]
    cases = [("f8", {}), ("f8", {"damp": [0, 0.5]}), ("f8", {"rcond": 1e-3}), ("f4", {})]
    expected = [lstsq(A.astype(dtype), B, method=method, **options) for dtype, options in cases]
    request.getfixturevalue("as_cuda")
    for (dtype, options), on_cpu in zip(cases, expected, strict=True):
        solution = lstsq(torch.from_numpy(A.astype(dtype)), B, method=method, **options)
        assert isinstance(solution.x, torch.Tensor)
        assert solution.backward_error < 1.2e-16
        assert solution.rank == on_cpu.rank
        np.testing.assert_allclose(plain(solution.residuals), on_cpu.residuals, rtol=1e-6)


@pytest.mark.exhaustive
def test_qr_leverage_scores_and_svd_as_on_a_gpu(as_cuda, data):
    A, _ = data
    for given in (A, np.asfortranarray(A), A.astype("f4")):
        tensor, tolerance = torch.from_numpy(given), 1e-10 if given.dtype == "f8" else 1e-4
        Q, R, J = qr(tensor)
        np.testing.assert_allclose(plain(Q @ R), given[:, J], atol=1e-12)
        np.testing.assert_allclose(plain(leverage_scores(tensor)), plain((Q**2).sum(1)), atol=1e-12)
        for n_iter in (0, 1, 2):
            U, s, Vh = svd_lowrank(tensor, N, n_iter=n_iter)
            np.testing.assert_allclose(plain((U * s) @ Vh), A, atol=tolerance)
            np.testing.assert_allclose(plain(U.T @ U), np.eye(N), atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "float16"])
def test_dtypes_of_b(dtype, data):
    A, B = data
    b = (4 * B[:, 0]).astype(dtype)
    np.testing.assert_allclose(lstsq(A, b).x, np.linalg.lstsq(A, b.astype(float))[0], atol=1e-13)


def test_float32_is_refined_in_float64(data):
    A, B = data
    A32 = A.astype(np.float32)
    solution = lstsq(A32, B[:, 0])
    assert solution.x.dtype == np.float64
    np.testing.assert_allclose(solution.x, np.linalg.lstsq(A32.astype(float), B[:, 0])[0], atol=1e-14)


def test_data_is_not_changed(data):
    A, B = data
    before = A.copy(), B.copy()
    for method in ("cg", "passes"):
        lstsq(A, B, method=method, damp=0.5)
    assert np.array_equal(A, before[0])
    assert np.array_equal(B, before[1])


def test_progress(data, tmp_path):
    A, B = data
    seen = []
    solution = lstsq(as_container("npy", A, tmp_path), B, callback=lambda *numbers: seen.append(numbers))
    assert seen[-1] == (solution.iterations, M, M)
    assert sorted({number for number, *_ in seen}) == list(range(1, solution.iterations + 1))

    class StopError(Exception):
        pass

    def stop(number, rows, of):
        if number == 2:
            raise StopError

    with pytest.raises(StopError):
        lstsq(as_container("npy", A, tmp_path), B, callback=stop)


@pytest.mark.parametrize("rows", [200, M])
@pytest.mark.parametrize("kind", ["array", "float32", "csr", "npy"])
def test_progress_of_every_pass(kind, rows, data, tmp_path):
    A, B = data[0][:rows], data[1][:rows]
    A = A.astype(np.float32) if kind == "float32" else A
    A_in = A if kind == "float32" else as_container(kind, A, tmp_path)
    calls = {
        "lstsq": lambda f: lstsq(A_in, B, callback=f),
        "qr": lambda f: qr(A_in, callback=f),
        "leverage_scores": lambda f: leverage_scores(A_in, callback=f),
        **{f"svd {i}": lambda f, i=i: svd_lowrank(A_in, 3, n_iter=i, callback=f) for i in (0, 1, 2)},
    }
    for name, call in calls.items():
        seen = []
        call(lambda *numbers, seen=seen: seen.append(numbers))
        finished = [number for number, done, of in seen if done == of == rows]
        assert finished == list(range(1, max(finished) + 1)), name


def test_a_zarr_store_that_changes_between_passes(data, tmp_path):
    zarr = pytest.importorskip("zarr")
    A, B = data
    store = zarr.create_array(str(tmp_path / "A.zarr"), shape=A.shape, chunks=(500, N), dtype="f8")
    store[:] = A

    def modify(number, rows, of):
        if number == 2 and rows == of:
            store[700, 3] += 1

    np.testing.assert_allclose(lstsq(tmp_path / "A.zarr", B).x, np.linalg.lstsq(A, B)[0], atol=1e-14)
    with pytest.raises(ValueError, match=r"changed between passes: .*mtime_ns"):
        lstsq(tmp_path / "A.zarr", B, callback=modify)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_tensors_as_b(dtype, data):
    A, B = data
    b = torch.from_numpy(4 * B[:, 0]).to(dtype)
    np.testing.assert_allclose(lstsq(A, b).x, np.linalg.lstsq(A, b.double().numpy())[0], atol=1e-13)


def test_results_compare_by_identity(data):
    A, B = data
    assert (lstsq(A, B) == lstsq(A, B)) is False


@pytest.mark.parametrize("change", ["touched", "truncated", "replaced"])
def test_a_file_that_changes_between_passes(change, data, tmp_path):
    A, B = data
    path = as_container("npy", A, tmp_path)

    def modify(number, rows, of):
        if number == 2 and rows == of:
            if change == "touched":
                os.utime(path, ns=(1, 1))
            elif change == "truncated":
                os.truncate(path, 5000)
            else:
                np.save(tmp_path / "other.npy", A + 1)
                os.replace(tmp_path / "other.npy", path)

    with pytest.raises(ValueError, match="changed between passes"):
        lstsq(path, B, callback=modify)
