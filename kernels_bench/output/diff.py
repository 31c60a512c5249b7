"""Two table sets point by point: how many points both have, and how their latencies compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array, Floats, Longs
from fastroof.columns import LATENCY
from fastroof.config.gpu import GpuSpec
from fastroof.errors import MeasureError
from fastroof.load import MeasuredTables
from fastroof.load.families import (
    PairedPoints,
    codes_of,
    families_of,
    paired_points,
    requested_operators,
)
from fastroof.operators.registry import OPERATORS

WORST_EXAMPLES: Final = 3
FEWEST_SHARED: Final = 8
"""Fewest points by which campaigns are ranked."""


@dataclass(frozen=True)
class KeyDifference:
    """How two table sets compare for one operator, or for one key of it."""

    operator: str
    # Values of the schema's keys; empty for all of the operator.
    key: Mapping[str, Any]
    # Points in both sets, and in one of them.
    common: int
    only_a: int
    only_b: int
    # Of latency in B over latency in A at the common points; None without any.
    median: float | None
    p10: float | None
    p90: float | None
    # The points whose ratio is farthest from 1, with both latencies in us and the ratio B/A.
    worst: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Common:
    """The points of one operator that both sets have, as arrays of shape (points,)."""

    # Keys and axes, and ``latency_us`` of A.
    columns: Mapping[str, Array]
    # Latency in B over latency in A.
    ratio: Floats


@dataclass(frozen=True)
class Difference:
    """What :func:`diff_tables` returns."""

    # Descriptions of the sets.
    a: str
    b: str
    # One an operator that either set has.
    operators: tuple[KeyDifference, ...]
    # One a key of those operators.
    keys: tuple[KeyDifference, ...]
    # The common points of each operator that has any.
    common: Mapping[str, Common]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values that JSON can hold, the single points left out."""
        return {
            "a": self.a,
            "b": self.b,
            "operators": [asdict(d) for d in self.operators],
            "keys": [asdict(d) for d in self.keys],
        }


def diff_tables(
    a: MeasuredTables,
    b: MeasuredTables,
    names: tuple[str, str] = ("A", "B"),
    operators: Sequence[str] | None = None,
) -> Difference:
    """Compare two table sets at the points that both have."""
    wanted = requested_operators(a, b, names, operators, MeasureError)
    totals, keys, common = [], [], {}
    for operator in wanted:
        points = paired_points(operator, *(_columns(tables, operator) for tables in (a, b)))
        totals.append(_compared(operator, {}, points, np.arange(len(points.in_both))))
        schema = OPERATORS[operator]
        key = codes_of(points.columns[c.name] for c in schema.keys)
        order = np.argsort(key, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
            values = {c.name: _plain(points.columns[c.name][rows[0]]) for c in schema.keys}
            keys.append(_compared(operator, values, points, rows))
        both = points.in_both
        if both.any():
            columns = {name: values[both] for name, values in points.columns.items()}
            columns[LATENCY.name] = points.a_us[both]
            common[operator] = Common(columns, points.b_us[both] / points.a_us[both])
    return Difference(*names, tuple(totals), tuple(keys), common)


@dataclass(frozen=True)
class Agreement:
    """How one source of a GPU agrees with a campaign over a family of kernels."""

    operator: str
    # Its text keys: dtype, kind, distribution.
    family: str
    source: str
    # Points in both, and the campaign's latency over the source's there.
    common: int
    median: float
    p10: float
    p90: float
    # Root mean square of the ratio's logarithm: at those points, and at those that all ranked sources have.
    rms: float
    shared: int
    shared_rms: float | None
    # Whether it is the one with the least ``shared_rms`` of several.
    is_closest: bool


def compare_campaigns(
    sources: MeasuredTables, campaign: MeasuredTables, operators: Sequence[str] | None = None
) -> list[Agreement]:
    """Compare a campaign with every source of a GPU, by family, the closest first.

    A source with exactly the campaign's rows is left out, as are families without a common point.
    """
    wanted = requested_operators(sources, campaign, ("A", "B"), operators, MeasureError)
    found: list[Agreement] = []
    for operator in (name for name in wanted if name in campaign.tables):
        columns = campaign.tables[operator].columns
        for words, rows in families_of(operator, columns):
            mine = {name: values[rows] for name, values in columns.items()}
            ratios = {}
            for table in sources.candidates(operator):
                points = paired_points(operator, mine, table.columns)
                ratio = (points.a_us / points.b_us)[~np.isnan(points.a_us)]
                if (~np.isnan(ratio)).any() and not (ratio == 1.0).all():
                    ratios[table.source] = ratio
            found += _agreements(operator, " ".join(words.values()), ratios)
    return found


def _agreements(operator: str, family: str, ratios: Mapping[str, Floats]) -> list[Agreement]:
    """Summarise ratios at a campaign's points in one order, by source; NaN where a source lacks a point."""
    common = {source: int((~np.isnan(ratio)).sum()) for source, ratio in ratios.items()}
    ranked = [source for source, points in common.items() if points >= FEWEST_SHARED]
    in_all = np.logical_and.reduce([~np.isnan(ratios[source]) for source in ranked]) if ranked else None
    shared = 0 if in_all is None or len(ranked) < 2 else int(in_all.sum())
    rms_of = {source: _rms(ratios[source][in_all]) for source in ranked if shared >= FEWEST_SHARED}
    closest = min(rms_of, key=lambda source: rms_of[source], default=None)
    rows = []
    for source, ratio in ratios.items():
        values = ratio[~np.isnan(ratio)]
        p10, median, p90 = np.quantile(values, (0.1, 0.5, 0.9)).tolist()
        of_all = rms_of.get(source)
        points = shared if source in rms_of else 0
        figures = (common[source], median, p10, p90, _rms(values), points, of_all, source == closest)
        rows.append(Agreement(operator, family, source, *figures))
    return sorted(rows, key=lambda row: (row.shared_rms is None, row.shared_rms or 0.0, row.rms))


def _rms(ratio: Floats) -> float:
    return float(np.sqrt(np.mean(np.log(ratio) ** 2)))


def sizes_of(operator: str, columns: Mapping[str, Array], gpu: GpuSpec) -> tuple[Floats, str]:
    """Return what bounds each point most often, and its unit: bytes of decodes and copies, else FLOPs."""
    work = OPERATORS[operator].work(columns, gpu)
    if "decode" in operator or np.isnan(work.flops).all():
        return work.moved_bytes, "B"
    return work.flops, "FLOP"


def _columns(tables: MeasuredTables, operator: str) -> Mapping[str, Array] | None:
    return tables.tables[operator].columns if operator in tables.tables else None


def _compared(operator: str, key: Mapping[str, Any], points: PairedPoints, rows: Longs) -> KeyDifference:
    a_us, b_us = points.a_us[rows], points.b_us[rows]
    both = rows[points.in_both[rows]]
    ratio = points.b_us[both] / points.a_us[both]
    p10, median, p90 = np.quantile(ratio, (0.1, 0.5, 0.9)).tolist() if len(both) else (None,) * 3
    farthest = np.argsort(-np.abs(np.log(ratio)), kind="stable")[:WORST_EXAMPLES]
    return KeyDifference(
        operator=operator,
        key=key,
        common=len(both),
        only_a=int((~np.isnan(a_us) & np.isnan(b_us)).sum()),
        only_b=int((np.isnan(a_us) & ~np.isnan(b_us)).sum()),
        median=median,
        p10=p10,
        p90=p90,
        worst=tuple(_example(points, int(both[i]), float(ratio[i])) for i in farthest),
    )


def _example(points: PairedPoints, row: int, ratio: float) -> dict[str, Any]:
    values = {name: _plain(column[row]) for name, column in points.columns.items()}
    return values | {"a_us": float(points.a_us[row]), "b_us": float(points.b_us[row]), "ratio": ratio}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
