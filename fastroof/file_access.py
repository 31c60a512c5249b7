"""Reading files and folders, with a record of everything that was looked at.

Whatever loads models, GPUs, engine profiles or tables looks at the disk through these functions. What was
made of files can then be cached together with the record, and used as long as :meth:`FilesRead.holds` finds
the same on the disk: the same bytes in every file that was read, and the same answer to every question that
decided which files to read, including "file not found".
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
"""From this size on a file counts as unchanged where its status is; smaller ones are read again."""

SETTLED_NS: Final = 2 * 10**9
"""A file that changed more recently may change again within one tick of its clock: its content decides."""

_CONTENT: Final = "content"

_recording: list[FilesRead] = []


class FilesRead:
    """Files read and disk queries, in the order of first use."""

    def __init__(self) -> None:
        self.is_repeatable = True
        self._seen: dict[tuple[str, ...], Any] = {}
        self._stamps: dict[tuple[str, ...], list[int] | None] = {}

    def note(self, question: tuple[str, ...], answer: Any, stamp: list[int] | None = None) -> None:
        """Add what the disk answered to a question."""
        if self._seen.setdefault(question, answer) != answer:
            self.is_repeatable = False
        self._stamps.setdefault(question, stamp)

    @property
    def entries(self) -> list[list[Any]]:
        """Everything as JSON: kind of query, its path, answer and file status."""
        return [[list(question), answer, self._stamps[question]] for question, answer in self._seen.items()]

    @staticmethod
    def holds(entries: Any) -> bool:
        """Tell whether the disk still answers as :attr:`entries` have it."""
        try:
            return all(_holds(*entry) for entry in entries)
        except (TypeError, KeyError, NotImplementedError) as error:
            raise ValueError(f"not a record of files: {error}") from None


def _holds(question: list[str], answer: Any, stamp: list[int] | None) -> bool:
    kind, *asked = question
    # a number would be an open file
    if not asked or not all(isinstance(one, str) for one in asked):
        raise ValueError(f"not a question: {question}")
    if kind == _CONTENT:
        return _has_content(asked[0], answer, stamp)
    return bool(_ask(kind, *asked) == answer)


@contextmanager
def recorded(record: FilesRead | None = None) -> Iterator[FilesRead]:
    """Record what all of this process reads through this module, in whichever thread; add it to a record."""
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
    """Return what a file holds, or its first ``most_bytes``."""
    question = (_CONTENT, str(path))
    try:
        with open(path, "rb") as file:
            # the status before the content: what changes while it is read has another one afterwards
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
    """Status of an open file from which it is known again later; None if only its content tells."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        for record in _recording:
            record.is_repeatable = False
    changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
    is_settled = changed_ns + SETTLED_NS <= time.time_ns()
    return _stamp(status) if is_settled and status.st_size >= LARGE_BYTES else None


def _stamp(status: os.stat_result) -> list[int]:
    """Everything of a file's status that changes with its content."""
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _has_content(path: str, answer: str, stamp: list[int] | None) -> bool:
    try:
        # without waiting for whoever writes to a pipe that has been put there
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return False
            if stamp is not None and stamp == _stamp(status):
                return True
            return hashlib.file_digest(file, "sha256").hexdigest() == answer
    except OSError as error:
        return answer == _failure(error)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


# -- questions -----------------------------------------------------------------------------------


def is_file(path: str | Path) -> bool:
    """Return whether there is a file, or a link to one; False also if unknown."""
    return bool(_asked("is_file", str(path)))


def is_folder(path: str | Path) -> bool:
    """Return whether there is a folder, or a link to one; False also if unknown."""
    return bool(_asked("is_folder", str(path)))


def exists(path: str | Path) -> bool:
    """Return whether a path exists; False also if unknown."""
    return bool(_asked("exists", str(path)))


def resolved(path: str | Path) -> Path:
    """Return an absolute path without links, as :meth:`pathlib.Path.resolve` does."""
    return Path(_asked("resolved", str(path)))


def names_in(folder: str | Path) -> list[str]:
    """Return the names of what a folder holds, sorted."""
    names: list[str] = _asked("names_in", str(folder))
    return names


def matches(folder: str | Path, pattern: str) -> list[Path]:
    """Return what a folder holds that matches a pattern of :meth:`pathlib.Path.glob`, sorted."""
    return [Path(folder, name) for name in _asked("matches", str(folder), pattern)]


def _asked(kind: str, *asked: str) -> Any:
    try:
        answer = _QUESTIONS[kind](*asked)
    except OSError as error:
        _note((kind, *asked), _failure(error))
        raise
    _note((kind, *asked), answer)
    return answer


def _ask(kind: str, *asked: str) -> Any:
    try:
        return _QUESTIONS[kind](*asked)
    except OSError as error:
        return _failure(error)


def _matches(folder: str, pattern: str) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in sorted(Path(folder).glob(pattern))]


_QUESTIONS: Final[dict[str, Callable[..., Any]]] = {
    "is_file": os.path.isfile,
    "is_folder": os.path.isdir,
    "exists": os.path.exists,
    "resolved": os.path.realpath,
    "names_in": lambda folder: sorted(os.listdir(folder)),
    "matches": _matches,
}
