"""Prepared launches keep no tensors."""

import gc
import weakref

import pytest
import torch
from helpers.cases import exhaustive_except
from helpers.choices import DENSE_MATRICES, changed_choices

from sjlt import Sketch
from sjlt.backends import triton_backend

LAUNCH_KINDS = {  # (sketch, vectors), in fp32 unless the name says otherwise
    "few_vectors": (Sketch(300, 60, nnz=4, seed=1), 2),
    "tensor_core": (Sketch(300, 128, nnz=4, seed=1), 40),
    "one_tile": (Sketch(200, 60, nnz=4, seed=1), 64),
    "stacks": (Sketch(300, 256, nnz=4, stacks=2, seed=1), 40),
    "iid": (Sketch(300, 60, density=0.1, seed=1), 40),
    "dense_matrix, bf16": (Sketch(304, 64, nnz=4, seed=1), 40),
}


@pytest.mark.parametrize("name", exhaustive_except(["few_vectors", "stacks"], LAUNCH_KINDS))
def test_prepared_launches_keep_no_data(name, kernels_on):
    """Prepared launches are cached by the thousands; the tensors of a call must be freed when it returns."""
    S, n = LAUNCH_KINDS[name]
    backend, dtype = triton_backend(S.spec), torch.bfloat16 if "bf16" in name else torch.float32
    settings = {"one_tile.MIN_ELEMENTS": 0, **DENSE_MATRICES}
    with changed_choices(settings):  # clears the cache on exit
        for product, width, out_width in (("project", *S.shape[::-1]), ("adjoint", *S.shape)):
            data, out = (torch.ones(n, w, dtype=dtype, device=kernels_on) for w in (width, out_width))
            tensors = [weakref.ref(data), weakref.ref(out)]
            getattr(backend, product)(S.spec, data, out, False)
            del data, out
            gc.collect()
            assert [tensor() for tensor in tensors] == [None, None]
