"""Files of the cache folders: written whole, believed where nobody else can have written them.

Compiled loops are kept so (fastroof.compiled.code_cache), and whatever else a later process is to take on
trust. What does not pass is an error of the system's kind: whoever asks makes the thing again.
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


_DIGEST_BYTES: Final = hashlib.sha256().digest_size


def cache_roots() -> tuple[Path, ...]:
    """Folders that may hold what is kept, the best first; none of them needs to exist."""
    import platformdirs

    given = os.environ.get("FASTROOF_CACHE_DIR")
    # platformdirs answers "~/.cache" where there is no home: no name for a folder of the working directory
    users = Path(platformdirs.user_cache_dir("fastroof"))
    return (*([Path(given)] if given else []), *([users] if users.is_absolute() else []))


@contextmanager
def opened(folder: Path, *, create: bool = False) -> Iterator[int]:
    """Open a folder that nobody else can have written to: what is read there may run."""
    at = open_trusted(folder, create=create)
    try:
        yield at
    finally:
        os.close(at)


def _open_at_once(folder: int, name: str, flags: int) -> int:
    """Open a file without following a link, and without waiting where somebody has put a pipe there."""
    return os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)


def read_kept(folder: int, name: str) -> bytes:
    """Return what :func:`write_kept` wrote, once it is known to be ours and whole."""
    with open(name, "rb", opener=partial(_open_at_once, folder)) as file:
        status = os.fstat(file.fileno())
        if not (is_ours(status) and stat.S_ISREG(status.st_mode) and status.st_nlink == 1):
            raise PermissionError(f"{name} may be somebody else's, or another file of ours")
        data = file.read()
    payload = data[_DIGEST_BYTES:]
    # damaged machine code would not raise, it would run
    if hashlib.sha256(payload).digest() != data[:_DIGEST_BYTES]:
        raise ValueError(f"{name} is damaged")
    return payload


def write_kept(folder: Path, name: str, payload: bytes) -> None:
    """Write a file that other processes see whole or not at all, where it will be believed."""
    with opened(folder, create=True) as at:
        unfinished = f"{name}.{secrets.token_hex(8)}"
        # writable by nobody else, whatever the umask
        create = partial(os.open, mode=0o644, dir_fd=at)
        try:
            with open(unfinished, "xb", opener=create) as file:
                file.write(hashlib.sha256(payload).digest() + payload)
            os.replace(unfinished, name, src_dir_fd=at, dst_dir_fd=at)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(unfinished, dir_fd=at)
