"""The folder of an unfinished sweep: our own, held open, and nothing in it touched that a sweep did not make.

It lies beside the output under a name that anyone can tell, perhaps in a folder that others write to. So it
is opened without following a link, must be this user's and writable by nobody else, and is then reached
through its descriptor: what takes its name later is never looked at.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
from pathlib import Path
from typing import Final, Self

from fastroof.errors import SweepError
from fastroof.unfinished import unfinished_path

__all__ = ["LOCK", "MANIFEST", "PartsFolder", "parts_folder"]

MANIFEST: Final = "manifest.json"
LOCK: Final = "lock"

_PART: Final = re.compile(r"\d{9}\.arrow")
_UNFINISHED: Final = re.compile(r"\.(manifest\.json|\d{9}\.arrow)\.[0-9a-f]{32}")
# what a network file system makes of a file that is removed while it is open, and removes itself
_KEPT_BY_SYSTEM: Final = re.compile(r"\.nfs[0-9a-f]+")
_DIGEST_BYTES: Final = hashlib.sha256().digest_size
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
# a pipe in a file's place is not waited for
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def parts_folder(output: str | Path) -> Path:
    """Where the finished part of a sweep is kept until the output is complete."""
    output = Path(output)
    return output.parent / f".{output.name}.parts"


class PartsFolder:
    """An open folder of parts; see the module."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        self._lock: int | None = None
        if create:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o755)
        _check_folder(path, os.lstat(path))
        self._folder = os.open(path, _READ | os.O_DIRECTORY)
        try:
            # another may have taken its name since
            _check_folder(path, os.fstat(self._folder))
        except (SweepError, OSError):
            os.close(self._folder)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the lock and of the folder."""
        for held in (self._lock, self._folder):
            if held is not None and held >= 0:
                os.close(held)
        self._lock, self._folder = None, -1

    def lock(self, busy: str) -> None:
        """Keep other processes out; a process that is killed lets go."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = os.open(LOCK, flags, 0o644, dir_fd=self._folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # who had it may have removed the file and the folder in between
            is_there = os.path.samestat(os.fstat(lock), self._status(LOCK))
        except (BlockingIOError, FileNotFoundError):
            is_there = False
        except OSError:
            os.close(lock)
            raise
        if not is_there:
            os.close(lock)
            raise SweepError(f"{self.path} is in use: {busy}")
        self._lock = lock

    def check_names(self) -> None:
        """Refuse a folder that holds anything else than what a sweep leaves there."""
        for name in sorted(os.listdir(self._folder)):
            if _KEPT_BY_SYSTEM.fullmatch(name):
                continue
            if not (name in (LOCK, MANIFEST) or _PART.fullmatch(name) or _UNFINISHED.fullmatch(name)):
                why = "no file of a sweep"
            else:
                status = self._status(name)
                if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
                    continue
                is_file = stat.S_ISREG(status.st_mode)
                why = "a file with another name elsewhere" if is_file else "no plain file"
            raise SweepError(
                f"{self.path} holds {name!r}, {why}; nothing there was removed: move it away, or name "
                "another output"
            )

    def parts(self) -> list[str]:
        """Names of the parts, in order."""
        return sorted(name for name in os.listdir(self._folder) if _PART.fullmatch(name))

    def has_something(self) -> bool:
        """Whether a sweep is known by what lies here, or has done something; else it was stopped before."""
        names = os.listdir(self._folder)
        return not all(name == LOCK or _UNFINISHED.fullmatch(name) for name in names)

    def read(self, name: str) -> bytes:
        """Bytes of a file."""
        with open(name, "rb", opener=self._open_to_read) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(f"{self.path / name} is no plain file")
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        """Write a file of a sweep, which is there when its bytes are on the disk."""
        unfinished = unfinished_path(Path(name)).name
        try:
            with open(unfinished, "wb", opener=self._open_new) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        finally:
            self.remove(unfinished)

    def read_sealed(self, name: str, made_for: bytes) -> bytes:
        """Content of a part that is whole, and was written for the same sweep."""
        data = self.read(name)
        content = data[_DIGEST_BYTES:]
        if _digest(made_for, content) != data[:_DIGEST_BYTES]:
            raise ValueError(f"{self.path / name} is damaged, or was written for another sweep")
        return content

    def write_sealed(self, name: str, made_for: bytes, content: bytes) -> None:
        """Write a part after the digest of it and of what it was made for: see :meth:`read_sealed`."""
        self.write(name, _digest(made_for, content) + content)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there and can be removed."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._folder)

    def remove_unfinished(self) -> None:
        """Remove what a killed process was writing."""
        for name in os.listdir(self._folder):
            if _UNFINISHED.fullmatch(name):
                os.unlink(name, dir_fd=self._folder)

    def clear(self) -> None:
        """Remove parts and manifest, the manifest last: parts without one are removed too."""
        self.remove_unfinished()
        for name in [*self.parts(), MANIFEST]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder)

    def remove_folder(self) -> None:
        """Remove what a sweep has put there, and the folder if nothing else is in it."""
        with contextlib.suppress(OSError):
            self.clear()
        self.remove(LOCK)
        self.close()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _status(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._folder, follow_symlinks=False)

    def _open_to_read(self, name: str, _: int) -> int:
        return os.open(name, _READ, dir_fd=self._folder)

    def _open_new(self, name: str, _: int) -> int:
        return os.open(name, _CREATE, 0o644, dir_fd=self._folder)


def _digest(made_for: bytes, content: bytes) -> bytes:
    digest = hashlib.sha256(hashlib.sha256(made_for).digest())
    digest.update(content)
    return digest.digest()


def _check_folder(path: Path, status: os.stat_result) -> None:
    """Refuse what is no folder of this user's alone."""
    why = ""
    if stat.S_ISLNK(status.st_mode):
        why = "is a link"
    elif not stat.S_ISDIR(status.st_mode):
        why = "is no folder"
    elif status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
        made = _status_of_new_file(path)
        if status.st_uid != made.st_uid:
            why = f"belongs to another user (uid {status.st_uid})"
        elif status.st_mode & _OTHERS_WRITE and not made.st_mode & _OTHERS_WRITE:
            why = "may be written to by other users"
    if why:
        raise SweepError(
            f"{path} {why}: what a sweep has done is kept in a folder of one's own alone; move it away, or "
            "name another output"
        )


def _status_of_new_file(path: Path) -> os.stat_result:
    """What our files look like here: some file systems give all files to one user, or know no modes."""
    probe = unfinished_path(path)
    file = os.open(probe, _CREATE, 0o600)
    try:
        return os.fstat(file)
    finally:
        os.close(file)
        probe.unlink()
