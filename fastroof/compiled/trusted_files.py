"""Files of the cache folders: atomic writes, and reads that trust only files no other user can have written.

Compiled loops (fastroof.compiled.code_cache) and other cached files that a later process trusts go through
here. Anything else is an OSError, after which the caller rebuilds the file.
"""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

_MOST_LINKS: Final = 40
# O_PATH, where it exists, opens folders that may be traversed but not listed
_FOLDER: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class UntrustedFolder(PermissionError):
    """Another user may have written to a folder."""


def is_ours(status: os.stat_result) -> bool:
    """Whether only this user and root can have written a file."""
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid in (os.geteuid(), 0) and not others_write


def open_trusted(path: Path, *, create: bool = False) -> int:
    """Open a folder through its parents; refuse any that others may write to."""
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
    """Return the names of a path, last first."""
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
    """Refuse a folder to which others may write; parents may be sticky, as their names have owners."""
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
    """Return the group with the user's name and no other members, which many systems give each user."""
    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(user.pw_gid)
    except KeyError:
        return None
    return user.pw_gid if group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name} else None


_DIGEST_BYTES: Final = hashlib.sha256().digest_size


def cache_roots() -> tuple[Path, ...]:
    """Return the candidate cache folders, best first; none needs to exist."""
    import platformdirs

    given = os.environ.get("FASTROOF_CACHE_DIR")
    # without a home, platformdirs returns "~/.cache", which must not become a folder in the working directory
    users = Path(platformdirs.user_cache_dir("fastroof"))
    return (*([Path(given)] if given else []), *([users] if users.is_absolute() else []))


@contextmanager
def opened(folder: Path, *, create: bool = False) -> Iterator[int]:
    """Open a folder that no other user can have written to: files read there may be executed."""
    at = open_trusted(folder, create=create)
    try:
        yield at
    finally:
        os.close(at)


def _open_at_once(folder: int, name: str, flags: int) -> int:
    """Open a file without following links and without blocking on a pipe."""
    return os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)


def read_trusted(folder: int, name: str) -> bytes:
    """Return what :func:`write_trusted` wrote, once its owner and checksum are verified."""
    with open(name, "rb", opener=partial(_open_at_once, folder)) as file:
        status = os.fstat(file.fileno())
        if not (is_ours(status) and stat.S_ISREG(status.st_mode) and status.st_nlink == 1):
            raise PermissionError(f"{name} may be another user's, or another file")
        data = file.read()
    payload = data[_DIGEST_BYTES:]
    # damaged machine code would not raise but run
    if hashlib.sha256(payload).digest() != data[:_DIGEST_BYTES]:
        raise ValueError(f"{name} is damaged")
    return payload


def write_trusted(folder: Path, name: str, payload: bytes) -> None:
    """Write a file atomically, with permissions that :func:`read_trusted` accepts."""
    with opened(folder, create=True) as at:
        unfinished = f"{name}.{secrets.token_hex(8)}"
        # writable by no other user, whatever the umask
        create = partial(os.open, mode=0o644, dir_fd=at)
        try:
            with open(unfinished, "xb", opener=create) as file:
                file.write(hashlib.sha256(payload).digest() + payload)
            os.replace(unfinished, name, src_dir_fd=at, dst_dir_fd=at)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(unfinished, dir_fd=at)
