"""Sweeps over capacities: how many requests a second each deployment serves within percentiles."""

from fastroof.sweep.capacities.kind import CapacitySummary, CapacitySweep
from fastroof.sweep.capacities.spec import CapacitySpec

__all__ = ["CapacitySpec", "CapacitySummary", "CapacitySweep"]
