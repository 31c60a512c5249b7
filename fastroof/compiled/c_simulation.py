"""A whole engine in C, as fastroof_step.h declares it: the loop of fastroof.simulate in the caller's memory.

Nothing here allocates. An engine is a struct of 8-byte words, whose indices are named below. The memory is
divided into the loop's arrays in a fixed order, which also determines how much is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]

from fastroof.compiled.c_api import plan_arena
from fastroof.compiled.intrinsics import pointer_at
from fastroof.compiled.jit import jit_inline
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.compiled.simulation.engine import engine_run
from fastroof.compiled.simulation.state import (
    BUSY_US,
    CACHED_TOKENS,
    DECODE_TOKENS,
    FIRST_SIZE,
    FRESH_SIZE,
    GAP_BINS,
    LEAST_FREE,
    MIXED_STEPS,
    NOW,
    NUM_CLOCKS,
    NUM_FIELDS,
    NUM_SCALARS,
    PEAK_RUNNING,
    PEAK_WAITING,
    PREEMPTIONS,
    PREFILL_STEPS,
    PREFILL_TOKENS,
    SERIES_BINS,
    SERIES_FIELDS,
    STEPS,
    WAITING_PLACE,
    CallerOptions,
    EngineState,
    Record,
    Requests,
    Served,
    shift_of,
)
from fastroof.compiled.steps import MAX_SEQS, MAX_TOKENS, WINDOW

# fastroof_step.h names the same codes.
CODE_ENGINE, CODE_REQUEST, CODE_TOO_LONG, CODE_MEMORY = 20, 21, 22, 23

# words of struct fastroof_engine
(
    BUDGET,
    SEQS,
    BLOCKS,
    BLOCK_SIZE,
    IS_CHUNKED,
    ADMITS_WHOLE,
    RESERVES_OUTPUT,
    PREFILL_FIRST,
    IS_ASYNCHRONOUS,
    CLIENTS,
    THINK_US,
    TIMEOUT_US,
    TIME_SCALE,
) = range(13)
ENGINE_WORDS: Final = 16

_COUNTED: Final = np.array(
    [
        STEPS,
        MIXED_STEPS,
        PREFILL_STEPS,
        PREEMPTIONS,
        PREFILL_TOKENS,
        DECODE_TOKENS,
        CACHED_TOKENS,
        PEAK_RUNNING,
        PEAK_WAITING,
        LEAST_FREE,
    ]
)
"""Scalars of an engine in the order of struct fastroof_served; after them busy_us and end_us."""

SERVED_WORDS: Final = 12

_t: Any = types  # numba's types have few types
_LARGEST: Final = 2**31 - 1
_MOST_BLOCKS: Final = 2**40
_MOST_TOKENS: Final = 2**24
_LONGEST_US: Final = 1e16
_FIRST_WIDTH_US: Final = 1e3
_PAGE: Final = 64
"""Alignment of arrays, bytes."""


@jit_inline
def _is_engine(words: Any, reals: Any) -> bool:
    if words[BUDGET] < 1 or words[BUDGET] > _LARGEST or words[SEQS] < 1 or words[SEQS] > _LARGEST:
        return False
    if words[PREFILL_FIRST] == 0 and words[SEQS] > words[BUDGET]:
        return False
    if words[BLOCKS] < 1 or words[BLOCKS] > _MOST_BLOCKS:
        return False
    if words[BLOCK_SIZE] < 1 or words[BLOCK_SIZE] > _MOST_TOKENS:
        return False
    for flag in range(IS_CHUNKED, CLIENTS):
        if words[flag] < 0 or words[flag] > 1:
            return False
    if words[PREFILL_FIRST] == 1 and words[ADMITS_WHOLE] == 0:
        return False
    return bool(
        0 <= words[CLIENTS] <= _LARGEST
        and 0.0 <= reals[THINK_US] <= _LONGEST_US
        and reals[TIMEOUT_US] > 0.0
        and 0.0 < reals[TIME_SCALE] < math.inf
    )


@jit_inline
def _buckets(longest_output: int) -> int:
    """Return the number of calendar buckets: a power of two above the longest output."""
    buckets = 8
    while buckets <= longest_output + 4:
        buckets *= 2
    return buckets


@jit_inline
def _after(at: int, count: int, width: int) -> int:
    """Return where the next array starts."""
    return at + (count * width + _PAGE - 1) // _PAGE * _PAGE


def _simulate_bytes(engine: int, num_requests: int, longest_output: int) -> int:
    if engine == 0 or num_requests < 0 or num_requests > _LARGEST:
        return -1
    words, reals = _engine_words(engine), _engine_reals(engine)
    if not _is_engine(words, reals) or longest_output < 0 or longest_output > _MOST_TOKENS:
        return -1
    return _memory_bytes(
        max(min(words[SEQS], num_requests), 1), words[BLOCK_SIZE], num_requests, longest_output
    )


@jit_inline
def _memory_bytes(slots: int, block_size: int, num_requests: int, longest_output: int) -> int:
    at = _PAGE  # the caller's memory may start anywhere
    at = _after(at, NUM_SCALARS + NUM_CLOCKS, 8)
    at = _after(at, NUM_FIELDS * slots, 8)
    at = _after(at, 2 * _buckets(longest_output), 4)
    at = _after(at, block_size, 4)
    at = _after(at, (FIRST_SIZE + FRESH_SIZE) * slots, 4)
    at = _after(at, num_requests, 8)
    for _ in range(5):
        at = _after(at, num_requests, 4)
    at = _after(at, GAP_BINS, 8)
    return _after(at, SERIES_BINS * SERIES_FIELDS + 1, 8)


@jit_inline
def _engine_words(engine: int) -> Any:
    return carray(pointer_at(engine), (ENGINE_WORDS,), np.int64)


@jit_inline
def _engine_reals(engine: int) -> Any:
    return carray(pointer_at(engine), (ENGINE_WORDS,), np.float64)


def _simulate(
    plan: int,
    engine: int,
    num_requests: int,
    arrival_us: int,
    input_tokens: int,
    output_tokens: int,
    cached_tokens: int,
    memory: int,
    memory_bytes: int,
    first_us: int,
    last_us: int,
    preemptions: int,
    status: int,
    served: int,
) -> int:
    words, reals = _engine_words(engine), _engine_reals(engine)
    arena = plan_arena(plan)
    if not _is_engine(words, reals):
        return CODE_ENGINE
    if words[SEQS] > arena[MAX_SEQS] or max(words[SEQS], words[BUDGET]) > arena[MAX_TOKENS]:
        return CODE_ENGINE
    if num_requests < 0 or num_requests > _LARGEST:
        return CODE_REQUEST
    count, block_size = num_requests, words[BLOCK_SIZE]
    slots_held = max(min(words[SEQS], count), 1)
    arrivals = carray(pointer_at(arrival_us), (count,), np.float64)
    prompts = carray(pointer_at(input_tokens), (count,), np.int32)
    outputs = carray(pointer_at(output_tokens), (count,), np.int32)
    given = carray(pointer_at(cached_tokens), (count,), np.int32)
    longest, before_us = 0, 0.0
    for i in range(count):
        cached = 0 if cached_tokens == 0 else given[i]
        if prompts[i] < 1 or prompts[i] > _MOST_TOKENS or outputs[i] < 1 or outputs[i] > _MOST_TOKENS:
            return CODE_REQUEST
        if cached < 0 or cached >= prompts[i] or not before_us <= arrivals[i] <= _LONGEST_US:
            return CODE_REQUEST
        tokens = prompts[i] + outputs[i]
        if (tokens + block_size - 1) // block_size > words[BLOCKS] or tokens > MAX_KV_LEN:
            return CODE_TOO_LONG
        if words[IS_CHUNKED] == 0:
            # a preempted request computes its output so far with its prompt
            whole = prompts[i] - cached if words[RESERVES_OUTPUT] == 1 else tokens - 1
            if whole > words[BUDGET]:
                return CODE_TOO_LONG
        before_us = arrivals[i]
        longest = max(longest, outputs[i])
    if memory == 0 or memory_bytes < _memory_bytes(slots_held, block_size, count, longest):
        return CODE_MEMORY
    at = (memory + _PAGE - 1) // _PAGE * _PAGE
    scalars = carray(pointer_at(at), (NUM_SCALARS,), np.int64)
    clock = carray(pointer_at(at + 8 * NUM_SCALARS), (NUM_CLOCKS,), np.float64)
    at = _after(at, NUM_SCALARS + NUM_CLOCKS, 8)
    slots = carray(pointer_at(at), (NUM_FIELDS, slots_held), np.int64)
    at = _after(at, NUM_FIELDS * slots_held, 8)
    buckets = _buckets(longest)
    calendar = carray(pointer_at(at), (2, buckets), np.int32)
    at = _after(at, 2 * buckets, 4)
    due = carray(pointer_at(at), (block_size,), np.int32)
    at = _after(at, block_size, 4)
    firsts = carray(pointer_at(at), (FIRST_SIZE, slots_held), np.int32)
    fresh = carray(pointer_at(at + 4 * FIRST_SIZE * slots_held), (FRESH_SIZE, slots_held), np.int32)
    at = _after(at, (FIRST_SIZE + FRESH_SIZE) * slots_held, 4)
    served_arrivals = carray(pointer_at(at), (count,), np.float64)
    at = _after(at, count, 8)
    cached = carray(pointer_at(at), (count,), np.int32)
    at = _after(at, count, 4)
    next_arrived = carray(pointer_at(at), (count,), np.int32)
    at = _after(at, count, 4)
    sent = carray(pointer_at(at), (count,), np.int32)
    at = _after(at, count, 4)
    next_preempted = carray(pointer_at(at), (count,), np.int32)
    at = _after(at, count, 4)
    place = carray(pointer_at(at), (count,), np.int32)
    at = _after(at, count, 4)
    gaps = carray(pointer_at(at), (GAP_BINS,), np.int64)
    at = _after(at, GAP_BINS, 8)
    series = carray(pointer_at(at), (SERIES_BINS, SERIES_FIELDS), np.float64)
    width_us = carray(pointer_at(at + 8 * SERIES_BINS * SERIES_FIELDS), (1,), np.float64)
    firsts_us = carray(pointer_at(first_us), (count,), np.float64)
    lasts_us = carray(pointer_at(last_us), (count,), np.float64)
    preempted = carray(pointer_at(preemptions), (count,), np.int32)
    statuses = carray(pointer_at(status), (count,), np.uint8)
    gaps[:] = 0
    series[:] = 0.0
    width_us[0] = _FIRST_WIDTH_US
    for i in range(count):
        served_arrivals[i] = arrivals[i]
        cached[i] = 0 if cached_tokens == 0 else given[i]
        sent[i] = 0
        place[i] = WAITING_PLACE
        firsts_us[i] = math.nan
        lasts_us[i] = math.nan
        preempted[i] = 0
        statuses[i] = 0
    # numba takes no condition among more than 15 arguments
    timeout_us = reals[TIMEOUT_US] if reals[TIMEOUT_US] < _LONGEST_US else math.inf
    options = CallerOptions(
        budget=words[BUDGET],
        max_seqs=words[SEQS],
        block_size=block_size,
        block_shift=shift_of(block_size),
        is_chunked=words[IS_CHUNKED],
        admits_whole=words[ADMITS_WHOLE],
        reserves_output=words[RESERVES_OUTPUT],
        prefill_first=words[PREFILL_FIRST],
        pause_steps=0,
        min_free_slots=0,
        depth=1 + words[IS_ASYNCHRONOUS],
        has_parents=0,
        has_cache=0,
        has_reserved=0,
        clients=words[CLIENTS],
        think_us=reals[THINK_US],
        timeout_us=timeout_us,
        time_scale=reals[TIME_SCALE],
        stop=scalars[NUM_SCALARS - 1 :],  # which nothing sets
        num_tiers=0,
        tiers=clock[:0],
        window=int(arena[WINDOW]),
    )
    # a plain trace has neither sessions nor a prefix cache
    none = firsts[:0]
    state = EngineState(scalars, clock, slots, calendar, due, firsts, fresh, none)
    requests = Requests(
        served_arrivals, prompts, outputs, cached, next_arrived, none, next_arrived[:0], none, clock[:0]
    )
    outcome = Served(firsts_us, lasts_us, preempted, statuses, sent, next_preempted, place, clock[:0])
    code = 0
    if count > 0:
        code = engine_run(
            arena, options, state, requests, outcome, Record(gaps, series, width_us), words[BLOCKS]
        )
    if code != 0:
        return CODE_TOO_LONG
    if words[CLIENTS] > 0:
        for i in range(count):
            arrivals[i] = served_arrivals[i]
    if served != 0:
        counts = carray(pointer_at(served), (SERVED_WORDS,), np.int64)
        times = carray(pointer_at(served), (SERVED_WORDS,), np.float64)
        for i in range(len(_COUNTED)):
            counts[i] = scalars[_COUNTED[i]] if count > 0 else 0
        times[len(_COUNTED)] = clock[BUSY_US] if count > 0 else 0.0
        times[len(_COUNTED) + 1] = clock[NOW] if count > 0 else 0.0
    return 0


_A, _N, _CODE = _t.intp, _t.int64, _t.int32

C_SIMULATION: Final[dict[str, tuple[Callable[..., Any], Any]]] = {
    "fastroof_simulate_bytes": (_simulate_bytes, _N(_A, _N, _N)),
    "fastroof_simulate": (
        _simulate,
        _CODE(_A, _A, _N, _A, _A, _A, _A, _A, _N, _A, _A, _A, _A, _A),
    ),
}
"""As in :data:`fastroof.compiled.c_api.C_FUNCTIONS`."""
