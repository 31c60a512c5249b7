"""Which replica, engine and rank get a request.

A router sees every replica as it is when a request is sent: everything before that time has happened, and
what ends or starts at exactly that time has not. Requests in the front end of a replica wait there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fastroof.compiled.expert_rows import FEWEST_TOKENS, TAKES_TURNS
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation import records as R
from fastroof.compiled.simulation.lanes import push_request
from fastroof.compiled.simulation.prefix_cache import find_blocks, settle
from fastroof.compiled.simulation.records import Fleet, Parts, Row, Rows
from fastroof.compiled.simulation.transfers import deadline_us, has_front_end, has_late_first
from fastroof.compiled.simulation.units import blocks_of


@jit_stateful_inline
def parts_of(fleet: Fleet) -> Parts:
    """Return what lanes and ranks keep."""
    return Parts(
        fleet.has,
        fleet.slots,
        fleet.calendar,
        fleet.filled,
        fleet.due,
        fleet.flights,
        fleet.firsts,
        fleet.fresh,
        fleet.chains,
        fleet.segments,
        fleet.cells,
        fleet.tiers,
        fleet.stores,
        fleet.tier_tokens,
        fleet.drafted,
        fleet.rates,
        fleet.kept,
    )


class Seen(NamedTuple):
    """What a router sees of a replica: requests that it was sent, that left, that run, and blocks held."""

    pushed: int
    gone: int
    running: int
    held: int


@jit_stateful_inline
def seen_of(fleet: Fleet, pool: Row, replica: int) -> Seen:
    """Return what a router sees of a replica."""
    pushed, gone, running, held = 0, 0, 0, 0
    if has_front_end(fleet):
        pushed += fleet.replicas[pool.first_replica + replica].passing
    first = pool.first_engine + replica * pool.engines_each
    for at in range(first, first + pool.engines_each):
        engine = fleet.engines[at]
        pushed += engine.pushed
        for place in range(engine.first_rank, engine.first_rank + (pool.ranks if fleet.has.ranks > 0 else 1)):
            rank = fleet.ranks[place]
            gone += rank.finished + rank.timed_out
            running += rank.running
            held += rank.num_blocks - rank.free
    return Seen(pushed, gone, running, held)


@jit_stateful_inline
def outstanding_of(fleet: Fleet, pool: Row, replica: int) -> int:
    """Number of requests that wait or run at a replica."""
    seen = seen_of(fleet, pool, replica)
    return int(seen.pushed - seen.gone)


class Load(NamedTuple):
    """What a router compares, in this order: less is better, and of equals the first replica."""

    load: int
    tie: int
    second_tie: int


@jit_stateful_inline
def _is_less(one: Load, other: Load) -> bool:
    """Whether one load is less than another."""
    if one.load != other.load:
        return one.load < other.load
    return one.tie < other.tie or (one.tie == other.tie and one.second_tie < other.second_tie)


@jit_stateful
def _blocks_to_come(fleet: Fleet, pool: Row, replica: int, request: int) -> int:
    """Count blocks in use at a replica, those its waiting prompts need, and those that one more would add."""
    on = parts_of(fleet)
    tokens = int(fleet.requests[0, request].input_tokens)
    waiting, found, held = 0, 0, 0
    if has_front_end(fleet):
        waiting += fleet.replicas[pool.first_replica + replica].passing_tokens
    first = pool.first_engine + replica * pool.engines_each
    for at in range(first, first + pool.engines_each):
        engine = fleet.engines[at]
        waiting += engine.pushed_tokens
        for place in range(engine.first_rank, engine.first_rank + pool.ranks):
            rank = fleet.ranks[place]
            settle(on, rank, pool)
            cached = find_blocks(fleet.cells, fleet.chains, fleet.segments, rank.cells_at, request)[0]
            found = max(found, cached)
            waiting -= rank.looked_up_tokens + rank.given_up_tokens
            held += rank.num_blocks - rank.free
    cached_tokens = min(found, (tokens - 1) // pool.block_size) * pool.block_size
    return int(held + blocks_of(waiting + tokens - cached_tokens, pool))


@jit_stateful_inline
def _load_of(fleet: Fleet, pool: Row, replica: int, request: int) -> Load:
    """Return a replica's load as the router's rule compares it for a request."""
    seen = seen_of(fleet, pool, replica)
    outstanding = seen.pushed - seen.gone
    waiting = outstanding - seen.running
    load = Load(outstanding, 0, 0)
    if pool.rule == R.LEAST_LOAD:
        load = Load(R.WAITING_WEIGHT * waiting + seen.running, 0, 0)
    elif pool.rule == R.LEAST_KV:
        load = Load(seen.held, waiting, seen.running)
    elif fleet.has.cache > 0 and pool.rule == R.PREFIX_AWARE:
        # of equals the one sent fewest requests, so that prompts in no cache are spread
        load = Load(_blocks_to_come(fleet, pool, replica, request), seen.pushed, 0)
    return load


@jit_stateful_inline
def _serves(fleet: Fleet, pool: Row, replica: int) -> bool:
    """Whether a replica takes requests."""
    if fleet.has.scaler > 0 and pool.scaler != R.NONE:
        return bool(fleet.replicas[pool.first_replica + replica].status == R.SERVING)
    return True


@jit_stateful_inline
def _serving(fleet: Fleet, pool: Row, place: int) -> int:
    """Return the replica at a place among those that serve."""
    if fleet.has.scaler > 0 and pool.scaler != R.NONE:
        for replica in range(pool.num_replicas):
            if _serves(fleet, pool, replica):
                if place == 0:
                    return int(replica)
                place -= 1
    return int(place)


@jit_stateful_inline
def _choose_replica(fleet: Fleet, pool: Row, turn: int, request: int) -> int:
    """Choose the replica that serves a request; ``turn`` counts the requests that the router saw before."""
    serving, drawn_from = pool.num_replicas, pool.num_replicas
    if fleet.has.scaler > 0 and pool.scaler != R.NONE:
        serving, drawn_from = fleet.scalers[pool.scaler].serving, fleet.scalers[pool.scaler].drawn_from
    if pool.rule == R.ROUND_ROBIN:
        if pool.num_replicas == 1:
            return 0
        return _serving(fleet, pool, fleet.turns[pool.turns_at + turn] % serving)
    return int(_choose_by_load(fleet, pool, turn, request, serving, drawn_from))


@jit_stateful
def _choose_by_load(fleet: Fleet, pool: Row, turn: int, request: int, serving: int, drawn_from: int) -> int:
    """Choose the replica with the least load, as the router's rule compares it."""
    if pool.rule == R.POWER_OF_TWO:
        first = _serving(fleet, pool, fleet.drawn[0, pool.turns_at + turn] * serving // drawn_from)
        second = _serving(fleet, pool, fleet.drawn[1, pool.turns_at + turn] * serving // drawn_from)
        is_second = outstanding_of(fleet, pool, second) < outstanding_of(fleet, pool, first)
        return second if is_second else first
    chosen, least = R.NONE, Load(0, 0, 0)
    for replica in range(pool.num_replicas):
        if _serves(fleet, pool, replica):
            own = _load_of(fleet, pool, replica, request)
            if chosen == R.NONE or _is_less(own, least):
                chosen, least = replica, own
    return chosen


@jit_stateful
def choose_rank(
    ranks: Rows, engines: Rows, first_rank: int, count: int, given: int, rule: int, first_engine: int
) -> int:
    """Choose which of several ranks gets a request, the first of equals.

    They are the ranks of an engine or, from ``first_engine`` on, of as many engines, whose requests wait from
    when they are sent.
    """
    if rule == TAKES_TURNS:
        return int(given % count)
    active, most = 0, 0
    for place in range(count):
        has = _waits_at(ranks, engines, first_rank, place, first_engine) + ranks[first_rank + place].running
        active += has
        most = max(most, has)
    # an even share of the requests, including this one
    share = max((active + count) // count, most)
    least = 0
    least_load = math.inf
    for place in range(count):
        rank = ranks[first_rank + place]
        waits = _waits_at(ranks, engines, first_rank, place, first_engine)
        if rule == FEWEST_TOKENS:
            if waits + rank.running >= share:
                continue
            load = float(rank.num_blocks - rank.free)
        else:
            load = float(R.WAITING_WEIGHT * waits + rank.running)
        if load < least_load:
            least, least_load = place, load
    return int(least)


@jit_stateful_inline
def _waits_at(ranks: Rows, engines: Rows, first_rank: int, place: int, first_engine: int) -> int:
    """Count the requests that wait at one of several ranks."""
    rank = ranks[first_rank + place]
    if first_engine == R.NONE:
        return int(rank.waiting)
    return int(engines[first_engine + place].pushed - rank.finished - rank.timed_out - rank.running)


@jit_stateful_inline
def choose_replica(fleet: Fleet, at: int, request: int, now_us: float) -> int:
    """Choose the replica of a pool that gets a request, which comes now."""
    pool = fleet.pools[at]
    turn = request
    if fleet.has.pools > 0 and at > 0:
        turn = pool.turn
        pool.turn += 1
    if fleet.has.scaler > 0 and pool.scaler != R.NONE:
        wake(fleet, pool, now_us)
        fleet.scalers[pool.scaler].routed += 1
    return int(pool.first_replica + _choose_replica(fleet, pool, turn, request))


@jit_stateful_inline
def engine_of(fleet: Fleet, pool: Row, replica: int) -> int:
    """Choose the engine of a replica that gets its next request."""
    first = pool.first_engine + (replica - pool.first_replica) * pool.engines_each
    if pool.engines_each == 1:
        return int(first)
    given = 0
    for one in range(first, first + pool.engines_each):
        given += fleet.engines[one].pushed
    first_rank = fleet.engines[first].first_rank
    ranks, engines, each = fleet.ranks, fleet.engines, pool.engines_each
    return int(first + choose_rank(ranks, engines, first_rank, each, given, pool.assignment, first))


@jit_stateful_inline
def choose_engine(fleet: Fleet, at: int, request: int, now_us: float) -> int:
    """Choose the engine of a pool that gets a request, which comes now."""
    return int(engine_of(fleet, fleet.pools[at], choose_replica(fleet, at, request, now_us)))


@jit_stateful_inline
def count_pushed(fleet: Fleet, at: int, index: int, request: int) -> None:
    """Count a request as sent to an engine."""
    engine = fleet.engines[index]
    engine.pushed += 1
    engine.pushed_tokens += fleet.requests[at, request].input_tokens


@jit_stateful_inline
def push_to_engine(fleet: Fleet, at: int, index: int, request: int, now_us: float) -> None:
    """Send a request, which arrives now, to an engine; it gets a rank when the engine sees it."""
    engine, requests = fleet.engines[index], fleet.requests[at]
    requests[request].engine = index
    if fleet.has.ranks > 0 and fleet.pools[at].ranks > 1:
        requests[request].next_sent = R.NONE
        if engine.first_sent == R.NONE:
            engine.first_sent = request
        else:
            requests[engine.last_sent].next_sent = request
        engine.last_sent = request
        engine.sent += 1
    else:
        push_request(fleet.ranks[engine.first_rank], requests, request)
    if fleet.has.timeouts > 0 and has_late_first(fleet, at):
        engine.least_us = min(engine.least_us, deadline_us(fleet, request))
    if engine.in_flight == 0:
        engine.next_us = min(engine.next_us, max(engine.now_us, now_us))


@jit_stateful_inline
def send_to_pool(fleet: Fleet, at: int, request: int, now_us: float) -> int:
    """Send a request, which arrives now, to one of a pool's engines. Returns its number."""
    index = choose_engine(fleet, at, request, now_us)
    count_pushed(fleet, at, index, request)
    push_to_engine(fleet, at, index, request, now_us)
    return index


@jit_stateful
def wake(fleet: Fleet, pool: Row, now_us: float) -> None:
    """Let replicas serve that have started."""
    scaler = fleet.scalers[pool.scaler]
    if scaler.starting == 0:
        return
    for place in range(pool.first_replica, pool.first_replica + pool.num_replicas):
        one = fleet.replicas[place]
        if one.status == R.STARTING and fleet.lives[one.life].ready_us <= now_us:
            one.status = R.SERVING
            scaler.starting -= 1
            scaler.serving += 1
