"""Plots of predicted against measured times of serving."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from fastroof.errors import FastroofError
from fastroof.report import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fastroof.evidence.prediction_errors import PredictedTime, Validation


BAND: Final = 0.1
PANEL_IN: Final = 4.9
_LEGEND_LINE_IN: Final = 0.145


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
STEPS: Final = ("steps", "engine steps")
"""Data sets of whole steps."""
OWN: Final = "fastroof"


def draw_validation(report: Validation) -> Figure:
    """Draw predicted against measured times, and aiconfigurator-core's predictions if there are any."""
    shown = []
    for panel in PANELS:
        of_panel = [row for row in report.rows if row.quantity in panel.quantities]
        if rows := [row for row in of_panel if (row.dataset in STEPS) == (panel.unit_of == "step")]:
            shown.append((panel, rows))
    if not shown:
        raise FastroofError("the validation has no rows, so there is nothing to draw")
    datasets = list(dict.fromkeys(row.dataset for row in report.rows))
    peers = any(not math.isnan(row.aic_ms) for _, rows in shown for row in rows)
    with plots.style():
        most = max(len({row.dataset for row in rows}) for _, rows in shown)
        high = (2 if peers else 1) * (4.4 + _LEGEND_LINE_IN * most) + 0.8
        figure = plots.new_figure(PANEL_IN * len(shown) + 0.3, high)
        all_axes = figure.subplots(2 if peers else 1, len(shown), squeeze=False)
        for (panel, rows), column in zip(shown, all_axes.T, strict=True):
            times = [t for r in rows for t in (r.measured_ms, r.predicted_ms, r.aic_ms) if not math.isnan(t)]
            limits = min(times) / 1.25, max(times) * 1.25
            _draw(column[0], panel, OWN, rows, [r.predicted_ms for r in rows], datasets, limits)
            if peers:
                aic = [row.aic_ms for row in rows]
                _draw(column[1], panel, "aiconfigurator-core", rows, aic, datasets, limits)
        basis = "constants fitted without each row's model" if report.unseen else f"engine {report.engine}"
        plots.write_titles(
            figure,
            f"Predicted against measured serving on {report.gpu}",
            f"{basis}; shaded: within 10 %; in brackets: mean absolute error, rows",
        )
    return figure


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
    axes.plot(line, line, color=plots.QUIET, linewidth=1.0)
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
        colour, marker = plots.line_look(i)
        axes.scatter(
            measured, predicted, s=15, alpha=0.65, linewidths=0, color=colour, marker=marker,
            label=f"{dataset} [{mape:.1%}, {len(pairs)}{fitted}]",
        )  # fmt: skip
    axes.set_title(f"{panel.title}: {who}")
    axes.set_xlabel(f"measured {panel.unit_of} (ms)")
    axes.set_ylabel(f"predicted {panel.unit_of} (ms)")
    for axis in (axes.xaxis, axes.yaxis):
        plots.log_ticks(axis, low, high)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="upper left", bbox_to_anchor=(0.0, -0.14), fontsize=7, frameon=False, handletextpad=0.2
        )
    else:
        axes.clear()
        axes.set_axis_off()
        axes.text(
            0.5, 0.5, f"no predictions by {who}", transform=axes.transAxes, ha="center", color=plots.QUIET
        )
