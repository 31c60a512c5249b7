"""How many requests a second the view's layout serves within its limits, found by simulations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastroof.errors import SimulationError
from fastroof.simulation import Workload
from fastroof.simulation.capacity import capacity
from fastroof.simulation.replicas import ranks_of
from fastroof.simulation.settings import EngineSettings
from fastroof.simulation.work import simulated_steps
from fastroof.ui.commands import CAPACITY_REQUESTS, capacity_command, capacity_limits, lengths_written

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.ui.plans import PlanStore
    from fastroof.ui.view import View

__all__ = ["capacity_answer"]

MOST_STEPS: Final = 2**24
"""Of a simulation, as :func:`fastroof.simulation.work.simulated_steps` counts them."""


def capacity_answer(store: PlanStore, view: View) -> dict[str, Any]:
    """Answer how many requests a second are served."""
    limits = capacity_limits(view)
    if not limits:
        raise SimulationError("a capacity keeps limits, and there is none: give one on TTFT or TPOT")
    prompts, outputs = lengths_written(view)
    workload = Workload(requests=CAPACITY_REQUESTS, input_tokens=prompts, output_tokens=outputs)
    plan = store.plan(view, view.capacity_sizes).plan
    _check_work(plan, workload, view)
    # sizes that are None are the engine's own
    options: dict[str, Any] = {"max_num_batched_tokens": view.max_batched_tokens}
    options |= {"max_num_seqs": None, "block_size": None, **limits}
    found = capacity(plan, workload, **options)
    return {**found.document(), "limits": limits, "command": capacity_command(store, view)}


def _check_work(plan: StepPlan, workload: Workload, view: View) -> None:
    drawn = workload.trace(rate=1.0)
    settings = EngineSettings.of_plan(plan, max_num_batched_tokens=view.max_batched_tokens)
    steps = simulated_steps(drawn, settings, ranks=ranks_of(plan))
    if steps > MOST_STEPS:
        raise SimulationError(
            f"{len(drawn):,} requests may take {steps:,} steps, more than the {MOST_STEPS:,} of a simulation "
            "for the page: shorter outputs would do, or the command line"
        )
