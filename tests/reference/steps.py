"""A naive step: the direct sum of ``tables.lookup`` over the operators of a dense transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastroof.models import DenseModel
from tests.reference import lookups

Request = tuple[int, int]


def streaming(tables: Any) -> tuple[float, float]:
    """Launch floor, us, and bytes a us of the measured streaming kernels beyond eight times the L2."""
    columns = tables.measured.tables["elementwise"].columns
    names = ("kind", "io_bytes", "latency_us")
    # fp8_scale is a difference of two kernels
    rows = [
        (size, us)
        for kind, size, us in zip(*(columns[n].tolist() for n in names), strict=True)
        if kind != "fp8_scale"
    ]
    beyond = [size / us for size, us in rows if size > 8 * tables.gpu.l2_bytes]
    return min(us for _, us in rows), float(np.median(beyond))


def operators(
    model: Any, tp: int, dtype: str, kv_dtype: str
) -> list[tuple[str, int, str, tuple[float, ...]]]:
    """(kind, calls, rows, sizes) of everything but attention: a GEMM's n and k, else bytes a row."""
    model = DenseModel.of(model)
    layers, hidden, dh = model.num_layers, model.hidden, model.head_dim
    nh, nkv = model.num_q_heads // tp, max(1, model.num_kv_heads // tp)
    wide = model.intermediate // tp
    kv_width = lookups.WIDTH[kv_dtype]
    found: list[tuple[str, int, str, tuple[float, ...]]] = [
        ("stream", 1, "tokens", (2 * 2 * hidden,)),  # embedding: a row read, a row written
        ("stream", layers, "tokens", (4 * 2 * hidden,)),  # residual and RMSNorm: two rows read, two written
        ("gemm", layers, "tokens", ((nh + 2 * nkv) * dh, hidden)),
        ("stream", layers, "tokens", (2 * 2 * (nh + nkv) * dh,)),  # rope, in place
        ("stream", layers, "tokens", (2 * nkv * dh * (2 + kv_width),)),  # KV write
        ("gemm", layers, "tokens", (hidden, nh * dh)),
        ("stream", layers, "tokens", (4 * 2 * hidden,)),
        ("gemm", layers, "tokens", (2 * wide, hidden)),
        ("stream", layers, "tokens", (3 * 2 * wide,)),  # silu(gate) * up
        ("gemm", layers, "tokens", (hidden, wide)),
        ("stream", 1, "tokens", (4 * 2 * hidden,)),
        ("logits", 1, "sequences", (model.spec().padded_vocab(tp) // tp, hidden)),
    ]
    if model.qk_norm:
        found.append(("stream", layers, "tokens", (2 * 2 * (nh + nkv) * dh,)))
    if tp > 1:
        found.append(("allreduce", 2 * layers, "tokens", (2 * hidden,)))
    return found


def rows_us(plan: Any, tables: Any, num_tokens: int, num_seqs: int) -> float:
    """Every operator that depends on a number of rows alone, us."""
    launch_us, bytes_per_us = streaming(tables)
    total = 0.0
    for kind, calls, of, sizes in operators(plan.model, plan.tp, plan.dtype, plan.kv_dtype):
        rows = num_tokens if of == "tokens" else num_seqs
        if kind == "stream":
            one = launch_us + rows * sizes[0] / bytes_per_us
        elif kind == "allreduce":
            message = int(rows * sizes[0])
            found = tables.lookup("allreduce", method=plan.method, num_gpus=plan.tp, message_bytes=message)
            one = float(found.latency_us)
        else:
            n, k = (int(s) for s in sizes)
            dtype = "bf16" if kind == "logits" else plan.dtype
            one = float(tables.lookup("gemm", method=plan.method, m=rows, n=n, k=k, dtype=dtype).latency_us)
        total += calls * one
    return total


def attention_us(plan: Any, tables: Any, operator: str, **sizes: int) -> float:
    """Attention of all layers from one lookup, us."""
    model = DenseModel.of(plan.model)
    nh, nkv = model.num_q_heads // plan.tp, max(1, model.num_kv_heads // plan.tp)
    found = tables.lookup(
        operator,
        method=plan.method,
        num_q_heads=nh,
        num_kv_heads=nkv,
        head_dim=model.head_dim,
        kv_dtype=plan.kv_dtype,
        **sizes,
    )
    return model.num_layers * float(found.latency_us)


def decode_us(plan: Any, tables: Any, batch_size: int, kv_len: int) -> float:
    attention = attention_us(plan, tables, "attention_decode", batch_size=batch_size, kv_len=kv_len)
    return rows_us(plan, tables, batch_size, batch_size) + attention


def prefill_us(plan: Any, tables: Any, new_tokens: int, context_len: int, batch_size: int) -> float:
    if new_tokens == 1 and context_len > 0:
        return decode_us(plan, tables, batch_size, context_len + 1)
    sizes = {"batch_size": batch_size, "q_len": new_tokens, "kv_len": new_tokens + context_len}
    attention = attention_us(plan, tables, "attention_prefill", **sizes)
    return rows_us(plan, tables, batch_size * new_tokens, batch_size) + attention


def ragged_us(plan: Any, tables: Any, requests: Sequence[Request]) -> float:
    """Time of a mixed step on a measured head shape, us: its attention from the naive lookups."""
    if not requests:
        return 0.0
    total = rows_us(plan, tables, sum(q for q, _ in requests), len(requests))
    heads, layers = tuple(plan.heads)[:4], plan.model.num_layers
    decodes = [ctx + 1 for q, ctx in requests if q == 1 and ctx > 0]
    chunks = [(q, ctx) for q, ctx in requests if not (q == 1 and ctx > 0)]
    if decodes:
        points = lookups.points_of(tables, "attention_decode", (*heads, 0))
        table = lookups.Attention(points, lookups.decode_work(tables.gpu, heads), is_decode=True)
        total += layers * table.latency(float(len(decodes)), sum(decodes) / len(decodes))[0]
    if chunks:
        table = prefill_table(tables, heads)
        new = sum(q for q, _ in chunks)
        q_len = 2.0 * sum(q * (q + 1) // 2 for q, _ in chunks) / new - 1.0
        pairs, prefix = sum(q * ctx for q, ctx in chunks), sum(ctx for _, ctx in chunks)
        own = table.latency(new / q_len, q_len)[0]
        total += layers * (own + lookups.prefix_us(tables.gpu, heads, table.longest_ratio(), pairs, prefix))
    return total


def prefill_table(tables: Any, heads: tuple[Any, ...]) -> lookups.Attention:
    """Prefill attention of a measured head shape, its rows without a prefix."""
    points = lookups.points_of(tables, "attention_prefill", (*heads, 0))
    square = {(b, q): us for (b, q, kv), us in points.items() if q == kv}
    return lookups.Attention(square, lookups.prefill_work(tables.gpu, heads), is_decode=False)
