"""SJLTProjection: products by its tables in every dtype and direction, and compatibility with the extension."""

import math

import pytest
import torch

import sjlt
from sjlt import SJLTProjection

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def matrix(projection):
    """S of shape (proj_dim, original_dim) by its definition, in float64."""
    S = torch.zeros(projection.proj_dim, projection.original_dim, dtype=torch.float64)
    for j, (rows, signs) in enumerate(
        zip(projection.rand_indices.tolist(), projection.rand_signs.tolist(), strict=True)
    ):
        for row, sign in zip(rows, signs, strict=True):
            S[row, j] += sign / math.sqrt(projection.c)
    return S


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_project_and_transpose(dtype, device, monkeypatch):
    monkeypatch.setattr("sjlt.nn.stored.BLOCK", 300)  # several blocks of features
    projection = SJLTProjection(100, 7, c=4, device=device)  # 7 components: some are drawn twice
    S = matrix(projection)
    for n in (0, 1, 13):
        x = torch.randint(-3, 4, (n, 100)).to(device, dtype)
        y = projection(x)
        assert y.dtype == dtype
        assert y.device == x.device
        assert torch.equal(y.double().cpu(), x.double().cpu() @ S.T)
        z = torch.randint(-3, 4, (n, 7)).to(device, dtype)
        assert torch.equal(projection.transpose(z).double().cpu(), z.double().cpu() @ S)
        assert projection.transpose(z).dtype == dtype


def test_tables_are_drawn_like_the_extensions():
    torch.manual_seed(5)
    projection = SJLTProjection(30, 20, 3, device="cpu")
    torch.manual_seed(5)
    assert torch.equal(projection.rand_indices, torch.randint(0, 20, (30, 3)))
    assert torch.equal(projection.rand_signs, (torch.randint(0, 2, (30, 3)) * 2 - 1).to(torch.int8))


def test_tables_can_be_replaced():
    """dattri draws the tables itself and copies them in."""
    projection, x = SJLTProjection(30, 20, 1, device="cpu"), torch.randn(4, 30)
    indices, signs = torch.arange(30).view(30, 1) % 20, torch.ones(30, 1, dtype=torch.int8)
    projection.rand_indices.copy_(indices)
    projection.rand_signs.copy_(signs)
    folded = torch.nn.functional.pad(x, (0, 10)).view(4, 2, 20).sum(1)
    assert torch.equal(projection(x), folded)
    projection.rand_signs = -signs
    assert torch.equal(projection(x), -folded)
    other = SJLTProjection(30, 20, 1, device="cpu")
    other.load_state_dict(projection.state_dict())
    assert torch.equal(other(x), projection(x))


def test_derivatives():
    projection = SJLTProjection(6, 4, 2, device="cpu")
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(projection, x)
    assert torch.autograd.gradcheck(projection.transpose, torch.randn(3, 4, dtype=torch.float64, requires_grad=True))


def test_attributes():
    projection = SJLTProjection(original_dim=100, proj_dim=25, c=4, threads=256, fixed_blocks=10, device="cpu")
    assert projection.get_compression_ratio() == 4.0
    assert abs(projection.get_sparsity_ratio() - (1 - 4 / 25)) < 1e-12
    assert "original_dim=100, proj_dim=25, c=4" in repr(projection)
    assert projection.normalization_factor == 0.5
    assert list(projection.state_dict()) == ["rand_indices", "rand_signs"]
    info = sjlt.get_cuda_info()
    assert info["cuda_available"] == torch.cuda.is_available()
    assert "extension_available" in info
    norms = projection(torch.nn.functional.normalize(torch.randn(4000, 100))).square().sum(1)
    assert abs(float(norms.mean()) - 1) < 0.2


def test_refusals():
    for arguments in ((0, 10), (10, 0), (10, 5, 0), (10, 5, 6)):
        with pytest.raises(ValueError, match="must be from 1"):
            SJLTProjection(*arguments, device="cpu")
    projection = SJLTProjection(10, 5, 2, device="cpu")
    for x in (torch.randn(5, 20), torch.randn(10)):
        with pytest.raises(ValueError, match=r"shape \(batch, original_dim = 10\) is required, got"):
            projection(x)
        with pytest.raises(ValueError, match=r"shape \(batch, proj_dim = 5\) is required, got"):
            projection.transpose(x)
    with pytest.raises(TypeError, match=r"floating-point tensor is required, got torch.int64"):
        projection(torch.ones(2, 10, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(9, 2), (2, 10), (10, 3), (10, 1), (20,)])
@pytest.mark.parametrize("name", ["rand_indices", "rand_signs"])
def test_tables_of_other_shapes(name, shape):
    """Some of these would silently ignore features."""
    projection = SJLTProjection(10, 5, 2, device="cpu")
    setattr(projection, name, torch.ones(shape, dtype=getattr(projection, name).dtype))
    for call in (lambda: projection(torch.ones(3, 10)), lambda: projection.transpose(torch.ones(3, 5))):
        with pytest.raises(ValueError, match=rf"{name} must have shape \(10, 2\), got "):
            call()
