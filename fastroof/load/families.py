"""Families of an operator's rows: kernels with the same text keys; pairing of points, and falls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array, Bools, Floats, Longs
from fastroof.columns import LATENCY
from fastroof.errors import FastroofError
from fastroof.load.measured import MeasuredTable, MeasuredTables
from fastroof.load.rows import word_codes
from fastroof.load.unsound import UnsoundFamily
from fastroof.operators.operator import Columns
from fastroof.operators.registry import OPERATORS, unknown_operator


def requested_operators(
    a: MeasuredTables,
    b: MeasuredTables,
    names: tuple[str, str],
    operators: Sequence[str] | None,
    error: type[FastroofError],
) -> list[str]:
    """Requested operators that either of two sets of tables has."""
    for name in operators or ():
        if name not in OPERATORS:
            raise error(unknown_operator(name))
    found = [
        name
        for name in OPERATORS
        if (name in a.tables or name in b.tables) and (operators is None or name in operators)
    ]
    if not found:
        names_of_operators = ", ".join(operators or ()) or "any operator"
        raise error(f"neither {names[0]} nor {names[1]} has a table of {names_of_operators}")
    return found


@dataclass(frozen=True)
class PairedPoints:
    """All points of two tables of one operator, arrays of shape (points,)."""

    operator: str
    columns: Columns
    a_us: Floats
    b_us: Floats

    def common(self) -> PairedPoints:
        """Return the points in both tables."""
        return self.some(~np.isnan(self.a_us) & ~np.isnan(self.b_us))

    def some(self, rows: Bools | Longs) -> PairedPoints:
        """Return a selection of points."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return PairedPoints(self.operator, columns, self.a_us[rows], self.b_us[rows])

    @property
    def log_ratio(self) -> Floats:
        """ln(B / A); NaN if a table lacks the point."""
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
    """Sizes of a point, those of a pair of axes as their product."""
    schema = OPERATORS[operator]
    pair = schema.paired_axes
    names = [name for name in schema.free_axes() if name not in pair and name != "io_bytes"]
    sizes = {name: np.asarray(columns[name], np.float64) for name in names}
    if pair:
        sizes[" ".join(pair)] = np.prod([np.asarray(columns[name], np.float64) for name in pair], axis=0)
    return sizes


def codes_of(columns: Iterable[Array]) -> Longs:
    """Code of each combination of values, dense from 0 in the order of the values."""
    sortable = [word_codes(column) if column.dtype == object else column for column in columns]
    if not sortable:
        raise ValueError("codes need at least one column")
    # constant columns need no sorting
    sortable = [c for c in sortable if len(c) and (c != c[0]).any()] or sortable[:1]
    order = np.lexsort(sortable[::-1])
    is_new = np.zeros(len(order), bool)
    for column in sortable:
        is_new[1:] |= column[order[1:]] != column[order[:-1]]
    codes = np.empty(len(order), np.int64)
    codes[order] = np.cumsum(is_new)
    return codes


def group_medians(codes: Longs, values: Array) -> Floats:
    """Median of the values of each code, in the order of the codes."""
    order = np.lexsort((values, codes))
    counts = np.bincount(codes)
    starts = np.cumsum(counts) - counts
    ordered = np.asarray(values, np.float64)[order]
    low, high = ordered[starts + (counts - 1) // 2], ordered[starts + counts // 2]
    # equal values keep their bits
    return np.asarray(np.where(low == high, low, (low + high) / 2.0), np.float64)


Words = Mapping[str, str]

EAGER: Final = "eager"
"""Mode of rows that were launched eagerly by the host."""


def family_columns(operator: str) -> tuple[str, ...]:
    """Text keys, which separate an operator's families."""
    return tuple(c.name for c in OPERATORS[operator].keys if c.kind == "text")


def families_of(operator: str, columns: Columns) -> Iterator[tuple[dict[str, str], Longs]]:
    """Yield the text keys and rows of each family."""
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
    """Keys of a family for :class:`~fastroof.load.sources.UnsoundFamily`."""
    return {name: (word,) for name, word in words.items()}


def rows_of_family(table: MeasuredTable, words: Words) -> Columns | None:
    """Rows of a family in a table; None without any."""
    inside = np.full(table.num_rows, True)
    for name, word in words.items():
        inside &= table.columns[name] == word
    if not inside.any():
        return None
    return {name: values[inside] for name, values in table.columns.items()}


FALL: Final = 0.2
"""Least fall of a family: root mean square of the excess of rows of one size over a larger size, relative."""

FALL_OF_ONE: Final = 0.3
"""Least fall of a single line with the noise of one measurement, at two or more sizes in a row."""

FEWEST_ROWS: Final = 3
"""Fewest falling rows of one size for a fall of a family."""

FEWEST_LINES: Final = 8
"""Fewest lines along the size for a family to be judged as a whole; else each key is judged."""


def find_falls(operator: str, columns: Columns) -> Iterator[UnsoundFamily]:
    """Yield size ranges at which a family takes longer than at a larger size."""
    schema = OPERATORS[operator]
    axis = next(iter(schema.free_axes()), None)  # tokens, batch, message
    if axis is None:
        return
    beyond = _beyond_larger(operator, columns, axis)
    line = _lines(operator, columns, axis)
    for words, rows in families_of(operator, columns):
        if EAGER in words.values():
            continue
        if len(np.unique(line[rows])) >= FEWEST_LINES:
            keys = family_keys(words)
            yield from _falls_of(operator, columns, rows, axis, beyond[rows], keys, is_one=False)
            continue
        for of_key in split_rows(codes_of(columns[c.name][rows] for c in schema.keys)):
            part = rows[of_key]
            keys = _key_of(operator, columns, int(part[0]))
            yield from _falls_of(operator, columns, part, axis, beyond[part], keys, is_one=True)


def _lines(operator: str, columns: Columns, axis: str) -> Longs:
    schema = OPERATORS[operator]
    same = [name for name, other in schema.equal_axes.items() if other == axis]
    names = [c.name for c in (*schema.keys, *schema.axes) if c.name not in (axis, *same)]
    if not names:
        return np.zeros(len(columns[LATENCY.name]), np.int64)
    return codes_of(columns[name] for name in names)


def _beyond_larger(operator: str, columns: Columns, axis: str) -> Floats:
    """Relative excess of each row over the least latency of larger sizes of its line."""
    line, latency_us = _lines(operator, columns, axis), columns[LATENCY.name]
    order = np.lexsort((columns[axis], line))
    line, size, log_us = line[order], columns[axis][order], np.log(latency_us[order])
    starts = np.flatnonzero(np.r_[True, (np.diff(line) != 0) | (np.diff(size) != 0)])
    least, line_of = np.minimum.reduceat(log_us, starts), line[starts]
    # offset lines so that each lies below all later ones: a minimum from the back stays within its line
    apart = (float(log_us.max() - log_us.min()) + 1.0) * line_of
    later = np.minimum.accumulate((least + apart)[::-1])[::-1][1:] - apart[:-1]
    later = np.r_[np.where(line_of[1:] == line_of[:-1], later, np.inf), np.inf]
    repeats = np.diff(np.r_[starts, len(order)])
    beyond = np.empty(len(order))
    beyond[order] = np.maximum(1.0 - np.exp(np.repeat(later, repeats) - log_us), 0.0)
    return beyond


def _key_of(operator: str, columns: Columns, row: int) -> dict[str, tuple[Any, ...]]:
    cells = ((c, columns[c.name][row]) for c in OPERATORS[operator].keys)
    return {c.name: (str(v),) if c.kind == "text" else (int(v), int(v)) for c, v in cells}


def _falls_of(
    operator: str,
    columns: Columns,
    rows: Longs,
    axis: str,
    beyond: Floats,
    keys: Mapping[str, tuple[Any, ...]],
    *,
    is_one: bool,
) -> Iterator[UnsoundFamily]:
    sizes, at = np.unique(columns[axis][rows], return_inverse=True)
    square = np.bincount(at, beyond**2) / np.bincount(at)
    limit = FALL_OF_ONE if is_one else FALL
    is_bad = square > limit**2
    if not is_one:
        is_bad &= np.bincount(at, beyond > limit) >= FEWEST_ROWS
    for first, last in _runs(is_bad):
        if is_one and first == last:
            continue
        part: Bools = (at >= first) & (at <= last)
        off = float(np.sqrt(np.mean(beyond[part] ** 2)))
        worst = int(np.argmax(np.where(part, beyond, 0.0)))
        row = int(rows[worst])
        row_us = float(columns[LATENCY.name][row])
        example = ", ".join(f"{a} {columns[a][row]}" for a in OPERATORS[operator].axis_names)
        reason = (
            f"{int((beyond[part] > limit).sum())} of {int(part.sum())} rows take longer than one of a larger "
            f"{axis}, {off:.0%} of themselves in the root mean square; {row_us:.4g} us at {example}, "
            f"{row_us * (1.0 - beyond[worst]):.4g} beyond"
        )
        yield UnsoundFamily(
            {**keys, axis: (int(sizes[first]), int(sizes[last]))},
            "falls",
            reason,
            ratio=float(f"{1.0 / (1.0 - off):.4g}"),
            serves=True,
            rows=int(part.sum()),
        )


def _runs(bad: Bools) -> list[tuple[int, int]]:
    """First and last index of each run."""
    edges = np.flatnonzero(np.diff(np.r_[False, bad, False].astype(np.int8)))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]
