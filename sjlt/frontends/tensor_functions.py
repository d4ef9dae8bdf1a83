"""The functions of `tensors`, which is imported when the first of them is looked up.

torch.compile guards on each name that a call looks up, so this costs less in compiled code than an import statement in
a function. It costs less in other calls, too.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from . import tensors

    function = getattr(tensors, name)
    if not name.startswith("__"):
        globals()[name] = function
    return function
