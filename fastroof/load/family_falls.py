"""Rows that take longer than those of a larger size, by family: latencies that grow when the work falls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from fastroof.arrays import Bools, Floats, Longs
from fastroof.columns import LATENCY
from fastroof.load.common_points import codes_of
from fastroof.load.families import EAGER, Columns, families_of, family_keys, split_rows
from fastroof.load.soundness import UnsoundFamily
from fastroof.operators.registry import OPERATORS

__all__ = ["find_falls"]

FALL: Final = 0.2
"""Root mean square of what a family's rows of one size take beyond a larger size, over themselves."""

FALL_OF_ONE: Final = 0.3
"""The same of a single line, whose rows have the noise of one measurement, at two sizes in a row at least."""

FEWEST_ROWS: Final = 3
"""Rows of one size that fall, for them to be a family's."""

FEWEST_LINES: Final = 8
"""A family of fewer lines along its size is taken apart by all of its keys."""


def find_falls(operator: str, columns: Columns) -> Iterator[UnsoundFamily]:
    """Sizes at which a family takes longer than at a larger one."""
    axis = _first_axis(operator)
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
        for part in _groups_of(operator, columns, rows):
            keys = _key_of(operator, columns, int(part[0]))
            yield from _falls_of(operator, columns, part, axis, beyond[part], keys, is_one=True)


def _first_axis(operator: str) -> str | None:
    """The size that a fall is told along: tokens, batch, message."""
    free = OPERATORS[operator].free_axes()
    return free[0] if free else None


def _lines(operator: str, columns: Columns, axis: str) -> Longs:
    schema = OPERATORS[operator]
    same = [name for name, other in schema.equal_axes.items() if other == axis]
    names = [c.name for c in (*schema.keys, *schema.axes) if c.name not in (axis, *same)]
    if not names:
        return np.zeros(len(columns[LATENCY.name]), np.int64)
    return codes_of(columns[name] for name in names)


def _beyond_larger(operator: str, columns: Columns, axis: str) -> Floats:
    """What each row takes beyond the least of the larger sizes of its line, over itself."""
    line, latency_us = _lines(operator, columns, axis), columns[LATENCY.name]
    order = np.lexsort((columns[axis], line))
    line, size, log_us = line[order], columns[axis][order], np.log(latency_us[order])
    starts = np.flatnonzero(np.r_[True, (np.diff(line) != 0) | (np.diff(size) != 0)])
    least, line_of = np.minimum.reduceat(log_us, starts), line[starts]
    # from the back, where a line before another lies below all of it: the least of a line is its own
    apart = (float(log_us.max() - log_us.min()) + 1.0) * line_of
    later = np.minimum.accumulate((least + apart)[::-1])[::-1][1:] - apart[:-1]
    later = np.r_[np.where(line_of[1:] == line_of[:-1], later, np.inf), np.inf]
    repeats = np.diff(np.r_[starts, len(order)])
    beyond = np.empty(len(order))
    beyond[order] = np.maximum(1.0 - np.exp(np.repeat(later, repeats) - log_us), 0.0)
    return beyond


def _groups_of(operator: str, columns: Columns, rows: Longs) -> list[Longs]:
    codes = codes_of(columns[c.name][rows] for c in OPERATORS[operator].keys)
    return [rows[part] for part in split_rows(codes)]


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
            ratio=_digits(1.0 / (1.0 - off)),
            serves=True,
            rows=int(part.sum()),
        )


def _runs(bad: Bools) -> list[tuple[int, int]]:
    """First and last of each run."""
    edges = np.flatnonzero(np.diff(np.r_[False, bad, False].astype(np.int8)))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
