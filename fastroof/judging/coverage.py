"""Coverage: how often measured latencies lie in the intervals that lookup errors claim; survey of sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Floats
from fastroof.columns import ORIGIN_INTERPOLATED
from fastroof.errors import LookupInputError, MissingTableError
from fastroof.judging.expert_checks import EXPERTS, UnlikeExperts, unlike_experts
from fastroof.load import MeasuredTable, MeasuredTables
from fastroof.load.compare import is_copy, same_kernels, sound_rows
from fastroof.load.families import PairedPoints
from fastroof.operators.operator import HoldoutGrid
from fastroof.operators.registry import OPERATORS, unknown_operator
from fastroof.tables.holdout import (
    GRIDS,
    alike_kernels,
    campaign_points,
    kept_rows,
    lookup_arguments,
    requested_lookups,
    run_holdout,
    taking_part,
    thinned_axes,
)
from fastroof.tables.kernel_order import KernelOrder
from fastroof.tables.lookup import run_lookup
from fastroof.tables.table_set import Tables
from fastroof.uncertainty.leave_one_out import NORMAL_80

LEVELS: Final = {0.5: 0.6745, 0.8: NORMAL_80, 0.9: 1.6449, 0.95: 1.9600}
"""Claimed shares of intervals, and their half-widths in standard errors of a normal distribution."""

HIDDEN_SHARE: Final = 0.25
FEWEST_NODES: Final = 8
"""Fewest values of an axis that is thinned; at least FEWEST_LEFT remain."""
FEWEST_LEFT: Final = 5
QUARTILES: Final = 4


COVERAGE_GRIDS: Final = tuple(grid for operator in OPERATORS.values() for grid in operator.coverages)
"""Grids that intervals are judged on, from all operators."""


class CoverageRow(NamedTuple):
    """Share of hidden points within claimed intervals, by level, extreme seeds, and quartile of error."""

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
    """Hidden points of one draw: errors in standard errors, standard errors, and whether inside."""

    ratio: Floats
    error: Floats
    inside: Bools


def _hidden_rows(grid: HoldoutGrid, table: MeasuredTable, part: Bools, rng: np.random.Generator) -> Bools:
    """Rows at hidden values: a random quarter of each kernel's axes between their ends."""
    hidden = np.zeros(table.num_rows, np.bool_)
    if grid.first:
        return part & ~kept_rows(grid, table, part)
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
    """Thin a table once and look up the hidden points; None if there are none."""
    table = tables.measured.tables[grid.operator]
    part = taking_part(table, grid.only)
    hidden = _hidden_rows(grid, table, part, rng)
    if not hidden.any() or not (part & ~hidden).any():
        return None
    thin = tables.some_rows(grid.operator, part & ~hidden)
    parts = []
    for rows, arguments in lookup_arguments(table, np.flatnonzero(hidden)):
        try:
            lookup = run_lookup(thin, grid.operator, "roofline", True, arguments, of_source=False)
        except MissingTableError:
            if not grid.kernels:
                raise
            continue  # no donor is left
        off = np.abs(np.log(lookup.latency_us / table.columns["latency_us"][rows]))
        parts.append(
            (off / lookup.relative_error, lookup.relative_error, lookup.origin <= ORIGIN_INTERPOLATED)
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
    """Judge claimed errors on hidden points: a random quarter of every axis' values, once per seed."""
    grids = tuple(grids)
    known = {grid.operator for grid in grids}
    requested = known if operators is None else set(operators)
    for name in sorted(requested - known):
        raise LookupInputError(unknown_operator(name, known))
    seeds = tuple(seeds)
    report = []
    for grid in grids:
        if grid.operator not in tables.measured.tables or grid.operator not in requested:
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
                report.append(_row(grid.operator, grid.name, region, of_region))
    return report


def run_coverage_against(
    tables: Tables,
    campaign: MeasuredTables,
    *,
    operators: Iterable[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[CoverageRow]:
    """Judge claimed errors, the campaign's part included, on another campaign's rows."""
    report = []
    methods = ("roofline",)
    for points in campaign_points(tables, campaign, operators, methods, with_error=True, progress=progress):
        found, inside = points.found["roofline"], points.is_inside
        error = found.relative_error
        ratio = np.abs(np.log(found.latency_us / points.measured_us)) / error
        for region, where in (("inside", inside), ("outside", ~inside)):
            if where.any():
                draws = [(ratio[where], error[where])]
                report.append(_row(points.operator, points.family, region, draws))
    return report


def judged_by(tables: Tables, campaign: MeasuredTables) -> Tables:
    """Tables that a campaign judges: without exactly its rows, and as its engine's plans read them."""
    measured = tables.measured
    tables_by_operator = {
        name: [
            table
            for table in measured.candidates(name)
            if name not in campaign.tables or table.rows_sha256 != campaign.tables[name].rows_sha256
        ]
        for name in measured.tables
    }
    first = {name: left[0] for name, left in tables_by_operator.items() if left}
    candidates = {name: tuple(left[1:]) for name, left in tables_by_operator.items() if len(left) > 1}
    left = Tables(replace(measured, tables=first, others=candidates), tables.gpu)
    engines = {table.engine for table in campaign.tables.values()} - {""}
    return left.in_order(KernelOrder(tuple(sorted(engines)))) if len(engines) == 1 else left


def _row(operator: str, name: str, region: str, draws: list[tuple[Floats, Floats]]) -> CoverageRow:
    ratio, error = (np.concatenate(values) for values in zip(*draws, strict=True))
    by_draw = [float(np.mean(r <= NORMAL_80)) for r, _ in draws]
    quartiles = [ratio[part] <= NORMAL_80 for part in np.array_split(np.argsort(error), QUARTILES)]
    level_50, level_80, level_90, level_95 = (float(np.mean(ratio <= width)) for width in LEVELS.values())
    return CoverageRow(
        operator,
        name,
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


COARSE: Final = "coarse"
"""Name of the hold-out grids that a survey skips: they keep a tenth of the rows."""

MOST_POINTS: Final = 4000
"""Maximum number of points of two sources that are compared; a random sample of more."""


class SurveyRow(NamedTuple):
    """Accuracy of one source's kernels of one operator: hold-out errors, and agreement with other sources.

    ``same_80``: share of other sources' values of the same library's kernels within 80 % intervals;
    ``any_80``: of all kernels, as answers for the other's engine. ``unlike``: layers of experts whose splits
    or engines differ.
    """

    gpu: str
    engine: str
    source: str
    operator: str
    rows: int
    mape_inside: float | None
    mape_outside: float | None
    hidden: int
    same_80: float | None
    same_points: int
    any_80: float | None
    any_points: int
    unsound: int
    unlike: tuple[UnlikeExperts, ...] = ()


def run_survey(
    tables: Tables, *, operators: Iterable[str] | None = None, progress: Callable[[str], None] | None = None
) -> list[SurveyRow]:
    """Judge every source of a GPU alone and against the others (shipped campaign figures are in sample)."""
    rows = []
    for name in requested_lookups(operators, tables.measured.tables):
        candidates = tables.measured.candidates(name)
        sound = [sound_rows(one, [t for t in candidates if t is not one]) for one in candidates]
        for number, table in enumerate(candidates):
            if progress is not None:
                progress(f"{tables.gpu.name} {table.source} {name}")
            rows.append(_judge_source(tables, table, candidates, sound, number))
    order = list(OPERATORS)
    return sorted(rows, key=lambda row: (row.source, order.index(row.operator)))


def _judge_source(
    tables: Tables, table: MeasuredTable, candidates: Sequence[MeasuredTable], sound: list[Bools], number: int
) -> SurveyRow:
    measured: MeasuredTables = replace(tables.measured, tables={table.operator: table}, others={})
    alone = Tables(measured, tables.gpu)
    mape, hidden = _holdout(alone, table.operator)
    same: list[Bools] = []
    every: list[Bools] = []
    for other, keep in zip(candidates, sound, strict=True):
        if other is table:
            continue
        pair = (table.some(sound[number]), other.some(keep))
        if not all(one.num_rows for one in pair):
            continue
        for _, points in same_kernels(*pair):
            if "any" not in points or is_copy(points["any"]):
                continue
            if "same" in points:
                same += _held(alone, points["same"])
            engines = (other.engine, table.engine)
            for_other = alone.in_order(KernelOrder(engines)) if other.engine != table.engine else alone
            every += _held(for_other, points["any"])
    return SurveyRow(
        tables.gpu.name,
        table.engine,
        table.source,
        table.operator,
        table.num_rows,
        mape.get("inside"),
        mape.get("outside"),
        hidden,
        _share(same),
        sum(map(len, same)),
        _share(every),
        sum(map(len, every)),
        int((~sound[number]).sum()),
        unlike_experts(tables, table.operator, table) if table.operator in EXPERTS else (),
    )


def _holdout(alone: Tables, operator: str) -> tuple[dict[str, float], int]:
    """Mean error by region, weighted by points, and the number of points."""
    grids = [grid for grid in GRIDS if grid.operator == operator and grid.name != COARSE and not grid.kernels]
    found = run_holdout(alone, operators=[operator], methods=["roofline"], grids=grids) if grids else []
    sums: dict[str, list[float]] = {}
    for row in found:
        total = sums.setdefault(row.region, [0.0, 0.0])
        total[0] += row.mape * row.points
        total[1] += row.points
    return {region: error / points for region, (error, points) in sums.items()}, sum(r.points for r in found)


def _held(tables: Tables, points: PairedPoints) -> Iterator[Bools]:
    """Yield whether the other source's values lie within the 80 % intervals of these tables."""
    operator = OPERATORS[points.operator]
    columns = {**points.columns, "latency_us": points.b_us}
    chosen = np.flatnonzero(operator.plain_rows(columns))
    if len(chosen) > MOST_POINTS:
        chosen = np.sort(np.random.default_rng(0).choice(chosen, MOST_POINTS, replace=False))
    for rows, arguments in lookup_arguments(MeasuredTable(points.operator, columns, ""), chosen):
        try:
            found = tables.lookup(points.operator, with_error=True, **arguments)
        except MissingTableError:
            continue
        off = np.abs(np.log(points.b_us[rows] / found.latency_us))
        yield off <= NORMAL_80 * np.asarray(found.relative_error)


def _share(parts: list[Bools]) -> float | None:
    return float(np.concatenate(parts).mean()) if parts else None
