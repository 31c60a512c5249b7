"""Batches of steps, and running them through a plan."""

from fastroof.run.batch import StepBatch, StepComponents, StepTimes

__all__ = ["StepBatch", "StepComponents", "StepTimes"]
