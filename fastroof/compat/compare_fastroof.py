"""fastroof's own columns of a comparison: measured tables, and the datasheet."""

from __future__ import annotations

from typing import Any, Final

from fastroof.compat.compare_steps import COMPONENTS, Case, MethodTime, Step
from fastroof.plan import StepPlan
from fastroof.plan.components import component_of
from fastroof.plan.curves import DATASHEET_SOURCE, row_cost
from fastroof.plan.datasheet import CLASSES
from fastroof.plan.explain import Explanation
from fastroof.run import StepBatch
from fastroof.tables import Tables
from fastroof.units import US_PER_S

__all__ = [
    "datasheet_facts",
    "linear_us",
    "modelled_components",
    "plan_time",
    "requests_of",
    "roles_us",
]

DATASHEET_CLASS: Final = {
    "linear": "gemm",
    "experts": "moe",
    "lm_head": "gemm",
    "elementwise": "elementwise",
    "communication": "allreduce",
}


def requests_of(step: Step) -> list[tuple[int, int]]:
    """Requests of a step as (new_tokens, context_len)."""
    if step.phase == "decode":
        return [(1, step.tokens - 1)] * step.batch_size
    return [(step.tokens, 0)] * step.batch_size


def plan_time(method: str, plan: StepPlan, step: Step) -> MethodTime:
    """Time of a step by component, as a plan has it."""
    requests = requests_of(step)
    components = dict.fromkeys(COMPONENTS, 0.0)
    for name, us in _by_component(plan, plan.explain(requests)).items():
        components[name] = us["us"]
    total_us = float(plan.run(StepBatch.from_requests([requests])).latency_us[0])
    return MethodTime(method, components, total_us)


def _by_component(plan: StepPlan, explanation: Explanation) -> dict[str, dict[str, float]]:
    """Time of each component and what its roofline, without launches, would be."""
    of_role = {curve.operator.role: component_of(curve.operator) for curve in plan.row_curves}
    dtypes = {curve.operator.role: row_cost(curve.operator).dtype for curve in plan.row_curves}
    by_component: dict[str, dict[str, float]] = {}
    for part in explanation.operators:
        component = "overhead" if part.role == "runtime" else of_role.get(part.role, "attention")
        sums = by_component.setdefault(component, {"us": 0.0, "roofline_us": 0.0, "calls": 0.0})
        link = component == "communication"
        bytes_per_s = plan.gpu.nvlink_bytes_per_s if link else plan.gpu.hbm_bytes_per_s
        sums["us"] += part.total_us
        compute_s = part.flops / plan.gpu.peak(dtypes.get(part.role, "bf16")) if part.flops else 0.0
        sums["roofline_us"] += US_PER_S * max(compute_s, part.moved_bytes / bytes_per_s)
        sums["calls"] += part.calls
    return by_component


def modelled_components(plan: StepPlan, step: Step) -> list[str]:
    """Components of a step of which a part comes from the datasheet, in the order of the components."""
    of_role = {curve.operator.role: component_of(curve.operator) for curve in plan.row_curves}
    parts = plan.explain(requests_of(step)).operators
    modelled = {of_role.get(part.role, "attention") for part in parts if part.source == DATASHEET_SOURCE}
    return [component for component in COMPONENTS if component in modelled]


def roles_us(plan: StepPlan, step: Step) -> dict[str, float]:
    """Time of a step by what its calls do in it, us."""
    by_role: dict[str, float] = {}
    for part in plan.explain(requests_of(step)).operators:
        by_role[part.role] = by_role.get(part.role, 0.0) + part.total_us
    return by_role


def datasheet_facts(case: Case, step: Step) -> dict[str, Any]:
    """Facts by which the datasheet model's differences are told."""
    measured = _by_component(case.plan, case.plan.explain(requests_of(step)))
    assumed = _by_component(case.datasheet, case.datasheet.explain(requests_of(step)))
    facts: dict[str, Any] = {}
    for component, sums in measured.items():
        kind = DATASHEET_CLASS.get(component, f"attention_{step.phase}")
        facts |= {
            f"has_{component}": True,
            f"{component}_us": assumed[component]["us"] - sums["us"],
            f"{component}_efficiency": CLASSES[kind].efficiency,
            f"{component}_launch_us": CLASSES[kind].launch_us,
            f"{component}_calls": int(sums["calls"]),
            f"{component}_reached": sums["roofline_us"] / sums["us"],
        }
    return facts


def linear_us(tables: Tables, m: int, gemms: list[tuple[int, int, int]]) -> float:
    """Sum of GEMMs (count, k, n) as fastroof's tables time them, us."""
    counts, k, n = zip(*gemms, strict=True)
    each_us = tables.lookup("gemm", m=m, k=list(k), n=list(n)).latency_us
    return float(sum(count * us for count, us in zip(counts, each_us.tolist(), strict=True)))
