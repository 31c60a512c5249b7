"""How much of a grid a table set holds, by group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastroof.load import MeasuredTables
from fastroof.load.validate import Finding
from kernels_bench.output.table_sets import row_keys
from kernels_bench.points import Point

__all__ = ["Coverage", "coverage", "coverage_findings"]


@dataclass(frozen=True)
class Coverage:
    """How much of one group of a grid has been measured, in points."""

    group: str
    operator: str
    points: int
    measured: int
    skipped: int

    @property
    def missing(self) -> int:
        """Points that were neither measured nor skipped."""
        return self.points - self.measured - self.skipped


def coverage(
    tables: MeasuredTables,
    grid: Sequence[Point],
    skipped: Sequence[str] = (),
    sentinels: Sequence[str] = (),
) -> tuple[Coverage, ...]:
    """Count how much of a grid a table set holds, by group.

    Parameters
    ----------
    tables : MeasuredTables
        The table set.
    grid : sequence of Point
        The points that should be there.
    skipped : sequence of str
        Keys of points that were tried and have no row.
    sentinels : sequence of str
        Keys of points that were measured as sentinels only; they count as measured.

    Returns
    -------
    tuple of Coverage
        In the order of the grid.
    """
    wanted = {point.operator for point in grid}
    have = set(sentinels)
    for operator, table in tables.tables.items():
        if operator in wanted:
            have.update(row_keys(operator, table.columns))
    tried = set(skipped)
    counts: dict[tuple[str, str], list[int]] = {}
    for point in grid:
        group = counts.setdefault((point.group, point.operator), [0, 0, 0])
        key = point.key
        group[0] += 1
        group[1] += key in have
        group[2] += key in tried and key not in have
    return tuple(Coverage(*names, *numbers) for names, numbers in counts.items())


def coverage_findings(groups: Sequence[Coverage]) -> Iterator[Finding]:
    """Yield what a person should know of the points that are missing."""
    missing = sum(group.missing for group in groups)
    if not missing:
        return
    points = sum(group.points for group in groups)
    most = max(groups, key=lambda group: group.missing)
    message = (
        f"{missing} of {points} points of the grid were not measured ({missing / points:.0%}), most of all "
        f"{most.missing} of {most.points} in {most.group or most.operator}"
    )
    yield Finding("coverage", "warning", missing, message)
