"""Batches of steps, and running them through a plan."""

from fastroof.run.batch import StepBatch, StepComponents, StepTimes
from fastroof.run.evaluate import decode_us, prefill_us, run_batch, step_us

__all__ = ["StepBatch", "StepComponents", "StepTimes", "decode_us", "prefill_us", "run_batch", "step_us"]
