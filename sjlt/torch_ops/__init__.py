"""Projection and dropout as torch operators."""
