"""Turns of processes that need the same loop: one compiles it, the others wait and read its code.

A turn is a lock on a file next to the code, which the system releases when its process ends. A process that
has waited too long, or cannot lock the file, compiles without a turn.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from fastroof.compiled.trusted_files import open_trusted

LONGEST_S: Final = 120.0
"""Maximum seconds that a process waits for another one, which may be stopped."""

SUFFIX: Final = ".lock"
_LOOK_S: Final = 0.02


class Turn:
    """The right to compile until :meth:`end`; ``waited`` is whether another process had it first."""

    def __init__(self, folders: tuple[Path, ...], name: str) -> None:
        self.waited = False
        self._folder = self._file = -1
        self._name = name + SUFFIX
        for folder in folders:
            with suppress(OSError):
                self._folder = open_trusted(folder)
                try:
                    self._take()
                finally:
                    if self._file < 0:
                        os.close(self._folder)
                return

    def _take(self) -> None:
        latest = time.monotonic() + LONGEST_S
        while not self._is_taken():
            self.waited = True
            if time.monotonic() > latest:
                return
            time.sleep(_LOOK_S)

    def _is_taken(self) -> bool:
        """Try to lock the file of this name."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(self._name, flags, 0o644, dir_fd=self._folder)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the process that held it may have removed the file in between
            there = os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)
            if os.path.samestat(there, os.fstat(file)):
                self._file, file = file, -1
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError:  # as on a file system without locks
            os.unlink(self._name, dir_fd=self._folder)
            raise
        finally:
            if file >= 0:
                os.close(file)
        return self._file >= 0

    def end(self) -> None:
        """Let the next process in, and leave no file behind."""
        if self._file >= 0:
            with suppress(OSError):
                os.unlink(self._name, dir_fd=self._folder)
            os.close(self._file)
            os.close(self._folder)
            self._file = -1
