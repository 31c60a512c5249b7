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
from fastroof.compiled.simulation import records as R
from fastroof.compiled.simulation.records import NONE, CallerFeatures, Fleet
from fastroof.compiled.simulation.run import fleet_run
from fastroof.compiled.simulation.series import GAP_BINS, SERIES_BINS, SERIES_FIELDS
from fastroof.compiled.steps import MAX_SEQS, MAX_TOKENS, WINDOW

# fastroof_step.h names the same codes.
CODE_ENGINE, CODE_REQUEST, CODE_TOO_LONG, CODE_MEMORY = 20, 21, 22, 23

# words of struct fastroof_engine
BUDGET, SEQS, BLOCKS, BLOCK_SIZE = range(4)
IS_CHUNKED, ADMITS_WHOLE, RESERVES_OUTPUT, PREFILL_FIRST, IS_ASYNCHRONOUS = range(4, 9)
CLIENTS, THINK_US, TIMEOUT_US, TIME_SCALE = range(9, 13)
ENGINE_WORDS: Final = 16

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
def _shift_of(block_size: int) -> int:
    """Return the log2 of a block size, NONE if not a power of two."""
    if block_size & (block_size - 1) != 0:
        return NONE
    shift = 0
    while 1 << shift < block_size:
        shift += 1
    return shift


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


# numba reads a record's type from a global
_POOL, _REPLICA, _ENGINE, _RANK, _LANE, _LINE = R.POOL, R.REPLICA, R.ENGINE, R.RANK, R.LANE, R.LINE
_SLOT, _HELD, _FLIGHT, _BATCH, _REQUEST = R.SLOT, R.HELD_SLOT, R.FLIGHT, R.BATCH, R.REQUEST
_CHAIN, _SEGMENT, _TIER, _STORE = R.CHAIN, R.SEGMENT, R.TIER, R.STORE
_SERVER, _PASSING = R.SERVER, R.PASSING
_FOLLOWER, _TRANSFER, _SCALER, _LIFE = R.FOLLOWER, R.TRANSFER, R.SCALER, R.LIFE
_DRAFTED = R.DRAFTED
_ONCE: Final = (_POOL, _REPLICA, _ENGINE, _RANK, _LANE, _LINE)
_POOL_BYTES, _REPLICA_BYTES, _ENGINE_BYTES = (one.itemsize for one in _ONCE[:3])
_RANK_BYTES, _LANE_BYTES, _LINE_BYTES = (one.itemsize for one in _ONCE[3:])
_BATCH_BYTES, _FLIGHT_BYTES = _BATCH.itemsize, _FLIGHT.itemsize
_HELD_BYTES, _SLOT_BYTES = _HELD.itemsize, _SLOT.itemsize
_WIDTHS: Final = np.array(
    [
        sum(one.itemsize for one in _ONCE) + 8 * _PAGE,
        2 * (_FLIGHT.itemsize + _BATCH.itemsize + _PAGE) + 8 * (GAP_BINS + SERIES_BINS * SERIES_FIELDS + 3),
        _SLOT.itemsize,
        _HELD.itemsize,
        _REQUEST.itemsize,
    ]
)
"""Bytes of what an engine has once, in two parts; of a slot, of a place in a list of slots, of a request."""


@jit_inline
def _memory_bytes(slots: int, block_size: int, num_requests: int, longest_output: int) -> int:
    at = _PAGE + _WIDTHS[0] + _WIDTHS[1]  # the caller's memory may start anywhere
    at = _after(at, slots, _WIDTHS[2])
    at = _after(at, 3 * slots, _WIDTHS[3])
    at = _after(at, 2 * _buckets(longest_output), 4)
    at = _after(at, block_size, 4)
    return int(_after(at, num_requests, _WIDTHS[4]))


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
    needed = _memory_bytes(slots_held, block_size, count, longest) - _PAGE
    carray(pointer_at(at), (needed // 8,), np.int64)[:] = 0
    start = at
    pools = carray(pointer_at(at), (1,), _POOL)
    at = _after(at, 1, _POOL_BYTES)
    replicas = carray(pointer_at(at), (1,), _REPLICA)
    at = _after(at, 1, _REPLICA_BYTES)
    engines = carray(pointer_at(at), (1,), _ENGINE)
    at = _after(at, 1, _ENGINE_BYTES)
    ranks = carray(pointer_at(at), (1,), _RANK)
    at = _after(at, 1, _RANK_BYTES)
    lanes = carray(pointer_at(at), (1,), _LANE)
    at = _after(at, 1, _LANE_BYTES)
    line = carray(pointer_at(at), (1,), _LINE)
    at = _after(at, 1, _LINE_BYTES)
    flights = carray(pointer_at(at), (2,), _FLIGHT)
    at = _after(at, 2, _FLIGHT_BYTES)
    batches = carray(pointer_at(at), (1, 2), _BATCH)
    at = _after(at, 2, _BATCH_BYTES)
    gaps = carray(pointer_at(at), (1, GAP_BINS), np.int64)
    at += 8 * GAP_BINS
    series = carray(pointer_at(at), (1, SERIES_BINS, SERIES_FIELDS), np.float64)
    at += 8 * SERIES_BINS * SERIES_FIELDS
    width_us = carray(pointer_at(at), (1,), np.float64)
    stop = carray(pointer_at(at + 8), (1,), np.int64)  # which nothing sets
    parts = carray(pointer_at(at + 16), (1, 2, 1), np.uint8)
    at = _after(at, 3, 8)
    slots = carray(pointer_at(at), (slots_held,), _SLOT)
    at = _after(at, slots_held, _SLOT_BYTES)
    firsts = carray(pointer_at(at), (2, slots_held), _HELD)
    fresh = carray(pointer_at(at + 2 * slots_held * _HELD_BYTES), (slots_held,), _HELD)
    at = _after(at, 3 * slots_held, _HELD_BYTES)
    buckets = _buckets(longest)
    calendar = carray(pointer_at(at), (buckets,), np.int32)
    filled = carray(pointer_at(at + 4 * buckets), (buckets,), np.int32)
    at = _after(at, 2 * buckets, 4)
    due = carray(pointer_at(at), (block_size,), np.int32)
    at = _after(at, block_size, 4)
    requests = carray(pointer_at(at), (1, count), _REQUEST)
    for i in range(count):
        row = requests[0, i]
        row.arrival_us, row.first_us, row.last_us = arrivals[i], math.nan, math.nan
        row.input_tokens, row.output_tokens = prompts[i], outputs[i]
        row.cached_tokens = 0 if cached_tokens == 0 else given[i]
        row.next_sent, row.next_preempted, row.place, row.engine = NONE, NONE, NONE, NONE
    pool, engine_row, rank, lane = pools[0], engines[0], ranks[0], lanes[0]
    pool.budget, pool.max_num_seqs, pool.num_blocks = words[BUDGET], words[SEQS], words[BLOCKS]
    pool.block_size, pool.block_shift = block_size, _shift_of(block_size)
    pool.is_chunked, pool.admits_whole = words[IS_CHUNKED], words[ADMITS_WHOLE]
    pool.reserves_output, pool.prefill_first = words[RESERVES_OUTPUT], words[PREFILL_FIRST]
    pool.depth, pool.window = 1 + words[IS_ASYNCHRONOUS], int(arena[WINDOW])
    pool.stages, pool.shares_slots, pool.ranks, pool.engines_each, pool.verified = 1, 1, 1, 1, 1
    pool.num_engines, pool.num_replicas, pool.arena_size, pool.scaler = 1, 1, len(arena), NONE
    # numba takes no condition among more than 15 arguments
    pool.timeout_us = reals[TIMEOUT_US] if reals[TIMEOUT_US] < _LONGEST_US else math.inf
    pool.time_scale = reals[TIME_SCALE]
    engine_row.next_us = engine_row.least_us = math.inf
    engine_row.first_sent = engine_row.last_sent = engine_row.first_wanting = NONE
    rank.free = rank.num_blocks = rank.least_free = words[BLOCKS]
    rank.head = rank.tail = rank.arrived = rank.deadline = rank.preempted = rank.first_fetching = NONE
    lane.last = lane.partial = NONE
    lane.mask = buckets - 1
    for slot in range(slots_held):
        slots[slot].request = NONE
        slots[slot].order_next = slot + 1 if slot + 1 < slots_held else NONE
    calendar[:] = NONE
    width_us[0] = _FIRST_WIDTH_US
    line[0].think_us = reals[THINK_US]
    line[0].clients = words[CLIENTS]
    line[0].is_coupled = 1 if words[CLIENTS] > 0 else 0
    line[0].num_roots = 0 if words[CLIENTS] > 0 else count
    # a plain trace has neither sessions nor a prefix cache
    none = carray(pointer_at(start), (0,), np.int64)
    few = carray(pointer_at(start), (0, 0), np.int32)
    fleet = Fleet(
        CallerFeatures(1, 1, 0, 0, 0, 0, 0, 0, 0, int(arena[WINDOW]), words[PREFILL_FIRST], 0, 0, 0),
        arena,
        pools,
        replicas,
        engines,
        ranks,
        lanes,
        slots,
        calendar,
        filled,
        due,
        flights,
        firsts,
        fresh,
        batches,
        parts,
        carray(pointer_at(start), (0, 0), np.float64),
        requests,
        carray(pointer_at(start), (0,), _CHAIN),
        carray(pointer_at(start), (0,), _SEGMENT),
        few,
        carray(pointer_at(start), (0,), _TIER),
        carray(pointer_at(start), (0,), _STORE),
        few,
        carray(pointer_at(start), (0,), _FOLLOWER),
        due[:0],
        carray(pointer_at(start), (0,), _TRANSFER),
        none,
        carray(pointer_at(start), (0,), _SERVER),
        carray(pointer_at(start), (0,), _PASSING),
        none,
        none,
        none,
        none,
        line,
        none,
        few,
        carray(pointer_at(start), (0,), _SCALER),
        carray(pointer_at(start), (0,), _LIFE),
        none,
        carray(pointer_at(start), (0,), _DRAFTED),
        none,
        due[:0],
        gaps,
        series,
        width_us,
        stop,
    )
    if count > 0 and fleet_run(fleet) != 0:
        return CODE_TOO_LONG
    firsts_us = carray(pointer_at(first_us), (count,), np.float64)
    lasts_us = carray(pointer_at(last_us), (count,), np.float64)
    preempted = carray(pointer_at(preemptions), (count,), np.int32)
    statuses = carray(pointer_at(status), (count,), np.uint8)
    for i in range(count):
        row = requests[0, i]
        firsts_us[i], lasts_us[i] = row.first_us, row.last_us
        preempted[i], statuses[i] = row.preemptions, row.status
        if words[CLIENTS] > 0:
            arrivals[i] = row.arrival_us
    if served != 0:
        counts = carray(pointer_at(served), (SERVED_WORDS,), np.int64)
        times = carray(pointer_at(served), (SERVED_WORDS,), np.float64)
        counts[0], counts[1], counts[2] = lane.steps, lane.mixed_steps, lane.prefill_steps
        counts[3], counts[4], counts[5] = rank.preemptions, lane.prefill_tokens, lane.decode_tokens
        counts[6], counts[7], counts[8] = lane.cached_tokens, rank.peak_running, rank.peak_waiting
        counts[9] = rank.least_free if count > 0 else 0
        times[10], times[11] = engine_row.busy_us, engine_row.now_us
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
