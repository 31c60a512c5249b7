"""Plots of measured kernels: a model's MFU against sizes, and a GPU's roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Floats, Longs
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_EXTRAPOLATED
from fastroof.errors import FastroofError, PlanError
from fastroof.models import Layout
from fastroof.models.execution import AUTO
from fastroof.operators.attention import ATTENTION, ATTENTION_DECODE, ATTENTION_PREFILL
from fastroof.operators.attention_work import decode_attention_bytes, decode_attention_flops
from fastroof.operators.calls import AttentionCall, Gemm
from fastroof.operators.elementwise import ELEMENTWISE
from fastroof.operators.gemm import GEMM
from fastroof.operators.operator import Operator
from fastroof.plan.attention import heads_of
from fastroof.plan.curves import curves_of
from fastroof.plan.execution import execution_of
from fastroof.plan.options import PlanOptions
from fastroof.report import plots
from fastroof.units import DTYPE_BYTES, PEAK_DTYPE, TB, TFLOP, US_PER_S

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fastroof.config import GpuSpec
    from fastroof.models import ModelSpec
    from fastroof.tables import Lookup, Tables


POINTS_PER_DOUBLING: Final = 12
LARGEST_M: Final = 8192


class MfuCurve(NamedTuple):
    """MFU of one kernel against one size."""

    label: str
    size: Longs
    mfu: Floats
    inside: Bools


def _sizes(low: int, high: int) -> Longs:
    """Return integers spaced evenly on a log scale."""
    doublings = np.log2(high / low)
    spread = low * 2.0 ** np.linspace(0.0, doublings, round(doublings * POINTS_PER_DOUBLING) + 1)
    return np.unique(np.round(spread).astype(np.int64))


def _measured_m(tables: Tables, dtype: str) -> Longs:
    """Return every measured m in the plot's range, so that no peak of a jagged GEMM is missed."""
    columns = tables.table("gemm").columns
    m = np.unique(columns["m"][columns["dtype"] == dtype])
    return np.asarray(m[m <= LARGEST_M], np.int64)


def _mfu_curve(label: str, size: Longs, looked_up: Lookup, allowed: int) -> MfuCurve:
    return MfuCurve(label, size, looked_up.mfu, looked_up.origin <= allowed)


def draw_mfu(
    model: ModelSpec,
    tables: Tables,
    *,
    tp: int = 1,
    dtype: str = AUTO,
    kv_dtype: str = AUTO,
    method: str = "roofline",
) -> Figure:
    """Draw the MFU of one model's kernels on one GPU of ``tp``.

    Four panels: GEMMs against m, decode attention against batch size and against kv_len, prefill attention
    against prompt length. Lines are dotted outside measured ranges; panels of a head shape that was not
    measured are labelled as borrowed.

    Parameters
    ----------
    model : ModelSpec
        Model whose shapes are looked up.
    tables : Tables
        Measured kernels.
    tp : int
        Tensor-parallel size: 1, 2, 4 or 8.
    dtype, kv_dtype : str
        Formats of the linear layers and of the KV cache; by default the checkpoint's.
    method : str
        As in :meth:`fastroof.Tables.lookup`.

    Returns
    -------
    Figure
        For :func:`fastroof.report.save_figure`.

    Raises
    ------
    FastroofError
        If matplotlib is not installed, the model cannot be split, or no table covers a kernel.
    """
    layout = Layout(tp)
    model.check_layout(layout)
    options = (
        PlanOptions(engine="kernels", tp=tp, dtype=dtype, kv_dtype=kv_dtype, method=method)
        .checked()
        .for_model(model, tables.gpu)
    )
    dtype, kv_dtype = options.dtype, options.kv_dtype
    execution = execution_of(model, options, curves_of(tables, tables.gpu, options))
    calls = model.only_kind.calls(model.hidden, layout, execution)
    call = next((c for c in calls if isinstance(c, AttentionCall)), None)
    if call is None:
        raise PlanError(f"{model.name} has no grouped-head attention, which this plot needs")
    attention: dict[str, Any] = {
        "num_q_heads": call.num_q_heads,
        "num_kv_heads": call.num_kv_heads,
        "head_dim": call.head_dim,
        "window": call.window,
        "kv_dtype": kv_dtype,
        "method": method,
    }
    gemms = [c for c in calls if isinstance(c, Gemm) and c.rows == "tokens"]
    m = np.union1d(_sizes(1, LARGEST_M), _measured_m(tables, dtype))
    batch, length, q_len = _sizes(1, 1024), _sizes(128, 131072), _sizes(16, 32768)

    shape = heads_of(call)._replace(kv_dtype=kv_dtype)
    borrowed = {
        phase: ", borrowed" if ATTENTION[f"attention_{phase}"].grid(tables, shape).borrowed else ""
        for phase in ("prefill", "decode")
    }

    def gemm(o: Gemm) -> MfuCurve:
        looked_up = tables.lookup("gemm", m=m, n=o.n, k=o.k, dtype=o.dtype, method=method)
        return _mfu_curve(f"{o.name}\n{o.n} x {o.k}", m, looked_up, ORIGIN_EXTRAPOLATED - 1)

    def decode(label: str, size: Longs, b: Any, kv: Any) -> MfuCurve:
        looked_up = tables.lookup("attention_decode", batch_size=b, kv_len=kv, **attention)
        return _mfu_curve(label, size, looked_up, _inside(looked_up))

    def prefill(b: int) -> MfuCurve:
        fits = q_len[q_len * b <= 131072]
        looked_up = tables.lookup("attention_prefill", batch_size=b, q_len=fits, kv_len=fits, **attention)
        return _mfu_curve(f"batch {b}", fits, looked_up, _inside(looked_up))

    panels = [
        ("GEMMs against m", "m (tokens in the step)", [gemm(o) for o in gemms]),
        (
            f"Prefill attention against prompt length{borrowed['prefill']}",
            "new tokens of each sequence",
            [prefill(b) for b in (1, 4, 16)],
        ),
        (
            f"Decode attention against batch size{borrowed['decode']}",
            "batch size (sequences)",
            [decode(f"kv_len {kv:,}", batch, batch, kv) for kv in (1024, 4096, 16384)],
        ),
        (
            f"Decode attention against context{borrowed['decode']}",
            "kv_len (tokens)",
            [decode(f"batch {b}", length, b, length) for b in (1, 16, 128)],
        ),
    ]
    gpu = tables.gpu
    ceiling = _memory_ceiling(gpu, call)
    with plots.style():
        figure = plots.new_figure(11.5, 8.2)
        all_axes = figure.subplots(2, 2)
        for i, (axes, (title, size, curves)) in enumerate(zip(all_axes.flat, panels, strict=True)):
            _draw_panel(axes, title, size, curves, ceiling if i > 1 else None)
        # one scale for both decode panels, so that they can be compared
        high = max(axes.get_ylim()[1] for axes in all_axes[1])
        for axes in all_axes[1]:
            axes.set_ylim(0.0, high)
        figure.draw_without_rendering()
        for axes, (_, _, curves) in zip(all_axes.flat, panels, strict=True):
            _label(axes, curves)
        peak = f"peak {gpu.peak(dtype) / TFLOP:,.5g} TFLOP/s"
        where = f"source {tables.sources['gemm']}, method {method}; dotted: outside the measured range"
        share_of = f", one GPU of tp={tp}" if tp > 1 else ""
        plots.write_titles(
            figure,
            f"{model.name} on {gpu.title}{share_of}: MFU of its kernels",
            f"{dtype} weights ({peak}), {kv_dtype} KV cache; {where}",
        )
    return figure


def _inside(looked_up: Lookup) -> int:
    """Return the largest origin code between measured points; for borrowed rows the range is unknown."""
    return ORIGIN_BORROWED if (looked_up.origin >= ORIGIN_BORROWED).all() else ORIGIN_EXTRAPOLATED - 1


def _memory_ceiling(gpu: GpuSpec, call: AttentionCall) -> float:
    """Return the MFU of decode attention that reads its KV cache at the GPU's full bandwidth."""
    nh, nkv, dim = call.num_q_heads, call.num_kv_heads, call.head_dim
    kv_len = 2**20
    work = decode_attention_flops(nh, dim, kv_len, 1)
    moved = decode_attention_bytes(nh, nkv, dim, kv_len, 1, DTYPE_BYTES[call.kv_dtype])
    return float(work / moved * gpu.hbm_bytes_per_s / gpu.peak("bf16"))


def _draw_panel(axes: Axes, title: str, size: str, curves: Sequence[MfuCurve], ceiling: float | None) -> None:
    for curve, colour in zip(curves, plots.LINE_COLOURS, strict=False):
        percent = curve.mfu * 100.0
        axes.plot(curve.size, percent, color=colour, linestyle=":", linewidth=1.6)
        axes.plot(curve.size, np.where(curve.inside, percent, np.nan), color=colour)
    axes.set_title(title)
    axes.set_xlabel(size)
    axes.set_ylabel("MFU (% of peak)")
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(c.size[0] for c in curves), max(c.size[-1] for c in curves))
    ticks = [2**i for i in range(0, 18, 2) if axes.get_xlim()[0] <= 2**i <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [plots.size_words(tick) for tick in ticks])
    axes.minorticks_off()
    highest = max(float(c.mfu.max()) for c in curves)
    axes.set_ylim(0.0, 115.0 * max(ceiling, highest) if ceiling else 100.0)
    if ceiling:
        axes.axhline(100.0 * ceiling, color=plots.QUIET, linewidth=1.2, linestyle="--")
        axes.annotate(
            f"HBM bandwidth allows {100.0 * ceiling:.2f} %", (0.0, 100.0 * ceiling), xytext=(6, 4),
            xycoords=("axes fraction", "data"), textcoords="offset points", color=plots.QUIET, size=9.5,
        )  # fmt: skip


def _label(axes: Axes, curves: Sequence[MfuCurve]) -> None:
    ends = [
        (float(curve.mfu[-1]) * 100.0, curve.label, colour)
        for curve, colour in zip(curves, plots.LINE_COLOURS, strict=False)
    ]
    gap = 0.11 if any("\n" in curve.label for curve in curves) else 0.06
    plots.label_line_ends(axes, ends, x=1.015, gap=gap, low=0.03)


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
