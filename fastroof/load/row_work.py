"""What each row of a measured table asks of the GPU: FLOPs, compulsory bytes, and the limits on both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastroof import flops
from fastroof.config.gpu import GpuSpec
from fastroof.errors import GpuError
from fastroof.units import DTYPE_BYTES

__all__ = ["RowWork", "row_flops", "row_work"]

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Columns = Mapping[str, Array]

EVENLY_ROUTED = ("balanced", "uniform")
"""Distributions of tokens over experts for which the expectation of uniform routing holds."""


@dataclass(frozen=True)
class RowWork:
    """Work and limits of every row, arrays of shape (rows,).

    Attributes
    ----------
    flops : ndarray
        FLOPs of the call; NaN for operators that only move bytes.
    moved_bytes : ndarray
        Compulsory bytes; for collectives, what each GPU sends over its link; for MoE with the experts
        that even routing is expected to reach.
    least_bytes : ndarray
        The same, but for MoE with as few experts as any routing reaches: no call moves less.
    peak_flops_per_s : ndarray
        Peak of the row's own dtype, FLOP/s; NaN where the GPU has no such units.
    limit_flops_per_s : ndarray
        Peak that no kernel of the row can pass: that of fp8 for attention over an fp8 KV cache,
        which some kernels compute in fp8.
    bandwidth_bytes_per_s : float
        What the bytes move at: memory, or the link to other GPUs.
    over_link : bool
        Whether the bytes go to other GPUs.
    """

    flops: Floats
    moved_bytes: Floats
    least_bytes: Floats
    peak_flops_per_s: Floats
    limit_flops_per_s: Floats
    bandwidth_bytes_per_s: float
    over_link: bool


def row_work(operator: str, columns: Columns, gpu: GpuSpec) -> RowWork:
    """Return the work of every row of a table.

    Parameters
    ----------
    operator : str
        A key of :data:`fastroof.columns.OPERATORS`.
    columns : mapping of str to ndarray
        The operator's keys and axes, each of shape (rows,).
    gpu : GpuSpec
        The card the rows were measured on.

    Returns
    -------
    RowWork
        Unknown dtypes give NaN, not an error: a report names them.
    """
    over_link = operator in ("allreduce", "collective")
    peak = limit = np.full(len(columns["latency_us"]), np.nan)
    if operator in ("gemm", "moe", "mla_prefill"):
        peak = limit = _by_word(columns["dtype"], lambda d: _peak(gpu, d))
    elif operator in ("attention_prefill", "attention_decode", "attention_decode_unequal", "mla_decode"):
        peak = np.full(len(peak), _peak(gpu, "bf16"))
        limit = np.fmax(peak, _by_word(columns["kv_dtype"], lambda d: _peak(gpu, d)))
    moved_bytes = _row_bytes(operator, columns)
    return RowWork(
        flops=row_flops(operator, columns),
        moved_bytes=moved_bytes,
        least_bytes=_least_moe_bytes(columns) if operator == "moe" else moved_bytes,
        peak_flops_per_s=peak,
        limit_flops_per_s=limit,
        bandwidth_bytes_per_s=gpu.nvlink_bytes_per_s if over_link else gpu.hbm_bytes_per_s,
        over_link=over_link,
    )


def row_flops(operator: str, columns: Columns) -> Floats:
    """Return the FLOPs of every row, NaN for operators that only move bytes."""
    c = columns
    if operator == "gemm":
        return flops.gemm_flops(c["m"], c["n"], c["k"])
    if operator == "attention_prefill":
        return _windowed_flops(c, c["q_len"])
    if operator in ("attention_decode", "attention_decode_unequal"):
        return _windowed_flops(c, np.ones_like(c["kv_len"]))
    if operator == "moe":
        return flops.moe_flops(
            c["num_tokens"], c["hidden"], c["intermediate"], c["topk"], c["moe_tp"], c["moe_ep"]
        )
    if operator == "mla_prefill":
        return flops.attention_flops(c["num_q_heads"], _mla_head_dim(operator, c), c["q_len"], c["q_len"])
    if operator == "mla_decode":
        return flops.decode_attention_flops(
            c["num_q_heads"], _mla_head_dim(operator, c), c["kv_len"], c["batch_size"]
        )
    return np.full(len(c["latency_us"]), np.nan)


def _mla_head_dim(operator: str, c: Columns) -> Floats:
    """Return the head width that gives MLA the cost of plain attention: the mean of its key and value widths.

    Keys are nope + rope wide before absorption and kv_lora + rope after; values nope (as in all
    published MLA models) and kv_lora.
    """
    value = c["kv_lora_rank"] if operator == "mla_decode" else c["nope_dim"]
    return value + c["rope_dim"] / 2.0


def _windowed_flops(c: Columns, q_len: Array) -> Floats:
    """Return causal FLOPs: the first tokens see a growing past, those beyond the window exactly it."""
    heads, width, batch = c["num_q_heads"], c["head_dim"], c["batch_size"]
    context = c["kv_len"] - q_len
    window = _window(c)
    growing = np.clip(window - context, 0, q_len)
    within = flops.attention_flops(heads, width, growing, context + growing, batch)
    beyond = flops.decode_attention_flops(heads, width, window, (q_len - growing) * batch)
    return within + beyond


def _window(c: Columns) -> Array:
    return np.where(c["window"] > 0, c["window"], c["kv_len"])


def _row_bytes(operator: str, c: Columns) -> Floats:
    if operator == "gemm":
        return flops.gemm_bytes(c["m"], c["n"], c["k"], _element_bytes(c["dtype"]))
    if operator in ("attention_prefill", "attention_decode", "attention_decode_unequal"):
        q_len = c["q_len"] if operator == "attention_prefill" else np.ones_like(c["kv_len"])
        seen = np.minimum(c["kv_len"], _window(c) + q_len - 1)
        return flops.attention_bytes(
            c["num_q_heads"], c["num_kv_heads"], c["head_dim"], q_len, seen, c["batch_size"],
            _element_bytes(c["kv_dtype"]),
        )  # fmt: skip
    if operator == "moe":
        return _moe_bytes(c)
    if operator == "mla_prefill":
        width, heads = _mla_head_dim(operator, c), c["num_q_heads"]
        return flops.attention_bytes(heads, heads, width, c["q_len"], c["q_len"])
    if operator == "mla_decode":
        # One latent vector a token is both key and value: so many KV heads of the mean width weigh as much.
        width = _mla_head_dim(operator, c)
        latent_heads = (c["kv_lora_rank"] + c["rope_dim"]) / (2.0 * width)
        return flops.decode_attention_bytes(
            c["num_q_heads"], latent_heads, width, c["kv_len"], c["batch_size"],
            _element_bytes(c["kv_dtype"]),
        )  # fmt: skip
    if operator == "elementwise":
        return np.asarray(c["io_bytes"], np.float64)
    if operator == "allreduce":
        return flops.allreduce_wire_bytes(c["message_bytes"], c["num_gpus"])
    return _collective_bytes(c)


def _moe_bytes(c: Columns) -> Floats:
    """Return routed-expert bytes; for uneven routing those of the fewest experts."""
    expected = flops.moe_bytes(c["num_tokens"], *_moe_shape(c), _element_bytes(c["dtype"]))
    even = np.isin(c["distribution"].astype(str), EVENLY_ROUTED)
    return np.where(even, expected, _least_moe_bytes(c))


def _least_moe_bytes(c: Columns) -> Floats:
    """Return the bytes of a call whose tokens all take the experts of the first one."""
    shape = _moe_shape(c)
    one_token = flops.moe_bytes(1, *shape, _element_bytes(c["dtype"]))
    return one_token + flops.moe_bytes(c["num_tokens"], *shape, 0) - flops.moe_bytes(1, *shape, 0)


def _moe_shape(c: Columns) -> tuple[Array, Array, Array, Array, Array, Array]:
    return (c["hidden"], c["intermediate"], c["topk"], c["num_experts"], c["moe_tp"], c["moe_ep"])


def _collective_bytes(c: Columns) -> Floats:
    """Return bytes each GPU sends: half an all-reduce; an all-gather passes on g shards, not one."""
    half = flops.allreduce_wire_bytes(c["message_bytes"], c["num_gpus"]) / 2.0
    return np.where(c["collective"].astype(str) == "all_gather", half * c["num_gpus"], half)


def _element_bytes(words: Array) -> Any:
    # flops.py types the size as a float; it broadcasts, and a table holds several dtypes.
    return _by_word(words, lambda d: DTYPE_BYTES.get(d, np.nan))


def _peak(gpu: GpuSpec, dtype: str) -> float:
    try:
        return gpu.peak(dtype)
    except GpuError:
        return np.nan


def _by_word(words: Array, value: Callable[[str], float]) -> Floats:
    """Return ``value(word)`` for each word, computed once a distinct word."""
    # np.unique would sort the words, which takes a tenth of the time of loading everything
    listed = words.tolist()
    known = {word: value(str(word)) for word in set(listed)}
    return np.array([known[word] for word in listed], np.float64)
