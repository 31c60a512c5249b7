"""Inverse questions: the largest batch or context within a limit, the fewest replicas for a rate.

Measured kernels are jagged: a larger step may be faster. So nothing here bisects over batch sizes or clients;
all are tried, from the largest down if the largest is wanted.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fastroof.arrays import Flags, Floats, Longs
from fastroof.compiled.decode_lines import cell_at
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.compiled.serving_options import KvRoom, held_parts, longest_held
from fastroof.compiled.steps import CODE_SIZES, PlanParts, decode_rows_us, decode_step_us, open_plan
from fastroof.compiled.sweeps import Scratch, _fill_lines, _read_batches

CHUNK = 64
"""Batch sizes that are compared at once without a branch, so that LLVM vectorises."""

CLOSE = 1e-9
"""Relative difference below which two rates are equal, up to rounding."""

# what limits a replica's rate
LIMITED_BY_NOTHING_MORE, LIMITED_BY_TTFT, LIMITED_BY_TPOT, LIMITED_BY_REQUEST, LIMITED_BY_ROOM = range(5)


class ReplicaCurve(NamedTuple):
    """One replica's answers by increasing number of clients."""

    clients: Floats
    requests_per_s: Floats
    ttft_ms: Floats
    tpot_ms: Floats
    request_ms: Floats


class FewestReplicas(NamedTuple):
    """Answers, one per query: replicas, 0 if no number suffices, and what limits one of them."""

    replicas: Longs
    runs_at: Longs
    most_at: Longs
    limited_by: Flags


def new_scratch(count: int) -> Scratch:
    """Allocate the scratch arrays of :func:`largest_batches`."""
    floats = np.empty((4, count))
    longs = np.empty((3, count), np.int64)
    return Scratch(floats[0], floats[1], floats[2], floats[3], longs[0], longs[1], longs[2])


@jit_inline
def _last_within(scratch: Scratch, kv: float, limit_us: float, room: int) -> int:
    """Return the last of the first ``room`` batch sizes within a limit, -1 if none."""
    stop = room
    last: Any = np.int64(-1)
    while stop > 0 and last < 0:
        start = max(stop - CHUNK, 0)
        for j in range(start, stop):
            fits = scratch.at_zero_us[j] + scratch.slope_us[j] * kv <= limit_us
            last = max(last, np.int64(j) if fits else np.int64(-1))
        stop = start
    return int(last)


@jit
def largest_batches(
    arena: Floats,
    kv_room: KvRoom,
    batch_size: Longs,
    kv_len: Longs,
    limit_us: Floats,
    scratch: Scratch,
    out: Longs,
) -> int:
    """Find for each length the largest batch size whose step is within its limit, 0 if none."""
    plan = open_plan(arena)
    runs = _read_batches(arena, plan, batch_size, scratch)
    if runs < 0:
        return CODE_SIZES
    start_kv = 0.0
    stop_kv = 0.0
    for i in range(len(out)):
        if kv_len[i] < 1 or kv_len[i] > MAX_KV_LEN:
            return CODE_SIZES
        kv = float(kv_len[i])
        if not start_kv <= kv < stop_kv:
            start_kv, stop_kv = _fill_lines(arena, plan, batch_size, runs, kv, scratch)
        most = min(len(batch_size), int(kv_room[7]))
        room = min(most, kv_room[0] // max(held_parts(kv_room, kv_len[i]), 1))
        out[i] = _last_within(scratch, kv, limit_us[i], room) + 1
    return 0


@jit
def _largest_context(arena: Floats, plan: PlanParts, batch: int, most: int, limit_us: float) -> int:
    """Return the largest length up to ``most`` at which ``batch`` decodes are within a limit, 0 if none."""
    rows_us = decode_rows_us(arena, plan, batch)
    axis = plan.decode.x
    high = int(most)
    while high > 0:
        low: int = max(math.ceil(arena[axis.nodes_at + cell_at(arena, axis, float(high))]), 1)
        if decode_step_us(arena, plan, rows_us, batch, float(high)) <= limit_us:
            return high
        if decode_step_us(arena, plan, rows_us, batch, float(low)) <= limit_us:
            while high - low > 1:
                middle = (low + high) >> 1
                if decode_step_us(arena, plan, rows_us, batch, float(middle)) <= limit_us:
                    low = middle
                else:
                    high = middle
            return low
        high = low - 1
    return 0


@jit
def largest_contexts(
    arena: Floats, kv_room: KvRoom, max_kv_len: int, batch_size: Longs, limit_us: Floats, out: Longs
) -> int:
    """Find for each batch size the largest length whose step is within its limit, 0 if none."""
    plan = open_plan(arena)
    largest = min(plan.max_tokens, plan.max_seqs)
    for i in range(len(out)):
        batch = batch_size[i]
        if batch < 1 or batch > largest:
            return CODE_SIZES
        most = min(longest_held(kv_room, batch), max_kv_len, MAX_KV_LEN)
        out[i] = _largest_context(arena, plan, batch, most, limit_us[i])
    return 0


@jit_inline
def _exceeded(curve: ReplicaCurve, j: int, ttft_ms: float, tpot_ms: float, request_ms: float) -> int:
    """Return the first limit that a point of the curve exceeds; NaN, a missing time, exceeds none."""
    if curve.ttft_ms[j] > ttft_ms:
        return LIMITED_BY_TTFT
    if curve.tpot_ms[j] > tpot_ms:
        return LIMITED_BY_TPOT
    if curve.request_ms[j] > request_ms:
        return LIMITED_BY_REQUEST
    return LIMITED_BY_NOTHING_MORE


@jit
def least_replicas(
    curve: ReplicaCurve,
    rate_per_s: Floats,
    ttft_ms: Floats,
    tpot_ms: Floats,
    request_ms: Floats,
    fewest: FewestReplicas,
) -> None:
    """Find the fewest replicas that serve each rate within its limits, and the fewest clients."""
    count = len(curve.clients)
    for i in range(len(rate_per_s)):
        most = 0.0
        at = -1
        for j in range(count):
            is_more = curve.requests_per_s[j] > most * (1.0 + CLOSE)
            if is_more and _exceeded(curve, j, ttft_ms[i], tpot_ms[i], request_ms[i]) == 0:
                most = curve.requests_per_s[j]
                at = j
        fewest.most_at[i] = at
        fewest.runs_at[i] = -1
        fewest.replicas[i] = 0
        if at + 1 < count:
            fewest.limited_by[i] = _exceeded(curve, at + 1, ttft_ms[i], tpot_ms[i], request_ms[i])
        else:
            fewest.limited_by[i] = LIMITED_BY_ROOM
        if at < 0:
            continue
        # a rounded quotient may be one off the smallest sufficient number
        replicas = max(math.ceil(rate_per_s[i] / most), 1)
        replicas += np.int64(replicas * most < rate_per_s[i])
        replicas -= np.int64(replicas > 1 and (replicas - 1) * most >= rate_per_s[i])
        j = 0
        while j < at and (
            replicas * curve.requests_per_s[j] < rate_per_s[i]
            or _exceeded(curve, j, ttft_ms[i], tpot_ms[i], request_ms[i]) != 0
        ):
            j += 1
        fewest.replicas[i] = replicas
        fewest.runs_at[i] = j
