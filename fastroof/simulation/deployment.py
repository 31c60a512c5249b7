"""A trace through a deployment: :func:`simulate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fastroof.checks import one_of
from fastroof.errors import SimulationError
from fastroof.plan.compile import check_plan
from fastroof.simulation.engine import Outcomes, too_long
from fastroof.simulation.replicas import POOLED_ROUTINGS, run_pooled_replicas, run_replicas
from fastroof.simulation.settings import EngineSettings
from fastroof.simulation.simulation import Simulation
from fastroof.simulation.trace import Trace
from fastroof.simulation.trace_files import load_trace

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

ON_TOO_LONG: Final = ("error", "reject")
"""What becomes of a request that can never run."""

_RUNS: Final[dict[str, Callable[..., Outcomes]]] = {"given": run_replicas, "lru": run_pooled_replicas}

PREFIX_CACHES: Final = tuple(_RUNS)
"""Where what a request finds of its prompt comes from."""


def simulate(
    plan: StepPlan,
    trace: Any,
    max_num_batched_tokens: int | None = 2048,
    max_num_seqs: int | None = 256,
    num_gpu_blocks: int | None = None,
    block_size: int | None = 16,
    replicas: int = 1,
    async_scheduling: bool | None = None,
    *,
    order: str | None = None,
    chunked_prefill: bool | None = None,
    admit_whole_prompt: bool = True,
    reserve_output: bool | None = None,
    timeout_s: float | None = None,
    routing: str = "round_robin",
    prefix_cache: str = "given",
    seed: int = 0,
    on_too_long: str = "error",
    time_scale: float = 1.0,
) -> Simulation:
    """Serve a trace request by request, as a serving engine would.

    Parameters
    ----------
    plan : StepPlan
        What steps take; its engine's profile says how they are made.
    trace : Trace or what :func:`fastroof.load_trace` takes
        The requests.
    max_num_batched_tokens : int or None, default 2048
        New tokens of a step at most; None: the engine's own default.
    max_num_seqs : int or None, default 256
        Requests that run at once at most; None: the engine's own default.
    num_gpu_blocks : int, optional
        Blocks of KV cache; by default what the plan's memory has room for.
    block_size : int or None, default 16
        Tokens of a block; None: the engine's own.
    replicas : int, default 1
        Engines that share the requests.
    async_scheduling : bool, optional
        Whether a step is scheduled while the one before runs; by default as the engine does.
    order, chunked_prefill, reserve_output : optional
        As :class:`fastroof.simulation.settings.EngineSettings` has them; by default as the engine does.
    admit_whole_prompt : bool, default True
        Whether a request starts only when all of its prompt has room.
    timeout_s : float, optional
        Seconds after which a client gives up; by default none does.
    routing : str, default "round_robin"
        Which replica a request goes to: see :func:`fastroof.simulation.replicas.run_replicas`; with
        ``prefix_cache="lru"`` to the one that has the most of its prompt and the least to do, too:
        ``prefix_aware`` (:func:`fastroof.simulation.replicas.run_pooled_replicas`).
    prefix_cache : {"given", "lru"}
        What a request finds of its prompt: what the trace's ``cached_tokens`` give, or what a pool of blocks
        holds, from which the least recently used go: by the trace's ``hash_ids``, and of their own what
        preempted requests left (:func:`fastroof.simulation.engine.run_pooled_engine`).
    seed : int, default 0
        Of what a routing draws.
    on_too_long : {"error", "reject"}
        What becomes of a request whose prompt and output can never have room.
    time_scale : float, default 1
        Every step takes so many times as long.

    Returns
    -------
    Simulation
        Every request's times, and what follows of them.

    Raises
    ------
    SimulationError
        If a setting cannot be, or a request can never run: it is named.
    TraceError
        If the trace cannot be read.

    Notes
    -----
    The scheduler is vLLM V1's: running requests first, in order of admission, then waiting ones, first come
    first served; a request that runs short of blocks preempts the last admitted, which computes its tokens
    again. An arrival at or before the start of a step is seen by that step, and with asynchronous scheduling
    by the step after, unless the engine was idle. An idle engine starts at an arrival. A cached prefix of c
    tokens makes the first chunk start at context c and takes blocks of its own; after a preemption nothing is
    cached, but with ``prefix_cache="lru"``. Engines of other orders: :mod:`fastroof.simulation`.

    Examples
    --------
    >>> import fastroof
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"))
    >>> trace = {"arrival_s": [0.0, 0.1], "input_tokens": [1000, 200], "output_tokens": [50, 20]}
    >>> sim = fastroof.simulate(plan, trace)
    >>> sim.requests.column("status").to_pylist()
    ['finished', 'finished']
    """
    check_plan("plan", plan, SimulationError)
    one_of("on_too_long", on_too_long, ON_TOO_LONG, SimulationError)
    one_of("prefix_cache", prefix_cache, PREFIX_CACHES, SimulationError)
    one_of("routing", routing, POOLED_ROUTINGS, SimulationError)
    if prefix_cache == "given" and routing == "prefix_aware":
        raise SimulationError('prefix_aware asks pools of blocks what they hold: give prefix_cache="lru" too')
    requests = trace if isinstance(trace, Trace) else load_trace(trace)
    settings = EngineSettings.of_plan(
        plan,
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
    )
    if on_too_long == "error":
        _refuse_too_long(requests, settings)
    run = partial(_RUNS[prefix_cache], plan, requests, settings, replicas, routing, seed=seed)
    outcomes = run(time_scale=time_scale)
    return Simulation(
        plan,
        requests,
        settings,
        outcomes,
        replicas=replicas,
        rerun=lambda scale: run(time_scale=scale * time_scale),
    )


def _refuse_too_long(trace: Trace, settings: EngineSettings) -> None:
    """Raise for the first request that can never run."""
    beyond = too_long(trace, settings)
    if not beyond.any():
        return
    i = int(beyond.argmax())
    prompt, output = int(trace.input_tokens[i]), int(trace.output_tokens[i])
    blocks = -(-(prompt + output) // settings.block_size)
    what = f"request {int(trace.order[i])} of {trace.name} ({prompt:,} + {output:,} tokens)"
    others = int(beyond.sum()) - 1
    more = f", nor can {others:,} others" if others else ""
    if blocks > settings.num_gpu_blocks:
        why = f"needs {blocks:,} blocks of {settings.block_size}, there are {settings.num_gpu_blocks:,}"
        help_ = "give more num_gpu_blocks or GPUs"
    else:
        why = f"has no room in a step of {settings.max_num_batched_tokens:,} tokens, and prompts are not cut"
        help_ = "give more max_num_batched_tokens, or chunked_prefill=True"
    raise SimulationError(f'{what} can never run{more}: it {why}; {help_}, or on_too_long="reject"')
