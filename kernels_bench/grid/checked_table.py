"""A TOML table whose values are checked as they are read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastroof.checks import is_number, shown, whole_number
from fastroof.errors import MeasureError
from fastroof.ranges import expand_sizes

MAX_VALUES: Final = 1_000_000
"""Most values of a range, and most points of a group: more is a slip, and would take weeks to measure."""
MAX_SIZE: Final = 2**40


class CheckedTable:
    """A TOML table whose errors say where it is.

    >>> CheckedTable("grid a.toml", {"m": {"start": 1, "stop": 8, "factor": 2}}).sizes("m")
    [1, 2, 4, 8]
    """

    def __init__(self, where: str, data: Any) -> None:
        if not isinstance(data, Mapping):
            raise MeasureError(f"{where}: must be a table, got {shown(data)}")
        self.where = where
        self.data = data

    def refuse_unknown(self, known: Sequence[str]) -> None:
        """Refuse a key that is not among ``known``."""
        for key in self.data:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise MeasureError(f"{self.where}: unknown key {key}; known are {', '.join(known)}{hint}")

    def value(self, key: str) -> Any:
        """Return the value of a key that must be there."""
        if key not in self.data:
            raise MeasureError(f"{self.where}: key {key} is missing")
        return self.data[key]

    def tables(self, key: str) -> list[Any]:
        """Return a list of tables, empty where the key is absent."""
        given = self.data.get(key, [])
        if not isinstance(given, list):
            raise MeasureError(f"{self.where}: {key} must be a list of tables, got {shown(given)}")
        return given

    def text(self, key: str) -> str:
        """Return one text that is not blank."""
        return self._texts(key, [self.value(key)])[0]

    def texts(self, key: str, known: Sequence[str] = ()) -> list[str]:
        """Return one text or a list of them, each one of ``known`` where that is not empty."""
        given = self.value(key)
        words = self._texts(key, given if isinstance(given, list) else [given])
        for text in words:
            if known and text not in known:
                raise MeasureError(f"{self.where}: unknown {key} {shown(text)}; valid are {', '.join(known)}")
        return words

    def _texts(self, key: str, given: list[Any]) -> list[str]:
        if not given or not all(isinstance(text, str) and text.strip() for text in given):
            raise MeasureError(f"{self.where}: {key} must be text, got {shown(self.data[key])}")
        return given

    def size(self, key: str, least: int = 1, most: int = MAX_SIZE) -> int:
        """Return one whole number from ``least`` to ``most``."""
        return self._size(key, self.value(key), least, most)

    def _size(self, key: str, value: Any, least: int, most: int) -> int:
        return whole_number(f"{self.where}: {key}", value, least, most, MeasureError)

    def number(self, key: str) -> float:
        """Return one number above zero."""
        value = self.value(key)
        if not is_number(value) or value <= 0:
            raise MeasureError(f"{self.where}: {key} must be a number above zero, got {shown(value)}")
        return float(value)

    def sizes_of(self, key: str, value: Any, columns: Sequence[str]) -> tuple[int, ...]:
        """Return a list of whole numbers of at least 1, one a column."""
        if not isinstance(value, list) or len(value) != len(columns):
            raise MeasureError(f"{self.where}: {key} must be [{', '.join(columns)}], got {shown(value)}")
        return tuple(
            self._size(f"{column} in {key}", one, 1, MAX_SIZE)
            for column, one in zip(columns, value, strict=True)
        )

    def sizes(self, key: str, least: int = 1) -> list[int]:
        """Return one whole number, a list of them, or a range written out."""
        value = self.value(key)
        if isinstance(value, Mapping):
            return self._range(key, least)
        listed = value if isinstance(value, list) else [value]
        if not listed:
            raise MeasureError(f"{self.where}: {key} is an empty list")
        return [self._size(key, one, least, MAX_SIZE) for one in listed]

    def _range(self, key: str, least: int) -> list[int]:
        given = CheckedTable(f"{self.where}, {key}", self.data[key])
        given.refuse_unknown(("start", "stop", "factor", "step"))
        if ("factor" in given.data) == ("step" in given.data):
            raise MeasureError(f"{given.where}: need one of factor and step")
        if "factor" in given.data:
            given.size("factor", 2)
        try:
            return list(expand_sizes(given.data, MAX_SIZE, least, MAX_VALUES))
        except ValueError as error:
            raise MeasureError(f"{given.where}: {error}") from None
