"""Reading files and folders, with a record of every access.

Models, GPUs, engine profiles and tables are all loaded through these functions. A result made from files can
then be cached with the record, and stays valid while :meth:`FilesRead.holds`: every file that was read has
the same bytes, and every query that decided which files to read has the same answer, "file not found"
included.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

LARGE_BYTES: Final = 2**16
"""A file of at least this size counts as unchanged if its status is; smaller ones are read again."""

SETTLED_NS: Final = 2 * 10**9
"""A file that changed more recently may change again within one clock tick: only its content decides."""

_CONTENT: Final = "content"

_recording: list[FilesRead] = []


class FilesRead:
    """Files read and disk queries, in the order of first use."""

    def __init__(self) -> None:
        self.is_repeatable = True
        self._seen: dict[tuple[str, ...], Any] = {}
        self._stamps: dict[tuple[str, ...], list[int] | None] = {}

    def note(self, question: tuple[str, ...], answer: Any, stamp: list[int] | None = None) -> None:
        """Record a query and its answer."""
        if self._seen.setdefault(question, answer) != answer:
            self.is_repeatable = False
        self._stamps.setdefault(question, stamp)

    @property
    def entries(self) -> list[list[Any]]:
        """Return the record as JSON values: kind of query, path, answer and file status."""
        return [[list(question), answer, self._stamps[question]] for question, answer in self._seen.items()]

    def repeat(self) -> None:
        """Note the same reads in the records that are open now, for a result that is used again."""
        for question, answer in self._seen.items():
            _note(question, answer, self._stamps[question])

    @staticmethod
    def holds(entries: Any) -> bool:
        """Return whether the disk still gives the answers in :attr:`entries`."""
        try:
            return all(_holds(*entry) for entry in entries)
        except (TypeError, KeyError, NotImplementedError) as error:
            raise ValueError(f"not a record of files: {error}") from None


def _holds(question: list[str], answer: Any, stamp: list[int] | None) -> bool:
    kind, *arguments = question
    # open() would take a number for a file descriptor
    if not arguments or not all(isinstance(one, str) for one in arguments):
        raise ValueError(f"not a file query: {question}")
    if kind == _CONTENT:
        return _has_content(arguments[0], answer, stamp)
    return bool(_query(kind, *arguments) == answer)


@contextmanager
def recorded(record: FilesRead | None = None) -> Iterator[FilesRead]:
    """Record all reads of this process through this module, in any thread, into a new or given record."""
    record = FilesRead() if record is None else record
    _recording.append(record)
    try:
        yield record
    finally:
        _recording.remove(record)


def _note(question: tuple[str, ...], answer: Any, stamp: list[int] | None = None) -> None:
    for record in _recording:
        record.note(question, answer, stamp)


# -- content -------------------------------------------------------------------------------------


def read_bytes(path: str | Path, most_bytes: int = -1) -> bytes:
    """Return a file's content, or its first ``most_bytes``."""
    question = (_CONTENT, str(path))
    try:
        with open(path, "rb") as file:
            # status before content: a file that changes while it is read then has another status
            stamp = _noted_status(file.fileno()) if _recording else None
            content = file.read(most_bytes)
    except OSError as error:
        _note(question, _failure(error))
        raise
    if _recording:
        _note(question, hashlib.sha256(content).hexdigest(), stamp)
    return content


def file_sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file's content; empty if it cannot be read."""
    question = (_CONTENT, str(path))
    try:
        with open(path, "rb") as file:
            stamp = _noted_status(file.fileno()) if _recording else None
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        _note(question, _failure(error))
        return ""
    _note(question, digest, stamp)
    return digest


def _failure(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "error")


def _noted_status(file: int) -> list[int] | None:
    """Return an open file's status to recognise it by later; None if only its content is reliable."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        for record in _recording:
            record.is_repeatable = False
    changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
    is_settled = changed_ns + SETTLED_NS <= time.time_ns()
    return _stamp(status) if is_settled and status.st_size >= LARGE_BYTES else None


def _stamp(status: os.stat_result) -> list[int]:
    """Return the fields of a file's status that change with its content."""
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _has_content(path: str, answer: str, stamp: list[int] | None) -> bool:
    try:
        # non-blocking: a pipe in the file's place would wait for its writer
        with open(path, "rb", opener=open_nonblocking) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return False
            if stamp is not None and stamp == _stamp(status):
                return True
            return hashlib.file_digest(file, "sha256").hexdigest() == answer
    except OSError as error:
        return answer == _failure(error)


def open_nonblocking(path: str, flags: int) -> int:
    """Open a file without waiting for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


# -- queries -------------------------------------------------------------------------------------


def is_file(path: str | Path) -> bool:
    """Return whether a path is a file or a link to one; False if it cannot be determined."""
    return bool(_recorded_query("is_file", str(path)))


def is_folder(path: str | Path) -> bool:
    """Return whether a path is a folder or a link to one; False if it cannot be determined."""
    return bool(_recorded_query("is_folder", str(path)))


def exists(path: str | Path) -> bool:
    """Return whether a path exists; False if it cannot be determined."""
    return bool(_recorded_query("exists", str(path)))


def resolved(path: str | Path) -> Path:
    """Return an absolute path without links, as :meth:`pathlib.Path.resolve` does."""
    return Path(_recorded_query("resolved", str(path)))


def names_in(folder: str | Path) -> list[str]:
    """Return the names in a folder, sorted."""
    names: list[str] = _recorded_query("names_in", str(folder))
    return names


def matches(folder: str | Path, pattern: str) -> list[Path]:
    """Return the paths in a folder that match a pattern of :meth:`pathlib.Path.glob`, sorted."""
    return [Path(folder, name) for name in _recorded_query("matches", str(folder), pattern)]


def _recorded_query(kind: str, *arguments: str) -> Any:
    try:
        answer = _QUERIES[kind](*arguments)
    except OSError as error:
        _note((kind, *arguments), _failure(error))
        raise
    _note((kind, *arguments), answer)
    return answer


def _query(kind: str, *arguments: str) -> Any:
    try:
        return _QUERIES[kind](*arguments)
    except OSError as error:
        return _failure(error)


def _matches(folder: str, pattern: str) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in sorted(Path(folder).glob(pattern))]


_QUERIES: Final[dict[str, Callable[..., Any]]] = {
    "is_file": os.path.isfile,
    "is_folder": os.path.isdir,
    "exists": os.path.exists,
    "resolved": os.path.realpath,
    "names_in": lambda folder: sorted(os.listdir(folder)),
    "matches": _matches,
}
