"""The projection and dropout as torch operators."""
