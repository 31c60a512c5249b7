"""Convert a trace's columns to arrays, with errors that name the row."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastroof.arrays import Array, Bools, Floats, Longs
from fastroof.checks import one_line
from fastroof.errors import TraceError
from fastroof.traces.trace import MOST_SECONDS
from fastroof.traces.trace_formats import UNITS

_NO_VALUE: Final = r"^\s*(|nan|null|none|na|n/a)\s*$"
_ZERO: Final = r"^\s*[+-]?0+([.,]0*)?\s*$"
_NUMBER: Final = re.compile(
    r"[+-]?([0-9]*[.,]?[0-9]+|[0-9]+\.)([eE][+-]?[0-9]+)?|[+-]?(nan|inf(inity)?)", re.I
)
_DECIMAL_COMMA: Final = "^[+-]?(0|[0-9]{4,})?,[0-9]+$|^[+-]?[0-9]+,([0-9]{1,2}|[0-9]{4,})$"
"""A number whose comma cannot be one of thousands."""

_TIME_SPELLINGS: Final = (
    (r"([:T ][0-9]{2}:?[0-9]{2}:?[0-9]{2}),([0-9]+)", r"\1.\2"),
    (r"\s+([+-][0-9]{2}:?[0-9]{2})(\s+[A-Z]{2,5})?$", r"\1"),
    (r"\s*(UTC|GMT)$", "Z"),
)
_A_TIME: Final = "2026-05-01 13:00:00"
_CLOCK_CHANGE_S: Final = (1800.0, 3600.0)
"""Seconds by which a busy log goes back where clocks do."""


@dataclass(frozen=True)
class RawColumns:
    """Columns as read from a file, and labels of its rows."""

    what: str
    columns: dict[str, pa.ChunkedArray]
    row_label: Callable[[int], str]
    is_text: bool = False

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns.values())))

    def rows(self, rows: Bools) -> RawColumns:
        """Return some of the rows, with their labels."""
        places, mask = np.flatnonzero(rows), pa.array(rows)
        try:
            columns = {name: column.filter(mask) for name, column in self.columns.items()}
        except pa.ArrowException as error:
            raise TraceError(
                f"{self.what}: a column's type cannot be read ({one_line(error, 100)})"
            ) from None
        return replace(self, columns=columns, row_label=lambda row: self.row_label(int(places[row])))

    def decoded(self, name: str) -> pa.ChunkedArray:
        """Return a column without dictionary encoding."""
        column = self.columns[name]
        if not pa.types.is_dictionary(column.type):
            return column
        try:
            return column.cast(column.type.value_type)
        except pa.ArrowException:
            raise TraceError(f"{self.what}: {name} cannot be read from {column.type}") from None

    def missing(self, name: str) -> Bools:
        """Return which rows have no value: null, not a number, or an empty text."""
        column = self.decoded(name)
        if is_string(column.type):
            column = pc.if_else(pc.match_substring_regex(column, _NO_VALUE, ignore_case=True), None, column)
        # NaN of integers is an error of Arrow's
        has_nan = pa.types.is_floating(column.type)
        missing: Bools = pc.is_null(column, nan_is_null=has_nan).to_numpy()
        return missing

    def zeros(self, name: str) -> Bools:
        """Return which rows have the number 0."""
        column, types = self.decoded(name), pa.types
        if is_string(column.type):
            found = pc.match_substring_regex(column, _ZERO)
        elif types.is_floating(column.type):
            # there is no comparison of half floats
            found = pc.equal(column.cast(pa.float64()), 0.0)
        elif types.is_integer(column.type):
            found = pc.equal(column, pa.scalar(0, column.type))
        else:
            return np.zeros(len(column), bool)
        zeros: Bools = pc.fill_null(found, False).to_numpy()
        return zeros

    def refuse(self, row: int, reason: str) -> NoReturn:
        """Raise an error for a row."""
        raise TraceError(f"{self.what}, {self.row_label(row)}: {reason}")

    def refuse_where(self, wrong: Bools, reason: Callable[[int], str]) -> None:
        """Raise an error for the first invalid row, if any."""
        if wrong.any():
            row = int(np.argmax(wrong))
            self.refuse(row, reason(row))

    def seconds(self, name: str, per_s: float | None) -> Floats:
        """Return arrivals in seconds after the earliest."""
        cells = column = self._complete(name)
        if is_string(column.type):
            column = self._read_times(name, column)
        if pa.types.is_date(column.type):
            column = column.cast(pa.timestamp("s" if pa.types.is_date32(column.type) else "ms"))
        if pa.types.is_timestamp(column.type):
            self._warn_of_clock_change(name, column)
            return self._since_first(name, _flat(column.cast(pa.int64())), UNITS[column.type.unit])
        if per_s is None:
            self.refuse(
                0,
                f"{name} must be a date and time, got {_shown(cells[0])}; numbers need their unit: "
                f"columns or --columns arrival_s={name}, or arrival_ms, arrival_us, arrival_ns",
            )
        numbers = self._numbers(name, column)
        self.refuse_where(
            ~((numbers >= 0) & (numbers < np.inf)),
            lambda row: f"{name} must be a number of at least 0, got {numbers[row]}",
        )
        return self._since_first(name, numbers, per_s)

    def _since_first(self, name: str, values: Array, per_s: float) -> Floats:
        earliest, latest = values.min(), values.max()
        # Python integers: their difference may be beyond int64
        if (latest.item() - earliest.item()) / per_s > MOST_SECONDS:
            self.refuse(int(np.argmax(values)), f"{name} is over {MOST_SECONDS:g} s after the first arrival")
        since: Floats = (values - earliest) / per_s
        return since

    def tokens(self, name: str) -> Longs:
        """Return whole numbers, which may be stored as floats."""
        column = self._complete(name)
        if self.is_text and not pa.types.is_integer(column.type):
            column = self._cast_text(name, self._decimals(name, column), pa.float64(), "a whole number")
        return self._numbers(name, column, are_whole=True)

    def blocks(self, name: str) -> tuple[Longs, Longs]:
        """Return the ids of all requests' blocks, and where each request's start."""
        column = self._complete(name)
        types = pa.types
        is_list = types.is_list(column.type) or types.is_large_list(column.type)
        if not is_list or not (
            types.is_integer(column.type.value_type) or types.is_null(column.type.value_type)
        ):
            self.refuse(0, f"{name} must be a list of whole numbers, got {column.type} {_shown(column[0])}")
        counts = _flat(pc.list_value_length(column).cast(pa.int64()))
        offsets = np.concatenate([[0], np.cumsum(counts)])
        ids = pc.list_flatten(column)

        def row_of(place: int) -> int:
            return int(np.searchsorted(offsets, place, "right")) - 1

        if ids.null_count:
            self.refuse(row_of(int(np.argmax(ids.is_null().to_numpy()))), f"{name} has an id that is missing")
        return self._numbers(name, ids, row_of=row_of), offsets

    def _complete(self, name: str) -> pa.ChunkedArray:
        """Return a column, or raise an error for its first null."""
        column = self.decoded(name)
        if column.null_count:
            self.refuse(int(np.argmax(column.is_null().to_numpy())), f"{name} is missing")
        return column

    def _numbers(
        self,
        name: str,
        column: pa.ChunkedArray,
        *,
        are_whole: bool = False,
        row_of: Callable[[int], int] = int,
    ) -> Array:
        """Return int64 if the numbers are stored as integers or must be whole, else float64."""
        is_integer = pa.types.is_integer(column.type) or pa.types.is_null(column.type)
        if not is_integer and not pa.types.is_floating(column.type):
            self.refuse(0, f"{name} must be a number, got {column.type} {_shown(column[0])}")
        to = pa.int64() if is_integer or are_whole else pa.float64()
        try:
            return _flat(column.cast(to))
        except pa.ArrowInvalid:
            place = _failing(column, lambda part: part.cast(to))
            self.refuse(
                row_of(place), f"{name} must be a whole number below 2^63, got {_shown(column[place])}"
            )

    def _read_times(self, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
        """Parse text as numbers or as dates and times, whichever the first row is."""
        column = pc.utf8_trim_whitespace(column)
        if re.fullmatch(_NUMBER, column[0].as_py()):
            return self._cast_text(name, self._decimals(name, column), pa.float64(), "a number")
        # with or without a time zone, as in the first row
        zoned, plain = pa.timestamp("ns", "UTC"), pa.timestamp("ns")
        for kind in (zoned, plain):
            with suppress(pa.ArrowInvalid):
                return column.cast(kind)
        # ISO 8601 has a decimal comma too; Arrow has neither it, nor a space before the zone, nor its name
        for pattern, instead in _TIME_SPELLINGS:
            column = pc.replace_substring_regex(column, pattern, instead)
        try:
            column.slice(0, 1).cast(zoned)
        except pa.ArrowInvalid:
            return self._cast_text(name, column, plain, f"a date and time without a zone such as {_A_TIME}")
        return self._cast_text(name, column, zoned, f"a date and time with a zone such as {_A_TIME}+02:00")

    def _decimals(self, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return numbers with a decimal point instead of a comma, which must not be a thousands separator."""
        has_comma = pc.match_substring(column, ",")
        if not pc.any(has_comma).as_py():
            return column
        if not pc.any(pc.match_substring_regex(column, _DECIMAL_COMMA)).as_py():
            row = int(np.argmax(has_comma.to_numpy()))
            self.refuse(
                row,
                f"{name} {_shown(column[row])} has a comma of decimals or thousands: write a point or none",
            )
        return pc.replace_substring_regex(column, "^([+-]?[0-9]*),([0-9]+)$", r"\1.\2")

    def _warn_of_clock_change(self, name: str, column: pa.ChunkedArray) -> None:
        """Warn of times without a zone that go back once, by as much as clocks do."""
        local = _flat(column.cast(pa.int64()))
        back = np.flatnonzero(np.diff(local) < 0)
        if column.type.tz is not None or len(back) != 1:
            return
        gap_s = (local[back[0]] - local[back[0] + 1]) / UNITS[column.type.unit]
        if _CLOCK_CHANGE_S[0] <= gap_s <= _CLOCK_CHANGE_S[1]:
            warnings.warn(
                f"{self.what}, {self.row_label(int(back[0]) + 1)}: {name} goes back by {gap_s / 60:.3g} "
                "minutes, as if clocks changed; if they did, write times with their offset from UTC",
                UserWarning,
                stacklevel=5,
            )

    def _cast_text(self, name: str, column: pa.ChunkedArray, to: pa.DataType, needed: str) -> pa.ChunkedArray:
        trimmed = pc.utf8_trim_whitespace(column)
        try:
            return trimmed.cast(to)
        except pa.ArrowInvalid:
            row = _failing(trimmed, lambda part: part.cast(to))
            self.refuse(row, f"{name} must be {needed}, got {_shown(column[row])}")


def _flat(column: pa.ChunkedArray) -> Array:
    """Convert a column without nulls to NumPy."""
    parts = [np.from_dlpack(chunk) for chunk in column.chunks if len(chunk)]
    return np.concatenate(parts) if parts else np.zeros(0, column.type.to_pandas_dtype())


def is_string(kind: pa.DataType) -> bool:
    """Whether a column holds texts."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def first_failing(count: int, convert: Callable[[int, int], Any]) -> int:
    """Find by bisection the first row that ``convert``, given rows from start to stop, fails on."""
    good, bad = 0, count  # rows before `good` can be converted; one before `bad` cannot
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            convert(good, middle)
            good = middle
        except (pa.ArrowInvalid, TraceError):
            bad = middle
    return good


def _failing(column: pa.ChunkedArray, convert: Callable[[Any], Any]) -> int:
    return first_failing(len(column), lambda start, stop: convert(column.slice(start, stop - start)))


def _shown(scalar: Any) -> str:
    """Return a value's text, shortened."""
    shown = f"{scalar.as_py()!r}"
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
