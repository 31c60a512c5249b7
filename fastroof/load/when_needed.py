"""Rows that are read when one is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastroof.arrays import Array
from fastroof.lazy_property import lazy_property

__all__ = ["RowsWhenNeeded"]


class RowsWhenNeeded(Mapping[str, Array]):
    """Columns of a table that are read at the first look; pickled, they are what was read."""

    def __init__(self, read: Callable[[], Mapping[str, Array]]) -> None:
        self._read = read

    @lazy_property
    def _columns(self) -> Mapping[str, Array]:
        return self._read()

    def __getitem__(self, name: str) -> Array:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self._columns),)
