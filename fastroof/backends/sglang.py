"""The SGLang simulator: a plan as its time predictor.

Two ways in, both in seconds. :class:`StepTimePredictor` answers ``predict_infer_time(batch)`` from the
requests themselves; to use it with the simulator's scheduler in your own process, put it where the
scheduler looks for it, ``C_SchedulerHook.INFERENCE_PREDICTOR``, after ``Scheduler.__init__``: that makes a
predictor of the configuration and puts it there, so the configuration names a valid one all the same (the
file of :func:`write_model` will do), and what was there before is lost. :func:`write_model` writes a file
for the simulator's sklearn-compatible predictor, which its server loads in a process of its own, by
configuration::

    "predictor": {"name": "ml", "database_path": "llama-3.1-8b.pkl"}

Interface: sgl-project/sglang (Apache-2.0), tools/sglang-simulator/src/sglang_simulator/time_predictor,
base.py at 2f070b1 and ml.py at bb346ef; simulation/sglang/scheduler.py at c1c5d7b and 0b61083.

Their scheduler gives a decode's ``past_kv_length`` as ``len(prefix_indices) + len(output_ids)``. The former
ends at the last prefill, the latter holds the token that is decoded, because the simulator runs SGLang's loop
without overlap (with it, ``output_ids`` would be one short): it is kv_len, one more than the context.
``past_is_kv_len=False`` is for schedulers that give the context, as pull request 36069 at 3ec08c4 does.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.atomic_files import write_output
from fastroof.compiled.callers import sums_step_us
from fastroof.errors import BackendError, PlanRangeError
from fastroof.plan import StepPlan
from fastroof.units import US_PER_S

FEATURES: Final = (
    "batch_size",
    "sum_extend",
    "max_extend",
    "min_extend",
    "sum_past",
    "max_past",
    "min_past",
    "sum_extend_x_past",
    "sum_extend_squared",
    "sum_past_squared",
    "sum_attn_flops",
    "sum_extend_x_max_past",
    "log1p_sum_past",
    "log1p_sum_attn_flops",
    "batch_size_x_sum_extend",
    "max_past_minus_min_past",
    "is_decode",
    "is_prefill",
)
"""What the simulator tells a sklearn-compatible model of a step, in its order."""


class StepTimePredictor:
    """The simulator's time predictor: how long one forward step of the batch takes.

    Parameters
    ----------
    plan : StepPlan
        What times a step.
    past_is_kv_len : bool
        Whether a decode's ``past_kv_length`` counts its new token, as the simulator's scheduler does. A chunk
        of one token is then timed with one token of context less.

    Examples
    --------
    >>> import fastroof
    >>> from types import SimpleNamespace
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> requests = [SimpleNamespace(extend_length=1, past_kv_length=4096)] * 64
    >>> seconds = StepTimePredictor(plan).predict_infer_time(SimpleNamespace(reqs=requests))
    >>> seconds == plan.decode_us(64, 4096) / 1e6
    True
    """

    def __init__(self, plan: StepPlan, *, past_is_kv_len: bool = True) -> None:
        self.plan = plan
        self.past_is_kv_len = past_is_kv_len

    def predict_infer_time(self, batch: Any) -> float:
        """Time one step.

        Parameters
        ----------
        batch : sglang_simulator.time_predictor.ScheduleBatch
            Its ``reqs`` have ``extend_length``, the tokens that go through the model, and
            ``past_kv_length``, those in the KV cache before, or a decode's kv_len.

        Returns
        -------
        float
            Seconds; 0 for a batch without requests.

        Raises
        ------
        PlanRangeError, BatchError
            As of ``plan.step_scalar``. The simulator would read a negative answer for "out of memory", and
            one of its modes would wait for as long.
        """
        requests = batch.reqs
        new_tokens = [request.extend_length for request in requests]
        counted = self.past_is_kv_len  # in decodes, whose kv_len is at least 2
        context_len = [
            one.past_kv_length - (counted and one.extend_length == 1 < one.past_kv_length) for one in requests
        ]
        return self.plan.step_scalar(new_tokens, context_len) / US_PER_S

    def get_metrics(self) -> dict[str, Any]:
        """Return what the simulator adds to its metrics: nothing."""
        return {}

    def reset_metrics(self) -> None:
        """Do nothing: there are no metrics."""


class StepTimeRegressor:
    """A plan as a fitted sklearn model: rows of :data:`FEATURES` in, seconds out.

    Parameters
    ----------
    plan : StepPlan
        What times a step; it is pickled with the model.
    past_is_kv_len : bool
        As of :class:`StepTimePredictor`.

    Attributes
    ----------
    guessed_steps : int
        How many steps the features did not determine.

    Notes
    -----
    A plan times a step from sums over its requests, and the features hold them. So it is the plan's own
    time, to the bit, for decode steps; for steps of only prefills, each of more than one token;
    for decodes with one chunk, with chunks of equal length, or with two prompts without a context.

    Beside other chunks the features leave open how many requests are decodes. Then it takes the chunks for
    equal ones with the same sum and sum of squares: error 0.1 % mean and 1.6 % max, in 20,000
    random steps of up to 40 decodes and 2 to 8 chunks of up to 900 tokens; 3.6 % with chunks of 2 tokens
    with chunks of 900. A request of one token after nothing, in a step with others, is taken for a
    decode: error 9 % max, in steps of only such requests and decodes.

    Where layers attend within a window it takes decodes for equal ones there, and chunks: certain only in
    steps of equal requests.
    """

    def __init__(self, plan: StepPlan, *, past_is_kv_len: bool = True) -> None:
        self.plan = plan
        self.past_is_kv_len = past_is_kv_len
        self.guessed_steps = 0

    def predict(self, rows: Sequence[Sequence[float]]) -> Floats:
        """Time steps.

        Parameters
        ----------
        rows : array_like, shape (steps, 18)
            :data:`FEATURES` of each step.

        Returns
        -------
        ndarray of float64, shape (steps,)
            Seconds.

        Raises
        ------
        BackendError
            If a row has another length.
        PlanRangeError
            If a step is larger than the plan, or has features that no step has.
        """
        times = np.empty(len(rows))
        for i, row in enumerate(rows):
            if len(row) != len(FEATURES):
                raise BackendError(
                    f"row {i} has {len(row)} features: the simulator's ml predictor passes {len(FEATURES)}, "
                    "fastroof.backends.sglang.FEATURES names them"
                )
            sums, certain = _sums_of(row, self.past_is_kv_len)
            step_us = sums_step_us(self.plan.arena, *sums)
            if math.isnan(step_us):
                raise PlanRangeError(
                    f"row {i}: a step of {row[1]} tokens in {row[0]} requests does not fit {self.plan!r}; "
                    "compile the plan with larger limits on a step, and write the model again"
                )
            # sums do not tell which requests are within a window, but for equal ones
            if self.plan.memory.window and not _is_of_equals(row):
                certain = False
            self.guessed_steps += not certain
            times[i] = step_us / US_PER_S
        return times


class _StepSums(NamedTuple):
    """Sums over a step's requests, as the compiled loops take them."""

    seqs: int
    decodes: int
    kv_sum: int
    new_sum: int
    causal_pairs: int
    prefix_pairs: int
    prefix_sum: int


def _is_of_equals(row: Sequence[float]) -> bool:
    """Whether all requests of a step have as many new tokens and as long a past."""
    _, _, most, least, _, past_most, past_least = map(int, row[:7])
    return most == least and past_most == past_least


def _sums_of(row: Sequence[float], past_is_kv_len: bool) -> tuple[_StepSums, bool]:
    """Read a step's sums from its features, and whether they are certain."""
    seqs, extend, most, least, past, past_most, past_least, crossed, squared = map(int, row[:9])
    chunks, chunk_past, certain = seqs, past, True
    if most == 1:
        chunks, chunk_past = (0 if past_most else seqs), 0
        certain = past_least > 0 or not past_most
    elif least == 1:
        # e - 1 and (e - 1) * past are 0 in a decode: these sums are the chunks' own
        beyond, beyond_squared, beyond_past = extend - seqs, squared - 2 * extend + seqs, crossed - past
        longest = most - 1
        other = beyond - longest
        if beyond_squared == beyond * longest:  # all as long as the longest
            chunks = beyond // longest
            chunk_past = beyond_past // longest
            certain = chunks > 1 or not chunk_past or past_least > 0
        else:
            two = beyond_squared == longest**2 + other**2
            chunks = 2 if two else min(max(3, round(beyond**2 / beyond_squared)), seqs - 1)
            chunk_past = min(past, round(beyond_past * chunks / beyond))
            certain = two and not beyond_past
    decodes = seqs - chunks
    sums = _StepSums(
        seqs=seqs,
        decodes=decodes,
        kv_sum=max(past - chunk_past + decodes * (not past_is_kv_len), decodes),
        new_sum=extend - decodes,
        causal_pairs=(squared + extend) // 2 - decodes,
        prefix_pairs=crossed - (past - chunk_past),
        prefix_sum=chunk_past,
    )
    return sums, certain


def write_model(plan: StepPlan, path: str | Path, *, past_is_kv_len: bool = True) -> Path:
    """Write a plan as the file of the simulator's ``ml`` predictor.

    Parameters
    ----------
    plan : StepPlan
        What times a step.
    path : str or Path
        Where to; ``database_path`` of the simulator's configuration.
    past_is_kv_len : bool
        As of :class:`StepTimePredictor`.

    Returns
    -------
    Path
        The file: ``{"model": ..., "features": ...}`` as a pickle, which joblib reads. Whoever reads it needs
        fastroof, in the version that wrote it.

    Raises
    ------
    BackendError
        If the folder does not exist.
    """
    bundle = {"model": StepTimeRegressor(plan, past_is_kv_len=past_is_kv_len), "features": list(FEATURES)}
    return write_output(path, pickle.dumps(bundle, protocol=4), error=BackendError)
