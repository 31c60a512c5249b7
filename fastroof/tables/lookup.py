"""The lookups behind ``Tables.lookup``: check the sizes, find the packed table, run the loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fastroof import flops
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_EXTRAPOLATED, ORIGIN_MEASURED
from fastroof.compiled import gemms, grids, points
from fastroof.compiled.grid_points import grid_points_us
from fastroof.compiled.packed import GridNodes, GuidedGrid
from fastroof.compiled.search import curve_latency_us
from fastroof.errors import LookupInputError
from fastroof.pack.curves import cell_origins
from fastroof.pack.guides import joined_axes
from fastroof.roofline import HeadShape
from fastroof.tables.local_error import lookup_error
from fastroof.tables.sizes import checked_points, checked_text
from fastroof.units import PEAK_DTYPE, US_PER_S

if TYPE_CHECKING:
    from fastroof.pack import PackedCurve, PackedGrid
    from fastroof.tables import Lookup, LookupWithError, Tables

__all__ = ["METHODS", "node_latency_us", "run_lookup"]

METHODS = ("roofline", "linear_mfu", "nearest", "floor")

Floats = npt.NDArray[np.float64]
Answers = tuple[Floats, Floats, npt.NDArray[np.uint8]]
"""latency_us, mfu and origin of some points, to be filled."""
Key = tuple[int, ...]
AXES: Final[dict[str, tuple[str, ...]]] = {
    "gemm": ("m", "n", "k"),
    "attention_prefill": ("batch_size", "q_len", "kv_len"),
    "attention_decode": ("batch_size", "kv_len"),
    "allreduce": ("message_bytes",),
    "moe": ("num_tokens",),
}
"""Sizes that a kernel is looked up at; the others say which kernel."""
REQUIRED: dict[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "attention_prefill": ("num_q_heads", "num_kv_heads", "head_dim", "q_len", "kv_len"),
    "attention_decode": ("num_q_heads", "num_kv_heads", "head_dim", "batch_size", "kv_len"),
    "allreduce": ("num_gpus", "message_bytes"),
    "moe": ("num_tokens", "hidden", "intermediate", "topk", "num_experts"),
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemm": {"dtype": "bf16"},
    "attention_prefill": {"batch_size": 1, "kv_dtype": "bf16"},
    "attention_decode": {"kv_dtype": "bf16"},
    "allreduce": {"dtype": "bf16", "mode": "graph"},
    "moe": {"moe_tp": 1, "moe_ep": 1, "distribution": "balanced", "dtype": "bf16"},
}


# FLOPs of the smallest shape: the peak of a dtype over them is what MFU is counted in.
GEMM_FLOPS: Final = float(flops.gemm_flops(1, 1, 1))
ATTENTION_FLOPS: Final = float(flops.attention_flops(1, 1, 1, 1))


def run_lookup(
    tables: Tables, operator: str, method: str, with_error: bool, given: Mapping[str, Any]
) -> Lookup | LookupWithError:
    """Answer ``tables.lookup(operator, method=method, with_error=with_error, **given)``."""
    from fastroof.tables import Lookup, LookupWithError

    if not isinstance(operator, str) or operator not in REQUIRED:
        raise LookupInputError(f"unknown operator {operator!r}: use one of {', '.join(REQUIRED)}")
    if not isinstance(method, str) or method not in METHODS:
        raise LookupInputError(f"unknown method {method!r}: use one of {', '.join(METHODS)}")
    if with_error and method != "roofline":
        raise LookupInputError(f"with_error goes with method='roofline', got {method!r}")
    required, defaults, axes = REQUIRED[operator], DEFAULTS[operator], AXES[operator]
    arguments = {**defaults, **given}
    if len(arguments) != len(required) + len(defaults) or any(name not in given for name in required):
        known = {*required, *defaults}
        unknown, missing = sorted(set(given) - known), [n for n in required if n not in given]
        wrong = f"does not take {', '.join(unknown)}" if unknown else f"needs {', '.join(missing)}"
        raise LookupInputError(f"lookup of {operator} {wrong}: it takes {', '.join(sorted(known))}")
    text = {n: checked_text(n, arguments.pop(n)) for n, v in defaults.items() if isinstance(v, str)}
    asked = checked_points(arguments)
    key_names = [name for name in (*required, *defaults) if name in arguments and name not in axes]
    count = math.prod(asked.shape)
    found = Lookup(np.empty(count), np.empty(count), np.empty(count, np.uint8))
    answer = _ANSWER[operator]
    relative_error = np.empty(count if with_error else 0)
    for part, sizes, columns in asked.chunks(axes):
        answers = (found.latency_us[part], found.mfu[part], found.origin[part])
        if not columns:
            key = tuple(asked.whole[name] for name in key_names)
            answer(tables, method, text, key, sizes, answers)
            if with_error:
                relative_error[part] = lookup_error(tables, operator, text, key, sizes, answers[0])
            continue
        for key, rows in _kernels([columns.get(n, asked.whole.get(n)) for n in key_names], len(sizes[0])):
            some = (np.empty(len(rows)), np.empty(len(rows)), np.empty(len(rows), np.uint8))
            few = [size[rows] for size in sizes]
            answer(tables, method, text, key, few, some)
            for i in range(len(answers)):
                answers[i][rows] = some[i]
            if with_error:
                relative_error[part][rows] = lookup_error(tables, operator, text, key, few, some[0])
    shape = asked.shape
    found = Lookup(found.latency_us.reshape(shape), found.mfu.reshape(shape), found.origin.reshape(shape))
    return LookupWithError(*found, relative_error.reshape(shape)) if with_error else found


def _kernels(columns: list[Any], count: int) -> Iterator[tuple[Key, npt.NDArray[np.int64]]]:
    """Every distinct combination of some sizes, with the points that have it."""
    wide = np.stack([np.broadcast_to(column, count) for column in columns])
    order = np.lexsort(wide)
    wide = wide[:, order]
    starts = np.flatnonzero(np.r_[True, (wide[:, 1:] != wide[:, :-1]).any(axis=0)])
    for rows, start in zip(np.split(order, starts[1:]), starts, strict=True):
        yield tuple(int(v) for v in wide[:, start]), rows


def _unit_us(tables: Tables, dtype: str, work: float) -> float:
    """What some FLOPs take at the peak that ``dtype`` computes at, us; NaN where it has none."""
    peak_dtype = PEAK_DTYPE.get(dtype)
    return math.nan if peak_dtype is None else work / (tables.gpu.peak(peak_dtype) / US_PER_S)


def _gemm(
    tables: Tables, method: str, text: dict[str, str], key: Key, sizes: list[Floats], answers: Answers
) -> None:
    m, n, k = sizes
    out, mfu, origin = answers
    packed = tables.gemm(text["dtype"])
    if method == "roofline":
        gemms.gemm_latency_us(packed, m, n, k, out, origin)
    elif method == "linear_mfu":
        gemms.gemm_linear_mfu_us(packed, m, n, k, out, origin)
    elif method == "floor":
        gemms.gemm_floor_us(packed, m, n, k, out, origin)
    else:
        log2_sizes = (np.log2(m), np.log2(n), np.log2(k))
        gemms.gemm_nearest_us(packed, _log2_axes(tables, text["dtype"]), (m, n, k), log2_sizes, out, origin)
    points.gemm_mfu(m, n, k, _unit_us(tables, text["dtype"], GEMM_FLOPS), out, mfu)


def _log2_axes(tables: Tables, dtype: str) -> gemms.GemmSizes:
    """Axes of a GEMM table in log2: made once and kept with the tables."""
    cache, where = tables.kept("lookup"), ("gemm", dtype)
    if where not in cache:
        packed = tables.gemm(dtype)
        with np.errstate(divide="ignore"):
            cache[where] = np.log2(packed.m_axis), np.log2(packed.n_axis), np.log2(packed.k_axis)
    return cache[where]  # type: ignore[no-any-return]


def _grid_lookup(
    grid: PackedGrid, method: str, y: Floats, x: Floats, out: Floats, made: Any, *, is_decode: bool
) -> None:
    """Look (y, x) up in a packed grid."""
    if method == "roofline":
        grids.grid_latency_us(grid.arena, y, x, out, made)
        return

    def work_of(batch: Floats, length: Floats) -> Floats:
        return np.asarray(batch * (length if is_decode else length * (length + 1.0) * 0.5))

    work, node_work = work_of(y, x), work_of(grid.y_axis[:, None], grid.x_axis[None, :])
    nodes = GridNodes(grid.y_axis, grid.x_axis, grid.cells, grid.flags, node_work)
    if method == "linear_mfu":
        grids.grid_linear_mfu_us(grid.arena, nodes, y, x, work, out, made)
    elif method == "floor":
        grids.grid_floor_us(nodes, y, x, work, out, made)
    else:
        with np.errstate(divide="ignore"):
            log2 = grids.GridLog2(*(np.log2(a) for a in (grid.y_axis, grid.x_axis, y, x)))
        grids.grid_nearest_us(nodes, log2, y, x, work, out, made)


def node_latency_us(grid: PackedGrid, method: str, y: Floats, x: Floats, *, is_decode: bool) -> Floats:
    """Latency that a method gives at points of a grid, us."""
    out = np.empty(len(y))
    _grid_lookup(grid, method, y, x, out, np.empty(len(y), np.uint8), is_decode=is_decode)
    return out


class _Attention(NamedTuple):
    """An attention table of one head shape, ready for points: made once and kept with the tables."""

    grid: PackedGrid
    points: GuidedGrid | None
    borrowed: bool
    unit_us: float
    prefix_us: tuple[float, float]


def _attention(tables: Tables, operator: str, text: dict[str, str], key: Key) -> _Attention:
    shape = HeadShape(text["kv_dtype"], *key)
    cache, where = tables.kept("lookup"), (operator, shape)
    if where not in cache:
        if shape.num_q_heads % shape.num_kv_heads:
            raise LookupInputError(
                f"num_q_heads {shape.num_q_heads} is not a multiple of num_kv_heads {shape.num_kv_heads}"
            )
        found = tables.attention(operator, shape)
        grid, borrowed = found.grid, found.borrowed
        axes, guides = joined_axes([grid.y_axis, grid.x_axis])
        flags = np.maximum(grid.flags.astype(np.uint8), ORIGIN_BORROWED if borrowed else ORIGIN_MEASURED)
        cache[where] = _Attention(
            grid,
            GuidedGrid(axes, guides, grid.cells.ravel(), cell_origins(flags).ravel())
            if len(guides)
            else None,
            borrowed,
            _unit_us(tables, "bf16", ATTENTION_FLOPS * shape.num_q_heads * shape.head_dim),
            tables.prefix_us(shape) if operator == "attention_prefill" else (0.0, 0.0),
        )
    return cache[where]  # type: ignore[no-any-return]


def _attention_us(
    found: _Attention,
    method: str,
    batch: Floats,
    length: Floats,
    out: Floats,
    origin: Any,
    *,
    is_decode: bool,
) -> None:
    if method == "roofline" and found.points is not None:
        grid_points_us(found.points, batch, length, out, origin)
        return
    _grid_lookup(found.grid, method, batch, length, out, origin, is_decode=is_decode)
    if found.borrowed:
        np.maximum(origin, ORIGIN_BORROWED, out=origin)


def _decode(
    tables: Tables, method: str, text: dict[str, str], key: Key, sizes: list[Floats], answers: Answers
) -> None:
    batch, kv_len = sizes
    out, mfu, origin = answers
    found = _attention(tables, "attention_decode", text, key)
    _attention_us(found, method, batch, kv_len, out, origin, is_decode=True)
    points.decode_mfu(batch, kv_len, found.unit_us, out, mfu)


def _prefill(
    tables: Tables, method: str, text: dict[str, str], key: Key, sizes: list[Floats], answers: Answers
) -> None:
    batch, q_len, kv_len = sizes
    out, mfu, origin = answers
    found = _attention(tables, "attention_prefill", text, key)
    _attention_us(found, method, batch, q_len, out, origin, is_decode=False)
    prices = (*found.prefix_us, found.unit_us)
    if not points.prefill_us_and_mfu(batch, q_len, kv_len, prices, out, mfu, origin):
        at = int(np.flatnonzero(kv_len < q_len)[0])
        raise LookupInputError(
            f"kv_len {int(kv_len[at])} is less than q_len {int(q_len[at])}: "
            "kv_len counts the prefix and the new tokens"
        )


def _curve_lookup(
    curve: PackedCurve, method: str, x: Floats, node_sizes: Floats, sizes: Floats, out: Floats, made: Any
) -> None:
    """Look x up on one curve whose measured nodes have the given sizes (message bytes, tokens).

    The other methods keep size / latency, which is what MFU is for a curve.
    """
    curve_latency_us(curve, x, out, made)
    if method == "roofline":
        return
    rate = node_sizes / curve.value[1:-1]
    if method == "linear_mfu":
        other = sizes / np.interp(sizes, node_sizes, rate)
    else:
        last = len(node_sizes) - 1
        node = np.clip(np.searchsorted(node_sizes, sizes, side="right") - 1, 0, last)
        if method == "nearest":
            above = np.minimum(node + 1, last)
            # further than the geometric mean of its neighbours; a tie goes to the smaller one
            beyond = sizes * sizes > node_sizes[node] * node_sizes[above]
            node = np.where(beyond & (sizes >= node_sizes[0]), above, node)
        other = sizes / rate[node]
        made[made != ORIGIN_MEASURED] = ORIGIN_EXTRAPOLATED
    np.copyto(out, other, where=made != ORIGIN_MEASURED)


def _allreduce(
    tables: Tables, method: str, text: dict[str, str], key: Key, sizes: list[Floats], answers: Answers
) -> None:
    (num_gpus,), (message,) = key, sizes
    out, mfu, origin = answers
    if num_gpus == 1:
        raise LookupInputError("an all-reduce needs num_gpus of at least 2, got 1")
    curve = tables.allreduce(text["dtype"], num_gpus, text["mode"])
    _curve_lookup(curve, method, message, curve.axis[1:-1], message, out, origin)
    mfu.fill(math.nan)


def _moe(
    tables: Tables, method: str, text: dict[str, str], key: Key, sizes: list[Floats], answers: Answers
) -> None:
    hidden, intermediate, topk, _, moe_tp, moe_ep = key
    (tokens,) = sizes
    out, mfu, origin = answers
    packed = tables.moe((text["dtype"], *key, text["distribution"]))
    _curve_lookup(packed.curve, method, packed.roofline_us(tokens), packed.tokens, tokens, out, origin)
    cache, where = tables.kept("lookup"), ("moe", text["dtype"], key)
    if where not in cache:
        per_token = float(flops.moe_flops(1, hidden, intermediate, topk, moe_tp, moe_ep))
        cache[where] = _unit_us(tables, text["dtype"], per_token)
    points.curve_mfu(tokens, cache[where], out, mfu)


_ANSWER: dict[str, Callable[..., None]] = {
    "gemm": _gemm,
    "attention_prefill": _prefill,
    "attention_decode": _decode,
    "allreduce": _allreduce,
    "moe": _moe,
}
