"""Run one engine: from a plan, a trace and settings to the outcomes of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Flags, Floats, Ints, Longs
from fastroof.caching import usable_memory_bytes
from fastroof.checks import is_number, shown
from fastroof.compiled.simulation.engine import engine_run
from fastroof.compiled.simulation.state import (
    BUSY_US,
    CACHED_TOKENS,
    CODE_STOPPED,
    CODE_STUCK,
    DECODE_TOKENS,
    EVICTIONS,
    FIRST_SIZE,
    FOLLOWERS_AT,
    FOUND,
    FOUND_AGAIN_TOKENS,
    FOUND_TOKENS,
    FRESH_SIZE,
    GAP_BINS,
    LEAST_FREE,
    LOOKED_UP_TOKENS,
    MIXED_STEPS,
    NONE,
    NOW,
    NUM_BLOCKS,
    NUM_CELL_COLUMNS,
    NUM_CLOCKS,
    NUM_COLUMNS,
    NUM_FIELDS,
    NUM_ROOTS,
    NUM_SCALARS,
    NUM_SEGMENT_COLUMNS,
    PEAK_RUNNING,
    PEAK_WAITING,
    PREEMPTIONS,
    PREFILL_STEPS,
    PREFILL_TOKENS,
    REJECTED,
    SERIES_BINS,
    SERIES_FIELDS,
    STEPS,
    TAIL_PARENT,
    TAIL_START,
    UNENDED,
    EngineOptions,
    EngineState,
    Record,
    Requests,
    Served,
    of_one_set,
)
from fastroof.compiled.simulation.tiers import NUM_TIER_SCALARS
from fastroof.compiled.steps import WINDOW
from fastroof.errors import SimulationError, StoppedError
from fastroof.simulation.kv_tiers import NO_TIERS, Tiers, TierUse, use_of, with_all_requests
from fastroof.simulation.settings import EngineSettings
from fastroof.stopping import check_stopped, stop_flag
from fastroof.traces.prompt_tree import GIVEN, LRU, has_identities, prompt_tree
from fastroof.traces.trace import Trace
from fastroof.traces.trace_sessions import descendants, links_of, of_rows
from fastroof.units import GIB, US_PER_S

if TYPE_CHECKING:
    from fastroof.plan import StepPlan


STATUS_NAMES: Final = ("finished", "timed_out", "rejected")
"""Names of statuses, by number."""

SERIES: Final = ("running", "waiting", "blocks", "busy", "new_tokens", "output_tokens")
"""Columns of ``Outcomes.series``: four integrals over time, us, and two counts of tokens."""


class Outcomes(NamedTuple):
    """The outcome of each request, in the trace's order; counts of gaps by bin, the series, and counters.

    ``lives`` are those of replicas that an autoscaler starts, in the columns of the loops.
    """

    arrival_us: Floats
    first_us: Floats
    last_us: Floats
    preemptions: Ints
    status: Flags
    replica: Ints
    gaps: Longs
    series: Floats
    bin_us: float
    counters: dict[str, Any]
    cached_tokens: Ints | None = None
    tiers: TierUse | None = None
    lives: Floats | None = None


def added_up(counters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add the counters of several engines; the end is that of the last."""
    return {
        name: max(of_each) if name == "end_us" else sum(of_each)
        for name in counters[0]
        for of_each in [[one[name] for one in counters]]
    }


FIRST_BIN_US: Final = 1000.0
"""Initial width of the series' bins, us."""

LEAST_SCALE: Final = 1e-9
MOST_SCALE: Final = 1e9
"""Range of time_scale."""


def check_time_scale(time_scale: Any) -> None:
    """Reject anything but a number in the range of time_scale."""
    if not is_number(time_scale) or not LEAST_SCALE <= float(time_scale) <= MOST_SCALE:
        raise SimulationError(
            f"time_scale must be a number from {LEAST_SCALE:g} to {MOST_SCALE:g}, got {shown(time_scale)}"
        )


MOST_STATE_BYTES: Final = 4 * GIB
"""Memory that the state of all engines simulated together may take; more if it is free."""


class Arrays(NamedTuple):
    """All arrays of one or several engines' loops."""

    state: EngineState
    requests: Requests
    served: Served
    record: Record


def options_of(
    arena: Floats,
    settings: EngineSettings,
    trace: Trace,
    time_scale: float = 1.0,
    prefix_cache: str = GIVEN,
    tiers: Tiers = NO_TIERS,
) -> EngineOptions:
    """Return a plan's window, settings and a trace's clients as options of the loops."""
    check_time_scale(time_scale)
    options = EngineOptions(
        budget=settings.max_num_batched_tokens,
        max_seqs=settings.max_num_seqs,
        block_size=settings.block_size,
        block_shift=_shift_of(settings.block_size),
        is_chunked=int(settings.chunked_prefill),
        admits_whole=int(settings.admit_whole_prompt),
        reserves_output=int(settings.reserve_output),
        prefill_first=int(settings.order == "prefill_first"),
        pause_steps=settings.pause_steps,
        min_free_slots=min(settings.min_free_slots_delay, settings.max_num_seqs),
        depth=2 if settings.async_scheduling else 1,
        has_parents=int(trace.has_parents),
        has_cache=int(prefix_cache == LRU),
        has_reserved=0,
        clients=trace.clients or 0,
        think_us=trace.think_s * US_PER_S,
        timeout_us=settings.timeout_s * US_PER_S,
        time_scale=float(time_scale),
        stop=stop_flag(),
        num_tiers=len(tiers.tiers),
        tiers=tiers.rows,
        window=int(arena[WINDOW]),
    )
    return of_one_set(options)[0]


def _shift_of(block_size: int) -> int:
    """Return the log2 of a power of two, NONE for other numbers."""
    return block_size.bit_length() - 1 if block_size & (block_size - 1) == 0 else NONE


def too_long(trace: Trace, settings: EngineSettings) -> Bools:
    """Find requests that can never run: more tokens than all blocks, or than an unchunked step, hold."""
    tokens = trace.input_tokens.astype(np.int64) + trace.output_tokens
    beyond: Bools = -(-tokens // settings.block_size) > settings.num_gpu_blocks
    if not settings.chunked_prefill:
        # a preempted request recomputes its output so far with its prompt
        needed = trace.input_tokens - trace.cached_tokens if settings.reserve_output else tokens - 1
        beyond |= needed > settings.max_num_batched_tokens
    if trace.parents is not None and trace.parent_offsets is not None and beyond.any():
        # what comes after a request that is never served is not sent
        beyond = descendants(beyond, trace.parents, trace.parent_offsets)
    return beyond


def refuse_too_long(trace: Trace, settings: EngineSettings, alternative: str) -> None:
    """Raise for the first request that can never run; the message ends with an alternative."""
    beyond = too_long(trace, settings)
    if not beyond.any():
        return
    i = int(beyond.argmax())
    prompt, output = int(trace.input_tokens[i]), int(trace.output_tokens[i])
    blocks = -(-(prompt + output) // settings.block_size)
    others_rejected = int(beyond.sum()) - 1
    more = f", nor can {others_rejected:,} others" if others_rejected else ""
    if blocks > settings.num_gpu_blocks:
        why = f"needs {blocks:,} blocks of {settings.block_size}, there are {settings.num_gpu_blocks:,}"
        help_ = "give more num_gpu_blocks or GPUs"
    else:
        why = f"has no room in a step of {settings.max_num_batched_tokens:,} tokens, and prompts are not cut"
        help_ = "give more max_num_batched_tokens, or chunked_prefill=True"
    raise SimulationError(
        f"request {int(trace.order[i])} of {trace.name} ({prompt:,} + {output:,} tokens) can never run"
        f"{more}: it {why}; {help_}, or {alternative}"
    )


def state_shapes(
    settings: EngineSettings, count: int, longest: int, cells: int = 0, tiers: int = 0
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return shape and dtype of each array of one engine's state, for so many requests and cache cells."""
    slots = min(settings.max_num_seqs, count)
    buckets = 1 << (longest + 4).bit_length()
    return {
        "scalars": ((NUM_SCALARS + tiers * NUM_TIER_SCALARS,), np.int64),
        "clock": ((NUM_CLOCKS + tiers,), np.float64),
        "slots": ((NUM_FIELDS, slots), np.int64),
        "calendar": ((2, buckets), np.int32),
        "due": ((settings.block_size,), np.int32),
        "firsts": ((FIRST_SIZE, slots), np.int32),
        "fresh": ((FRESH_SIZE, slots), np.int32),
        "cells": ((cells, (1 + tiers) * NUM_CELL_COLUMNS + (tiers > 0)), np.int32),
    }


def bytes_of(shapes: dict[str, tuple[tuple[int, ...], Any]]) -> dict[str, int]:
    """Return the bytes of arrays by their shapes."""
    return {name: math.prod(shape) * np.dtype(dtype).itemsize for name, (shape, dtype) in shapes.items()}


def new_state(
    settings: EngineSettings, requests: Requests, longest: int, engines: int | None = None
) -> EngineState:
    """Allocate the state of one engine, or of several along a first axis."""
    count = len(requests.arrival_us)
    # of segments, tails and the end of the queue
    cells = len(requests.segments) + count + 1 if requests.rows[-1, FOUND] == NONE else 0
    several = () if engines is None else (engines,)
    sizes = state_shapes(settings, count, longest, cells, requests.rows.shape[1] - NUM_COLUMNS)
    each = bytes_of(sizes)
    needed = sum(each.values()) * (engines or 1)
    if needed > MOST_STATE_BYTES and needed > usable_memory_bytes():
        causes = {
            "calendar": f"an output of {longest:,} tokens",
            "due": f"block_size {settings.block_size:,}",
            "cells": f"a simulated prefix cache for {count:,} requests",
        }
        cause = causes.get(
            max(each, key=lambda name: each[name]), f"{sizes['fresh'][0][-1]:,} running requests"
        )
        raise SimulationError(
            f"{engines or 1:,} engines with {cause} take {needed / GIB:,.1f} GiB to simulate, more than "
            "is free; give fewer replicas, or less of that"
        )
    return EngineState(
        **{name: np.zeros((*several, *shape), dtype) for name, (shape, dtype) in sizes.items()}
    )


def new_arrays(settings: EngineSettings, requests: Requests, longest: int) -> Arrays:
    """Allocate the arrays of one engine."""
    count = len(requests.arrival_us)
    state = new_state(settings, requests, longest)
    has_tiers = requests.rows.shape[1] > NUM_COLUMNS
    return Arrays(state, requests, new_served(settings, count, has_tiers), new_record())


def new_served(settings: EngineSettings, count: int, has_tiers: bool = False) -> Served:
    """Allocate the outcomes of requests."""
    return Served(
        first_us=np.full(count, math.nan),
        last_us=np.full(count, math.nan),
        preemptions=np.zeros(count, np.int32),
        status=np.zeros(count, np.uint8),
        sent=np.zeros(count, np.int32),
        next_preempted=np.zeros(count, np.int32),
        place=np.full(count if settings.timeout_s < math.inf else 1, NONE, np.int32),
        fetched_us=np.zeros(count if has_tiers else 0),
    )


def new_record() -> Record:
    """Allocate the record of steps."""
    return Record(
        np.zeros(GAP_BINS, np.int64), np.zeros((SERIES_BINS, SERIES_FIELDS)), np.array([FIRST_BIN_US])
    )


def arrays_of(
    trace: Trace, served: Bools | None = None, cached_block: int = 0, num_tiers: int = 0
) -> Requests:
    """Return a trace's requests, or some, as arrays of the loops; a cache has blocks of ``cached_block``."""
    cached_tokens = trace.cached_tokens
    segments: Ints = np.zeros((0, NUM_SEGMENT_COLUMNS), np.int32)
    which: Any = slice(None) if served is None else served
    arrival_us = trace.arrival_s[which] * US_PER_S
    count = len(arrival_us)
    is_used = cached_block > 0 or trace.is_closed or trace.has_parents
    rows = np.zeros((count + 1 if is_used else 1, NUM_COLUMNS + num_tiers), np.int32)
    followers, delay_us = np.zeros(0, np.int32), np.zeros(0)
    if cached_block:
        tree = prompt_tree(trace, cached_block)
        segments = tree.segments
        rows[:-1, TAIL_PARENT], rows[:-1, TAIL_START] = tree.tail_parent[which], tree.tail_start[which]
        rows[:, FOUND] = NONE
        if has_identities(trace):
            cached_tokens = np.zeros_like(cached_tokens)
    if trace.parents is not None and trace.parent_offsets is not None and trace.delay_s is not None:
        links = trace.links
        if served is not None:
            kept = of_rows(np.flatnonzero(served), trace.parents, trace.parent_offsets)
            links = links_of(kept["parents"], kept["parent_offsets"])
        followers = np.concatenate([links.roots, links.children])
        rows[:, FOLLOWERS_AT] = len(links.roots) + links.child_offsets
        rows[:-1, UNENDED] = links.parents_each
        rows[-1, NUM_ROOTS] = len(links.roots)
        delay_us = trace.delay_s[which] * US_PER_S
    return Requests(
        arrival_us,
        np.ascontiguousarray(trace.input_tokens[which]),
        np.ascontiguousarray(trace.output_tokens[which]),
        np.ascontiguousarray(cached_tokens[which]),
        np.full(count, NONE, np.int32),
        rows,
        followers,
        segments,
        delay_us,
    )


def counters_of(state: EngineState) -> dict[str, Any]:
    """Return one engine's counters by name."""
    scalars = state.scalars
    names = {
        "steps": STEPS,
        "mixed_steps": MIXED_STEPS,
        "prefill_steps": PREFILL_STEPS,
        "preemptions": PREEMPTIONS,
        "prefill_tokens": PREFILL_TOKENS,
        "decode_tokens": DECODE_TOKENS,
        "cached_tokens": CACHED_TOKENS,
        "peak_running": PEAK_RUNNING,
        "peak_waiting": PEAK_WAITING,
        "num_gpu_blocks": NUM_BLOCKS,
    }
    counters: dict[str, Any] = {name: int(scalars[at]) for name, at in names.items()}
    counters["decode_steps"] = counters["steps"] - counters["mixed_steps"] - counters["prefill_steps"]
    counters["peak_blocks"] = int(scalars[NUM_BLOCKS] - scalars[LEAST_FREE])
    counters["busy_us"], counters["end_us"] = float(state.clock[BUSY_US]), float(state.clock[NOW])
    return counters


def raise_stuck(code: int) -> None:
    """Raise the error of a loop's code, if any."""
    if code & CODE_STOPPED:
        check_stopped()
        raise StoppedError("the simulation was stopped before its end")
    if code & CODE_STUCK:
        raise SimulationError(
            "the first waiting request has no room in an empty engine; give more num_gpu_blocks"
        )


def run_engine(
    plan: StepPlan,
    trace: Trace,
    settings: EngineSettings,
    *,
    time_scale: float = 1.0,
    prefix_cache: str = GIVEN,
    tiers: Tiers = NO_TIERS,
) -> Outcomes:
    """Serve a trace with one engine."""
    rejected = too_long(trace, settings)
    any_rejected = bool(rejected.any())
    requests = requests_of(trace, settings, ~rejected if any_rejected else None, prefix_cache, tiers)
    longest = int(trace.output_tokens.max())
    arrays = new_arrays(settings, requests, longest)
    state, _, served, record = arrays
    if len(requests.arrival_us):
        options = options_of(plan.arena, settings, trace, time_scale, prefix_cache, tiers)
        raise_stuck(engine_run(plan.arena, options, state, requests, served, record, settings.num_gpu_blocks))
    replica_of = np.zeros(len(requests.arrival_us), np.int32)
    counters = counters_of(state) | cache_counters(state.scalars, prefix_cache)
    outcomes = outcomes_of(requests, served, replica_of, record, counters, prefix_cache)
    outcomes = outcomes._replace(tiers=use_of(tiers, [state], requests))
    return with_rejected(outcomes, trace, rejected) if any_rejected else outcomes


def outcomes_of(
    requests: Requests,
    served: Served,
    replica_of: Ints,
    record: Record,
    counters: dict[str, Any],
    prefix_cache: str = GIVEN,
) -> Outcomes:
    """Return what the loops wrote as outcomes, with the tokens found in a prefix cache if there is one."""
    return Outcomes(
        requests.arrival_us,
        served.first_us,
        served.last_us,
        served.preemptions,
        served.status,
        replica_of,
        record.gaps,
        record.series,
        float(record.width_us[0]),
        counters,
        requests.rows[:-1, FOUND].copy() if prefix_cache == LRU else None,
    )


def requests_of(
    trace: Trace,
    settings: EngineSettings,
    served: Bools | None,
    prefix_cache: str,
    tiers: Tiers = NO_TIERS,
) -> Requests:
    """Return a trace's requests, or some, as arrays of the loops for a source of prefix hits."""
    check_stopped()
    block_size = settings.block_size if prefix_cache == LRU else 0
    return arrays_of(trace, served, block_size, len(tiers.tiers))


def with_rejected(outcomes: Outcomes, trace: Trace, rejected: Bools) -> Outcomes:
    """Insert rejected requests into the outcomes of the others."""
    count = len(rejected)

    def spread(values: Any, fill: Any) -> Any:
        spread = np.full(count, fill, values.dtype)
        spread[~rejected] = values
        return spread

    arrival_us = trace.arrival_s * US_PER_S
    arrival_us[~rejected] = outcomes.arrival_us
    return outcomes._replace(
        arrival_us=arrival_us,
        first_us=spread(outcomes.first_us, math.nan),
        last_us=spread(outcomes.last_us, math.nan),
        preemptions=spread(outcomes.preemptions, 0),
        status=spread(outcomes.status, REJECTED),
        replica=spread(outcomes.replica, NONE),
        cached_tokens=None if outcomes.cached_tokens is None else spread(outcomes.cached_tokens, NONE),
        tiers=None if outcomes.tiers is None else with_all_requests(outcomes.tiers, ~rejected),
    )


FOUND_COUNTERS: Final = ("looked_up_tokens", "found_tokens", "found_again_tokens", "evictions")
"""Counters of simulated prefix caches."""


def cache_counters(scalars: Longs, prefix_cache: str) -> dict[str, Any]:
    """Return the counters of one prefix cache, or of several together; none without a cache."""
    if prefix_cache != LRU:
        return {}
    counts = scalars.reshape(-1, scalars.shape[-1]).sum(0)
    places = (LOOKED_UP_TOKENS, FOUND_TOKENS, FOUND_AGAIN_TOKENS, EVICTIONS)
    return {name: int(counts[at]) for name, at in zip(FOUND_COUNTERS, places, strict=True)}
