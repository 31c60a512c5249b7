"""What a lane keeps: slots and their lists, decodes as sums, blocks, and requests that arrive or leave early.

Free slots are a list through ``order_next``. Slots in use are a doubly linked list in order of admission,
whose last one is the lane's ``last``. Slots whose last token falls due in the same step are another list, a
bucket.
"""

from __future__ import annotations

import math

from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.drafts import decode_need, tokens_seen
from fastroof.compiled.simulation.prefix_cache import publish_chunk, release_chain, settle
from fastroof.compiled.simulation.records import (
    DONE_PLACE,
    FETCHING_PLACE,
    GONE,
    NONE,
    TIMED_OUT,
    WAITING_PLACE,
    Parts,
    Row,
    Rows,
)
from fastroof.compiled.simulation.units import blocks_of, in_block


@jit_stateful_inline
def push_request(rank: Row, requests: Rows, request: int) -> None:
    """Append a request to a rank's queue, in order of arrival."""
    requests[request].next_sent = NONE
    if rank.tail != NONE:
        requests[rank.tail].next_sent = request
    rank.tail = request
    if rank.head == NONE:
        rank.head = request
    if rank.arrived == NONE:
        rank.arrived = request
    if rank.deadline == NONE:
        rank.deadline = request


@jit_stateful_inline
def see_arrivals(rank: Row, requests: Rows, now_us: float) -> None:
    """Count requests that have arrived by now as waiting."""
    while rank.arrived != NONE and requests[rank.arrived].arrival_us <= now_us:
        rank.arrived = requests[rank.arrived].next_sent
        rank.waiting += 1
    rank.peak_waiting = max(rank.peak_waiting, rank.waiting)


@jit_stateful_inline
def unlink_order(on: Parts, lane: Row, slot: int) -> None:
    """Remove a slot from those in order of admission."""
    before, after = on.slots[slot].order_previous, on.slots[slot].order_next
    if before != NONE:
        on.slots[before].order_next = after
    if after != NONE:
        on.slots[after].order_previous = before
    else:
        lane.last = before


@jit_stateful_inline
def free_slot(on: Parts, lane: Row, rank: Row, slot: int) -> None:
    """Return a slot, already removed from its lists, to the free ones."""
    on.slots[slot].request = NONE
    on.slots[slot].order_next = lane.free_slot
    lane.free_slot = slot
    rank.running -= 1
    if on.has.stages > 0:
        lane.running -= 1


@jit_stateful_inline
def take_slot(on: Parts, lane: Row, rank: Row, requests: Rows, request: int, held: int) -> int:
    """Give the first waiting request, already off its queue, a slot and its blocks, as the last admitted."""
    slot = lane.free_slot
    own = on.slots[slot]
    lane.free_slot = own.order_next
    own.request, own.held, own.finish = request, held, NONE
    if on.has.drafts > 0:
        own.kept = 1
    if on.has.order > 0:
        own.fresh_at = NONE
    own.order_next, own.order_previous = NONE, lane.last
    if lane.last != NONE:
        on.slots[lane.last].order_next = slot
    lane.last = slot
    rank.running += 1
    if on.has.stages > 0:
        lane.running += 1
    rank.waiting -= 1
    rank.free -= held
    if on.has.timeouts > 0:
        requests[request].place = slot
    return int(slot)


@jit_stateful_inline
def take_cut_prompt(
    on: Parts, lanes: Rows, rank: Row, pool: Row, requests: Rows, place: int, other: int
) -> None:
    """Let a rank's lane go on with the prompt that another one cut, if it has no cut prompt and a slot."""
    lane, before = lanes[rank.first_lane + place], lanes[rank.first_lane + other]
    slot, is_full = before.partial, pool.shares_slots == 0 and lane.running >= pool.max_num_seqs
    if slot == NONE or lane.partial != NONE or is_full:
        return
    request, held = int(on.slots[slot].request), int(on.slots[slot].held)
    unlink_order(on, before, slot)
    free_slot(on, before, rank, slot)
    before.partial = NONE
    # it neither waits nor takes blocks
    rank.waiting += 1
    rank.free += held
    lane.partial = take_slot(on, lane, rank, requests, request, held)
    lane.partial_computed, lane.partial_whole = before.partial_computed, before.partial_whole


@jit_stateful_inline
def enter_decodes(on: Parts, lane: Row, pool: Row, slot: int, whole: int, remaining: int) -> None:
    """Let a request with ``whole`` computed tokens decode ``remaining`` more, from the next step on."""
    own = on.slots[slot]
    step = lane.step
    finish = step + remaining - 1
    own.offset, own.finish, own.entered = whole - step, finish, step
    if on.has.drafts > 0 and pool.verified > 1:
        lane.decodes += 1
        lane.kv_sum += whole + 1
        on.due[lane.due_at] += decode_need(pool, own, whole)
        if pool.window > 0:
            lane.window_sum += tokens_seen(pool, whole)
        return
    place = lane.calendar_at + (finish & lane.mask)
    first = on.calendar[place]
    own.bucket_next, own.bucket_previous = first, NONE
    if first != NONE:
        on.slots[first].bucket_previous = slot
    on.calendar[place] = slot
    lane.decodes += 1
    lane.kv_sum += whole + 1
    on.due[lane.due_at + in_block(step - whole, pool)] += 1
    if on.has.windows > 0 and pool.window > 0:
        window = pool.window
        lane.window_sum += min(whole + 1, window)
        if whole + 1 < window:
            lane.below += 1
            filled = window - 1 - own.offset
            if filled <= finish:
                on.filled[lane.calendar_at + (filled & lane.mask)] += 1


@jit_stateful_inline
def leave_decodes(on: Parts, lane: Row, pool: Row, slot: int) -> None:
    """Subtract a request from the sums over decodes and from the counts of later steps."""
    own = on.slots[slot]
    kv_len = own.offset + lane.step + 1
    lane.decodes -= 1
    lane.kv_sum -= kv_len
    if on.has.drafts > 0 and pool.verified > 1:
        if pool.window > 0:
            lane.window_sum -= tokens_seen(pool, kv_len - 1)
        return
    on.due[lane.due_at + in_block(-own.offset, pool)] -= 1
    if on.has.windows > 0 and pool.window > 0:
        window = pool.window
        lane.window_sum -= min(kv_len, window)
        if kv_len < window:
            lane.below -= 1
            filled = window - 1 - own.offset
            if filled <= own.finish:
                on.filled[lane.calendar_at + (filled & lane.mask)] -= 1


@jit_stateful_inline
def unlink_bucket(on: Parts, lane: Row, slot: int) -> None:
    """Remove a slot from the bucket of the step with its last token."""
    own = on.slots[slot]
    before, after = own.bucket_previous, own.bucket_next
    if after != NONE:
        on.slots[after].bucket_previous = before
    if before != NONE:
        on.slots[before].bucket_next = after
    else:
        on.calendar[lane.calendar_at + (own.finish & lane.mask)] = after


@jit_stateful_inline
def _held_blocks(on: Parts, lane: Row, pool: Row, requests: Rows, slot: int) -> int:
    """Count the blocks that a running request holds."""
    own = on.slots[slot]
    if pool.reserves_output > 0 or (on.has.drafts > 0 and pool.verified > 1):
        return int(own.held)
    if slot == lane.partial:
        return blocks_of(lane.partial_computed, pool)
    if own.finish < lane.step:
        # its last token is in flight
        row = requests[own.request]
        return blocks_of(int(row.input_tokens) + int(row.output_tokens) - 1, pool)
    return blocks_of(own.offset + lane.step, pool)


@jit_stateful_inline
def _known_tokens(on: Parts, lane: Row, pool: Row, requests: Rows, slot: int) -> int:
    """Count tokens of a running request that are computed and known, whose blocks can be found."""
    own = on.slots[slot]
    if slot == lane.partial:
        return int(lane.partial_computed)
    behind = pool.depth - 1
    if on.has.drafts > 0 and pool.verified > 1:
        behind *= own.kept
    if own.finish >= lane.step:
        if own.entered == lane.step:
            behind = 0
        return int(own.offset + lane.step - behind)
    row = requests[own.request]
    if own.finish == NONE:
        behind = 0
    return int(int(row.input_tokens) + int(row.output_tokens) - 1 - behind)


@jit_stateful_inline
def _free_blocks(on: Parts, lane: Row, rank: Row, pool: Row, requests: Rows, slot: int) -> None:
    """Free the blocks of a running request."""
    held = _held_blocks(on, lane, pool, requests, slot)
    if on.has.cache > 0 and pool.has_cache > 0:
        known = _known_tokens(on, lane, pool, requests, slot) // pool.block_size
        release_chain(on, rank, pool, requests, on.slots[slot].request, held, known)
    else:
        rank.free += held


@jit_stateful_inline
def _leave_fresh(on: Parts, lane: Row, slot: int) -> None:
    """Remove a slot from ``fresh``; the last one moves into its place, so that there is always room."""
    own = on.slots[slot]
    last = lane.fresh - 1
    moved = on.fresh[lane.slots_at + last].slot
    left = on.fresh[lane.slots_at + own.fresh_at]
    left.request, left.slot = on.fresh[lane.slots_at + last].request, moved
    if moved != NONE:
        on.slots[moved].fresh_at = own.fresh_at
    own.fresh_at = NONE
    lane.fresh = last


@jit_stateful_inline
def _save_last_token(on: Parts, lane: Row, requests: Rows, slot: int, end_us: float) -> None:
    """Save the time of the latest token of a request that loses its slot; it may be in flight."""
    own = on.slots[slot]
    is_running = lane.in_flight > 0 and on.flights[lane.flights_at + lane.oldest].step == lane.step - 1
    is_awaited = own.entered < lane.step and is_running
    if on.has.order > 0 and own.fresh_at != NONE:
        if is_awaited:
            # its gap differs from that of other decodes
            on.fresh[lane.slots_at + own.fresh_at].slot = NONE
        else:
            _leave_fresh(on, lane, slot)
    elif is_awaited:
        requests[own.request].last_us = end_us
    elif own.entered < lane.step:
        requests[own.request].last_us = lane.last_decode_us
    # else its prompt's own step makes that token, and saves the time when it ends


@jit_stateful_inline
def _forget_need(on: Parts, lane: Row, pool: Row, slot: int) -> int:
    """Take what a decode that verifies drafts lacks off the lane's need. Returns it."""
    need = decode_need(pool, on.slots[slot], on.slots[slot].offset + lane.step)
    on.due[lane.due_at] -= need
    return need


@jit_stateful
def preempt_last(
    on: Parts, lane: Row, rank: Row, pool: Row, requests: Rows, end_us: float, partial_need: int
) -> int:
    """Preempt the last admitted request. Returns how many blocks fewer the step needs now."""
    slot = lane.last
    own = on.slots[slot]
    request = own.request
    row = requests[request]
    _free_blocks(on, lane, rank, pool, requests, slot)
    rank.preemptions += 1
    row.preemptions += 1
    unlink_order(on, lane, slot)
    less = 0
    if slot == lane.partial:
        lane.partial = NONE
        less = partial_need
    elif own.finish < lane.step:
        own.held = GONE
        return 0
    else:
        if on.has.drafts > 0 and pool.verified > 1:
            less = _forget_need(on, lane, pool, slot)
        elif in_block(own.offset + lane.step, pool) == 0:
            less = 1
        row.sent = row.output_tokens - (own.finish - lane.step + 1)
        _save_last_token(on, lane, requests, slot, end_us)
        leave_decodes(on, lane, pool, slot)
        if on.has.drafts == 0 or pool.verified == 1:
            unlink_bucket(on, lane, slot)
    free_slot(on, lane, rank, slot)
    row.next_preempted = rank.preempted
    rank.preempted = request
    rank.waiting += 1
    if on.has.timeouts > 0:
        row.place = WAITING_PLACE
    return int(less)


@jit_stateful_inline
def _forget_tokens(on: Parts, lane: Row, slot: int) -> None:
    """Remove a timed-out request's tokens from the steps in flight."""
    own = on.slots[slot]
    for i in range(lane.in_flight):
        at = (lane.oldest + i) & 1
        flight = on.flights[lane.flights_at + at]
        if own.finish == NONE:
            for k in range(flight.firsts):
                if on.firsts[at, lane.slots_at + k].slot == slot:
                    on.firsts[at, lane.slots_at + k].slot = NONE
        elif flight.step != NONE and own.entered <= flight.step <= own.finish:
            flight.decodes -= 1


@jit_stateful
def drop_request(
    on: Parts, lane: Row, rank: Row, pool: Row, requests: Rows, request: int, ending_us: float
) -> None:
    """Drop a timed-out request, wherever it is; ``ending_us`` is now if a step ends now, else nan."""
    row = requests[request]
    slot, last_us = int(row.place), row.last_us
    row.place, row.status, row.last_us = DONE_PLACE, TIMED_OUT, math.nan
    rank.timed_out += 1
    if slot == WAITING_PLACE:
        # the queue skips it
        rank.waiting -= 1
        if on.has.cache > 0 and pool.has_cache > 0 and on.chains[request].found < 0:
            rank.given_up_tokens += row.input_tokens
        if last_us == ending_us:
            # it was preempted while its token was in flight, in the step that ends now
            on.flights[lane.flights_at + lane.oldest].decodes -= 1
        return
    if slot == FETCHING_PLACE:
        # its blocks are freed when its fetch has ended
        return
    own = on.slots[slot]
    if own.held != GONE:
        _free_blocks(on, lane, rank, pool, requests, slot)
        unlink_order(on, lane, slot)
    if slot == lane.partial:
        lane.partial = NONE
    else:
        _forget_tokens(on, lane, slot)
        if on.has.order > 0 and own.fresh_at != NONE:
            _leave_fresh(on, lane, slot)
        if own.finish >= lane.step:
            leave_decodes(on, lane, pool, slot)
            if on.has.drafts > 0 and pool.verified > 1:
                _forget_need(on, lane, pool, slot)
        if own.finish != NONE and (on.has.drafts == 0 or pool.verified == 1 or own.finish < lane.step):
            unlink_bucket(on, lane, slot)
    free_slot(on, lane, rank, slot)


@jit_stateful_inline
def finish(
    on: Parts, lane: Row, rank: Row, pool: Row, requests: Rows, slot: int, keeps: bool, now_us: float
) -> None:
    """End a request that has its last token; it may keep its blocks."""
    own = on.slots[slot]
    request = own.request
    row = requests[request]
    row.last_us = now_us
    if own.held != GONE:
        held = own.held
        tokens = int(row.input_tokens) + int(row.output_tokens) - 1
        if pool.reserves_output == 0 and (on.has.drafts == 0 or pool.verified == 1):
            held = blocks_of(tokens, pool)
        if on.has.pools > 0 and keeps:
            publish_chunk(on, rank, pool, request, 0, tokens)
            if on.has.drafts > 0 and pool.verified > 1 and pool.reserves_output == 0:
                # it keeps those of its prompt alone
                if on.has.cache > 0 and pool.has_cache > 0:
                    settle(on, rank, pool)
                rank.free += held - blocks_of(tokens, pool)
        elif on.has.cache > 0 and pool.has_cache > 0:
            release_chain(on, rank, pool, requests, request, held, tokens // pool.block_size)
        else:
            rank.free += held
        unlink_order(on, lane, slot)
    free_slot(on, lane, rank, slot)
    rank.finished += 1
    if on.has.timeouts > 0:
        row.place = DONE_PLACE
