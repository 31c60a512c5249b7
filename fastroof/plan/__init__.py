"""Stage 3, a model on a GPU compiled into the arena that the step loops read."""

from fastroof.plan.compile import compile_plan
from fastroof.plan.plan_set import PlanSet, compile_plans
from fastroof.plan.step_plan import StepPlan

__all__ = ["PlanSet", "StepPlan", "compile_plan", "compile_plans"]
