"""Legends below axes: as many columns as fit the figure, and a figure that grows with their lines."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from fastroof.report.plots import set_height, text_renderer

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

__all__ = ["legends_below"]

_SHARE: Final = 0.96
"""Of the width of what a legend is below, it takes so much at most."""
_LINE_IN: Final = 0.26
"""Height of a line of a legend, inches."""
_USUAL_LINES: Final = 2
"""Lines that a figure's height has room for."""


def legends_below(
    figure: Figure,
    legends: Sequence[tuple[Figure | SubFigure, Sequence[Any], Sequence[str]]],
    *,
    columns: int = 3,
    size: float = 9.5,
) -> None:
    """Put a legend below each of some parts of a figure, inside it and beside each other."""
    most = max((_lines(figure, *legend, columns, size) for legend in legends), default=0)
    if most > _USUAL_LINES:
        set_height(figure, float(figure.get_size_inches()[1]) + (most - _USUAL_LINES) * _LINE_IN)


def _lines(
    figure: Figure,
    part: Figure | SubFigure,
    handles: Sequence[Any],
    labels: Sequence[str],
    columns: int,
    size: float,
) -> int:
    """Make one legend, and count its lines."""
    if not labels:
        return 0
    renderer = text_renderer(figure)
    room = _SHARE * part.bbox.width
    letters = max(map(len, labels))
    wanted = min(columns, len(labels))
    while True:
        broken = [textwrap.fill(label, letters, break_long_words=letters < 16) for label in labels]
        legend = part.legend(
            handles, broken, loc="outside lower center", ncols=wanted, frameon=False, fontsize=size
        )
        if legend.get_window_extent(renderer).width <= room or letters < 8:
            high = max(label.count("\n") + 1 for label in broken)
            return -(-len(labels) // wanted) * high
        legend.remove()
        if wanted > 1:
            wanted -= 1
        else:
            letters = int(letters * 0.85)
