"""Simulate a deployment: :func:`simulate`, and its answers as a document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastroof.checks import one_of, whole_number
from fastroof.errors import SimulationError
from fastroof.plan.compile import check_plan
from fastroof.simulation.autoscaling import Autoscaler, check_rule
from fastroof.simulation.engine import check_time_scale, refuse_too_long
from fastroof.simulation.fleet_run import run_pools
from fastroof.simulation.kv_tiers import tiers_below
from fastroof.simulation.pools import POOLED_ROUTINGS, Pool
from fastroof.simulation.settings import MOST_REPLICAS, EngineSettings, running_tokens
from fastroof.simulation.simulation import Simulation
from fastroof.traces.prompt_tree import source_of_hits
from fastroof.traces.trace import Trace
from fastroof.traces.trace_files import load_trace

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.simulation.engine import Outcomes

ON_TOO_LONG: Final = ("error", "reject")
"""What happens to a request that can never run."""


def simulate(
    plan: StepPlan,
    trace: Any,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
    num_gpu_blocks: int | None = None,
    block_size: int | None = None,
    replicas: int = 1,
    async_scheduling: bool | None = None,
    *,
    order: str | None = None,
    chunked_prefill: bool | None = None,
    admit_whole_prompt: bool = True,
    reserve_output: bool | None = None,
    timeout_s: float | None = None,
    prefill_schedule_interval: int | None = None,
    prefill_decode_interval: int | None = None,
    min_free_slots_delay: int | None = None,
    routing: str = "round_robin",
    prefix_cache: str = "auto",
    kv_tiers: Any = None,
    seed: int = 0,
    on_too_long: str = "error",
    time_scale: float = 1.0,
    autoscale: Autoscaler | None = None,
) -> Simulation:
    """Serve a trace request by request, as a serving engine would.

    Parameters
    ----------
    plan : StepPlan
        Times the steps; its engine's profile defines how they are scheduled.
    trace : Trace or what :func:`fastroof.load_trace` takes
        The requests.
    max_num_batched_tokens : int, optional
        Maximum number of new tokens per step; by default the engine's.
    max_num_seqs : int, optional
        Maximum number of running requests; by default the engine's, in mixed steps at most
        ``max_num_batched_tokens``.
    num_gpu_blocks : int, optional
        Blocks of KV cache; by default all that the plan's memory has room for.
    block_size : int, optional
        Tokens per block; by default the engine's.
    replicas : int, default 1
        Number of engines that share the requests.
    async_scheduling : bool, optional
        Whether a step is scheduled while the previous one runs; by default the engine's.
    order, chunked_prefill, reserve_output : optional
        As in :class:`EngineSettings`; by default the engine's.
    admit_whole_prompt : bool, default True
        Whether a request starts only when its whole prompt has room.
    timeout_s : float, optional
        Seconds after which a client gives up; by default never.
    prefill_schedule_interval, prefill_decode_interval, min_free_slots_delay : int, optional
        Steps or slots that prompts wait for, as in :class:`EngineSettings`; by default none.
    routing : str, default "round_robin"
        How a request's replica is chosen: ``round_robin``, ``least_outstanding``, ``least_load``,
        ``least_kv``, ``power_of_two`` or, with ``prefix_cache="lru"``, ``prefix_aware``.
    prefix_cache : {"auto", "given", "lru"}
        Where prefix hits come from: the trace's ``cached_tokens``, or a simulated cache that evicts the least
        recently used blocks. It finds prompts by the trace's ``hash_ids``, or else ``history_tokens``, and
        what preempted requests left. ``auto`` is ``lru`` for traces with one of them, else ``given``.
    kv_tiers : str or sequence of KvTier, optional
        Tiers below a simulated prefix cache, each a packaged name (``lmcache-cpu``, ``lmcache-disk``,
        ``vllm-offloading``, ``sglang-hicache``, ``mooncake-store``) or another, with its size and bandwidth:
        ``"vllm-offloading:200GB"``, ``"host:200GB:50GB/s,disk:2TB:6GB/s:80us"``. Each replica has its own.
    seed : int, default 0
        Seed of routings that draw.
    on_too_long : {"error", "reject"}
        What happens to a request that can never run.
    time_scale : float, default 1
        Factor on the time of every step.
    autoscale : Autoscaler, optional
        Rule that starts and stops replicas; the run begins with ``replicas``, at least its ``min_replicas``.

    Returns
    -------
    Simulation
        The times of every request, and results derived from them; an
        :class:`~fastroof.simulation.AutoscaledSimulation` with ``autoscale``.

    Raises
    ------
    SimulationError
        If a setting is invalid or above the plan's sizes, or a request can never run; the message names it.
    TraceError
        If the trace cannot be read.

    Notes
    -----
    The scheduler is vLLM V1's: running requests first, in order of admission, then waiting ones, first come
    first served; when blocks run short the last admitted request is preempted and later recomputes its
    tokens. A step sees arrivals at or before its start; with asynchronous scheduling the step after it does,
    unless the engine was idle. An idle engine starts at an arrival. With a cached prefix of c tokens the
    first chunk starts at context c, and the prefix takes its own blocks; after a preemption nothing is
    cached, except with ``prefix_cache="lru"``.

    Examples
    --------
    >>> import fastroof
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> trace = {"arrival_s": [0.0, 0.1], "input_tokens": [1000, 200], "output_tokens": [50, 20]}
    >>> sim = fastroof.simulate(plan, trace)
    >>> sim.requests.column("status").to_pylist()
    ['finished', 'finished']
    """
    check_plan("plan", plan, SimulationError)
    one_of("on_too_long", on_too_long, ON_TOO_LONG, SimulationError)
    one_of("routing", routing, POOLED_ROUTINGS, SimulationError)
    replicas = whole_number("replicas", replicas, 1, MOST_REPLICAS, SimulationError)
    check_rule("autoscale", autoscale)
    seed = whole_number("seed", seed, 0, 2**63 - 1, SimulationError)
    check_time_scale(time_scale)
    requests = trace if isinstance(trace, Trace) else load_trace(trace)
    prefix_cache = source_of_hits(requests, prefix_cache, routing)
    settings = EngineSettings.of_plan(
        plan,
        kv_len=running_tokens(requests, plan, reserve_output),
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        num_gpu_blocks=num_gpu_blocks,
        block_size=block_size,
        async_scheduling=async_scheduling,
        order=order,
        chunked_prefill=chunked_prefill,
        admit_whole_prompt=admit_whole_prompt,
        reserve_output=reserve_output,
        timeout_s=timeout_s,
        prefill_schedule_interval=prefill_schedule_interval,
        prefill_decode_interval=prefill_decode_interval,
        min_free_slots_delay=min_free_slots_delay,
    )
    tiers = tiers_below(kv_tiers, plan, settings, prefix_cache)
    if on_too_long == "error":
        refuse_too_long(requests, settings, 'on_too_long="reject"')
    pool = Pool(plan, settings, replicas, routing, prefix_cache, tiers, autoscale)

    def run(scale: float, pool: Pool = pool) -> Outcomes:
        return run_pools([pool], requests, time_scale=scale * time_scale, seed=seed)

    if autoscale is not None:
        from fastroof.simulation.autoscaled_simulation import AutoscaledSimulation

        return AutoscaledSimulation(pool, requests, run)
    return Simulation(plan, requests, settings, run(1.0), replicas=replicas, rerun=run)


def simulation_document(sim: Simulation, answers: dict[str, Any]) -> dict[str, Any]:
    """Return a run and its answers as one JSON document."""
    plan, trace = sim.plan, sim.trace
    return {
        "version": plan.version,
        "model": plan.model.name,
        "gpu": plan.gpu.name,
        "tp": plan.tp,
        "pp": plan.layout.pp,
        "dp": plan.layout.dp,
        "ep": plan.layout.ep,
        "moe_tp": plan.layout.moe_tp,
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        **plan.lora_facts,
        **plan.profile.facts,
        "replicas": sim.replicas,
        "tables_hash": plan.tables_hash,
        "trace": {
            "name": trace.name,
            "requests": len(trace),
            "clients": trace.clients,
            "left_out": trace.left_out,
            "input_tokens": float(trace.input_tokens.mean()),
            "output_tokens": float(trace.output_tokens.mean()),
        },
        "settings": vars(sim.settings),
        **answers,
        "output_tokens_per_s_per_gpu": answers["output_tokens_per_s"] / mean_gpus(sim, answers),
    }


def mean_gpus(sim: Simulation, answers: dict[str, Any]) -> float:
    """Return the GPUs of all engines, the mean of those that an autoscaler holds."""

    def held(answers: dict[str, Any], replicas: int) -> float:
        return float(answers.get("autoscaling", {}).get("replicas", {}).get("mean", replicas)) / replicas

    pools = [(getattr(sim, name), of_pool) for name, of_pool in answers.get("pools", {}).items()]
    if pools:
        return float(sum(pool.gpus * held(of_pool, pool.most_replicas) for pool, of_pool in pools))
    return sim.gpus * held(answers, sim.replicas)
