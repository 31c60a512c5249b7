"""What simulates one trace after the other on a deployment, and what such a trace must be."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fastroof.checks import shown
from fastroof.errors import SimulationError
from fastroof.simulation.engine import too_long
from fastroof.simulation.replicas import run_replicas
from fastroof.simulation.trace import Trace
from fastroof.simulation.workload import Workload

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.simulation.capacity_search import Run
    from fastroof.simulation.outcomes import Outcomes
    from fastroof.simulation.settings import EngineSettings

__all__ = ["check_room", "deployment_runner", "drawn_traces"]


def drawn_traces(given: Trace | Workload, draws: int, rate: float | None = None) -> list[Trace]:
    """Return requests, drawn so many times: by the seed of a workload and those after it."""
    if isinstance(given, Trace):
        if draws > 1:
            raise SimulationError(
                f"draws goes with a workload, whose requests can be drawn again; trace {shown(given.name)} "
                f"has one, got {draws}"
            )
        return [given]
    if not isinstance(given, Workload):
        raise SimulationError(f"requests are a Trace or a Workload, got {type(given).__name__}")
    has_rate = given.is_closed or given.requests_per_s is not None
    return [given.trace(None if has_rate else rate, given.seed + draw) for draw in range(draws)]


def check_room(trace: Trace, settings: EngineSettings) -> None:
    """Refuse a trace with a request that can never run, at any rate."""
    beyond = too_long(trace, settings)
    if not beyond.any():
        return
    i = int(beyond.argmax())
    others = int(beyond.sum()) - 1
    raise SimulationError(
        f"request {int(trace.order[i])} of {shown(trace.name)} ({int(trace.input_tokens[i]):,} + "
        f"{int(trace.output_tokens[i]):,} tokens){f' and {others:,} others' * bool(others)} can never run: "
        f"there are {settings.num_gpu_blocks:,} blocks of {settings.block_size} tokens, and steps of up to "
        f"{settings.max_num_batched_tokens:,}; give more of them or more GPUs, or leave such requests out"
    )


def deployment_runner(
    plan: StepPlan, settings: EngineSettings, replicas: int, routing: str, threads: int
) -> Run:
    """Return what simulates a trace on a deployment, its clients giving up so many times as early."""

    def run(trace: Trace, hurry: float) -> Outcomes:
        hurried = settings if hurry == 1.0 else replace(settings, timeout_s=settings.timeout_s / hurry)
        return run_replicas(plan, trace, hurried, replicas, routing, threads=threads)

    return run
