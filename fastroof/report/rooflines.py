"""Plot of a GPU's roofline and its measured kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.errors import FastroofError
from fastroof.operators.attention import ATTENTION_DECODE, ATTENTION_PREFILL
from fastroof.operators.elementwise import ELEMENTWISE
from fastroof.operators.gemm import GEMM
from fastroof.operators.operator import Operator
from fastroof.report import plots
from fastroof.units import DTYPE_BYTES, PEAK_DTYPE, TB, TFLOP, US_PER_S

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fastroof.config import GpuSpec
    from fastroof.tables import Tables


CELLS_PER_DECADE: Final = 40
"""Resolution for merging overlapping points."""
FEW_KERNELS: Final = 5000
"""Below this number of kernels, points are drawn large enough to see each of them."""
INTENSITY_LIMITS: Final = (0.25, 3e4)


class KernelCloud(NamedTuple):
    """Measured kernels of one operator and dtype as points on a roofline plot."""

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
    """Return all measured GEMMs of some dtypes, and attention, as points on a roofline plot."""
    shown: list[tuple[Operator, str, str]] = [
        *((GEMM, dtype, "GEMM" if dtype == "bf16" else f"GEMM, {dtype}") for dtype in dtypes),
        (ATTENTION_PREFILL, "bf16", "prefill attention"),
        (ATTENTION_DECODE, "bf16", "decode attention"),
    ]
    clouds = []
    for operator, dtype, label in shown:
        rows = _rows(tables, operator, dtype)
        if rows is not None:
            colour = plots.COLOURS[_COLOURS.get((operator.name, dtype), "purple")]
            work = operator.flops(rows)
            flops_per_s = work / rows["latency_us"] * US_PER_S
            clouds.append(KernelCloud(label, work / operator.moved_bytes(rows), flops_per_s, colour))
    return clouds


def _rows(tables: Tables, operator: Operator, dtype: str) -> dict[str, Any] | None:
    """Return the plain rows of one dtype; None if missing."""
    if operator.name not in tables.measured.tables:
        return None
    columns = tables.table(operator.name).columns
    keep = (columns[operator.keys[0].name] == dtype) & operator.plain_rows(columns)
    keep &= columns.get("window", 0) == 0
    return {name: values[keep] for name, values in columns.items()} if keep.any() else None


def _thinned(cloud: KernelCloud) -> tuple[Floats, Floats, Floats]:
    """Return one point per cell of the plot, with the number of kernels that it represents."""
    cells = np.stack([np.log10(cloud.intensity), np.log10(cloud.flops_per_s)]) * CELLS_PER_DECADE
    _, first, count = np.unique(np.floor(cells), axis=1, return_index=True, return_counts=True)
    return cloud.intensity[first], cloud.flops_per_s[first], count.astype(np.float64)


def draw_roofline(gpu: GpuSpec, tables: Tables | None, *, dtypes: Sequence[str] = ("bf16",)) -> Figure:
    """Draw a GPU's roofline with its measured kernels.

    Parameters
    ----------
    gpu : GpuSpec
        GPU whose peaks and bandwidth are drawn.
    tables : Tables or None
        Measured kernels; None draws only the roofs.
    dtypes : sequence of str
        Peaks and GEMMs to show: bf16, fp8, fp8_block.

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
    with plots.style():
        figure = plots.new_figure(10.0, 6.6)
        axes = figure.add_subplot()
        axes.set(xscale="log", yscale="log", xlim=INTENSITY_LIMITS)
        slowest = min((float(cloud.flops_per_s.min()) for cloud in clouds), default=0.5 * TFLOP)
        axes.set_ylim(0.6 * slowest / TFLOP, max(peaks.values()) / TFLOP * 2.2)
        axes.set_xlabel("arithmetic intensity (FLOP per compulsory byte)")
        axes.set_ylabel("achieved TFLOP/s" if clouds else "TFLOP/s")
        _draw_clouds(axes, clouds)
        draw_roofs(axes, gpu, peaks)
        streaming = None if tables is None else ELEMENTWISE.streaming(tables)
        if streaming is not None:
            _draw_streaming(axes, streaming.bytes_per_s, max(peaks.values()))
        if clouds:
            # the bottom right is empty on every GPU: kernels of high intensity are never that slow
            axes.legend(loc="lower right", frameon=False, labelcolor="linecolor", prop={"weight": "bold"})
        shown = sum(len(cloud.intensity) for cloud in clouds)
        if tables is None:
            what = f"Roofline of {gpu.title}"
            where = "datasheet figures; no measured tables of this GPU"
        else:
            what = f"Roofline of {gpu.title} with {shown:,} measured kernels"
            shown_operators = (GEMM, ATTENTION_PREFILL, ATTENTION_DECODE)
            sources = {tables.sources[o.name] for o in shown_operators if o.name in tables.sources}
            where = f"source {', '.join(sorted(sources))}; darker where many kernels coincide"
            if any((c.flops_per_s > c.intensity * gpu.hbm_bytes_per_s).any() for c in clouds):
                where += "; above the HBM line: served by the L2 cache"
        plots.write_titles(figure, what, where)
    return figure


def _draw_clouds(axes: Axes, clouds: Sequence[KernelCloud]) -> None:
    from matplotlib.colors import to_rgba

    few = sum(len(cloud.intensity) for cloud in clouds) < FEW_KERNELS
    faintest, area = (0.6, 26.0) if few else (0.14, 7.0)
    for order, cloud in enumerate(clouds):
        x, y, count = _thinned(cloud)
        colours = np.tile(to_rgba(cloud.colour), (len(x), 1))
        colours[:, 3] = np.clip(faintest + 0.16 * np.log2(count), 0.0, 0.85)
        axes.scatter(x, y / TFLOP, s=area, c=colours, linewidths=0, zorder=2 + 0.1 * order, gid=cloud.label)
        # an opaque point for the legend
        axes.plot([], [], linestyle="none", marker="o", markersize=7, color=cloud.colour, label=cloud.label)


def _draw_streaming(axes: Axes, bytes_per_s: float, top: float) -> None:
    """Draw the bandwidth that streaming kernels reach."""
    x = np.array([axes.get_xlim()[0], top / bytes_per_s])
    label = f"measured streaming, {bytes_per_s / TB:.2f} TB/s"
    axes.plot(
        x, x * bytes_per_s / TFLOP, color=plots.QUIET, linestyle="--", linewidth=1.6, zorder=4, label=label
    )


def draw_roofs(axes: Axes, gpu: GpuSpec, peaks: Mapping[str, float]) -> None:
    """Draw a GPU's peaks and bandwidth on logarithmic axes, with the peaks' names right of them."""
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(plots.plain_number)
    lowest, highest = axes.get_xlim()
    slope = np.array([lowest, max(peaks.values()) / gpu.hbm_bytes_per_s])
    axes.plot(slope, slope * gpu.hbm_bytes_per_s / TFLOP, color=plots.INK, linewidth=1.6, zorder=4)
    at = max(lowest, axes.get_ylim()[0] * TFLOP / gpu.hbm_bytes_per_s) * 1.25
    height = 1.35 * at * gpu.hbm_bytes_per_s / TFLOP
    axes.text(
        at, height, f"HBM {gpu.hbm_bytes_per_s / TB:.2f} TB/s", zorder=6,
        # along the bandwidth line, which has slope one on these axes
        rotation=float(np.degrees(np.arctan2(height, at))), rotation_mode="anchor",
        transform_rotates_text=True,
    )  # fmt: skip
    names: dict[float, list[str]] = {}
    for dtype, peak in peaks.items():
        names.setdefault(peak, []).append(dtype)
    for peak in names:
        x = [peak / gpu.hbm_bytes_per_s, highest]
        axes.plot(x, [peak / TFLOP] * 2, color=plots.INK, linewidth=1.6, zorder=4)
    ends = [
        (peak / TFLOP, f"{', '.join(dtypes)} {peak / TFLOP:,.5g} TFLOP/s", plots.INK)
        for peak, dtypes in names.items()
    ]
    plots.label_line_ends(axes, ends, x=1.01, gap=0.045)
