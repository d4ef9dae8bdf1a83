"""The fields of a `SketchSpec` as arguments in the schemas of torch operators."""

from __future__ import annotations

from ..laws.spec import SketchSpec

_SYMBOLIC = ("n_features", "seed", "feature_offset")  # a change of these does not make torch.compile recompile
SKETCH = ", ".join(f"{'SymInt' if name in _SYMBOLIC else 'int'} {name}" for name in SketchSpec._fields)
