"""Check the name of an output file before any work."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

NAME_BYTES = 255  # in a file's name, on the usual file systems


def check_output(
    out: Path, sources: Iterable[Path], suffixes: tuple[str, ...], force: bool, kind: str = "result"
) -> None:
    """Raise UserError if `out` cannot be written, is one of the sources, or exists and `force` is False.

    Parameters
    ----------
    out : Path
    sources : iterable of Path
    suffixes : tuple of str
        Allowed suffixes, in lower case.
    force : bool
    kind : str
        What the file is called in the message.
    """
    from ..files.attempts import hidden_name
    from ..files.errors import UserError
    from ..files.names import refuse_link
    from ..files.opening import refuse_dash

    refuse_dash(out)
    if out.suffix.lower() not in suffixes:
        raise UserError(f"{out}: a {kind}'s name must end in {' or '.join(suffixes)}")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent}: no such directory")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise UserError(f"{out.parent}: not writable")
    if out.exists() and not out.is_file():
        raise UserError(f"{out}: exists and is not a regular file")
    for source in sources:
        if out.exists() and source.exists() and out.samefile(source):
            raise UserError(f"{out}: is the source {source}")
    if len(hidden := os.fsencode(hidden_name(out.name))) > NAME_BYTES:
        raise UserError(f"{out}: the name is {len(hidden) - NAME_BYTES} bytes too long for that of a temporary file")
    if os.path.lexists(out) and not force:
        raise UserError(f"{out}: exists (--force replaces it)")
    refuse_link(out)
