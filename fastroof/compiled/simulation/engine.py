"""One engine over time: a batch leaves its last stage, requests arrive and time out, idle lanes get steps.

At one instant requests are dropped whose deadline has passed, then tokens come, requests that end let others
come, those whose deadline is now are dropped, and idle lanes get steps.
"""

from __future__ import annotations

import math

from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.batches import note_step, ranks_in, schedule
from fastroof.compiled.simulation.decodes import run_decodes
from fastroof.compiled.simulation.front_end import front_end_us, route_due
from fastroof.compiled.simulation.lanes import drop_request, finish, push_request, see_arrivals
from fastroof.compiled.simulation.records import (
    CODE_STOPPED,
    CODE_STUCK,
    DONE_PLACE,
    GOES_ON,
    GONE,
    NONE,
    TIMED_OUT,
    WAITING_PLACE,
    Fleet,
    Parts,
    Row,
    Rows,
)
from fastroof.compiled.simulation.router import choose_rank, parts_of
from fastroof.compiled.simulation.scheduler import blocks_needed
from fastroof.compiled.simulation.series import Record, add_gaps
from fastroof.compiled.simulation.tiers import fetched_us
from fastroof.compiled.simulation.transfers import (
    coming_us,
    deadline_us,
    end_request,
    has_late_first,
    is_coupled,
    next_transfer_us,
    push_begin,
    send,
)
from fastroof.compiled.steps import open_plan


@jit_stateful_inline
def prompt_blocks(pool: Row, requests: Rows, request: int) -> int:
    """Count the blocks that a computed prompt holds, with those of its output where these are reserved."""
    tokens = int(requests[request].input_tokens)
    return int(blocks_needed(requests[request], pool, False, tokens, tokens)[0])


# -- a step ends -------------------------------------------------------------------------------------


@jit_stateful_inline
def _leave(fleet: Fleet, pool: Row, request: int, now_us: float, home: int) -> None:
    """Let a request that leaves an engine go on: to the next pool, from the rank ``home``, or to its end."""
    if fleet.has.pools > 0 and pool.has_next > 0:
        transfer = fleet.transfers[request]
        if transfer.goes_on > 0:
            transfer.ready_us, transfer.home = now_us, home
            line, ready = fleet.line[0], fleet.ready
            # in order of requests
            at = line.ready_size
            line.ready_size += 1
            while at > 0 and ready[at - 1] > request:
                ready[at] = ready[at - 1]
                at -= 1
            ready[at] = request
            return
    end_request(fleet, request, now_us)


@jit_stateful_inline
def _end_decodes(
    fleet: Fleet,
    pool: Row,
    on: Parts,
    lane: Row,
    rank: Row,
    requests: Rows,
    record: Record,
    flight: Row,
    now_us: float,
) -> None:
    """Record a token for every decode of a step; requests in the step's bucket end."""
    decodes = flight.decodes
    if fleet.has.order > 0:
        for i in range(lane.fresh):
            # requests that prefilled since the last decode step
            held = on.fresh[lane.slots_at + i]
            if held.slot != NONE:
                on.slots[held.slot].fresh_at = NONE
            decodes -= 1
            row = requests[held.request]
            if row.status != TIMED_OUT:
                add_gaps(record, now_us - row.last_us, 1)
                row.last_us = now_us
        lane.fresh = 0
    if decodes > 0:
        add_gaps(record, now_us - lane.last_decode_us, decodes)
    lane.last_decode_us = now_us
    place = lane.calendar_at + (flight.step & lane.mask)
    slot = int(on.calendar[place])
    if slot != NONE:
        on.calendar[place] = NONE
        is_reversed = fleet.has.cache > 0 and pool.has_cache > 0
        if is_reversed:
            # blocks are freed in the order of entering, which buckets hold reversed
            while on.slots[slot].bucket_next != NONE:
                slot = int(on.slots[slot].bucket_next)
        while slot != NONE:
            own = on.slots[slot]
            after = int(own.bucket_previous if is_reversed else own.bucket_next)
            request = int(own.request)
            finish(on, lane, rank, pool, requests, slot, False, now_us)
            _leave(fleet, pool, request, now_us, NONE)
            slot = after


@jit_stateful_inline
def _end_step(
    fleet: Fleet,
    pool: Row,
    engine: Row,
    on: Parts,
    lane: Row,
    rank: Row,
    home: int,
    requests: Rows,
    record: Record,
    now_us: float,
) -> None:
    """Record the tokens of a lane's oldest step, and end the requests whose last ones they are."""
    at = lane.oldest
    flight = on.flights[lane.flights_at + at]
    if fleet.has.order == 0 or flight.step != NONE:
        _end_decodes(fleet, pool, on, lane, rank, requests, record, flight, now_us)
    for i in range(flight.firsts):
        first = on.firsts[at, lane.slots_at + i]
        request, slot = int(first.request), int(first.slot)
        row = requests[request]
        if fleet.has.timeouts > 0 and row.status == TIMED_OUT:
            continue
        if math.isnan(row.first_us):
            row.first_us = now_us
        else:
            add_gaps(record, now_us - row.last_us, 1)
        row.last_us = now_us
        if slot >= 0:
            # its blocks are gone if it was preempted with its token in flight
            its_home = NONE if on.slots[slot].held == GONE else home
            keeps = False
            if fleet.has.pools > 0 and pool.has_next > 0:
                keeps = fleet.line[0].reserves > 0 and fleet.transfers[request].goes_on > 0
            finish(on, lane, rank, pool, requests, slot, keeps, now_us)
            _leave(fleet, pool, request, now_us, its_home)
        elif fleet.has.order > 0 and slot <= GOES_ON and pool.prefill_first > 0:
            slot = GOES_ON - slot
            if on.slots[slot].request == request:
                on.slots[slot].fresh_at = lane.fresh
                held = on.fresh[lane.slots_at + lane.fresh]
                held.request, held.slot = request, slot
                lane.fresh += 1
    if fleet.has.stages == 0 or pool.stages == 1:
        engine.busy_us += flight.us
    lane.oldest = 1 - at
    lane.in_flight -= 1


@jit_stateful_inline
def _send_ready(fleet: Fleet, pool: Row, step_us: float, now_us: float) -> None:
    """Let prompts begin to be sent whose step ends now."""
    line = fleet.line[0]
    for i in range(line.ready_size):
        request = int(fleet.ready[i])
        fleet.transfers[request].step_us = step_us
        if line.reserves > 0 or line.layers > 0 or pool.engines_each > 1:
            push_begin(fleet, request)
        else:
            # its replica sends no other now
            send(fleet, request, now_us)
    line.ready_size = 0


# -- requests arrive and give up ---------------------------------------------------------------------


@jit_stateful_inline
def _see_sent(fleet: Fleet, pool: Row, engine: Row, requests: Rows, now_us: float) -> None:
    """Count arrivals as waiting; ranks get them by the engine's rule."""
    if fleet.has.ranks > 0 and pool.ranks > 1:
        while engine.first_sent != NONE and requests[engine.first_sent].arrival_us <= now_us:
            request = engine.first_sent
            engine.first_sent = requests[request].next_sent
            engine.sent -= 1
            place = choose_rank(
                fleet.ranks, fleet.engines, engine.first_rank, pool.ranks, engine.given, pool.assignment, NONE
            )
            engine.given += 1
            rank = fleet.ranks[engine.first_rank + place]
            push_request(rank, requests, request)
            see_arrivals(rank, requests, now_us)
    else:
        see_arrivals(fleet.ranks[engine.first_rank], requests, now_us)


@jit_stateful
def _drop(
    fleet: Fleet,
    pool: Row,
    on: Parts,
    rank: Row,
    requests: Rows,
    request: int,
    now_us: float,
    ending_us: float,
) -> None:
    """Drop a request of a rank whose deadline has passed."""
    row = requests[request]
    batch = 0
    if fleet.has.stages > 0 and pool.stages > 1:
        # a preempted request has no token in flight
        ending_us = math.nan
        for one in range(pool.stages):
            if row.place >= fleet.lanes[rank.first_lane + one].slots_at:
                batch = one
    if fleet.has.pools > 0 and pool.has_reserved > 0 and row.preemptions == 0 and row.place == WAITING_PLACE:
        rank.free += prompt_blocks(pool, requests, request)
    drop_request(on, fleet.lanes[rank.first_lane + batch], rank, pool, requests, request, ending_us)
    end_request(fleet, request, now_us)


@jit_stateful_inline
def _time_out(
    fleet: Fleet, pool: Row, engine: Row, on: Parts, requests: Rows, now_us: float, is_strict: bool
) -> None:
    """Drop requests whose deadline is before now or, unless ``is_strict``, now."""
    ending_us = now_us if is_strict else math.nan
    for place in range(engine.first_rank, engine.first_rank + ranks_in(fleet, pool)):
        rank = fleet.ranks[place]
        while rank.deadline != NONE:
            request = int(rank.deadline)
            due_us = deadline_us(fleet, request)
            if due_us > now_us or (is_strict and (due_us == now_us or request == rank.arrived)):
                # what came while the step ran is seen, and dropped, once the step has ended
                break
            rank.deadline = requests[request].next_sent
            if requests[request].place != DONE_PLACE:
                _drop(fleet, pool, on, rank, requests, request, now_us, ending_us)


@jit_stateful
def _time_out_later(
    fleet: Fleet, pool: Row, engine: Row, on: Parts, requests: Rows, now_us: float, is_strict: bool
) -> None:
    """Do so where requests are not in order of their deadlines.

    All that the engine has are looked at; that is rare, as no deadline is before ``least_us``.
    """
    ending_us = now_us if is_strict else math.nan
    least_us = math.inf
    for place in range(engine.first_rank, engine.first_rank + ranks_in(fleet, pool)):
        rank = fleet.ranks[place]
        if not is_strict:
            see_arrivals(rank, requests, now_us)
        while rank.deadline != NONE and requests[rank.deadline].place == DONE_PLACE:
            rank.deadline = requests[rank.deadline].next_sent
        request, is_seen = int(rank.deadline), True
        while request != NONE:
            is_seen = is_seen and request != rank.arrived
            if requests[request].place != DONE_PLACE:
                due_us = deadline_us(fleet, request)
                if is_seen and (due_us < now_us or (due_us == now_us and not is_strict)):
                    _drop(fleet, pool, on, rank, requests, request, now_us, ending_us)
                else:
                    least_us = min(least_us, due_us)
            request = int(requests[request].next_sent)
    request = int(engine.first_sent)
    while request != NONE:
        least_us = min(least_us, deadline_us(fleet, request))
        request = int(requests[request].next_sent)
    engine.least_us = least_us


@jit_stateful_inline
def _drop_late(
    fleet: Fleet, pool: Row, engine: Row, on: Parts, requests: Rows, now_us: float, is_strict: bool
) -> None:
    """Drop requests whose clients have given up."""
    if has_late_first(fleet, engine.pool):
        if engine.least_us <= now_us:
            _time_out_later(fleet, pool, engine, on, requests, now_us, is_strict)
    else:
        _time_out(fleet, pool, engine, on, requests, now_us, is_strict)


# -- from event to event -----------------------------------------------------------------------------


@jit_stateful_inline
def _next_deadline_us(fleet: Fleet, engine: Row, rank: Row) -> float:
    """Return a time that is not after the next deadline of a rank's requests, us, or inf."""
    if has_late_first(fleet, engine.pool):
        return float(engine.least_us)
    return math.inf if rank.deadline == NONE else float(deadline_us(fleet, rank.deadline))


@jit_stateful_inline
def _idle_next_us(fleet: Fleet, pool: Row, engine: Row, requests: Rows) -> float:
    """Return when an engine without a step goes on: its next arrival or end of a fetch, or inf."""
    request = fleet.ranks[engine.first_rank].arrived
    if fleet.has.ranks > 0 and pool.ranks > 1:
        request = engine.first_sent
    next_us = math.inf if request == NONE else requests[request].arrival_us
    if fleet.has.tiers > 0 and pool.num_tiers > 0:
        for place in range(engine.first_rank, engine.first_rank + ranks_in(fleet, pool)):
            rank = fleet.ranks[place]
            if rank.fetching > 0:
                next_us = min(next_us, fetched_us(rank, fleet.chains))
                if fleet.has.timeouts > 0:
                    next_us = min(next_us, _next_deadline_us(fleet, engine, rank))
    return float(max(engine.now_us, next_us))


@jit_stateful_inline
def _is_stuck(fleet: Fleet, pool: Row, engine: Row) -> bool:
    """Whether requests wait at an engine without a step, and none of them for a fetch."""
    waiting, fetching = 0, 0
    if engine.in_flight == 0:
        for place in range(engine.first_rank, engine.first_rank + ranks_in(fleet, pool)):
            waiting += fleet.ranks[place].waiting
            fetching += fleet.ranks[place].fetching
    return bool(waiting > 0 and fetching == 0)


@jit_stateful_inline
def _horizon_us(fleet: Fleet, pool: Row, engine: Row, rank: Row, requests: Rows, until_us: float) -> float:
    """Return the time of the next arrival, time-out or end of a fetch, or ``until_us``."""
    horizon_us = until_us
    if rank.arrived != NONE:
        horizon_us = min(horizon_us, requests[rank.arrived].arrival_us)
    if fleet.has.timeouts > 0:
        horizon_us = min(horizon_us, _next_deadline_us(fleet, engine, rank))
    if fleet.has.tiers > 0 and pool.num_tiers > 0:
        fetch_us = fetched_us(rank, fleet.chains)
        if fetch_us > engine.now_us:
            horizon_us = min(horizon_us, fetch_us)
    return float(horizon_us)


@jit_stateful_inline
def _outside_us(fleet: Fleet, until_us: float) -> float:
    """Return the next time that something outside of engines happens, or ``until_us``."""
    outside_us = until_us
    if is_coupled(fleet):
        outside_us = min(outside_us, coming_us(fleet), front_end_us(fleet))
        if fleet.has.pools > 0:
            outside_us = min(outside_us, next_transfer_us(fleet))
    return float(outside_us)


@jit_stateful
def run_engine(fleet: Fleet, index: int, until_us: float) -> int:
    """Run an engine's next event, and further ones before ``until_us``. Returns a code."""
    engine = fleet.engines[index]
    at = engine.pool if fleet.has.pools > 0 else 0
    pool, requests = fleet.pools[at], fleet.requests[at]
    arena = fleet.arena[pool.arena_at : pool.arena_at + pool.arena_size]
    plan = open_plan(arena)
    on = parts_of(fleet)
    record = Record(fleet.gaps[at], fleet.series[at], fleet.width_us[at : at + 1])
    has_parts = fleet.has.ranks > 0 or fleet.has.stages > 0
    can_route = (fleet.has.clients > 0 or fleet.has.sessions > 0) and at == 0
    while True:
        # reloaded each time: to the compiler, any store of the loop may change it
        if fleet.stop[0] != 0:
            return CODE_STOPPED
        first = 0
        if engine.in_flight > 0:
            now_us = engine.end_us
            engine.now_us = now_us
            row = fleet.batches[index, engine.oldest]
            step_us = row.us
            if fleet.has.stages > 0:
                first = row.lane
                if pool.stages > 1:
                    engine.busy_us += step_us / pool.stages
            if fleet.has.timeouts > 0:
                _drop_late(fleet, pool, engine, on, requests, now_us, True)
            for r in range(ranks_in(fleet, pool)):
                if not has_parts or fleet.parts[index, engine.oldest, r] > 0:
                    home = engine.first_rank + r
                    rank = fleet.ranks[home]
                    lane = fleet.lanes[rank.first_lane + first]
                    _end_step(fleet, pool, engine, on, lane, rank, home, requests, record, now_us)
            engine.oldest += 1
            if engine.oldest == fleet.batches.shape[1]:
                engine.oldest = 0
            engine.in_flight -= 1
            if engine.in_flight > 0:
                after = fleet.batches[index, engine.oldest]
                engine.end_us = now_us + after.us
                if fleet.has.stages > 0 and pool.stages > 1:
                    engine.end_us = after.end_us
            if fleet.has.pools > 0 and pool.has_next > 0:
                _send_ready(fleet, pool, step_us, now_us)
        else:
            now_us = engine.next_us
            engine.now_us = now_us
        for is_late in range(2 if fleet.has.timeouts > 0 else 1):
            if fleet.has.timeouts > 0 and is_late == 1:
                _drop_late(fleet, pool, engine, on, requests, now_us, False)
            if can_route and route_due(fleet, index, now_us):
                until_us = now_us
            _see_sent(fleet, pool, engine, requests, now_us)
        if not has_parts or pool.ranks * pool.stages == 1:
            rank = fleet.ranks[engine.first_rank]
            lane = fleet.lanes[rank.first_lane]
            horizon_us = _horizon_us(fleet, pool, engine, rank, requests, _outside_us(fleet, until_us))
            run_decodes(arena, plan, pool, on, engine, lane, rank, record, horizon_us)
            now_us = engine.now_us
        tries = 1
        if (fleet.has.stages > 0 and pool.stages > 1) or (fleet.has.pools > 0 and pool.has_reserved > 0):
            # what ran alone gave its blocks back, and starts again; others start with what they have
            tries = 2
        if fleet.has.drafts > 0 and pool.verified > 1:
            # a prompt that had room may lack blocks for draft tokens
            tries = 2
        while True:
            schedule(fleet, arena, plan, pool, index, engine, on, requests, first, now_us)
            tries -= 1
            if tries == 0 or not _is_stuck(fleet, pool, engine):
                break
        if engine.in_flight > 0:
            note_step(fleet, pool, index, engine, record, now_us)
            engine.next_us = engine.end_us
        else:
            engine.next_us = _idle_next_us(fleet, pool, engine, requests)
            if _is_stuck(fleet, pool, engine) and not (fleet.has.pools > 0 and fleet.line[0].reserves > 0):
                return CODE_STUCK
        if engine.next_us >= _outside_us(fleet, until_us):
            return 0
