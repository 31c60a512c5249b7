"""Calibration curve: the share of hidden points that intervals cover against the share they claim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from fastroof.report.plots import LINE_COLOURS, QUIET, new_figure, style, write_titles
from fastroof.tables.coverage import LEVELS, CoverageRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_coverage"]

WANTED: Final = (0.75, 0.85)
"""What 80 % intervals are to cover."""


def draw_coverage(rows: Sequence[CoverageRow], *, source: str = "") -> Figure:
    """Draw the coverage of intervals inside the measured range, a line a grid."""
    inside = [row for row in rows if row.region == "inside"]
    with style():
        figure = new_figure(7.5, 6.2)
        axes = figure.subplots()
        claimed = [100.0 * level for level in LEVELS]
        axes.plot([0.0, 100.0], [0.0, 100.0], color=QUIET, linewidth=1.0, linestyle=(0, (4, 3)))
        low, high = (100.0 * share for share in WANTED)
        axes.fill_between([78.0, 82.0], low, high, color=QUIET, alpha=0.2, linewidth=0)
        for row, colour in zip(inside, LINE_COLOURS * len(inside), strict=False):
            covered = [100.0 * s for s in (row.level_50, row.level_80, row.level_90, row.level_95)]
            label = f"{row.operator.replace('_', ' ')}, {row.grid}: {100.0 * row.level_80:.0f} % of 80 %"
            axes.plot(claimed, covered, color=colour, marker="o", markersize=5, label=label)
        axes.set_xlim(45.0, 100.0)
        axes.set_ylim(45.0, 100.0)
        axes.set_xlabel("claimed, %")
        axes.set_ylabel("covered, % of hidden points")
        axes.legend(loc="lower right", frameon=False, fontsize=9.5)
        parts = ("A quarter of every axis hidden, grey: 75 to 85 %", source)
        write_titles(figure, "Intervals of lookups on hidden points", "; ".join(filter(None, parts)))
    return figure
