"""Sweeps over decode steps: which batch of a plan gives the most tokens a second, within limits."""

from fastroof.sweep.steps.columns import COLUMNS
from fastroof.sweep.steps.kind import StepSweep
from fastroof.sweep.steps.spec import StepSpec
from fastroof.sweep.steps.summary import BestStep, StepSummary

__all__ = ["COLUMNS", "BestStep", "StepSpec", "StepSummary", "StepSweep"]
