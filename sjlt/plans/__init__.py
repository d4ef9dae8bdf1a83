"""Projecting folders of files in parts, by any engine that can run a function."""

from .planning import Plan, load, plan
from .records import committed_parts

__all__ = ["Plan", "committed_parts", "load", "plan"]
