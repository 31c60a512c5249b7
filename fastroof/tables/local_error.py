"""How good a lookup is: the relative standard error of each answer, from the table it was looked up in.

What is not leave-one-out of the tables themselves is named below with where it comes from.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof import flops
from fastroof.pack.points import Floats
from fastroof.roofline import HeadShape, decode_roofline, prefill_roofline
from fastroof.tables.answers import NO_STREAMS
from fastroof.tables.leave_one_out import (
    LEVEL,
    NORMAL_80,
    LocalErrors,
    MeasuredGrid,
    calibration,
    calibration_ratios,
    local_errors,
    measured_grid,
    neighbour_errors,
    reach,
)
from fastroof.units import DTYPE_BYTES, US_PER_S

if TYPE_CHECKING:
    from fastroof.tables import Tables

__all__ = [
    "PREFIX",
    "REPEATABILITY",
    "AttentionErrors",
    "attention_errors",
    "attention_variance",
    "curve_errors",
    "gemm_errors",
    "lookup_error",
    "relative_variance",
    "streaming_error",
]

MAPE_TO_ERROR: Final = 1.25
"""Standard error over mean absolute error, of a normal distribution."""

REPEATABILITY: Final = 0.018
"""Relative standard error of a measured point: 126 all-reduces of the H100 tables were measured twice."""

PREFIX: Final = MAPE_TO_ERROR * 0.093
"""Of a prefix's price, a formula: 9.3 % off its only anchor, one new token in the decode table."""

UNKNOWN: Final = PREFIX
"""Along an axis with too few nodes to leave one out: as a formula does where there is an anchor."""

BORROWED: Final = (MAPE_TO_ERROR * 0.038, MAPE_TO_ERROR * 0.081)
"""Of a table borrowed at equal batch x KV heads, for a factor of 2 and of 8 between the KV heads: (32, 8)
from (16, 4) is off by 3.8 %, (64, 8) from (8, 1) by 8.1 %. With each head shape of head_dim 128 hidden in
turn, 80 % intervals cover 78 to 81 % of what its double or half says of it, 86 to 87 % at a factor of 4, and
more of what is borrowed from other group sizes (1.2 to 3.2 % off), for which the smaller one is taken."""


class AttentionErrors(NamedTuple):
    """Local errors of the tables behind one head shape.

    Attributes
    ----------
    lenders : tuple of (float, LocalErrors)
        Batch sizes of each measured table a batch size of this shape, and its errors.
    borrowed : float
        Squared relative standard error of borrowing; 0 where the shape was measured.
    """

    lenders: tuple[tuple[float, LocalErrors], ...]
    borrowed: float


def relative_variance(errors: LocalErrors, sizes: Iterable[Floats]) -> Floats:
    """Squared relative standard error at points of one table.

    Parameters
    ----------
    errors : LocalErrors
        Of the table.
    sizes : iterable of ndarray of float64, shape (points,)
        One an axis.

    Returns
    -------
    ndarray of float64, shape (points,)
        At a node its own, else the largest of the axes' that the point is between nodes of; a hole and the
        way beyond an axis' end add to it. At least that of repeating a measurement.
    """
    at: list[Any] = []
    cells: list[Any] = []
    corners: list[tuple[Any, Any]] = []
    clipped = []
    for axis, size in zip(errors.axes, sizes, strict=True):
        last = len(axis) - 1
        x = np.clip(size, axis[0], axis[-1])
        low = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, max(last - 1, 0))
        high = np.minimum(low + 1, last)
        at.append(np.where(x - axis[low] > axis[high] - x, high, low))
        cells.append(low)
        corners.append((np.where(x == axis[high], high, low), np.where(x == axis[low], low, high)))
        clipped.append((size, x))
    on_node = np.logical_and.reduce([low == high for low, high in corners])
    variance = np.where(on_node, errors.nodes[tuple(at)], 0.0)
    for a, (inside, (low, high)) in enumerate(zip(errors.inside, corners, strict=True)):
        where = tuple(cells[b] if b == a else at[b] for b in range(len(at)))
        np.maximum(variance, np.where(low != high, inside[where], 0.0), out=variance)
    if errors.holes is not None:
        variance += _hole_variance(errors.holes, corners)
    for a, (axis, (size, x)) in enumerate(zip(errors.axes, clipped, strict=True)):
        if (size == x).all():
            continue
        where = tuple(at[b] for b in range(len(at)) if b != a)
        for edge, away in zip(errors.beyond[a], (axis[0] / size, size / axis[-1]), strict=True):
            octaves = np.log2(np.maximum(away, 1.0))
            variance += edge[where] * reach(octaves)
    return np.maximum(variance, REPEATABILITY**2)


def _hole_variance(holes: Floats, corners: list[tuple[Any, Any]]) -> Floats:
    """Largest among the nodes that each point uses."""
    used = (
        holes[tuple(pair[corner >> a & 1] for a, pair in enumerate(corners))]
        for corner in range(2 ** len(corners))
    )
    return np.asarray(functools.reduce(np.maximum, used))


def lookup_error(
    tables: Tables,
    operator: str,
    text: Mapping[str, str],
    key: tuple[int, ...],
    sizes: list[Floats],
    latency_us: Floats,
) -> Floats:
    """Relative standard error of roofline lookups of one kernel.

    Parameters
    ----------
    tables : Tables
        Where it was looked up.
    operator : str
        The operator.
    text, key, sizes
        dtypes, the other sizes that name the kernel, and the sizes along its axes, as the lookup has them.
    latency_us : ndarray of float64, shape (points,)
        The answers, us.

    Returns
    -------
    ndarray of float64, shape (points,)
        1 standard error over the latency.
    """
    if operator == "gemm":
        return np.sqrt(relative_variance(gemm_errors(tables, text["dtype"]), sizes))
    if operator == "allreduce":
        errors = curve_errors(tables, operator, (text["dtype"], *key, text["mode"]))
        return np.sqrt(relative_variance(errors, sizes))
    if operator == "moe":
        errors = curve_errors(tables, operator, (text["dtype"], *key, text["distribution"]))
        return np.sqrt(relative_variance(errors, sizes))
    shape = HeadShape(text["kv_dtype"], *key)
    batch, length = sizes[:2]
    variance = attention_variance(attention_errors(tables, operator, shape), batch, length)
    if operator == "attention_decode":
        return np.sqrt(variance)
    prefix = sizes[2] - length
    pair_us, token_us = tables.prefix_us(shape)
    prefix_us = batch * prefix * (pair_us * length + token_us)
    own_us = latency_us - prefix_us
    us2: Any = variance * own_us**2 + (PREFIX * prefix_us) ** 2
    return np.asarray(np.sqrt(us2) / latency_us)


def attention_variance(errors: AttentionErrors, batch: Floats, length: Floats) -> Floats:
    """Squared relative standard error of attention without a prefix at (batch, length)."""
    found = [relative_variance(lender, (batch * scale, length)) for scale, lender in errors.lenders]
    return np.asarray(np.max(found, axis=0) + errors.borrowed)


def gemm_errors(tables: Tables, dtype: str) -> LocalErrors:
    """Local errors of the GEMMs of one dtype, over (m, n, k)."""
    made = tables.kept("local errors")
    if ("gemm", dtype) not in made:
        rows = tables.groups("gemm")[(dtype,)]
        columns = tables.table("gemm").columns
        latency_us = columns["latency_us"][rows]
        t_launch_us = float(latency_us.min())
        flops_per_us, bytes_per_us = tables.gpu.peak(dtype) / US_PER_S, tables.gpu.hbm_bytes_per_s / US_PER_S
        width = DTYPE_BYTES[dtype]

        def roofline(m: Any, n: Any, k: Any) -> Any:
            moved = width * (m * k + n * k) + 2.0 * m * n
            return t_launch_us + 2.0 * m * n * k / flops_per_us + moved / bytes_per_us

        points = tuple(columns[name][rows].astype(np.float64) for name in ("m", "n", "k"))
        grid = measured_grid(points, latency_us, roofline)
        errors = _errors(grid)
        made["gemm", dtype] = local_errors(grid, errors, _factor([errors]), UNKNOWN)
    return made["gemm", dtype]  # type: ignore[no-any-return]


def attention_errors(tables: Tables, operator: str, shape: HeadShape) -> AttentionErrors:
    """Local errors of attention of one head shape, over (batch size, length)."""
    made = tables.kept("local errors")
    if (operator, shape) not in made:
        found = tables.attention(operator, shape)
        factor = _attention_factor(tables, operator, shape.kv_dtype)
        lenders = []
        borrowed = 0.0
        for lender in found.lenders:
            where = (operator, "lender", lender)
            if where not in made:
                grid = _attention_grid(tables, operator, lender)
                made[where] = local_errors(grid, _errors(grid), factor, UNKNOWN)
            lenders.append((shape.num_kv_heads / lender.num_kv_heads, made[where]))
            if found.borrowed:
                borrowed = max(borrowed, _borrowed(shape, lender) ** 2)
        made[operator, shape] = AttentionErrors(tuple(lenders), borrowed)
    return made[operator, shape]  # type: ignore[no-any-return]


def _borrowed(wanted: HeadShape, lender: HeadShape) -> float:
    near, far = BORROWED
    if wanted.group_size != lender.group_size:
        return near
    doublings = abs(math.log2(wanted.num_kv_heads / lender.num_kv_heads))
    return near + (far - near) * (max(doublings, 1.0) - 1.0) / 2.0


def _attention_grid(tables: Tables, operator: str, shape: HeadShape) -> MeasuredGrid:
    columns = tables.table(operator).columns
    rows = tables.groups(operator)[(*shape, 0)]
    is_decode = operator == "attention_decode"
    if not is_decode:
        rows = rows[columns["q_len"][rows] == columns["kv_len"][rows]]
    latency_us = columns["latency_us"][rows]
    roofline = (decode_roofline if is_decode else prefill_roofline)(
        shape, tables.gpu, float(latency_us.min())
    )
    points = tuple(columns[name][rows].astype(np.float64) for name in ("batch_size", "kv_len"))
    return measured_grid(points, latency_us, roofline.__call__, is_additive=is_decode)


def _attention_factor(tables: Tables, operator: str, kv_dtype: str) -> float:
    """Calibration over all measured head shapes of one KV dtype."""
    made = tables.kept("local errors")
    if (operator, kv_dtype) not in made:
        shapes = (HeadShape(*key[:4]) for key in tables.groups(operator) if key[4] == 0)
        alike = [shape for shape in shapes if shape.kv_dtype == kv_dtype]
        made[operator, kv_dtype] = _factor(_errors(_attention_grid(tables, operator, s)) for s in alike)
    return made[operator, kv_dtype]  # type: ignore[no-any-return]


def curve_errors(tables: Tables, operator: str, key: tuple[Any, ...]) -> LocalErrors:
    """Local errors of what has one size: an all-reduce or a MoE kernel, by the key of its table."""
    made = tables.kept("local errors")
    if (operator, key) not in made:
        like = [k for k in tables.groups(operator) if k[0] == key[0] and k[-1] == key[-1]]
        if (operator, key[0], key[-1]) not in made:
            made[operator, key[0], key[-1]] = _factor(_errors(_curve_grid(tables, operator, k)) for k in like)
        grid = _curve_grid(tables, operator, key)
        made[operator, key] = local_errors(grid, _errors(grid), made[operator, key[0], key[-1]], UNKNOWN)
    return made[operator, key]  # type: ignore[no-any-return]


def _curve_grid(tables: Tables, operator: str, key: tuple[Any, ...]) -> MeasuredGrid:
    columns = tables.table(operator).columns
    rows = tables.groups(operator)[key]
    latency_us = columns["latency_us"][rows]
    if operator == "moe":
        return measured_grid(
            (columns["num_tokens"][rows].astype(np.float64),), latency_us, tables.moe(key).roofline_us
        )
    launch_us, link = float(latency_us.min()), tables.gpu.nvlink_bytes_per_s / US_PER_S
    num_gpus = key[1]

    def bound(message_bytes: Floats) -> Floats:
        return launch_us + flops.allreduce_wire_bytes(message_bytes, num_gpus) / link

    return measured_grid((columns["message_bytes"][rows].astype(np.float64),), latency_us, bound)


def streaming_error(tables: Tables) -> float | None:
    """Relative standard error of a streaming kernel's line; None where none was measured.

    From the measured streaming kernels themselves, which all lie on one line of launch and copy bandwidth.
    """
    measured = tables.streaming
    if measured is None:
        return None
    columns = tables.table("elementwise").columns
    streams = ~np.isin(columns["kind"], NO_STREAMS)
    launch_us, bytes_per_us = measured.rates
    line_us = launch_us + columns["io_bytes"][streams] / bytes_per_us
    off = np.abs(np.log(line_us / columns["latency_us"][streams]))
    return float(np.quantile(off, LEVEL)) / NORMAL_80


def _errors(grid: MeasuredGrid) -> list[Floats]:
    return [neighbour_errors(grid, axis) for axis in range(len(grid.axes))]


def _factor(tables_errors: Iterable[list[Floats]]) -> float:
    ratios = [calibration_ratios(e, axis) for errors in tables_errors for axis, e in enumerate(errors)]
    return calibration(ratios)
