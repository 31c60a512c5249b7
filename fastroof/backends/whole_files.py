"""Files of exports, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from fastroof.errors import BackendError
from fastroof.whole_files import replace_file

__all__ = ["write_whole"]


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file, or say why it has no place.

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
    replace_file(path, content)
