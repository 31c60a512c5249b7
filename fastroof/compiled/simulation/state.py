"""What an engine remembers between two steps: arrays that its loops read and write, and their slots.

A running request has a slot, of which nothing is touched while it decodes: all decodes go on by one token a
step, so what changes follows from the number of the step. Its number of computed tokens is BASE + decode
step; the block that it needs next falls due in steps with one remainder of the block size, whose requests
are counted (``due``); its last token falls due in a step whose bucket of the calendar it waits in.
"""

from __future__ import annotations

from typing import NamedTuple

from fastroof.arrays import Flags, Floats, Ints, Longs
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.llvm import float_bits

NONE = -1
"""No request, no slot, no step."""

FINISHED, TIMED_OUT, REJECTED = 0, 1, 2
"""Status of a request."""

CODE_STUCK = 1
"""Requests wait, none runs, and the first of them has no room: it never will."""

CODE_STOPPED = 2
"""Another thread set ``EngineOptions.stop``: what was written is part of a run."""


class EngineOptions(NamedTuple):
    """How an engine makes steps; flags are 0 or 1."""

    budget: int
    max_seqs: int
    block_size: int
    block_shift: int
    is_chunked: int
    admits_whole: int
    reserves_output: int
    prefill_first: int
    depth: int
    clients: int
    think_us: float
    timeout_us: float
    time_scale: float
    stop: Longs


class Requests(NamedTuple):
    """Requests in order of arrival. ``next_arrived`` links those of one engine; arrivals may be written."""

    arrival_us: Floats
    input_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints
    next_arrived: Ints


class Served(NamedTuple):
    """What has become of each request."""

    first_us: Floats
    last_us: Floats
    preemptions: Ints
    status: Flags
    sent: Ints
    next_preempted: Ints
    place: Ints


WAITING_PLACE, DONE_PLACE = -1, -2


class EngineState(NamedTuple):
    """One engine, or all replicas along the first axis: see :func:`engine_of`."""

    scalars: Longs
    clock: Floats
    slots: Longs
    calendar: Ints
    due: Ints
    firsts: Ints
    fresh: Ints


# scalars
(
    HEAD,  # next to be admitted of those that were never
    TAIL,  # last that was pushed
    ARRIVED,  # next to be counted as waiting
    DEADLINE,  # next to time out
    RELEASED,  # of a closed loop: next that a client sends
    PREEMPTED,  # last preempted, first to come back
    WAITING,
    RUNNING,  # slots taken
    FREE_SLOT,
    LAST,  # last admitted
    PARTIAL,  # slot of the prompt that is cut
    PARTIAL_COMPUTED,
    PARTIAL_WHOLE,
    FREE,  # blocks
    STEP,  # decode step to be scheduled next
    DECODES,  # that run in it
    KV_SUM,  # of them in it
    BELOW,  # decodes that attend to fewer tokens than the window has
    WINDOW_SUM,  # tokens within the window of all decodes
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
    FLIGHT_DECODES,  # whose tokens are awaited
    _,
    FLIGHT_FIRSTS,
    _,
    FLIGHT_TOKENS,
    _,
    NUM_FINISHED,
    NUM_BLOCKS,
    NUM_TIMED_OUT,
    FLIGHT_NEW,  # tokens of prompts, but for those of chunks that are timed as decodes
    _,
) = range(45)
NUM_SCALARS = 48

# clock, us
NOW, END, LAST_END, BUSY_US, LAST_DECODE_END, FLIGHT_US = range(6)
NUM_CLOCKS = 8

# fields of a slot; FINISH is the decode step with its last token, NONE where a prompt's own step has it
REQUEST, BASE, FINISH, ENTERED, BUCKET_NEXT, BUCKET_PREVIOUS, ORDER_NEXT, ORDER_PREVIOUS, HELD, FRESH_AT = (
    range(10)
)
NUM_FIELDS = 10

FIRST_SLOT, FILLED = 0, 1
"""Rows of the calendar."""

GOES_ON = -2
"""A slot in ``firsts`` that goes on after its first token is kept as this less the slot."""

PREEMPTED_FRESH = -2
"""A request in ``fresh`` that was preempted while its next token was under way is kept as this less it."""

FIRST_SIZE = 4
"""Rows of ``firsts``: requests and slots of two steps."""

GONE = -2
"""HELD of a slot whose blocks are free, and which only awaits its last token."""


@jit_stateful_inline
def blocks_of(tokens: int, options: EngineOptions) -> int:
    """Blocks of KV cache that so many tokens of one request take."""
    block_size, shift = options.block_size, options.block_shift
    if shift >= 0:
        return int((tokens + block_size - 1) >> shift)
    return int((tokens + block_size - 1) // block_size)


@jit_stateful_inline
def shift_of(block_size: int) -> int:
    """``block_shift`` of a block size."""
    if block_size & (block_size - 1) != 0:
        return NONE
    shift = 0
    while 1 << shift < block_size:
        shift += 1
    return shift


@jit_stateful_inline
def in_block(tokens: int, options: EngineOptions) -> int:
    """Tokens beyond whole blocks, of any number, a negative one included."""
    block_size = options.block_size
    if options.block_shift >= 0:
        return int(tokens & (block_size - 1))
    return int(tokens % block_size)


@jit_stateful_inline
def engine_of(states: EngineState, replica: int) -> EngineState:
    """One replica of several."""
    return EngineState(
        states.scalars[replica],
        states.clock[replica],
        states.slots[replica],
        states.calendar[replica],
        states.due[replica],
        states.firsts[replica],
        states.fresh[replica],
    )


@jit_stateful_inline
def restart(state: EngineState, num_blocks: int) -> None:
    """Empty an engine, whose arrays may hold anything."""
    scalars, slots = state.scalars, state.slots
    scalars[:] = 0
    for name in (HEAD, TAIL, ARRIVED, DEADLINE, PREEMPTED, LAST, PARTIAL):
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
    """Append a request to an engine's queue; those of one engine come in order of arrival."""
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
    """Send one engine all requests of a trace, or those that clients send first."""
    count = len(requests.arrival_us)
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
    """Let a client whose request has ended send its next."""
    request = state.scalars[RELEASED]
    if request < len(requests.arrival_us):
        state.scalars[RELEASED] = request + 1
        requests.arrival_us[request] = now_us + options.think_us
        push_request(state, requests, request)


MANTISSA_BITS = 7
GAP_SHIFT = 52 - MANTISSA_BITS
FIRST_KEY = 1023 << MANTISSA_BITS  # 1 us
GAP_BINS = 41 << MANTISSA_BITS
"""From 1 us on, what is shorter in the first; up to 25 days."""

SERIES_BINS = 512

# Fields of the series: integrals over a bin's time, and tokens by the end of their steps.
RUNNING_US, WAITING_US, BLOCKS_US, BUSY_TIME_US, NEW_TOKENS, OUTPUT_TOKENS = range(6)
SERIES_FIELDS = 6


class Record(NamedTuple):
    """Counts of gaps by bin, the series, and in ``width_us`` the width of one of its bins, us."""

    gaps: Longs
    series: Floats
    width_us: Floats


class BinPart(NamedTuple):
    """Steps within one bin of the series, not yet added to it: their time, blocks over it, how many."""

    length_us: float
    blocks_us: float
    steps: int


@jit_stateful_inline
def gap_bin(gap_us: float) -> int:
    """Bin of a gap."""
    key = (float_bits(gap_us) >> GAP_SHIFT) - FIRST_KEY
    return int(min(max(key, 0), GAP_BINS - 1))


@jit_stateful_inline
def bin_of(record: Record, time_us: float) -> tuple[int, float]:
    """Bin of the series that a time is in, and its end; one that has ended already beyond the last bin."""
    width = record.width_us[0]
    i = int(time_us / width)
    return (i, (i + 1) * width) if i < SERIES_BINS else (0, 0.0)


@jit_stateful_inline
def add_part(record: Record, i: int, part: BinPart, running: int, waiting: int, decodes: int) -> None:
    """Add steps of decodes to the bin that they are in."""
    series = record.series
    series[i, RUNNING_US] += part.length_us * running
    series[i, WAITING_US] += part.length_us * waiting
    series[i, BLOCKS_US] += part.blocks_us
    series[i, BUSY_TIME_US] += part.length_us
    series[i, NEW_TOKENS] += part.steps * decodes
    series[i, OUTPUT_TOKENS] += part.steps * decodes


@jit_stateful_inline
def add_gaps(record: Record, gap_us: float, count: int) -> None:
    """Count gaps of one length."""
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
    """:func:`add_interval` of any interval: a part to each bin that it touches."""
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
    """Add a step: what was there while it ran, and the tokens that it computed and that it made."""
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
