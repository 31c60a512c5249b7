"""Families of an operator's rows: those of the same words, told apart and named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array, Longs
from fastroof.columns import LATENCY
from fastroof.load.common_points import codes_of
from fastroof.load.measured import MeasuredTable
from fastroof.operators.registry import OPERATORS

__all__ = ["EAGER", "Columns", "families_of", "family_columns", "family_keys", "rows_of_family", "split_rows"]

Columns = Mapping[str, Array]
Words = Mapping[str, str]

EAGER: Final = "eager"
"""The mode of rows that say themselves that the host launched them."""


def family_columns(operator: str) -> tuple[str, ...]:
    """Names of the columns whose words tell an operator's families apart."""
    return tuple(c.name for c in OPERATORS[operator].keys if c.kind == "text")


def families_of(operator: str, columns: Columns) -> Iterator[tuple[dict[str, str], Longs]]:
    """Yield the words of each family and its rows."""
    names = family_columns(operator)
    if not names:
        yield {}, np.arange(len(columns[LATENCY.name]))
        return
    for rows in split_rows(codes_of(columns[name] for name in names)):
        yield {name: str(columns[name][rows[0]]) for name in names}, rows


def split_rows(codes: Longs) -> list[Longs]:
    """Rows of each code, in the order of the codes."""
    order = np.argsort(codes, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)


def family_keys(words: Words) -> dict[str, tuple[Any, ...]]:
    """Name a family's rows as :class:`~fastroof.load.soundness.UnsoundFamily` does."""
    return {name: (word,) for name, word in words.items()}


def rows_of_family(table: MeasuredTable, words: Words) -> Columns | None:
    """Return a family's rows in a table, None where it has none."""
    inside = np.full(table.num_rows, True)
    for name, word in words.items():
        inside &= table.columns[name] == word
    if not inside.any():
        return None
    return {name: values[inside] for name, values in table.columns.items()}
