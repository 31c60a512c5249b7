"""Fleets of engines: the pools that users describe, and the pools with settings that are simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from fastroof.caching import lazy_property
from fastroof.checks import one_of, shown, whole_number
from fastroof.errors import SimulationError
from fastroof.plan.compile import check_plan
from fastroof.simulation.autoscaling import Autoscaler
from fastroof.simulation.drafts import Drafting
from fastroof.simulation.kv_tiers import tiers_below
from fastroof.simulation.pools import POOLED_ROUTINGS, EnginePool, Link
from fastroof.simulation.settings import MOST_REPLICAS, EngineSettings, running_tokens
from fastroof.traces.prompt_tree import GIVEN, PREFIX_CACHES, source_of_hits
from fastroof.traces.trace import Trace

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.plan.speculation import SpeculativeDecoding


@dataclass(frozen=True)
class Pool:
    """Equal engines behind one router.

    Parameters
    ----------
    plan : StepPlan
        Times the steps; its engine's profile defines how they are scheduled.
    replicas : int, default 1
        Number of engines that share the requests; with an autoscaler those at the start.
    router : str, optional
        How a request's replica is chosen: ``round_robin``, ``least_outstanding``, ``least_load``,
        ``least_kv``, ``power_of_two`` or, with a simulated prefix cache, ``prefix_aware``; by default the
        fleet's.
    prefix_cache : {"auto", "given", "lru"}
        Where prefix hits come from: the trace's ``cached_tokens``, or a simulated cache that evicts the least
        recently used blocks. It finds prompts by the trace's ``hash_ids``, or else ``history_tokens``, and
        what preempted requests left. ``auto`` is ``lru`` for traces with one of them, else ``given``.
    kv_tiers : str or sequence of KvTier, optional
        Tiers below a simulated prefix cache, each a packaged name (``lmcache-cpu``, ``lmcache-disk``,
        ``vllm-offloading``, ``sglang-hicache``, ``mooncake-store``) or another, with its size and bandwidth:
        ``"vllm-offloading:200GB"``, ``"host:200GB:50GB/s,disk:2TB:6GB/s:80us"``. Each replica has its own.
    autoscaler : Autoscaler, optional
        Rule that starts and stops replicas; the run begins with ``replicas``, at least its ``min_replicas``.
        By default the fleet's.
    max_num_batched_tokens : int, optional
        Maximum number of new tokens per step; by default the engine's.
    max_num_seqs : int, optional
        Maximum number of running requests; by default the engine's, in mixed steps at most
        ``max_num_batched_tokens``.
    num_gpu_blocks : int, optional
        Blocks of KV cache; by default all that the plan's memory has room for.
    block_size : int, optional
        Tokens per block; by default the engine's.
    async_scheduling, order, chunked_prefill, admit_whole_prompt, reserve_output : optional
        As in :class:`EngineSettings`; by default the engine's.
    timeout_s : float, optional
        Seconds after which a client gives up, wherever the request is; by default never.
    prefill_schedule_interval, prefill_decode_interval, min_free_slots_delay : int, optional
        Steps or slots that prompts wait for, as in :class:`EngineSettings`; by default none.
    speculation : SpeculativeDecoding, optional
        Draft tokens that every decode verifies. Steps keep as many as the fleet's ``seed`` draws: by the
        acceptance rates of positions, or with one rate for all that has the given mean.
    kept_tokens : int or sequence, optional
        Tokens that steps keep instead of drawn ones, the one without a draft included: of all steps, or for
        each request of the trace's file a sequence for its steps after the prompt, which begins again if it
        is short.

    Raises
    ------
    SimulationError
        If the plan, the replicas, the router, the prefix cache or the autoscaler is invalid. Settings and
        draft tokens are checked when the pool serves a trace.

    Examples
    --------
    >>> import fastroof
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    >>> fastroof.Pool(plan, replicas=4, router="least_kv", max_num_seqs=64).replicas
    4
    """

    plan: StepPlan
    replicas: int = 1
    router: str | None = None
    prefix_cache: str = "auto"
    kv_tiers: Any = None
    autoscaler: Autoscaler | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    async_scheduling: bool | None = None
    order: str | None = None
    chunked_prefill: bool | None = None
    admit_whole_prompt: bool | None = None
    reserve_output: bool | None = None
    timeout_s: float | None = None
    prefill_schedule_interval: int | None = None
    prefill_decode_interval: int | None = None
    min_free_slots_delay: int | None = None
    speculation: SpeculativeDecoding | None = None
    kept_tokens: Any = None

    def __post_init__(self) -> None:
        check_plan("plan", self.plan, SimulationError)
        replicas = whole_number("replicas", self.replicas, 1, MOST_REPLICAS, SimulationError)
        object.__setattr__(self, "replicas", replicas)
        if self.router is not None:
            one_of("router", self.router, POOLED_ROUTINGS, SimulationError)
        one_of("prefix_cache", self.prefix_cache, PREFIX_CACHES, SimulationError)
        _check_rule(self.autoscaler)

    @lazy_property
    def drafting(self) -> Drafting | None:
        """The draft tokens as they are simulated."""
        return Drafting.of_plan(self.plan, self.speculation, self.kept_tokens)

    def settings(self, trace: Trace) -> EngineSettings:
        """Return the settings of an engine that serves a trace."""
        given = {name: getattr(self, name) for name in EngineSettings.__dataclass_fields__}
        tokens = running_tokens(trace, self.plan, self.reserve_output)
        loops = None if self.drafting is None else self.drafting.loops
        return EngineSettings.of_plan(self.plan, kv_len=tokens, drafts=loops, **given)


@dataclass(frozen=True)
class Fleet:
    """One pool of engines, or two of which the first prefills and the second decodes.

    Parameters
    ----------
    pools : sequence of Pool, or a Pool
        One pool, which serves requests whole, or two with plans of the same model and KV dtype; layouts and
        GPUs may differ. A pool that prefills has the prefix cache and its tiers.
    router : str, default "round_robin"
        Router of the pools that name none; for ``prefix_aware`` decode engines have ``least_kv``.
    link : Link, optional
        The link between two pools: bandwidth, latency, who computes the first token, whether a full decode
        engine holds back prefill, and whether layers are sent one by one (default: ``Link()``, NVLink).
    autoscaler : Autoscaler, optional
        Rule of the pools that have none.

    Raises
    ------
    SimulationError
        If the number of pools, the router, the link or the autoscaler is invalid.

    Notes
    -----
    With two pools a prompt is computed on a prefill engine, its KV cache is sent over the link, and a decode
    engine continues with the prompt as context. The closed form is
    :func:`fastroof.serving.estimate_disaggregated`.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.simulation import Link
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    >>> fleet = fastroof.Fleet([fastroof.Pool(plan, replicas=2), fastroof.Pool(plan)], link=Link(50e9))
    >>> trace = fastroof.Trace([0.0, 0.1, 0.2], [4000, 2000, 500], [100, 50, 1])
    >>> sim = fastroof.simulate(fleet, trace)
    >>> sim.requests["prefill_replica"].to_pylist(), sim.requests["replica"].to_pylist()
    ([0, 1, 0], [0, 0, None])
    >>> round(sim.requests["transfer_ms"][0].as_py(), 3)
    10.486
    """

    pools: Sequence[Pool]
    router: str = "round_robin"
    link: Link | None = None
    autoscaler: Autoscaler | None = None

    def __post_init__(self) -> None:
        pools: Any = (self.pools,) if isinstance(self.pools, Pool) else self.pools
        is_some = isinstance(pools, list | tuple) and all(isinstance(pool, Pool) for pool in pools)
        if not is_some or len(pools) not in (1, 2):
            raise SimulationError(
                f"pools must be one Pool, or two that prefill and decode; got {shown(self.pools)}"
            )
        one_of("router", self.router, POOLED_ROUTINGS, SimulationError)
        _check_rule(self.autoscaler)
        object.__setattr__(self, "pools", tuple(pools))
        if len(pools) == 1:
            if self.link is not None:
                raise SimulationError("a link is between two pools, one that prefills and one that decodes")
            return
        if self.link is None:
            object.__setattr__(self, "link", Link())
        decode = pools[1]
        if decode.kv_tiers is not None or decode.prefix_cache not in ("auto", GIVEN):
            raise SimulationError(
                "prefix_cache and kv_tiers are those of the pool that prefills; leave them out of the other"
            )

    def serving(self, trace: Trace) -> list[EnginePool]:
        """Return the pools with the settings, router and tiers with which they serve a trace."""
        return [self._serving(trace, pool, at > 0) for at, pool in enumerate(self.pools)]

    def _serving(self, trace: Trace, pool: Pool, decodes: bool) -> EnginePool:
        router, rule = pool.router or self.router, pool.autoscaler or self.autoscaler
        drafting = None if pool.drafting is None else pool.drafting.serving(trace)
        if decodes:
            if router == "prefix_aware" and pool.router is None:
                router = "least_kv"
            decoding = EnginePool(pool.plan, pool.settings(trace), pool.replicas, router, autoscaler=rule)
            return decoding._replace(drafting=drafting)
        hits, settings = source_of_hits(trace, pool.prefix_cache, router), pool.settings(trace)
        tiers = tiers_below(pool.kv_tiers, pool.plan, settings, hits)
        return EnginePool(pool.plan, settings, pool.replicas, router, hits, tiers, rule, drafting)

    def without_rules(self) -> Fleet:
        """Return the fleet, or refuse one that starts and stops replicas."""
        if any(rule is not None for rule in (self.autoscaler, *(pool.autoscaler for pool in self.pools))):
            raise SimulationError(
                "a capacity is that of a fixed number of replicas; leave autoscaler out, or use simulate"
            )
        return self


POOL_OPTIONS = tuple(field.name for field in fields(Pool) if field.name != "plan")
"""Options of a pool, which functions that take a plan take, too."""


def fleet_of(given: Any, options: dict[str, Any]) -> Fleet:
    """Return a fleet, or one pool of a plan with the options of a pool, which are removed from all."""
    own = {name: options.pop(name) for name in POOL_OPTIONS if name in options}
    if not isinstance(given, Fleet):
        return Fleet([Pool(given, **own)])
    if own:
        raise SimulationError(f"{next(iter(own))} is an option of a pool; give it to the pools of the Fleet")
    return given


def _check_rule(rule: Any) -> None:
    if rule is not None and not isinstance(rule, Autoscaler):
        raise SimulationError(f"autoscaler must be an Autoscaler, got {type(rule).__name__}")
