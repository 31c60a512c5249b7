"""Hidden files and folders in which somebody writes what will be whole.

Who writes holds a lock on the file or folder, which the system drops with the process. So the next one to
write to the same place finds what a killed process has left, and removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from fastroof.interrupts import BeforeTheEnd

__all__ = ["held_unfinished", "is_unfinished", "remove_left", "remove_unfinished", "unfinished_path"]


@contextlib.contextmanager
def held_unfinished(place: Path, *, is_folder: bool) -> Iterator[Path]:
    """Make an empty hidden file or folder beside a place, and hold its lock."""
    while True:
        unfinished = unfinished_path(place)
        try:
            if is_folder:
                unfinished.mkdir()
                held = os.open(unfinished, os.O_RDONLY | os.O_CLOEXEC)
            else:
                held = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            if not place.parent.is_dir():
                raise
            continue  # taken for something left, before it was locked
        try:
            _lock(held, is_waiting=True)
            if _is_there(unfinished, held):
                with BeforeTheEnd(partial(_remove, unfinished)):
                    yield unfinished
                return
        finally:
            # nothing was written by way of it: what its end says is not what became of the file
            with contextlib.suppress(OSError):
                os.close(held)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def _is_there(path: Path, held: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(held))
    except FileNotFoundError:
        return False


def _lock(held: int, *, is_waiting: bool = False) -> bool:
    """Lock an open file or folder for this process; False where another has it, or the disk has no locks."""
    try:
        import fcntl

        fcntl.flock(held, fcntl.LOCK_EX | (0 if is_waiting else fcntl.LOCK_NB))
    except (ImportError, OSError):
        return False
    return True


def remove_left(place: Path) -> None:
    """Remove what killed processes have left of a file or folder: this user's own, which nobody holds."""
    with contextlib.suppress(OSError):
        pattern = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{32}}")
        for name in filter(pattern.fullmatch, os.listdir(place.parent)):
            with contextlib.suppress(OSError):
                _remove_if_left(place.parent / name)


def _remove_if_left(path: Path) -> None:
    # a link is not followed, a pipe not waited for
    held = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(held)
        if not _lock(held) or status.st_uid != os.geteuid() or not _is_there(path, held):
            return
        if stat.S_ISREG(status.st_mode):
            path.unlink()
        elif stat.S_ISDIR(status.st_mode) and _only_we_rename_in(path.parent):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(held)


def _only_we_rename_in(folder: Path) -> bool:
    """Whether nobody else can have given a folder of ours the name of something left."""
    status = folder.stat()
    return not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or bool(status.st_mode & stat.S_ISVTX)


def unfinished_path(path: Path) -> Path:
    """Return a new hidden name on the same file system, so that renaming moves no bytes."""
    return path.parent / f".{path.name}.{os.urandom(16).hex()}"


def is_unfinished(path: Path) -> bool:
    """Whether a file or folder is one that somebody is writing, or was when the process was killed."""
    return re.fullmatch(r"\..+\.[0-9a-f]{32}", path.name) is not None


def remove_unfinished(folder: Path, name: str | None = None) -> None:
    """Remove files that a killed process was writing in a folder: of one name, or all of them."""
    of_name = ".+" if name is None else re.escape(name)
    for path in folder.iterdir():
        if not re.fullmatch(rf"\.{of_name}\.[0-9a-f]{{32}}", path.name):
            continue
        # another process may remove it too, and another user's is none of ours
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if stat.S_ISREG(path.lstat().st_mode):
                path.unlink()
