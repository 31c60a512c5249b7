"""The Pareto chart of a sweep: what a user gets against what a GPU gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.arrays import Array, Bools
from fastroof.errors import FastroofError
from fastroof.report.front import pareto_front
from fastroof.report.plots import LINE_LOOKS, QUIET, new_figure, style, write_titles
from fastroof.report.results_file import RateColumns, Results
from fastroof.units import MS_PER_S

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_pareto", "rows_where", "swept_words"]

_MOST_POINTS: Final = 4000


def rows_where(results: Results, **wanted: Any) -> Bools:
    """Rows of a sweep whose columns hold the values wanted, and which were estimated."""
    chosen = np.isfinite(results.numbers(RateColumns.USER)) & np.isfinite(results.numbers(RateColumns.GPU))
    for name, value in wanted.items():
        if value is None:
            continue
        if name not in results:
            raise FastroofError(f"{results.path} has no column {name}: its rows are {results.kind.noun}")
        codes, values = results.codes(name)
        if value not in values:
            given = ", ".join(str(v) for v in sorted(v for v in values if v is not None)[:20])
            raise FastroofError(f"no row of {results.path} has {name} {value}; there are {given}")
        chosen &= codes == values.index(value)
    if not chosen.any():
        words = ", ".join(f"{name} {value}" for name, value in wanted.items() if value is not None)
        raise FastroofError(f"no estimated row of {results.path}{' has ' if words else ''}{words}")
    return chosen


def swept_words(results: Results, rows: Array) -> tuple[str, str]:
    """Say what some rows are about: their models and GPUs, and the workload."""

    def values(name: str) -> list[str]:
        codes, distinct = results.codes(name)
        return [str(distinct[code]) for code in np.unique(codes[rows]) if code >= 0]

    models, gpus = values("model"), values("gpu")
    named = ", ".join(models) if len(models) <= 3 else f"{len(models)} models"
    workload = [
        f"{name} {several[0]}" if len(several) == 1 else f"{len(several)} values of {name}"
        for name in results.have(results.kind.workload)
        if (several := values(name)) and several != ["0.0"]
    ]
    return f"{named} on {', '.join(gpus)}", ", ".join(workload)


def draw_pareto(results: Results, *, colour_by: str = "model", **wanted: Any) -> Figure:
    """Draw tokens/s per user against tokens/s per GPU, and the Pareto front of each colour.

    Parameters
    ----------
    results : Results
        What :func:`fastroof.report.read_results` returns.
    colour_by : str
        Column whose values have colours and fronts of their own: model, gpu, tp, dtype, ...
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
    if colour_by not in results.have((*results.kind.settings, *results.kind.workload)):
        columns = ", ".join(results.have((*results.kind.settings, *results.kind.workload)))
        raise FastroofError(f"cannot colour by {colour_by!r}: use {columns}")
    rows = rows_where(results, **wanted)
    x, y = results.numbers(RateColumns.USER), results.numbers(RateColumns.GPU)
    within = rows & results.is_within()
    codes, values = results.codes(colour_by)
    present = sorted(
        (values[code] for code in np.unique(codes[rows]) if code >= 0), key=lambda v: (str(type(v)), v)
    )
    with style():
        figure = new_figure(10.0, 6.2)
        axes = figure.subplots()
        for i, value in enumerate(present):
            colour, marker = LINE_LOOKS[i % len(LINE_LOOKS)]
            own = rows & (codes == values.index(value))
            shown = np.flatnonzero(own)[:: max(1, int(own.sum()) // _MOST_POINTS)]
            axes.scatter(x[shown], y[shown], s=9, color=colour, alpha=0.28, linewidths=0, zorder=2)
            front = np.flatnonzero(own & within)
            front = front[pareto_front(x[front], y[front])]
            front = front[np.argsort(x[front])]
            if len(front):
                label = f"{colour_by.replace('_', ' ')} {value}"
                axes.plot(
                    x[front], y[front], color=colour, marker=marker, markersize=5, label=label, zorder=3
                )
        axes.set_xlim(left=0.0)
        axes.set_ylim(bottom=0.0)
        limit = _tpot_ms(results)
        if limit is not None and MS_PER_S / limit <= axes.get_xlim()[1]:
            axes.axvline(MS_PER_S / limit, color=QUIET, linewidth=1.2, linestyle="--", zorder=1)
            axes.text(
                MS_PER_S / limit, 0.99, f" TPOT {limit:g} ms", transform=axes.get_xaxis_transform(),
                color=QUIET, va="top", size=9.5,
            )  # fmt: skip
        axes.set_xlabel("tokens/s per user")
        axes.set_ylabel("tokens/s per GPU")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper right", frameon=False)
        what, workload = swept_words(results, rows)
        counted = f"{int(rows.sum()):,} {results.kind.noun}, {int(within.sum()):,} within the limits"
        subtitle = "; ".join(filter(None, (workload, counted, "lines: Pareto fronts")))
        write_titles(figure, f"{what}: users against GPUs", subtitle)
    return figure


def _tpot_ms(results: Results) -> float | None:
    """Return the sweep's limit on the time per output token, ms; None where it has none."""
    spec = results.metadata_json("fastroof.spec")
    limit_ms = (spec.get("constraints") or spec).get("tpot_ms")
    return float(limit_ms) if isinstance(limit_ms, int | float) and limit_ms > 0 else None
