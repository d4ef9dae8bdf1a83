"""Errors meant for the user, and text made safe for a terminal."""

from __future__ import annotations

import unicodedata


class UserError(Exception):
    """A request that cannot be fulfilled. The message is one line for the user, with the values at fault."""


def one_line(e: BaseException) -> str:
    """The message of an exception, without line breaks."""
    return " ".join(str(e).split())


def explain(e: BaseException) -> str:
    """Describe an exception in one line, with the file's name and without error numbers."""
    if isinstance(e, OSError) and e.strerror:
        return f"{e.filename}: {e.strerror}" if e.filename else e.strerror
    return one_line(e) or type(e).__name__


def printable(text: str) -> str:
    """Escape control, text-direction and undecodable characters in `text`.

    File names and descriptions may contain them, and a terminal would interpret them.

    Examples
    --------
    >>> printable("a\\x1b[2J.npy")
    'a\\\\x1b[2J.npy'
    """
    return "".join(_escaped(c) if unicodedata.category(c) in _UNSAFE else c for c in text)


_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def _escaped(c: str) -> str:
    return c.encode("unicode_escape").decode("ascii")
