"""Compile a model on a GPU into a plan: one arena that the step loops read.

Modules are imported on first use: reading a cached plan needs none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastroof.plan.compile import compile_plan
    from fastroof.plan.plan_set import PlanSet, compile_plans
    from fastroof.plan.step_plan import StepPlan

__all__ = ["PlanSet", "StepPlan", "compile_plan", "compile_plans"]

_MODULES = {
    "PlanSet": "plan_set",
    "StepPlan": "step_plan",
    "compile_plan": "compile",
    "compile_plans": "plan_set",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
