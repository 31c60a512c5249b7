"""Tiers of KV cache below a GPU's: blocks that leave the GPU stay findable, at the price of a fetch.

A tier holds a run of blocks of each segment, from ``LOW`` to ``HIGH``, and a queue of its segments, the
longest unused first. When it is full the oldest segment loses its last block, and so on, as in the GPU.

* A *write-back* tier gets what leaves the tier above it, the GPU's cache for the first, and gives up what is
  in the GPU again. So tiers hold what comes after the GPU's blocks of a segment, in order.
* A *write-through* tier gets a copy of what no request holds any more. While blocks are held they are in the
  GPU, so nothing else can tell that they are not copied sooner.

Whatever is in any of them starts at the root: a chain has no gaps. Each block is fetched from the first tier
that has it, over that tier's link, which sends one request's blocks after the other's in order of admission;
writes go the other way and delay nothing. A request that needs blocks of a tier that is waited for holds the
blocks of its whole prompt meanwhile, and such waits end in the order in which they started, also if it gives
up. Blocks on their way are found in the GPU, and who finds them waits as long. What others compute of its
prompt meanwhile it holds and uses. Blocks of other tiers come with the step that the request starts in: it
begins when they are there, or computes each layer when that is.

If some of a chain's blocks are on their way, those of its last segment in the GPU are: what follows them is
computed or fetched by requests that waited for them, or wait themselves.
"""

from __future__ import annotations

import math

from fastroof.arrays import Ints, Longs
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.state import (
    CACHED,
    END,
    ENDED,
    FETCHED_BY,
    FETCHING,
    FETCHING_PLACE,
    FIRST_FETCHING,
    FLIGHT_US,
    IS_ARRIVING,
    LAST_FETCHING,
    NEWER,
    NONE,
    NOW,
    NUM_CELL_COLUMNS,
    NUM_CLOCKS,
    NUM_COLUMNS,
    NUM_SCALARS,
    OLDER,
    PARENT,
    REACHED,
    ROOT,
    START,
    STEP_WAIT_US,
    STOP,
    TAIL_PARENT,
    TAIL_START,
    WAIT_US,
    EngineOptions,
    EngineState,
    Requests,
    Served,
    blocks_of,
)

# columns of ``options.tiers``: blocks; time of a block and of a fetch's start, us; how it is written and
# fetched; 1 if only prompts are stored; layers of the model
BLOCKS, BLOCK_US, LATENCY_US, WRITES, FETCHES, IS_PROMPTS, LAYERS = range(7)
NUM_TIER_COLUMNS = 7

WRITE_THROUGH, WRITE_BACK = 0, 1
WAITED_FOR, BEFORE_STEP, BY_LAYER = 0, 1, 2
"""How blocks are fetched: while their request waits, before its step begins, or layer by layer."""

# in place of CACHED and HOLDERS in a tier's cells
LOW, HIGH = 0, 1

# scalars of a tier, after those of the engine: blocks there, and the most; blocks fetched, written and lost;
# tokens found at first admissions; blocks that the request looked at last has there
RESIDENT, MOST_RESIDENT, FETCHED, WRITTEN, LOST, FOUND_THERE, ASKED = range(7)
NUM_TIER_SCALARS = 8


@jit_stateful_inline
def tier_scalar(tier: int, name: int) -> int:
    """Return the place of a tier's scalar; that of its clock, when its link is free, is NUM_CLOCKS + tier."""
    return NUM_SCALARS + tier * NUM_TIER_SCALARS + name


@jit_stateful_inline
def _of_tier(options: EngineOptions, tier: int, name: int) -> float:
    """Return a column of a tier."""
    return float(options.tiers[tier * NUM_TIER_COLUMNS + name])


@jit_stateful_inline
def _is_back(options: EngineOptions, tier: int) -> bool:
    """Whether a tier, which may be one beyond the last, is written back to."""
    return bool(tier < options.num_tiers and _of_tier(options, tier, WRITES) == WRITE_BACK)


@jit_stateful_inline
def link_newest(cells: Ints, at: int, segment: int) -> None:
    """Append a segment to the queue in the columns from ``at`` on."""
    end = cells.shape[0] - 1
    newest = cells[end, at + OLDER]
    cells[newest, at + NEWER] = segment
    cells[segment, at + OLDER] = newest
    cells[segment, at + NEWER] = end
    cells[end, at + OLDER] = segment


@jit_stateful_inline
def unlink(cells: Ints, at: int, segment: int) -> None:
    """Take a segment out of that queue."""
    older, newer = cells[segment, at + OLDER], cells[segment, at + NEWER]
    cells[older, at + NEWER] = newer
    cells[newer, at + OLDER] = older


@jit_stateful
def _store(scalars: Longs, cells: Ints, tier: int, segment: int, low: int, high: int) -> None:
    """Hold blocks of a segment, next to those held already, as the newest of a tier."""
    at = NUM_CELL_COLUMNS * (tier + 1)
    before = cells[segment, at + HIGH] - cells[segment, at + LOW]
    if before > 0:
        unlink(cells, at, segment)
        low, high = min(low, cells[segment, at + LOW]), max(high, cells[segment, at + HIGH])
    cells[segment, at + LOW], cells[segment, at + HIGH] = low, high
    link_newest(cells, at, segment)
    more = high - low - before
    scalars[tier_scalar(tier, RESIDENT)] += more
    scalars[tier_scalar(tier, WRITTEN)] += more


@jit_stateful
def trim(scalars: Longs, cells: Ints, options: EngineOptions) -> None:
    """Let every tier lose what it has no room for, to the next one if that is written back to."""
    end = cells.shape[0] - 1
    for tier in range(options.num_tiers):
        at = NUM_CELL_COLUMNS * (tier + 1)
        resident = tier_scalar(tier, RESIDENT)
        over = scalars[resident] - int(_of_tier(options, tier, BLOCKS))
        if over > 0:
            scalars[resident] -= over
            scalars[tier_scalar(tier, LOST)] += over
        while over > 0:
            segment = cells[end, at + NEWER]
            high = cells[segment, at + HIGH]
            gone = min(high - cells[segment, at + LOW], over)
            over -= gone
            cells[segment, at + HIGH] = high - gone
            if high - gone == cells[segment, at + LOW]:
                unlink(cells, at, segment)
            if _is_back(options, tier + 1):
                _store(scalars, cells, tier + 1, segment, high - gone, high)
        most = tier_scalar(tier, MOST_RESIDENT)
        scalars[most] = max(scalars[most], scalars[resident])


@jit_stateful_inline
def store_evicted(
    scalars: Longs, cells: Ints, options: EngineOptions, segment: int, low: int, high: int
) -> None:
    """Write blocks back that leave the GPU."""
    if _is_back(options, 0):
        _store(scalars, cells, 0, segment, low, high)


@jit_stateful_inline
def store_freed(
    scalars: Longs, cells: Ints, options: EngineOptions, segment: int, start: int, prompt: int
) -> None:
    """Write blocks through that no request holds any more, of one whose prompt has so many blocks."""
    for tier in range(options.num_tiers):
        if _of_tier(options, tier, WRITES) == WRITE_THROUGH:
            high = cells[segment, CACHED]
            if _of_tier(options, tier, IS_PROMPTS) > 0.0:
                high = min(high, prompt - start)
            if high > 0:
                _store(scalars, cells, tier, segment, 0, high)


@jit_stateful
def give_up(scalars: Longs, cells: Ints, options: EngineOptions, segment: int, stop: int) -> None:
    """Let tiers that are written back to give up blocks of a segment that are in the GPU again."""
    for tier in range(options.num_tiers):
        at = NUM_CELL_COLUMNS * (tier + 1)
        low, high = cells[segment, at + LOW], cells[segment, at + HIGH]
        if _is_back(options, tier) and high > low and low < stop:
            now_low = min(high, stop)
            scalars[tier_scalar(tier, RESIDENT)] -= now_low - low
            cells[segment, at + LOW] = now_low
            if now_low == high:
                unlink(cells, at, segment)


@jit_stateful_inline
def _end_of(cells: Ints, options: EngineOptions, segment: int) -> int:
    """Count the leading blocks of a segment that are in the GPU or a tier; those before them are, too."""
    last = cells[segment, CACHED]
    for tier in range(options.num_tiers):
        at = NUM_CELL_COLUMNS * (tier + 1)
        if cells[segment, at + HIGH] > cells[segment, at + LOW]:
            last = max(last, cells[segment, at + HIGH])
    return int(last)


@jit_stateful_inline
def _ask(
    scalars: Longs, cells: Ints, options: EngineOptions, segment: int, start: int, first: int, stop: int
) -> None:
    """Count the blocks from ``first`` to ``stop`` of a segment that begins at ``start``, by tier."""
    place = max(first - start, 0)
    stop -= start
    for tier in range(options.num_tiers):
        at = NUM_CELL_COLUMNS * (tier + 1)
        last = min(cells[segment, at + HIGH], stop)
        if last > place and cells[segment, at + LOW] <= place:
            scalars[tier_scalar(tier, ASKED)] += last - place
            place = last


@jit_stateful
def ask_tiers(
    state: EngineState, options: EngineOptions, requests: Requests, request: int, found: int, most: int
) -> int:
    """Count a request's blocks that the GPU or tiers have, and by tier those to fetch, before ``most``."""
    scalars, cells, segments = state.scalars, state.cells, requests.segments
    for tier in range(options.num_tiers):
        scalars[tier_scalar(tier, ASKED)] = 0
    tail = segments.shape[0] + request
    tail_start = requests.rows[request, TAIL_START]
    reached, last_found = found, ROOT
    if _end_of(cells, options, tail) > 0:
        reached = tail_start + _end_of(cells, options, tail)
        _ask(scalars, cells, options, tail, tail_start, found, min(reached, most))
    segment = requests.rows[request, TAIL_PARENT]
    while segment != ROOT and segments[segment, STOP] > found:
        last = segments[segment, START] + _end_of(cells, options, segment)
        if last > segments[segment, START]:
            reached = max(reached, last)
            _ask(scalars, cells, options, segment, segments[segment, START], found, min(last, most))
        if cells[segment, CACHED] > 0:
            last_found = segment
        segment = segments[segment, PARENT]
    if last_found == ROOT:
        last_found = segment
    scalars[IS_ARRIVING] = 0
    if last_found != ROOT and cells[last_found, cells.shape[1] - 1] > scalars[ENDED]:
        scalars[IS_ARRIVING] = 1
    return int(reached)


@jit_stateful_inline
def is_waited_for(state: EngineState, options: EngineOptions) -> bool:
    """Whether the request that was looked at last has to wait for blocks."""
    if state.scalars[IS_ARRIVING] > 0:
        return True
    for tier in range(options.num_tiers):
        blocks = state.scalars[tier_scalar(tier, ASKED)]
        if blocks > 0 and _of_tier(options, tier, FETCHES) == WAITED_FOR:
            return True
    return False


@jit_stateful
def fetch(
    state: EngineState, options: EngineOptions, requests: Requests, request: int, is_first: bool
) -> tuple[float, float]:
    """Fetch the blocks that were asked for. Returns when the last comes, us, and the last not by layer."""
    scalars, clock = state.scalars, state.clock
    all_us, before_us = 0.0, 0.0
    for tier in range(options.num_tiers):
        blocks = scalars[tier_scalar(tier, ASKED)]
        if blocks > 0:
            link = NUM_CLOCKS + tier
            begin_us = max(clock[NOW], clock[link])
            clock[link] = begin_us + blocks * _of_tier(options, tier, BLOCK_US)
            end_us = clock[link] + _of_tier(options, tier, LATENCY_US)
            all_us = max(all_us, end_us)
            if _of_tier(options, tier, FETCHES) != BY_LAYER:
                before_us = max(before_us, end_us)
            scalars[tier_scalar(tier, FETCHED)] += blocks
            if is_first:
                tokens = blocks * options.block_size
                requests.rows[request, NUM_COLUMNS + tier] = tokens
                scalars[tier_scalar(tier, FOUND_THERE)] += tokens
    return all_us, before_us


@jit_stateful_inline
def await_fetch(
    state: EngineState,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    request: int,
    found: int,
    end_us: float,
) -> None:
    """Let a request, off its queue and with its blocks, wait for those after ``found``."""
    scalars, clock, cells, segments = state.scalars, state.clock, state.cells, requests.segments
    segment = requests.rows[request, TAIL_PARENT]
    while segment != ROOT and segments[segment, STOP] > found:
        if segments[segment, START] < requests.rows[request, REACHED]:
            cells[segment, cells.shape[1] - 1] = scalars[ENDED] + scalars[FETCHING] + 1
        segment = segments[segment, PARENT]
    end_us = max(max(end_us, clock[FETCHED_BY]), clock[NOW])
    clock[FETCHED_BY] = end_us
    clock[WAIT_US] += end_us - clock[NOW]
    served.fetched_us[request] = end_us
    served.next_preempted[request] = NONE
    if scalars[FIRST_FETCHING] == NONE:
        scalars[FIRST_FETCHING] = request
    else:
        served.next_preempted[scalars[LAST_FETCHING]] = request
    scalars[LAST_FETCHING] = request
    scalars[FETCHING] += 1
    if options.timeout_us < math.inf:
        served.place[request] = FETCHING_PLACE


@jit_stateful_inline
def fetched_us(state: EngineState, served: Served) -> float:
    """Return when the first wait for a fetch ends, us, or inf."""
    first = state.scalars[FIRST_FETCHING]
    return math.inf if first == NONE else float(served.fetched_us[first])


@jit_stateful_inline
def end_wait(state: EngineState, served: Served) -> int:
    """End the first wait, whose time has come. Returns the request."""
    scalars = state.scalars
    request = scalars[FIRST_FETCHING]
    scalars[FIRST_FETCHING] = served.next_preempted[request]
    scalars[FETCHING] -= 1
    scalars[ENDED] += 1
    return int(request)


@jit_stateful_inline
def reserved_blocks(options: EngineOptions, requests: Requests, served: Served, request: int) -> int:
    """Count the blocks that a request holds while it waits for a fetch."""
    more = requests.output_tokens[request] if options.reserves_output else served.sent[request]
    return blocks_of(requests.input_tokens[request] + more, options)


@jit_stateful_inline
def step_begins_us(state: EngineState) -> float:
    """Return when the next step to be scheduled begins, us."""
    return float(max(state.clock[NOW], state.clock[END]))


@jit_stateful
def wait_in_step(
    state: EngineState, options: EngineOptions, flight: int, begins_us: float, all_us: float, before_us: float
) -> float:
    """Let a step that begins at a time wait for fetches that end then. Returns its time, us.

    Layers come and are computed one after the other: the last one's computing follows all fetches, or the
    first one's fetch comes before all computing.
    """
    clock = state.clock
    step_us = clock[FLIGHT_US + flight]
    waits_us = max(before_us - begins_us, 0.0)
    left_us = all_us - begins_us - waits_us
    longer_us = step_us
    if left_us > 0.0:
        layers = options.tiers[LAYERS]
        longer_us = max(left_us + step_us / layers, step_us + left_us / layers)
    longer_us += waits_us
    clock[STEP_WAIT_US] += longer_us - step_us
    clock[FLIGHT_US + flight] = longer_us
    return float(longer_us)
