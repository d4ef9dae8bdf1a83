"""The description of a sketch in the signatures of torch operators."""

from __future__ import annotations

from ..laws.spec import SketchSpec

_SYMBOLIC = ("n_features", "seed", "feature_offset")  # torch.compile does not recompile when these change
SKETCH = ", ".join(f"{'SymInt' if name in _SYMBOLIC else 'int'} {name}" for name in SketchSpec._fields)
