"""The roofline of a GPU with its measured kernels on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.errors import FastroofError
from fastroof.operators.attention import ATTENTION_DECODE, ATTENTION_PREFILL
from fastroof.operators.elementwise import ELEMENTWISE
from fastroof.operators.gemm import GEMM
from fastroof.operators.operator import Operator
from fastroof.report.plots import COLOURS, INK, QUIET, new_figure, style, write_titles
from fastroof.units import DTYPE_BYTES, PEAK_DTYPE, TB, TFLOP, US_PER_S

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fastroof.config import GpuSpec
    from fastroof.tables import Tables

__all__ = ["KernelCloud", "draw_roofline", "draw_roofs", "kernel_clouds"]


CELLS_PER_DECADE: Final = 40
"""Resolution at which points that would cover each other are thinned to one."""
FEW_KERNELS: Final = 5000
"""Up to so many, points are drawn large enough to see each of them."""
INTENSITY_LIMITS: Final = (0.25, 3e4)


class KernelCloud(NamedTuple):
    """Measured kernels of one operator and dtype as points under a roofline."""

    label: str
    intensity: Floats
    flops_per_s: Floats
    colour: str


_COLOURS: Final = {
    ("gemm", "bf16"): "blue",
    ("gemm", "fp8"): "purple",
    ("gemm", "fp8_block"): "sky",
    ("attention_prefill", "bf16"): "green",
    ("attention_decode", "bf16"): "vermilion",
}


def kernel_clouds(tables: Tables, dtypes: Sequence[str] = ("bf16",)) -> list[KernelCloud]:
    """Place every measured GEMM of some dtypes, and attention, on the roofline's axes."""
    shown: list[tuple[Operator, str, str]] = [
        *((GEMM, dtype, "GEMM" if dtype == "bf16" else f"GEMM, {dtype}") for dtype in dtypes),
        (ATTENTION_PREFILL, "bf16", "prefill attention"),
        (ATTENTION_DECODE, "bf16", "decode attention"),
    ]
    clouds = []
    for operator, dtype, label in shown:
        rows = _rows(tables, operator, dtype)
        if rows is not None:
            colour = COLOURS[_COLOURS.get((operator.name, dtype), "purple")]
            clouds.append(_cloud(label, operator.flops(rows), operator.moved_bytes(rows), rows, colour))
    return clouds


def _rows(tables: Tables, operator: Operator, dtype: str) -> dict[str, Any] | None:
    """Plain rows of one dtype; None where there are none."""
    if operator.name not in tables.measured.tables:
        return None
    columns = tables.table(operator.name).columns
    keep = (columns[operator.keys[0].name] == dtype) & operator.plain_rows(columns)
    keep &= columns.get("window", 0) == 0
    return {name: values[keep] for name, values in columns.items()} if keep.any() else None


def _cloud(label: str, work: Floats, moved: Floats, rows: dict[str, Any], colour: str) -> KernelCloud:
    return KernelCloud(label, work / moved, work / rows["latency_us"] * US_PER_S, colour)


def _thinned(cloud: KernelCloud) -> tuple[Floats, Floats, Floats]:
    """One point a cell of the picture, with the number of kernels it stands for."""
    cells = np.stack([np.log10(cloud.intensity), np.log10(cloud.flops_per_s)]) * CELLS_PER_DECADE
    _, first, count = np.unique(np.floor(cells), axis=1, return_index=True, return_counts=True)
    return cloud.intensity[first], cloud.flops_per_s[first], count.astype(np.float64)


def draw_roofline(gpu: GpuSpec, tables: Tables | None, *, dtypes: Sequence[str] = ("bf16",)) -> Figure:
    """Draw a GPU's roofline, and on it the kernels that were measured.

    Parameters
    ----------
    gpu : GpuSpec
        Whose peaks and bandwidth are the roofs.
    tables : Tables or None
        Measured kernels; None draws the roofs alone.
    dtypes : sequence of str
        Which peaks and which GEMMs to show: bf16, fp8, fp8_block.

    Returns
    -------
    Figure
        For :func:`fastroof.report.save_figure`.

    Raises
    ------
    FastroofError
        If matplotlib is not installed, or a dtype is unknown.
    GpuError
        If the GPU has no peak for a dtype.
    """
    unknown = [dtype for dtype in dtypes if dtype not in DTYPE_BYTES]
    if unknown or not dtypes:
        raise FastroofError(f"unknown dtype {(*unknown, '')[0]!r}: use bf16, fp8 or fp8_block")
    peaks = {PEAK_DTYPE[dtype]: gpu.peak(dtype) for dtype in dtypes}
    clouds = [] if tables is None else kernel_clouds(tables, dtypes)
    with style():
        figure = new_figure(10.0, 6.6)
        axes = figure.add_subplot()
        axes.set(xscale="log", yscale="log", xlim=INTENSITY_LIMITS)
        axes.set_ylim(_lowest_tflops(clouds), max(peaks.values()) / TFLOP * 2.2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.set_xlabel("arithmetic intensity (FLOP per compulsory byte)")
        axes.set_ylabel("achieved TFLOP/s" if clouds else "TFLOP/s")
        _draw_clouds(axes, clouds)
        draw_roofs(axes, gpu, peaks, None if tables is None else ELEMENTWISE.streaming(tables))
        shown = sum(len(cloud.intensity) for cloud in clouds)
        if tables is None:
            what = f"{gpu.title}: its roofline"
            where = "datasheet figures; no measured tables of this GPU"
        else:
            what = f"{gpu.title}: {shown:,} measured kernels on its roofline"
            shown_operators = (GEMM, ATTENTION_PREFILL, ATTENTION_DECODE)
            sources = {tables.sources[o.name] for o in shown_operators if o.name in tables.sources}
            where = f"source {', '.join(sorted(sources))}; darker where many kernels coincide"
            if any((c.flops_per_s > c.intensity * gpu.hbm_bytes_per_s).any() for c in clouds):
                where += "; above the HBM line the L2 cache serves"
        write_titles(figure, what, where)
    return figure


def _lowest_tflops(clouds: Sequence[KernelCloud]) -> float:
    """Bottom of the picture: just below the slowest kernel."""
    slowest = min((float(cloud.flops_per_s.min()) for cloud in clouds), default=0.5 * TFLOP)
    return 0.6 * slowest / TFLOP


def _draw_clouds(axes: Axes, clouds: Sequence[KernelCloud]) -> None:
    from matplotlib.colors import to_rgba

    few = sum(len(cloud.intensity) for cloud in clouds) < FEW_KERNELS
    faintest, area = (0.6, 26.0) if few else (0.14, 7.0)
    for order, cloud in enumerate(clouds):
        x, y, count = _thinned(cloud)
        colours = np.tile(to_rgba(cloud.colour), (len(x), 1))
        colours[:, 3] = np.clip(faintest + 0.16 * np.log2(count), 0.0, 0.85)
        axes.scatter(x, y / TFLOP, s=area, c=colours, linewidths=0, zorder=2 + 0.1 * order, gid=cloud.label)
    for row, cloud in enumerate(reversed(clouds)):
        # Bottom right stays empty on every GPU: many FLOPs a byte are never that slow.
        height = 0.05 + 0.062 * row
        axes.scatter([0.735], [height], s=55, color=cloud.colour, transform=axes.transAxes, zorder=5)
        axes.text(
            0.755, height, cloud.label, color=cloud.colour, transform=axes.transAxes,
            weight="bold", va="center", zorder=5,
        )  # fmt: skip


def draw_roofs(axes: Axes, gpu: GpuSpec, peaks: dict[str, float], streaming: Any) -> None:
    """Draw peaks and bandwidths of a GPU into logarithmic axes, with their names."""
    from matplotlib.patheffects import withStroke

    lowest, highest = axes.get_xlim()
    top = max(peaks.values())
    bandwidths = {"-": gpu.hbm_bytes_per_s}
    words = f"HBM {gpu.hbm_bytes_per_s / TB:.2f} TB/s"
    if streaming is not None:
        bandwidths["--"] = streaming.bytes_per_s
        words += f"; dashed: {streaming.bytes_per_s / TB:.2f} TB/s, measured streaming"
    for dash, bandwidth in bandwidths.items():
        x = np.array([lowest, top / bandwidth])
        colour = INK if dash == "-" else QUIET
        axes.plot(x, x * bandwidth / TFLOP, color=colour, linestyle=dash, linewidth=1.6, zorder=4)
    at = lowest * 1.25
    height = 1.35 * at * gpu.hbm_bytes_per_s / TFLOP
    axes.text(
        at, height, words, zorder=6,
        # A line through the origin of data coordinates has slope one here.
        rotation=float(np.degrees(np.arctan2(height, at))), rotation_mode="anchor",
        transform_rotates_text=True,
    )  # fmt: skip
    for dtype, peak in peaks.items():
        x = np.array([peak / gpu.hbm_bytes_per_s, highest])
        axes.plot(x, [peak / TFLOP] * 2, color=INK, linewidth=1.6, zorder=4)
        above = peak == top
        label = axes.annotate(
            f"{dtype} {peak / TFLOP:,.5g} TFLOP/s", (highest, peak / TFLOP), xytext=(-2, 4 if above else -5),
            textcoords="offset points", ha="right", va="bottom" if above else "top", zorder=6,
        )  # fmt: skip
        label.set_path_effects([withStroke(linewidth=3.0, foreground="white")])
