"""Simulate a fleet: :func:`simulate`, and its answers as a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from fastroof.checks import one_of, unknown_word, whole_number
from fastroof.errors import SimulationError
from fastroof.simulation.engine import check_time_scale
from fastroof.simulation.fleet import POOL_OPTIONS, Fleet, fleet_of
from fastroof.simulation.fleet_run import run_pools
from fastroof.simulation.pools import EnginePool, refuse_never_run
from fastroof.simulation.simulation import Simulation
from fastroof.traces.trace import Trace
from fastroof.traces.trace_files import load_trace

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.simulation.engine import Outcomes

ON_TOO_LONG: Final = ("error", "reject")
"""What happens to a request that can never run."""


def simulate(
    fleet: Fleet | StepPlan,
    trace: Any,
    *,
    seed: int = 0,
    on_too_long: str = "error",
    time_scale: float = 1.0,
    **pool: Any,
) -> Simulation:
    """Serve a trace request by request, as serving engines would.

    Parameters
    ----------
    fleet : Fleet or StepPlan
        The engines: a fleet, or the plan of one pool.
    trace : Trace or what :func:`fastroof.load_trace` takes
        The requests: with arrivals, of the clients of a closed loop, or sessions.
    seed : int, default 0
        Seed of routers that draw.
    on_too_long : {"error", "reject"}
        What happens to a request that can never run.
    time_scale : float, default 1
        Factor on the time of every step, not of transfers.
    **pool
        For a plan, the options of its :class:`Pool`: ``replicas``, ``router``, ``prefix_cache``,
        ``kv_tiers``, ``autoscaler``, and settings of the engine such as ``max_num_seqs``.

    Returns
    -------
    Simulation
        The times of every request, and results derived from them.

    Raises
    ------
    SimulationError
        If a setting is invalid or above the plan's sizes, the plans of two pools do not match, or a request
        can never run; the message names it.
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
    >>> sim = fastroof.simulate(plan, trace, replicas=2)
    >>> sim.requests.column("replica").to_pylist()
    [0, 1]
    """
    whole = fleet_of(fleet, pool)
    if pool:
        raise SimulationError(unknown_word("option", next(iter(pool)), POOL_OPTIONS, "help(fastroof.Pool)"))
    one_of("on_too_long", on_too_long, ON_TOO_LONG, SimulationError)
    seed = whole_number("seed", seed, 0, 2**63 - 1, SimulationError)
    check_time_scale(time_scale)
    requests = trace if isinstance(trace, Trace) else load_trace(trace)
    pools = whole.serving(requests)
    if on_too_long == "error":
        refuse_never_run(pools, requests, 'on_too_long="reject"')

    def run(scale: float, pools: Sequence[EnginePool] = pools) -> Outcomes:
        return run_pools(pools, requests, whole.link, time_scale=scale * time_scale, seed=seed)

    return Simulation(pools, requests, run(1.0), link=whole.link, rerun=run)


def simulation_document(sim: Simulation, answers: dict[str, Any]) -> dict[str, Any]:
    """Return a run and its answers as one JSON document."""
    plan, trace, drafting = sim.plan, sim.trace, sim.pools[-1].drafting
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
        **({} if drafting is None else drafting.speculation.facts),
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
    total = 0.0
    for pool, own in zip(sim.pools, answers.get("pools", {"": answers}).values(), strict=True):
        held = own["autoscaling"]["replicas"]["mean"] if "autoscaling" in own else pool.most_replicas
        total += pool.gpus * (held / pool.most_replicas)
    return total
