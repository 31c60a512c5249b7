"""A plan that was given: one, or an error that says what would do."""

from __future__ import annotations

from typing import Any

from fastroof.checks import shown
from fastroof.errors import FastroofError
from fastroof.plan.step_plan import StepPlan

__all__ = ["check_plan"]


def check_plan(name: str, value: Any, error: type[FastroofError]) -> None:
    """Refuse what is no plan.

    Parameters
    ----------
    name : str
        What it is called where it was given.
    value : StepPlan
        What was given.
    error : type
        What is raised.

    Examples
    --------
    >>> from fastroof.errors import SimulationError
    >>> check_plan("plan", "llama-3.1-8b", SimulationError)
    Traceback (most recent call last):
        ...
    fastroof.errors.SimulationError: plan must be a StepPlan, as compile_plan makes them, got 'llama-3.1-8b'
    """
    if not isinstance(value, StepPlan):
        raise error(f"{name} must be a StepPlan, as compile_plan makes them, got {shown(value)}")
