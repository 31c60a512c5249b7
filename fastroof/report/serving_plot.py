"""Predicted against measured serving times, every row a point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.errors import FastroofError
from fastroof.report.plots import COLOURS, INK, QUIET, new_figure, style, write_titles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fastroof.serving.evidence.prediction_errors import PredictedTime, Validation

__all__ = ["draw_validation", "log_ticks"]

BAND: Final = 0.1
PANEL_IN: Final = 4.9
POINT_COLOURS: Final = (
    *(COLOURS[c] for c in ("blue", "vermilion", "green", "purple", "orange", "sky")),
    INK,
    QUIET,
)
MARKERS: Final = "osD^vPXd"


class _Panel(NamedTuple):
    title: str
    unit_of: str
    quantities: tuple[str, ...]


PANELS: Final = (
    _Panel("Time per output token", "TPOT", ("tpot", "decode")),
    _Panel("Time to first token", "TTFT", ("ttft",)),
    _Panel("Whole requests", "end to end", ("e2e",)),
    _Panel("Throughput, as time", "time of an output token", ("throughput",)),
    _Panel("Whole steps", "step", ("decode", "prefill", "mixed", "unequal")),
)
STEPS: Final = "steps"
OWN: Final = "fastroof"


def draw_validation(report: Validation) -> Figure:
    """Draw predictions against what was measured, and aiconfigurator-core's below where there are any."""
    shown = [(panel, rows) for panel in PANELS if (rows := _rows_of(report.rows, panel))]
    if not shown:
        raise FastroofError("nothing was judged, so there is nothing to draw")
    datasets = list(dict.fromkeys(row.dataset for row in report.rows))
    peers = any(not math.isnan(row.aic_ms) for _, rows in shown for row in rows)
    with style():
        figure = new_figure(PANEL_IN * len(shown) + 0.3, (2 if peers else 1) * 4.4 + 0.8)
        all_axes = figure.subplots(2 if peers else 1, len(shown), squeeze=False)
        for (panel, rows), column in zip(shown, all_axes.T, strict=True):
            limits = _limits(rows)
            _draw(column[0], panel, OWN, rows, [r.predicted_ms for r in rows], datasets, limits)
            if peers:
                aic = [row.aic_ms for row in rows]
                _draw(column[1], panel, "aiconfigurator-core", rows, aic, datasets, limits)
        seen = "constants fitted without each row's model" if report.unseen else f"runtime {report.runtime}"
        write_titles(
            figure,
            f"Predicted against measured serving on {report.gpu}",
            f"{seen}; shaded: within 10 %; in brackets: mean absolute error, rows",
        )
    return figure


def _rows_of(rows: Sequence[PredictedTime], panel: _Panel) -> list[PredictedTime]:
    return [
        r
        for r in rows
        if r.quantity in panel.quantities and (r.dataset == STEPS) == (panel.unit_of == "step")
    ]


def _limits(rows: Sequence[PredictedTime]) -> tuple[float, float]:
    times = [t for r in rows for t in (r.measured_ms, r.predicted_ms, r.aic_ms) if not math.isnan(t)]
    return min(times) / 1.25, max(times) * 1.25


def _draw(
    axes: Axes,
    panel: _Panel,
    who: str,
    rows: Sequence[PredictedTime],
    predicted_ms: Sequence[float],
    datasets: Sequence[str],
    limits: tuple[float, float],
) -> None:
    low, high = limits
    line = np.array(limits)
    axes.fill_between(line, line * (1.0 - BAND), line * (1.0 + BAND), color="#dfe7ee", linewidth=0)
    axes.plot(line, line, color=QUIET, linewidth=1.0)
    for i, dataset in enumerate(datasets):
        pairs = [
            (row.measured_ms, ms)
            for row, ms in zip(rows, predicted_ms, strict=True)
            if row.dataset == dataset and not math.isnan(ms)
        ]
        if not pairs:
            continue
        measured, predicted = np.array(pairs).T
        fitted = ", fitted" if who == OWN and any(r.fitted for r in rows if r.dataset == dataset) else ""
        of_set = [row for row in rows if row.dataset == dataset]
        errors = [row.error if who == OWN else row.aic_error for row in of_set]
        mape = float(np.nanmean(np.abs(errors)))
        axes.scatter(
            measured,
            predicted,
            s=15,
            alpha=0.65,
            linewidths=0,
            color=POINT_COLOURS[i % len(POINT_COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            label=f"{dataset} [{mape:.1%}, {len(pairs)}{fitted}]",
        )
    axes.set_title(f"{panel.title}: {who}")
    axes.set_xlabel(f"measured {panel.unit_of} (ms)")
    axes.set_ylabel(f"predicted {panel.unit_of} (ms)")
    for axis in (axes.xaxis, axes.yaxis):
        log_ticks(axis, low, high)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", fontsize=7, framealpha=0.85, edgecolor="none", handletextpad=0.2)
    else:
        axes.text(0.5, 0.5, "no predictions", transform=axes.transAxes, ha="center", color=QUIET)


def log_ticks(axis: Any, low: float, high: float) -> None:
    """Ticks at 1, 2, 5 of each decade, or at the decades where those would be many."""
    from matplotlib.ticker import NullLocator

    axis.axes.set_xscale("log") if axis.axis_name == "x" else axis.axes.set_yscale("log")
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
    ticks = [step * 10.0**e for e in decades for step in steps if low <= step * 10.0**e <= high]
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_minor_locator(NullLocator())
