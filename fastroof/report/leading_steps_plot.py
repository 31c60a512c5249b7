"""The best rows of a sweep as steps: time by group of operators, and the steps on the roofline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.errors import FastroofError
from fastroof.models.layout import split_words
from fastroof.report.front import in_turns
from fastroof.report.leading_steps import GROUPS, LeadingStep, StepSource, achieved
from fastroof.report.legends import legends_below
from fastroof.report.pareto_plot import rows_where, swept_words
from fastroof.report.plots import COLOURS, INK, LINE_LOOKS, QUIET, new_figure, style, write_titles
from fastroof.report.results_file import RateColumns, Results
from fastroof.units import TB, TFLOP, US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fastroof.config import GpuSpec

__all__ = ["draw_leading_steps"]

_MOST_ROWS: Final = len(LINE_LOOKS)
_GROUP_COLOURS: Final = dict(
    zip(
        GROUPS,
        (
            *(COLOURS[c] for c in ("blue", "orange", "vermilion", "green", "yellow", "purple", "sky")),
            QUIET,
        ),
        strict=True,
    )
)
_INTENSITIES: Final = (0.3, 2e4)


def draw_leading_steps(results: Results, **wanted: Any) -> Figure:
    """Draw what the decode steps of the best rows are made of, and where they are under the roofline.

    Parameters
    ----------
    results : Results
        What :func:`fastroof.report.read_results` returns.
    **wanted
        Values that columns must hold, such as ``isl=4000``; None is any.

    Returns
    -------
    Figure
        For :func:`fastroof.report.save_figure`; a row for each model, GPU, tp and dtype with the most
        tokens/s per GPU: six of them, the models in turn.

    Raises
    ------
    FastroofError
        If matplotlib is not installed, no row is left, or no row's plan can be compiled any more.
    """
    rows = rows_where(results, **wanted)
    best = _best_rows(results, rows)
    source = StepSource(results)
    columns = results.rows(np.sort(best))
    place = {int(index): i for i, index in enumerate(np.sort(best))}
    leading = []
    for index in best.tolist():
        row = {name: values[place[index]] for name, values in columns.items()}
        leading += [(row, step) for step in source.steps(row)[:1]]
    if not leading:
        raise FastroofError(f"no step of {results.path} can be broken down: {'; '.join(source.problems)}")
    gpu = source.gpu(str(leading[0][0]["gpu"]))
    with style():
        figure = new_figure(13.0, 5.8)
        halves: Any = figure.subfigures(1, 2, width_ratios=(1.15, 1.0))
        left, right = (half.subplots() for half in halves)
        _draw_bars(left, leading)
        _draw_roofline(right, leading, gpu)
        below = zip(halves, (left, right), strict=True)
        legends_below(figure, [(half, *axes.get_legend_handles_labels()) for half, axes in below], size=9.0)
        what, workload = swept_words(results, rows)
        chosen = "decode step of the row with the most tokens/s per GPU, by setting"
        write_titles(
            figure, f"{what}: what the best steps are made of", "; ".join(filter(None, (workload, chosen)))
        )
    return figure


def _best_rows(results: Results, rows: Any) -> Any:
    """Best row within the limits of each model, GPU, tp and dtype, the highest rates of each model first."""
    rate = np.where(rows & results.is_within(), results.numbers(RateColumns.GPU), np.nan)
    usable = np.flatnonzero(np.isfinite(rate))
    if not len(usable):
        raise FastroofError(f"no row of {results.path} is within the limits")
    groups = results.groups(results.have(("model", "gpu", "mode", "tp", "dtype")))
    order = usable[np.lexsort((-rate[usable], groups[usable]))]
    first = order[np.diff(groups[order], prepend=-1) != 0]
    turns = in_turns(results.codes("model")[0][first].tolist(), rate[first].tolist())
    return first[turns[:_MOST_ROWS]]


def _words(row: dict[str, Any]) -> str:
    load = f"batch {row['batch_size']}" if "batch_size" in row else f"{row['concurrency']:g} clients"
    mode = "" if row.get("mode", "aggregated") == "aggregated" else f"{row['mode']}, "
    return f"{row['model']}, {split_words(row)},\n{mode}{row['dtype']}, {load}"


def _draw_bars(axes: Axes, leading: list[tuple[dict[str, Any], LeadingStep]]) -> None:
    names = [name for name in GROUPS if any(name in step.groups_us for _, step in leading)]
    start = np.zeros(len(leading))
    at = np.arange(len(leading))
    for name in names:
        wide = np.array([step.groups_us.get(name, 0.0) for _, step in leading]) / US_PER_MS
        axes.barh(
            at, wide, left=start, height=0.62, color=_GROUP_COLOURS[name], edgecolor="white", label=name
        )
        start += wide
    axes.set_yticks(at, [_words(row) for row, _ in leading])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("decode step (ms)")


def _draw_roofline(axes: Axes, leading: list[tuple[dict[str, Any], LeadingStep]], gpu: GpuSpec) -> None:
    top = max(gpu.peak_flops_per_s.values())
    low, high = _INTENSITIES
    slope = np.array([low, top / gpu.hbm_bytes_per_s])
    axes.plot(slope, slope * gpu.hbm_bytes_per_s / TFLOP, color=INK, linewidth=1.6)
    names: dict[float, list[str]] = {}
    for dtype, peak in gpu.peak_flops_per_s.items():
        names.setdefault(peak, []).append(dtype)
    for peak, dtypes in names.items():
        axes.plot([peak / gpu.hbm_bytes_per_s, high], [peak / TFLOP] * 2, color=INK, linewidth=1.6)
        words = f"{', '.join(dtypes)} {peak / TFLOP:,.5g} TFLOP/s"
        axes.annotate(
            words,
            (high, peak / TFLOP),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            size=9.0,
        )
    for (row, step), (colour, marker) in zip(leading, LINE_LOOKS, strict=False):
        for part in step.operators:
            point = achieved(part)
            if point is not None:
                size = 20.0 + 500.0 * part.total_us / step.total_us
                axes.scatter(
                    point[0], point[1] / TFLOP, s=size, color=colour, alpha=0.3, marker=marker, linewidths=0
                )
        work = sum(part.flops for part in step.operators)
        moved = sum(part.moved_bytes for part in step.operators if part.bound != "communication")
        axes.scatter(
            work / moved, work / step.total_us * US_PER_S / TFLOP, s=90, color=colour, marker=marker,
            edgecolors=INK, label=_words(row).replace("\n", " "), zorder=4,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    axes.set_ylim(top=top / TFLOP * 2.5)
    axes.set_xlabel("FLOP per compulsory byte")
    axes.set_ylabel("achieved TFLOP/s on one GPU")
    axes.set_title(f"{gpu.title}, HBM {gpu.hbm_bytes_per_s / TB:.2f} TB/s; outlined: whole steps", size=10.0)
