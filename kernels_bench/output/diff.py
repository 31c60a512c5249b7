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
from fastroof.load.families import PairedPoints, codes_of, paired_points, requested_operators
from fastroof.operators.registry import OPERATORS

WORST_EXAMPLES: Final = 3


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
