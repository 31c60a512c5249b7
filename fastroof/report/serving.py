"""Plots of serving results: predicted against measured times, and curves over load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.errors import FastroofError
from fastroof.report import plots
from fastroof.report.front import in_turns, rows_where, setting_words, swept_words
from fastroof.report.results_file import RateColumns, Results

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


_LABELS: Final = {
    "ttft_ms": "TTFT (ms)",
    "tpot_ms": "TPOT (ms)",
    RateColumns.GPU: "tokens/s per GPU",
    "clients": "clients",
    "request_rate_per_s": "requests/s",
    "batch_size": "batch size (sequences)",
    "kv_len": "kv_len (tokens)",
}
_FEW_TICKS: Final = 14
_FEW_MARKERS: Final = 40
_WIDE: Final = 4.0
"""Ratio of the largest to the smallest load from which an axis is logarithmic."""
_VERY_WIDE: Final = 50.0
"""Ratio of the largest to the smallest height from which an axis is logarithmic."""
_LEAST_TICK: Final = 0.07
"""Minimum distance between two ticks, as a share of the axis."""


def draw_serving_curves(results: Results, **required: Any) -> Figure:
    """Draw latency and throughput over the load for the settings with the most tokens/s per GPU.

    Arguments, figure and errors are those of :func:`fastroof.report.draw_pareto`.
    """
    load = results.load()
    rows = rows_where(results, **required)
    series = results.series(load)
    along = results.numbers(load)
    rate = np.where(results.is_within(), results.numbers(RateColumns.GPU), 0.0)
    groups = results.groups(series)
    indices = np.flatnonzero(rows & np.isfinite(along))
    order = indices[np.lexsort((along[indices], groups[indices]))]
    curves = [c for c in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1) if len(c)]
    models = results.codes("model")[0]
    turns = in_turns([int(models[c[0]]) for c in curves], [float(rate[c].max()) for c in curves])
    shown = [curves[i] for i in turns[: len(plots.LINE_LOOKS)]]
    columns = {name: results.codes(name) for name in series}
    differ = [name for name, (codes, _) in columns.items() if len({int(codes[c[0]]) for c in shown}) > 1]
    if {"tp", "total_gpus"} <= set(differ):
        differ.remove("total_gpus")
    limits = results.metadata_json("fastroof.spec").get("constraints") or {}
    quantities = results.kind.curves[load]
    with plots.style():
        figure = plots.new_figure(12.0, 5.6)
        for axes, name in zip(figure.subplots(1, 2), quantities, strict=True):
            values = results.numbers(name)
            for curve, (colour, marker) in zip(shown, plots.LINE_LOOKS, strict=False):
                label = _setting_label({column: columns[column] for column in differ}, int(curve[0]))
                axes.plot(
                    along[curve], values[curve], color=colour, markersize=4.5,
                    marker=marker if len(curve) <= _FEW_MARKERS else None, label=label,
                )  # fmt: skip
            _set_axes(axes, np.unique(along[np.concatenate(shown)]), load, name)
            limit = limits.get(name)
            if isinstance(limit, int | float) and limit <= axes.get_ylim()[1]:
                axes.axhline(limit, color=plots.QUIET, linewidth=1.2, linestyle="--", zorder=1)
                axes.annotate(
                    f"limit {limit:g} ms", (0.0, limit), xytext=(5, 4), textcoords="offset points",
                    xycoords=("axes fraction", "data"), color=plots.QUIET, size=9.5,
                )  # fmt: skip
        if differ:
            plots.legends_below(figure, [(figure, *figure.axes[0].get_legend_handles_labels())])
        what, workload = swept_words(results, np.concatenate(shown))
        most = f"{len(shown)} settings with the most tokens/s per GPU of each model, of {len(curves):,}"
        chosen = most if len(curves) > len(shown) else f"{len(shown)} setting{'s' * (len(shown) != 1)}"
        plots.write_titles(
            figure,
            f"{what}: {' and '.join(_LABELS[n].partition(' (')[0] for n in quantities)}",
            "; ".join(filter(None, (workload, chosen))),
        )
    return figure


def _set_axes(axes: Axes, loads: Any, load: str, name: str) -> None:
    low, high = float(loads[0]), float(loads[-1])
    is_log = low > 0.0 and high >= _WIDE * low
    if is_log:
        axes.set_xscale("log", base=2)
    doubled = 2.0 ** np.arange(0.0, 40.0)
    places = loads if len(loads) <= _FEW_TICKS else doubled[(doubled >= low) & (doubled <= high)]
    ticks = _apart(places, np.log(places) if is_log else places) if len(places) else []
    # loads that crowd on a linear axis are better labelled by round numbers
    if is_log or len(ticks) == len(loads):
        axes.set_xticks(ticks, [plots.size_words(at) for at in ticks])
        axes.minorticks_off()
    heights = np.concatenate([np.asarray(line.get_ydata(), np.float64) for line in axes.lines])
    low, high = float(np.nanmin(heights)), float(np.nanmax(heights))
    if high > _VERY_WIDE * low > 0.0:
        plots.log_ticks(axes.yaxis, low, high)
    else:
        axes.set_ylim(0.0, high * 1.08 if high > 0.0 else 1.0)
        axes.yaxis.set_major_formatter(plots.plain_number)
    axes.set_xlabel(_LABELS[load])
    axes.set_ylabel(_LABELS[name])


def _apart(ticks: Any, places: Any) -> list[float]:
    """Return ticks far enough apart for their labels."""
    least = (places[-1] - places[0]) * _LEAST_TICK
    selected: list[int] = []
    for i in range(len(ticks)):
        if not selected or places[i] - places[selected[-1]] >= least:
            selected.append(i)
    return [float(ticks[i]) for i in selected]


def _setting_label(columns: dict[str, tuple[Any, list[Any]]], row: int) -> str:
    """Return the settings that distinguish a curve, without kinds of workers with a count of 0."""
    parts = []
    for name, (codes, values) in columns.items():
        value = values[int(codes[row])] if codes[row] >= 0 else "-"
        if value == 0 and (name == "replicas" or name.endswith("_workers")):
            continue
        parts.append(setting_words(name, value))
    return ", ".join(parts)
