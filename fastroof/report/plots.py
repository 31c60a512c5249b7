"""Shared parts of all plots: style, titles, labels at line ends, legends, saving; matplotlib on demand."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastroof._version import __version__
from fastroof.atomic_files import check_file_place, whole_file
from fastroof.errors import FastroofError
from fastroof.plan.curves import Component, component_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fastroof.plan import StepPlan
    from fastroof.plan.explain import OperatorTime


SUFFIXES: Final = (".png", ".svg")
INK: Final = "#222222"
QUIET: Final = "#6b6b6b"
FAINT: Final = "#e4e4e4"
COLOURS: Final = {
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "orange": "#E69F00",
    "yellow": "#F0E442",
}
LINE_COLOURS: Final = tuple(COLOURS[c] for c in ("blue", "vermilion", "green", "purple", "sky", "orange"))
"""Okabe and Ito's colours, distinguishable with any colour vision."""
_MARKERS: Final = ("o", "s", "D", "^", "P", "*")
LINE_LOOKS: Final = tuple(zip(LINE_COLOURS, _MARKERS, strict=True))
"""Colour and marker of each line."""


def line_look(i: int) -> tuple[str, str]:
    """Return the colour and marker of line ``i``: 36 different ones."""
    return LINE_COLOURS[i % 6], _MARKERS[(i + i // 6) % 6]


def plain_number(value: float, _position: float = 0.0) -> str:
    """Format a tick without an exponent: 10,000, 0.00001."""
    return f"{value:,.10f}".rstrip("0").rstrip(".")


def size_words(size: float) -> str:
    """Format a number of tokens or sequences: 512, 4k, 128k."""
    return f"{int(size) // 1024}k" if size >= 1024 and size % 1024 == 0 else plain_number(size)


_STYLE: Final[dict[Any, dict[str, Any]]] = {
    "axes": {
        "axisbelow": True, "edgecolor": QUIET, "grid": True, "labelcolor": INK, "labelsize": 10.5,
        "titlelocation": "left", "titlesize": 11.5, "titleweight": "bold",
    },
    "axes.spines": {"right": False, "top": False},
    "figure": {"facecolor": "white"},
    "font": {"family": ["DejaVu Sans"], "size": 10.5},
    "grid": {"color": FAINT, "linewidth": 0.8},
    "lines": {"linewidth": 2.0, "solid_capstyle": "round"},
    "savefig": {"dpi": 160, "facecolor": "white"},
    # otherwise matplotlib uses random ids, and the same plot gives a different file each time
    "svg": {"fonttype": "path", "hashsalt": "fastroof"},
    "text": {"color": INK},
    ("xtick", "ytick"): {"color": QUIET, "labelcolor": INK, "labelsize": 9.5},
}  # fmt: skip
"""Settings by matplotlib's groups of them."""


def log_ticks(axis: Any, low: float, high: float) -> None:
    """Set logarithmic ticks at 1, 2, 5 of each decade, or only at decades over a wide range."""
    from matplotlib.ticker import NullLocator

    axis.axes.set_xscale("log") if axis.axis_name == "x" else axis.axes.set_yscale("log")
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
    ticks = [step * 10.0**e for e in decades for step in steps if low <= step * 10.0**e <= high]
    axis.set_ticks(ticks, [plain_number(tick) for tick in ticks])
    axis.set_minor_locator(NullLocator())


@contextmanager
def style() -> Iterator[None]:
    """Draw in fastroof's style, regardless of the user's matplotlibrc."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise FastroofError("plots need matplotlib: pip install fastroof[report]") from None
    with mpl.rc_context():
        mpl.rcdefaults()
        for group, settings in _STYLE.items():
            mpl.rc(group, **settings)
        yield


def new_figure(width_in: float, height_in: float) -> Figure:
    """Return an empty figure outside pyplot's global state, with room for titles at the top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    set_height(figure, height_in)
    return figure


def set_height(figure: Figure, height_in: float) -> None:
    """Change the height of a figure before its titles are written, in inches, keeping the titles' room."""
    figure.set_figheight(height_in)
    engine: Any = figure.get_layout_engine()
    top = 0.78 / height_in
    room = (0.012, 0.012, 0.976, 1.0 - top - 0.012)
    engine.set(rect=room, w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.04)


def text_renderer(figure: Figure) -> Any:
    """Return a renderer that measures texts of a figure before it is drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    return canvas.get_renderer()


def write_titles(figure: Figure, title: str, subtitle: str) -> None:
    """Write the title and below it the sources, shrunk or truncated to the figure's width."""
    height_in = figure.get_size_inches()[1]
    quiet = f"{subtitle}; fastroof {__version__}"
    big = figure.text(0.018, 1.0 - 0.2 / height_in, title, size=14.5, weight="bold", va="top")
    small = figure.text(0.018, 1.0 - 0.5 / height_in, quiet, size=9.5, color=QUIET, va="top")
    renderer = text_renderer(figure)
    room = 0.97 * figure.bbox.width
    for text in (big, small):
        size = float(text.get_fontsize())
        smallest = 0.7 * size
        while text.get_window_extent(renderer).width > room and size > smallest:
            size *= 0.97
            text.set_fontsize(size)
        words = text.get_text()
        while text.get_window_extent(renderer).width > room:
            words = words[:-4]
            text.set_text(f"{words}...")


def label_line_ends(
    axes: Axes, ends: Sequence[tuple[float, str, str]], *, x: float, gap: float = 0.055, low: float = 0.0
) -> None:
    """Write each line's name next to its end, moved apart where two would overlap."""
    to_axes = axes.transData + axes.transAxes.inverted()
    x_data = axes.get_xlim()[0]
    placed = sorted((float(to_axes.transform((x_data, y))[1]), text, colour) for y, text, colour in ends)
    heights = _spread([height for height, _, _ in placed], gap, low, 0.96)
    for height, (_, text, colour) in zip(heights, placed, strict=True):
        axes.text(
            x, height, text, color=colour, transform=axes.transAxes, va="center", size=9.5, weight="bold"
        )


def _spread(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move sorted heights apart to at least ``gap``, above ``low`` and, if they fit, below ``high``."""
    apart: list[float] = []
    for height in heights:
        apart.append(max(height, apart[-1] + gap if apart else low))
    ceiling = high
    for i in range(len(apart) - 1, -1, -1):
        if apart[i] <= ceiling:
            break
        apart[i] = ceiling
        ceiling -= gap
    return apart


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG or SVG; the same figure gives the same bytes.

    Parameters
    ----------
    figure : Figure
        Figure from a ``draw_`` function.
    path : str or Path
        Output file, ending in .png or .svg.

    Returns
    -------
    Path
        The written file.

    Raises
    ------
    FastroofError
        If the file has another suffix, or its folder does not exist.
    """
    path = Path(path)
    check_picture(path)
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": f"fastroof {__version__}"}
    with style(), whole_file(path) as unfinished:
        figure.savefig(unfinished, metadata=metadata, format=path.suffix.lower().removeprefix("."))
    return path


def check_picture(path: str | Path) -> None:
    """Check that a plot can be drawn and written to a path, before the work starts.

    Raises
    ------
    FastroofError
        If the suffix is not .png or .svg, the folder does not exist, or matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise FastroofError(f"{path} must end in {' or '.join(SUFFIXES)}")
    check_file_place(path, str(path))
    with style():
        pass


_SHARE: Final = 0.96
"""Maximum width of a legend, as a share of the figure."""
_LINE_IN: Final = 0.26
"""Height of a line of a legend, inches."""
_USUAL_LINES: Final = 2
"""Lines of a legend that fit in a figure's initial height."""


def legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    """Put the legend of a figure's axes below them, enlarging the figure if needed."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    renderer = text_renderer(figure)
    room = _SHARE * figure.bbox.width
    letters = max(map(len, labels))
    num_columns = min(columns, len(labels))
    while True:
        broken = [textwrap.fill(label, letters, break_long_words=letters < 16) for label in labels]
        legend = figure.legend(
            handles, broken, loc="outside lower center", ncols=num_columns, frameon=False, fontsize=9.5
        )
        if legend.get_window_extent(renderer).width <= room or letters < 8:
            break
        legend.remove()
        if num_columns > 1:
            num_columns -= 1
        else:
            letters = int(letters * 0.85)
    lines = -(-len(labels) // num_columns) * max(label.count("\n") + 1 for label in broken)
    if lines > _USUAL_LINES:
        set_height(figure, float(figure.get_size_inches()[1]) + (lines - _USUAL_LINES) * _LINE_IN)


_WORDS: Final[dict[Component, str]] = {
    "linear": "linear layers",
    "experts": "experts",
    "elementwise": "norms, rope, activation",
    "communication": "communication",
    "lm_head": "LM head",
}
GROUPS: Final = {
    "linear layers": COLOURS["blue"],
    "experts": COLOURS["orange"],
    "decode attention": COLOURS["vermilion"],
    "prefill attention": COLOURS["yellow"],
    "norms, rope, activation": COLOURS["green"],
    "communication": COLOURS["purple"],
    "LM head": COLOURS["sky"],
    "runtime": QUIET,
}
"""Groups of a step's operators in drawing order, and their colours."""


def groups_of(plan: StepPlan) -> dict[str, str]:
    """Return the group, a key of :data:`GROUPS`, of each role of a plan's operators."""
    others = ("decode_attention", "prefill_attention", "runtime")
    of_rows = {curve.operator.role: _WORDS[component_of(curve.operator)] for curve in plan.row_curves}
    return {role: role.replace("_", " ") for role in others} | of_rows


def grouped_us(plan: StepPlan, operators: Iterable[OperatorTime]) -> dict[str, float]:
    """Return the time of a step's operators by group, also of groups that it has none of."""
    group_of, groups = groups_of(plan), dict.fromkeys(GROUPS, 0.0)
    for part in operators:
        groups[group_of[part.role]] += part.total_us
    return groups
