"""Files that others see whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from fastroof.errors import BackendError

__all__ = ["write_whole"]


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file beside its place, then move it there.

    Raises
    ------
    BackendError
        If its folder does not exist, or a folder has its name.
    OSError
        If the disk does not take it; what was there before stays.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise BackendError(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise BackendError(f"{path} is a folder: give the name of a file")
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
