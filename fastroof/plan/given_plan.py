"""A plan that was given: one, or an error that says what would do."""

from __future__ import annotations

from typing import Any

from fastroof.checks import shown
from fastroof.errors import FastroofError
from fastroof.plan.step_plan import StepPlan

__all__ = ["check_plan"]


def check_plan(name: str, value: Any, error: type[FastroofError]) -> None:
    """Refuse what is no plan."""
    if not isinstance(value, StepPlan):
        raise error(f"{name} must be a StepPlan, as compile_plan makes them, got {shown(value)}")
