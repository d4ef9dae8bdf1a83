"""Kernels compiled for other processors."""

import os
import platform
import subprocess
import sys

import pytest

OTHER_PROCESSOR = """
import hashlib, numpy as np, sjlt
digest = hashlib.sha256()
for k, nnz in ((4096, 1), (300, 3), (190, 2), (254, 1), (16, 4)):
    S = sjlt.Sketch(9001, k, nnz=nnz, seed=k)
    for dtype in ("float16", "float64"):
        x = np.random.default_rng(k).normal(size=(40, 9001)).astype(dtype)
        for n in (1, 2, 7, 40):
            digest.update((x[:n] @ S.T).tobytes())
print(digest.hexdigest())
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names a processor of this kind")
def test_other_processors_give_the_same_bits(tmp_path):
    """Without AVX, or without AVX-512 alone, other instructions are generated."""

    def digest(**environment):
        run = [sys.executable, "-c", OTHER_PROCESSOR]
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)} | environment
        return subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout

    others = {"NUMBA_CPU_NAME": "generic"}, {"NUMBA_ENABLE_AVX": "0"}, {"NUMBA_CPU_FEATURES": "-avx512f"}
    assert {digest(**other) for other in others} == {digest()}
