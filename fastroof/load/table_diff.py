"""Campaign against campaign: the same kernels of two table sets, by family and by region of shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from fastroof.columns import LATENCY
from fastroof.errors import TableError
from fastroof.load.common_points import (
    PairedPoints,
    band_words,
    bands,
    codes_of,
    paired_points,
    region_sizes,
    wanted_operators,
)
from fastroof.load.families import families_of, split_rows
from fastroof.load.measured import MeasuredTables

__all__ = ["FAR_APART", "FEWEST_POINTS", "Comparison", "TableDiff", "diff_tables"]

FAR_APART: Final = 1.5
"""Two campaigns whose median ratio is beyond this did not measure one kernel."""

FEWEST_POINTS: Final = 8
"""A family or region of fewer points is no family."""


@dataclass(frozen=True)
class Comparison:
    """How two tables compare over a family, or over one region of its shapes."""

    operator: str
    family: Mapping[str, str]
    region: Mapping[str, str]
    points: int
    only_a: int
    only_b: int
    median: float | None
    rms: float | None
    p10: float | None
    p90: float | None
    is_flagged: bool


@dataclass(frozen=True)
class TableDiff:
    """What :func:`diff_tables` returns."""

    a: str
    b: str
    families: tuple[Comparison, ...]
    regions: tuple[Comparison, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values that JSON can hold."""
        return asdict(self)


def diff_tables(
    a: MeasuredTables,
    b: MeasuredTables,
    names: tuple[str, str] = ("A", "B"),
    operators: Sequence[str] | None = None,
) -> TableDiff:
    """Compare two table sets at the points that both have."""
    wanted = wanted_operators(a, b, names, operators, TableError)
    families: list[Comparison] = []
    regions: list[Comparison] = []
    for operator in wanted:
        columns = (t.tables[operator].columns if operator in t.tables else None for t in (a, b))
        for family, points in _families(paired_points(operator, *columns)):
            families.append(_compared(points, family, {}))
            regions += [_compared(part, family, sizes) for sizes, part in _regions(points.common())]
    return TableDiff(*names, tuple(families), tuple(regions))


def _families(points: PairedPoints) -> Iterator[tuple[dict[str, str], PairedPoints]]:
    for words, rows in families_of(points.operator, {**points.columns, LATENCY.name: points.a_us}):
        yield words, points.some(rows)


def _regions(points: PairedPoints) -> Iterator[tuple[dict[str, str], PairedPoints]]:
    if not len(points.a_us):
        return
    band = {name: bands(sizes) for name, sizes in region_sizes(points.operator, points.columns).items()}
    for rows in split_rows(codes_of(band.values())):
        yield {name: band_words(int(of[rows[0]])) for name, of in band.items()}, points.some(rows)


def _compared(points: PairedPoints, family: Mapping[str, str], region: Mapping[str, str]) -> Comparison:
    log_ratio = points.common().log_ratio
    count = len(log_ratio)
    p10, median, p90 = (
        np.exp(np.quantile(log_ratio, (0.1, 0.5, 0.9))).tolist() if count else (None, None, None)
    )
    return Comparison(
        operator=points.operator,
        family=family,
        region=region,
        points=count,
        only_a=int(np.isnan(points.b_us).sum()),
        only_b=int(np.isnan(points.a_us).sum()),
        median=median,
        rms=float(np.sqrt(np.mean(log_ratio**2))) if count else None,
        p10=p10,
        p90=p90,
        is_flagged=median is not None and count >= FEWEST_POINTS and max(median, 1.0 / median) > FAR_APART,
    )
