"""Checkpoints: finished work of an unfinished sweep, stored next to its output so that it can be resumed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pyarrow as pa
import pyarrow.parquet as pq

from fastroof.atomic_files import remove_unfinished, unfinished_path, write_whole
from fastroof.documents import parse_json
from fastroof.errors import SweepError
from fastroof.sweep.identity import IDENTITY_KEYS, differences
from fastroof.sweep.kind import SweepKind
from fastroof.sweep.packed_results import packed_results, unpacked_results
from fastroof.sweep.units import UnitResult, WorkUnit

MANIFEST: Final = "manifest.json"
LOCK: Final = "lock"

_PART: Final = re.compile(r"\d{9}\.arrow")
_UNFINISHED: Final = re.compile(r"\.(manifest\.json|\d{9}\.arrow)\.[0-9a-f]{32}")
# NFS renames files that are removed while open, and removes them itself
_RENAMED_BY_NFS: Final = re.compile(r"\.nfs[0-9a-f]+")
_DIGEST_BYTES: Final = hashlib.sha256().digest_size
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH

PART_EVERY_S: Final = 2.0
"""Maximum work lost by a kill; shorter sweeps write no checkpoint."""
ROWS_A_PART: Final = 2**17
"""Pending rows that trigger an earlier write, to bound memory."""

Results = Generator[UnitResult, None, None]


def parts_folder(output: str | Path) -> Path:
    """Return the folder of the finished parts of a sweep, used until the output is complete."""
    output = Path(output)
    return output.parent / f".{output.name}.parts"


def _check_folder(path: Path) -> None:
    """Reject anything but a folder that only this user can write to, with nothing but files of a sweep."""
    status = path.lstat()
    why = ""
    if stat.S_ISLNK(status.st_mode):
        why = "is a link"
    elif not stat.S_ISDIR(status.st_mode):
        why = "is not a folder"
    elif status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
        new_status = _status_of_new_file(path)
        if status.st_uid != new_status.st_uid:
            why = f"belongs to another user (uid {status.st_uid})"
        elif status.st_mode & _OTHERS_WRITE and not new_status.st_mode & _OTHERS_WRITE:
            why = "may be written to by other users"
    if why:
        raise SweepError(
            f"{path} {why}: a sweep stores finished work in a private folder; move this one away, or "
            "use another output"
        )
    for file in sorted(path.iterdir()):
        if _RENAMED_BY_NFS.fullmatch(file.name):
            continue
        status = file.lstat()
        is_ours = file.name in (LOCK, MANIFEST) or _PART.fullmatch(file.name)
        if not (is_ours or _UNFINISHED.fullmatch(file.name)):
            why = "not a file of a sweep"
        elif not stat.S_ISREG(status.st_mode):
            why = "not a regular file"
        elif status.st_nlink > 1:
            why = "a file with another hard link"
        if why:
            raise SweepError(
                f"{path} holds {file.name!r}, {why}; nothing was removed: move it away, or use another output"
            )


def _status_of_new_file(path: Path) -> os.stat_result:
    """Return the status of a new file here: some file systems ignore owners or modes."""
    probe = unfinished_path(path)
    probe.touch(0o600, exist_ok=False)
    try:
        return probe.stat()
    finally:
        probe.unlink()


class Checkpoint:
    """The finished units of a sweep, in a folder next to its output."""

    def __init__(
        self,
        sweep: SweepKind,
        output: Path,
        identity: Mapping[str, str],
        *,
        resume: bool = False,
        restart: bool = False,
    ) -> None:
        self.sweep = sweep
        self.output = output
        self.folder = parts_folder(output)
        self.identity = {key: identity.get(key, "") for key in IDENTITY_KEYS}
        self.resume = resume
        self.restart = restart
        self._made_for = json.dumps(self.identity, sort_keys=True).encode()
        self._stored: dict[int, Path] = {}
        self._loaded: tuple[Path, dict[int, UnitResult]] = (output, {})
        self._pending: list[tuple[WorkUnit, UnitResult]] = []
        self._pending_rows = 0
        self._written_at = time.monotonic()
        self._has_rows = False
        self._is_complete = False
        self._continues = False
        self._lock: int | None = None

    def __enter__(self) -> Self:
        try:
            if os.path.lexists(self.folder):
                self._take_folder()
            # a resumed sweep replaces other results, as it would have without the interruption
            if self.resume and not self._continues:
                self._check_output()
        except OSError as error:
            self._close()
            raise self._failed(error) from None
        except SweepError:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # a sweep that yields no rows has nothing to resume
            if kind is None or (self._is_complete and not self._has_rows):
                if self._lock is not None:
                    self._remove_folder()
            else:
                # report the first error, not this one
                with contextlib.suppress(SweepError):
                    self._write_pending()
        finally:
            self._close()

    def results(
        self, units: Sequence[WorkUnit], evaluate: Callable[[Sequence[WorkUnit]], Results]
    ) -> Results:
        """Yield one result per unit in order: stored ones, and the others as they are evaluated."""
        missing = [unit for unit in units if unit.number not in self._stored]
        fresh = evaluate(missing)
        try:
            for unit in units:
                result = self._load(unit.number)
                if result is None:
                    result = next(fresh)
                    self._pending.append((unit, result))
                    self._pending_rows += result.rows.num_rows
                    is_due = time.monotonic() - self._written_at >= PART_EVERY_S
                    if is_due or self._pending_rows >= ROWS_A_PART:
                        self._write_pending()
                self._has_rows |= result.rows.num_rows > 0
                self._is_complete = unit is units[-1]
                yield result
        finally:
            fresh.close()

    def _check_output(self) -> None:
        """Refuse to resume into the results of another sweep."""
        if self.output.suffix != ".parquet" or not self.output.is_file():
            return
        try:
            metadata = pq.read_schema(self.output).metadata or {}
        except (OSError, pa.ArrowException):
            return
        stored = {key.decode(): value.decode(errors="replace") for key, value in metadata.items()}
        if "fastroof.spec" in stored and (differing := differences(stored, self.identity)):
            raise SweepError(
                f"{self.output} holds results of another sweep ({_listed(differing)}): use another output, "
                "or omit --resume to replace it"
            )

    def _take_folder(self) -> None:
        """Inspect the folder, and decide whether it can be resumed from, cleared or must be rejected."""
        _check_folder(self.folder)
        is_begun = (self.folder / MANIFEST).exists() or bool(self._parts())
        if self.resume or self.restart or not is_begun:
            self._hold_lock()
        manifest = self._manifest()
        differing = [] if manifest is None else differences(manifest, self.identity)
        if self._lock is None:
            whose = f"another sweep ({_listed(differing)})" if differing else "this sweep"
            ways = "" if differing else "--resume continues it, "
            raise SweepError(f"{self.folder} holds an unfinished run of {whose}: {ways}--restart removes it")
        if self.resume and differing:
            raise SweepError(
                f"{self.folder} holds an unfinished run of another sweep ({_listed(differing)}): resume that "
                "one, or remove it with --restart"
            )
        # without a manifest, it was killed before it was written: the contents are unknown
        self._continues = self.resume and manifest is not None
        if not self._continues:
            self._clear()
        for part in self._parts():
            self._stored |= dict.fromkeys(self._read(part), part)

    def _load(self, number: int) -> UnitResult | None:
        """Return the stored result of a unit, or None; one part is held in memory at a time."""
        part = self._stored.get(number)
        if part is None:
            return None
        if self._loaded[0] != part:
            self._loaded = part, self._read(part)
        if number not in self._loaded[1]:
            raise SweepError(
                f"{part} changed while it was read: run again with --resume to evaluate its units again"
            )
        return self._loaded[1][number]

    def _read(self, part: Path) -> dict[int, UnitResult]:
        """Return the results in a part; remove the part and return nothing if it is damaged."""
        try:
            data = part.read_bytes()
            if self._digest(data[_DIGEST_BYTES:]) == data[:_DIGEST_BYTES]:
                return unpacked_results(data[_DIGEST_BYTES:])
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError):
            pass
        with contextlib.suppress(OSError):
            part.unlink()
        return {}

    def _write_pending(self) -> None:
        """Write the units finished since the last part, with a digest of them and of the sweep."""
        self._written_at = time.monotonic()
        if not self._pending:
            return
        units, results = zip(*self._pending, strict=True)
        content = packed_results(self.sweep, units, results)
        part = self.folder / f"{units[0].number:09d}.arrow"
        try:
            if self._lock is None:
                self._make_folder()
            if self._manifest() is None:
                manifest = json.dumps(self.identity, indent=1)
                write_whole(self.folder / MANIFEST, manifest, is_durable=True)
            write_whole(part, self._digest(content) + content, is_durable=True)
        except OSError as error:
            raise self._failed(error) from None
        self._pending.clear()
        self._pending_rows = 0

    def _digest(self, content: bytes) -> bytes:
        digest = hashlib.sha256(hashlib.sha256(self._made_for).digest())
        digest.update(content)
        return digest.digest()

    def _parts(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if _PART.fullmatch(path.name))

    def _manifest(self) -> dict[str, str] | None:
        try:
            manifest = parse_json((self.folder / MANIFEST).read_bytes(), MANIFEST, SweepError)
        except (FileNotFoundError, SweepError):
            return None
        return manifest if isinstance(manifest, dict) else None

    def _make_folder(self) -> None:
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        _check_folder(self.folder)
        self._hold_lock()

    def _hold_lock(self) -> None:
        """Lock out other processes; the lock ends with its process, even if that is killed."""
        path = self.folder / LOCK
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the previous holder may have removed the file and the folder in between
            is_there = os.path.samestat(os.fstat(lock), path.lstat())
        except (BlockingIOError, FileNotFoundError):
            is_there = False
        except OSError:
            os.close(lock)
            raise
        if not is_there:
            os.close(lock)
            raise SweepError(f"{self.folder} is in use: another sweep writes {self.output}")
        self._lock = lock

    def _clear(self) -> None:
        """Remove the parts, then the manifest: parts without a manifest are leftovers."""
        for path in (*self._parts(), self.folder / MANIFEST):
            path.unlink(missing_ok=True)

    def _remove_folder(self) -> None:
        """Remove the files of the sweep, and the folder if it is then empty."""
        with contextlib.suppress(OSError):
            self._clear()
            remove_unfinished(self.folder)
            (self.folder / LOCK).unlink()
        self._close()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _failed(self, error: OSError) -> SweepError:
        reason = error.strerror or str(error)
        return SweepError(
            f"{self.folder}, the sweep's checkpoint, cannot be written ({reason}): free space or fix its "
            "permissions, then continue with --resume"
        )


def _listed(differing: Sequence[str]) -> str:
    most = 3
    more = f"; {len(differing) - most} more" if len(differing) > most else ""
    return "; ".join(differing[:most]) + more
