"""The page's simulation of traffic, equal to ``fastroof simulate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastroof.checks import beyond_context
from fastroof.errors import SimulationError
from fastroof.report.html.simulation_page import run_figures, series_values
from fastroof.simulation import Workload
from fastroof.simulation.deployment import simulation_document
from fastroof.simulation.fleet import Fleet
from fastroof.simulation.pools import ranks_of
from fastroof.simulation.settings import EngineSettings, simulated_steps
from fastroof.ui.answers import check_steps
from fastroof.ui.commands import has_power, lengths_written, request_limits, simulation_command

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.simulation import Trace
    from fastroof.ui.plans import PlanStore
    from fastroof.ui.view import View

MOST_ENGINES: Final = 64
"""Maximum number of replicas, which bounds memory."""


def simulation_answer(store: PlanStore, view: View) -> dict[str, Any]:
    """Return the latencies of the view's traffic, the engines' use, and both over time."""
    cache = "auto" if view.prefix_cache else "given"
    fleet = Fleet.read(view.fleet or "", prefix_cache=cache, kv_tiers=view.kv_tiers)
    if view.rate is None and view.clients is None:
        raise SimulationError("a simulation needs traffic: set requests/s or clients")
    if view.kv_tiers and not (view.prefix_cache and view.turns > 1):
        raise SimulationError("KV tiers hold what turns share: set several turns, and the prefix cache on")
    trace = _workload(view).trace()
    plan = prefill = store.plan(view, view.simulated_sizes).plan
    if tp := fleet.options["prefill_tp"]:
        prefill = store.plan(view, view.simulated_sizes, {"tp": tp}).plan
    _check_work(plan, trace, view, fleet)
    limits: dict[str, Any] = request_limits(view)
    sim = fleet.simulate(plan, prefill, trace, {"max_num_batched_tokens": view.max_num_batched_tokens})
    answers = sim.summary(**limits)
    longest = (trace.input_tokens + trace.output_tokens).max()
    too_long = beyond_context(plan.model.name, plan.model.max_position, longest)
    with_energy = has_power(store, view) and plan.layout.pp == 1
    if with_energy:
        answers["energy"] = sim.energy()
    return {
        **simulation_document(sim, answers),
        "figures": list(run_figures(answers).items()),
        "series": series_values(sim),
        "notes": [*answers["warnings"], *([too_long] if too_long else [])],
        "command": simulation_command(store, view, with_energy=with_energy),
    }


def _workload(view: View) -> Workload:
    prompts, outputs = lengths_written(view)
    return Workload(
        rate=view.rate,
        clients=view.clients,
        think_s=view.think_s,
        requests=view.num_requests,
        turns=view.turns,
        growth_tokens=view.growth,
        input_tokens=prompts,
        output_tokens=outputs,
        cached_tokens="auto" if view.prefix_cache else 0,
    )


def _check_work(plan: StepPlan, trace: Trace, view: View, fleet: Fleet) -> None:
    """Refuse what takes too many steps or engines; an autoscaler looks at all replicas at each check."""
    given, rule = fleet.options, fleet.autoscale
    pools = [given[name] for name in ("prefill_replicas", "decode_replicas") if given[name]]
    engines = sum(most if rule is None else rule.max_replicas for most in pools or [given["replicas"]])
    if engines > MOST_ENGINES:
        raise SimulationError(
            f"{engines:,} replicas, the page's maximum is {MOST_ENGINES}; use the command line"
        )
    settings = EngineSettings.of_plan(plan, max_num_batched_tokens=view.max_num_batched_tokens)
    steps = simulated_steps(trace, settings, engines, given["router"], ranks_of(plan))
    if rule is not None:
        steps += engines * int(trace.duration_s / rule.interval_s)
    check_steps(steps, len(trace))
