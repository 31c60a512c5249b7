"""One engine: a plan, a trace and settings in, outcomes out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools
from fastroof.checks import is_number, shown
from fastroof.compiled.simulation.engine import engine_run
from fastroof.compiled.simulation.records import GAP_BINS, SERIES_BINS, SERIES_FIELDS, Record
from fastroof.compiled.simulation.state import (
    BUSY_US,
    CACHED_TOKENS,
    CODE_STOPPED,
    CODE_STUCK,
    DECODE_TOKENS,
    FIRST_SIZE,
    LEAST_FREE,
    MIXED_STEPS,
    NONE,
    NOW,
    NUM_BLOCKS,
    NUM_CLOCKS,
    NUM_FIELDS,
    NUM_SCALARS,
    PEAK_RUNNING,
    PEAK_WAITING,
    PREEMPTIONS,
    PREFILL_STEPS,
    PREFILL_TOKENS,
    STEPS,
    EngineOptions,
    EngineState,
    Requests,
    Served,
)
from fastroof.errors import SimulationError, StoppedError
from fastroof.simulation.outcomes import REJECTED, Outcomes
from fastroof.simulation.settings import EngineSettings
from fastroof.simulation.trace import Trace
from fastroof.stopping import check_stopped, stop_flag
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = [
    "Arrays",
    "arrays_of",
    "counters_of",
    "new_arrays",
    "new_record",
    "new_served",
    "new_state",
    "options_of",
    "raise_stuck",
    "run_engine",
    "too_long",
    "with_rejected",
]

FIRST_BIN_US: Final = 1000.0
"""Width of the series' bins at the beginning, us."""

LEAST_SCALE: Final = 1e-9
MOST_SCALE: Final = 1e9
"""What steps may be multiplied by: a clock of infinite times stands still."""


class Arrays(NamedTuple):
    """All that the loops of one or several engines read and write."""

    state: EngineState
    requests: Requests
    served: Served
    record: Record


def options_of(settings: EngineSettings, trace: Trace, time_scale: float = 1.0) -> EngineOptions:
    """Return settings and a trace's clients as the loops read them."""
    if not is_number(time_scale) or not LEAST_SCALE <= float(time_scale) <= MOST_SCALE:
        raise SimulationError(
            f"time_scale must be a number above 0, from {LEAST_SCALE:g} to {MOST_SCALE:g}, "
            f"got {shown(time_scale)}"
        )
    return EngineOptions(
        budget=settings.max_num_batched_tokens,
        max_seqs=settings.max_num_seqs,
        block_size=settings.block_size,
        block_shift=_shift_of(settings.block_size),
        is_chunked=int(settings.chunked_prefill),
        admits_whole=int(settings.admit_whole_prompt),
        reserves_output=int(settings.reserve_output),
        prefill_first=int(settings.order == "prefill_first"),
        depth=2 if settings.async_scheduling else 1,
        clients=trace.clients or 0,
        think_us=trace.think_s * US_PER_S,
        timeout_us=settings.timeout_s * US_PER_S,
        time_scale=float(time_scale),
        stop=stop_flag(),
    )


def _shift_of(block_size: int) -> int:
    """Logarithm of a power of two, NONE of another number."""
    return block_size.bit_length() - 1 if block_size & (block_size - 1) == 0 else NONE


def too_long(trace: Trace, settings: EngineSettings) -> Bools:
    """Find the requests of a trace that can never run: more tokens than all blocks or a step hold."""
    tokens = trace.input_tokens.astype(np.int64) + trace.output_tokens
    beyond: Bools = -(-tokens // settings.block_size) > settings.num_gpu_blocks
    if not settings.chunked_prefill:
        # a preempted request computes its answer so far with its prompt
        whole = trace.input_tokens - trace.cached_tokens if settings.reserve_output else tokens - 1
        beyond |= whole > settings.max_num_batched_tokens
    return beyond


def new_state(settings: EngineSettings, count: int, longest: int, engines: int | None = None) -> EngineState:
    """Make what engines remember: of one, or of several along a first axis."""
    several = () if engines is None else (engines,)
    slots = min(settings.max_num_seqs, count)
    buckets = 1 << (longest + 4).bit_length()
    return EngineState(
        scalars=np.zeros((*several, NUM_SCALARS), np.int64),
        clock=np.zeros((*several, NUM_CLOCKS)),
        slots=np.zeros((*several, NUM_FIELDS, slots), np.int64),
        calendar=np.zeros((*several, 2, buckets), np.int32),
        due=np.zeros((*several, settings.block_size), np.int32),
        firsts=np.zeros((*several, FIRST_SIZE, slots), np.int32),
        fresh=np.zeros((*several, slots), np.int32),
    )


def new_arrays(settings: EngineSettings, requests: Requests, longest: int) -> Arrays:
    """Make what one engine needs."""
    count = len(requests.arrival_us)
    state = new_state(settings, count, longest)
    return Arrays(state, requests, new_served(settings, count), new_record())


def new_served(settings: EngineSettings, count: int) -> Served:
    """Make room for what becomes of requests."""
    return Served(
        first_us=np.full(count, math.nan),
        last_us=np.full(count, math.nan),
        preemptions=np.zeros(count, np.int32),
        status=np.zeros(count, np.uint8),
        sent=np.zeros(count, np.int32),
        next_preempted=np.zeros(count, np.int32),
        place=np.full(count if settings.timeout_s < math.inf else 1, NONE, np.int32),
    )


def new_record() -> Record:
    """Make room for what is kept of steps."""
    return Record(
        np.zeros(GAP_BINS, np.int64), np.zeros((SERIES_BINS, SERIES_FIELDS)), np.array([FIRST_BIN_US])
    )


def arrays_of(trace: Trace, served: Bools | None = None) -> Requests:
    """Return a trace's requests as the loops read them."""
    which: Any = slice(None) if served is None else served
    arrival_us = trace.arrival_s[which] * US_PER_S
    return Requests(
        arrival_us,
        np.ascontiguousarray(trace.input_tokens[which]),
        np.ascontiguousarray(trace.output_tokens[which]),
        np.ascontiguousarray(trace.cached_tokens[which]),
        np.full(len(arrival_us), NONE, np.int32),
    )


def counters_of(state: EngineState) -> dict[str, Any]:
    """Return one engine's counts: see :class:`fastroof.simulation.outcomes.Outcomes`."""
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
    """Raise what a loop's code means."""
    if code & CODE_STOPPED:
        check_stopped()
        raise StoppedError("the simulation was ended before its end")
    if code & CODE_STUCK:
        raise SimulationError(
            "the first request that waits has no room in an empty engine: give it more blocks"
        )


def run_engine(
    plan: StepPlan, trace: Trace, settings: EngineSettings, *, time_scale: float = 1.0
) -> Outcomes:
    """Serve a trace with one engine."""
    rejected = too_long(trace, settings)
    some = bool(rejected.any())
    requests = arrays_of(trace, ~rejected if some else None)
    longest = int(trace.output_tokens.max())
    arrays = new_arrays(settings, requests, longest)
    state, _, served, record = arrays
    if len(requests.arrival_us):
        options = options_of(settings, trace, time_scale)
        raise_stuck(engine_run(plan.arena, options, state, requests, served, record, settings.num_gpu_blocks))
    replica = np.zeros(len(requests.arrival_us), np.int32)
    outcomes = Outcomes(
        requests.arrival_us,
        served.first_us,
        served.last_us,
        served.preemptions,
        served.status,
        replica,
        record.gaps,
        record.series,
        float(record.width_us[0]),
        counters_of(state),
    )
    return with_rejected(outcomes, trace, rejected) if some else outcomes


def with_rejected(outcomes: Outcomes, trace: Trace, rejected: Bools) -> Outcomes:
    """Return outcomes with requests that never ran back in their places."""
    count = len(rejected)

    def spread(values: Any, fill: Any) -> Any:
        whole = np.full(count, fill, values.dtype)
        whole[~rejected] = values
        return whole

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
    )
