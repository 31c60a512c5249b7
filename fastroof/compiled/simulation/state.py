"""State of an engine between two steps: the arrays of its loops, and names of their elements.

A running request has a slot, which is not touched while it decodes: every decode advances by one token per
step, so all of it follows from the number of the decode step. The request has BASE + step computed tokens. It
needs a block in the steps with one remainder by the block size, and ``due`` counts requests by remainder. Its
last token comes in a known step, and until then it waits in that step's bucket of the calendar.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

from fastroof.arrays import Flags, Floats, Ints, Longs
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.llvm import float_bits

NONE = -1
"""No request, no slot, no step."""

FINISHED, TIMED_OUT, REJECTED = 0, 1, 2
"""Status of a request."""

CODE_STUCK = 1
"""Requests wait, none runs, and the first has no room: it never will."""

CODE_STOPPED = 2
"""Another thread set ``EngineOptions.stop``: the results are incomplete."""


class EngineOptions(NamedTuple):
    """How an engine schedules steps; flags are 0 or 1.

    ``pause_steps`` is how many steps after one with prompts are of decodes alone, ``min_free_slots`` how many
    slots must be free before prompts start. With ``has_reserved`` requests arrive with the blocks of their
    prompts taken, and start before preempted ones. ``tiers`` has the columns that ``tiers.py`` names,
    ``window`` is that of the plan's windowed layers, or 0.
    """

    budget: int
    max_seqs: int
    block_size: int
    block_shift: int
    is_chunked: int
    admits_whole: int
    reserves_output: int
    prefill_first: int
    pause_steps: int
    min_free_slots: int
    depth: int
    has_parents: int
    has_cache: int
    has_reserved: int
    clients: int
    think_us: float
    timeout_us: float
    time_scale: float
    stop: Longs
    num_tiers: int
    tiers: Floats
    window: int


class CallerOptions(EngineOptions):
    """What callers in C may ask for: loops are compiled without what is ``FIXED`` (``dispatcher.py``)."""

    __slots__ = ()
    FIXED: ClassVar = dict.fromkeys(
        ("has_parents", "has_cache", "has_reserved", "num_tiers", "pause_steps", "min_free_slots"), 0
    )


class PlainOptions(EngineOptions):
    """The plain set of features, which most runs need: no time-outs, and no windowed layers either."""

    __slots__ = ()
    FIXED: ClassVar = CallerOptions.FIXED | {"timeout_us": math.inf, "window": 0}


def of_one_set(*options: EngineOptions) -> list[EngineOptions]:
    """Return the options of a loop's engines as the plain set if all keep to it, else as the full one."""
    is_plain = all(getattr(one, name) == off for one in options for name, off in PlainOptions.FIXED.items())
    return [(PlainOptions if is_plain else EngineOptions)(*one) for one in options]


class Requests(NamedTuple):
    """Requests in order of arrival, an element each. ``next_arrived`` links those of one engine.

    The arrival of a request with parents is the earliest one until its parents have ended. ``rows[request]``
    and ``segments[segment]`` have the columns named below; ``followers`` are requests without parents, then
    the children of each request. All of them are in few arrays, since each costs a call 5 ns.
    """

    arrival_us: Floats
    input_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints
    next_arrived: Ints
    rows: Ints
    followers: Ints
    segments: Ints
    delay_us: Floats


# columns of rows: where the children of a request start in ``followers``, parents that have not ended; an
# element of the heap of requests to come; the last segment of its prompt's chain, the block at which its own
# blocks begin, blocks of the chain that it found or filled, tokens that it found at its first admission,
# blocks that it has once its fetch ends; then for each tier of KV cache tokens that it found there
FOLLOWERS_AT, UNENDED, COMING, TAIL_PARENT, TAIL_START, SHARED, FOUND, REACHED = range(8)
NUM_COLUMNS = 8

# columns of the extra row after the last: next request without parents, size of the heap, requests without
# parents
NEXT_ROOT, IN_HEAP, NUM_ROOTS = UNENDED, COMING, TAIL_PARENT

# columns of segments: a run of blocks of prompts from ``START`` to ``STOP``, and the one before it
PARENT, START, STOP = range(3)
NUM_SEGMENT_COLUMNS = 4

ROOT = -1
"""Parent of the first segment of a chain."""

# columns of cells: blocks of a segment that are cached, running requests and held segments after it that hold
# it, neighbours in the queue; with tiers the same number for each, and a last one, which wait it arrives with
CACHED, HOLDERS, NEWER, OLDER = range(4)
NUM_CELL_COLUMNS = 4


class Served(NamedTuple):
    """The outcome of each request, an element each.

    ``first_us`` and ``last_us`` are token times, ``sent`` tokens made before a preemption, ``place`` the slot
    or one of the places below, ``fetched_us`` when a fetch ends. ``next_preempted`` also links requests that
    wait for one.
    """

    first_us: Floats
    last_us: Floats
    preemptions: Ints
    status: Flags
    sent: Ints
    next_preempted: Ints
    place: Ints
    fetched_us: Floats


WAITING_PLACE, DONE_PLACE, FETCHING_PLACE = -1, -2, -3


class EngineState(NamedTuple):
    """One engine, or all replicas along the first axis.

    ``scalars`` and ``clock`` are indexed by the names below; ``slots[field, slot]``; ``calendar[row, step]``,
    steps modulo its length, a power of two; ``due[remainder]``; ``firsts``, rows for each step in flight:
    requests whose prompts it completes; ``fresh``, those that prefilled since the last decode step;
    ``cells[segment]``, of a prefix cache, segments and then tails of requests.
    """

    scalars: Longs
    clock: Floats
    slots: Longs
    calendar: Ints
    due: Ints
    firsts: Ints
    fresh: Ints
    cells: Ints


# scalars
(
    HEAD,  # next to be admitted for the first time
    TAIL,  # last that was pushed
    ARRIVED,  # next to be counted as waiting
    DEADLINE,  # next to time out
    RELEASED,  # in a closed loop: next to be sent
    PREEMPTED,  # last preempted, first to be admitted again
    WAITING,
    RUNNING,  # slots taken
    FREE_SLOT,
    LAST,  # last admitted
    PARTIAL,  # slot of the prompt that was cut
    PARTIAL_COMPUTED,
    PARTIAL_WHOLE,
    FREE,  # blocks
    STEP,  # decode step to be scheduled next
    DECODES,  # number of decodes in it
    KV_SUM,  # sum of their kv_len in it
    BELOW,  # decodes with fewer tokens than the window
    WINDOW_SUM,  # sum over decodes of their tokens within the window
    IN_FLIGHT,
    OLDEST,  # which of two is the running step
    FRESH,  # requests in ``fresh``
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
    # of two steps in flight
    FLIGHT_STEP,  # its decode step, or NONE
    _,
    FLIGHT_DECODES,  # decodes that get a token
    _,
    FLIGHT_FIRSTS,
    _,
    FLIGHT_TOKENS,
    _,
    NUM_FINISHED,
    NUM_BLOCKS,
    NUM_TIMED_OUT,
    FLIGHT_NEW,  # prompt tokens, without chunks that are timed as decodes
    _,
    HELD_UNTIL,  # prompts wait until so many steps were made
    IS_BACKLOGGED,  # 1 if requests waited after the last step that prompts were free to join
    QUEUED,  # blocks in the queue of the prefix cache
    EVICTIONS,
    LOOKED_UP_TOKENS,  # prompt tokens when first admitted, of which
    FOUND_TOKENS,
    FOUND_AGAIN_TOKENS,  # after a preemption
    GIVEN_UP_TOKENS,  # prompt tokens of requests that timed out before they were admitted
    FETCHING,  # requests that wait for blocks from a tier, or gave up while they did
    FIRST_FETCHING,  # whose wait ends first
    LAST_FETCHING,
    ENDED,  # waits that have ended
    IS_ARRIVING,  # 1 if blocks that the request looked at last found in the GPU are on their way
) = range(58)
NUM_SCALARS = 60

RUN_ALL, HOLD_NEW, HOLD_PROMPTS = range(3)
"""Which prompts a step holds back: none, those that have not started, or cut ones too."""

# clock, us
(
    NOW,
    END,
    LAST_END,
    BUSY_US,
    LAST_DECODE_END,
    # of two steps in flight
    FLIGHT_US,
    _,
    FLIGHT_HOST_US,  # the minimum time of a step with prefill, 0 without
    _,
    FETCHED_BY,  # when the last fetch ends that a request waits for
    WAIT_US,  # of requests for fetches
    STEP_WAIT_US,  # by which steps are longer for fetches
) = range(12)
NUM_CLOCKS = 16

# fields of a slot; FINISH is the decode step with the last token, NONE if the prompt's step makes it
REQUEST, BASE, FINISH, ENTERED, BUCKET_NEXT, BUCKET_PREVIOUS, ORDER_NEXT, ORDER_PREVIOUS, HELD, FRESH_AT = (
    range(10)
)
NUM_FIELDS = 10

FIRST_SLOT, FILLED = 0, 1
"""Rows of the calendar."""

# rows of ``firsts`` for each of two steps in flight; DECODES_NEXT is 1 if a request has tokens left to decode
FIRST_REQUEST, FIRST_SLOT_OF, DECODES_NEXT = range(3)
FIRST_FIELDS = 3
FIRST_SIZE = 2 * FIRST_FIELDS

FRESH_REQUEST, FRESH_SLOT = range(2)
"""Rows of ``fresh``; the slot is NONE if the request was preempted with its next token in flight."""
FRESH_SIZE = 2

GONE = -2
"""HELD of a slot whose blocks are freed and whose last token is in flight."""


@jit_stateful_inline
def blocks_of(tokens: int, options: EngineOptions) -> int:
    """Count the KV blocks that ``tokens`` of one request take."""
    block_size, shift = options.block_size, options.block_shift
    if shift >= 0:
        return int((tokens + block_size - 1) >> shift)
    return int((tokens + block_size - 1) // block_size)


@jit_stateful_inline
def shift_of(block_size: int) -> int:
    """Return the log2 of a block size, NONE if not a power of two."""
    if block_size & (block_size - 1) != 0:
        return NONE
    shift = 0
    while 1 << shift < block_size:
        shift += 1
    return shift


@jit_stateful_inline
def in_block(tokens: int, options: EngineOptions) -> int:
    """Return ``tokens`` modulo the block size, at least 0 also for negative numbers."""
    block_size = options.block_size
    if options.block_shift >= 0:
        return int(tokens & (block_size - 1))
    return int(tokens % block_size)


@jit_stateful_inline
def engine_of(states: EngineState, replica: int) -> EngineState:
    """Return one replica's state."""
    return EngineState(
        states.scalars[replica],
        states.clock[replica],
        states.slots[replica],
        states.calendar[replica],
        states.due[replica],
        states.firsts[replica],
        states.fresh[replica],
        states.cells[replica],
    )


@jit_stateful_inline
def restart(state: EngineState, num_blocks: int) -> None:
    """Reset an engine, whose arrays may hold anything."""
    scalars, slots = state.scalars, state.slots
    end = state.cells.shape[0] - 1
    if end >= 0:
        columns = state.cells.shape[1]
        for at in range(0, columns - NUM_CELL_COLUMNS + 1, NUM_CELL_COLUMNS):
            state.cells[:, at : at + NEWER] = 0
            state.cells[end, at + NEWER] = end
            state.cells[end, at + OLDER] = end
        if columns > NUM_CELL_COLUMNS:
            state.cells[:, columns - 1] = 0
    scalars[:] = 0
    for name in (HEAD, TAIL, ARRIVED, DEADLINE, PREEMPTED, LAST, PARTIAL, FIRST_FETCHING):
        scalars[name] = NONE
    scalars[NUM_BLOCKS] = num_blocks
    scalars[FREE] = num_blocks
    scalars[LEAST_FREE] = num_blocks
    state.clock[:] = 0.0
    state.calendar[FIRST_SLOT] = NONE
    state.calendar[FILLED] = 0
    state.due[:] = 0
    count = slots.shape[1]
    for slot in range(count):
        slots[REQUEST, slot] = NONE
        slots[ORDER_NEXT, slot] = slot + 1 if slot + 1 < count else NONE
    scalars[FREE_SLOT] = 0


@jit_stateful_inline
def push_request(state: EngineState, requests: Requests, request: int) -> None:
    """Append a request to an engine's queue, in order of arrival."""
    scalars = state.scalars
    requests.next_arrived[request] = NONE
    if scalars[TAIL] != NONE:
        requests.next_arrived[scalars[TAIL]] = request
    scalars[TAIL] = request
    if scalars[HEAD] == NONE:
        scalars[HEAD] = request
    if scalars[ARRIVED] == NONE:
        scalars[ARRIVED] = request
    if scalars[DEADLINE] == NONE:
        scalars[DEADLINE] = request


@jit_stateful_inline
def queue_all(state: EngineState, requests: Requests, options: EngineOptions) -> None:
    """Queue all requests of a trace, or those that closed-loop clients send first; none of sessions."""
    count = len(requests.arrival_us)
    if options.has_parents > 0:
        return
    if options.clients > 0:
        clients = min(options.clients, count)
        state.scalars[RELEASED] = clients
        for request in range(clients):
            push_request(state, requests, request)
    else:
        for request in range(count):
            requests.next_arrived[request] = request + 1
        requests.next_arrived[count - 1] = NONE
        for name in (HEAD, ARRIVED, DEADLINE):
            state.scalars[name] = 0
        state.scalars[TAIL] = count - 1


@jit_stateful_inline
def release_next(state: EngineState, requests: Requests, options: EngineOptions, now_us: float) -> None:
    """Let a closed-loop client whose request ended send its next."""
    request = state.scalars[RELEASED]
    if request < len(requests.arrival_us):
        state.scalars[RELEASED] = request + 1
        requests.arrival_us[request] = now_us + options.think_us
        push_request(state, requests, request)


MANTISSA_BITS = 7
GAP_SHIFT = 52 - MANTISSA_BITS
FIRST_KEY = 1023 << MANTISSA_BITS  # 1 us
GAP_BINS = 41 << MANTISSA_BITS
"""Bins from 1 us to 25 days; shorter gaps are in the first bin."""

SERIES_BINS = 512

# fields of the series: integrals over a bin's time; tokens, counted when their step ends
RUNNING_US, WAITING_US, BLOCKS_US, BUSY_TIME_US, NEW_TOKENS, OUTPUT_TOKENS = range(6)
SERIES_FIELDS = 6


class Record(NamedTuple):
    """Gap counts by bin; the series, ``[bin, field]``; the width of the series' bins in ``width_us[0]``."""

    gaps: Longs
    series: Floats
    width_us: Floats


class BinPart(NamedTuple):
    """Steps within one bin of the series, not yet added: time, blocks times time, number of steps."""

    length_us: float
    blocks_us: float
    steps: int


@jit_stateful_inline
def gap_bin(gap_us: float) -> int:
    """Return the bin of a gap."""
    key = (float_bits(gap_us) >> GAP_SHIFT) - FIRST_KEY
    return int(min(max(key, 0), GAP_BINS - 1))


@jit_stateful_inline
def bin_of(record: Record, time_us: float) -> tuple[int, float]:
    """Return the series bin of a time and the bin's end; (0, 0.0) beyond the last bin."""
    width = record.width_us[0]
    i = int(time_us / width)
    return (i, (i + 1) * width) if i < SERIES_BINS else (0, 0.0)


@jit_stateful_inline
def add_part(record: Record, i: int, part: BinPart, running: int, waiting: int, decodes: int) -> None:
    """Add decode steps to their bin."""
    series = record.series
    series[i, RUNNING_US] += part.length_us * running
    series[i, WAITING_US] += part.length_us * waiting
    series[i, BLOCKS_US] += part.blocks_us
    series[i, BUSY_TIME_US] += part.length_us
    series[i, NEW_TOKENS] += part.steps * decodes
    series[i, OUTPUT_TOKENS] += part.steps * decodes


@jit_stateful_inline
def add_gaps(record: Record, gap_us: float, count: int) -> None:
    """Count ``count`` gaps of one length."""
    record.gaps[gap_bin(gap_us)] += count


@jit_stateful
def _widen(record: Record) -> None:
    series = record.series
    half = SERIES_BINS // 2
    for i in range(half):
        for field in range(SERIES_FIELDS):
            series[i, field] = series[2 * i, field] + series[2 * i + 1, field]
    series[half:] = 0.0
    record.width_us[0] *= 2.0


@jit_stateful
def _add_across(
    record: Record,
    from_us: float,
    to_us: float,
    running: int,
    waiting: int,
    blocks: int,
    tokens: tuple[int, int],
) -> None:
    """Add a step that spans bins: a part to each bin."""
    while to_us >= record.width_us[0] * SERIES_BINS:
        _widen(record)
    series, width = record.series, record.width_us[0]
    last = int(to_us / width)
    for i in range(int(from_us / width), last + 1):
        part_us = min(to_us, (i + 1) * width) - max(from_us, i * width)
        series[i, RUNNING_US] += part_us * running
        series[i, WAITING_US] += part_us * waiting
        series[i, BLOCKS_US] += part_us * blocks
        series[i, BUSY_TIME_US] += part_us
    series[last, NEW_TOKENS] += tokens[0]
    series[last, OUTPUT_TOKENS] += tokens[1]


@jit_stateful_inline
def add_interval(
    record: Record,
    from_us: float,
    to_us: float,
    running: int,
    waiting: int,
    blocks: int,
    tokens: tuple[int, int],
) -> None:
    """Add a step to the series: requests and blocks while it ran, tokens computed and tokens made."""
    width = record.width_us[0]
    place = from_us / width
    i = int(place)
    if to_us < (i + 1) * width and i < SERIES_BINS:
        series = record.series
        length_us = to_us - from_us
        series[i, RUNNING_US] += length_us * running
        series[i, WAITING_US] += length_us * waiting
        series[i, BLOCKS_US] += length_us * blocks
        series[i, BUSY_TIME_US] += length_us
        series[i, NEW_TOKENS] += tokens[0]
        series[i, OUTPUT_TOKENS] += tokens[1]
    else:
        _add_across(record, from_us, to_us, running, waiting, blocks, tokens)
