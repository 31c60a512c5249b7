"""Folders in which nobody but this user and root can have put anything, opened name by name.

What is unpickled runs, so it does not do that a file looks like ours: whoever may write to a folder above it
can put links to other files of ours in its place, between a check of the path and its use too.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path
from typing import Final

__all__ = ["UntrustedFolder", "is_ours", "open_trusted"]

_MOST_LINKS: Final = 40
# a folder that may be passed through and not listed is opened all the same, where the system can
_FOLDER: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class UntrustedFolder(PermissionError):
    """Another user can have put something into a folder."""


def is_ours(status: os.stat_result) -> bool:
    """Whether nobody but this user and root wrote it."""
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid in (os.geteuid(), 0) and not others_write


def open_trusted(path: Path, *, create: bool = False) -> int:
    """Open a folder and its parents; refuse any that others may write to."""
    names = _names(os.path.join(os.getcwd(), path))
    at = os.open("/", _FOLDER)
    links = 0
    try:
        while names:
            _check(at, path, is_passed=True)
            name = names.pop()
            status = _status(name, at, create)
            if stat.S_ISLNK(status.st_mode):
                links += 1
                if status.st_uid not in (os.geteuid(), 0) or links > _MOST_LINKS:
                    raise UntrustedFolder(f"{path} leads through a link of another user, or in circles")
                target = os.readlink(name, dir_fd=at)
                names += _names(target)
                name = "/" if target.startswith("/") else "."
            below = os.open(name, _FOLDER, dir_fd=at)
            os.close(at)
            at = below
        _check(at, path)
    except OSError:
        os.close(at)
        raise
    return at


def _names(path: str) -> list[str]:
    """Names of a path, the last first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _status(name: str, folder: int, create: bool) -> os.stat_result:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        if not create:
            raise
    os.mkdir(name, 0o755, dir_fd=folder)
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _check(folder: int, path: Path, *, is_passed: bool = False) -> None:
    """Refuse a folder to which others may write; on the way names that are their owners' will do."""
    status = os.fstat(folder)
    if is_ours(status):
        return
    if status.st_uid in (os.geteuid(), 0):
        keeps_names = is_passed and status.st_mode & stat.S_ISVTX
        only_own_group = not status.st_mode & stat.S_IWOTH and status.st_gid == _own_group()
        if keeps_names or only_own_group:
            return
    raise UntrustedFolder(f"others may write to {path}, or to a folder above it")


def _own_group() -> int | None:
    """The group that has the user's name and no other members, as many systems give each user one."""
    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(user.pw_gid)
    except KeyError:
        return None
    return user.pw_gid if group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name} else None
