"""The C functions of a plan file, as fastroof_step.h declares them: the loops with C's calling convention.

Compiled by fastroof.backends.c into an object file that needs no Python, so nothing here allocates or
raises. A plan is the address of its file's bytes. What opens a file calls the C library.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]

from fastroof.compiled import plan_files
from fastroof.compiled.callers import equal_chunks_us, equal_decodes_us, requests_step_us
from fastroof.compiled.intrinsics import pointer_at, stack_words
from fastroof.compiled.jit import jit_inline
from fastroof.compiled.plan_files import (
    ARENA_FLOATS,
    BODY,
    CODE_FOREIGN,
    CODE_IO,
    FACTS_AT,
    FILE_BYTES,
    FILE_HEADER,
    plan_bytes_code,
)
from fastroof.compiled.ragged_steps import ragged_steps_us
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.compiled.steps import CODE_SIZES, MAX_SEQS, MAX_TOKENS, general_decode_steps_us, open_plan
from fastroof.compiled.verification import speculation_at, verified_us

_t: Any = types  # numba's types have few types

ABI_VERSION: Final = 1
"""FASTROOF_ABI of fastroof_step.h; changes when programs built with an older header would break."""

C_LIBRARY: Final = ("open", "close", "lseek", "mmap", "munmap")
"""POSIX constants for opening a file."""

_SEEK_END, _PROT_READ, _MAP_SHARED, _MAP_FAILED = 2, 1, 1, -1
# do not wait for a pipe's other end: a pipe has no size and is refused
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def _external(name: str, returns: Any, *takes: Any) -> Any:
    return _t.ExternalFunction(name, returns(*takes))


# only O_CREAT takes a variable argument
_libc_open = _external("open", _t.int32, _t.intp, _t.int32)
_libc_close = _external("close", _t.int32, _t.int32)
_lseek = _external("lseek", _t.intp, _t.int32, _t.intp, _t.int32)
_mmap = _external("mmap", _t.intp, _t.intp, _t.intp, _t.int32, _t.int32, _t.int32, _t.intp)
_munmap = _external("munmap", _t.int32, _t.intp, _t.intp)


@jit_inline
def plan_word(plan: int, word: int) -> Any:
    """Read a header word of the plan file at an address."""
    return carray(pointer_at(plan), (FILE_HEADER // 8,), np.int64)[word]


@jit_inline
def plan_arena(plan: int) -> Any:
    """Return the arena of the plan file at an address."""
    return carray(pointer_at(plan + FILE_HEADER), (plan_word(plan, ARENA_FLOATS),), np.float64)


@jit_inline
def sizes_at(address: int, count: int) -> Any:
    """Return an array of int64 at an address."""
    return carray(pointer_at(address), (count,), np.int64)


@jit_inline
def _bytes_code(data: int, size: int) -> int:
    at: Any = pointer_at(data)
    eights = size // 8
    code: int = plan_bytes_code(
        carray(at, (size,), np.uint8), carray(at, (eights,), np.int64), carray(at, (eights,), np.float64)
    )
    return code


@jit_inline
def _one(time_us: float, step_us: Any) -> int:
    if np.isnan(time_us):
        return CODE_SIZES
    step_us[0] = time_us
    return 0


def _abi_version() -> int:
    return ABI_VERSION


def _open_bytes(data: int, size: int, plan: Any) -> int:
    if data == 0 or data % 8 != 0:
        return CODE_IO
    code = _bytes_code(data, max(size, 0))
    if code == 0:
        plan[0] = data
    return code


def _open(path: int, plan: Any) -> int:
    if path == 0:
        return CODE_IO
    file = _libc_open(path, _READ)
    if file < 0:
        return CODE_IO
    size = _lseek(file, 0, _SEEK_END)
    data = _MAP_FAILED
    if size > 0:
        data = _mmap(0, size, _PROT_READ, _MAP_SHARED, file, 0)
    _libc_close(file)
    if data == _MAP_FAILED:
        return CODE_FOREIGN if size == 0 else CODE_IO
    code = _bytes_code(data, size)
    if code == 0:
        plan[0] = data
    else:
        _munmap(data, size)
    return code


def _close(plan: int) -> None:
    if plan != 0:
        _munmap(plan, plan_word(plan, FILE_BYTES))


def _max_tokens(plan: int) -> int:
    return int(plan_arena(plan)[MAX_TOKENS])


def _max_seqs(plan: int) -> int:
    return int(plan_arena(plan)[MAX_SEQS])


def _describe(plan: int) -> int:
    return plan + FILE_HEADER + 8 * int(plan_word(plan, ARENA_FLOATS))


def _decode_us(plan: int, batch_size: int, kv_len: int, step_us: Any) -> int:
    return _one(equal_decodes_us(plan_arena(plan), batch_size, kv_len), step_us)


def _prefill_us(plan: int, new_tokens: int, context_len: int, batch_size: int, step_us: Any) -> int:
    return _one(equal_chunks_us(plan_arena(plan), new_tokens, context_len, batch_size), step_us)


def _step_us(plan: int, new_tokens: int, context_len: int, num_requests: int, step_us: Any) -> int:
    if num_requests < 0:
        return CODE_SIZES
    new, context = sizes_at(new_tokens, num_requests), sizes_at(context_len, num_requests)
    return _one(requests_step_us(plan_arena(plan), new, context), step_us)


def _decode_steps_us(plan: int, batch_size: int, kv_len: int, num_steps: int, step_us: Any) -> int:
    count = max(num_steps, 0)
    return general_decode_steps_us(
        plan_arena(plan), sizes_at(batch_size, count), sizes_at(kv_len, count), carray(step_us, (count,))
    )


def _steps_us(
    plan: int,
    new_tokens: int,
    context_len: int,
    num_requests: int,
    offsets: int,
    num_steps: int,
    step_us: Any,
) -> int:
    steps, requests = max(num_steps, 0), max(num_requests, 0)
    return ragged_steps_us(
        plan_arena(plan),
        sizes_at(new_tokens, requests),
        sizes_at(context_len, requests),
        sizes_at(offsets, steps + 1),
        carray(step_us, (steps,)),
    )


_PLAN, _SIZE, _ARRAY, _CODE = _t.intp, _t.int64, _t.intp, _t.int32
_TIMES: Final = _t.CPointer(_t.float64)
_NEW_PLAN: Final = _t.CPointer(_t.intp)

C_FUNCTIONS: Final[dict[str, tuple[Callable[..., Any], Any]]] = {
    "fastroof_abi_version": (_abi_version, _t.int32()),
    "fastroof_open": (_open, _CODE(_t.intp, _NEW_PLAN)),
    "fastroof_close": (_close, _t.void(_PLAN)),
    "fastroof_open_bytes": (_open_bytes, _CODE(_t.intp, _SIZE, _NEW_PLAN)),
    "fastroof_max_tokens": (_max_tokens, _SIZE(_PLAN)),
    "fastroof_max_seqs": (_max_seqs, _SIZE(_PLAN)),
    "fastroof_describe": (_describe, _t.intp(_PLAN)),
    "fastroof_decode_us": (_decode_us, _CODE(_PLAN, _SIZE, _SIZE, _TIMES)),
    "fastroof_prefill_us": (_prefill_us, _CODE(_PLAN, _SIZE, _SIZE, _SIZE, _TIMES)),
    "fastroof_step_us": (_step_us, _CODE(_PLAN, _ARRAY, _ARRAY, _SIZE, _TIMES)),
    "fastroof_decode_steps_us": (_decode_steps_us, _CODE(_PLAN, _ARRAY, _ARRAY, _SIZE, _TIMES)),
    "fastroof_steps_us": (_steps_us, _CODE(_PLAN, _ARRAY, _ARRAY, _SIZE, _ARRAY, _SIZE, _TIMES)),
}
"""Exports of the object file: each loop and its C signature, pointers as integers of their size."""


CODE_ABSENT, CODE_UNLIKE = 15, 24
"""Codes of fastroof_step.h: not in the file; plans with incompatible KV caches."""


_MEMORY_WORDS = 12
_MEMORY = (
    plan_files.WEIGHT_BYTES, plan_files.KV_BYTES, plan_files.ACTIVATION_BYTES, plan_files.RESERVE_BYTES,
    plan_files.CONTEXT_BYTES, plan_files.MAX_KV_TOKENS, plan_files.KV_WINDOW, plan_files.WINDOW_KV_BYTES,
    plan_files.STATE_BYTES, plan_files.MODEL_KV_BYTES, plan_files.MODEL_WINDOW_KV_BYTES,
    plan_files.MODEL_STATE_BYTES,
)  # fmt: skip
"""Memory fields in the order of fastroof_memory_of."""

_LAYOUT_WORDS = 6

_KEPT_WORDS: Final = 2 * plan_files.MAX_STAGES + 1


@jit_inline
def facts_address(plan: int) -> int:
    """Return the address of a file's facts, 0 without facts."""
    at = plan_word(plan, FACTS_AT)
    return 0 if at == 0 else plan + FILE_HEADER + 8 * at


@jit_inline
def _facts(address: int) -> Any:
    return carray(pointer_at(address), (plan_files.FACTS_WORDS,), np.int64)


@jit_inline
def plan_body(plan: int) -> Any:
    """Return a file from its arena on, as float64."""
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
        out[i] = facts[plan_files.TP + i]
    return 0


@jit_inline
def _model_bytes(facts: Any, kv_len: int) -> int:
    return plan_files.held_bytes(
        facts[plan_files.MODEL_KV_BYTES],
        facts[plan_files.MODEL_WINDOW_KV_BYTES],
        facts[plan_files.KV_WINDOW],
        facts[plan_files.MODEL_STATE_BYTES],
        kv_len,
    )


def _kv_bytes(plan: int, kv_len: int, gpu_bytes: Any, model_bytes: Any) -> int:
    address = facts_address(plan)
    if address == 0:
        return CODE_ABSENT
    if kv_len < 0 or kv_len > MAX_KV_LEN:
        return CODE_SIZES
    facts = _facts(address)
    gpu_bytes[0] = plan_files.held_bytes(
        facts[plan_files.KV_BYTES],
        facts[plan_files.WINDOW_KV_BYTES],
        facts[plan_files.KV_WINDOW],
        facts[plan_files.STATE_BYTES],
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
        plan_files.MODEL_KV_BYTES,
        plan_files.MODEL_WINDOW_KV_BYTES,
        plan_files.KV_WINDOW,
        plan_files.MODEL_STATE_BYTES,
    ):
        if sender[slot] != receiver[slot]:
            return CODE_UNLIKE
    rate = bytes_per_s
    if rate == 0.0:
        link = plan_files.NVLINK_BYTES_PER_S
        rate = min(
            carray(pointer_at(one), (plan_files.FACTS_WORDS,), np.float64)[link],
            carray(pointer_at(other), (plan_files.FACTS_WORDS,), np.float64)[link],
        )
        if rate == 0.0:
            return CODE_SIZES
    gpus = min(
        sender[plan_files.TP] * sender[plan_files.PP], receiver[plan_files.TP] * receiver[plan_files.PP]
    )
    transfer_us[0] = plan_files.transfer_us(_model_bytes(receiver, kv_len), rate, gpus, latency_us)
    return 0


@jit_inline
def _stage_count(plan: int) -> int:
    address = facts_address(plan)
    return 1 if address == 0 else max(_facts(address)[plan_files.STAGES], 1)


@jit_inline
def _stage_at(plan: int, stage: int) -> int:
    """Return the plan of a stage with a valid number."""
    address = facts_address(plan)
    if address == 0 or _facts(address)[plan_files.STAGES] == 0:
        return plan
    start = plan + FILE_HEADER
    place: int = sizes_at(start + 8 * _facts(address)[plan_files.STAGES_AT], stage + 1)[stage]
    return start + 8 * place


def _num_stages(plan: int) -> int:
    return _stage_count(plan)


def _stage(plan: int, stage: int) -> int:
    return _stage_at(plan, stage) if 0 <= stage < _stage_count(plan) else 0


@jit_inline
def _piped_us(
    plan: int, new_tokens: int, context_len: int, num_requests: int, offsets: int, num_steps: int, kept: Any
) -> tuple[int, float, float]:
    """Return a code, when the last micro-batch leaves the last stage, and the longest time of all stages."""
    steps, requests, stages = max(num_steps, 0), max(num_requests, 0), _stage_count(plan)
    new, context = sizes_at(new_tokens, requests), sizes_at(context_len, requests)
    bounds = sizes_at(offsets, steps + 1)
    most = plan_files.MAX_STAGES
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
            before_us = plan_files.makespan_us(ends, stage, before_us, step_us[0])
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
    """Return where the verification data start, in words from the arena's start; 0 without them."""
    address = facts_address(plan)
    if address == 0 or _facts(address)[plan_files.VERIFICATION_SIZE] == 0:
        return 0
    return int(_facts(address)[plan_files.VERIFICATION_AT])


def _verify_us(plan: int, batch_size: int, kv_len: int, tokens: int, step_us: Any) -> int:
    at = _verification(plan)
    if at == 0:
        return CODE_ABSENT
    body = plan_body(plan)
    speculation = speculation_at(body, at)
    return _one(verified_us(body, open_plan(body), speculation, batch_size, kv_len, tokens), step_us)


_REAL = _t.float64
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
"""As in :data:`fastroof.compiled.c_api.C_FUNCTIONS`."""
