"""Sweeps over decode steps: find the batch of each plan with the most tokens/s within limits."""

from fastroof.sweep.steps.kind import StepSweep
from fastroof.sweep.steps.spec import COLUMNS, BestStep, StepSpec, StepSummary

__all__ = ["COLUMNS", "BestStep", "StepSpec", "StepSummary", "StepSweep"]
