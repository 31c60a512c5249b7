"""Fleets drawn at random, of any features together, and the naive fleet of each."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import numpy as np

import fastroof
from fastroof.plan import StepPlan
from fastroof.simulation.autoscaling import METRICS, Autoscaler
from fastroof.simulation.drafts import Drafting
from fastroof.simulation.engine import Outcomes
from fastroof.simulation.fleet_run import run_pools
from fastroof.simulation.kv_tiers import NO_TIERS, Tiers, block_bytes
from fastroof.simulation.pools import POOLED_ROUTINGS, ROUTINGS, EnginePool, Link, takes_us
from fastroof.simulation.settings import EngineSettings
from fastroof.traces.prompt_tree import GIVEN, LRU
from fastroof.traces.trace import Trace
from tests.reference import fleet, pools
from tests.reference.block_pool import PooledScheduler
from tests.reference.drafts import Drafts
from tests.reference.front_end import Times
from tests.reference.kv_tiers import Tier, TieredScheduler, made_tiers
from tests.reference.made_prefixes import made_prefixes
from tests.reference.made_workloads import made_sessions, sampled
from tests.reference.scheduler import Scheduler

US_PER_S = 1e6
MOE = "qwen3-30b-a3b"
"""A model whose ranks share experts."""
WINDOWED = "gpt-oss-20b"

RULES = ("", "assignment=round_robin", "lockstep=all", "lockstep=all assignment=fewest_tokens")
SHARED_RULES = (
    "prompt_tokens=fullest decode_tokens=fullest",
    "decode_tokens=half_full idle_tokens=0 assignment=round_robin floor_us=30",
    "decode_tokens=fullest assignment=fewest_tokens balance_steps=4",
)


def _pair(text: str) -> list[str]:
    return text.split("=")


@functools.cache
def a_plan(
    dp: int = 1, rules: str = "", model: str = "llama-3.1-8b", pp: int = 1, front_end: str = ""
) -> StepPlan:
    """A plan whose engine has these rules of ranks and front end, ``key=value key=value``."""
    found: dict[str, Any] = dict(map(_pair, rules.split()))
    found |= {key: int(value) for key, value in found.items() if value.isdigit()}
    costs = {"step_us": 100.0, "prefill_floor_layer_us": float(found.pop("floor_us", 0))}
    hides_host = bool(found.pop("hides_host", 0))
    return fastroof.compile_plan(
        model,
        "h100",
        fastroof.load_tables("h100"),
        dp=dp,
        pp=pp,
        ep=dp if model == MOE else 1,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        engine={
            "name": "ranks",
            "costs": costs,
            "data_parallel": found,
            "front_end": {name: float(value) for name, value in map(_pair, front_end.split())},
            "scheduling": {"order": "prefill_first", "async_scheduling": True} if hides_host else {},
        },
    )


class MadeFleet(NamedTuple):
    """What is simulated: pools, which trace they serve, and how prompts get from one to the other."""

    pools: list[EnginePool]
    trace: Trace
    link: Link | None
    seed: int

    def run(self) -> Outcomes:
        return run_pools(self.pools, self.trace, self.link, seed=self.seed)

    def run_naively(self) -> Any:
        return naively(self.pools, self.trace, self.link, self.seed)


# -- naive fleets ---------------------------------------------------------------------------------


def naive_tiers(tiers: Tiers, ranks: int) -> list[Tier]:
    """A rank's part of tiers."""
    size = tiers.block_bytes
    return [
        Tier(tier, int(tier.capacity_bytes / ranks // size), size / (tier.bytes_per_s / ranks) * US_PER_S)
        for tier in tiers.tiers
    ]


def naive_rule(rule: Autoscaler, first: int) -> pools.Rule:
    window_us = int(rule.scale_down_delay_s / rule.interval_s) * rule.interval_s * US_PER_S * (1 + 1e-9)
    return pools.Rule(
        rule.metric, rule.target, rule.low, rule.tolerance, rule.min_replicas, first, rule.max_replicas,
        rule.interval_s * US_PER_S, rule.startup_s * US_PER_S, window_us,
    )  # fmt: skip


def naive_pool(pool: EnginePool, trace: Trace, sent: int, seed: int) -> pools.Pool:
    """A pool to which so many requests are sent."""
    scheduler: Any = Scheduler
    if pool.tiers.tiers:

        def scheduler(settings: Any) -> TieredScheduler:
            tiers = naive_tiers(pool.tiers, pool.plan.layout.dp)
            return TieredScheduler(settings, trace, tiers, pool.plan.model.num_layers)

    elif pool.prefix_cache == LRU:
        scheduler = functools.partial(PooledScheduler, trace=trace)
    rule, below = pool.autoscaler, pool.most_replicas
    if rule is not None and rule.max_replicas > rule.min_replicas:
        below = 2**31 - 1
    return pools.Pool.of_plan(
        pool.plan,
        pool.settings,
        pool.replicas,
        pool.router,
        drawn=(seed, sent, below),
        scheduler=scheduler,
        rule=None if rule is None else naive_rule(rule, max(pool.replicas, rule.min_replicas)),
        drafts=naive_drafts(pool, trace, seed),
    )


def naive_drafts(pool: EnginePool, trace: Trace, seed: int) -> Drafts | None:
    """The draft tokens of a pool."""
    drafting = pool.drafting
    if drafting is None:
        return None
    settings, tokens = pool.settings, drafting.loops.tokens
    is_vllm = settings.order == "mixed" and not settings.reserve_output
    lookahead = tokens - 1 if is_vllm and drafting.loops.draft is not None else 0
    outputs = trace.output_tokens.tolist()
    return Drafts(drafting.loops.arena, tokens, lookahead, drafting.rates, seed, outputs, drafting.kept)


def naively(given: Sequence[EnginePool], trace: Trace, link: Link | None = None, seed: int = 0) -> Any:
    """Serve with naive pools."""
    first, plan = naive_pool(given[0], trace, len(trace), seed), given[0].plan
    front_end = None
    if not plan.profile.front_end.adds_nothing:
        front_end = Times(*plan.profile.front_end.times_us, plan.layout.dp)
    if link is None:
        return fleet.Fleet(trace, first, front_end=front_end).run()
    handed = len(trace) if link.first_token == "decode" else int((trace.output_tokens > 1).sum())
    on_wire = link._replace(latency_us=0.0) if link.by_layer else link
    plans = [pool.plan for pool in given]
    naive = fleet.Link(
        lambda prompt: float(takes_us(*plans, [prompt], on_wire, given[1].drafting)[0]),
        link.first_token,
        link.is_shared,
        link.latency_us,
        plans[0].model.num_layers if link.by_layer else 0,
        link.back_pressure,
    )
    then = naive_pool(given[1]._replace(prefix_cache=GIVEN), trace, handed, seed)
    return fleet.LinkedFleet(trace, first, then, naive, front_end).run()


# -- drawn fleets ---------------------------------------------------------------------------------


def a_rule(rng: np.random.Generator, most: int, least_s: float = 0.0) -> Autoscaler:
    """A rule that often changes the number of replicas within a fraction of a second."""
    metric = str(rng.choice(METRICS))
    targets = {"queue": (0.5, 2, 5), "concurrency": (1, 3, 8), "kv": (0.2, 0.5, 0.9), "rate": (5, 50, 300)}
    target = float(rng.choice(targets[metric]))
    interval_s = max(float(rng.choice([0.002, 0.01, 0.05])), least_s)
    return Autoscaler(
        metric,
        target,
        max_replicas=most,
        startup_s=float(rng.choice([0.0, 0.004, 0.05, 0.3])),
        min_replicas=int(rng.integers(1, most + 1)) if rng.random() < 0.3 else 1,
        interval_s=interval_s,
        scale_down_delay_s=float(rng.choice([0.0, 0.03, 0.2])),
        tolerance=float(rng.choice([0.0, 0.1, 0.4])),
        low=target / 3.0 if rng.random() < 0.3 else None,
    )


def a_workload(rng: np.random.Generator, *, clients: bool = False) -> tuple[Trace, EngineSettings]:
    """A burst of short requests, and an engine that often lacks blocks."""
    count = int(rng.integers(1, 50))
    input_tokens = rng.integers(1, 60, count)
    trace = Trace(
        rng.integers(0, 200, count) * rng.choice([1e-4, 1e-3]) * (not clients),
        input_tokens,
        rng.integers(1, 30, count),
        rng.integers(0, input_tokens) * (rng.random(count) < 0.3),
        clients=int(rng.integers(1, 12)) if clients else None,
        think_s=float(rng.choice([0.0, 0.0005])) if clients else 0.0,
    )
    settings = EngineSettings(
        max_num_batched_tokens=int(rng.integers(8, 64)),
        max_num_seqs=8,
        num_gpu_blocks=int(rng.integers(23, 40)),
        block_size=4,
        order=str(rng.choice(["mixed", "prefill_first"])),
        reserve_output=bool(rng.random() < 0.2),
        async_scheduling=bool(rng.random() < 0.5),
        timeout_s=float(rng.choice([math.inf, math.inf, 0.03, 0.3])),
    )
    return trace, settings


def a_front_end(rng: np.random.Generator) -> str:
    """Times that often queue requests, some of them 0."""
    sizes = {"request_ms": [0.0, 0.3, 3.0], "token_us": [0.0, 1.0, 30.0], "server_ms": [0.0, 0.1, 1.0]}
    drawn = {name: float(rng.choice(some)) for name, some in sizes.items()}
    return " ".join(f"{name}={value}" for name, value in drawn.items())


@functools.cache
def a_drafting(plan: StepPlan, tokens: int, draft: str | None) -> Drafting:
    drafting = Drafting.of_plan(plan, fastroof.SpeculativeDecoding(tokens, 1.0 + 0.5 * tokens, draft))
    assert drafting is not None
    return drafting


def with_drafts(rng: np.random.Generator, pool: EnginePool, trace: Trace) -> EnginePool:
    """Give a pool draft tokens, and each of its steps and its cache room for one that verifies them."""
    tokens = int(rng.integers(1, 5))
    drafting = a_drafting(pool.plan, tokens, "mtp" if rng.random() < 0.5 else None)
    if rng.random() < 0.5:
        rates = np.sort(rng.random(tokens))[::-1] * rng.choice([0.0, 1.0, 1.0])
        drafting = drafting._replace(rates=tuple(rates.tolist()))
    elif rng.random() < 0.4:
        few = [tuple(rng.integers(1, tokens + 2, rng.integers(1, 5)).tolist()) for _ in range(len(trace))]
        drafting = drafting._replace(
            kept=int(rng.integers(1, tokens + 2)) if rng.random() < 0.3 else tuple(few)
        )
    settings = pool.settings
    least = settings.max_num_seqs * (1 + tokens)
    settings = replace(settings, max_num_batched_tokens=max(settings.max_num_batched_tokens, least))
    pool = pool._replace(drafting=drafting, settings=settings)
    whole = trace.input_tokens + trace.output_tokens + pool.beyond
    blocks = max(settings.num_gpu_blocks, int((-(-whole // settings.block_size)).max()))
    return pool._replace(settings=replace(settings, num_gpu_blocks=blocks))


def made_fleet(seed: int, features: str) -> MadeFleet:
    """Draw a fleet that has these of ``stages ranks cache tiers pools rules front drafts``, and replicas."""
    rng, random = np.random.default_rng(seed), Random(seed)
    has_cache = "cache" in features or "tiers" in features
    if has_cache:
        work = made_prefixes(random, 25)
        trace, settings = work.trace, replace(work.settings, chunked_prefill=True)
    else:
        trace, settings = a_workload(rng, clients=bool(rng.random() < 0.3))
        if not trace.is_closed and rng.random() < 0.4:
            trace = made_sessions(random, trace)
    delays_s = 0.0 if trace.delay_s is None else float(trace.delay_s.sum())
    least_s = (trace.duration_s + delays_s) / 200.0
    linked, link = "pools" in features, None
    if linked:
        back_pressure, by_layer = [(False, False), (True, False), (False, True)][int(rng.integers(3))]
        link = Link(
            float(rng.choice([1e8, 1e9, 1e11])),
            float(rng.choice([0.0, 20.0])),
            bool(rng.random() < 0.7),
            str(rng.choice(["transfer", "prefill", "decode"])),
            back_pressure,
            by_layer,
        )
    front_end = a_front_end(rng) if "front" in features else ""
    model = MOE if "ranks" in features and rng.random() < 0.3 else "llama-3.1-8b"
    if "drafts" in features and "ranks" not in features and rng.random() < 0.3:
        model = WINDOWED
    made = []
    for at in range(1 + linked):
        if at:
            _, own = a_workload(rng)
            settings = replace(own, timeout_s=settings.timeout_s)
        outputs = 1 if linked and not at else trace.output_tokens
        least = int((-(-(trace.input_tokens + outputs) // settings.block_size)).max())
        is_scarce = "tiers" in features and not at and rng.random() < 0.6
        if linked and not (has_cache and not at):
            settings = replace(settings, max_num_seqs=int(rng.integers(2, 9)))
        settings = replace(settings, num_gpu_blocks=max(0 if is_scarce else settings.num_gpu_blocks, least))
        dp, rules = 1, ""
        if "ranks" in features and (not linked or rng.random() < 0.7):
            dp = int(rng.choice([2, 2, 4]))
            rules = str(rng.choice(SHARED_RULES if model == MOE else RULES))
            if at and link is not None and link.back_pressure and (model == MOE or "all" in rules):
                dp, rules = (1, "") if model == MOE else (dp, "")
        pp = 1
        if "stages" in features and (not linked or rng.random() < 0.7):
            pp = int(rng.choice([2, 3, 4]))
        plan = a_plan(dp, rules, model, pp, "" if at else front_end)
        pool = EnginePool(plan, settings, int(rng.integers(1, 4)))
        if has_cache and not at:
            pool = pool._replace(prefix_cache=LRU)
            if "tiers" in features:
                given = made_tiers(random, block_bytes(pool.plan, settings))
                pool = pool._replace(tiers=Tiers.of_plan(given, pool.plan, settings))
        if "drafts" in features and (not linked or rng.random() < 0.8):
            pool = with_drafts(rng, pool, trace)
        routings = POOLED_ROUTINGS if has_cache and not at else ROUTINGS
        pool = pool._replace(router=str(rng.choice(routings)))
        if "rules" in features and (not linked or rng.random() < 0.8):
            rule = a_rule(rng, int(rng.integers(1, 6)), least_s)
            first = int(rng.integers(rule.min_replicas, rule.max_replicas + 1))
            pool = pool._replace(autoscaler=rule, replicas=first)
        made.append(pool)
    return MadeFleet(made, trace, link, seed)


# -- comparison -----------------------------------------------------------------------------------


def assert_served_alike(made: MadeFleet) -> Counter[str]:
    """Hold a fleet to its naive one, to the last bit; count what happened."""
    got, naive = made.run(), made.run_naively()
    expected = of_requests(naive) if made.link is None else of_pools(naive)
    for name, values in expected.items():
        np.testing.assert_array_equal(getattr(got, name), values, err_msg=name)
    lives = got.lives
    assert (lives is None) == (not naive.scalers)
    if lives is not None:
        names = ("pool", "replica", "ordered_us", "ready_us", "drained_us", "stopped_us")
        ours = [tuple(row) for row in zip(*(lives[name].tolist() for name in names), strict=True)]
        assert sorted(ours) == sorted(naive.lives)
    prefill = got if made.link is None else got.prefill
    assert prefill is not None
    ranks = [rank for one in naive.pool.lives for engine in one.engines for rank in engine.schedulers]
    flights = [step for one in naive.engines for flight in one.done for step in flight.made if step.requests]
    assert got.counters["steps"] == len(flights)
    if made.link is None:
        assert got.gaps.sum() == len(naive.gaps_us)
    elif not got.status.any() and all(pool.drafting is None for pool in made.pools):
        assert got.gaps.sum() == (made.trace.output_tokens - 1).sum()
    assert got.counters["end_us"] == max(engine.now_us for engine in naive.engines)
    seen = Counter(
        {
            "workloads": 1,
            "preemptions": int(got.preemptions.sum()),
            "timed out": int((got.status == 1).sum()),
            "closed loops": made.trace.is_closed,
            "sessions": made.trace.has_parents,
        }
    )
    if any(pool.drafting is not None for pool in made.pools):
        seen["drafts"] += sum(sum(step.tokens) - len(step.tokens) for step in flights)
    if lives is not None:
        seen["started and stopped"] += int(np.isfinite(lives["drained_us"]).sum())
    if made.pools[0].prefix_cache == LRU:
        first = {index: tokens for rank in ranks for index, tokens in rank.first_found.items()}
        np.testing.assert_array_equal(got.cached_tokens, [first.get(i, -1) for i in range(len(made.trace))])
        assert got.counters["evictions"] == sum(rank.pool.evictions for rank in ranks)
        assert got.counters["found_again_tokens"] == sum(rank.found_again_tokens for rank in ranks)
        seen["found tokens"] += got.counters["found_tokens"]
    use = prefill.tiers
    if use is not None:
        places = {index: found for rank in ranks for index, found in rank.first_from.items()}
        none = [0] * len(use.tiers)
        assert use.tokens.tolist() == [places.get(i, none) for i in range(len(made.trace))]
        for name, of_naive in (
            ("found_tokens", "found_tokens"),
            ("fetched_blocks", "fetched"),
            ("written_blocks", "written"),
            ("evicted_blocks", "lost"),
        ):
            total = [sum(getattr(rank.tiers[i], of_naive) for rank in ranks) for i in range(len(none))]
            assert getattr(use, name).tolist() == total, name
        seen["fetched blocks"] += int(use.fetched_blocks.sum())
    return seen


def run_replicas(
    plan: StepPlan,
    trace: Trace,
    settings: EngineSettings,
    replicas: int = 1,
    router: str = "round_robin",
    *,
    prefix_cache: str = GIVEN,
    tiers: Tiers = NO_TIERS,
    **options: Any,
) -> Outcomes:
    """Serve a trace with replicas of an engine, each with its plan's ranks."""
    pool = EnginePool(plan, settings, replicas, router, prefix_cache, tiers)
    return run_pools([pool], trace, **options)


def of_requests(naive: fleet.Fleet) -> dict[str, Any]:
    """What a fleet's requests are expected to be."""
    names = ("status", "first_us", "last_us", "preemptions")
    columns = {name: [getattr(one, name) for one in naive.requests] for name in names}
    return columns | {"arrival_us": naive.sent_us, "replica": naive.replica}


def of_pools(naive: fleet.LinkedFleet) -> dict[str, Any]:
    """What requests are expected to be that decode where they are sent."""
    columns: dict[str, list[Any]] = {name: [] for name in ("last_us", "first_us", "transfer_us", "replica")}
    preemptions = []
    for one, prompt, decode in zip(naive.requests, naive.prompts, naive.decodes, strict=True):
        goes_on = naive.goes_on[one.index]
        arrived = goes_on and decode.arrival_us == naive.there_us[one.index]
        first_us = prompt.first_us
        if naive.link.first_token == "decode":
            first_us = decode.first_us
        elif naive.link.first_token == "transfer" and goes_on:
            first_us = decode.arrival_us if arrived else math.nan
        sent_us = decode.arrival_us - naive.ready_us[one.index] if arrived else math.nan
        columns["last_us"].append(math.nan if one.status else (decode if goes_on else prompt).last_us)
        columns["first_us"].append(first_us)
        columns["transfer_us"].append(sent_us)
        columns["replica"].append(naive.decode_replica[one.index] if arrived else -1)
        preemptions.append(prompt.preemptions + decode.preemptions)
    return columns | {
        "preemptions": preemptions,
        "status": [one.status for one in naive.requests],
        "arrival_us": [one.arrival_us for one in naive.requests],
        "prefill_replica": naive.replica,
    }


def prove(features: str, seeds: Sequence[int], least: int = 0) -> Counter[str]:
    """Hold fleets of these features to naive ones; count what happened, of all seeds at least so often."""
    seen = Counter[str]()
    for seed in sampled(seeds):
        seen.update(assert_served_alike(made_fleet(seed, features)))
    assert sampled(seeds) != seeds or min(seen.values(), default=0) >= least, seen
    return seen
