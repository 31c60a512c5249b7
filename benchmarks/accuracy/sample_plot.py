"""Plot predicted against measured times of all GPUs: judged runs, and below them the other kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from fastroof.errors import FastroofError
from fastroof.report.plots import COLOURS, INK, QUIET, log_ticks, new_figure, style, write_titles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from benchmarks.accuracy.whole_sample import SampleValidation
    from fastroof.evidence.prediction_errors import PredictedTime

BANDS: Final = ((0.25, "#eef2f6"), (0.10, "#d9e3ec"))
"""Bands around the diagonal and their fills, the widest first."""

POINT_COLOURS: Final = (
    *(COLOURS[name] for name in ("blue", "vermilion", "green", "purple", "orange", "sky")), INK, QUIET,
)  # fmt: skip
MARKERS: Final = "os^DvPX"
QUANTITIES: Final = (
    ("TPOT", "Time per output token", ("tpot", "decode")),
    ("TTFT", "Time to first token, without queueing", ("ttft",)),
)
JUDGED: Final = ("judged", "independent")


def draw_sample(report: SampleValidation) -> Figure:
    """Draw predicted against measured times of all GPUs."""
    if not report.times:
        raise FastroofError("nothing was judged, so there is nothing to draw")
    with style():
        figure = new_figure(12.4, 11.6)
        for column, (unit, title, quantities) in enumerate(QUANTITIES):
            times = [time for time in report.times if time.quantity in quantities]
            judged = [time for time in times if time.kind in JUDGED]
            apart = [time for time in times if time.kind not in JUDGED]
            limits = _limits(times)
            above, below = (figure.add_subplot(2, 2, 1 + 2 * row + column) for row in range(2))
            _draw(above, title, unit, judged, limits, by_kind=False)
            _draw(below, f"{title}: kinds apart", unit, apart, limits, by_kind=True)
        how = f"constants fitted without each run's {report.split}" if report.split else report.engine
        write_titles(
            figure,
            f"Predicted against measured: {report.represented} runs on {len(report.gpus)} GPUs",
            f"{how}; shaded: within 10 and 25 %; in brackets: mean absolute error, runs",
        )
    return figure


def _limits(times: Sequence[PredictedTime]) -> tuple[float, float]:
    shown = [ms for time in times for ms in (time.measured_ms, time.predicted_ms)]
    return (min(shown) / 1.25, max(shown) * 1.25) if shown else (1.0, 1000.0)


def _draw(
    axes: Axes,
    title: str,
    unit: str,
    times: Sequence[PredictedTime],
    limits: tuple[float, float],
    *,
    by_kind: bool,
) -> None:
    line = np.array(limits)
    for share, fill in BANDS:
        axes.fill_between(line, line * (1.0 - share), line * (1.0 + share), color=fill, linewidth=0)
    axes.plot(line, line, color=QUIET, linewidth=1.0)
    engines = sorted({time.engine for time in times})
    names = sorted({time.kind if by_kind else time.gpu for time in times})
    for i, name in enumerate(names):
        mine = [time for time in times if (time.kind if by_kind else time.gpu) == name]
        label = f"{name} [{np.mean([abs(time.error) for time in mine]):.1%}, {len(mine)}]"
        for engine, marker in zip(engines, MARKERS, strict=False):
            points = [(time.measured_ms, time.predicted_ms) for time in mine if time.engine == engine]
            if not points:
                continue
            measured, predicted = np.array(points).T
            axes.scatter(
                measured, predicted, s=11, alpha=0.55, linewidths=0, marker=marker,
                color=POINT_COLOURS[i % len(POINT_COLOURS)], label=label,
            )  # fmt: skip
            label = "_nolegend_"
    if engines and not by_kind:
        for engine, marker in zip(engines, MARKERS, strict=False):
            axes.scatter([], [], s=16, color=QUIET, marker=marker, label=engine)
    axes.set_title(title)
    axes.set_xlabel(f"measured {unit} (ms)")
    axes.set_ylabel(f"predicted {unit} (ms)")
    for axis in (axes.xaxis, axes.yaxis):
        log_ticks(axis, *limits)
    axes.set_xlim(*limits)
    axes.set_ylim(*limits)
    if times:
        axes.legend(loc="upper left", fontsize=7.5, framealpha=0.85, edgecolor="none", handletextpad=0.2)
    else:
        axes.text(0.5, 0.5, "no runs", transform=axes.transAxes, ha="center", color=QUIET)
