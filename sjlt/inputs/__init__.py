"""Validation of arguments and data."""
