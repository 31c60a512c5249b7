"""Files of the cache folders: written whole, believed where nobody else can have written them.

Compiled loops are kept so (fastroof.compiled.code_cache), and whatever else a later process is to take on
trust. What does not pass is an error of the system's kind: whoever asks makes the thing again.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from fastroof.compiled.trusted_folders import is_ours, open_trusted

__all__ = ["cache_roots", "opened", "read_kept", "write_kept"]

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
