"""The picture of a difference: the ratio of two table sets against size, one panel an operator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof._version import __version__
from fastroof.arrays import Floats
from fastroof.atomic_files import whole_file
from fastroof.config.gpu import GpuSpec
from fastroof.errors import MeasureError
from kernels_bench.operators.registry import MEASURED
from kernels_bench.output.diff import Common, Difference, sizes_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS: Final = (".png", ".svg")
MOST_COLUMNS: Final = 3
PANEL_IN: Final = (4.3, 3.5)
TOP_IN: Final = 0.85
MOST_POINTS: Final = 6000
"""Points drawn in one panel: more hide each other, and make an SVG of megabytes. Lines take them all."""
FEW_POINTS: Final = 500
LEAST_IN_BIN: Final = 5
INK: Final = "#222222"
QUIET: Final = "#6b6b6b"
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's colours, which people with any colour vision can tell apart."""
TICKS: Final = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 3, 4, 5)
WIDE_TICKS: Final = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2, 5, 10, 20, 50, 100, 1000)
_STYLE: Final[Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": QUIET,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "font.size": 10,
    "grid.color": "#e4e4e4",
    "legend.fontsize": 9,
    "legend.frameon": False,
    "savefig.dpi": 160,
    "svg.fonttype": "path",
    # Without it matplotlib draws ids at random, and the same picture is another file each time.
    "svg.hashsalt": "kernels_bench",
    "text.color": INK,
    "xtick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.color": QUIET,
    "ytick.labelcolor": INK,
}


def save_difference(difference: Difference, gpu: GpuSpec, path: Path) -> Path:
    """Draw a difference into a PNG or SVG file."""
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        raise MeasureError(f"{path} must end in {' or '.join(ENDINGS)}")
    if not path.parent.is_dir():
        raise MeasureError(f"{path}: the folder {path.parent} does not exist")
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        raise MeasureError("plots need matplotlib: pip install fastroof[report]") from error
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        figure = draw_difference(difference, gpu)
        svg = path.suffix.lower() == ".svg"
        metadata = {"Date": None} if svg else {"Software": f"fastroof {__version__}"}
        with whole_file(path) as unfinished:
            figure.savefig(unfinished, metadata=metadata, format="svg" if svg else "png")
    return path


def draw_difference(difference: Difference, gpu: GpuSpec) -> Figure:
    """Draw the ratio B/A against size, one panel an operator, all on one scale."""
    from matplotlib.figure import Figure

    panels = list(difference.common.items())
    if not panels:
        raise MeasureError(f"{difference.a} and {difference.b} have no point in common: nothing to draw")
    columns = min(MOST_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    # One panel alone would be too narrow for the title above it.
    width_in = max(columns * PANEL_IN[0], 7.0)
    height_in = rows * PANEL_IN[1] + TOP_IN
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0.01, 0.01, 0.98, 0.98 - TOP_IN / height_in), w_pad=0.08, h_pad=0.08)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel().tolist()
    low, high = _limits([common.ratio for _, common in panels])
    totals = {d.operator: d for d in difference.operators}
    for index, (axes, (operator, common)) in enumerate(zip(grid, panels, strict=False)):
        size, unit = sizes_of(operator, common.columns, gpu)
        _draw_panel(axes, common, size, (low, high))
        total = totals[operator]
        axes.set_title(f"{_title(operator)}: median {total.median:.2f}", loc="left")
        axes.set_xlabel({"FLOP": "FLOPs of the call", "B": "bytes of the call"}[unit])
        if index % columns == 0:
            axes.set_ylabel("latency of B / latency of A")
        axes.tick_params(labelleft=index % columns == 0)
    for axes in grid[len(panels) :]:
        axes.remove()
    count = sum(len(common.ratio) for _, common in panels)
    figure.text(
        0.014, 1 - 0.16 / height_in, "Latency of B over A: above 1, B is slower",
        size=14, weight="bold", va="top",
    )  # fmt: skip
    figure.text(
        0.014, 1 - 0.45 / height_in,
        f"A: {difference.a}\nB: {difference.b}; {count:,} points in common; line: median, band: middle 80 %",
        size=9, color=QUIET, va="top", linespacing=1.4,
    )  # fmt: skip
    return figure


def _limits(ratios: Sequence[Floats]) -> tuple[float, float]:
    """Return the range of the scale: nearly all points, and 1 well inside; the rest sit on the edges."""
    each = [np.quantile(ratio, (0.002, 0.998)) for ratio in ratios]
    low = min(min(float(q[0]) for q in each), 1 / 1.15)
    high = max(max(float(q[1]) for q in each), 1.15)
    return low / 1.08, high * 1.08


def _draw_panel(axes: Axes, common: Common, size: Floats, limits: tuple[float, float]) -> None:
    name = next((n for n in ("dtype", "kv_dtype", "kind") if n in common.columns), None)
    words = common.columns[name] if name else np.full(len(size), "", object)
    by_count = sorted(set(words.tolist()), key=lambda w: (-int((words == w).sum()), w))
    # More words than colours: the rarest share the last.
    colours = {word: COLOURS[min(index, len(COLOURS) - 1)] for index, word in enumerate(by_count)}
    axes.axhline(1.0, color=INK, linewidth=1.0, zorder=1)
    few = len(size) <= FEW_POINTS
    # Shuffled, so that no dtype hides another.
    drawn = np.random.default_rng(0).permutation(len(size))[:MOST_POINTS]
    inside = (limits[0] * 1.03, limits[1] / 1.03)
    axes.scatter(
        size[drawn], np.clip(common.ratio[drawn], *inside), s=16 if few else 6, alpha=0.75 if few else 0.22,
        c=[colours[word] for word in words[drawn]], linewidths=0, zorder=2,
    )  # fmt: skip
    for word, colour in colours.items():
        rows = words == word
        axes.plot([], [], color=colour, linewidth=2.2, label=word)
        centre, p10, median, p90 = _binned(size[rows], common.ratio[rows])
        axes.fill_between(centre, p10, p90, color=colour, alpha=0.14, linewidth=0, zorder=3)
        # White below, so that the line is visible among its points.
        axes.plot(centre, median, color="white", linewidth=4.0, zorder=4)
        axes.plot(centre, median, color=colour, linewidth=2.2, zorder=5)
    _scale(axes, limits)
    if by_count[0]:
        axes.legend(
            loc="upper right", ncols=2 if len(by_count) > 3 else 1, frameon=True, framealpha=0.85,
            edgecolor="none", borderpad=0.3,
        ).set_zorder(6)  # fmt: skip


def _scale(axes: Axes, limits: tuple[float, float]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    ticks = WIDE_TICKS if limits[1] / limits[0] > 12 else TICKS
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if limits[0] <= tick <= limits[1]]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _binned(size: Floats, ratio: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return centre, 10th percentile, median and 90th of each quarter decade with enough points."""
    place = np.floor(np.log10(size) * 4.0)
    bins = []
    for one in np.unique(place):
        mine = ratio[place == one]
        if len(mine) >= LEAST_IN_BIN:
            centre = 10.0 ** ((one + 0.5) / 4.0)
            bins.append((centre, *np.quantile(mine, (0.1, 0.5, 0.9))))
    centre, p10, median, p90 = np.array(bins, np.float64).reshape(-1, 4).T
    return centre, p10, median, p90


def _title(operator: str) -> str:
    return MEASURED[operator].title if operator in MEASURED else operator
