"""Plot of a report: time per unit of each workload and its baselines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from fastroof.bench.timing import BenchReport, share_of, time_of_ns
from fastroof.errors import FastroofError
from fastroof.report.plots import COLOURS, INK, QUIET, new_figure, style, write_titles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKS: Final[dict[str, tuple[str, str]]] = {
    "fastroof": ("o", COLOURS["blue"]),
    "stream": ("|", INK),
    "NumPy": ("D", COLOURS["vermilion"]),
}
OTHER: Final = ("s", COLOURS["green"])
ROW_IN: Final = 0.36


def draw_bench(report: BenchReport) -> Figure:
    """Plot each workload's and its baselines' time per unit on one logarithmic axis."""
    results = report.results
    if not results:
        raise FastroofError("no workload was measured; nothing to plot")
    with style():
        figure = new_figure(11.0, 1.95 + ROW_IN * len(results))
        axes = figure.subplots()
        axes.set_xscale("log")
        shown: dict[str, Any] = {}
        for row, one in enumerate(results):
            times = {**one.baseline_ns, "fastroof": one.ns_per_unit}
            axes.plot([min(times.values()), max(times.values())], [row, row], color=QUIET, linewidth=1.0)
            for name, ns in times.items():
                mark, colour = MARKS.get(name, OTHER)
                size = 13 if mark == "|" else 7
                (shown[name],) = axes.plot(
                    ns, row, mark, color=colour, markersize=size, markeredgewidth=2.0 if mark == "|" else 1.0,
                    linestyle="none", zorder=3 if name == "fastroof" else 2,
                )  # fmt: skip
            label = f"{time_of_ns(one.ns_per_unit)} per {one.workload.unit}"
            if "stream" in one.ratios:
                label += f", {share_of(one.ratios['stream'])} of stream"
            axes.annotate(
                label, (max(times.values()), row), xytext=(9, 0), textcoords="offset points", va="center",
                size=9.0, color=INK, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
            )  # fmt: skip
        axes.set_yticks(range(len(results)), [one.workload.name for one in results])
        axes.set_ylim(len(results) - 0.4, -0.6)
        low, high = axes.get_xlim()
        # leave space for the labels next to the slowest mark
        axes.set_xlim(low, high * max(10.0, (high / low) ** 0.36))
        decades = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        step = 1 + len(decades) // 8
        axes.set_xticks([10.0**d for d in decades][::step], [_decade(d) for d in decades][::step])
        axes.minorticks_off()
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("median time per unit of work; left is faster")
        order = ["fastroof", *(name for name in shown if name != "fastroof")]
        words = ["a loop that only moves the bytes" if name == "stream" else name for name in order]
        axes.legend(
            [shown[name] for name in order], words, loc="lower left",
            bbox_to_anchor=(0.0, 1.0), ncols=len(order), frameon=False, fontsize=9.5, borderaxespad=0.2,
        )  # fmt: skip
        settings, machine = report.settings, report.machine
        threads = f"{settings['threads']} thread{'s' * (settings['threads'] != 1)}"
        write_titles(
            figure,
            f"Speed of {settings['model']} on {settings['gpu']}, {threads}",
            f"{machine.cpu}, load {machine.load_average:.1f}; numba {machine.versions['numba']}, "
            f"numpy {machine.versions['numpy']}",
        )
    return figure


def _decade(exponent: int) -> str:
    """Return a power of ten of a ns as text: 100 us."""
    unit = ("ns", "us", "ms", "s")[min(3, max(0, exponent // 3))]
    return f"{10.0 ** (exponent - 3 * min(3, max(0, exponent // 3))):g} {unit}"
