"""The points that two tables have in common, and what kind of point each is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fastroof.arrays import Array, Bools, Floats, Longs
from fastroof.columns import LATENCY
from fastroof.errors import FastroofError
from fastroof.load.measured import MeasuredTables
from fastroof.load.rows import word_codes
from fastroof.operators.registry import OPERATORS

__all__ = [
    "BAND",
    "PairedPoints",
    "band_words",
    "bands",
    "codes_of",
    "group_medians",
    "paired_points",
    "region_sizes",
    "wanted_operators",
]

BAND_OCTAVES: Final = 3
BAND: Final = 2**BAND_OCTAVES
"""Sizes of one region lie within such a factor of each other: 1, 2 to 8, 9 to 64, 65 to 512."""

Columns = Mapping[str, Array]


def wanted_operators(
    a: MeasuredTables,
    b: MeasuredTables,
    names: tuple[str, str],
    operators: Sequence[str] | None,
    error: type[FastroofError],
) -> list[str]:
    """Operators that either of two table sets has, of those that are asked for."""
    if unknown := [name for name in operators or () if name not in OPERATORS]:
        raise error(f"unknown operator {unknown[0]!r}; the operators are {', '.join(OPERATORS)}")
    wanted = [
        name
        for name in OPERATORS
        if (name in a.tables or name in b.tables) and (operators is None or name in operators)
    ]
    if not wanted:
        asked = ", ".join(operators or ()) or "any operator"
        raise error(f"neither {names[0]} nor {names[1]} has a table of {asked}")
    return wanted


@dataclass(frozen=True)
class PairedPoints:
    """Every point of either of two tables of one operator, as arrays of shape (points,)."""

    operator: str
    columns: Columns
    a_us: Floats
    b_us: Floats

    @property
    def in_both(self) -> Bools:
        """Points that both tables have."""
        return ~np.isnan(self.a_us) & ~np.isnan(self.b_us)

    def common(self) -> PairedPoints:
        """Return those points alone."""
        return self.some(self.in_both)

    def some(self, rows: Bools | Longs) -> PairedPoints:
        """Return some of the points."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return PairedPoints(self.operator, columns, self.a_us[rows], self.b_us[rows])

    @property
    def log_ratio(self) -> Floats:
        """Ln of B over A; NaN where a table lacks the point."""
        return np.asarray(np.log(self.b_us / self.a_us))


def paired_points(operator: str, a: Columns | None, b: Columns | None) -> PairedPoints:
    """Pair two tables of one operator point by point."""
    tables = (a, b)
    present = [columns for columns in tables if columns is not None]
    schema = OPERATORS[operator]
    names = [c.name for c in (*schema.keys, *schema.axes)]
    columns = {name: np.concatenate([part[name] for part in present]) for name in names}
    codes = codes_of(columns.values())
    first = np.unique(codes, return_index=True)[1]
    latencies, start = [], 0
    for table in tables:
        latency_us = np.full(len(first), np.nan)
        if table is not None:
            mine = codes[start : start + len(table[LATENCY.name])]
            start += len(mine)
            if np.bincount(mine).max(initial=0) <= 1:
                latency_us[mine] = table[LATENCY.name]
            else:
                points, dense = np.unique(mine, return_inverse=True)
                latency_us[points] = group_medians(dense.reshape(-1), table[LATENCY.name])
        latencies.append(latency_us)
    return PairedPoints(operator, {name: values[first] for name, values in columns.items()}, *latencies)


def region_sizes(operator: str, columns: Columns) -> dict[str, Floats]:
    """Return the sizes that say what region of an operator's shapes a point lies in."""
    schema = OPERATORS[operator]
    pair = schema.paired_axes
    names = [name for name in schema.free_axes() if name not in pair and name != "io_bytes"]
    sizes = {name: np.asarray(columns[name], np.float64) for name in names}
    if pair:
        sizes[" ".join(pair)] = np.prod([np.asarray(columns[name], np.float64) for name in pair], axis=0)
    return sizes


def bands(sizes: Floats) -> Longs:
    """Number of each size's band of a factor of :data:`BAND`: 0 for 1, 1 for 2 to 8, 2 for 9 to 64."""
    # by the exponent: a logarithm would round sizes beside a power of two to it
    mantissa, exponent = np.frexp(sizes)
    octave = exponent - (mantissa == 0.5)
    return np.asarray(-(-octave // BAND_OCTAVES), np.int64)


def band_words(band: int) -> str:
    """Say which sizes a band holds."""
    return f"{BAND ** (band - 1) + 1} to {BAND**band}" if band > 0 else "1"


def codes_of(columns: Iterable[Array]) -> Longs:
    """Return one code for each combination of values, dense from 0 and in the order of the values."""
    sortable = [word_codes(column) if column.dtype == object else column for column in columns]
    if not sortable:
        raise ValueError("codes need at least one column")
    # a family's words are all the same: columns that tell nothing apart need no sorting
    sortable = [c for c in sortable if len(c) and (c != c[0]).any()] or sortable[:1]
    order = np.lexsort(sortable[::-1])
    is_new = np.zeros(len(order), bool)
    for column in sortable:
        is_new[1:] |= column[order[1:]] != column[order[:-1]]
    codes = np.empty(len(order), np.int64)
    codes[order] = np.cumsum(is_new)
    return codes


def group_medians(codes: Longs, values: Array) -> Floats:
    """Return the median of the values of each code, in the order of the codes."""
    order = np.lexsort((values, codes))
    counts = np.bincount(codes)
    starts = np.cumsum(counts) - counts
    ordered = np.asarray(values, np.float64)[order]
    low, high = ordered[starts + (counts - 1) // 2], ordered[starts + counts // 2]
    # Of one value its own bits, whatever its size.
    return np.asarray(np.where(low == high, low, (low + high) / 2.0), np.float64)
