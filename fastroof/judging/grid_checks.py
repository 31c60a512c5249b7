"""Findings of validation from comparing the rows of one file: duplicates, cold rows, jumps and holes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from fastroof.arrays import Bools, Floats, Longs
from fastroof.load.families import codes_of, group_medians, split_rows
from fastroof.operators.operator import Columns
from fastroof.operators.registry import OPERATORS

Severity = Literal["note", "warning", "error"]

SEVERITIES: Final[tuple[Severity, ...]] = ("note", "warning", "error")
"""Severities from harmless to unusable."""


@dataclass(frozen=True)
class Finding:
    """One finding in a file."""

    kind: str
    severity: Severity
    count: int
    message: str
    worst: Mapping[str, Any] = field(default_factory=dict)


NOTED_FALL = 0.10
"""Fall of the latency with growing work from which it is noted; smaller ones are common."""
GRAVE_FALL = 0.30
WARM_UP = 1.15
"""Ratio of a first row to one with more work from which it was timed cold."""
GRAVE_SPREAD = 0.10


@dataclass(frozen=True)
class Grid:
    """Points of one file: kernel and sizes of each row."""

    operator: str
    columns: Columns
    kernel: Longs
    axes: Mapping[str, Longs]

    @property
    def latency_us(self) -> Floats:
        """Measured latency of each row."""
        return self.columns["latency_us"]

    def kernels(self) -> list[Longs]:
        """Return the rows of each kernel in the file's order."""
        return split_rows(self.kernel)


def grid_of(operator: str, columns: Columns) -> Grid:
    """Points of one file's rows."""
    schema = OPERATORS[operator]
    kernel = codes_of(columns[c.name] for c in schema.keys)
    return Grid(operator, columns, kernel, schema.independent_axes(columns))


def example(operator: str, columns: Columns, row: int) -> dict[str, Any]:
    """One row's keys, axes, latency and file as plain values."""
    names = [c.name for c in OPERATORS[operator].required]
    names += ["file"] if "file" in columns else []
    return {name: _plain(columns[name][row]) for name in names}


def grid_findings(grid: Grid) -> list[Finding]:
    """Findings from comparing the rows of one file, except duplicates."""
    cold, warm_up = _warm_up(grid)
    return [*warm_up, *_jumps(grid, cold), *_holes(grid)]


def duplicates(operator: str, columns: Columns, file: Longs, files: int) -> dict[int, Finding]:
    """Find points measured more than once over all files of a table."""
    latency = columns["latency_us"]
    schema = OPERATORS[operator]
    cell = codes_of(columns[c.name] for c in (*schema.keys, *schema.axes))
    order = np.lexsort((latency, cell))
    ordered = cell[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    counts = np.diff(np.r_[starts, len(order)])
    lowest, highest = latency[order[starts]], latency[order[starts + counts - 1]]
    spread = np.where(counts > 1, highest / lowest - 1.0, -1.0)
    cell_of_row = np.empty(len(order), np.int64)
    cell_of_row[order] = np.repeat(np.arange(len(starts)), counts)
    by_first_row = {}
    for index in range(files):
        mine = np.unique(cell_of_row[file == index])
        mine = mine[counts[mine] > 1]
        if not len(mine):
            continue
        at = int(mine[np.argmax(spread[mine])])
        rows = order[starts[at] : starts[at] + counts[at]]
        point = example(operator, columns, int(rows[0]))
        point.pop("latency_us")
        point.pop("file", None)
        point |= {"latencies_us": [_plain(v) for v in latency[rows]], "spread": float(spread[at])}
        if "file" in columns:
            point["files"] = sorted({str(columns["file"][r]) for r in rows})
        by_first_row[index] = Finding(
            "duplicate",
            "warning" if spread[at] > GRAVE_SPREAD else "note",
            len(mine),
            f"{len(mine)} points measured more than once, by up to {spread[at]:.1%} apart",
            point,
        )
    return by_first_row


# -- checks of one file ------------------------------------------------------------------------


def _warm_up(grid: Grid) -> tuple[Bools, list[Finding]]:
    """Find kernels whose first row is slower than a row with more work."""
    cold = np.zeros(len(grid.kernel), bool)
    sizes = np.stack(list(grid.axes.values()))
    worst_ratio, pair = 0.0, (0, 0)
    for rows in grid.kernels():
        first, later = rows[0], rows[1:]
        mine, theirs = sizes[:, [first]], sizes[:, later]
        larger = later[(theirs >= mine).all(axis=0) & (theirs > mine).any(axis=0)]
        if not len(larger):
            continue
        fastest = larger[np.argmin(grid.latency_us[larger])]
        ratio = grid.latency_us[first] / grid.latency_us[fastest]
        cold[first] = ratio > WARM_UP
        if ratio > worst_ratio:
            worst_ratio, pair = float(ratio), (int(first), int(fastest))
    count = int(cold.sum())
    if not count:
        return cold, []
    first_row, larger_row = (example(grid.operator, grid.columns, row) for row in pair)
    message = (
        f"first row slower than one with more work ({count} kernels), by up to {worst_ratio:.2f} times: "
        f"{first_row['latency_us']:g} us against {larger_row['latency_us']:g} us; timed cold?"
    )
    names = (*(axis.name for axis in OPERATORS[grid.operator].axes), "latency_us")
    point = first_row | {"more_work": {name: larger_row[name] for name in names}}
    return cold, [Finding("warm_up", "warning", count, message, point)]


def _jumps(grid: Grid, cold: Bools) -> list[Finding]:
    """Find latencies that fall as one size grows and the others stay, except cold rows."""
    cell = codes_of([grid.kernel, *grid.axes.values()])
    rows, latency = np.unique(cell, return_index=True)[1], group_medians(cell, grid.latency_us)
    sizes = {name: values[rows] for name, values in grid.axes.items()}
    falls: list[tuple[float, str, int, int]] = []
    for name in sizes:
        fixed = codes_of([grid.kernel[rows], *(v for n, v in sizes.items() if n != name)])
        order = np.lexsort((sizes[name], fixed))
        here, later = order[:-1], order[1:]
        fall = 1.0 - latency[later] / latency[here]
        jump = (fixed[here] == fixed[later]) & (fall > NOTED_FALL) & ~cold[rows[here]]
        falls += [(float(fall[i]), name, int(here[i]), int(later[i])) for i in np.flatnonzero(jump)]
    if not falls:
        return []
    most, name, here_at, there_at = max(falls)
    first, second = rows[here_at], rows[there_at]
    point = example(grid.operator, grid.columns, int(first))
    point |= {
        "latency_us": float(latency[here_at]),
        "axis": name,
        "next": int(grid.axes[name][second]),
        "next_latency_us": float(latency[there_at]),
        "fall": most,
    }
    message = (
        f"latency falls as work grows in {len(falls)} places, by up to {most:.1%}: "
        f"{latency[here_at]:g} us at {name} {grid.axes[name][first]}, "
        f"{latency[there_at]:g} us at {grid.axes[name][second]}"
    )
    return [Finding("jump", "warning" if most > GRAVE_FALL else "note", len(falls), message, point)]


def _holes(grid: Grid) -> list[Finding]:
    """Find cells missing from the full product of each kernel's sizes."""
    if len(grid.axes) < 2:
        return []
    pair = OPERATORS[grid.operator].paired_axes
    others = [name for name in grid.axes if name not in pair]
    if not pair:
        return _missing(grid, {n: [n] for n in others}, "holes", "cells of the grid")
    # both views are useful
    by_shape = {**{n: [n] for n in others}, "shape": list(pair)}
    return [
        *_missing(grid, by_shape, "holes", f"cells of {' by '.join(others)} by measured ({', '.join(pair)})"),
        *_missing(grid, {n: [n] for n in pair}, "missing_pairs", f"pairs of {' and '.join(pair)}"),
    ]


def _missing(grid: Grid, sides: Mapping[str, list[str]], kind: str, what: str) -> list[Finding]:
    cells = missing = 0
    first: dict[str, Any] = {}
    for rows in grid.kernels():
        code = np.zeros(len(rows), np.int64)
        values: list[tuple[list[str], Longs]] = []
        product = 1
        for names in sides.values():
            distinct, index = np.unique(
                np.stack([grid.axes[n][rows] for n in names]), axis=1, return_inverse=True
            )
            code = code * distinct.shape[1] + index.reshape(-1)
            product *= distinct.shape[1]
            values.append((names, distinct))
        present = np.unique(code)
        cells += product
        missing += product - len(present)
        if not first and len(present) < product:
            gap = np.flatnonzero(present != np.arange(len(present)))
            at = int(gap[0]) if len(gap) else len(present)
            first = _cell(grid, int(rows[0]), values, at)
    if not missing:
        return []
    message = f"{missing} of {cells} {what} are missing ({missing / cells:.0%})"
    return [Finding(kind, "note", missing, message, first)]


def _cell(grid: Grid, row: int, sides: list[tuple[list[str], Longs]], code: int) -> dict[str, Any]:
    """Keys of a kernel and sizes of one cell of its grid."""
    sizes: dict[str, Any] = {}
    for names, distinct in reversed(sides):
        code, index = divmod(code, distinct.shape[1])
        sizes = {n: int(v) for n, v in zip(names, distinct[:, index], strict=True)} | sizes
    keys = {c.name: _plain(grid.columns[c.name][row]) for c in OPERATORS[grid.operator].keys}
    return keys | sizes


# -- arrays ------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
