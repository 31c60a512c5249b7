"""Coverage: how often the measured latency lies in the interval that a lookup's error claims."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Floats
from fastroof.columns import ORIGIN_INTERPOLATED
from fastroof.errors import LookupInputError, MissingTableError
from fastroof.operators.operator import HoldoutGrid
from fastroof.operators.registry import OPERATORS
from fastroof.tables.holdout import alike_kernels, lookup_arguments, taking_part, thinned_axes
from fastroof.tables.lookup import run_lookup
from fastroof.uncertainty.leave_one_out import NORMAL_80

if TYPE_CHECKING:
    from fastroof.load import MeasuredTable
    from fastroof.tables.table_set import Tables

__all__ = ["COVERAGE_GRIDS", "LEVELS", "CoverageRow", "run_coverage"]


LEVELS: Final = {0.5: 0.6745, 0.8: NORMAL_80, 0.9: 1.6449, 0.95: 1.9600}
"""Shares that intervals claim, and standard errors on either side that hold them if errors are normal."""

HIDDEN_SHARE: Final = 0.25
FEWEST_NODES: Final = 8
"""A shorter axis loses none of its values, a longer one keeps at least FEWEST_LEFT."""
FEWEST_LEFT: Final = 5
QUARTILES: Final = 4


COVERAGE_GRIDS: Final = tuple(grid for operator in OPERATORS.values() for grid in operator.coverages)
"""Rows that intervals are judged on, as the operators have them."""


class CoverageRow(NamedTuple):
    """How often hidden points lie in the intervals claimed for them, as fractions."""

    operator: str
    grid: str
    region: str
    points: int
    level_50: float
    level_80: float
    level_90: float
    level_95: float
    lowest_80: float
    highest_80: float
    quartiles_80: tuple[float, ...]
    median_error: float


class _Hidden(NamedTuple):
    """Hidden points of one draw: errors in standard errors, those standard errors, and whether inside."""

    ratio: Floats
    error: Floats
    inside: Bools


def _hidden_rows(grid: HoldoutGrid, table: MeasuredTable, part: Bools, rng: np.random.Generator) -> Bools:
    """Rows with one of the values that each kernel's axes lose: a random quarter between their ends."""
    hidden = np.zeros(table.num_rows, np.bool_)
    if grid.kernels:
        groups = alike_kernels(grid, table, part)
        for number in np.flatnonzero(rng.random(len(groups)) < HIDDEN_SHARE):
            hidden[groups[number]] = True
        return hidden
    for _, rows in sorted(table.groups().items(), key=lambda group: str(group[0])):
        rows = rows[part[rows]]
        for name in thinned_axes(grid, table):
            values = table.schema.thinned_values(table.columns, name)[rows]
            nodes = np.unique(values)
            lost = rng.random(len(nodes)) < HIDDEN_SHARE
            lost[:1] = lost[-1:] = False
            if len(nodes) >= FEWEST_NODES and len(nodes) - lost.sum() >= FEWEST_LEFT:
                hidden[rows[np.isin(values, nodes[lost])]] = True
    return hidden


def _draw(tables: Tables, grid: HoldoutGrid, rng: np.random.Generator) -> _Hidden | None:
    """Thin a table once, and look up what was hidden; None where nothing is."""
    table = tables.measured.tables[grid.operator]
    part = taking_part(table, grid.only)
    hidden = _hidden_rows(grid, table, part, rng)
    if not hidden.any() or not (part & ~hidden).any():
        return None
    thin = tables.some_rows(grid.operator, part & ~hidden)
    parts = []
    for rows, arguments in lookup_arguments(table, np.flatnonzero(hidden)):
        try:
            looked_up = run_lookup(thin, grid.operator, "roofline", True, arguments, of_source=False)
        except MissingTableError:
            if not grid.kernels:
                raise
            continue  # no kernel is left that could lend
        off = np.abs(np.log(looked_up.latency_us / table.columns["latency_us"][rows]))
        parts.append(
            (
                off / looked_up.relative_error,
                looked_up.relative_error,
                looked_up.origin <= ORIGIN_INTERPOLATED,
            )
        )
    if not parts:
        return None
    return _Hidden(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def run_coverage(
    tables: Tables,
    *,
    operators: Iterable[str] | None = None,
    seeds: Iterable[int] = range(4),
    grids: Iterable[HoldoutGrid] = COVERAGE_GRIDS,
    progress: Callable[[str], None] | None = None,
) -> list[CoverageRow]:
    """Judge the errors of lookups on points that neither the lookups nor the errors have seen."""
    grids = tuple(grids)
    known = {grid.operator for grid in grids}
    wanted = known if operators is None else set(operators)
    if wanted - known:
        raise LookupInputError(
            f"unknown {', '.join(sorted(wanted - known))}: use one of {', '.join(sorted(known))}"
        )
    seeds = tuple(seeds)
    report = []
    for grid in grids:
        if grid.operator not in tables.measured.tables or grid.operator not in wanted:
            continue
        if progress is not None:
            progress(f"{grid.operator}, {grid.name}")
        draws = [_draw(tables, grid, np.random.default_rng(seed)) for seed in seeds]
        for region, is_inside in (("inside", True), ("outside", False)):
            of_region = [
                (draw.ratio[draw.inside == is_inside], draw.error[draw.inside == is_inside])
                for draw in draws
                if draw is not None and (draw.inside == is_inside).any()
            ]
            if of_region:
                report.append(_row(grid, region, of_region))
    return report


def _row(grid: HoldoutGrid, region: str, draws: list[tuple[Floats, Floats]]) -> CoverageRow:
    ratio, error = (np.concatenate(values) for values in zip(*draws, strict=True))
    by_draw = [float(np.mean(r <= NORMAL_80)) for r, _ in draws]
    quartiles = [ratio[part] <= NORMAL_80 for part in np.array_split(np.argsort(error), QUARTILES)]
    level_50, level_80, level_90, level_95 = (float(np.mean(ratio <= width)) for width in LEVELS.values())
    return CoverageRow(
        grid.operator,
        grid.name,
        region,
        len(ratio),
        level_50,
        level_80,
        level_90,
        level_95,
        min(by_draw),
        max(by_draw),
        tuple(float(np.mean(part)) if len(part) else float("nan") for part in quartiles),
        float(np.median(error)),
    )
