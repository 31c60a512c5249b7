"""Curves of a sweep over its load: TTFT and TPOT against concurrency, or TPOT and rate against the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.report.front import in_turns
from fastroof.report.legends import legends_below
from fastroof.report.pareto_plot import rows_where, swept_words
from fastroof.report.plots import LINE_LOOKS, QUIET, new_figure, style, write_titles
from fastroof.report.results_file import RateColumns, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_serving_curves"]

_LABELS: Final = {
    "ttft_ms": "TTFT (ms)",
    "tpot_ms": "TPOT (ms)",
    RateColumns.GPU: "tokens/s per GPU",
    "concurrency": "concurrency (requests)",
    "request_rate_per_s": "requests/s",
    "batch_size": "batch size (sequences)",
    "kv_len": "kv_len (tokens)",
}
_FEW_TICKS: Final = 14
_FEW_MARKERS: Final = 40
_WIDE: Final = 4.0
"""An axis is logarithmic where the largest load is so many times the smallest."""
_LEAST_TICK: Final = 0.07
"""Share of the axis between two ticks, at least."""


def draw_serving_curves(results: Results, **wanted: Any) -> Figure:
    """Draw the curves of the settings with the most tokens/s per GPU over the load.

    Parameters
    ----------
    results : Results
        What :func:`fastroof.report.read_results` returns.
    **wanted
        Values that columns must hold, such as ``isl=4000``; None is any.

    Returns
    -------
    Figure
        For :func:`fastroof.report.save_figure`.

    Raises
    ------
    FastroofError
        If matplotlib is not installed, a column is not there, or no row is left.
    """
    load = results.load()
    rows = rows_where(results, **wanted)
    series = results.series(load)
    along = results.numbers(load)
    rate = np.where(results.is_within(), results.numbers(RateColumns.GPU), 0.0)
    groups = results.groups(series)
    indices = np.flatnonzero(rows & np.isfinite(along))
    order = indices[np.lexsort((along[indices], groups[indices]))]
    curves = [c for c in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1) if len(c)]
    models = results.codes("model")[0]
    turns = in_turns([int(models[c[0]]) for c in curves], [float(rate[c].max()) for c in curves])
    shown = [curves[i] for i in turns[: len(LINE_LOOKS)]]
    columns = {name: results.codes(name) for name in series}
    differ = [name for name, (codes, _) in columns.items() if len({int(codes[c[0]]) for c in shown}) > 1]
    if {"tp", "total_gpus"} <= set(differ):
        differ.remove("total_gpus")
    limits = results.metadata_json("fastroof.spec").get("constraints") or {}
    with style():
        figure = new_figure(12.0, 5.6)
        for axes, name in zip(figure.subplots(1, 2), results.kind.curves, strict=True):
            values = results.numbers(name)
            for curve, (colour, marker) in zip(shown, LINE_LOOKS, strict=False):
                words = _words({column: columns[column] for column in differ}, int(curve[0]))
                axes.plot(
                    along[curve], values[curve], color=colour, markersize=4.5,
                    marker=marker if len(curve) <= _FEW_MARKERS else None, label=words,
                )  # fmt: skip
            _set_axes(axes, np.unique(along[np.concatenate(shown)]), load, name)
            limit = limits.get(name)
            if isinstance(limit, int | float) and limit <= axes.get_ylim()[1]:
                axes.axhline(limit, color=QUIET, linewidth=1.2, linestyle="--", zorder=1)
        if differ:
            legends_below(figure, [(figure, *figure.axes[0].get_legend_handles_labels())])
        what, workload = swept_words(results, np.concatenate(shown))
        most = f"{len(shown)} settings with the most tokens/s per GPU of each model, of {len(curves):,}"
        chosen = most if len(curves) > len(shown) else f"{len(shown)} setting{'s' * (len(shown) != 1)}"
        write_titles(
            figure,
            f"{what}: {' and '.join(_LABELS[n].partition(' (')[0] for n in results.kind.curves)}",
            "; ".join(filter(None, (workload, chosen))),
        )
    return figure


def _set_axes(axes: Axes, loads: Any, load: str, name: str) -> None:
    low, high = float(loads[0]), float(loads[-1])
    is_log = low > 0.0 and high >= _WIDE * low
    if is_log:
        axes.set_xscale("log", base=2)
    doubled = 2.0 ** np.arange(0.0, 40.0)
    wanted = loads if len(loads) <= _FEW_TICKS else doubled[(doubled >= low) & (doubled <= high)]
    ticks = _apart(wanted, np.log(wanted) if is_log else wanted) if len(wanted) else []
    # of loads that crowd on a linear axis even numbers say more
    if is_log or len(ticks) == len(loads):
        axes.set_xticks(ticks, [f"{at:g}" for at in ticks])
        axes.minorticks_off()
    heights = np.concatenate([np.asarray(line.get_ydata(), np.float64) for line in axes.lines])
    low, high = float(np.nanmin(heights)), float(np.nanmax(heights))
    if name.endswith("_ms") and high > 50.0 * low > 0.0:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0.0, high * 1.08 if high > 0.0 else 1.0)
    axes.set_xlabel(_LABELS[load])
    axes.set_ylabel(_LABELS[name])


def _apart(ticks: Any, places: Any) -> list[float]:
    """Ticks whose labels leave room for each other."""
    least = (places[-1] - places[0]) * _LEAST_TICK
    kept: list[int] = []
    for i in range(len(ticks)):
        if not kept or places[i] - places[kept[-1]] >= least:
            kept.append(i)
    return [float(ticks[i]) for i in kept]


def _words(columns: dict[str, tuple[Any, list[Any]]], row: int) -> str:
    """Settings that tell curves apart; workers of a kind that there are none of go without saying."""
    words = []
    for name, (codes, values) in columns.items():
        value = values[int(codes[row])] if codes[row] >= 0 else "-"
        if value == 0 and (name == "replicas" or name.endswith("_workers")):
            continue
        alone = name in ("model", "gpu", "dtype", "mode")
        words.append(str(value) if alone else f"{name.replace('_', ' ')} {value}")
    return ", ".join(words)
