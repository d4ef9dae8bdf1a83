"""Errors that are messages for the user, and text made safe for a terminal."""

from __future__ import annotations

import unicodedata


class UserError(Exception):
    """A request that cannot be met. The message is one line for the user, with the numbers."""


def one_line(e: BaseException) -> str:
    """An exception's message without line breaks."""
    return " ".join(str(e).split())


def explain(e: BaseException) -> str:
    """A one-line description of an exception, with the file's name and without error numbers."""
    if isinstance(e, OSError) and e.strerror:
        return f"{e.filename}: {e.strerror}" if e.filename else e.strerror
    return one_line(e) or type(e).__name__


def printable(text: str) -> str:
    """`text` with control, direction-changing and undecodable characters written as escapes.

    File names and descriptions may hold any of them, and a terminal would obey.

    Examples
    --------
    >>> printable("a\\x1b[2J.npy")
    'a\\\\x1b[2J.npy'
    """
    return "".join(_escaped(c) if unicodedata.category(c) in _UNSAFE else c for c in text)


_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def _escaped(c: str) -> str:
    return c.encode("unicode_escape").decode("ascii")
