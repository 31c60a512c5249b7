"""StepPlan: one model on one GPU configuration, ready to time steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

from numpy.typing import ArrayLike

from fastroof.arrays import Floats, Int
from fastroof.caching import lazy_property
from fastroof.checks import check_flag, whole_number
from fastroof.errors import BatchError, PlanError
from fastroof.plan import explain, pipeline, step_error
from fastroof.plan.arena import decode_lines, verification_arena
from fastroof.plan.energy import PlanWithEnergy
from fastroof.plan.explain import EncoderTime, Explanation
from fastroof.plan.step_error import StepErrors
from fastroof.run import StepBatch, StepTimes, evaluate

_MADE_ON_DEMAND = (
    "decode_lines",
    "made_from",
    "memory",
    "_bottleneck",
    "row_energy",
    "scalar",
    "step_scalar",
    "verification_arena",
)
"""Lazy properties that are not pickled."""


@dataclass(frozen=True, eq=False, repr=False)
class StepPlan(PlanWithEnergy):
    """How long a step takes, for one model, GPU, layout, engine and formats.

    Made by :func:`compile_plan`. It holds everything it needs: it pickles, and outlives its tables.
    Its fields are those of :class:`fastroof.plan.plan_data.PlanData`.
    """

    def __getstate__(self) -> dict[str, Any]:
        # a list: another thread may be adding a lazy property
        return {name: value for name, value in list(self.__dict__.items()) if name not in _MADE_ON_DEMAND}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        self.arena.flags.writeable = False

    @property
    def stages(self) -> tuple[StepPlan, ...]:
        """Plans of its pipeline stages, in order; a plan without stages is its own.

        The first has the embedding; the last the final norm, the LM head and the engine's time per sequence;
        all others send activations on. Every stage has the engine's time per step, for its own host; the plan
        itself has it once.
        """
        return self.stage_plans or (self,)

    @property
    def bottleneck(self) -> StepPlan:
        """The plan at the pace of its slowest pipeline stage; a plan without stages is its own.

        A step takes the slowest stage's time as often as there are stages: a batch's time in an engine that
        keeps every stage busy, where this plan times one batch alone.
        """
        # holding itself would be a reference cycle
        return self._bottleneck if self.stage_plans else self

    @lazy_property
    def _bottleneck(self) -> StepPlan:
        batch = min(pipeline.TYPICAL_BATCH, self.max_num_batched_tokens, self.max_num_seqs)
        slowest = max(self.stages, key=lambda stage: stage.decode_us(batch, pipeline.TYPICAL_KV_LEN))
        return pipeline.at_the_pace_of(self, slowest)

    @lazy_property
    def decode_lines(self) -> Floats | None:
        """Equal decode steps tabulated by batch size and kv_len; None where they cannot be."""
        return decode_lines(self.arena)

    @lazy_property
    def verification_arena(self) -> Floats:
        """The plan with what steps of several tokens per request need, for :meth:`verify_us`."""
        return verification_arena(self)

    @lazy_property
    def errors(self) -> StepErrors | None:
        """Errors of its operators; None for the datasheet model."""
        return step_error.step_errors(self)

    @lazy_property
    def _decode_errors(self) -> StepErrors | None:
        """Its errors for decode steps alone, in half of the time, unless it has them all."""
        return self.errors if "errors" in self.__dict__ else step_error.step_errors(self, of_decodes=True)

    @lazy_property
    def scalar(self) -> Callable[[int, int], float]:
        """One decode step at a time, as a C function: ``plan.scalar(batch_size, kv_len)``, us.

        The same bits as :meth:`decode_us`, and its errors, without the cost of arrays; for event loops. It
        pickles as its plan does.
        """
        from fastroof.compiled.scalar import plan_function

        return plan_function("scalar", self, self.arena, partial(_one_decode_us, self))

    @lazy_property
    def step_scalar(self) -> Callable[[Any, Any], float]:
        """One step of any requests at a time: ``plan.step_scalar(new_tokens, context_len)``, us.

        Two lists of integers, or two contiguous int32 or int64 buffers (NumPy arrays, ``array.array``), one
        element per request; other sequences cost as much as :meth:`step_us`. The same bits as that, and its
        errors. It pickles as its plan does.
        """
        from fastroof.compiled.scalar import plan_function

        return plan_function("step_scalar", self, self.arena, partial(evaluate.one_step_us, self))

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
            Output array of the broadcast shape, C-contiguous, not overlapping the inputs.
        threads : int
            Number of threads; any number gives the same bits.

        Returns
        -------
        float or ndarray of float64
            Microseconds per step, of the broadcast shape.

        Raises
        ------
        PlanRangeError
            If a step is larger than the plan.
        BatchError
            If a size is not an integer of at least 1.

        Examples
        --------
        >>> import fastroof
        >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
        >>> bool(plan.decode_us(64, 4096) > plan.decode_us(1, 4096))
        True
        """
        if type(batch_size) is type(kv_len) is type(threads) is int and out is None and threads > 0:
            return self.scalar(batch_size, kv_len)
        return evaluate.decode_us(self, self.decode_lines, batch_size, kv_len, out, threads)

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
            Broadcast; new_tokens is per sequence. One new token after a context is a decode.
        out, threads
            As in :meth:`decode_us`.

        Returns
        -------
        float or ndarray of float64
            Microseconds per step, of the broadcast shape.

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
            Broadcast; tokens is per request: 1 plus its draft tokens. kv_len includes them: the last query
            attends to kv_len tokens.
        out, threads
            As in :meth:`decode_us`.

        Returns
        -------
        float or ndarray of float64
            Microseconds per step, of the broadcast shape; with one token exactly :meth:`decode_us`.

        Raises
        ------
        PlanRangeError
            If a step is larger than the plan, counting every token.
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
        >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
        >>> bool(plan.verify_us(1, 4096, 4) < 1.2 * plan.decode_us(1, 4096))
        True
        """
        return evaluate.verify_us(self, self.verification_arena, batch_size, kv_len, tokens, out, threads)

    def run(self, batch: StepBatch, *, threads: int = 1, with_error: bool = False) -> StepTimes:
        """Time ragged steps, with the origin and the parts of each.

        Returns
        -------
        StepTimes
            latency_us, origin and components, one entry per step; relative_error with ``with_error``.
        """
        check_flag("with_error", with_error, BatchError)
        times = evaluate.run_batch(self, batch, threads)
        if not with_error:
            return times
        return replace(times, relative_error=step_error.batch_error(self, self.errors, batch, times))

    def step_error(self, batch: StepBatch) -> Floats:
        """Relative standard error of ragged steps: ``run(batch, with_error=True).relative_error``.

        Returns
        -------
        ndarray of float64, shape (steps,)
            One standard error divided by the step's time: an 80 % interval is ±1.28 of them.

        Raises
        ------
        PlanError
            If the plan was unpickled, or its method is not roofline.
        """
        times = evaluate.run_batch(self, batch, 1)
        return step_error.batch_error(self, self.errors, batch, times)

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
            As in :meth:`step_error`, of the broadcast shape.

        Raises
        ------
        PlanError, PlanRangeError, BatchError
            As in :meth:`step_error` and :meth:`decode_us`.

        Examples
        --------
        >>> import fastroof
        >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
        >>> 0.01 < plan.decode_error(64, 4096) < 0.1
        True
        """
        step_us = self.decode_us(batch_size, kv_len)
        return step_error.decode_error(self, self._decode_errors, batch_size, kv_len, step_us)

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
            Images of each step, see :meth:`encode`; their tokens are among a prompt's in the batch.

        Returns
        -------
        ndarray of float64, shape (steps,)
            Microseconds per step.
        """
        step_us = evaluate.step_us(self, batch, threads)
        return step_us if images is None else explain.step_us_with_images(self, batch, step_us, images)

    def pipeline_us(self, batch: StepBatch) -> float:
        """Time micro-batches that follow each other through the pipeline stages, with their bubbles.

        Parameters
        ----------
        batch : StepBatch
            One step per micro-batch, in order.

        Returns
        -------
        float
            From the first one's start to the last one's end, us: ``(n + pp - 1)`` times a stage for n equal
            micro-batches in equal stages, see :mod:`fastroof.plan.arena`. Without stages the sum.

        Examples
        --------
        >>> import fastroof
        >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels", pp=4)
        >>> one, four = (fastroof.StepBatch.from_requests([[(1, 999)] * 16] * n) for n in (1, 4))
        >>> 1.5 < plan.pipeline_us(four) / plan.pipeline_us(one) < 2.1
        True
        """
        return pipeline.makespan_us(self.stage_times_us(batch))

    def cycle_us(self, batch: StepBatch) -> float:
        """Time one round of micro-batches that cycle through the pipeline stages, as decodes do.

        Parameters
        ----------
        batch : StepBatch
            One step per micro-batch; with as many as stages, none waits if stages are equal.

        Returns
        -------
        float
            us in which each makes one step: the busiest stage's time for all of them, or the longest
            micro-batch's for all stages. A lower bound if they are unequal: some then wait for each other.
        """
        return evaluate.round_us(self.stage_times_us(batch))

    def stage_times_us(self, batch: StepBatch) -> Floats:
        """Time every step in every pipeline stage.

        Returns
        -------
        ndarray of float64, shape (steps, pp)
            us per step and stage.
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
            Also estimate the relative error of the step's time, as :meth:`run` does.
        images : iterable of (width, height)
            Images of the step, see :meth:`encode`; their tokens are among a prompt's new tokens.

        Returns
        -------
        Explanation
            Its ``total_us`` is exactly the step's time.

        Raises
        ------
        PlanError
            As in :meth:`step_error`, with ``with_error``.
        """
        check_flag("with_error", with_error, BatchError)
        images = explain.listed_images(images)
        if images and with_error:
            raise PlanError("with_error cannot be used with images: the encoder's error is unknown")
        batch = StepBatch.from_requests([requests])
        step = explain.explain_step(self, batch, self.run(batch, with_error=with_error))
        return explain.with_encoder(self, step, batch, images) if images else step

    def explain_verification(self, batch_size: int, kv_len: int, tokens: int) -> Explanation:
        """Break one step of :meth:`verify_us` down by operator, as :meth:`explain` does.

        Returns
        -------
        Explanation
            Its ``total_us`` is exactly the step's time; attention of several queries is modelled.

        Raises
        ------
        PlanRangeError, BatchError
            As in :meth:`verify_us`.
        """
        arguments = (("batch_size", batch_size), ("kv_len", kv_len), ("tokens", tokens))
        batch, length, queries = (whole_number(name, size, error=BatchError) for name, size in arguments)
        total_us = self.verify_us(batch, length, queries)
        sizes = (batch, length, queries)
        return explain.explain_verification(self, self.verification_arena, sizes, total_us, self.made_from)

    def encode(self, images: Iterable[tuple[int, int]]) -> EncoderTime:
        """Time the model's vision encoder over some images, and count their tokens.

        Parameters
        ----------
        images : iterable of (width, height)
            Pixels of each image.

        Returns
        -------
        EncoderTime
            latency_us, origin, tokens and the parts.

        Raises
        ------
        PlanError
            If the plan was unpickled: encoders are looked up in its tables.
        """
        return explain.images_us(self, images)


def _one_decode_us(plan: StepPlan, batch_size: Any, kv_len: Any) -> Any:
    return evaluate.decode_us(plan, plan.decode_lines, batch_size, kv_len, None, 1)
