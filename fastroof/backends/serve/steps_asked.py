"""Steps in each form in which they are asked for: their times, errors, and times by pipeline stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from fastroof.arrays import Floats, Ints
from fastroof.errors import BackendError
from fastroof.plan.pipeline import in_each_stage
from fastroof.run import StepBatch

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = [
    "AnySteps",
    "AskedSteps",
    "ChunkSteps",
    "DecodeSteps",
    "TimesAndErrors",
    "VerifySteps",
    "stage_times_us",
]


class TimesAndErrors(NamedTuple):
    """Steps as they are answered in bulk where their standard errors are asked for.

    Attributes
    ----------
    latency_us : ndarray of float64, shape (steps,)
        Microseconds a step.
    relative_error : ndarray of float64, shape (steps,)
        One standard error over the time of a step.
    """

    latency_us: Floats
    relative_error: Floats


class AskedSteps(Protocol):
    """Steps of one form."""

    @property
    def num_steps(self) -> int:
        """How many steps."""

    @property
    def num_requests(self) -> int:
        """How many requests are listed one by one to answer them, of all steps; 0 where none is."""

    def times_us(self, plan: StepPlan) -> Floats:
        """Time each, us."""

    def relative_errors(self, plan: StepPlan) -> Floats:
        """Return the relative standard error of each."""


class DecodeSteps(NamedTuple):
    """Steps of equal decodes, as ``plan.decode_us`` takes them; one-dimensional at most."""

    batch_size: Ints
    kv_len: Ints

    @property
    def num_steps(self) -> int:
        """How many steps."""
        return max(self.batch_size.size, self.kv_len.size)

    @property
    def num_requests(self) -> int:
        """None is listed."""
        return 0

    def times_us(self, plan: StepPlan) -> Floats:
        """Time each, us."""
        return np.atleast_1d(plan.decode_us(self.batch_size, self.kv_len))

    def relative_errors(self, plan: StepPlan) -> Floats:
        """Return ``plan.decode_error``."""
        return np.atleast_1d(plan.decode_error(self.batch_size, self.kv_len))


class ChunkSteps(NamedTuple):
    """Steps of equal chunks of prompts, as ``plan.prefill_us`` takes them; one-dimensional at most."""

    new_tokens: Ints
    context_len: Ints
    batch_size: Ints

    @property
    def num_steps(self) -> int:
        """How many steps."""
        return max(self.new_tokens.size, self.context_len.size, self.batch_size.size)

    @property
    def num_requests(self) -> int:
        """Chunks of all steps: their errors are those of a batch that lists them.

        No batch_size is that of a step yet, so sums are of floats, which hold any.
        """
        sizes = np.broadcast_to(self.batch_size, (self.num_steps,)) if self.batch_size.size else np.zeros(0)
        return int(np.maximum(sizes.astype(np.float64), 0.0).sum())

    def times_us(self, plan: StepPlan) -> Floats:
        """Time each, us."""
        return np.atleast_1d(plan.prefill_us(self.new_tokens, self.context_len, self.batch_size))

    def relative_errors(self, plan: StepPlan) -> Floats:
        """Return ``plan.step_error`` of the same chunks; they can be timed."""
        new, context, batch = np.broadcast_arrays(*map(np.atleast_1d, self))
        offsets = np.r_[0, np.cumsum(batch)]
        return plan.step_error(StepBatch(np.repeat(new, batch), np.repeat(context, batch), offsets))


class VerifySteps(NamedTuple):
    """Steps that verify draft tokens, as ``plan.verify_us`` takes them; one-dimensional at most."""

    batch_size: Ints
    kv_len: Ints
    tokens: Ints

    @property
    def num_steps(self) -> int:
        """How many steps."""
        return max(self.batch_size.size, self.kv_len.size, self.tokens.size)

    @property
    def num_requests(self) -> int:
        """None is listed."""
        return 0

    def times_us(self, plan: StepPlan) -> Floats:
        """Time each, us."""
        return np.atleast_1d(plan.verify_us(self.batch_size, self.kv_len, self.tokens))

    def relative_errors(self, plan: StepPlan) -> Floats:
        """Refuse it: no table has rows of several queries after a context, so no error was measured."""
        raise BackendError("standard errors of steps that verify drafts are not known: ask for their times")


class AnySteps(NamedTuple):
    """Steps of any requests."""

    batch: StepBatch

    @property
    def num_steps(self) -> int:
        """How many steps."""
        return self.batch.num_steps

    @property
    def num_requests(self) -> int:
        """Requests of all steps."""
        return len(self.batch.new_tokens)

    def times_us(self, plan: StepPlan) -> Floats:
        """Time each, us."""
        return plan.step_us(self.batch)

    def relative_errors(self, plan: StepPlan) -> Floats:
        """Return ``plan.step_error``."""
        return plan.step_error(self.batch)


def stage_times_us(plan: StepPlan, steps: AskedSteps) -> Floats:
    """Time every step in every pipeline stage.

    Parameters
    ----------
    plan : StepPlan
        With any number of stages.
    steps : AskedSteps
        The steps.

    Returns
    -------
    ndarray of float64, shape (steps, pp)
        Microseconds: to the bit what ``plan.stage_times_us`` has of the same requests, listed.

    Examples
    --------
    >>> import fastroof
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels", pp=2)
    >>> steps = DecodeSteps(np.array([2]), np.array([4096]))
    >>> listed = StepBatch.from_requests([[(1, 4095)] * 2])
    >>> bool((stage_times_us(plan, steps) == plan.stage_times_us(listed)).all())
    True
    """
    return in_each_stage(plan, steps.times_us)
