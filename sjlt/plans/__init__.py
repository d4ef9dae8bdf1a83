"""Project folders of files in parts, on any engine that can run a function."""

from .planning import Plan, load, plan
from .records import committed_parts

__all__ = ["Plan", "committed_parts", "load", "plan"]
