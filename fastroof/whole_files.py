"""Files that others see whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(path: Path, content: bytes) -> None:
    """Write a file beside its place, then move it there.

    Raises
    ------
    OSError
        If the disk does not take it; nothing is left of it, and what was there before stays.
    """
    unfinished = path.with_name(f".{secrets.token_hex(16)}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
