"""Hold-out: thin tables, look up the hidden points, and measure the error of each method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from fastroof.arrays import Bools, Flags, Floats, Longs
from fastroof.checks import check_progress
from fastroof.columns import LATENCY, ORIGIN_INTERPOLATED
from fastroof.errors import LookupInputError, MissingTableError
from fastroof.load import MeasuredTable, MeasuredTables
from fastroof.load.families import codes_of, families_of, split_rows
from fastroof.operators.operator import METHODS, HoldoutGrid
from fastroof.operators.registry import OPERATORS, unknown_operator
from fastroof.tables.lookup import Lookup, check_method

GRIDS: Final = tuple(grid for operator in OPERATORS.values() for grid in operator.holdouts)
"""Grids that lookups are judged on, from all operators."""

FIRST_ROWS: Final = tuple(
    HoldoutGrid(name, f"first rows of {axis}", {}, {}, first=axis)
    for name, operator in OPERATORS.items()
    if operator.answers_lookups
    for axis in operator.free_axes()
)
"""Grids that start above the measured ones, an axis at a time."""


KERNEL_PARTS: Final = 4
"""Parts of whole kernels that are left out in turn."""


class ThinnableTables(Protocol):
    """Tables that can be thinned and looked up, as :class:`fastroof.Tables`."""

    @property
    def measured(self) -> MeasuredTables:
        """All measured rows."""

    def some_rows(self, operator: str, rows: Longs | Bools) -> ThinnableTables:
        """Tables of some rows of one operator."""

    def lookup(self, operator: str, *, method: str = "roofline", **sizes: Any) -> Lookup:
        """Look kernels up."""


class HoldoutRow(NamedTuple):
    """Errors of one method on the hidden points of one grid, as fractions of the measured latency.

    ``region`` is ``inside`` if every corner of the bracket was kept and measured, else ``outside``.
    """

    operator: str
    grid: str
    method: str
    region: str
    points: int
    mape: float
    median: float
    p90: float
    p99: float
    bias: float


def taking_part(table: MeasuredTable, only: Mapping[str, Any]) -> Bools:
    """Rows of a grid: plain rows with the values of ``only``, without spikes."""
    rows = table.schema.plain_rows(table.columns) & ~table.spikes.every_row
    for name, value in only.items():
        rows &= table.columns[name] == value
    return rows


def thinned_axes(grid: HoldoutGrid, table: MeasuredTable) -> list[str]:
    """Axes whose values may be hidden."""
    return [name for name in table.schema.free_axes() if name not in grid.only]


def kept_rows(grid: HoldoutGrid, table: MeasuredTable, part: Bools) -> Bools:
    """Rows on the thin grid; every second value counts within each kernel's axis."""
    is_in_grid = part.copy()
    groups = [rows[part[rows]] for rows in table.groups().values()]
    for name in [grid.first] if grid.first else thinned_axes(grid, table):
        values = table.schema.thinned_values(table.columns, name)
        if name in grid.kept:
            is_in_grid &= np.isin(values, grid.kept[name])
            continue
        for rows in groups:
            nodes = np.unique(values[rows])
            is_in_grid[rows] &= np.isin(values[rows], nodes[len(nodes) // 2 :] if grid.first else nodes[::2])
    return is_in_grid


def alike_kernels(grid: HoldoutGrid, table: MeasuredTable, part: Bools) -> list[Longs]:
    """Rows of the kernels that a grid leaves out together, by their common key values."""
    names = [column.name for column in table.schema.keys]
    places = [names.index(name) for name in grid.kernels]
    groups: dict[tuple[Any, ...], list[Longs]] = {}
    for key, rows in table.groups().items():
        groups.setdefault(tuple(key[place] for place in places), []).append(rows[part[rows]])
    return [np.concatenate(groups[values]) for values in sorted(groups)]


def _thinned(grid: HoldoutGrid, table: MeasuredTable, part: Bools) -> Iterator[tuple[Bools, Longs]]:
    """Yield kept and hidden rows: once, or for each part of the kernels left out."""
    if not grid.kernels:
        is_visible = kept_rows(grid, table, part)
        yield is_visible, np.flatnonzero(part & ~is_visible)
        return
    groups = alike_kernels(grid, table, part)
    for number in range(KERNEL_PARTS):
        hidden = np.sort(np.concatenate([np.empty(0, np.int64), *groups[number::KERNEL_PARTS]]))
        is_visible = part.copy()
        is_visible[hidden] = False
        yield is_visible, hidden


def lookup_arguments(table: MeasuredTable, rows: Longs) -> Iterable[tuple[Any, dict[str, Any]]]:
    """Lookup arguments of rows, one batch per combination of the text columns."""
    columns = {name: table.columns[name][rows] for name in table.schema.arguments}
    text = [name for name, column in columns.items() if column.dtype.kind not in "iuf"]
    keys = list(zip(*(columns[name] for name in text), strict=True))
    for key in sorted(set(keys)):
        part = np.array([k == key for k in keys])
        sizes = {n: c[part] for n, c in columns.items() if n not in text}
        yield rows[part], {**sizes, **dict(zip(text, key, strict=True))}


class CampaignPoints(NamedTuple):
    """Rows of one family of another campaign's kernels, and their lookups in the judged tables."""

    operator: str
    family: str
    measured_us: Floats
    found: dict[str, Lookups]

    @property
    def is_inside(self) -> Bools:
        """Whether each point is at or between measured ones."""
        return next(iter(self.found.values())).origin <= ORIGIN_INTERPOLATED


class Lookups(NamedTuple):
    """Answers of one method at a campaign's points; errors only if requested."""

    latency_us: Floats
    origin: Flags
    relative_error: Floats


def requested_lookups(operators: Iterable[str] | None, have: Collection[str]) -> list[str]:
    """Requested operators that answer lookups and are there, in the registry's order."""
    able = [name for name, operator in OPERATORS.items() if operator.answers_lookups]
    requested = set(able if operators is None else operators)
    for name in sorted(requested.difference(able)):
        raise LookupInputError(unknown_operator(name, able))
    return [name for name in able if name in requested and name in have]


def campaign_points(
    tables: ThinnableTables,
    campaign: MeasuredTables,
    operators: Iterable[str] | None,
    methods: Iterable[str],
    *,
    with_error: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Iterator[CampaignPoints]:
    """Look up each family of a campaign's kernels; those that the tables lack are left out and reported."""
    for name in requested_lookups(operators, campaign.tables.keys() & tables.measured.tables.keys()):
        table = campaign.tables[name]
        kernel = codes_of(table.columns[c.name] for c in table.schema.keys)
        for words, rows in families_of(name, table.columns):
            family = " ".join(words.values())
            if progress is not None:
                progress(f"{name}, {family}")
            rows = rows[~table.spikes.every_row[rows]]
            parts, lacking = [], 0
            for split in split_rows(kernel[rows]):
                try:
                    parts += [
                        (of_kernel, _lookups(tables, name, methods, arguments, with_error))
                        for of_kernel, arguments in lookup_arguments(table, rows[split])
                    ]
                except MissingTableError:
                    lacking += len(split)
            if lacking and progress is not None:
                progress(f"{name}, {family}: {lacking:,} points left out: the tables have no such kernel")
            if parts:
                measured_us = np.concatenate([table.columns[LATENCY.name][split] for split, _ in parts])
                found = {
                    method: Lookups(
                        *map(np.concatenate, zip(*(one[method] for _, one in parts), strict=True))
                    )
                    for method in methods
                }
                yield CampaignPoints(name, family, measured_us, found)


def _lookups(
    tables: ThinnableTables, operator: str, methods: Iterable[str], arguments: Any, with_error: bool
) -> dict[str, Lookups]:
    """Look the points of one kernel up by each method."""
    found = {}
    for method in methods:
        options = {"with_error": True} if with_error else {}
        one = tables.lookup(operator, method=method, **options, **arguments)
        error = np.empty(0) if one.relative_error is None else np.asarray(one.relative_error)
        found[method] = Lookups(one.latency_us, one.origin, error)
    return found


def run_against(
    tables: ThinnableTables,
    campaign: MeasuredTables,
    *,
    operators: Iterable[str] | None = None,
    methods: Iterable[str] = METHODS,
    progress: Callable[[str], None] | None = None,
) -> list[HoldoutRow]:
    """Judge lookups on another campaign's rows; one row per family of kernels, method and region."""
    methods = tuple(methods)
    for method in methods:
        check_method(method)
    report: list[HoldoutRow] = []
    for points in campaign_points(tables, campaign, operators, methods, progress=progress):
        for method, found in points.found.items():
            signed = found.latency_us / points.measured_us - 1.0
            report += _by_region(points.operator, points.family, method, signed, points.is_inside)
    return report


def _by_region(
    operator: str, grid: str, method: str, signed: Floats, is_inside: Bools
) -> Iterator[HoldoutRow]:
    for region, where in (("inside", is_inside), ("outside", ~is_inside)):
        if where.any():
            bias, off = signed[where].mean(), np.abs(signed[where])
            figures = (off.mean(), np.median(off), *np.percentile(off, (90, 99)), bias)
            yield HoldoutRow(operator, grid, method, region, len(off), *map(float, figures))


def run_holdout(
    tables: ThinnableTables,
    *,
    operators: Iterable[str] | None = None,
    methods: Iterable[str] = METHODS,
    grids: Iterable[HoldoutGrid] = GRIDS,
    progress: Callable[[str], None] | None = None,
) -> list[HoldoutRow]:
    """Judge lookups on hidden points; one row per grid, method and region."""
    check_progress(progress, "a line of text", LookupInputError)
    methods = tuple(methods)
    with_grids = {grid.operator for grid in GRIDS}
    requested = with_grids if operators is None else set(operators)
    for name in sorted(requested - with_grids):
        raise LookupInputError(unknown_operator(name, with_grids))
    for method in methods:
        check_method(method)
    report: list[HoldoutRow] = []
    for grid in grids:
        table = tables.measured.tables.get(grid.operator)
        if table is None or grid.operator not in requested:
            continue
        if progress is not None:
            progress(f"{grid.operator}, {grid.name}")
        part = taking_part(table, grid.only)
        # a borrowed kernel has no MFU at a node, so only roofline works
        judged = ("roofline",) if grid.kernels and "roofline" in methods else methods
        errors: dict[str, list[Floats]] = {method: [] for method in judged}
        inside = []
        for visible, hidden in _thinned(grid, table, part):
            if not visible.any() or not len(hidden):
                continue
            thin = tables.some_rows(grid.operator, visible)
            for rows, arguments in lookup_arguments(table, hidden):
                truth = table.columns["latency_us"][rows]
                try:
                    lookup = thin.lookup(grid.operator, **arguments)
                except MissingTableError:
                    if not grid.kernels:
                        raise
                    continue  # no donor is left
                inside.append(lookup.origin <= ORIGIN_INTERPOLATED)
                for method in judged:
                    guess = (
                        lookup
                        if method == "roofline"
                        else thin.lookup(grid.operator, method=method, **arguments)
                    )
                    errors[method].append(guess.latency_us / truth - 1.0)
        if not inside:
            continue
        is_inside = np.concatenate(inside)
        for method in judged:
            signed = np.concatenate(errors[method])
            report += _by_region(grid.operator, grid.name, method, signed, is_inside)
    return report
