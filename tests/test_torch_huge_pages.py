"""Large results on the CPU use huge pages, as NumPy's arrays do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import sjlt

torch = pytest.importorskip("torch")

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of_mapping(address: int) -> list[str]:
    """The flags of the memory mapping that contains an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name = line.split()[0]
        if not name.endswith(":"):
            start, end = (int(part, 16) for part in name.split("-"))
            inside = start <= address < end
        elif inside and name == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"no mapping contains {address:#x}")


@pytest.mark.skipif(sys.platform != "linux" or not HUGE_PAGES.exists(), reason="needs huge pages")
def test_large_results_use_huge_pages():
    S = sjlt.Sketch(1 << 14, 16, nnz=1)
    y = S.project_adjoint(torch.ones(1024, 16))  # 64 MiB, for which the C library maps memory
    assert "hg" in flags_of_mapping(y.data_ptr() + y.nbytes // 2)
    torch.testing.assert_close(y[-1], torch.ones(16) @ S)
