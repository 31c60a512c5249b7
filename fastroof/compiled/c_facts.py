"""What a plan file says beside a plan's steps, in C: memory, transfers, pipeline stages, verification.

As :mod:`fastroof.compiled.c_steps`: nothing here allocates or raises. A file of version 1 has none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]

from fastroof.compiled import plan_parts as parts
from fastroof.compiled.c_steps import plan_arena, plan_word, sizes_at
from fastroof.compiled.intrinsics import pointer_at, stack_words
from fastroof.compiled.jit import jit_inline
from fastroof.compiled.plan_files import BODY, FACTS_AT, FILE_BYTES, FILE_HEADER
from fastroof.compiled.ragged_steps import ragged_steps_us
from fastroof.compiled.steps import CODE_SIZES, MAX_KV_LEN, open_plan
from fastroof.compiled.verification import speculation_at, verified_us

__all__ = ["CODE_ABSENT", "CODE_UNLIKE", "C_FACTS", "facts_address", "plan_body"]

CODE_ABSENT, CODE_UNLIKE = 15, 24
"""The file does not hold it; plans of which one cannot take the other's KV cache. As fastroof_step.h."""

_t: Any = types  # numba's types have few types

_MEMORY_WORDS = 12
_MEMORY = (
    parts.WEIGHT_BYTES,
    parts.KV_BYTES,
    parts.ACTIVATION_BYTES,
    parts.RESERVE_BYTES,
    parts.CONTEXT_BYTES,
    parts.MAX_KV_TOKENS,
    parts.KV_WINDOW,
    parts.WINDOW_KV_BYTES,
    parts.STATE_BYTES,
    parts.MODEL_KV_BYTES,
    parts.MODEL_WINDOW_KV_BYTES,
    parts.MODEL_STATE_BYTES,
)
"""In the order of fastroof_memory_of."""

_LAYOUT_WORDS = 6

_KEPT_WORDS: Final = 2 * parts.MAX_STAGES + 1


@jit_inline
def facts_address(plan: int) -> int:
    """Where a file's facts are; 0 where it has none."""
    at = plan_word(plan, FACTS_AT)
    return 0 if at == 0 else plan + FILE_HEADER + 8 * at


@jit_inline
def _facts(address: int) -> Any:
    return carray(pointer_at(address), (parts.FACTS_WORDS,), np.int64)


@jit_inline
def plan_body(plan: int) -> Any:
    """A file from its arena on, as float64."""
    words = plan_word(plan, FILE_BYTES) // 8 - BODY
    return carray(pointer_at(plan + FILE_HEADER), (words,), np.float64)


def _memory(plan: int, memory: int) -> int:
    address = facts_address(plan)
    if address == 0:
        return CODE_ABSENT
    facts, out = _facts(address), sizes_at(memory, _MEMORY_WORDS)
    for i in range(_MEMORY_WORDS):
        out[i] = facts[_MEMORY[i]]
    return 0


def _layout(plan: int, layout: int) -> int:
    address = facts_address(plan)
    if address == 0:
        return CODE_ABSENT
    facts, out = _facts(address), sizes_at(layout, _LAYOUT_WORDS)
    for i in range(_LAYOUT_WORDS):
        out[i] = facts[parts.TP + i]
    return 0


@jit_inline
def _model_bytes(facts: Any, kv_len: int) -> int:
    return parts.held_bytes(
        facts[parts.MODEL_KV_BYTES],
        facts[parts.MODEL_WINDOW_KV_BYTES],
        facts[parts.KV_WINDOW],
        facts[parts.MODEL_STATE_BYTES],
        kv_len,
    )


def _kv_bytes(plan: int, kv_len: int, gpu_bytes: Any, model_bytes: Any) -> int:
    address = facts_address(plan)
    if address == 0:
        return CODE_ABSENT
    if kv_len < 0 or kv_len > MAX_KV_LEN:
        return CODE_SIZES
    facts = _facts(address)
    gpu_bytes[0] = parts.held_bytes(
        facts[parts.KV_BYTES],
        facts[parts.WINDOW_KV_BYTES],
        facts[parts.KV_WINDOW],
        facts[parts.STATE_BYTES],
        kv_len,
    )
    model_bytes[0] = _model_bytes(facts, kv_len)
    return 0


def _kv_transfer_us(
    prefill: int, decode: int, kv_len: int, bytes_per_s: float, latency_us: float, transfer_us: Any
) -> int:
    one, other = facts_address(prefill), facts_address(decode)
    if one == 0 or other == 0:
        return CODE_ABSENT
    if not (0 <= kv_len <= MAX_KV_LEN and 0.0 <= bytes_per_s < np.inf and 0.0 <= latency_us < np.inf):
        return CODE_SIZES
    sender, receiver = _facts(one), _facts(other)
    for slot in (
        parts.MODEL_KV_BYTES,
        parts.MODEL_WINDOW_KV_BYTES,
        parts.KV_WINDOW,
        parts.MODEL_STATE_BYTES,
    ):
        if sender[slot] != receiver[slot]:
            return CODE_UNLIKE
    rate = bytes_per_s
    if rate == 0.0:
        link = parts.NVLINK_BYTES_PER_S
        rate = min(
            carray(pointer_at(one), (parts.FACTS_WORDS,), np.float64)[link],
            carray(pointer_at(other), (parts.FACTS_WORDS,), np.float64)[link],
        )
        if rate == 0.0:
            return CODE_SIZES
    gpus = min(sender[parts.TP] * sender[parts.PP], receiver[parts.TP] * receiver[parts.PP])
    transfer_us[0] = parts.transfer_us(_model_bytes(receiver, kv_len), rate, gpus, latency_us)
    return 0


@jit_inline
def _stage_count(plan: int) -> int:
    address = facts_address(plan)
    return 1 if address == 0 else max(_facts(address)[parts.STAGES], 1)


@jit_inline
def _stage_at(plan: int, stage: int) -> int:
    """A stage's plan, its number known to be one."""
    address = facts_address(plan)
    if address == 0 or _facts(address)[parts.STAGES] == 0:
        return plan
    start = plan + FILE_HEADER
    place: int = sizes_at(start + 8 * _facts(address)[parts.STAGES_AT], stage + 1)[stage]
    return start + 8 * place


def _num_stages(plan: int) -> int:
    return _stage_count(plan)


def _stage(plan: int, stage: int) -> int:
    return _stage_at(plan, stage) if 0 <= stage < _stage_count(plan) else 0


@jit_inline
def _piped_us(
    plan: int, new_tokens: int, context_len: int, num_requests: int, offsets: int, num_steps: int, kept: Any
) -> tuple[int, float, float]:
    """A code, when the last micro-batch leaves the last stage, and the longest of all stages together."""
    steps, requests, stages = max(num_steps, 0), max(num_requests, 0), _stage_count(plan)
    new, context = sizes_at(new_tokens, requests), sizes_at(context_len, requests)
    bounds = sizes_at(offsets, steps + 1)
    most = parts.MAX_STAGES
    busy, ends, step_us = kept[:most], kept[most : 2 * most], kept[2 * most :]
    for stage in range(stages):
        busy[stage] = 0.0
        ends[stage] = 0.0
    last_us = longest_us = 0.0
    for i in range(steps):
        before_us = batch_us = 0.0
        for stage in range(stages):
            arena = plan_arena(_stage_at(plan, stage))
            code = ragged_steps_us(arena, new, context, bounds[i : i + 2], step_us)
            if code != 0:
                return code, 0.0, 0.0
            before_us = parts.makespan_us(ends, stage, before_us, step_us[0])
            busy[stage] += step_us[0]
            batch_us += step_us[0]
        last_us = before_us
        longest_us = max(longest_us, batch_us)
    for stage in range(stages):
        longest_us = max(longest_us, busy[stage])
    return 0, last_us, longest_us


def _pipeline_us(
    plan: int,
    new_tokens: int,
    context_len: int,
    num_requests: int,
    offsets: int,
    num_steps: int,
    pipeline_us: Any,
    cycle_us: Any,
) -> int:
    words: Any = stack_words(_KEPT_WORDS)
    kept = carray(words, (_KEPT_WORDS,), np.float64)
    code, last_us, longest_us = _piped_us(
        plan, new_tokens, context_len, num_requests, offsets, num_steps, kept
    )
    if code == 0:
        pipeline_us[0] = last_us
        cycle_us[0] = longest_us
    return code


@jit_inline
def _verification(plan: int) -> int:
    """Where what verification reads starts, in words from the arena's start; 0 where it is not there."""
    address = facts_address(plan)
    if address == 0 or _facts(address)[parts.VERIFICATION_SIZE] == 0:
        return 0
    return int(_facts(address)[parts.VERIFICATION_AT])


def _verify_us(plan: int, batch_size: int, kv_len: int, tokens: int, step_us: Any) -> int:
    at = _verification(plan)
    if at == 0:
        return CODE_ABSENT
    body = plan_body(plan)
    time_us = verified_us(body, open_plan(body), speculation_at(body, at), batch_size, kv_len, tokens)
    if np.isnan(time_us):
        return CODE_SIZES
    step_us[0] = time_us
    return 0


_PLAN, _SIZE, _ARRAY, _CODE, _REAL = _t.intp, _t.int64, _t.intp, _t.int32, _t.float64
_TIMES: Final = _t.CPointer(_t.float64)
_BYTES: Final = _t.CPointer(_t.int64)

C_FACTS: Final[dict[str, tuple[Callable[..., Any], Any]]] = {
    "fastroof_memory": (_memory, _CODE(_PLAN, _ARRAY)),
    "fastroof_layout": (_layout, _CODE(_PLAN, _ARRAY)),
    "fastroof_kv_bytes": (_kv_bytes, _CODE(_PLAN, _SIZE, _BYTES, _BYTES)),
    "fastroof_kv_transfer_us": (_kv_transfer_us, _CODE(_PLAN, _PLAN, _SIZE, _REAL, _REAL, _TIMES)),
    "fastroof_num_stages": (_num_stages, _SIZE(_PLAN)),
    "fastroof_stage": (_stage, _PLAN(_PLAN, _SIZE)),
    "fastroof_pipeline_us": (
        _pipeline_us,
        _CODE(_PLAN, _ARRAY, _ARRAY, _SIZE, _ARRAY, _SIZE, _TIMES, _TIMES),
    ),
    "fastroof_verify_us": (_verify_us, _CODE(_PLAN, _SIZE, _SIZE, _SIZE, _TIMES)),
}
"""As in :data:`fastroof.compiled.c_steps.C_FUNCTIONS`."""
