"""Numba's cache looks at a kernel's own file only: keep one cache for each state of all sources."""

import hashlib
import os
import tempfile
from pathlib import Path

_sources = sorted((Path(__file__).parent.parent / "sjlt").rglob("*.py"))
_state = hashlib.sha256(b"".join(p.read_bytes() for p in _sources)).hexdigest()[:16]
os.environ.setdefault("NUMBA_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"sjlt-numba-{_state}"))
