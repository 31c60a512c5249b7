"""A naive step of a model with layers of several kinds: one lookup per operator and kind, summed."""

from __future__ import annotations

import math
from typing import Any

from fastroof.models import ModelSpec
from fastroof.models.spec import step_calls
from fastroof.operators.calls import (
    AllReduce,
    AttentionCall,
    Collective,
    Dispatch,
    Experts,
    Gemm,
    LatentProduct,
    MixerCall,
    Parallel,
)
from fastroof.operators.registry import OPERATORS
from tests.reference import steps

Request = tuple[int, int]


def step_us(plan: Any, tables: Any, requests: list[Request]) -> float:
    """Sum of the lookups of every layer, us."""
    model: ModelSpec = plan.model
    calls = step_calls(model, plan.layout, plan.execution._replace(quantise_inputs=()))
    is_decode_only = all(new == 1 and context > 0 for new, context in requests)
    rows = {"tokens": sum(new for new, _ in requests), "sequences": len(requests)}
    rows["expert_tokens"] = math.ceil(rows["tokens"] * plan.layout.dp / plan.execution.dp_imbalance)
    total = sum(
        _call_us(tables, call, rows, requests, is_decode_only) for call in (*calls.before, *calls.after)
    )
    for group, of_layer in zip(model.layers, calls.layers, strict=True):
        for _ in range(group.count):
            total += sum(_call_us(tables, call, rows, requests, is_decode_only) for call in of_layer)
    return total


def _call_us(tables: Any, call: Any, rows: dict[str, int], requests: list[Request], alone: bool) -> float:
    if isinstance(call, Parallel):
        paths = [sum(_call_us(tables, c, rows, requests, alone) for c in path) for path in call.paths]
        return sum(paths) if 0 < call.most_tokens < rows["tokens"] else max(paths)
    if isinstance(call, AttentionCall):
        return call.times * _attention_us(tables, call, requests)
    if isinstance(call, MixerCall):
        return call.times * _mixer_us(tables, call, requests)
    if call.steps == ("with_prefill" if alone else "decode_only"):
        return 0.0
    count = rows[call.rows]
    if isinstance(call, Gemm):
        us = tables.lookup("gemm", m=count, n=call.n, k=call.k, dtype=call.dtype).latency_us
    elif isinstance(call, Experts):
        names = ("dtype", "hidden", "intermediate", "topk", "num_experts", "moe_ep", "distribution")
        shape = {name: getattr(call, name) for name in names}
        if call.sends:
            shape |= {"phase": call.phase}
        else:
            shape |= {"num_slots": call.num_slots, "phase": "any"} if call.phase else {"moe_tp": call.moe_tp}
        us = tables.lookup(call.operator, num_tokens=count, **shape).latency_us
    elif isinstance(call, AllReduce):
        message_bytes = int(count * call.row_bytes)
        us = tables.lookup("allreduce", num_gpus=call.num_gpus, message_bytes=message_bytes).latency_us
    elif isinstance(call, Collective):
        size = {"num_gpus": call.num_gpus, "message_bytes": int(count * call.row_bytes)}
        us = tables.lookup("collective", collective=call.collective, **size).latency_us
    elif isinstance(call, Dispatch):
        names = ("library", "phase", "comm_dtype", "hidden", "topk", "num_experts", "num_gpus")
        shape = {name: getattr(call, name) for name in names}
        assert count % call.shared_by == 0
        us = tables.lookup("expert_dispatch", num_tokens=count // call.shared_by, **shape).latency_us
    elif isinstance(call, LatentProduct):
        us = _product_us(tables, call, count)
    else:
        launch_us, bytes_per_us = steps.streaming(tables)
        us = launch_us + count * call.row_bytes / bytes_per_us
    return call.times * float(us)


def _product_us(tables: Any, call: LatentProduct, count: int) -> float:
    """Weights in fp8 are multiplied in fp8 where the first source has such products."""
    formats = set(tables.table("mla_bmm").columns["dtype"])
    dtype = "fp8" if call.dtype.startswith("fp8") and "fp8" in formats else "bf16"
    shape = {"part": call.part, "num_heads": call.num_heads, "dtype": dtype}
    return float(tables.lookup("mla_bmm", num_tokens=count, **shape).latency_us)


def _mixer_us(tables: Any, call: MixerCall, requests: list[Request]) -> float:
    """Equal decodes and equal prompts without a prefix, of kernels that were measured."""
    decodes = [context + 1 for new, context in requests if new == 1 and context > 0]
    chunks = [new for new, context in requests if not (new == 1 and context > 0)]
    assert len(set(decodes)) <= 1
    assert len(set(chunks)) <= 1
    total = 0.0
    for kernel, lengths in ((call.decode, decodes), (call.prefill, chunks)):
        if kernel is None or not lengths:
            continue
        operator = OPERATORS[kernel.operator]
        names = dict(zip((column.name for column in operator.keys), kernel.key, strict=True))
        sizes = {"batch_size": len(lengths), "q_len": lengths[0], "kv_len": lengths[0]}
        if kernel is call.decode:
            sizes["q_len"] = 1
        named = {name: sizes[name] for name in operator.axis_names}
        total += float(tables.lookup(kernel.operator, **names, **named).latency_us)
    return total


def _attention_us(tables: Any, call: AttentionCall, requests: list[Request]) -> float:
    heads: dict[str, Any] = {
        "num_q_heads": call.num_q_heads,
        "num_kv_heads": call.num_kv_heads,
        "head_dim": call.head_dim,
        "kv_dtype": call.kv_dtype,
    }
    total = 0.0
    decodes = [context + 1 for new, context in requests if new == 1 and context > 0]
    chunks = [new for new, context in requests if not (new == 1 and context > 0)]
    if decodes:
        # equal decodes: lookups are at whole sizes
        assert len(set(decodes)) == 1
        found = tables.lookup("attention_decode", batch_size=len(decodes), kv_len=decodes[0], **heads)
        total += float(found.latency_us)
    if chunks:
        assert len(set(chunks)) == 1
        found = tables.lookup(
            "attention_prefill", q_len=chunks[0], kv_len=chunks[0], batch_size=len(chunks), **heads
        )
        total += float(found.latency_us)
    return total
