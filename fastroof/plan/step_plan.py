"""A plan: one model on one GPU configuration, ready to time steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

from numpy.typing import ArrayLike

from fastroof.arrays import Floats, Int
from fastroof.checks import check_flag
from fastroof.errors import BatchError
from fastroof.lazy_property import lazy_property
from fastroof.plan import pipeline, step_error
from fastroof.plan.arena import verification_arena
from fastroof.plan.explain import Explanation, explain_verification, explain_with_images, step_us_with_images
from fastroof.plan.plan_facts import PlanFacts
from fastroof.run import evaluate

if TYPE_CHECKING:
    from fastroof.plan.step_error import StepErrors
    from fastroof.run import StepBatch, StepTimes


@dataclass(frozen=True, eq=False, repr=False)
class StepPlan(PlanFacts):
    """How long a step takes, for one model, GPU, tensor-parallel size and dtypes.

    Made by :func:`compile_plan`. It holds everything it needs: it pickles, and outlives its tables.

    What it holds is in :class:`fastroof.plan.plan_facts.PlanFacts`.
    """

    @property
    def stages(self) -> tuple[StepPlan, ...]:
        """Plans of its pipeline stages, in their order; of a plan without, itself.

        The first has the embedding, the last the final norm, the LM head and what the engine adds to a
        sequence; all others send what they made. What the engine adds to a step every stage has, for its own
        host; the plan itself has it once.
        """
        return self.stage_plans or (self,)

    @property
    def paced(self) -> StepPlan:
        """The same plan at the pace of its slowest pipeline stage; of a plan without stages, itself.

        Its steps take as many times the slowest stage as there are stages: what a batch takes in an engine
        that has one in each, where this plan's are those of one batch alone.
        """
        # one that held itself would go only when Python looks for circles
        return self._paced if self.stage_plans else self

    @lazy_property
    def _paced(self) -> StepPlan:
        return pipeline.paced_plan(self)

    @lazy_property
    def verification_arena(self) -> Floats:
        """The plan and what steps of several tokens a request need, as :meth:`verify_us` reads it."""
        return verification_arena(self)

    @lazy_property
    def scalar(self) -> Callable[[int, int], float]:
        """One decode step at a time, as a C function: ``plan.scalar(batch_size, kv_len)``, us.

        The same bits as :meth:`decode_us`, and its errors, without what an array costs; for event loops.
        """
        from fastroof.compiled.scalar import plan_function

        def otherwise(batch_size: Any, kv_len: Any) -> Any:
            return evaluate.decode_us(self, batch_size, kv_len, None, 1)

        return plan_function("scalar", self.arena, otherwise)

    @lazy_property
    def step_scalar(self) -> Callable[[Any, Any], float]:
        """One step of any requests at a time: ``plan.step_scalar(new_tokens, context_len)``, us.

        Two lists of integers, or two contiguous int32 or int64 buffers (arrays of NumPy, ``array.array``),
        a request each, in 0.2 us for 32 requests; other sequences will do, at what a call of
        :meth:`step_us` costs. The same bits as that, and its errors.
        """
        from fastroof.compiled.scalar import plan_function

        def otherwise(new_tokens: Any, context_len: Any) -> float:
            return evaluate.one_step_us(self, new_tokens, context_len)

        return plan_function("step_scalar", self.arena, otherwise)

    @lazy_property
    def errors(self) -> StepErrors | None:
        """Errors of its operators, worked out when first asked for; None for the datasheet model."""
        return step_error.step_errors(self)

    @overload
    def decode_us(self, batch_size: Int, kv_len: Int, *, out: None = ..., threads: int = ...) -> float: ...

    @overload
    def decode_us(
        self, batch_size: ArrayLike, kv_len: ArrayLike, *, out: Floats | None = ..., threads: int = ...
    ) -> Floats: ...

    def decode_us(
        self, batch_size: ArrayLike, kv_len: ArrayLike, *, out: Floats | None = None, threads: int = 1
    ) -> float | Floats:
        """Time decode steps of ``batch_size`` requests that each attend to ``kv_len`` tokens.

        Parameters
        ----------
        batch_size, kv_len : int or array_like of int
            Broadcast; kv_len counts the new token.
        out : ndarray of float64, optional
            Where to put the answer; of the broadcast shape, C-contiguous, and apart from the inputs.
        threads : int
            Threads to share the steps over; any number gives the same bits.

        Returns
        -------
        float or ndarray of float64
            Microseconds a step, of the broadcast shape.

        Raises
        ------
        PlanRangeError
            If a step is larger than the plan.
        BatchError
            If a size is not an integer of at least 1.

        Examples
        --------
        >>> import fastroof
        >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"))
        >>> bool(plan.decode_us(64, 4096) > plan.decode_us(1, 4096))
        True
        """
        if type(batch_size) is type(kv_len) is type(threads) is int and out is None and threads > 0:
            return self.scalar(batch_size, kv_len)
        return evaluate.decode_us(self, batch_size, kv_len, out, threads)

    @overload
    def prefill_us(
        self,
        new_tokens: Int,
        context_len: Int = ...,
        batch_size: Int = ...,
        *,
        out: None = ...,
        threads: int = ...,
    ) -> float: ...

    @overload
    def prefill_us(
        self,
        new_tokens: ArrayLike,
        context_len: ArrayLike = ...,
        batch_size: ArrayLike = ...,
        *,
        out: Floats | None = ...,
        threads: int = ...,
    ) -> Floats: ...

    def prefill_us(
        self,
        new_tokens: ArrayLike,
        context_len: ArrayLike = 0,
        batch_size: ArrayLike = 1,
        *,
        out: Floats | None = None,
        threads: int = 1,
    ) -> float | Floats:
        """Time steps of ``batch_size`` equal chunks of ``new_tokens`` after ``context_len`` tokens.

        Parameters
        ----------
        new_tokens, context_len, batch_size : int or array_like of int
            Broadcast; new_tokens is a sequence's. One new token after a context is a decode.
        out, threads
            As in :meth:`decode_us`.

        Returns
        -------
        float or ndarray of float64
            Microseconds a step, of the broadcast shape.

        Raises
        ------
        PlanRangeError, BatchError
            As in :meth:`decode_us`.
        """
        return evaluate.prefill_us(self, new_tokens, context_len, batch_size, out, threads)

    @overload
    def verify_us(
        self, batch_size: Int, kv_len: Int, tokens: Int, *, out: None = ..., threads: int = ...
    ) -> float: ...

    @overload
    def verify_us(
        self,
        batch_size: ArrayLike,
        kv_len: ArrayLike,
        tokens: ArrayLike,
        *,
        out: Floats | None = ...,
        threads: int = ...,
    ) -> Floats: ...

    def verify_us(
        self,
        batch_size: ArrayLike,
        kv_len: ArrayLike,
        tokens: ArrayLike,
        *,
        out: Floats | None = None,
        threads: int = 1,
    ) -> float | Floats:
        """Time steps that verify draft tokens: ``batch_size`` requests with ``tokens`` new ones each.

        Parameters
        ----------
        batch_size, kv_len, tokens : int or array_like of int
            Broadcast; tokens is a request's, 1 and its draft tokens. kv_len counts all of them: the last
            query attends to kv_len tokens.
        out, threads
            As in :meth:`decode_us`.

        Returns
        -------
        float or ndarray of float64
            Microseconds a step, of the broadcast shape; at one token :meth:`decode_us` to the last bit.

        Raises
        ------
        PlanRangeError
            If a step is larger than the plan: its tokens count one by one.
        BatchError
            If a size is not an integer of at least 1, or kv_len is less than tokens.

        Notes
        -----
        Operators over tokens and the LM head have ``batch_size * tokens`` rows. Decode attention is that of
        one query, times B(tokens) / B(1) of its roofline: FLOPs of all queries, the KV cache read once. No
        public table has rows of several queries after a context, so that part is modelled.

        Examples
        --------
        >>> import fastroof
        >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"))
        >>> bool(plan.verify_us(1, 4096, 4) < 1.2 * plan.decode_us(1, 4096))
        True
        """
        return evaluate.verify_us(self, batch_size, kv_len, tokens, out, threads)

    def run(self, batch: StepBatch, *, threads: int = 1, with_error: bool = False) -> StepTimes:
        """Time ragged steps, with the origin and the parts of each.

        Returns
        -------
        StepTimes
            latency_us, origin and components, one entry a step; relative_error where it was asked for.
        """
        check_flag("with_error", with_error, BatchError)
        times = evaluate.run_batch(self, batch, threads)
        if not with_error:
            return times
        return replace(times, relative_error=step_error.batch_error(self, batch, times))

    def step_error(self, batch: StepBatch) -> Floats:
        """Relative standard error of ragged steps: ``run(batch, with_error=True).relative_error``.

        Returns
        -------
        ndarray of float64, shape (steps,)
            One standard error over the time of the step: an 80 % interval is 1.28 of them on either side.

        Raises
        ------
        PlanError
            If the plan was unpickled, or its method is another than roofline.
        """
        return step_error.batch_error(self, batch, evaluate.run_batch(self, batch, 1))

    @overload
    def decode_error(self, batch_size: Int, kv_len: Int) -> float: ...

    @overload
    def decode_error(self, batch_size: ArrayLike, kv_len: ArrayLike) -> Floats: ...

    def decode_error(self, batch_size: ArrayLike, kv_len: ArrayLike) -> float | Floats:
        """Relative standard error of :meth:`decode_us`.

        Parameters
        ----------
        batch_size, kv_len : int or array_like of int
            As in :meth:`decode_us`.

        Returns
        -------
        float or ndarray of float64
            As of :meth:`step_error`, of the broadcast shape.

        Raises
        ------
        PlanError, PlanRangeError, BatchError
            As in :meth:`step_error` and :meth:`decode_us`.

        Examples
        --------
        >>> import fastroof
        >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"))
        >>> 0.01 < plan.decode_error(64, 4096) < 0.1
        True
        """
        return step_error.decode_error(self, batch_size, kv_len)

    def step_us(
        self,
        batch: StepBatch,
        *,
        threads: int = 1,
        images: Iterable[Iterable[tuple[int, int]]] | None = None,
    ) -> Floats:
        """Time ragged steps: ``run(batch).latency_us``, without the rest.

        Parameters
        ----------
        batch : StepBatch
            The steps.
        threads : int
            As in :meth:`decode_us`.
        images : iterable of iterables of (width, height), optional
            What each step encodes, see :meth:`encode`; its tokens are in the batch, among a prompt's.

        Returns
        -------
        ndarray of float64, shape (steps,)
            Microseconds a step.
        """
        step_us = evaluate.step_us(self, batch, threads)
        return step_us if images is None else step_us_with_images(self, batch, step_us, images)

    def pipeline_us(self, batch: StepBatch) -> float:
        """Time micro-batches that follow each other through the pipeline stages, with their bubbles.

        Parameters
        ----------
        batch : StepBatch
            A step a micro-batch, in their order.

        Returns
        -------
        float
            From the first one's start to the last one's end, us: ``(n + pp - 1)`` times a stage for n equal
            ones in equal stages, see :mod:`fastroof.plan.pipeline`. Without stages the sum of the steps.

        Examples
        --------
        >>> import fastroof
        >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"), pp=4)
        >>> one, four = (fastroof.StepBatch.from_requests([[(1, 999)] * 16] * n) for n in (1, 4))
        >>> 1.5 < plan.pipeline_us(four) / plan.pipeline_us(one) < 2.1
        True
        """
        return pipeline.pipeline_us(self, batch)

    def cycle_us(self, batch: StepBatch) -> float:
        """Time of one round of micro-batches that keep going round the pipeline stages, as decodes do.

        Parameters
        ----------
        batch : StepBatch
            A step a micro-batch; with as many as stages none waits, where stages are equal.

        Returns
        -------
        float
            us in which each makes its step once: what the busiest stage needs for all of them, or the longest
            for all stages. Equal ones take no longer; of unequal ones some may wait for each other beside.
        """
        return pipeline.cycle_us(self, batch)

    def stage_times_us(self, batch: StepBatch) -> Floats:
        """Time every step in every pipeline stage.

        Returns
        -------
        ndarray of float64, shape (steps, pp)
            us; the slowest stage is ``.max(axis=1)``.
        """
        return pipeline.stage_times_us(self, batch)

    def explain(
        self,
        requests: Iterable[tuple[int, int]],
        *,
        with_error: bool = False,
        images: Iterable[tuple[int, int]] = (),
    ) -> Explanation:
        """Break one step down by operator: latency, FLOPs, bytes, MFU, what bounds it, origin.

        Parameters
        ----------
        requests : iterable of (new_tokens, context_len)
            The step's requests.
        with_error : bool
            Also say how good the step's time is: ``run(..., with_error=True).relative_error``.
        images : iterable of (width, height)
            What the step encodes, see :meth:`encode`; its tokens are among a prompt's new ones.

        Returns
        -------
        Explanation
            Its ``total_us`` is the step's time to the last bit.

        Raises
        ------
        PlanError
            As in :meth:`step_error`, where the error is asked for.
        """
        return explain_with_images(self, requests, images, with_error)

    def explain_verification(self, batch_size: int, kv_len: int, tokens: int) -> Explanation:
        """Break one step of :meth:`verify_us` down by operator, as :meth:`explain` does.

        Returns
        -------
        Explanation
            Its ``total_us`` is the step's time to the last bit; attention of several queries is modelled.

        Raises
        ------
        PlanRangeError, BatchError
            As in :meth:`verify_us`.
        """
        return explain_verification(self, batch_size, kv_len, tokens)
