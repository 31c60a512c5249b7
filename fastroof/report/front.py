"""Selection of a sweep's rows for reports: Pareto fronts, best rows of each setting, and a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Bools, Floats, Longs
from fastroof.errors import FastroofError
from fastroof.report import plots
from fastroof.report.results_file import RateColumns, Results
from fastroof.units import MS_PER_S

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MOST_LEADERS: Final = 200
"""Maximum number of rows whose steps are broken down."""
CURVE_POINTS: Final = 25
"""Points to select per curve if not all rows are selected."""


def pareto_front(x: Floats, y: Floats, group: Longs | None = None) -> Bools:
    """Return a mask of the points of each group that no other point beats in both rates."""
    usable = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    groups = np.zeros(len(x), np.int64) if group is None else group
    order = usable[np.lexsort((-y[usable], -x[usable], groups[usable]))]
    on_front = np.zeros(len(x), bool)
    edges = np.flatnonzero(np.diff(groups[order])) + 1
    for members in np.split(order, edges):
        before = np.maximum.accumulate(np.concatenate([[-np.inf], y[members]]))[:-1]
        on_front[members[y[members] > before]] = True
    return on_front


class ChosenRows(NamedTuple):
    """Rows of a results file that a report shows."""

    indices: Longs
    leaders: Longs


def choose_rows(results: Results, most: int) -> ChosenRows:
    """Select at most ``most`` rows: all, or the important ones and an even sample of the rest."""
    x, y = results.numbers(RateColumns.USER), results.numbers(RateColumns.GPU)
    within = results.is_within()
    if not within.any():
        within = np.isfinite(x) & np.isfinite(y)
    rate = np.where(within, y, np.nan)
    load = results.load()
    workload = results.have(results.kind.workload)
    front = pareto_front(x, rate, results.groups(["model", *workload]))
    best = _best(rate, results.groups(results.have((*results.kind.settings, *results.kind.workload))))
    top = _best(rate, results.groups(["model", *workload]))
    shown_first = results.rows_with(results.start_workload())
    leaders = _leaders((*(mask & shown_first for mask in (top, front, best)), top, front, best), y)
    if results.num_rows <= most:
        return ChosenRows(np.arange(results.num_rows), leaders)
    curve = results.groups(results.series(load))
    outline = _outlines(curve, results.numbers(load))
    chosen = np.zeros(results.num_rows, bool)
    chosen[leaders[:most]] = True
    led = outline & np.isin(curve, curve[chosen])
    everything = np.ones(results.num_rows, bool)
    for candidates, share in (
        (front, 2), (best & shown_first, 2), (led, 1), (best, 1), (outline, 1), (within, 1), (everything, 1),
    ):  # fmt: skip
        room = (most - int(chosen.sum())) // share
        chosen[_spread(np.flatnonzero(candidates & ~chosen), room)] = True
    return ChosenRows(np.flatnonzero(chosen), leaders[:most])


def _leaders(masks: Sequence[Bools], rate: Floats) -> Longs:
    """Select leaders evenly from each mask: half of the places for the first, half of the rest, ..."""
    is_leader = np.zeros(len(rate), bool)
    for i, mask in enumerate(masks, 1):
        room = MOST_LEADERS - int(is_leader.sum())
        share = room if i == len(masks) else room // 2
        is_leader[_spread(_by_rate(np.flatnonzero(mask & ~is_leader), rate), share)] = True
    return _by_rate(np.flatnonzero(is_leader), rate)


def _best(rate: Floats, group: Longs) -> Bools:
    """Return a mask of the first row with the highest rate of each group."""
    usable = np.flatnonzero(np.isfinite(rate))
    order = usable[np.lexsort((-rate[usable], group[usable]))]
    is_first = np.diff(group[order], prepend=-1) != 0
    is_best = np.zeros(len(rate), bool)
    is_best[order[is_first]] = True
    return is_best


def _outlines(curve: Longs, load: Floats) -> Bools:
    """Return a mask of both ends of each curve and evenly spaced points between them."""
    order = np.lexsort((load, curve))
    starts = np.flatnonzero(np.diff(curve[order], prepend=-1))
    sizes = np.diff(np.append(starts, len(order)))
    size = np.repeat(sizes, sizes)
    rank = np.arange(len(order)) - np.repeat(starts, sizes)
    part = rank * (CURVE_POINTS - 1) // np.maximum(size - 1, 1)
    before = (rank - 1) * (CURVE_POINTS - 1) // np.maximum(size - 1, 1)
    is_outline = np.zeros(len(order), bool)
    is_outline[order] = (rank == 0) | (part != before)
    return is_outline


def _by_rate(indices: Longs, rate: Floats) -> Longs:
    return indices[np.argsort(-rate[indices], kind="stable")]


def _spread(indices: Longs, most: int) -> Longs:
    """Return all indices, or ``most`` evenly spaced ones including the first."""
    if len(indices) <= most:
        return indices
    return indices[np.arange(most) * len(indices) // max(most, 1)]


_MOST_POINTS: Final = 4000


def rows_where(results: Results, **required: Any) -> Bools:
    """Return a mask of estimated rows whose columns have the requested values."""
    chosen = np.isfinite(results.numbers(RateColumns.USER)) & np.isfinite(results.numbers(RateColumns.GPU))
    for name, value in required.items():
        if value is None:
            continue
        if name not in results:
            raise FastroofError(f"{results.path} has no column {name}: its rows are {results.kind.noun}")
        codes, values = results.codes(name)
        if value not in values:
            present = ", ".join(str(v) for v in sorted(v for v in values if v is not None)[:20])
            raise FastroofError(f"no row of {results.path} has {name} {value}; valid: {present}")
        chosen &= codes == values.index(value)
    if not chosen.any():
        text = ", ".join(f"{name} {value}" for name, value in required.items() if value is not None)
        raise FastroofError(f"no estimated row of {results.path}{' has ' if text else ''}{text}")
    return chosen


def swept_words(results: Results, rows: Array) -> tuple[str, str]:
    """Describe rows for a title: their models and GPUs, and the workload."""

    def values(name: str) -> list[str]:
        codes, distinct = results.codes(name)
        return [str(distinct[code]) for code in np.unique(codes[rows]) if code >= 0]

    models, gpus = values("model"), values("gpu")
    model_names = ", ".join(models) if len(models) <= 3 else f"{len(models)} models"
    workload = [
        f"{name} {several[0]}" if len(several) == 1 else f"{len(several)} values of {name}"
        for name in results.have(results.kind.workload)
        if (several := values(name)) and several != ["0.0"]
    ]
    return f"{model_names} on {', '.join(gpus)}", ", ".join(workload)


def draw_pareto(results: Results, *, colour_by: str = "model", **required: Any) -> Figure:
    """Draw tokens/s per user against tokens/s per GPU, and the Pareto front of each colour.

    Parameters
    ----------
    results : Results
        Results from :func:`fastroof.report.read_results`.
    colour_by : str
        Column whose values get their own colours and fronts: model, gpu, tp, dtype, ...
    **required
        Required values of columns, such as ``isl=4000``; None accepts any.

    Returns
    -------
    Figure
        For :func:`fastroof.report.save_figure`.

    Raises
    ------
    FastroofError
        If matplotlib is not installed, a column does not exist, or no row matches.
    """
    if colour_by not in results.have((*results.kind.settings, *results.kind.workload)):
        columns = ", ".join(results.have((*results.kind.settings, *results.kind.workload)))
        raise FastroofError(f"cannot colour by {colour_by!r}: use {columns}")
    rows = rows_where(results, **required)
    x, y = results.numbers(RateColumns.USER), results.numbers(RateColumns.GPU)
    within = rows & results.is_within()
    codes, values = results.codes(colour_by)
    present = sorted(
        (values[code] for code in np.unique(codes[rows]) if code >= 0), key=lambda v: (str(type(v)), v)
    )
    with plots.style():
        figure = plots.new_figure(10.0, 6.2)
        axes = figure.subplots()
        tops: tuple[list[float], list[float]] = ([], [])
        for i, value in enumerate(present):
            colour, marker = plots.line_look(i)
            selected = rows & (codes == values.index(value))
            shown = np.flatnonzero(selected)[:: max(1, int(selected.sum()) // _MOST_POINTS)]
            axes.scatter(x[shown], y[shown], s=9, color=colour, alpha=0.28, linewidths=0, zorder=2)
            front = np.flatnonzero(selected & within)
            front = front[pareto_front(x[front], y[front])]
            front = front[np.argsort(x[front])]
            if len(front):
                tops[0].append(float(x[front[-1]]))
                tops[1].append(float(y[front[0]]))
                axes.plot(
                    x[front], y[front], color=colour, marker=marker, markersize=5, zorder=3,
                    label=setting_words(colour_by, value),
                )  # fmt: skip
        for axis, rates, ends in zip((axes.xaxis, axes.yaxis), (x, y), tops, strict=True):
            _scale(axis, rates[rows], ends)
        limit = _tpot_ms(results)
        (left, right), at = axes.get_xlim(), MS_PER_S / (limit or np.inf)
        if left <= at <= right:
            axes.axvline(at, color=plots.QUIET, linewidth=1.2, linestyle="--", zorder=1)
            # fronts fall from the top left, so the bottom left is free
            is_late = axes.transLimits.transform(axes.transScale.transform((at, 1.0)))[0] > _LATE
            axes.annotate(
                f"TPOT {limit:g} ms", (at, 0.0), xytext=(-5 if is_late else 5, 5), va="bottom", size=9.5,
                textcoords="offset points", xycoords=("data", "axes fraction"), color=plots.QUIET,
                ha="right" if is_late else "left",
            )  # fmt: skip
        axes.set_xlabel("tokens/s per user")
        axes.set_ylabel("tokens/s per GPU")
        plots.legend_below(figure, axes, columns=4)
        what, workload = swept_words(results, rows)
        counted = f"{int(rows.sum()):,} {results.kind.noun}, {int(within.sum()):,} within the limits"
        subtitle = "; ".join(filter(None, (workload, counted, "lines: Pareto fronts")))
        plots.write_titles(figure, f"{what}: tokens/s per GPU against per user", subtitle)
    return figure


_FAR_APART: Final = 2.0
"""Ratio of the fronts' ends from which an axis is logarithmic: a linear one would flatten the lowest."""
_NEAR_ZERO: Final = 0.4
"""Share of the largest value below which a linear axis starts at zero."""
_LATE: Final = 0.85


def _scale(axis: Any, values: Floats, tops: Sequence[float]) -> None:
    """Scale an axis so that no front is flat, and that its values fill it."""
    low, high = float(values.min()), float(values.max())
    room = 0.05 * (high - low)
    limits = (low - room if low > _NEAR_ZERO * high else 0.0, high + room if high else 1.0)
    if tops and max(tops) >= _FAR_APART * min(tops) and low > 0.0:
        limits = (low / 1.15, high * 1.15)
        plots.log_ticks(axis, *limits)
    else:
        axis.set_major_formatter(plots.plain_number)
    axis.axes.set(**{f"{axis.axis_name}lim": limits})


def setting_words(name: str, value: Any) -> str:
    """Return a setting as text, with its name unless the value explains itself."""
    is_self_explanatory = name in ("model", "gpu", "dtype", "mode")
    return str(value) if is_self_explanatory else f"{name.replace('_', ' ')} {value}"


def _tpot_ms(results: Results) -> float | None:
    """Return the sweep's limit on the time per output token, ms; None if it has none."""
    spec = results.metadata_json("fastroof.spec")
    limit_ms = (spec.get("constraints") or spec).get("tpot_ms")
    return float(limit_ms) if isinstance(limit_ms, int | float) and limit_ms > 0 else None
