"""The law under Triton: every word function, and the entries that kernels derive, to the bit."""

import inspect

import numpy as np
import pytest
import test_law
import torch
import triton
import triton.language as tl
from helpers import kernels

from sjlt import Sketch
from sjlt.kernels.portable import law as words
from sjlt.laws import exact as law
from sjlt.laws.philox import define

WIDE = {"c", "group"}  # 64-bit arguments; words have 32 bits


@triton.jit
def call(arguments, results, FUNCTION: tl.constexpr, N: tl.constexpr):
    """Apply FUNCTION to vectors of N arguments and store its results as 64-bit integers."""
    i = tl.arange(0, N)
    result = FUNCTION(*[tl.load(argument + i) for argument in arguments])
    for part in tl.static_range(len(results)):
        if len(results) == 1:
            tl.store(results[part] + i, result.to(tl.uint64))
        else:
            tl.store(results[part] + i, result[part].to(tl.uint64))


def as_tensor(name, numbers, function):
    # Tiles start at m k / M, which needs more than 32 bits.
    wide = name in WIDE or function == "part_start"
    return torch.from_numpy(np.array(numbers, np.int64 if wide else np.uint32))


@pytest.mark.parametrize("function", law.FUNCTIONS, ids=lambda f: f.__name__)
def test_word_functions(function, kernels_on):
    name, names = function.__name__, inspect.signature(function).parameters
    arguments = list(zip(*test_law.calls()[name], strict=True))
    plain = getattr(define(law.FUNCTIONS, lambda f: f, int), name)
    expected = [test_law.as_ints(plain(*a)) for a in arguments]
    size = triton.next_power_of_2(len(arguments))
    arguments += arguments[:1] * (size - len(arguments))
    columns = zip(names, zip(*arguments, strict=True), strict=True)
    tensors = tuple(as_tensor(key, numbers, name).to(kernels_on) for key, numbers in columns)
    results = tuple(torch.zeros(size, dtype=torch.int64, device=kernels_on) for _ in expected[0])
    call[(1,)](tensors, results, getattr(words.words, name), size)
    found = zip(*(test_law.as_ints(part.cpu().numpy())[0] for part in results), strict=True)
    assert [list(parts) for parts in found][: len(expected)] == expected


# --------------------------------------------------------------------------------- entries


def by_backend(S, dtype, device):
    """S obtained by two products with an identity, as (n_components, n_features) in fp64, unscaled."""
    project = torch.full((S.n_features, S.n_components), torch.nan, device=device, dtype=dtype)
    kernels.project(S, torch.eye(S.n_features, device=device, dtype=dtype), project, False)
    adjoint = torch.full((S.n_components, S.n_features), torch.nan, device=device, dtype=dtype)
    kernels.adjoint(S, torch.eye(S.n_components, device=device, dtype=dtype), adjoint, False)
    return [matrix.cpu().double().numpy() * S.nnz**0.5 for matrix in (project.t(), adjoint)]


STARTS = [0, 2**33 - 19, 2**62 + 12_345, 2**63 - 1 - 40]
SKETCHES = [
    (128, 4, 0, torch.bfloat16),
    (256, 2, 2**63, torch.float16),
    (260, 3, 2**64 - 1, torch.float32),
    (130, 5, 0xDEADBEEF_01234567, torch.float32),
]


@pytest.mark.parametrize(
    ("k", "nnz", "seed", "dtype", "start"),
    [
        pytest.param(*sketch, start, marks=() if i == j == 0 else pytest.mark.exhaustive)
        for i, sketch in enumerate(SKETCHES)
        for j, start in enumerate(STARTS)
    ],
)
def test_entries(k, nnz, seed, dtype, start, kernels_on):
    S = Sketch(2**63 - 1, k, nnz=nnz, seed=seed)[:, start : start + 40]
    rows, signs = S.entries()
    expected = np.zeros(S.shape)
    np.put_along_axis(expected, rows, signs.astype(np.float64), axis=0)
    for matrix in by_backend(S, dtype, kernels_on):
        np.testing.assert_array_equal(np.rint(matrix), expected)
        np.testing.assert_allclose(matrix, expected, rtol=2**-7, atol=0)


# --------------------------------------------------------------------------------- the fast permutation


@triton.jit
def permutations(w, images, places, LOG_CHUNK: tl.constexpr, N: tl.constexpr):
    """For each of N words: the image of every place of a chunk under `permute`, and the preimage."""
    x = tl.arange(0, 1 << LOG_CHUNK)[None, :].to(tl.uint32)
    row = tl.arange(0, N)[:, None]
    w = tl.load(w + row)
    at = (row << LOG_CHUNK) + tl.arange(0, 1 << LOG_CHUNK)[None, :]
    tl.store(images + at, words.permute(x, words.forward_keys(w, LOG_CHUNK), LOG_CHUNK))
    tl.store(places + at, words.permute(x, words.inverse_keys(w, LOG_CHUNK), LOG_CHUNK))


@pytest.mark.parametrize("p", range(8))
def test_permute_is_beta_and_its_inverse(p, kernels_on):
    drawn = np.array([*test_law.words(31, n=60)], np.uint32)
    images, places = (
        torch.zeros((64, 2**p), dtype=torch.int32, device=kernels_on).view(torch.uint32) for _ in range(2)
    )
    permutations[(1,)](torch.from_numpy(drawn).to(kernels_on), images, places, p, 64)
    images, places = (t.view(torch.int32).cpu().numpy() for t in (images, places))
    beta = define(law.FUNCTIONS, lambda f: f, int).beta
    for w, image, place in zip(drawn.tolist(), images, places, strict=True):
        assert image.tolist() == [beta(x, w, w >> 8, w >> 16, w >> 24, p) for x in range(2**p)]
        np.testing.assert_array_equal(image[place], np.arange(2**p))
