"""Run a fleet: from pools, a trace and a link to the outcomes of requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import numpy as np

from fastroof.arrays import Bools, Floats, Longs
from fastroof.checks import shown, whole_number
from fastroof.compiled.simulation import records as R
from fastroof.compiled.simulation.records import Fleet
from fastroof.compiled.simulation.run import fleet_run
from fastroof.compiled.simulation.scaling import MOST_CHECKS
from fastroof.compiled.simulation.series import FIRST_KEY, GAP_BINS, GAP_SHIFT, SERIES_BINS
from fastroof.engines.front_end import NO_FRONT_END, FrontEnd
from fastroof.errors import SimulationError, StoppedError
from fastroof.host import usable_processors
from fastroof.simulation.engine import FOUND_COUNTERS, Outcomes, added_up, with_rejected
from fastroof.simulation.fleet_arrays import FIRST_LIVES, new_fleet
from fastroof.simulation.kv_tiers import NO_TIERS, Tiers, added_use, use_of
from fastroof.simulation.pools import EnginePool, Link, check_link, check_pool, never_run, sent_in_us
from fastroof.simulation.settings import EngineSettings
from fastroof.stopping import check_stopped
from fastroof.traces.prompt_tree import GIVEN, LRU, prompt_tree
from fastroof.traces.trace import Trace

if TYPE_CHECKING:
    from fastroof.plan import StepPlan


# -- what clients see --------------------------------------------------------------------------------


def run_engine(
    plan: StepPlan,
    trace: Trace,
    settings: EngineSettings,
    *,
    time_scale: float = 1.0,
    prefix_cache: str = GIVEN,
    tiers: Tiers = NO_TIERS,
) -> Outcomes:
    """Serve a trace with one engine, without a front end."""
    pool = EnginePool(plan, settings, prefix_cache=prefix_cache, tiers=tiers)
    return run_fleet([pool], trace, time_scale=time_scale)


def run_pools(
    pools: Sequence[EnginePool],
    trace: Trace,
    link: Link | None = None,
    *,
    time_scale: float = 1.0,
    seed: int = 0,
    threads: int | None = None,
) -> Outcomes:
    """Serve a trace with pools behind the front ends of the first one.

    One pool serves requests whole; of two, the first prefills and the second decodes what the link brings.
    """
    for pool in pools:
        check_pool(pool, trace)
    if len(pools) > 1:
        link = Link() if link is None else link
        check_link(pools[0], pools[1], link)

    front_end = pools[0].plan.profile.front_end
    return run_fleet(
        pools, trace, link=link, time_scale=time_scale, seed=seed, threads=threads, front_end=front_end
    )


# -- by the schedulers' clock ------------------------------------------------------------------------


def run_fleet(
    pools: Sequence[EnginePool],
    trace: Trace,
    *,
    link: Link | None = None,
    time_scale: float = 1.0,
    seed: int = 0,
    threads: int | None = None,
    front_end: FrontEnd = NO_FRONT_END,
) -> Outcomes:
    """Serve a trace behind a front end, by default by the schedulers' own clock."""
    workers = whole_number(
        "threads", usable_processors() if threads is None else threads, error=SimulationError
    )
    rejected = never_run(pools, trace)
    if len(pools) > 1 and rejected.all():
        raise SimulationError(f"no request of {trace.name} can run in both pools: give more blocks or GPUs")
    options: dict[str, Any] = {"time_scale": time_scale, "seed": seed, "front_end": front_end}
    first, has_feedback = pools[0], trace.is_closed or trace.has_parents
    is_split = first.replicas > 1 and first.router == "round_robin" and first.autoscaler is None
    if len(pools) == 1 and is_split and not has_feedback:
        outcomes = _shared(first, trace, ~rejected, options, workers)
    else:
        served = ~rejected if rejected.any() else None
        if link is not None:
            # hits are of prompts
            pools = [first, *(pool._replace(prefix_cache=GIVEN, tiers=NO_TIERS) for pool in pools[1:])]
            # layers are sent without the latency, which comes once
            on_wire = link._replace(latency_us=0.0) if link.by_layer else link
            options["takes_us"] = sent_in_us(pools[0], pools[1], trace.input_tokens[~rejected], on_wire)
        fleet = served_by(pools, trace, served, link=link, **options)
        outcomes = outcomes_of(pools, fleet, 0) if link is None else pooled_outcomes(pools, fleet, link)
    return with_rejected(outcomes, trace, rejected)


def served_by(
    pools: Sequence[EnginePool], trace: Trace, served: Bools | None = None, **options: Any
) -> Fleet:
    """Serve a trace, or some of its requests, by the schedulers' clock. Returns all of the run.

    Options are those of :func:`fastroof.simulation.fleet_arrays.new_fleet`.
    """
    lives = FIRST_LIVES
    while True:
        fleet = new_fleet(pools, trace, served, lives=lives, **options)
        code = int(fleet_run(fleet)) if fleet.requests.shape[1] or len(fleet.scalers) else 0
        if code != R.CODE_FULL:
            _raise_for(code, pools, trace)
            return fleet
        lives *= 4


def _raise_for(code: int, pools: Sequence[EnginePool], trace: Trace) -> None:
    """Raise the error of the loop's code, if any."""
    if code & R.CODE_STOPPED:
        check_stopped()
        raise StoppedError("the simulation was stopped before its end")
    if code & R.CODE_STUCK:
        raise SimulationError(
            "the first waiting request has no room in an empty engine; give more num_gpu_blocks"
        )
    if code & R.CODE_MANY_CHECKS:
        interval_s = min(pool.autoscaler.interval_s for pool in pools if pool.autoscaler is not None)
        raise SimulationError(
            f"the run of {shown(trace.name)} lasts over {MOST_CHECKS:,} checks of interval_s {interval_s:g}; "
            "give a longer interval_s"
        )


def _shared(
    pool: EnginePool, trace: Trace, served: Bools, options: Mapping[str, Any], workers: int
) -> Outcomes:
    """Serve requests, whose replicas are known beforehand, with each replica by itself, in threads."""
    # the router counts what an engine rejects
    rows = np.flatnonzero(served)
    replica_of = rows % pool.replicas
    alone = [pool._replace(replicas=1)]
    if pool.prefix_cache == LRU:
        # once for all
        prompt_tree(trace, pool.settings.block_size)

    def run(replica: int) -> Outcomes:
        own = np.zeros(len(trace), bool)
        own[rows[replica_of == replica]] = True
        return outcomes_of(alone, served_by(alone, trace, own, **options), 0)

    with ThreadPoolExecutor(min(workers, pool.replicas)) as threads:
        # each thread sees the stop flag of this call
        contexts = [copy_context() for _ in range(pool.replicas)]
        each = list(threads.map(lambda one, context: context.run(run, one), range(pool.replicas), contexts))
    order = np.argsort(replica_of, kind="stable")

    uses = [one.tiers for one in each if one.tiers is not None]

    def whole(_: Any, name: str) -> Any:
        found = uses if name == "tokens" else each
        joined = np.concatenate([getattr(one, name) for one in found])
        every = np.empty_like(joined)
        every[order] = joined
        return every

    outcomes = each[0].by_request(whole)
    if outcomes.tiers is not None:
        outcomes = outcomes._replace(tiers=added_use(uses, outcomes.tiers.tokens))
    return with_records_of(outcomes, each)._replace(
        replica=replica_of.astype(np.int32), counters=added_up([one.counters for one in each])
    )


# -- outcomes ----------------------------------------------------------------------------------------


def outcomes_of(pools: Sequence[EnginePool], fleet: Fleet, at: int) -> Outcomes:
    """Return what a pool did."""
    pool, row, requests = pools[at], fleet.pools[at], fleet.requests[at]
    has_cache = pool.prefix_cache == LRU
    # requests without an engine have engine NONE: the last one of these
    replica_of = np.append(fleet.engines["replica"] - row["first_replica"], R.NONE).astype(np.int32)
    lives = fleet.lives[: int(fleet.line[0]["num_lives"])]
    has_front_end = at == 0 and len(fleet.passing) > 0
    arrival_us = fleet.passing["sent_us"] if has_front_end else requests["arrival_us"]
    return Outcomes(
        arrival_us=arrival_us.copy(),
        first_us=requests["first_us"].copy(),
        last_us=requests["last_us"].copy(),
        preemptions=requests["preemptions"].astype(np.int32),
        status=requests["status"].astype(np.uint8),
        replica=replica_of[requests["engine"]],
        gaps=fleet.gaps[at],
        series=fleet.series[at],
        bin_us=float(fleet.width_us[at]),
        counters=counters_of(fleet, at),
        cached_tokens=fleet.chains["found"].copy() if has_cache else None,
        tiers=use_of(pool.tiers, fleet, pool.most_replicas),
        lives=lives[lives["pool"] == at] if pool.autoscaler is not None else None,
    )


def counters_of(fleet: Fleet, at: int) -> dict[str, Any]:
    """Return a pool's counters by name."""
    engines = fleet.engines[fleet.engines["pool"] == at]
    row = fleet.pools[at]
    first = int(engines["first_rank"][0])
    ranks = fleet.ranks[first : first + len(engines) * int(row["ranks"])]
    first_lane = int(ranks["first_lane"][0])
    lanes = fleet.lanes[first_lane : first_lane + len(ranks) * int(row["stages"])]
    names = ("steps", "mixed_steps", "prefill_steps", "prefill_tokens", "decode_tokens", "cached_tokens")
    # of one lane a sum in Python takes a fifth of NumPy's
    counters: dict[str, Any] = {name: sum(lanes[name].tolist()) for name in names}
    counters["preemptions"] = sum(ranks["preemptions"].tolist())
    running = ranks if row["shares_slots"] else lanes
    counters["peak_running"] = sum(running["peak_running"].tolist())
    counters["peak_waiting"] = sum(ranks["peak_waiting"].tolist())
    counters["num_gpu_blocks"] = sum(ranks["num_blocks"].tolist())
    counters["peak_blocks"] = counters["num_gpu_blocks"] - sum(ranks["least_free"].tolist())
    counters["decode_steps"] = counters["steps"] - counters["mixed_steps"] - counters["prefill_steps"]
    counters["busy_us"] = float(np.add.accumulate(engines["busy_us"])[-1])
    counters["end_us"] = float(engines["now_us"].max())
    if fleet.has.drafts:
        counters["kept_drafts"] = sum(lanes["kept_drafts"].tolist())
    if row["has_cache"]:
        counters |= {name: sum(ranks[name].tolist()) for name in FOUND_COUNTERS}
    return counters


def with_records_of(outcomes: Outcomes, each: Sequence[Outcomes]) -> Outcomes:
    """Return outcomes with the sum of several ones' gaps and series, in bins of the widest one's width."""
    width_us = max(one.bin_us for one in each)
    series = np.zeros_like(each[0].series)
    for one in each:
        own, own_us = one.series.copy(), one.bin_us
        while own_us < width_us:
            own[: SERIES_BINS // 2] = own[::2] + own[1::2]
            own[SERIES_BINS // 2 :] = 0.0
            own_us *= 2.0
        series += own
    return outcomes._replace(gaps=np.sum([one.gaps for one in each], axis=0), series=series, bin_us=width_us)


def pooled_outcomes(pools: Sequence[EnginePool], fleet: Fleet, link: Link) -> Outcomes:
    """Return the outcomes of a prefill and a decode pool together."""
    prefilled, decoded = (outcomes_of(pools, fleet, at) for at in range(2))
    status = np.maximum(prefilled.status, decoded.status)
    arrived, goes_on = np.isfinite(decoded.arrival_us), fleet.transfers["goes_on"] > 0
    first_us = prefilled.first_us
    if link.first_token == "decode":
        first_us = decoded.first_us
    elif link.first_token == "transfer":
        first_us = np.where(goes_on, np.where(arrived, decoded.arrival_us, math.nan), first_us)
    last_us = np.where(goes_on, decoded.last_us, prefilled.last_us)
    # requests that the decode pool got, by arrival
    who = np.flatnonzero(arrived)
    who = who[np.argsort(decoded.arrival_us[who], kind="stable")]
    handed = decoded.by_request(lambda values, _: values[who]) if len(who) else None
    each = [prefilled] if handed is None else [prefilled, handed]
    found = {name: prefilled.counters[name] for name in FOUND_COUNTERS if name in prefilled.counters}
    counters = [{name: one.counters[name] for name in one.counters if name not in found} for one in each]
    total = with_records_of(prefilled, each)
    if link.first_token != "decode":
        _count_gaps((decoded.first_us - first_us)[np.isfinite(decoded.first_us)], total.gaps)
    lives = fleet.lives[: int(fleet.line[0]["num_lives"])]
    return total._replace(
        first_us=first_us,
        last_us=np.where(status == R.TIMED_OUT, math.nan, last_us),
        preemptions=prefilled.preemptions + decoded.preemptions,
        status=status,
        replica=np.where(arrived, decoded.replica, R.NONE).astype(np.int32),
        counters=added_up(counters) | found,
        lives=lives if len(fleet.scalers) else None,
        prefill_replica=prefilled.replica,
        transfer_us=np.where(arrived, decoded.arrival_us - fleet.transfers["ready_us"], math.nan),
        prefill=prefilled,
        decode=handed,
    )


def _count_gaps(gaps_us: Floats, gaps: Longs) -> None:
    """Count gaps between tokens of several lengths, as the loop does."""
    keys = (np.ascontiguousarray(gaps_us).view(np.int64) >> GAP_SHIFT) - FIRST_KEY
    gaps += np.bincount(np.clip(keys, 0, GAP_BINS - 1), minlength=GAP_BINS)
