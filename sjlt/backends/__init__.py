"""The choice of the backend for a law and a device.

A backend is a module of functions that accept a `SketchSpec` and 2-D data, one vector per row, and write to `out`. On
the CPU these are ``project``, ``adjoint``, ``project_sparse``, ``project_to_csr`` and ``columns``; on Triton,
``project``, ``adjoint``, ``project_sparse`` and ``gather_sparse``.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..laws.spec import SketchSpec


def cpu_backend(spec: SketchSpec) -> Any:
    """The Numba module for the law of `spec`. Its import loads or compiles machine code."""
    return _cpu_module("iid" if spec.is_iid else "exact")


@cache
def _cpu_module(law: str) -> Any:
    return importlib.import_module(f"sjlt.backends.cpu.{law}")


def triton_backend(spec: SketchSpec) -> Any:
    """The Triton module for the law of `spec`. Its import is slow."""
    if spec.stacks > 1:
        return import_triton("stacks", "a sketch")
    return import_triton("exact" if spec.nnz else "iid", "a sketch")


@cache
def import_triton(name: str, operation: str) -> Any:
    """The module `sjlt.backends.triton.<name>`; without Triton, ImportError with a message about `operation`."""
    try:
        return importlib.import_module(f"sjlt.backends.triton.{name}")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        raise ImportError(
            f"{operation} of CUDA tensors runs on Triton, which is not installed: pip install triton "
            "(triton-windows on Windows)",
            name="triton",
        ) from error
