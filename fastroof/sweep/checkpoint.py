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

from fastroof.atomic_files import remove_unfinished, unfinished_path
from fastroof.documents import parse_json
from fastroof.errors import SweepError
from fastroof.sweep.identity import IDENTITY_KEYS, differences
from fastroof.sweep.kind import SweepKind
from fastroof.sweep.packed_results import joined_rows, outcomes_from_json, outcomes_to_json, rows_by_unit
from fastroof.sweep.units import UnitResult, WorkUnit

MANIFEST: Final = "manifest.json"
LOCK: Final = "lock"

_PART: Final = re.compile(r"\d{9}\.arrow")
_UNFINISHED: Final = re.compile(r"\.(manifest\.json|\d{9}\.arrow)\.[0-9a-f]{32}")
# NFS renames files that are removed while open, and removes them itself
_RENAMED_BY_NFS: Final = re.compile(r"\.nfs[0-9a-f]+")
_DIGEST_BYTES: Final = hashlib.sha256().digest_size
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
# O_NONBLOCK: do not wait for the writer of a pipe
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def parts_folder(output: str | Path) -> Path:
    """Return the folder of the finished parts of a sweep, used until the output is complete."""
    output = Path(output)
    return output.parent / f".{output.name}.parts"


class PartsFolder:
    """An open folder of finished parts of a sweep."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        self._lock: int | None = None
        if create:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o755)
        _check_folder(path, os.lstat(path))
        self._folder = os.open(path, _READ | os.O_DIRECTORY)
        try:
            # another folder may have taken its name since
            _check_folder(path, os.fstat(self._folder))
        except (SweepError, OSError):
            os.close(self._folder)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock and close the folder."""
        for held in (self._lock, self._folder):
            if held is not None and held >= 0:
                os.close(held)
        self._lock, self._folder = None, -1

    def lock(self, busy: str) -> None:
        """Lock out other processes; the lock ends with its process, even if that is killed."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = os.open(LOCK, flags, 0o644, dir_fd=self._folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the previous holder may have removed the file and the folder in between
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
        """Reject a folder that holds anything but files of a sweep."""
        for name in sorted(os.listdir(self._folder)):
            if _RENAMED_BY_NFS.fullmatch(name):
                continue
            if not (name in (LOCK, MANIFEST) or _PART.fullmatch(name) or _UNFINISHED.fullmatch(name)):
                why = "not a file of a sweep"
            else:
                status = self._status(name)
                if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
                    continue
                is_file = stat.S_ISREG(status.st_mode)
                why = "a file with another hard link" if is_file else "not a regular file"
            raise SweepError(
                f"{self.path} holds {name!r}, {why}; nothing was removed: move it away, or use another output"
            )

    def parts(self) -> list[str]:
        """Return the names of the parts, in order."""
        return sorted(name for name in os.listdir(self._folder) if _PART.fullmatch(name))

    def has_something(self) -> bool:
        """Return whether a sweep stored a manifest or parts here before it stopped."""
        names = os.listdir(self._folder)
        return not all(name == LOCK or _UNFINISHED.fullmatch(name) for name in names)

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        with open(name, "rb", opener=self._open_to_read) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(f"{self.path / name} is not a regular file")
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically and durably."""
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
        """Return the content of a part; raise if it is damaged or was written for another sweep."""
        data = self.read(name)
        content = data[_DIGEST_BYTES:]
        if _digest(made_for, content) != data[:_DIGEST_BYTES]:
            raise ValueError(f"{self.path / name} is damaged, or was written for another sweep")
        return content

    def write_sealed(self, name: str, made_for: bytes, content: bytes) -> None:
        """Write a part with a digest of its content and of the sweep: see :meth:`read_sealed`."""
        self.write(name, _digest(made_for, content) + content)

    def remove(self, name: str) -> None:
        """Remove a file if it exists and can be removed."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._folder)

    def remove_unfinished(self) -> None:
        """Remove unfinished files of killed processes."""
        for name in os.listdir(self._folder):
            if _UNFINISHED.fullmatch(name):
                os.unlink(name, dir_fd=self._folder)

    def clear(self) -> None:
        """Remove the parts, then the manifest: parts without a manifest are leftovers."""
        self.remove_unfinished()
        for name in [*self.parts(), MANIFEST]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder)

    def remove_folder(self) -> None:
        """Remove the files of the sweep, and the folder if it is then empty."""
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
    """Reject anything but a folder that only this user can write to."""
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


def _status_of_new_file(path: Path) -> os.stat_result:
    """Return the status of a new file here: some file systems ignore owners or modes."""
    probe = unfinished_path(path)
    file = os.open(probe, _CREATE, 0o600)
    try:
        return os.fstat(file)
    finally:
        os.close(file)
        probe.unlink()


PART_EVERY_S: Final = 2.0
"""Maximum work lost by a kill; shorter sweeps write no checkpoint."""
ROWS_A_PART: Final = 2**17
"""Pending rows that trigger an earlier write, to bound memory."""

OUTCOMES: Final = b"fastroof.outcomes"

Results = Generator[UnitResult, None, None]


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
        self._stored: dict[int, str] = {}
        self._loaded: tuple[str, dict[int, UnitResult]] = ("", {})
        self._pending: list[tuple[WorkUnit, UnitResult]] = []
        self._pending_rows = 0
        self._written_at = time.monotonic()
        self._has_rows = False
        self._is_complete = False
        self._continues = False
        self._opened: PartsFolder | None = None

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
                if self._opened is not None:
                    self._opened.remove_folder()
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
        here = {**self.identity}
        if "fastroof.inputs_hash" not in stored:
            here.pop("fastroof.inputs_hash")
        if "fastroof.spec" in stored and (differing := differences(stored, here)):
            raise SweepError(
                f"{self.output} holds results of another sweep ({_listed(differing)}): use another output, "
                "or omit --resume to replace it"
            )

    def _take_folder(self) -> None:
        """Inspect the folder, and decide whether it can be resumed from, cleared or must be rejected."""
        if not (self.resume or self.restart):
            with PartsFolder(self.folder) as folder:
                manifest = _manifest(folder)
                is_unfinished = folder.has_something()
            if not is_unfinished:
                # stopped before any unit finished: no confirmation needed to remove it
                self._open(create=False).clear()
                return
            differing = [] if manifest is None else differences(manifest, self.identity)
            whose = f"another sweep ({_listed(differing)})" if differing else "this sweep"
            ways = "" if differing else "--resume continues it, "
            raise SweepError(f"{self.folder} holds an unfinished run of {whose}: {ways}--restart removes it")
        folder = self._open(create=False)
        manifest = None if self.restart else _manifest(folder)
        if manifest is None:
            # restarting, or killed before the manifest was written: the contents are unknown
            folder.clear()
        elif differing := differences(manifest, self.identity):
            raise SweepError(
                f"{self.folder} holds an unfinished run of another sweep ({_listed(differing)}): resume that "
                "one, or remove it with --restart"
            )
        else:
            self._continues = True
        # leftovers of a killed run
        folder.remove_unfinished()
        remove_unfinished(self.output.parent, self.output.name)
        for name in folder.parts():
            for number in self._read(folder, name)[1]:
                self._stored[number] = name

    def _load(self, number: int) -> UnitResult | None:
        """Return the stored result of a unit, or None; one part is held in memory at a time."""
        name = self._stored.get(number)
        if name is None or self._opened is None:
            return None
        if self._loaded[0] != name:
            table, outcomes = self._read(self._opened, name)
            if number not in outcomes:
                raise SweepError(
                    f"{self.folder / name} changed while it was read: run again with --resume to evaluate "
                    "its units again"
                )
            rows = rows_by_unit(table, outcomes)
            self._loaded = (
                name,
                {
                    unit: result._replace(rows=unit_rows)
                    for (unit, result), unit_rows in zip(outcomes.items(), rows, strict=True)
                },
            )
        return self._loaded[1][number]

    def _read(self, folder: PartsFolder, name: str) -> tuple[pa.Table, dict[int, UnitResult]]:
        """Return the rows and outcomes of a part; remove the part and return nothing if it is damaged."""
        try:
            table = pa.ipc.open_file(folder.read_sealed(name, self._made_for)).read_all()
            bare = table.replace_schema_metadata(None)
            nothing = pa.RecordBatch.from_pylist([], schema=bare.schema)
            return bare, outcomes_from_json(table.schema.metadata[OUTCOMES], nothing)
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError):
            folder.remove(name)
            return pa.table({}), {}

    def _write_pending(self) -> None:
        """Write the units finished since the last part."""
        self._written_at = time.monotonic()
        if not self._pending:
            return
        units, results = zip(*self._pending, strict=True)
        table = joined_rows(self.sweep, units, results)
        table = table.replace_schema_metadata({OUTCOMES: outcomes_to_json(units, results)})
        try:
            folder = self._opened or self._open(create=True)
            if _manifest(folder) is None:
                folder.write(MANIFEST, json.dumps(self.identity, indent=1).encode())
            folder.write_sealed(f"{units[0].number:09d}.arrow", self._made_for, _arrow_bytes(table))
        except OSError as error:
            raise self._failed(error) from None
        self._pending.clear()
        self._pending_rows = 0

    def _open(self, *, create: bool) -> PartsFolder:
        """Open and lock the folder after checking that it holds only files of a sweep."""
        folder = PartsFolder(self.folder, create=create)
        try:
            folder.check_names()
            folder.lock(f"another sweep writes {self.output}")
        except (SweepError, OSError):
            folder.close()
            raise
        self._opened = folder
        return folder

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _failed(self, error: OSError) -> SweepError:
        reason = error.strerror or str(error)
        return SweepError(
            f"{self.folder}, the sweep's checkpoint, cannot be written ({reason}): free space or fix its "
            "permissions, then continue with --resume"
        )


def _manifest(folder: PartsFolder) -> dict[str, str] | None:
    try:
        manifest = parse_json(folder.read(MANIFEST), MANIFEST, SweepError)
    except (FileNotFoundError, SweepError):
        return None
    return manifest if isinstance(manifest, dict) else None


def _arrow_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _listed(differing: Sequence[str]) -> str:
    most = 3
    more = f"; {len(differing) - most} more" if len(differing) > most else ""
    return "; ".join(differing[:most]) + more
