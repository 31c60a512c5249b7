"""Run prefill and decode pools: one after the other or, where one feeds back to the other, event by event."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Floats, Longs
from fastroof.checks import one_of
from fastroof.compiled.simulation import pools as loops
from fastroof.compiled.simulation import transfers
from fastroof.compiled.simulation.state import (
    FINISHED,
    NONE,
    NUM_COLUMNS,
    NUM_ROOTS,
    TIMED_OUT,
    Record,
    Requests,
    of_one_set,
)
from fastroof.errors import SimulationError
from fastroof.plan.calls import rank_rules
from fastroof.simulation.engine import (
    FOUND_COUNTERS,
    Outcomes,
    added_up,
    new_record,
    new_served,
    options_of,
    outcomes_of,
    raise_stuck,
    requests_of,
    with_rejected,
)
from fastroof.simulation.front_end import run_passage, turns_of
from fastroof.simulation.pools import (
    Link,
    Pool,
    check_pools,
    has_feedback,
    pools_too_long,
    prefilled_trace,
    sent_in_us,
)
from fastroof.simulation.replicas import (
    POOLED_ROUTINGS,
    ROUTINGS,
    fleet_counters,
    merged,
    new_fleet,
    run_schedulers,
)
from fastroof.simulation.settings import EngineSettings
from fastroof.traces.prompt_tree import GIVEN, LRU
from fastroof.traces.trace import Trace
from fastroof.traces.trace_checks import ids_at
from fastroof.units import US_PER_S


class PooledOutcomes(NamedTuple):
    """The outcomes of requests: of all as clients see them, of each pool by its own clock and order."""

    outcomes: Outcomes
    prefill: Outcomes
    decode: Outcomes | None
    prefill_replica: Any
    transfer_us: Floats


def _part(trace: Trace, places: Any, *, with_ids: bool = False) -> Trace:
    """Return some requests, with given prefix hits and, if asked, what a prefix cache finds them by."""
    ids: dict[str, Any] = {}
    if with_ids and trace.hash_ids is not None and trace.hash_offsets is not None:
        found, offsets = ids_at(trace.hash_ids, trace.hash_offsets, places)
        ids = {"hash_ids": found, "hash_offsets": offsets, "hash_block_size": trace.hash_block_size}
    if with_ids and trace.history_tokens is not None:
        ids["history_tokens"] = trace.history_tokens[places]
    return Trace(
        trace.arrival_s[places],
        trace.input_tokens[places],
        trace.output_tokens[places],
        trace.cached_tokens[places],
        **ids,
        name=trace.name,
    )


def _decoded(trace: Trace, arrival_us: Floats, first_token: str) -> Trace:
    """Return the trace of decode engines: prompts are in the KV cache."""
    again = first_token == "decode"
    prompts, outputs = trace.input_tokens, trace.output_tokens
    return Trace(
        arrival_us / US_PER_S,
        prompts if again else prompts + 1,
        outputs if again else outputs - 1,
        prompts - 1 if again else prompts,
        name=trace.name,
    )


def run_pools(
    prefill: Pool,
    decode: Pool,
    trace: Trace,
    link: Link = Link(),  # noqa: B008 (immutable)
    *,
    time_scale: float = 1.0,
    seed: int = 0,
) -> PooledOutcomes:
    """Serve a trace with a pool of prefill engines, behind their front ends, and one of decode engines."""
    check_pools(prefill, decode, link)
    front_end, servers = prefill.plan.profile.front_end, prefill.replicas * prefill.plan.layout.dp
    timeout_s = prefill.settings.timeout_s
    run_both = _run_with_feedback if has_feedback(prefill, trace, link) else _run_in_turn

    def run(arrived: Trace, settings: EngineSettings) -> PooledOutcomes:
        first, then = (
            pool._replace(settings=replace(pool.settings, timeout_s=settings.timeout_s))
            for pool in (prefill, decode)
        )
        turns = turns_of(trace, arrived)
        return run_both(first, then, arrived, turns, link, time_scale=time_scale, seed=seed)

    passage, pooled = run_passage(
        front_end, trace, prefill.settings, servers, run, lambda result: result.outcomes
    )
    if passage.arrived is trace:
        return pooled
    return pooled._replace(
        outcomes=passage.client_outcomes(pooled.outcomes, timeout_s),
        prefill_replica=passage.placed(pooled.prefill_replica),
        transfer_us=passage.placed(pooled.transfer_us),
    )


def _run_in_turn(
    prefill: Pool, decode: Pool, trace: Trace, turns: Longs, link: Link, *, time_scale: float, seed: int
) -> PooledOutcomes:
    """Serve a trace with the prefill pool, then with the decode pool what that sends."""
    rejected = _rejected(prefill, decode, trace)
    accepted = np.flatnonzero(~rejected)
    fit = _part(trace, accepted)
    options: dict[str, Any] = {"time_scale": time_scale, "seed": seed}
    prefilled = run_schedulers(
        prefill.plan,
        prefilled_trace(_part(trace, accepted, with_ids=True)),
        prefill.settings,
        prefill.replicas,
        prefill.routing,
        prefix_cache=prefill.prefix_cache,
        turns=turns[accepted],
        **options,
    )
    continues = np.flatnonzero((fit.output_tokens > 1) | (link.first_token == "decode"))
    there_us = _arrivals_us(prefill, decode, fit, prefilled, continues, link)
    first_us, last_us = prefilled.first_us.copy(), prefilled.last_us.copy()
    preemptions, replica = prefilled.preemptions.copy(), np.full(len(fit), -1, np.int32)
    transfer_us = np.full(len(fit), math.nan)
    decoded: Outcomes | None = None
    gaps_us = np.empty(0)
    if len(continues):
        handed = _decoded(_part(fit, continues), there_us, link.first_token)
        # requests that are handed over, by arrival at the decode pool
        who = continues[handed.order]
        decoded = run_schedulers(
            decode.plan, handed, decode.settings, decode.replicas, decode.routing, **options
        )
        transfer_us[who] = decoded.arrival_us - prefilled.last_us[who]
        last_us[who], replica[who] = decoded.last_us, decoded.replica
        preemptions[who] += decoded.preemptions
        if link.first_token == "decode":
            first_us[who] = decoded.first_us
        elif link.first_token == "transfer":
            first_us[who] = decoded.arrival_us
        if link.first_token != "decode":
            gaps_us = decoded.first_us - first_us[who]
    times = _Times(
        prefilled.arrival_us, first_us, last_us, preemptions, np.full(len(fit), FINISHED, np.uint8)
    )
    return _pooled(trace, rejected, times, prefilled, decoded, replica, transfer_us, gaps_us)


def _arrivals_us(
    prefill: Pool, decode: Pool, trace: Trace, prefilled: Outcomes, continues: Any, link: Link
) -> Floats:
    """Return when each request's KV cache arrives at its decode engine, us."""
    ready_us = prefilled.last_us[continues]
    lasts_us = sent_in_us(prefill, decode, trace.input_tokens[continues], link)
    if not link.is_shared:
        unshared_us: Floats = ready_us + lasts_us
        return unshared_us
    there_us: Floats = np.empty_like(ready_us)
    order = np.argsort(ready_us, kind="stable")
    links = np.ascontiguousarray(prefilled.replica[continues])
    transfers.link_ends(ready_us, lasts_us, links, order, np.zeros(prefill.replicas), there_us)
    return there_us


def _rejected(prefill: Pool, decode: Pool, trace: Trace) -> Bools:
    """Find requests that can never run in one of the pools; an error if that is all of them."""
    rejected = pools_too_long(trace, prefill.settings, decode.settings)
    if rejected.all():
        raise SimulationError(f"no request of {trace.name} can run in both pools: give more blocks or GPUs")
    return rejected


class _Times(NamedTuple):
    """Times and ends of the requests that both pools have served together."""

    arrival_us: Floats
    first_us: Floats
    last_us: Floats
    preemptions: Any
    status: Any


def _pooled(
    trace: Trace,
    rejected: Bools,
    times: _Times,
    prefilled: Outcomes,
    decoded: Outcomes | None,
    replica: Any,
    transfer_us: Floats,
    gaps_us: Floats,
) -> PooledOutcomes:
    """Return the outcomes of both pools, with gaps between first tokens and those of decode engines."""
    each = [prefilled] if decoded is None else [prefilled, decoded]
    found = {name: prefilled.counters[name] for name in FOUND_COUNTERS if name in prefilled.counters}
    counters = [{name: one.counters[name] for name in one.counters if name not in found} for one in each]
    total = merged([_record(one) for one in each])
    transfers.count_gaps(gaps_us, total)
    outcomes = Outcomes(
        *times,
        replica,
        total.gaps,
        total.series,
        float(total.width_us[0]),
        added_up(counters) | found,
        prefilled.cached_tokens,
    )
    prefill_replica = prefilled.replica
    if rejected.any():
        outcomes = with_rejected(outcomes, trace, rejected)
        prefill_replica = _spread(prefill_replica, rejected, -1)
        transfer_us = _spread(transfer_us, rejected, math.nan)
    return PooledOutcomes(outcomes, prefilled, decoded, prefill_replica, transfer_us)


def _record(outcomes: Outcomes) -> Record:
    return Record(outcomes.gaps, outcomes.series, np.array([outcomes.bin_us]))


def _spread(values: Any, rejected: Bools, fill: float) -> Any:
    """Insert ``fill`` for rejected requests."""
    spread = np.full(len(rejected), fill, values.dtype)
    spread[~rejected] = values
    return spread


_NO_REPLICA: Final = -1


def _run_with_feedback(
    prefill: Pool, decode: Pool, trace: Trace, turns: Longs, link: Link, *, time_scale: float, seed: int
) -> PooledOutcomes:
    """Serve a trace with both pools in order of events, by their own clocks."""
    rejected = _rejected(prefill, decode, trace)
    prompts = _prompts_of(trace, ~rejected if rejected.any() else None, prefill)
    again = link.first_token == "decode"
    outputs = np.ascontiguousarray(trace.output_tokens[~rejected])
    continues = np.ones(len(outputs), bool) if again else outputs > 1
    requests = prompts, _decodes_of(prompts, outputs, again)
    orders = turns[~rejected], np.arange(continues.sum())
    fed = [
        _loop_pool(pool, one, trace, order, time_scale, seed)
        for pool, one, order in zip((prefill, decode), requests, orders, strict=True)
    ]
    fed[1] = fed[1]._replace(
        options=fed[1].options._replace(has_cache=0, has_reserved=int(link.back_pressure))
    )
    on_wire = link._replace(latency_us=0.0) if link.by_layer else link
    line = _line_of(sent_in_us(prefill, decode, prompts.input_tokens, on_wire), continues, prefill, fed[1])
    options = transfers.LinkOptions(
        latency_us=float(link.latency_us),
        is_shared=int(link.is_shared),
        layers=prefill.plan.model.num_layers if link.by_layer else 0,
        reserves=int(link.back_pressure),
        clients=trace.clients or 0,
        has_parents=int(trace.has_parents),
        think_us=trace.think_s * US_PER_S,
        timeout_us=prefill.settings.timeout_s * US_PER_S,
    )
    both = of_one_set(*(pool.options for pool in fed))
    fed = [pool._replace(options=one) for pool, one in zip(fed, both, strict=True)]
    raise_stuck(loops.pools_run(fed[0], fed[1], options, line))
    prefilled, decoded = (_outcomes_of(pool) for pool in fed)
    return _put_together(trace, rejected, link, continues, line, prefilled, decoded)


def _prompts_of(trace: Trace, served: Bools | None, prefill: Pool) -> Requests:
    """Return the requests of prefill engines as the loop reads them."""
    requests = requests_of(trace, prefill.settings, served, prefill.prefix_cache)
    count = len(requests.arrival_us)
    if not (trace.is_closed or trace.has_parents):
        # all come by themselves
        rows = requests.rows
        if len(rows) == 1:
            rows = np.repeat(rows, count + 1, axis=0)
        rows[-1, NUM_ROOTS] = count
        requests = requests._replace(rows=rows, followers=np.arange(count, dtype=np.int32))
    return requests._replace(output_tokens=np.ones_like(requests.output_tokens))


def _decodes_of(prompts: Requests, outputs: Any, again: bool) -> Requests:
    """Return the requests of decode engines: prompts are in the KV cache, arrivals unknown."""
    sizes = prompts.input_tokens
    return prompts._replace(
        arrival_us=np.full(len(sizes), math.inf),
        input_tokens=sizes if again else sizes + sizes.dtype.type(1),
        output_tokens=outputs if again else outputs - outputs.dtype.type(1),
        cached_tokens=sizes - sizes.dtype.type(1) if again else sizes,
        next_arrived=np.full(len(sizes), NONE, np.int32),
        rows=np.zeros((1, NUM_COLUMNS), np.int32),
    )


def _loop_pool(
    pool: Pool, requests: Requests, trace: Trace, turns: Longs, time_scale: float, seed: int
) -> loops.Pool:
    """Return a pool as the loop reads it; ``turns`` are those of its router."""
    routings = POOLED_ROUTINGS if pool.prefix_cache == LRU else ROUTINGS
    one_of("routing", pool.routing, routings, SimulationError)
    rules = rank_rules(pool.plan)
    # clients and sessions are the loop's
    options = options_of(pool.plan.arena, pool.settings, trace, time_scale, pool.prefix_cache)
    drawn = np.random.default_rng(seed).integers(0, pool.replicas, (2, len(turns)), np.int32)
    longest = int(max(requests.output_tokens.max(), 1))
    fleet = new_fleet(pool.routing, pool.settings, requests, longest, pool.replicas, rules, drawn, turns)
    count = len(requests.arrival_us)
    return loops.Pool(
        pool.plan.arena,
        options._replace(clients=0, has_parents=0),
        fleet,
        requests,
        new_served(pool.settings, count),
        new_record(),
        np.full(count, _NO_REPLICA, np.int32),
        np.full(len(fleet.router.pushed), math.inf),
    )


def _line_of(lasts_us: Floats, continues: Bools, prefill: Pool, decode: loops.Pool) -> transfers.Line:
    """Return the empty line between two pools."""
    count = len(lasts_us)

    def numbers() -> Any:
        return np.full(count, NONE, np.int64)

    return transfers.Line(
        takes_us=np.ascontiguousarray(lasts_us, np.float64),
        goes_on=continues.astype(np.uint8),
        ready_us=np.full(count, math.nan),
        step_us=np.zeros(count),
        there_us=np.full(count, math.nan),
        home=numbers(),
        engine=numbers(),
        next_wanting=numbers(),
        heaps=np.zeros((2, count), np.int64),
        wanting=np.stack([np.full(len(decode.least_us), fill) for fill in (NONE, NONE, 0)]),
        free_us=np.zeros(prefill.replicas),
        scalars=np.zeros(transfers.NUM_LINE_SCALARS, np.int64),
    )


def _outcomes_of(pool: loops.Pool) -> Outcomes:
    """Return what the loop wrote of a pool."""
    source = LRU if pool.options.has_cache else GIVEN
    counters = fleet_counters(pool.fleet.states, source)
    return outcomes_of(pool.requests, pool.served, pool.replica_of, pool.record, counters, source)


def _put_together(
    trace: Trace,
    rejected: Bools,
    link: Link,
    continues: Bools,
    line: transfers.Line,
    prefilled: Outcomes,
    decoded: Outcomes,
) -> PooledOutcomes:
    """Return the outcomes of both pools from those of each, all in the order of the trace."""
    status = np.maximum(prefilled.status, decoded.status)
    arrived = np.isfinite(decoded.arrival_us)
    first_us = prefilled.first_us
    if link.first_token == "decode":
        first_us = decoded.first_us
    elif link.first_token == "transfer":
        there_us = np.where(arrived, decoded.arrival_us, math.nan)
        first_us = np.where(continues, there_us, first_us)
    last_us = np.where(continues, decoded.last_us, prefilled.last_us)
    times = _Times(
        prefilled.arrival_us,
        first_us,
        np.where(status == TIMED_OUT, math.nan, last_us),
        prefilled.preemptions + decoded.preemptions,
        status,
    )
    transfer_us = np.where(arrived, decoded.arrival_us - line.ready_us, math.nan)
    gaps_us = np.empty(0)
    if link.first_token != "decode":
        gaps_us = (decoded.first_us - first_us)[np.isfinite(decoded.first_us)]
    who = np.flatnonzero(arrived)
    who = who[np.lexsort((who, decoded.arrival_us[who]))]
    names = ("arrival_us", "first_us", "last_us", "preemptions", "status", "replica")
    handed = decoded._replace(**{name: getattr(decoded, name)[who] for name in names}) if len(who) else None
    replica = np.where(arrived, decoded.replica, _NO_REPLICA).astype(np.int32)
    return _pooled(trace, rejected, times, prefilled, handed, replica, transfer_us, gaps_us)
