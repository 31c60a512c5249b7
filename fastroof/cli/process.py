"""Whether this process is the command line's own, and ends with its command."""

from __future__ import annotations

from typing import Final

__all__ = ["asks_little", "begin"]

_begun: Final[list[bool]] = []


def begin() -> None:
    """Say that this process runs one command line and ends."""
    _begun.append(True)


def asks_little() -> None:
    """Have loops run as Python, in a process that is a command's own: numba takes longer to be there."""
    if _begun:
        from fastroof.compiled.plain import run_plain

        run_plain()
