"""The page's simulation of traffic, equal to ``fastroof simulate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastroof.checks import beyond_context
from fastroof.errors import SimulationError
from fastroof.report.html.simulation_page import run_figures, series_values
from fastroof.simulation import Workload, simulate
from fastroof.simulation.deployment import simulation_document
from fastroof.simulation.fleet_options import fleet_of_options, read_options
from fastroof.simulation.pools import ranks_of
from fastroof.simulation.settings import simulated_steps
from fastroof.ui.answers import check_steps
from fastroof.ui.commands import has_power, lengths_written, request_limits, simulation_command

if TYPE_CHECKING:
    from fastroof.simulation import Fleet, Trace
    from fastroof.ui.plans import PlanStore
    from fastroof.ui.view import View

MOST_ENGINES: Final = 64
"""Maximum number of replicas, which bounds memory."""


def simulation_answer(store: PlanStore, view: View) -> dict[str, Any]:
    """Return the latencies of the view's traffic, the engines' use, and both over time."""
    cache = "auto" if view.prefix_cache else "given"
    options = read_options(view.fleet or "", prefix_cache=cache, kv_tiers=view.kv_tiers)
    if view.rate is None and view.clients is None:
        raise SimulationError("a simulation needs traffic: set requests/s or clients")
    if view.kv_tiers and not (view.prefix_cache and view.turns > 1):
        raise SimulationError("KV tiers hold what turns share: set several turns, and the prefix cache on")
    trace = _workload(view).trace()
    fleet = fleet_of_options(
        options,
        lambda own: store.plan(view, view.simulated_sizes, own).plan,
        {"max_num_batched_tokens": view.max_num_batched_tokens},
    )
    _check_work(fleet, trace)
    limits: dict[str, Any] = request_limits(view)
    sim = simulate(fleet, trace)
    plan, answers = sim.plan, sim.summary(**limits)
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
        isl=prompts,
        osl=outputs,
        cached_tokens="auto" if view.prefix_cache else 0,
    )


def _check_work(fleet: Fleet, trace: Trace) -> None:
    """Refuse what takes too many steps or engines; an autoscaler looks at all replicas at each check."""
    pools, rule = fleet.serving(trace), fleet.autoscaler
    engines = sum(pool.most_replicas for pool in pools)
    if engines > MOST_ENGINES:
        raise SimulationError(
            f"{engines:,} replicas, the page's maximum is {MOST_ENGINES}; use the command line"
        )
    settings, ranks = pools[-1].settings, ranks_of(pools[-1].plan)
    steps = simulated_steps(trace, settings, engines, fleet.router, ranks)
    if rule is not None:
        steps += engines * int(trace.duration_s / rule.interval_s)
    check_steps(steps, len(trace))
