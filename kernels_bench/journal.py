"""The journal of a run: one JSON object a line, appended as points finish.

A line counts once its newline is written, so a kill at any moment leaves whole lines and at most one
torn tail, which is cut off before anything is appended. No row is lost but the one in flight, and
none is written twice.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Final

from fastroof.checks import is_number, is_whole_number, shown
from fastroof.columns import MEASURED_US
from fastroof.documents import parse_json
from fastroof.errors import MeasureError

FSYNC_EVERY_S: Final = 1.0
"""A power cut loses at most this much; a killed process loses nothing that was appended."""
MAX_ERRORS: Final = 2
"""A point that failed is tried once more by a resumed run: a lost device fails innocent points too."""

RUN_TYPES: Final = ("start", "row", "sentinel", "skip", "end")
"""Types of record in the journal of a run."""
_STATE: Final = ("sm_clock_mhz", "power_w", "temperature_c", "power_limited_us")

_MOST_BITS: Final = 2**63 - 1


def _is_time_us(value: Any) -> bool:
    """Whether it is a time of a kernel, or what a sentinel has that could not be timed."""
    return value is None or (is_number(value) and MEASURED_US[0] <= value <= MEASURED_US[1])


def _is_count(value: Any) -> bool:
    return is_whole_number(value, 0, _MOST_BITS)


_FIELDS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    **dict.fromkeys(
        ("run_id", "key", "operator", "kind", "reason", "kernel"),
        (lambda one: isinstance(one, str), "a text"),
    ),
    **dict.fromkeys(
        ("facts", "versions", "values", "request"), (lambda one: isinstance(one, dict), "an object")
    ),
    **dict.fromkeys(_STATE, (lambda one: one is None or is_number(one), "a finite number or null")),
    **dict.fromkeys(("round", "quantises_input"), (_is_count, "a whole number")),
    "throttle_reasons": (_is_count, "a whole number"),
}
"""What fields that are there hold; :mod:`kernels_bench.output.recorded` looks at the rows' own."""

_NEEDED: Final = {
    "start": ("gpu",),
    "sentinel": ("key", "round", "latency_us"),
    "skip": ("key", "kind", "operator", "values"),
}


def read_journal(path: Path, types: Sequence[str] = RUN_TYPES) -> list[dict[str, Any]]:
    """Read every whole line of a journal."""
    return [record for record, _ in _whole_lines(Path(path), types)]


def starts(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the start lines: one for the run, one more for each time it was resumed."""
    return [r for r in records if r["type"] == "start"]


def done_keys(records: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the keys of points that a resumed run must not touch again.

    >>> sorted(done_keys([{"type": "row", "key": "a"}, {"type": "skip", "key": "b", "kind": "error"}]))
    ['a']
    """
    done, errors = set(), dict[str, int]()
    for record in records:
        key = record.get("key", "")
        if record["type"] == "row" or (record["type"] == "skip" and record["kind"] != "error"):
            done.add(key)
        elif record["type"] == "skip":
            errors[key] = errors.get(key, 0) + 1
    return done | {key for key, count in errors.items() if count >= MAX_ERRORS}


def find_journals(folder: Path) -> list[Path]:
    """Return the journals of an output folder, oldest run first."""
    return sorted(Path(folder).glob("journal-*.jsonl"))


class Journal:
    """A journal that is open for appending, by one process at a time."""

    def __init__(
        self, path: Path, seconds: Callable[[], float] = monotonic, types: Sequence[str] = RUN_TYPES
    ) -> None:
        self.path = Path(path)
        self._seconds = seconds
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise MeasureError(f"{self.path} cannot be opened for writing: {error.strerror}") from None
        try:
            self._lock()
            whole = list(_whole_lines(self.path, types))
            self.records = [record for record, _ in whole]
            self._end = sum(size for _, size in whole)
            os.ftruncate(self._file, self._end)
        except BaseException:
            os.close(self._file)
            raise
        self._synced_at = seconds()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record as one line."""
        line = json.dumps(finite(record), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            os.ftruncate(self._file, self._end)  # what an interrupted append left
            os.lseek(self._file, self._end, os.SEEK_SET)
            left = line
            while left:
                left = left[os.write(self._file, left) :]
            now = self._seconds()
            if now - self._synced_at >= FSYNC_EVERY_S:
                os.fsync(self._file)
                self._synced_at = now
        except OSError as error:
            self._cut()
            raise MeasureError(
                f"{self.path} cannot be written: {error.strerror}; every earlier row is safe: "
                "make room and continue (`kernels-bench resume`, or `kernels-bench steps` once more)"
            ) from None
        self._end += len(line)
        self.records.append(parse_json(line, "a record", MeasureError))

    def close(self) -> None:
        """Have the disk keep what was written, and let others open the journal."""
        if self._file < 0:
            return
        try:
            os.fsync(self._file)
        except OSError as error:
            raise MeasureError(f"{self.path} cannot be written: {error.strerror}") from None
        finally:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except MeasureError:
            if error is None:  # else the first error is more useful
                raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Measuring works on file systems without locks too.
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise MeasureError(
                    f"{self.path} is being written by another run; let it end, or give another -o"
                ) from None

    def _cut(self) -> None:
        """Take a half-written line back; the reader would drop it too."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, self._end)


def _whole_lines(path: Path, types: Sequence[str]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each record with the bytes its line takes, newline included."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise MeasureError(f"{path} cannot be read: {error.strerror}") from None
    # What follows the last newline is torn, or nothing.
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            record = parse_json(line, "a record", MeasureError)
        except MeasureError:
            record = None
        if not isinstance(record, dict) or record.get("type") not in types:
            raise MeasureError(
                f"{path}, line {number}: not a record of a run, starts with {line[:40]!r}; "
                f"need a JSON object of type {', '.join(types)}: delete the line to continue without it"
            )
        if wrong := _wrong(record, line):
            raise MeasureError(f"{path}, line {number}: a {record['type']} line {wrong}: delete it")
        if record["type"] in ("row", "sentinel"):
            record |= {name: math.nan for name in _STATE if record.get(name) is None}
        yield record, len(line) + 1


def _wrong(record: Mapping[str, Any], line: bytes) -> str | None:
    """Return what a record holds that no run writes."""
    if missing := [name for name in _NEEDED.get(record["type"], ()) if name not in record]:
        return f"has no {', '.join(missing)}"
    for name, (is_right, what) in _FIELDS.items():
        if name in record and not is_right(record[name]):
            return f"whose {name} is {shown(record[name])}, need {what}"
    if record["type"] == "sentinel" and not _is_time_us(record["latency_us"]):
        least, most = MEASURED_US
        return f"whose latency_us is {shown(record['latency_us'])}, need {least:g} to {most:g} us or null"
    if b"\\u" in line:
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return "has text that is not Unicode"
    return None


def finite(value: Any) -> Any:
    """Return what JSON can hold: null for NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value
