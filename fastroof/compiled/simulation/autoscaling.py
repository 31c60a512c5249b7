"""Replicas that a rule starts and stops while a fleet serves.

Every interval the rule looks at the replicas as they are, before anything that happens at that time. The
replicas that it wants are those that serve or start:

* A replica that is started takes requests from its start-up time on, with an empty prefix cache.
* A replica that is stopped gets no more requests and drains: it is off once its last request and step ended.
  It holds its GPUs until then, so a new one may have to wait for the next interval.
* Of those to stop, replicas that start go first, the newest of them before older ones.

At least one replica serves at any time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fastroof.arrays import Floats, Longs
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.ranks import group_of, restart_group
from fastroof.compiled.simulation.replicas import (
    Fleet,
    engines_each,
    held_blocks,
    outstanding_of,
    ranks_in,
    restart_fleet,
    running_of,
    total_of,
)
from fastroof.compiled.simulation.state import (
    BUSY_US,
    CACHED_TOKENS,
    DECODE_TOKENS,
    EVICTIONS,
    FOUND_AGAIN_TOKENS,
    FOUND_TOKENS,
    IN_FLIGHT,
    LEAST_FREE,
    LOOKED_UP_TOKENS,
    MIXED_STEPS,
    NONE,
    NOW,
    NUM_BLOCKS,
    PEAK_RUNNING,
    PEAK_WAITING,
    PREEMPTIONS,
    PREFILL_STEPS,
    PREFILL_TOKENS,
    STEPS,
)

OFF, STARTING, SERVING, DRAINING = range(4)
"""States of a replica."""

QUEUE, CONCURRENCY, KV, RATE = range(4)
"""What a rule looks at, of all that serve: requests that wait, or wait and run, the KV cache in use in
caches, requests/s since the last check."""

CODE_FULL = 4
"""More replicas were started than there are rows for."""

CODE_MANY_CHECKS = 8
"""The run is not over after MOST_CHECKS checks."""

MOST_CHECKS = 10**7
"""Maximum number of a run's checks."""

# columns of lives; times are us
LIFE_REPLICA, LIFE_ORDERED, LIFE_READY, LIFE_DRAINED, LIFE_STOPPED = range(5)
NUM_LIFE_COLUMNS = 5

# counts: checks so far, replicas that start and that serve, requests routed since the last check, lives
CHECKS, NUM_STARTING, NUM_SERVING, ROUTED, LIVES = range(5)
NUM_COUNTS = 5

_SUMMED = (
    STEPS, MIXED_STEPS, PREFILL_STEPS, PREEMPTIONS, PREFILL_TOKENS, DECODE_TOKENS, CACHED_TOKENS, EVICTIONS,
    LOOKED_UP_TOKENS, FOUND_TOKENS, FOUND_AGAIN_TOKENS,
)  # fmt: skip
"""Counters of an engine that add up over its lives."""


class ScalingRule(NamedTuple):
    """When replicas are started and stopped: ``target`` of the metric per replica, ``first`` at the start.

    With ``low`` of at least 0, one more above the target and one fewer below ``low``. ``drawn_from`` is what
    a router's draws are below.
    """

    metric: int
    target: float
    low: float
    tolerance: float
    least: int
    first: int
    interval_us: float
    startup_us: float
    start_us: float
    drawn_from: int


class Scaler(NamedTuple):
    """A rule and what it did, an element per replica of ``status`` and ``life``.

    ``wanted`` is a ring of what the rule wanted at the last checks; ``lives`` has a row for each time that a
    replica was started. ``kept`` and ``kept_us`` are counters and clocks of engines' former lives.
    """

    rule: ScalingRule
    status: Longs
    life: Longs
    wanted: Longs
    counts: Longs
    lives: Floats
    kept: Longs
    kept_us: Floats


@jit_stateful
def _launch(scaler: Scaler, replica: int, at_us: float, ready_us: float) -> None:
    """Start a replica, whose engines are as new."""
    counts = scaler.counts
    row = counts[LIVES]
    counts[LIVES] += 1
    counts[NUM_STARTING] += 1
    scaler.status[replica] = STARTING
    scaler.life[replica] = row
    life = scaler.lives[row]
    life[LIFE_REPLICA] = replica
    life[LIFE_ORDERED] = at_us
    life[LIFE_READY] = ready_us
    life[LIFE_DRAINED] = math.inf
    life[LIFE_STOPPED] = math.inf


@jit_stateful
def wake(scaler: Scaler, now_us: float) -> None:
    """Let replicas serve that have started."""
    if scaler.counts[NUM_STARTING] == 0:
        return
    for replica in range(len(scaler.status)):
        if scaler.status[replica] == STARTING and scaler.lives[scaler.life[replica], LIFE_READY] <= now_us:
            scaler.status[replica] = SERVING
            scaler.counts[NUM_STARTING] -= 1
            scaler.counts[NUM_SERVING] += 1


@jit_stateful
def is_empty(fleet: Fleet, replica: int) -> bool:
    """Whether a replica has no request, and no step that runs."""
    return outstanding_of(fleet, replica) + total_of(fleet, replica, IN_FLIGHT) == 0


@jit_stateful
def _keep(fleet: Fleet, scaler: Scaler, replica: int) -> float:
    """Add a replica's counters to those of former lives, and reset it. Returns its last event's time."""
    latest_us = 0.0
    for engine in range(replica * engines_each(fleet), (replica + 1) * engines_each(fleet)):
        ranks = ranks_in(fleet, engine)
        first = engine * ranks.scalars.shape[0]
        for rank in range(ranks.scalars.shape[0]):
            scalars, kept = ranks.scalars[rank], scaler.kept[first + rank]
            for name in _SUMMED:
                kept[name] += scalars[name]
            for name in (PEAK_RUNNING, PEAK_WAITING):
                kept[name] = max(kept[name], scalars[name])
            kept[LEAST_FREE] = max(kept[LEAST_FREE], scalars[NUM_BLOCKS] - scalars[LEAST_FREE])
            kept_us = scaler.kept_us[first + rank]
            kept_us[BUSY_US] += ranks.clock[rank, BUSY_US]
            kept_us[NOW] = max(kept_us[NOW], ranks.clock[rank, NOW])
            latest_us = max(latest_us, ranks.clock[rank, NOW])
        fleet.router.pushed[engine] = 0
        fleet.router.pushed_tokens[engine] = 0
        restart_group(ranks, group_of(fleet.groups, engine), fleet.num_blocks)
    return latest_us


@jit_stateful
def _stop_drained(fleet: Fleet, scaler: Scaler) -> None:
    """Turn replicas off that are drained."""
    for replica in range(len(scaler.status)):
        if scaler.status[replica] == DRAINING and is_empty(fleet, replica):
            life = scaler.lives[scaler.life[replica]]
            life[LIFE_STOPPED] = max(_keep(fleet, scaler, replica), life[LIFE_DRAINED])
            scaler.status[replica] = OFF


@jit_stateful
def _drain_newest(scaler: Scaler, now_us: float) -> None:
    """Stop the newest replica that starts or, if none does, of those that serve."""
    status = SERVING if scaler.counts[NUM_STARTING] == 0 else STARTING
    newest = NONE
    newest_us = -math.inf
    for replica in range(len(scaler.status)):
        if scaler.status[replica] == status:
            ready_us = scaler.lives[scaler.life[replica], LIFE_READY]
            if ready_us >= newest_us:
                newest = replica
                newest_us = ready_us
    life = scaler.lives[scaler.life[newest]]
    life[LIFE_DRAINED] = now_us
    if status == STARTING:
        scaler.status[newest] = OFF
        life[LIFE_STOPPED] = now_us
        scaler.counts[NUM_STARTING] -= 1
    else:
        scaler.status[newest] = DRAINING
        scaler.counts[NUM_SERVING] -= 1


@jit_stateful
def _metric(fleet: Fleet, scaler: Scaler) -> float:
    """Return the rule's metric of all replicas that serve."""
    rule = scaler.rule
    if rule.metric == RATE:
        return float(scaler.counts[ROUTED] / (rule.interval_us * 1e-6))
    total = 0
    for replica in range(len(scaler.status)):
        if scaler.status[replica] != SERVING:
            continue
        if rule.metric == KV:
            total += held_blocks(fleet, replica)
        else:
            total += outstanding_of(fleet, replica)
            if rule.metric == QUEUE:
                total -= running_of(fleet, replica)
    if rule.metric == KV:
        ranks = fleet.states.scalars.shape[0] // len(scaler.status)
        return float(total / (ranks * fleet.num_blocks))
    return float(total)


@jit_stateful
def _wanted(scaler: Scaler, total: float) -> int:
    """Return how many replicas the rule wants for a metric of all that serve, before limits."""
    rule = scaler.rule
    starting, serving = scaler.counts[NUM_STARTING], scaler.counts[NUM_SERVING]
    current = starting + serving
    if rule.low >= 0.0:
        if starting == 0 and total / serving > rule.target:
            return int(current + 1)
        if starting == 0 and total / serving < rule.low:
            return int(current - 1)
        return int(current)
    if abs(total / (rule.target * current) - 1.0) <= rule.tolerance:
        return int(current)
    return math.ceil(total / rule.target)


@jit_stateful
def check_now(fleet: Fleet, scaler: Scaler) -> int:
    """Let the rule start or stop replicas. Returns a code."""
    rule, counts, ring = scaler.rule, scaler.counts, scaler.wanted
    if counts[CHECKS] == MOST_CHECKS:
        return CODE_MANY_CHECKS
    now_us = check_us(scaler)
    counts[CHECKS] += 1
    wake(scaler, now_us)
    _stop_drained(fleet, scaler)
    wanted = _wanted(scaler, _metric(fleet, scaler))
    counts[ROUTED] = 0
    current = counts[NUM_STARTING] + counts[NUM_SERVING]
    ring[counts[CHECKS] % len(ring)] = wanted
    if wanted < current:
        highest = 0
        for place in range(len(ring)):
            highest = max(highest, ring[place])
        wanted = min(highest, current)
    wanted = min(wanted, max(2 * current, current + 4))
    wanted = min(max(wanted, rule.least), len(scaler.status))
    for _ in range(current - wanted):
        _drain_newest(scaler, now_us)
    for replica in range(len(scaler.status)):
        if scaler.status[replica] == OFF and counts[NUM_STARTING] + counts[NUM_SERVING] < wanted:
            if counts[LIVES] == len(scaler.lives):
                return CODE_FULL
            _launch(scaler, replica, now_us, now_us + rule.startup_us)
    return 0


@jit_stateful_inline
def check_us(scaler: Scaler) -> float:
    """Return the time of the next check."""
    rule = scaler.rule
    return float(rule.start_us + (scaler.counts[CHECKS] + 1) * rule.interval_us)


@jit_stateful
def begin(fleet: Fleet, scaler: Scaler) -> None:
    """Reset all replicas, and let the first ones serve."""
    restart_fleet(fleet)
    rule = scaler.rule
    scaler.status[:] = OFF
    scaler.wanted[:] = 0
    scaler.wanted[0] = rule.first
    scaler.counts[:] = 0
    scaler.kept[:] = 0
    scaler.kept_us[:] = 0.0
    for replica in range(rule.first):
        _launch(scaler, replica, rule.start_us, rule.start_us)
    wake(scaler, rule.start_us)


@jit_stateful
def close(fleet: Fleet, scaler: Scaler) -> None:
    """End all lives with the run, and give engines the counters of all of theirs."""
    _stop_drained(fleet, scaler)
    for replica in range(len(scaler.status)):
        _keep(fleet, scaler, replica)
    end_us = 0.0
    for place in range(scaler.kept.shape[0]):
        end_us = max(end_us, scaler.kept_us[place, NOW])
    for replica in range(len(scaler.status)):
        if scaler.status[replica] != OFF:
            life = scaler.lives[scaler.life[replica]]
            life[LIFE_STOPPED] = max(end_us, life[LIFE_ORDERED])
    for place in range(scaler.kept.shape[0]):
        scalars, kept, clock = fleet.states.scalars[place], scaler.kept[place], fleet.states.clock[place]
        for name in _SUMMED:
            scalars[name] = kept[name]
        for name in (PEAK_RUNNING, PEAK_WAITING):
            scalars[name] = kept[name]
        scalars[LEAST_FREE] = scalars[NUM_BLOCKS] - kept[LEAST_FREE]
        clock[BUSY_US] = scaler.kept_us[place, BUSY_US]
        clock[NOW] = scaler.kept_us[place, NOW]
