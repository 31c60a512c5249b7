"""The lookups behind ``Tables.lookup``: check the sizes, find the packed table, run the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fastroof import flops
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_EXTRAPOLATED, ORIGIN_MEASURED, ORIGIN_MODELLED
from fastroof.compiled import gemms, grids
from fastroof.compiled.search import curve_latency_us
from fastroof.errors import LookupInputError
from fastroof.roofline import HeadShape
from fastroof.tables.sizes import checked_sizes, checked_text
from fastroof.units import PEAK_DTYPE, US_PER_S

if TYPE_CHECKING:
    from fastroof.pack import PackedCurve, PackedGrid
    from fastroof.tables import Lookup, Tables

__all__ = ["METHODS", "node_latency_us", "run_lookup"]

METHODS = ("roofline", "linear_mfu", "nearest", "floor")

Floats = npt.NDArray[np.float64]
Sizes = dict[str, npt.NDArray[np.int64]]

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


def run_lookup(tables: Tables, operator: str, method: str, given: Mapping[str, Any]) -> Lookup:
    """Answer ``tables.lookup(operator, method=method, **given)``."""
    from fastroof.tables import Lookup

    if not isinstance(operator, str) or operator not in REQUIRED:
        raise LookupInputError(f"unknown operator {operator!r}: use one of {', '.join(REQUIRED)}")
    if not isinstance(method, str) or method not in METHODS:
        raise LookupInputError(f"unknown method {method!r}: use one of {', '.join(METHODS)}")
    arguments = {**DEFAULTS[operator], **given}
    known = {*REQUIRED[operator], *DEFAULTS[operator]}
    unknown, missing = sorted(set(given) - known), [n for n in REQUIRED[operator] if n not in given]
    if unknown or missing:
        wrong = f"does not take {', '.join(unknown)}" if unknown else f"needs {', '.join(missing)}"
        raise LookupInputError(f"lookup of {operator} {wrong}: it takes {', '.join(sorted(known))}")
    text_names = [n for n, v in DEFAULTS[operator].items() if isinstance(v, str)]
    text = {n: checked_text(n, arguments.pop(n)) for n in text_names}
    sizes, shape = checked_sizes(arguments)
    latency_us = np.empty(len(next(iter(sizes.values()))))
    origin = np.empty(latency_us.shape, np.uint8)
    answer = _ANSWER[operator](tables, method, sizes, text, latency_us, origin)
    dtype = PEAK_DTYPE.get(text.get("dtype", "bf16"))
    if answer is None or dtype is None:
        mfu = np.full(latency_us.shape, np.nan)
    else:
        mfu = answer / (latency_us * (tables.gpu.peak(dtype) / US_PER_S))
    return Lookup(latency_us.reshape(shape), mfu.reshape(shape), origin.reshape(shape))


def _gemm(
    tables: Tables, method: str, sizes: Sizes, text: dict[str, str], out: Floats, origin: Any
) -> Floats:
    packed = tables.gemm(text["dtype"])
    m, n, k = (sizes[name].astype(np.float64) for name in ("m", "n", "k"))
    if method == "roofline":
        gemms.gemm_latency_us(*packed, m, n, k, out, origin)
    elif method == "linear_mfu":
        gemms.gemm_linear_mfu_us(*packed, m, n, k, out, origin)
    elif method == "floor":
        gemms.gemm_floor_us(*packed[:-1], m, n, k, out, origin)
    else:
        with np.errstate(divide="ignore"):
            log_k_axis, log_n_axis, log_m_axis = (
                np.log2(a) for a in (packed.k_axis, packed.n_axis, packed.m_axis)
            )
        gemms.gemm_nearest_us(
            *packed[:-1], log_k_axis, log_n_axis, log_m_axis,
            m, n, k, np.log2(m), np.log2(n), np.log2(k), out, origin,
        )  # fmt: skip
    return flops.gemm_flops(m, n, k)


def _each(sizes: Sizes, names: tuple[str, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Every distinct combination of some sizes, with the rows that have it."""
    columns = np.stack([sizes[name] for name in names])
    if (columns == columns[:, :1]).all():
        if columns.shape[1]:
            yield tuple(int(v) for v in columns[:, 0]), slice(None)
        return
    distinct, code = np.unique(columns, axis=1, return_inverse=True)
    for i, key in enumerate(distinct.T):
        yield tuple(int(v) for v in key), np.flatnonzero(code.ravel() == i)


def _grid_lookup(
    grid: PackedGrid, method: str, y: Floats, x: Floats, work_of: Callable[[Any, Any], Floats], work: Floats
) -> tuple[Floats, npt.NDArray[np.uint8]]:
    """Look (y, x) up in a packed grid; ``work_of`` gives the FLOPs at nodes, ``work`` at the points."""
    out = np.empty(len(y))
    made = np.empty(len(y), np.uint8)
    if method == "roofline":
        grids.grid_latency_us(grid.arena, y, x, out, made)
        return out, made
    axes = (grid.y_axis, grid.x_axis, grid.cells)
    node_work = work_of(grid.y_axis[:, None], grid.x_axis[None, :])
    if method == "linear_mfu":
        grids.grid_linear_mfu_us(grid.arena, *axes, node_work, y, x, work, out, made)
        return out, made
    with np.errstate(divide="ignore"):
        log_y_axis, log_x_axis, log_y, log_x = (np.log2(a) for a in (grid.y_axis, grid.x_axis, y, x))
    grids.grid_node_us(
        *axes, grid.flags, node_work, method == "floor", y, x, work,
        log_y_axis, log_x_axis, log_y, log_x, out, made,
    )  # fmt: skip
    return out, made


def node_latency_us(grid: PackedGrid, method: str, y: Floats, x: Floats, *, is_decode: bool) -> Floats:
    """Latency that a method gives at points of a grid, us."""

    def work_of(batch: Any, length: Any) -> Floats:
        return np.asarray(batch * (length if is_decode else length * (length + 1.0) * 0.5))

    return _grid_lookup(grid, method, y, x, work_of, work_of(y, x))[0]


def _decode(
    tables: Tables, method: str, sizes: Sizes, text: dict[str, str], out: Floats, origin: Any
) -> Floats:
    batch, kv_len = (sizes[n].astype(np.float64) for n in ("batch_size", "kv_len"))
    work = flops.decode_attention_flops(sizes["num_q_heads"], sizes["head_dim"], kv_len, batch)
    for (nh, nkv, dim), rows in _each(sizes, ("num_q_heads", "num_kv_heads", "head_dim")):
        shape = HeadShape(text["kv_dtype"], nh, nkv, dim)
        found = tables.attention("attention_decode", _checked_heads(shape))

        def work_of(b: Any, kv: Any, nh: int = nh, dim: int = dim) -> Floats:
            return flops.decode_attention_flops(nh, dim, kv, b)

        out[rows], made = _grid_lookup(found.grid, method, batch[rows], kv_len[rows], work_of, work[rows])
        origin[rows] = np.maximum(made, ORIGIN_BORROWED) if found.borrowed else made
    return work


def _prefill(
    tables: Tables, method: str, sizes: Sizes, text: dict[str, str], out: Floats, origin: Any
) -> Floats:
    batch, q_len, kv_len = (sizes[n].astype(np.float64) for n in ("batch_size", "q_len", "kv_len"))
    if (kv_len < q_len).any():
        at = int(np.flatnonzero(kv_len < q_len)[0])
        raise LookupInputError(
            f"kv_len {int(kv_len[at])} is less than q_len {int(q_len[at])}: "
            "kv_len counts the prefix and the new tokens"
        )
    heads, dims = sizes["num_q_heads"], sizes["head_dim"]
    work = flops.attention_flops(heads, dims, q_len, kv_len, batch)
    prefix_len = kv_len - q_len
    for (nh, nkv, dim), rows in _each(sizes, ("num_q_heads", "num_kv_heads", "head_dim")):
        shape = HeadShape(text["kv_dtype"], nh, nkv, dim)
        found = tables.attention("attention_prefill", _checked_heads(shape))

        def work_of(b: Any, q: Any, nh: int = nh, dim: int = dim) -> Floats:
            return flops.attention_flops(nh, dim, q, q, b)

        b, q, prefix = batch[rows], q_len[rows], prefix_len[rows]
        causal_work = flops.attention_flops(nh, dim, q, q, b)
        latency, made = _grid_lookup(found.grid, method, b, q, work_of, causal_work)
        pair_us, token_us = tables.prefix_us(shape)
        latency = latency + (pair_us * (b * q * prefix) + token_us * (b * prefix))
        made = np.where(prefix > 0, ORIGIN_MODELLED, made)
        out[rows] = latency
        origin[rows] = np.maximum(made, ORIGIN_BORROWED) if found.borrowed else made
    return work


def _curve_lookup(
    curve: PackedCurve, method: str, x: Floats, node_sizes: Floats, sizes: Floats
) -> tuple[Floats, npt.NDArray[np.uint8]]:
    """Look x up on one curve whose measured nodes have the given sizes (message bytes, tokens).

    The other methods keep size / latency, which is what MFU is for a curve.
    """
    out = np.empty(len(x))
    made = np.empty(len(x), np.uint8)
    curve_latency_us(*curve, x, out, made)
    if method == "roofline":
        return out, made
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
        made = np.where(made == ORIGIN_MEASURED, made, ORIGIN_EXTRAPOLATED).astype(np.uint8)
    return np.where(made == ORIGIN_MEASURED, out, other), made


def _allreduce(
    tables: Tables, method: str, sizes: Sizes, text: dict[str, str], out: Floats, origin: Any
) -> None:
    message = sizes["message_bytes"].astype(np.float64)
    for (num_gpus,), rows in _each(sizes, ("num_gpus",)):
        if num_gpus == 1:
            raise LookupInputError("an all-reduce needs num_gpus of at least 2, got 1")
        curve = tables.allreduce(text["dtype"], num_gpus, text["mode"])
        x = message[rows]
        out[rows], origin[rows] = _curve_lookup(curve, method, x, curve.axis[1:-1], x)


def _moe(tables: Tables, method: str, sizes: Sizes, text: dict[str, str], out: Floats, origin: Any) -> Floats:
    names = ("hidden", "intermediate", "topk", "num_experts", "moe_tp", "moe_ep")
    tokens = sizes["num_tokens"].astype(np.float64)
    total = np.empty(len(tokens))
    for key, rows in _each(sizes, names):
        hidden, intermediate, topk, _, moe_tp, moe_ep = key
        packed = tables.moe((text["dtype"], *key, text["distribution"]))
        per_token = float(flops.moe_flops(1, hidden, intermediate, topk, moe_tp, moe_ep))
        total[rows] = tokens[rows] * per_token
        out[rows], origin[rows] = _curve_lookup(
            packed.curve, method, packed.roofline_us(tokens[rows]), packed.tokens, tokens[rows]
        )
    return total


def _checked_heads(shape: HeadShape) -> HeadShape:
    if shape.num_q_heads % shape.num_kv_heads:
        raise LookupInputError(
            f"num_q_heads {shape.num_q_heads} is not a multiple of num_kv_heads {shape.num_kv_heads}"
        )
    return shape


_ANSWER: dict[str, Callable[..., Floats | None]] = {
    "gemm": _gemm,
    "attention_prefill": _prefill,
    "attention_decode": _decode,
    "allreduce": _allreduce,
    "moe": _moe,
}
