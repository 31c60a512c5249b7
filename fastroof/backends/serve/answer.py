"""Plans by name or number, and their answers within a server's limits."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof._version import __version__
from fastroof.arrays import Floats, Ints
from fastroof.backends.plan_facts import plan_facts
from fastroof.backends.serve.limits import ServeLimits
from fastroof.backends.serve.message_forms import PROTOCOL
from fastroof.backends.serve.plan_questions import (
    check_detailed,
    explanation_answer,
    memory_answer,
    pipeline_answer,
    transfer_answer,
)
from fastroof.backends.serve.steps_asked import (
    AnySteps,
    AskedSteps,
    ChunkSteps,
    DecodeSteps,
    TimesAndErrors,
    VerifySteps,
    stage_times_us,
)
from fastroof.checks import shown
from fastroof.errors import BackendError, BatchError, FastroofError
from fastroof.run import StepBatch
from fastroof.run.batch import int_array
from fastroof.stopping import check_stopped

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = ["Detail", "ServedPlans", "as_refusal"]

_DECODE: Final = ("batch_size", "kv_len")
_CHUNK: Final = ("new_tokens", "context_len", "batch_size")
_VERIFY: Final = ("batch_size", "kv_len", "tokens")


class Detail(NamedTuple):
    """Times of steps, us, and what was asked for beside them.

    Attributes
    ----------
    latency_us : ndarray of float64, shape (steps,)
        Microseconds a step.
    relative_error : ndarray of float64, shape (steps,), or None
        One standard error over the time of a step.
    stage_us : ndarray of float64, shape (steps, pp), or None
        Microseconds a step in each pipeline stage.
    """

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
        self._by_name = dict(plans)
        self._in_order = tuple(plans.values())

    def __len__(self) -> int:
        return len(self._in_order)

    def plan(self, which: str | int) -> StepPlan:
        """Return a plan by its name or number.

        Raises
        ------
        BackendError
            If it is not served.
        """
        if isinstance(which, str):
            served = self._by_name.get(which)
        else:
            served = self._in_order[which] if 0 <= which < len(self._in_order) else None
        if served is None:
            raise BackendError(f"no plan {shown(which, 80)} is served; {self.names_words()}")
        return served

    def names_words(self) -> str:
        """Say which plans there are."""
        return "there are: " + ", ".join(f"{i} {name}" for i, name in enumerate(self._by_name))

    def decode_us(self, which: str | int, batch_size: Any, kv_len: Any) -> Floats:
        """Time steps of equal decodes.

        Parameters
        ----------
        which : str or int
            The plan.
        batch_size, kv_len : int or array_like of int, shape (steps,)
            As in ``plan.decode_us``.

        Returns
        -------
        ndarray of float64, shape (steps,)
            Microseconds a step.

        Raises
        ------
        BackendError, BatchError, PlanRangeError
            If the plan is not served, a limit is exceeded, or a size is none.
        """
        plan = self.plan(which)
        return np.atleast_1d(plan.decode_us(*self._sizes(_DECODE, batch_size, kv_len)))

    def step_us(self, which: str | int, new_tokens: Ints, context_len: Ints, offsets: Ints) -> Floats:
        """Time ragged steps given as the arrays of a :class:`StepBatch`.

        Returns
        -------
        ndarray of float64, shape (steps,)
            Microseconds a step.

        Raises
        ------
        BackendError, BatchError, PlanRangeError
            As in :meth:`decode_us`.
        """
        plan = self.plan(which)
        self.check_steps(len(offsets) - 1)
        self.check_requests(len(new_tokens))
        return plan.step_us(StepBatch(new_tokens, context_len, offsets))

    def one_step_us(self, which: str | int, new_tokens: list[int], context_len: list[int]) -> float:
        """Time one step of any requests, us, without what arrays cost; errors as in :meth:`decode_us`."""
        self.check_requests(len(new_tokens))
        return self.plan(which).step_scalar(new_tokens, context_len)

    def requests_us(self, which: str | int, requests: Iterable[Iterable[tuple[int, int]]]) -> Floats:
        """Time ragged steps given as one list of (new_tokens, context_len) a step.

        Returns
        -------
        ndarray of float64, shape (steps,)
            Microseconds a step.

        Raises
        ------
        BackendError, BatchError, PlanRangeError
            As in :meth:`decode_us`.
        """
        plan = self.plan(which)
        batch = StepBatch.from_requests(requests)
        self.check_steps(batch.num_steps)
        self.check_requests(len(batch.new_tokens))
        return plan.step_us(batch)

    def prefill_us(self, which: str | int, new_tokens: Any, context_len: Any, batch_size: Any) -> Floats:
        """Time steps of equal chunks of prompts, as ``plan.prefill_us`` does; errors as in :meth:`decode_us`.

        Returns
        -------
        ndarray of float64, shape (steps,)
            Microseconds a step.
        """
        return self._times(which, ChunkSteps(*self._sizes(_CHUNK, new_tokens, context_len, batch_size)))

    def verify_us(self, which: str | int, batch_size: Any, kv_len: Any, tokens: Any) -> Floats:
        """Time steps that verify drafts, as ``plan.verify_us`` does; errors as in :meth:`decode_us`.

        Returns
        -------
        ndarray of float64, shape (steps,)
            Microseconds a step.
        """
        return self._times(which, VerifySteps(*self._sizes(_VERIFY, batch_size, kv_len, tokens)))

    def decode_steps(self, batch_size: Any, kv_len: Any) -> DecodeSteps:
        """Check steps of equal decodes for :meth:`detailed`; the others are ``chunk_steps`` and so on."""
        return DecodeSteps(*self._sizes(_DECODE, batch_size, kv_len))

    def chunk_steps(self, new_tokens: Any, context_len: Any, batch_size: Any) -> ChunkSteps:
        """Check steps of equal chunks of prompts for :meth:`detailed`."""
        return ChunkSteps(*self._sizes(_CHUNK, new_tokens, context_len, batch_size))

    def verify_steps(self, batch_size: Any, kv_len: Any, tokens: Any) -> VerifySteps:
        """Check steps that verify drafts for :meth:`detailed`."""
        return VerifySteps(*self._sizes(_VERIFY, batch_size, kv_len, tokens))

    def detailed(
        self, which: str | int, steps: AskedSteps, *, errors: bool = False, stages: bool = False
    ) -> Detail:
        """Time steps, with their standard errors or their times in each pipeline stage.

        Parameters
        ----------
        which : str or int
            The plan.
        steps : AskedSteps
            The steps, of any form.
        errors, stages : bool
            What is asked for beside times.

        Raises
        ------
        BackendError, BatchError, PlanRangeError
            As in :meth:`decode_us`; limits are those of what is more than times.
        PlanError
            If the plan's errors are not known.

        Examples
        --------
        >>> import fastroof
        >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
        >>> served = ServedPlans({"small": plan})
        >>> detail = served.detailed(0, served.decode_steps(64, [4096]), errors=True)
        >>> bool(detail.relative_error == plan.decode_error(64, 4096)), detail.stage_us
        (True, None)
        """
        plan = self.plan(which)
        num_requests = steps.num_requests if errors or isinstance(steps, AnySteps) else 0
        check_detailed(steps.num_steps, len(plan.stages) if stages else 1, num_requests, self.limits)
        times_us = steps.times_us(plan)
        check_stopped()
        relative_error = steps.relative_errors(plan) if errors else None
        check_stopped()
        return Detail(times_us, relative_error, stage_times_us(plan, steps) if stages else None)

    def with_errors(self, which: str | int, steps: AskedSteps) -> TimesAndErrors:
        """Time steps with their standard errors; limits and errors as in :meth:`detailed`."""
        detail = self.detailed(which, steps, errors=True)
        assert detail.relative_error is not None
        return TimesAndErrors(detail.latency_us, detail.relative_error)

    def explain(self, which: str | int, asked: Any, *, errors: bool = False) -> dict[str, Any]:
        """Break one step down, see :func:`fastroof.backends.serve.plan_questions.explanation_answer`."""
        return explanation_answer(self.plan(which), asked, errors, self.limits)

    def memory(self, which: str | int, max_tokens: Any = None, max_seqs: Any = None) -> dict[str, Any]:
        """Say what fits, see :func:`fastroof.backends.serve.plan_questions.memory_answer`."""
        return memory_answer(self.plan(which), max_tokens, max_seqs)

    def pipeline(self, which: str | int, asked: Any) -> dict[str, Any]:
        """Time micro-batches, see :func:`fastroof.backends.serve.plan_questions.pipeline_answer`."""
        return pipeline_answer(self.plan(which), asked, self.limits)

    def kv_transfer(self, which: str | int, asked: Any) -> dict[str, Any]:
        """Time KV caches on a link, see :func:`fastroof.backends.serve.plan_questions.transfer_answer`.

        ``decode_plan`` is the name or number of the plan at the other end, by default the same.
        """
        if not isinstance(asked, dict):
            raise BackendError(f'"kv_transfer" must be an object with "prompts", got {shown(asked, 100)}')
        prefill, other = self.plan(which), asked.get("decode_plan")
        if other is not None and type(other) not in (str, int):
            raise BackendError(f'"decode_plan" must be a name or a number, got {shown(other)}')
        return transfer_answer(prefill, prefill if other is None else self.plan(other), asked, self.limits)

    def simulate(self, which: str | int, asked: Any) -> dict[str, Any]:
        """Simulate an engine, as :mod:`fastroof.backends.serve.simulations` says.

        Returns
        -------
        dict
            Ready for JSON.

        Raises
        ------
        FastroofError
            If the plan is not served, a limit is exceeded, or what is asked for cannot be.
        """
        from fastroof.backends.serve.simulations import simulation_answer

        return simulation_answer(self.plan(which), asked, self.limits)

    def _sizes(self, names: tuple[str, ...], *values: Any) -> list[Ints]:
        """Sizes of equal requests as arrays of one dimension at most, no more than a call may have."""
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
        """Return what is served: fastroof's version and the protocol's, the plans in order, the limits.

        Of each plan what ``plan.describe()`` says, and its layout, memory and stages as of
        :func:`fastroof.backends.plan_facts.plan_facts`.

        Examples
        --------
        >>> import fastroof
        >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
        >>> ServedPlans({"small": plan}).describe()["plans"][0]["name"]
        'small'
        """
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
    """Return the error that a client gets: for a fault of the server, which it prints, one that says so."""
    if isinstance(error, FastroofError):
        return error
    traceback.print_exception(error)
    return BackendError(f"the server failed on this message: {type(error).__name__}: {error}")
