"""A survey of all sources of a GPU: rows, hold-out errors, and intervals against other campaigns' values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools
from fastroof.errors import LookupInputError, MissingTableError
from fastroof.load import MeasuredTable, MeasuredTables
from fastroof.load.campaigns import is_copy, same_kernels, sound_rows
from fastroof.load.common_points import PairedPoints
from fastroof.operators.registry import OPERATORS
from fastroof.tables.holdout import GRIDS, lookup_arguments, run_holdout
from fastroof.tables.kernel_order import KernelOrder
from fastroof.tables.table_set import Tables
from fastroof.uncertainty.leave_one_out import NORMAL_80

__all__ = ["SurveyRow", "run_survey"]

COARSE: Final = "coarse"
"""The hold-out grids that a survey leaves out: they keep a tenth of the rows."""

MOST_POINTS: Final = 4000
"""Points of two sources that intervals are held against; of more a random part."""


class SurveyRow(NamedTuple):
    """What is known of one source's kernels of one operator."""

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


def run_survey(
    tables: Tables,
    *,
    operators: Iterable[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[SurveyRow]:
    """Judge every source of a GPU by itself and against the others."""
    able = [name for name, operator in OPERATORS.items() if operator.answers_lookups]
    wanted = able if operators is None else list(operators)
    if unknown := sorted(set(wanted) - set(able)):
        raise LookupInputError(f"unknown {', '.join(unknown)}: use one of {', '.join(able)}")
    rows = []
    for name in (name for name in able if name in wanted and name in tables.measured.tables):
        candidates = tables.candidates(name)
        sound = [sound_rows(one, [t for t in candidates if t is not one]) for one in candidates]
        for number, table in enumerate(candidates):
            if progress is not None:
                progress(f"{tables.gpu.name} {table.source} {name}")
            rows.append(_row(tables, table, candidates, sound, number))
    return sorted(rows, key=lambda row: (row.source, able.index(row.operator)))


def _row(
    tables: Tables, table: MeasuredTable, candidates: Sequence[MeasuredTable], sound: list[Bools], number: int
) -> SurveyRow:
    alone = _alone(tables, table)
    mape, hidden = _holdout(alone, table.operator)
    same: list[Bools] = []
    every: list[Bools] = []
    for other, keep in zip(candidates, sound, strict=True):
        if other is table:
            continue
        pair = (_some(table, sound[number]), _some(other, keep))
        if not all(one.num_rows for one in pair):
            continue
        for _, points in same_kernels(*pair):
            if "any" not in points or is_copy(points["any"]):
                continue
            if "same" in points:
                same += _held(alone, points["same"])
            engines = (other.engine, table.engine)
            foreign = alone.in_order(KernelOrder(engines)) if other.engine != table.engine else alone
            every += _held(foreign, points["any"])
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
    )


def _alone(tables: Tables, table: MeasuredTable) -> Tables:
    """Tables of one source of an operator, and of nothing else."""
    measured: MeasuredTables = replace(tables.measured, tables={table.operator: table}, others={})
    return Tables(measured, tables.gpu)


def _some(table: MeasuredTable, keep: Bools) -> MeasuredTable:
    columns = {name: values[keep] for name, values in table.columns.items()}
    return replace(table, columns=columns, written=None)


def _holdout(alone: Tables, operator: str) -> tuple[dict[str, float], int]:
    """Mean error by region, over its grids by their points."""
    grids = [grid for grid in GRIDS if grid.operator == operator and grid.name != COARSE and not grid.kernels]
    found = run_holdout(alone, operators=[operator], methods=["roofline"], grids=grids) if grids else []
    sums: dict[str, list[float]] = {}
    for row in found:
        total = sums.setdefault(row.region, [0.0, 0.0])
        total[0] += row.mape * row.points
        total[1] += row.points
    return {region: error / points for region, (error, points) in sums.items()}, sum(r.points for r in found)


def _held(tables: Tables, points: PairedPoints) -> Iterator[Bools]:
    """Whether the other source's values lie in the 80 % intervals of these tables, in parts."""
    operator = OPERATORS[points.operator]
    columns = {**points.columns, "latency_us": points.b_us}
    some = np.flatnonzero(operator.plain_rows(columns))
    if len(some) > MOST_POINTS:
        some = np.sort(np.random.default_rng(0).choice(some, MOST_POINTS, replace=False))
    for rows, arguments in lookup_arguments(MeasuredTable(points.operator, columns, ""), some):
        try:
            found = tables.lookup(points.operator, with_error=True, **arguments)
        except MissingTableError:
            continue
        off = np.abs(np.log(points.b_us[rows] / found.latency_us))
        yield off <= NORMAL_80 * np.asarray(found.relative_error)


def _share(parts: list[Bools]) -> float | None:
    return float(np.concatenate(parts).mean()) if parts else None
