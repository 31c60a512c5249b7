"""Sweeps over decode steps: which batch of a plan gives the most tokens a second, within limits."""

from fastroof.sweep.steps.kind import StepSweep
from fastroof.sweep.steps.spec import COLUMNS, BestStep, StepSpec, StepSummary

__all__ = ["COLUMNS", "BestStep", "StepSpec", "StepSummary", "StepSweep"]
