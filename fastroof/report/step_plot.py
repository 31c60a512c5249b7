"""Plot of step time by component, as stacked areas against the batch size or the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.errors import FastroofError
from fastroof.report import plots
from fastroof.units import US_PER_MS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fastroof.plan import StepPlan

Against = Literal["batch_size", "kv_len"]

POINTS_PER_DOUBLING: Final = 8
BEYOND_MEMORY: Final = 1.3


class StepStack(NamedTuple):
    """Decode steps by component."""

    batch_size: Longs
    kv_len: Longs
    parts_us: dict[str, Floats]

    @property
    def total_us(self) -> Floats:
        """Return the sum of the parts, in us."""
        return np.asarray(sum(self.parts_us.values()))


def step_stack(plan: StepPlan, batch_size: Longs, kv_len: Longs) -> StepStack:
    """Break decode steps down into the plotted components."""
    parts = {name: np.zeros(len(batch_size)) for name in plots.GROUPS}
    for i, (batch, kv) in enumerate(zip(batch_size.tolist(), kv_len.tolist(), strict=True)):
        for name, us in plots.grouped_us(plan, plan.explain([(1, kv - 1)] * batch).operators).items():
            parts[name][i] = us
    return StepStack(batch_size, kv_len, {name: us for name, us in parts.items() if us.any()})


def draw_step(
    plan: StepPlan,
    *,
    against: Against = "batch_size",
    batch_size: int = 64,
    kv_len: int = 4096,
    source: str = "",
) -> Figure:
    """Draw the time of decode steps by component, in ms and in shares.

    Parameters
    ----------
    plan : StepPlan
        Plan to evaluate; its ``max_num_seqs`` is the maximum batch size.
    against : {"batch_size", "kv_len"}
        The size on the x axis; the other is fixed.
    batch_size, kv_len : int
        Value of the fixed size.
    source : str
        Source of the tables, as text below the title.

    Returns
    -------
    Figure
        For :func:`fastroof.report.save_figure`.

    Raises
    ------
    FastroofError
        If matplotlib is not installed, a size is invalid, or a step is larger than the plan.
    """
    if against not in ("batch_size", "kv_len"):
        raise FastroofError(f"against must be batch_size or kv_len, got {against!r}")
    if batch_size < 1 or kv_len < 2:
        raise FastroofError(f"a decode needs batch_size >= 1 and kv_len >= 2, got {batch_size} and {kv_len}")
    low, high = (1, plan.max_num_seqs) if against == "batch_size" else (128, plan.model.max_position)
    if high < 2 * low:
        raise FastroofError(f"{against} has to vary from {low} to at least {2 * low}, got at most {high}")
    memory = plan.memory
    full = memory.max_sequences(kv_len) if against == "batch_size" else memory.largest_length(batch_size)
    if full >= low:
        # end the plot soon after memory is full: larger steps cannot run
        high = min(high, max(8 * low, int(full * BEYOND_MEMORY)))
    doublings = np.log2(high / low)
    spread = low * 2.0 ** np.linspace(0.0, doublings, max(2, round(doublings * POINTS_PER_DOUBLING) + 1))
    doubled = 2 ** np.arange(np.ceil(np.log2(low)), np.floor(np.log2(high)) + 1)
    size = np.union1d(np.round(spread), doubled).astype(np.int64)
    fixed = np.full(len(size), kv_len if against == "batch_size" else batch_size, np.int64)
    stack = step_stack(plan, *((size, fixed) if against == "batch_size" else (fixed, size)))
    with plots.style():
        figure = plots.new_figure(12.0, 5.6)
        left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.0))
        total = stack.total_us
        _draw_areas(left, size, [us / US_PER_MS for us in stack.parts_us.values()], stack)
        left.plot(size, total / US_PER_MS, color=plots.INK, linewidth=1.6)
        left.set_ylabel("step time (ms)")
        left.set_ylim(0.0, float(total.max()) / US_PER_MS * 1.06)
        left.set_title("Step time")
        shares = [us / total * 100.0 for us in stack.parts_us.values()]
        _draw_areas(right, size, shares, stack)
        right.set_ylabel("share of the step (%)")
        right.set_ylim(0.0, 100.0)
        right.set_title("Share of each component")
        for axes in (left, right):
            axes.set_xlabel("batch size (sequences)" if against == "batch_size" else "kv_len (tokens)")
            _mark_memory(axes, full, size, write=axes is left)
        figure.draw_without_rendering()
        _label_shares(right, stack, shares)
        gpus = plan.layout.world_size
        what = f"{plan.model.name} on {f'{gpus} x ' if gpus > 1 else ''}{plan.gpu.title}"
        which = f"kv_len {kv_len:,}" if against == "batch_size" else f"batch size {batch_size:,}"
        where = f"source {source or 'measured tables'}, method {plan.method}"
        if not plan.tables_hash:
            where = "modelled from the datasheet, not measured"
        plots.write_titles(
            figure,
            f"{what}: components of a decode step at {which}",
            f"{plan.dtype} weights, {plan.kv_dtype} KV cache, engine {plan.engine}; {where}",
        )
    return figure


def _draw_areas(axes: Axes, size: Longs, layers: Sequence[Floats], stack: StepStack) -> None:
    colours = [plots.GROUPS[name] for name in stack.parts_us]
    axes.stackplot(
        size, *layers, colors=colours, edgecolor="white", linewidth=0.6, labels=list(stack.parts_us)
    )
    axes.set_xscale("log", base=2)
    axes.set_xlim(size[0], size[-1])
    step = 1 if len(size) <= 11 * POINTS_PER_DOUBLING else 2
    ticks = [2**i for i in range(0, 24, step) if size[0] <= 2**i <= size[-1]]
    axes.set_xticks(ticks, [plots.size_words(tick) for tick in ticks])
    axes.minorticks_off()


def _mark_memory(axes: Axes, full: float, size: Longs, *, write: bool) -> None:
    """Mark the sizes at which the KV cache no longer fits on one GPU."""
    if full >= size[-1]:
        return
    start = max(full, float(size[0]))
    axes.axvspan(start, float(size[-1]), facecolor="white", alpha=0.55, zorder=3)
    axes.axvline(start, color=plots.INK, linewidth=1.2, linestyle="--", zorder=4)
    if write:
        words = "the weights do not fit" if full <= 0 else f"KV cache full: {int(full):,}"
        near_end = start > float(size[0] * size[-1]) ** 0.5
        axes.annotate(
            words, (start, 1.0), xytext=(-5 if near_end else 5, -4), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="right" if near_end else "left", va="top", size=9.5, zorder=5,
            color=plots.QUIET,
        )  # fmt: skip


def _label_shares(axes: Axes, stack: StepStack, shares: Sequence[Floats]) -> None:
    """Label each component at the end of its band."""
    tops = np.cumsum([share[-1] for share in shares])
    ends = [
        (float(top - share[-1] / 2.0), name, plots.GROUPS[name])
        for top, share, name in zip(tops, shares, stack.parts_us, strict=True)
    ]
    plots.label_line_ends(axes, ends, x=1.015, gap=0.06, low=0.02)
