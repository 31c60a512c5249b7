"""Sweeps over capacities: the request rate that each deployment serves within limits on percentiles."""

from fastroof.sweep.capacities.kind import CapacitySummary, CapacitySweep
from fastroof.sweep.capacities.spec import CapacitySpec

__all__ = ["CapacitySpec", "CapacitySummary", "CapacitySweep"]
