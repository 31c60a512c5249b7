"""Plans cached on disk between processes: found by what was asked, used while the files read are the same.

They lie beside the compiled loops and by the same rules (fastroof.compiled.kept_files): read from folders
that nobody else can have written to, with a digest, and without unpickling anything. What is missing, damaged
or not trusted is as if it were not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastroof.compiled.kept_files import cache_roots, opened, read_kept, write_kept
from fastroof.documents import parse_json
from fastroof.errors import FastroofError
from fastroof.file_access import FilesRead, recorded

if TYPE_CHECKING:
    from fastroof.plan.kept_plan import KeptPlan
    from fastroof.plan.step_plan import StepPlan

__all__ = ["FOLDER", "MOST_BYTES", "find_plan", "keep_plan", "kept_plan"]

FOLDER: Final = "plans"
"""Folder of the cache."""

MOST_BYTES: Final = 32 * 2**20
"""Bytes of all plans of a folder: the ones used last stay."""

_SIZE: Final = struct.Struct("<Q")
"""Bytes of the record of files, which comes first."""

_KEY_BYTES: Final = hashlib.sha256().digest_size
_NAME: Final = re.compile(r"[0-9a-f]{32}\.plan(\.[0-9a-f]+)?")


def kept_plan(identity: str | None, make: Callable[[], StepPlan]) -> KeptPlan:
    """Return the plan that was kept, or make it and keep it."""
    from fastroof.plan.kept_plan import kept_bytes, kept_of, read_kept_plan

    found = None if identity is None else find_plan(identity)
    if found is not None:
        with suppress(ValueError):
            files, data = _without_files(found)
            if FilesRead.holds(files):
                return read_kept_plan(data)
    with _warnings_met() as met, recorded() as read:
        kept = kept_of(make())
    if identity is not None and not met and read.is_repeatable:
        keep_plan(identity, _with_files(read, kept_bytes(kept)))
    return kept


def _with_files(read: FilesRead, plan: bytes) -> bytes:
    """A plan behind the record of what was read for it, in whole words of 8 bytes."""
    text = json.dumps(read.entries).encode()
    text += b" " * (-len(text) % 8)
    return _SIZE.pack(len(text)) + text + plan


def _without_files(found: bytes) -> tuple[Any, bytes]:
    try:
        (size,) = _SIZE.unpack_from(found)
        text, plan = found[_SIZE.size : _SIZE.size + size], found[_SIZE.size + size :]
        return parse_json(text, "the files of a cached plan"), plan
    except (FastroofError, struct.error) as error:
        raise ValueError(f"not a cached plan: {error}") from None


@contextmanager
def _warnings_met() -> Iterator[list[str]]:
    """Note warnings, which are shown as they were before."""
    shown = warnings.showwarning
    met: list[str] = []

    def show(message: Warning | str, *rest: Any, **more: Any) -> None:
        met.append(str(message))
        shown(message, *rest, **more)

    warnings.showwarning = show
    try:
        yield met
    finally:
        warnings.showwarning = shown


def _key(identity: str) -> tuple[bytes, str]:
    """A digest of what a plan is made from, and the name of its file."""
    digest = hashlib.sha256(identity.encode())
    return digest.digest(), f"{digest.hexdigest()[:32]}.plan"


def find_plan(identity: str) -> bytes | None:
    """Return what was kept of a plan, or None."""
    key, name = _key(identity)
    for root in cache_roots():
        with suppress(OSError, ValueError), opened(root / FOLDER) as at:
            data = read_kept(at, name)
            if data[:_KEY_BYTES] == key:
                with suppress(OSError):
                    os.utime(name, dir_fd=at)  # in use: see _make_room
                return data[_KEY_BYTES:]
    return None


def keep_plan(identity: str, plan: bytes) -> bool:
    """Keep a plan in the first folder of the cache that takes it."""
    key, name = _key(identity)
    if len(plan) > MOST_BYTES // 4:
        return False
    for root in cache_roots():
        with suppress(OSError):
            write_kept(root / FOLDER, name, key + plan)
            with suppress(OSError):
                _make_room(root / FOLDER)
            return True
    return False


def _make_room(folder: Path) -> None:
    """Remove plans that were not used for longest, until the rest is not too large; nothing else."""
    with opened(folder) as at:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        listed = os.open(".", flags, dir_fd=at)
        try:
            found = []
            for name in filter(_NAME.fullmatch, os.listdir(listed)):
                with suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=listed, follow_symlinks=False)
                    found.append((status.st_mtime_ns, status.st_size, name))
            total = sum(size for _, size, _ in found)
            for _, size, name in sorted(found):
                if total <= MOST_BYTES:
                    break
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=listed)
                total -= size
        finally:
            os.close(listed)
