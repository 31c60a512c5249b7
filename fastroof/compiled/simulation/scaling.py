"""Replicas that a rule starts and stops while a fleet serves.

Every interval the rule looks at the replicas as they are, before anything that happens at that time. The
replicas that it wants are those that serve or start:

* A replica that is started takes requests from its start-up time on, with an empty prefix cache.
* A replica that is stopped gets no more requests and drains: it is off once its last request and step ended,
  and the prompts were sent that it keeps.
  It holds its GPUs until then, so a new one may have to wait for the next interval.
* Of those to stop, replicas that start go first, the newest of them before older ones.

At least one replica serves at any time.
"""

from __future__ import annotations

import math

from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation import records as R
from fastroof.compiled.simulation.prefix_cache import empty_cache
from fastroof.compiled.simulation.records import Fleet, Row
from fastroof.compiled.simulation.router import parts_of, seen_of, wake
from fastroof.compiled.simulation.tiers import empty_tiers

MOST_CHECKS = 10**7
"""Maximum number of a run's checks."""


@jit_stateful_inline
def _check_us(scaler: Row) -> float:
    """Return the time of a rule's next check."""
    return float(scaler.start_us + (scaler.checks + 1) * scaler.interval_us)


@jit_stateful_inline
def next_check_us(fleet: Fleet) -> float:
    """Return the time of the next check of any rule, or inf without rules."""
    at_us = math.inf
    for place in range(len(fleet.scalers)):
        at_us = min(at_us, _check_us(fleet.scalers[place]))
    return float(at_us)


@jit_stateful
def _launch(fleet: Fleet, pool: Row, replica: int, at_us: float, ready_us: float) -> None:
    """Start a replica, whose engines are as new."""
    line, one = fleet.line[0], fleet.replicas[pool.first_replica + replica]
    one.status, one.life = R.STARTING, line.num_lives
    line.num_lives += 1
    fleet.scalers[pool.scaler].starting += 1
    life = fleet.lives[one.life]
    life.pool, life.replica = one.pool, replica
    life.ordered_us, life.ready_us, life.drained_us, life.stopped_us = at_us, ready_us, math.inf, math.inf


@jit_stateful
def launch_first(fleet: Fleet) -> None:
    """Let the first replicas of pools with a rule serve."""
    for at in range(len(fleet.pools)):
        pool = fleet.pools[at]
        if pool.scaler != R.NONE:
            scaler = fleet.scalers[pool.scaler]
            fleet.wanted[scaler.wanted_at] = scaler.first
            for replica in range(scaler.first):
                _launch(fleet, pool, replica, scaler.start_us, scaler.start_us)
            wake(fleet, pool, scaler.start_us)


@jit_stateful_inline
def _first_engine(pool: Row, replica: int) -> int:
    return int(pool.first_engine + replica * pool.engines_each)


@jit_stateful_inline
def _is_empty(fleet: Fleet, pool: Row, replica: int) -> bool:
    """Whether a replica has no request, no step that runs, and holds no blocks."""
    seen = seen_of(fleet, pool, replica)
    left = seen.pushed - seen.gone + seen.held
    first = _first_engine(pool, replica)
    for at in range(first, first + pool.engines_each):
        left += fleet.engines[at].in_flight
    return bool(left == 0)


@jit_stateful
def are_empty(fleet: Fleet) -> bool:
    """Whether all replicas of the first pool are empty."""
    pool = fleet.pools[0]
    for replica in range(pool.num_replicas):  # noqa: SIM110  Numba takes no generator here
        if not _is_empty(fleet, pool, replica):
            return False
    return True


@jit_stateful_inline
def _latest_us(fleet: Fleet, pool: Row, replica: int) -> float:
    """Return the time of a replica's last event."""
    latest_us = 0.0
    first = _first_engine(pool, replica)
    for at in range(first, first + pool.engines_each):
        latest_us = max(latest_us, fleet.engines[at].now_us)
    return float(latest_us)


@jit_stateful
def _renew(fleet: Fleet, pool: Row, replica: int) -> None:
    """Let the engines of an empty replica forget what they held; their counters go on."""
    first = _first_engine(pool, replica)
    fleet.replicas[pool.first_replica + replica].given = 0
    for at in range(first, first + pool.engines_each):
        engine = fleet.engines[at]
        engine.pushed, engine.pushed_tokens, engine.given = 0, 0, 0
        engine.held_steps, engine.in_a_row, engine.held_until = 0, 0, 0
        for place in range(engine.first_rank, engine.first_rank + (pool.ranks if fleet.has.ranks > 0 else 1)):
            rank = fleet.ranks[place]
            rank.finished, rank.timed_out = 0, 0
            if fleet.has.pauses > 0:
                lane = fleet.lanes[rank.first_lane]
                lane.held_until, lane.is_backlogged = 0, 0
            if fleet.has.cache > 0 and pool.has_cache > 0:
                engine.pushed_tokens += rank.looked_up_tokens + rank.given_up_tokens
                empty_cache(parts_of(fleet), rank)
            if fleet.has.tiers > 0 and pool.num_tiers > 0:
                empty_tiers(parts_of(fleet), rank, pool)


@jit_stateful
def _stop_drained(fleet: Fleet, pool: Row) -> None:
    """Turn replicas off that are drained."""
    for replica in range(pool.num_replicas):
        one = fleet.replicas[pool.first_replica + replica]
        if one.status == R.DRAINING and _is_empty(fleet, pool, replica):
            life = fleet.lives[one.life]
            life.stopped_us = max(_latest_us(fleet, pool, replica), life.drained_us)
            one.status = R.OFF
            _renew(fleet, pool, replica)


@jit_stateful
def _drain_newest(fleet: Fleet, pool: Row, now_us: float) -> None:
    """Stop the newest replica that starts or, if none does, of those that serve."""
    scaler = fleet.scalers[pool.scaler]
    status = R.SERVING if scaler.starting == 0 else R.STARTING
    newest, newest_us = R.NONE, -math.inf
    for place in range(pool.first_replica, pool.first_replica + pool.num_replicas):
        one = fleet.replicas[place]
        if one.status == status and fleet.lives[one.life].ready_us >= newest_us:
            newest, newest_us = place, fleet.lives[one.life].ready_us
    one = fleet.replicas[newest]
    life = fleet.lives[one.life]
    life.drained_us = now_us
    if status == R.STARTING:
        one.status, life.stopped_us = R.OFF, now_us
        scaler.starting -= 1
    else:
        one.status = R.DRAINING
        scaler.serving -= 1


@jit_stateful_inline
def _metric(fleet: Fleet, pool: Row) -> float:
    """Return a rule's metric of all replicas that serve."""
    scaler = fleet.scalers[pool.scaler]
    if scaler.metric == R.RATE:
        return float(scaler.routed / (scaler.interval_us * 1e-6))
    total = 0
    for replica in range(pool.num_replicas):
        if fleet.replicas[pool.first_replica + replica].status == R.SERVING:
            seen = seen_of(fleet, pool, replica)
            total += seen.held if scaler.metric == R.KV else seen.pushed - seen.gone
            if scaler.metric == R.QUEUE:
                total -= seen.running
    if scaler.metric == R.KV:
        return float(total / (pool.ranks * pool.engines_each * pool.num_blocks))
    return float(total)


@jit_stateful_inline
def _wanted(scaler: Row, total: float) -> int:
    """Return how many replicas a rule wants for a metric of all that serve, before limits."""
    current = scaler.starting + scaler.serving
    if scaler.low >= 0.0:
        if scaler.starting == 0 and total / scaler.serving > scaler.target:
            return int(current + 1)
        if scaler.starting == 0 and total / scaler.serving < scaler.low:
            return int(current - 1)
        return int(current)
    if abs(total / (scaler.target * current) - 1.0) <= scaler.tolerance:
        return int(current)
    wanted: int = math.ceil(total / scaler.target)
    return wanted


@jit_stateful
def _check_pool(fleet: Fleet, pool: Row, now_us: float) -> int:
    """Let a pool's rule start or stop replicas. Returns a code."""
    scaler = fleet.scalers[pool.scaler]
    if scaler.checks == MOST_CHECKS:
        return R.CODE_MANY_CHECKS
    scaler.checks += 1
    wake(fleet, pool, now_us)
    _stop_drained(fleet, pool)
    wanted = _wanted(scaler, _metric(fleet, pool))
    scaler.routed = 0
    current = scaler.starting + scaler.serving
    fleet.wanted[scaler.wanted_at + scaler.checks % scaler.num_wanted] = wanted
    if wanted < current:
        highest = 0
        for place in range(scaler.wanted_at, scaler.wanted_at + scaler.num_wanted):
            highest = max(highest, fleet.wanted[place])
        wanted = min(highest, current)
    wanted = min(wanted, max(2 * current, current + 4))
    wanted = min(max(wanted, scaler.least), pool.num_replicas)
    for _ in range(current - wanted):
        _drain_newest(fleet, pool, now_us)
    for replica in range(pool.num_replicas):
        one = fleet.replicas[pool.first_replica + replica]
        if one.status == R.OFF and scaler.starting + scaler.serving < wanted:
            if fleet.line[0].num_lives == len(fleet.lives):
                return R.CODE_FULL
            _launch(fleet, pool, replica, now_us, now_us + scaler.startup_us)
    return 0


@jit_stateful
def check_now(fleet: Fleet) -> int:
    """Let the rules whose check comes next start or stop replicas. Returns a code."""
    now_us = next_check_us(fleet)
    for at in range(len(fleet.pools)):
        pool = fleet.pools[at]
        if pool.scaler != R.NONE and _check_us(fleet.scalers[pool.scaler]) == now_us:
            code = _check_pool(fleet, pool, now_us)
            if code != 0:
                return int(code)
    return 0


@jit_stateful
def close(fleet: Fleet) -> None:
    """End all lives with the run."""
    end_us = 0.0
    for place in range(len(fleet.engines)):
        end_us = max(end_us, fleet.engines[place].now_us)
    for at in range(len(fleet.pools)):
        pool = fleet.pools[at]
        if pool.scaler != R.NONE:
            _stop_drained(fleet, pool)
            for place in range(pool.first_replica, pool.first_replica + pool.num_replicas):
                one = fleet.replicas[place]
                if one.status != R.OFF:
                    life = fleet.lives[one.life]
                    life.stopped_us = max(end_us, life.ordered_us)
