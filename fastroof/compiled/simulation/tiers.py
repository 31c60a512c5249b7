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

from fastroof.arrays import Ints
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation import records as R
from fastroof.compiled.simulation.records import Parts, Row, Rows
from fastroof.compiled.simulation.units import blocks_of


@jit_stateful_inline
def end_of_queue(on: Parts, rank: Row) -> int:
    """Return the place of the cell that ends the queues of a rank."""
    return int(rank.cells_at + len(on.segments) + len(on.chains))


@jit_stateful_inline
def _is_back(on: Parts, pool: Row, tier: int) -> bool:
    """Whether a tier, which may be one beyond the last, is written back to."""
    return bool(tier < pool.num_tiers and on.tiers[tier].writes == R.WRITE_BACK)


@jit_stateful_inline
def link_newest(cells: Ints, end: int, at: int, cell: int) -> None:
    """Append a segment to the queue in the columns from ``at`` on."""
    newest = cells[end, at + R.OLDER]
    cells[newest, at + R.NEWER] = cell
    cells[cell, at + R.OLDER] = newest
    cells[cell, at + R.NEWER] = end
    cells[end, at + R.OLDER] = cell


@jit_stateful_inline
def unlink(cells: Ints, at: int, cell: int) -> None:
    """Take a segment out of that queue."""
    older, newer = cells[cell, at + R.OLDER], cells[cell, at + R.NEWER]
    cells[older, at + R.NEWER] = newer
    cells[newer, at + R.OLDER] = older


@jit_stateful
def _store(cells: Ints, store: Row, end: int, at: int, cell: int, low: int, high: int) -> None:
    """Hold blocks of a segment, next to those held already, as the newest of a tier."""
    before = int(cells[cell, at + R.HIGH] - cells[cell, at + R.LOW])
    if before > 0:
        unlink(cells, at, cell)
        low, high = min(low, int(cells[cell, at + R.LOW])), max(high, int(cells[cell, at + R.HIGH]))
    cells[cell, at + R.LOW], cells[cell, at + R.HIGH] = low, high
    link_newest(cells, end, at, cell)
    more = high - low - before
    store.resident += more
    store.written += more


@jit_stateful
def trim(on: Parts, rank: Row, pool: Row) -> None:
    """Let every tier lose what it has no room for, to the next one if that is written back to."""
    cells, end = on.cells, end_of_queue(on, rank)
    for tier in range(pool.num_tiers):
        at = R.NUM_CELL_COLUMNS * (tier + 1)
        store = on.stores[rank.tiers_at + tier]
        over = store.resident - on.tiers[tier].blocks
        if over > 0:
            store.resident -= over
            store.lost += over
        while over > 0:
            cell = int(cells[end, at + R.NEWER])
            high = int(cells[cell, at + R.HIGH])
            gone = min(high - int(cells[cell, at + R.LOW]), over)
            over -= gone
            cells[cell, at + R.HIGH] = high - gone
            if high - gone == cells[cell, at + R.LOW]:
                unlink(cells, at, cell)
            if _is_back(on, pool, tier + 1):
                below = on.stores[rank.tiers_at + tier + 1]
                _store(cells, below, end, at + R.NUM_CELL_COLUMNS, cell, high - gone, high)
        store.most_resident = max(store.most_resident, store.resident)


@jit_stateful_inline
def store_evicted(on: Parts, rank: Row, pool: Row, cell: int, low: int, high: int) -> None:
    """Write blocks back that leave the GPU."""
    if _is_back(on, pool, 0):
        store = on.stores[rank.tiers_at]
        _store(on.cells, store, end_of_queue(on, rank), R.NUM_CELL_COLUMNS, cell, low, high)


@jit_stateful_inline
def store_freed(on: Parts, rank: Row, pool: Row, cell: int, start: int, prompt: int) -> None:
    """Write blocks through that no request holds any more, of one whose prompt has so many blocks."""
    for tier in range(pool.num_tiers):
        if on.tiers[tier].writes == R.WRITE_THROUGH:
            high = int(on.cells[cell, R.CACHED])
            if on.tiers[tier].is_prompts > 0:
                high = min(high, prompt - start)
            if high > 0:
                store = on.stores[rank.tiers_at + tier]
                _store(
                    on.cells, store, end_of_queue(on, rank), R.NUM_CELL_COLUMNS * (tier + 1), cell, 0, high
                )


@jit_stateful
def give_up(on: Parts, rank: Row, pool: Row, cell: int, stop: int) -> None:
    """Let tiers that are written back to give up blocks of a segment that are in the GPU again."""
    for tier in range(pool.num_tiers):
        at = R.NUM_CELL_COLUMNS * (tier + 1)
        low, high = int(on.cells[cell, at + R.LOW]), int(on.cells[cell, at + R.HIGH])
        if _is_back(on, pool, tier) and high > low and low < stop:
            now_low = min(high, stop)
            on.stores[rank.tiers_at + tier].resident -= now_low - low
            on.cells[cell, at + R.LOW] = now_low
            if now_low == high:
                unlink(on.cells, at, cell)


@jit_stateful_inline
def _end_of(cells: Ints, pool: Row, cell: int) -> int:
    """Count the leading blocks of a segment that are in the GPU or a tier; those before them are, too."""
    last = int(cells[cell, R.CACHED])
    for tier in range(pool.num_tiers):
        at = R.NUM_CELL_COLUMNS * (tier + 1)
        if cells[cell, at + R.HIGH] > cells[cell, at + R.LOW]:
            last = max(last, int(cells[cell, at + R.HIGH]))
    return last


@jit_stateful_inline
def _ask(on: Parts, rank: Row, pool: Row, cell: int, start: int, first: int, stop: int) -> None:
    """Count the blocks from ``first`` to ``stop`` of a segment that begins at ``start``, by tier."""
    place = max(first - start, 0)
    stop -= start
    for tier in range(pool.num_tiers):
        at = R.NUM_CELL_COLUMNS * (tier + 1)
        last = min(int(on.cells[cell, at + R.HIGH]), stop)
        if last > place and on.cells[cell, at + R.LOW] <= place:
            on.stores[rank.tiers_at + tier].wanted += last - place
            place = last


@jit_stateful
def ask_tiers(on: Parts, rank: Row, pool: Row, request: int, found: int, most: int) -> int:
    """Count a request's blocks that the GPU or tiers have, and by tier those to fetch, before ``most``."""
    cells, segments, chain, first = on.cells, on.segments, on.chains[request], rank.cells_at
    for tier in range(pool.num_tiers):
        on.stores[rank.tiers_at + tier].wanted = 0
    tail = first + len(segments) + request
    tail_start = int(chain.tail_start)
    reached, last_found = found, R.ROOT
    if _end_of(cells, pool, tail) > 0:
        reached = tail_start + _end_of(cells, pool, tail)
        _ask(on, rank, pool, tail, tail_start, found, min(reached, most))
    segment = int(chain.tail_parent)
    while segment != R.ROOT and segments[segment].stop > found:
        start = int(segments[segment].start)
        last = start + _end_of(cells, pool, first + segment)
        if last > start:
            reached = max(reached, last)
            _ask(on, rank, pool, first + segment, start, found, min(last, most))
        if cells[first + segment, R.CACHED] > 0:
            last_found = segment
        segment = int(segments[segment].parent)
    if last_found == R.ROOT:
        last_found = segment
    rank.is_arriving = 0
    if last_found != R.ROOT and cells[first + last_found, cells.shape[1] - 1] > rank.waits_ended:
        rank.is_arriving = 1
    return int(reached)


@jit_stateful_inline
def is_waited_for(on: Parts, rank: Row, pool: Row) -> bool:
    """Whether the request that was looked at last has to wait for blocks."""
    if rank.is_arriving > 0:
        return True
    for tier in range(pool.num_tiers):
        if on.stores[rank.tiers_at + tier].wanted > 0 and on.tiers[tier].fetches == R.WAITED_FOR:
            return True
    return False


@jit_stateful
def fetch(
    on: Parts, rank: Row, pool: Row, request: int, is_first: bool, now_us: float
) -> tuple[float, float]:
    """Fetch the blocks that a request wants. Returns when the last comes, us, and the last not by layer."""
    all_us, before_us = 0.0, 0.0
    for tier in range(pool.num_tiers):
        store, how = on.stores[rank.tiers_at + tier], on.tiers[tier]
        if store.wanted > 0:
            begin_us = max(now_us, store.link_free_us)
            store.link_free_us = begin_us + store.wanted * how.block_us
            end_us = store.link_free_us + how.latency_us
            all_us = max(all_us, end_us)
            if how.fetches != R.BY_LAYER:
                before_us = max(before_us, end_us)
            store.fetched += store.wanted
            if is_first:
                tokens = store.wanted * pool.block_size
                on.tier_tokens[request, tier] = tokens
                store.found_there += tokens
    return all_us, before_us


@jit_stateful_inline
def await_fetch(
    on: Parts, rank: Row, requests: Rows, request: int, found: int, end_us: float, now_us: float
) -> None:
    """Let a request, off its queue and with its blocks, wait for those after ``found``."""
    cells, segments, chain = on.cells, on.segments, on.chains[request]
    segment = int(chain.tail_parent)
    while segment != R.ROOT and segments[segment].stop > found:
        if segments[segment].start < chain.reached:
            cells[rank.cells_at + segment, cells.shape[1] - 1] = rank.waits_ended + rank.fetching + 1
        segment = int(segments[segment].parent)
    end_us = max(max(end_us, rank.fetched_by_us), now_us)
    rank.fetched_by_us = end_us
    rank.wait_us += end_us - now_us
    chain.fetched_us = end_us
    requests[request].next_preempted = R.NONE
    if rank.first_fetching == R.NONE:
        rank.first_fetching = request
    else:
        requests[rank.last_fetching].next_preempted = request
    rank.last_fetching = request
    rank.fetching += 1
    if on.has.timeouts > 0:
        requests[request].place = R.FETCHING_PLACE


@jit_stateful_inline
def fetched_us(rank: Row, chains: Rows) -> float:
    """Return when the first wait for a fetch ends, us, or inf."""
    return math.inf if rank.first_fetching == R.NONE else float(chains[rank.first_fetching].fetched_us)


@jit_stateful_inline
def end_wait(rank: Row, requests: Rows) -> None:
    """End the first wait, whose time has come."""
    rank.first_fetching = requests[rank.first_fetching].next_preempted
    rank.fetching -= 1
    rank.waits_ended += 1


@jit_stateful_inline
def reserved_blocks(pool: Row, requests: Rows, request: int) -> int:
    """Count the blocks that a request holds while it waits for a fetch."""
    row = requests[request]
    more = int(row.output_tokens) + pool.beyond if pool.reserves_output > 0 else int(row.sent)
    return blocks_of(int(row.input_tokens) + more, pool)


@jit_stateful_inline
def waited_us(step_us: float, layers: int, begins_us: float, all_us: float, before_us: float) -> float:
    """Return the time of a step that begins at a time and waits for fetches that end then, us.

    Layers come and are computed one after the other: the last one's computing follows all fetches, or the
    first one's fetch comes before all computing.
    """
    waits_us = max(before_us - begins_us, 0.0)
    left_us = all_us - begins_us - waits_us
    longer_us = step_us
    if left_us > 0.0:
        longer_us = max(left_us + step_us / layers, step_us + left_us / layers)
    return longer_us + waits_us


@jit_stateful
def empty_tiers(on: Parts, rank: Row, pool: Row) -> None:
    """Forget all blocks in the tiers of a rank without requests."""
    first, end = rank.cells_at, end_of_queue(on, rank)
    for tier in range(pool.num_tiers):
        at = R.NUM_CELL_COLUMNS * (tier + 1)
        on.cells[first : end + 1, at : at + R.NEWER] = 0
        on.cells[end, at + R.NEWER] = end
        on.cells[end, at + R.OLDER] = end
        on.stores[rank.tiers_at + tier].resident = 0
