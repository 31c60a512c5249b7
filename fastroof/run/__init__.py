"""Batches of steps, and timing them with a plan's arena."""

from fastroof.run.batch import StepBatch, StepComponents, StepTimes

__all__ = ["StepBatch", "StepComponents", "StepTimes"]
