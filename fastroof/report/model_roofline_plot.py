"""Plot of a model's steps on a GPU's roofline: decode batches and a prefill, for several layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from fastroof.errors import FastroofError
from fastroof.report.plots import INK, LINE_LOOKS, legend_below, new_figure, style, write_titles
from fastroof.report.rooflines import draw_roofs
from fastroof.units import PEAK_DTYPE, TFLOP, US_PER_S

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fastroof.plan import StepPlan

_INTENSITIES: Final = (0.6, 2e4)


class ModelStep(NamedTuple):
    """A step as a point on a roofline plot."""

    batch_size: int
    total_us: float
    flops: float
    moved_bytes: float
    has_room: bool

    @property
    def intensity(self) -> float:
        """Return the FLOPs per byte."""
        return self.flops / self.moved_bytes

    @property
    def flops_per_s(self) -> float:
        """Return the achieved FLOP/s."""
        return self.flops / self.total_us * US_PER_S


def model_steps(plan: StepPlan, batch_sizes: Sequence[int], kv_len: int, prompt: int) -> list[ModelStep]:
    """Return decode steps of some batches, and the prefill of one prompt, as points on a roofline plot."""
    if kv_len < 2:
        raise FastroofError(f"a decode needs kv_len >= 2, got {kv_len}")
    decodes = [(batch, [(1, kv_len - 1)] * batch) for batch in batch_sizes]
    steps = []
    for batch, requests in [*decodes, (0, [(prompt, 0)])]:
        explained = plan.explain(requests)
        fit = plan.memory.max_sequences(kv_len if batch else prompt)
        steps.append(
            ModelStep(
                batch,
                explained.total_us,
                sum(part.flops for part in explained.operators),
                sum(part.moved_bytes for part in explained.operators if part.bound != "communication"),
                int(fit) >= max(batch, 1),
            )
        )
    return steps


def draw_model_roofline(
    plans: Sequence[StepPlan],
    *,
    batch_sizes: Sequence[int] = (1, 4, 16, 64, 256),
    kv_len: int = 4096,
    prompt: int = 8192,
    source: str = "",
) -> Figure:
    """Draw a model's steps on the roofline of its GPU.

    Parameters
    ----------
    plans : sequence of StepPlan
        Plans of one model on one GPU in one dtype, at most six; each is a line.
    batch_sizes : sequence of int
        Decoding requests of each point of a line.
    kv_len : int
        Tokens that each request attends to, including its new one.
    prompt : int
        New tokens of the prefill.
    source : str
        Source of the tables, as text below the title.

    Returns
    -------
    Figure
        For :func:`fastroof.report.save_figure`.

    Raises
    ------
    FastroofError
        If matplotlib is not installed, there are no plans, too many or several models, a step is larger
        than a plan, or the GPU has no peak for the dtype.
    """
    if not 1 <= len(plans) <= len(LINE_LOOKS):
        raise FastroofError(f"need 1 to {len(LINE_LOOKS)} plans, got {len(plans)}")
    first = plans[0]
    kinds = {(plan.model.name, plan.gpu.name, plan.dtype, plan.kv_dtype, plan.engine) for plan in plans}
    if len(kinds) > 1:
        raise FastroofError(f"need plans of one model on one GPU in one dtype, got {sorted(kinds)}")
    steps = [model_steps(plan, batch_sizes, kv_len, prompt) for plan in plans]
    # attention and layers that are not quantised are bounded by the bf16 peak
    names = {PEAK_DTYPE.get(dtype, dtype) for dtype in (first.dtype, "bf16")}
    peaks = {name: first.gpu.peak(name) for name in sorted(names)}
    with style():
        figure = new_figure(10.0, 6.2)
        axes = figure.subplots()
        axes.set(xscale="log", yscale="log", xlim=_INTENSITIES)
        lowest = min(step.flops_per_s for of_plan in steps for step in of_plan)
        axes.set_ylim(0.5 * lowest / TFLOP, max(peaks.values()) / TFLOP * 2.2)
        axes.set_xlabel("arithmetic intensity of the whole step (FLOP per compulsory byte)")
        axes.set_ylabel("achieved TFLOP/s on one GPU")
        draw_roofs(axes, first.gpu, peaks)
        for plan, of_plan, (colour, marker) in zip(plans, steps, LINE_LOOKS, strict=False):
            gpus = plan.layout.world_size
            label = f"tp {plan.tp}: one of {gpus} GPUs" if gpus > 1 else f"tp {plan.tp}: one GPU"
            _draw_line(axes, of_plan, colour, marker, label)
        _label_batches(axes, steps)
        legend_below(figure, axes, columns=len(plans))
        all_fit = all(step.has_room for of_plan in steps for step in of_plan)
        words = [
            f"decodes at kv_len {kv_len:,}",
            f"star: prefill of {prompt:,} tokens",
            *(() if all_fit else ("hollow: KV cache does not fit",)),
            f"engine {first.engine}",
            source if first.tables_hash else "modelled from the datasheet",
        ]
        write_titles(
            figure,
            f"{first.model.name} in {first.dtype} on {first.gpu.title}: its steps on the roofline",
            "; ".join(filter(None, words)),
        )
    return figure


def _draw_line(axes: Axes, steps: Sequence[ModelStep], colour: str, marker: str, label: str) -> None:
    decodes = [step for step in steps if step.batch_size]
    axes.plot(
        [step.intensity for step in decodes], [step.flops_per_s / TFLOP for step in decodes],
        color=colour, linewidth=1.6, marker=marker, markersize=7, label=label, zorder=5,
    )  # fmt: skip
    for step in steps:
        is_prefill = not step.batch_size
        axes.plot(
            [step.intensity], [step.flops_per_s / TFLOP], color=colour, zorder=6, linestyle="none",
            marker="*" if is_prefill else marker, markersize=15 if is_prefill else 7,
            markerfacecolor=colour if step.has_room else "white", markeredgewidth=1.4,
        )  # fmt: skip


def _label_batches(axes: Axes, steps: Sequence[Sequence[ModelStep]]) -> None:
    """Label each batch once, below and right of the lowest of its points, where no line is."""
    for i, same in enumerate(zip(*steps, strict=True)):
        low = min(same, key=lambda step: step.flops_per_s)
        words = f"{'batch ' if i == 0 else ''}{low.batch_size:,}" if low.batch_size else "prefill"
        axes.annotate(
            words, (low.intensity, low.flops_per_s / TFLOP), xytext=(6, -5), textcoords="offset points",
            ha="left", va="top", size=9.5, color=INK, zorder=7,
        )  # fmt: skip
