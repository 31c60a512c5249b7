"""What tests of sweeps share: units that are small, and runs that are stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastroof.sweep import load_spec, run_sweep
from fastroof.sweep.capacities import kind as capacity_units
from fastroof.sweep.deployments import kind as deployment_units
from fastroof.sweep.kinds import sweep_of
from fastroof.sweep.steps import spec as step_units


@pytest.fixture
def cut_units(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Cut sweeps of all kinds into units of at most so many evaluations and rows."""

    def cut(size: int) -> None:
        for module in (step_units, deployment_units, capacity_units):
            for name in vars(module).copy():
                if name.endswith("_A_UNIT"):
                    monkeypatch.setattr(module, name, size)

    return cut


def stopped_after(
    spec: Any, output: Path, count: int, error: type[BaseException] = KeyboardInterrupt, **options: Any
) -> int:
    """Run a sweep that is stopped after some units, and return how many were evaluated."""
    evaluated = 0
    kind = type(sweep_of(load_spec(spec)))
    evaluate = kind.evaluate

    def some(*given: Any) -> Any:
        nonlocal evaluated
        if evaluated == count:
            raise error
        evaluated += 1
        return evaluate(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "evaluate", some)
        with pytest.raises(error):
            run_sweep(spec, output, **options)
    return evaluated
