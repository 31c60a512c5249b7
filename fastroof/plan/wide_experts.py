"""Whether experts run the kernels of wide expert parallelism, and what a load balancer of experts adds."""

from __future__ import annotations

from typing import Final, NamedTuple

from fastroof.errors import PlanError
from fastroof.models import Layout, ModelSpec
from fastroof.models.exchange import sends_to_experts
from fastroof.models.execution import Execution
from fastroof.models.experts import RoutedExperts
from fastroof.operators.calls import Experts
from fastroof.operators.wide_borrowing import BALANCED
from fastroof.operators.wide_experts import MOE_WIDE
from fastroof.plan.options import PlanOptions
from fastroof.tables import Tables

__all__ = ["WideExperts", "wide_experts"]

EVEN: Final = "balanced"


class WideExperts(NamedTuple):
    """What an execution has of wide expert parallelism: see there."""

    is_wide: bool
    num_slots: int
    routing: str


def wide_experts(
    model: ModelSpec, layout: Layout, options: PlanOptions, execution: Execution, tables: Tables | None
) -> WideExperts:
    """Say what kernels a plan's experts run, and over how many places."""
    layers = [kind for kind in model.kinds if isinstance(kind.mlp, RoutedExperts)]
    _check(model, layout, options, [kind.mlp for kind in layers if isinstance(kind.mlp, RoutedExperts)])
    routing = execution.routing + (BALANCED if options.eplb else "")
    slots = options.num_slots or 0
    if options.eplb or options.wide_experts is not None:
        return WideExperts(options.eplb or bool(options.wide_experts), slots, routing)
    if layout.ep <= options.runtime.layout.wide_experts_over or tables is None:
        return WideExperts(False, slots, routing)
    tried = execution._replace(wide_experts=True)
    for kind in layers:
        mlp = kind.mlp
        if not isinstance(mlp, RoutedExperts) or not sends_to_experts(layout, execution.exchange, mlp.topk):
            return WideExperts(False, slots, routing)
        calls = [
            call
            for call in mlp.calls(model.hidden, layout, kind.run_as(tried))
            if isinstance(call, Experts) and call.operator == MOE_WIDE.name
        ]
        if not calls or not all(MOE_WIDE.is_measured(call, tables) for call in calls):
            return WideExperts(False, slots, routing)
    return WideExperts(bool(layers), slots, routing)


def _check(model: ModelSpec, layout: Layout, options: PlanOptions, layers: list[RoutedExperts]) -> None:
    asked = [
        name
        for name, is_asked in (
            ("eplb", options.eplb),
            ("num_slots", options.num_slots is not None),
            ("wide_experts", bool(options.wide_experts)),
        )
        if is_asked
    ]
    if not asked:
        return
    reasons = []
    if not layers:
        reasons.append("it has no routed experts")
    if layout.ep == 1 or layout.moe_tp > 1:
        reasons.append(f"experts must be whole on one of several GPUs: ep {layout.stage_gpus}, over 1")
    if layers and not all(mlp.is_gated for mlp in layers):
        reasons.append("wide kernels were measured of gated experts alone")
    if options.eplb and options.wide_experts is False:
        reasons.append("a load balancer was measured with wide kernels alone: wide_experts=None or True")
    if options.eplb and options.routing == EVEN:
        reasons.append("balanced routing leaves a load balancer nothing to do: eplb=False")
    if options.num_slots is not None:
        if not options.eplb:
            reasons.append("copies of experts are a load balancer's: eplb=True")
        most = max((mlp.num_experts for mlp in layers), default=1)
        if options.num_slots < most or options.num_slots % layout.ep:
            reasons.append(
                f"num_slots must be at least the {most} experts and divide by ep {layout.ep}, "
                f"got {options.num_slots}"
            )
    if reasons:
        raise PlanError(
            f"{model.name} does not run with {' and '.join(asked)} in {layout}: {'; '.join(reasons)}"
        )
