"""What tests of sweeps share: units that are small."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastroof.sweep.capacities import kind as capacity_units
from fastroof.sweep.deployments import kind as deployment_units
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
