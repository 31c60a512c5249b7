"""Run replicas of an engine behind a router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.arrays import Floats, Ints, Longs
from fastroof.caching import usable_processors
from fastroof.checks import one_of, whole_number
from fastroof.compiled.expert_rows import ONE_RANK, RankRules
from fastroof.compiled.simulation import ranks as rank_loops
from fastroof.compiled.simulation import replicas as loops
from fastroof.compiled.simulation.state import (
    SERIES_BINS,
    EngineOptions,
    EngineState,
    Record,
    Requests,
)
from fastroof.errors import SimulationError
from fastroof.plan.calls import rank_rules
from fastroof.simulation.engine import (
    Arrays,
    Outcomes,
    added_up,
    cache_counters,
    counters_of,
    new_arrays,
    new_state,
    options_of,
    outcomes_of,
    raise_stuck,
    requests_of,
    run_engine,
    too_long,
    with_rejected,
)
from fastroof.simulation.front_end import run_behind, turns_of
from fastroof.simulation.kv_tiers import NO_TIERS, Tiers, TierUse, all_of, use_of
from fastroof.simulation.settings import EngineSettings
from fastroof.simulation.stages import check_stages, run_stages
from fastroof.traces.prompt_tree import GIVEN, LRU
from fastroof.traces.trace import Trace

if TYPE_CHECKING:
    from fastroof.plan import StepPlan


_RULES: Final = {
    "round_robin": loops.ROUND_ROBIN,
    "least_outstanding": loops.LEAST_OUTSTANDING,
    "least_load": loops.LEAST_LOAD,
    "least_kv": loops.LEAST_KV,
    "power_of_two": loops.POWER_OF_TWO,
    "prefix_aware": loops.PREFIX_AWARE,
}

POOLED_ROUTINGS: Final = tuple(_RULES)
"""Ways to choose the replica of a request where each has a pool of blocks."""

ROUTINGS: Final = tuple(name for name in POOLED_ROUTINGS if name != "prefix_aware")
"""Ways to choose the replica of a request where prefix hits are given."""

MOST_REPLICAS: Final = 4096
"""Maximum number of replicas."""


def ranks_of(plan: StepPlan) -> int:
    """Return the number of schedulers of a plan's engine: one a rank and a batch in its pipeline stages."""
    return int(plan.layout.batches_in_flight)


def engines_of(plan: StepPlan) -> int:
    """Return how many engines of one replica step independently: one, or its ranks if not in lockstep."""
    rules = rank_rules(plan)
    return rules.ranks // rules.together


def run_replicas(
    plan: StepPlan,
    trace: Trace,
    settings: EngineSettings,
    replicas: int = 1,
    routing: str = "round_robin",
    *,
    time_scale: float = 1.0,
    seed: int = 0,
    threads: int | None = None,
    prefix_cache: str = GIVEN,
    tiers: Tiers = NO_TIERS,
) -> Outcomes:
    """Serve a trace with replicas of an engine, each with its plan's ranks and front end."""
    replicas = whole_number("replicas", replicas, most=MOST_REPLICAS, error=SimulationError)

    def run(arrived: Trace, settings: EngineSettings) -> Outcomes:
        return run_schedulers(
            plan,
            arrived,
            settings,
            replicas,
            routing,
            time_scale=time_scale,
            seed=seed,
            threads=threads,
            prefix_cache=prefix_cache,
            tiers=tiers,
            turns=turns_of(trace, arrived),
        )

    return run_behind(plan.profile.front_end, trace, settings, replicas * plan.layout.dp, run)


def run_schedulers(
    plan: StepPlan,
    trace: Trace,
    settings: EngineSettings,
    replicas: int,
    routing: str,
    *,
    time_scale: float = 1.0,
    seed: int = 0,
    threads: int | None = None,
    prefix_cache: str = GIVEN,
    tiers: Tiers = NO_TIERS,
    turns: Longs | None = None,
) -> Outcomes:
    """Serve a trace with replicas of an engine, by their own clocks; ``turns`` are those of the router."""
    one_of("routing", routing, POOLED_ROUTINGS if prefix_cache == LRU else ROUTINGS, SimulationError)
    workers = usable_processors() if threads is None else threads
    workers = whole_number("threads", workers, error=SimulationError)
    if plan.layout.pp > 1:
        check_stages(plan, settings, replicas, prefix_cache)
        return run_stages(plan, trace, settings, time_scale=time_scale)
    if replicas == ranks_of(plan) == 1:
        return run_engine(
            plan, trace, settings, time_scale=time_scale, prefix_cache=prefix_cache, tiers=tiers
        )
    rejected = too_long(trace, settings)
    any_rejected = bool(rejected.any())
    requests = requests_of(trace, settings, ~rejected if any_rejected else None, prefix_cache, tiers)
    options = options_of(plan.arena, settings, trace, time_scale, prefix_cache, tiers)
    longest = int(trace.output_tokens.max())
    rules = rank_rules(plan)

    arrays = new_arrays(settings, requests, longest)
    count = len(requests.arrival_us)
    replica_of = np.zeros(count, np.int32)
    # a router counts what an engine rejects
    turns = (np.arange(len(trace)) if turns is None else turns)[~rejected]

    has_feedback = trace.is_closed or trace.has_parents
    if routing == "round_robin" and not has_feedback and replicas > 1:
        replica_of[:] = turns % replicas
        fleet_of_one = partial(new_fleet, routing, settings, requests, longest, rules=rules)
        run = partial(_share, plan.arena, options, arrays, replica_of, tiers, fleet_of_one)
        with ThreadPoolExecutor(min(workers, replicas)) as pool:
            # each thread sees the stop flag of this call
            contexts = [copy_context() for _ in range(replicas)]
            done = list(pool.map(lambda one, context: context.run(run, one), range(replicas), contexts))
        record = merged([record for record, _, _ in done])
        counters = added_up([counters for _, counters, _ in done])
        use = all_of([use for _, _, use in done], requests)
    else:
        drawn = np.random.default_rng(seed).integers(0, replicas, (2, count), np.int32)
        fleet = new_fleet(routing, settings, requests, longest, replicas, rules, drawn, turns)
        record = arrays.record
        arguments = (fleet, requests, arrays.served, record, replica_of)
        if has_feedback:
            # clients are handled by the router
            alone = options._replace(clients=0)
            code = loops.feedback_run(plan.arena, alone, *arguments, trace.clients or 0)
        else:
            code = loops.replicas_run(plan.arena, options, *arguments)
        raise_stuck(code)
        counters = fleet_counters(fleet.states, prefix_cache)
        use = use_of(tiers, [fleet.states], requests)
    outcomes = outcomes_of(requests, arrays.served, replica_of, record, counters, prefix_cache)
    outcomes = outcomes._replace(tiers=use)
    return with_rejected(outcomes, trace, rejected) if any_rejected else outcomes


def new_fleet(
    routing: str,
    settings: EngineSettings,
    requests: Requests,
    longest: int,
    replicas: int = 1,
    rules: RankRules = ONE_RANK,
    drawn: Ints | None = None,
    turns: Longs | None = None,
) -> loops.Fleet:
    """Make empty replicas as the loops read them, the states of all ranks behind one router."""
    states = new_state(settings, requests, longest, replicas * rules.ranks)
    if drawn is None:
        drawn = np.zeros((2, len(requests.arrival_us)), np.int32)
    if turns is None:
        turns = np.arange(len(requests.arrival_us))
    engines_each = rules.ranks // rules.together
    engines, ranks = replicas * engines_each, rules.together
    groups = rank_loops.RankGroup(
        np.zeros((engines, rank_loops.GROUP_SCALARS), np.int64),
        np.zeros((engines, rank_loops.GROUP_CLOCKS)),
        np.zeros((engines, 2, ranks), np.int64),
        rules,
    )
    router = loops.Router(_RULES[routing], drawn, turns, *(np.zeros(engines, np.int64) for _ in range(2)))
    return loops.Fleet(states, groups, router, settings.num_gpu_blocks, np.zeros(engines_each, np.int64))


def _share(
    arena: Floats,
    options: EngineOptions,
    arrays: Arrays,
    replica_of: Ints,
    tiers: Tiers,
    fleet_of_one: Callable[[], loops.Fleet],
    replica: int,
) -> tuple[Record, dict[str, Any], TierUse | None]:
    """Run one replica on its requests, which are known beforehand; writes only their elements."""
    fleet = fleet_of_one()
    empty = arrays.record
    record = Record(np.zeros_like(empty.gaps), np.zeros_like(empty.series), empty.width_us.copy())
    code = loops.share_run(arena, options, fleet, arrays.requests, arrays.served, record, replica, replica_of)
    raise_stuck(code)
    counters = fleet_counters(fleet.states, LRU if options.has_cache else GIVEN)
    return record, counters, use_of(tiers, [fleet.states], arrays.requests)


def fleet_counters(states: EngineState, prefix_cache: str) -> dict[str, Any]:
    """Return the counters of several engines together."""
    engines = range(len(states.scalars))
    each = [counters_of(EngineState(*(array[one] for array in states))) for one in engines]
    return added_up(each) | cache_counters(states.scalars, prefix_cache)


def merged(records: Sequence[Record]) -> Record:
    """Add the records of engines, in bins of the widest one's width."""
    width_us = max(float(record.width_us[0]) for record in records)
    series = np.zeros_like(records[0].series)
    for record in records:
        own, own_us = record.series.copy(), float(record.width_us[0])
        while own_us < width_us:
            own[: SERIES_BINS // 2] = own[::2] + own[1::2]
            own[SERIES_BINS // 2 :] = 0.0
            own_us *= 2.0
        series += own
    gaps = np.sum([record.gaps for record in records], axis=0)
    return Record(gaps, series, np.array([width_us]))
