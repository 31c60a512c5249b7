"""Plans by name or number, and their answers within a server's limits."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from fastroof._version import __version__
from fastroof.arrays import Floats, Ints
from fastroof.backends.plan_facts import plan_facts
from fastroof.backends.serve.forms import PROTOCOL
from fastroof.backends.serve.limits import ServeLimits
from fastroof.backends.serve.questions import (
    check_detailed,
    explanation_answer,
    memory_answer,
    pipeline_answer,
    simulation_answer,
    transfer_answer,
)
from fastroof.checks import shown
from fastroof.errors import BackendError, BatchError, FastroofError
from fastroof.plan.pipeline import in_each_stage
from fastroof.run import StepBatch
from fastroof.run.batch import int_array
from fastroof.stopping import check_stopped

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

_DECODE: Final = ("batch_size", "kv_len")
_CHUNK: Final = ("new_tokens", "context_len", "batch_size")
_VERIFY: Final = ("batch_size", "kv_len", "tokens")


class TimesAndErrors(NamedTuple):
    """Times of steps in microseconds, and one standard error over each."""

    latency_us: Floats
    relative_error: Floats


class AskedSteps(Protocol):
    """Steps in one of the forms in which they are asked for."""

    @property
    def num_steps(self) -> int:
        """Number of steps."""

    @property
    def num_requests(self) -> int:
        """Number of requests that are listed one by one to answer them; 0 if none are."""

    def times_us(self, plan: StepPlan) -> Floats:
        """Return microseconds a step."""

    def relative_errors(self, plan: StepPlan) -> Floats:
        """Return one standard error over the time of each."""


class DecodeSteps(NamedTuple):
    """Steps of equal decodes, as ``plan.decode_us`` takes them; one-dimensional at most."""

    batch_size: Ints
    kv_len: Ints

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return max(self.batch_size.size, self.kv_len.size)

    @property
    def num_requests(self) -> int:
        """No request is listed."""
        return 0

    def times_us(self, plan: StepPlan) -> Floats:
        """Return microseconds a step."""
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
        """Number of steps."""
        return max(self.new_tokens.size, self.context_len.size, self.batch_size.size)

    @property
    def num_requests(self) -> int:
        """Chunks of all steps: their errors are those of a batch that lists them."""
        # nothing has checked batch_size yet, so the sum is of floats, which hold any
        sizes = np.broadcast_to(self.batch_size, (self.num_steps,)) if self.batch_size.size else np.zeros(0)
        return int(np.maximum(sizes.astype(np.float64), 0.0).sum())

    def times_us(self, plan: StepPlan) -> Floats:
        """Return microseconds a step."""
        return np.atleast_1d(plan.prefill_us(self.new_tokens, self.context_len, self.batch_size))

    def relative_errors(self, plan: StepPlan) -> Floats:
        """Return ``plan.step_error`` of the same chunks, listed."""
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
        """Number of steps."""
        return max(self.batch_size.size, self.kv_len.size, self.tokens.size)

    @property
    def num_requests(self) -> int:
        """No request is listed."""
        return 0

    def times_us(self, plan: StepPlan) -> Floats:
        """Return microseconds a step."""
        return np.atleast_1d(plan.verify_us(self.batch_size, self.kv_len, self.tokens))

    def relative_errors(self, plan: StepPlan) -> Floats:
        """Refuse: no table has rows of several queries after a context, so no error was measured."""
        raise BackendError("standard errors of steps that verify drafts are not known: ask for their times")


class AnySteps(NamedTuple):
    """Steps of any requests."""

    batch: StepBatch

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return self.batch.num_steps

    @property
    def num_requests(self) -> int:
        """Requests of all steps."""
        return len(self.batch.new_tokens)

    def times_us(self, plan: StepPlan) -> Floats:
        """Return microseconds a step."""
        return plan.step_us(self.batch)

    def relative_errors(self, plan: StepPlan) -> Floats:
        """Return ``plan.step_error``."""
        return plan.step_error(self.batch)


def stage_times_us(plan: StepPlan, steps: AskedSteps) -> Floats:
    """Time every step in every pipeline stage: shape (steps, pp)."""
    return in_each_stage(plan, steps.times_us)


class Detail(NamedTuple):
    """Times of steps and what else was asked for: errors (steps,), stages (steps, pp)."""

    latency_us: Floats
    relative_error: Floats | None
    stage_us: Floats | None


class ServedPlans:
    """What a server answers from.

    Parameters
    ----------
    plans : mapping of str to StepPlan
        By name; a plan's number is its place in it, from 0.
    limits : ServeLimits
        What is refused.

    Raises
    ------
    BackendError
        If there are no plans, or more than the limits allow.

    Examples
    --------
    >>> import fastroof
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> served = ServedPlans({"small": plan})
    >>> bool(served.decode_us("small", [64], [4096])[0] == plan.decode_us(64, 4096))
    True
    """

    def __init__(self, plans: Mapping[str, StepPlan], limits: ServeLimits | None = None) -> None:
        self.limits = limits or ServeLimits()
        if not plans:
            raise BackendError("there is no plan to serve: name at least one")
        if len(plans) > self.limits.max_plans:
            raise BackendError(
                f"{len(plans)} plans are more than the {self.limits.max_plans} that a server may hold: "
                "a larger max_plans, or another server"
            )
        self.names = frozenset(plans)
        self._by_name = dict(plans)
        self._in_order = tuple(plans.values())

    def __len__(self) -> int:
        return len(self._in_order)

    def plan(self, which: str | int) -> StepPlan:
        """Return a plan by its name or number."""
        if isinstance(which, str):
            served = self._by_name.get(which)
        else:
            served = self._in_order[which] if 0 <= which < len(self._in_order) else None
        if served is None:
            raise BackendError(f"no plan {shown(which, 80)} is served; {self.names_words()}")
        return served

    def only_plan(self) -> int:
        """Return the number of the plan if no plan is named."""
        if len(self._in_order) > 1:
            raise BackendError(f'which of {len(self)} plans? "plan" is missing; {self.names_words()}')
        return 0

    def names_words(self) -> str:
        """List the plans in words."""
        return "there are: " + ", ".join(f"{i} {name}" for i, name in enumerate(self._by_name))

    def decode_us(self, which: str | int, batch_size: Any, kv_len: Any) -> Floats:
        """Time decode steps, as ``plan.decode_us`` does, of one dimension."""
        plan = self.plan(which)
        return np.atleast_1d(plan.decode_us(*self._sizes(_DECODE, batch_size, kv_len)))

    def step_us(self, which: str | int, new_tokens: Ints, context_len: Ints, offsets: Ints) -> Floats:
        """Time ragged steps given as the arrays of a :class:`StepBatch`."""
        plan = self.plan(which)
        self.check_steps(len(offsets) - 1)
        self.check_requests(len(new_tokens))
        return plan.step_us(StepBatch(new_tokens, context_len, offsets))

    def requests_us(self, which: str | int, requests: Iterable[Iterable[tuple[int, int]]]) -> Floats:
        """Time ragged steps given as one list of (new_tokens, context_len) a step."""
        plan = self.plan(which)
        batch = StepBatch.from_requests(requests)
        self.check_steps(batch.num_steps)
        self.check_requests(len(batch.new_tokens))
        return plan.step_us(batch)

    def prefill_us(self, which: str | int, new_tokens: Any, context_len: Any, batch_size: Any) -> Floats:
        """Time steps of equal prompt chunks, as ``plan.prefill_us`` does."""
        return self._times(which, ChunkSteps(*self._sizes(_CHUNK, new_tokens, context_len, batch_size)))

    def verify_us(self, which: str | int, batch_size: Any, kv_len: Any, tokens: Any) -> Floats:
        """Time steps that verify drafts, as ``plan.verify_us`` does."""
        return self._times(which, VerifySteps(*self._sizes(_VERIFY, batch_size, kv_len, tokens)))

    def decode_steps(self, batch_size: Any, kv_len: Any) -> DecodeSteps:
        """Return decode steps for :meth:`detailed`."""
        return DecodeSteps(*self._sizes(_DECODE, batch_size, kv_len))

    def chunk_steps(self, new_tokens: Any, context_len: Any, batch_size: Any) -> ChunkSteps:
        """Return steps of equal prompt chunks for :meth:`detailed`."""
        return ChunkSteps(*self._sizes(_CHUNK, new_tokens, context_len, batch_size))

    def verify_steps(self, batch_size: Any, kv_len: Any, tokens: Any) -> VerifySteps:
        """Return steps that verify drafts for :meth:`detailed`."""
        return VerifySteps(*self._sizes(_VERIFY, batch_size, kv_len, tokens))

    def detailed(
        self, which: str | int, steps: AskedSteps, *, errors: bool = False, stages: bool = False
    ) -> Detail:
        """Time steps, with their standard errors or their times in each pipeline stage."""
        plan = self.plan(which)
        num_requests = steps.num_requests if errors or isinstance(steps, AnySteps) else 0
        check_detailed(steps.num_steps, len(plan.stages) if stages else 1, num_requests, self.limits)
        times_us = steps.times_us(plan)
        check_stopped()
        relative_error = steps.relative_errors(plan) if errors else None
        check_stopped()
        return Detail(times_us, relative_error, stage_times_us(plan, steps) if stages else None)

    def with_errors(self, which: str | int, steps: AskedSteps) -> TimesAndErrors:
        """Time steps with their standard errors."""
        detail = self.detailed(which, steps, errors=True)
        assert detail.relative_error is not None
        return TimesAndErrors(detail.latency_us, detail.relative_error)

    def explain(self, which: str | int, asked: Any, *, errors: bool = False) -> dict[str, Any]:
        """Break one step down by operator."""
        return explanation_answer(self.plan(which), asked, errors, self.limits)

    def memory(self, which: str | int, max_tokens: Any = None, max_seqs: Any = None) -> dict[str, Any]:
        """Return what fits one GPU."""
        return memory_answer(self.plan(which), max_tokens, max_seqs)

    def pipeline(self, which: str | int, asked: Any) -> dict[str, Any]:
        """Time micro-batches in a pipeline."""
        return pipeline_answer(self.plan(which), asked, self.limits)

    def kv_transfer(self, which: str | int, asked: Any) -> dict[str, Any]:
        """Time KV caches on a link to ``decode_plan``, by default the same plan."""
        if not isinstance(asked, dict):
            raise BackendError(f'"kv_transfer" must be an object with "prompts", got {shown(asked, 100)}')
        prefill, other = self.plan(which), asked.get("decode_plan")
        if other is not None and type(other) not in (str, int):
            raise BackendError(f'"decode_plan" must be a name or a number, got {shown(other)}')
        return transfer_answer(prefill, prefill if other is None else self.plan(other), asked, self.limits)

    def simulate(self, which: str | int, asked: Any) -> dict[str, Any]:
        """Simulate an engine, as :mod:`fastroof.backends.serve.questions` describes."""
        return simulation_answer(self.plan(which), asked, self.limits)

    def _sizes(self, names: tuple[str, ...], *values: Any) -> list[Ints]:
        """Return sizes of equal requests as arrays of one dimension at most, within the limit."""
        arrays = [int_array(name, value) for name, value in zip(names, values, strict=True)]
        for name, array in zip(names, arrays, strict=True):
            if array.ndim > 1:
                raise BatchError(f"{name} must be one list of integers, got shape {array.shape}")
            self.check_steps(array.size)
        return arrays

    def _times(self, which: str | int, steps: AskedSteps) -> Floats:
        return steps.times_us(self.plan(which))

    def check_steps(self, num_steps: int) -> None:
        """Refuse more steps than a call may ask for."""
        if num_steps > self.limits.max_steps:
            raise BackendError(
                f"{num_steps} steps are more than the {self.limits.max_steps} of a message: send several"
            )

    def check_requests(self, num_requests: int) -> None:
        """Refuse more requests than a call may ask for."""
        if num_requests > self.limits.max_requests:
            raise BackendError(
                f"{num_requests} requests are more than the {self.limits.max_requests} of a message: "
                "send several"
            )

    def describe(self) -> dict[str, Any]:
        """Return what is served: versions, the plans in order, the limits."""
        plans = [
            {"number": number, "name": name, **plan.describe(), **plan_facts(plan)}
            for number, (name, plan) in enumerate(self._by_name.items())
        ]
        limits = {
            name: getattr(self.limits, name)
            for name in (
                "max_steps",
                "max_requests",
                "max_detailed_steps",
                "max_detailed_requests",
                "max_message_bytes",
                "max_line_bytes",
                "max_simulated_requests",
                "max_answered_requests",
                "max_simulated_steps",
                "max_call_s",
            )
        }
        return {"fastroof": __version__, "protocol": PROTOCOL, "plans": plans, "limits": limits}


def as_refusal(error: Exception) -> FastroofError:
    """Return the error for the client; a fault of the server is printed and reported as one."""
    if isinstance(error, FastroofError):
        return error
    traceback.print_exception(error)
    return BackendError(f"the server failed on this message: {type(error).__name__}: {error}")
