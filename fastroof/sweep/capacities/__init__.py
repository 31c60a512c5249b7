"""Sweeps over capacities: how many requests a second each deployment serves within percentiles."""

from fastroof.sweep.capacities.kind import CapacitySweep
from fastroof.sweep.capacities.spec import CapacitySpec
from fastroof.sweep.capacities.summary import CapacitySummary

__all__ = ["CapacitySpec", "CapacitySummary", "CapacitySweep"]
