"""What a message may ask of a plan beside times of steps: a step by operator, memory, a pipeline, a link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.backends.plan_facts import plan_facts
from fastroof.backends.serve.json_values import floats_for_json, for_json
from fastroof.checks import is_number, shown, whole_number
from fastroof.errors import BackendError, BatchError
from fastroof.run import StepBatch
from fastroof.run.batch import int_array

if TYPE_CHECKING:
    from fastroof.backends.serve.limits import ServeLimits
    from fastroof.plan import StepPlan

__all__ = ["explanation_answer", "memory_answer", "pipeline_answer", "transfer_answer"]

_VERIFIED: Final = ("batch_size", "kv_len", "tokens")
_TRANSFER: Final = frozenset({"prompts", "bytes_per_s", "latency_us", "decode_plan"})
_MOST: Final = 2**31 - 1


def explanation_answer(plan: StepPlan, asked: Any, with_error: bool, limits: ServeLimits) -> dict[str, Any]:
    """Break a step down by operator.

    Parameters
    ----------
    plan : StepPlan
        Whose step.
    asked : list or dict
        [new_tokens, context_len] of each request, or batch_size, kv_len and tokens of a verification.
    with_error : bool
        Whether its standard error is asked for.
    limits : ServeLimits
        Most requests of an explanation.

    Returns
    -------
    dict
        ``total_us`` and ``origin`` of the step, ``operators`` with the fields of
        :class:`fastroof.plan.explain.OperatorTime`, and ``relative_error`` if asked for.

    Raises
    ------
    BackendError
        If it has other members than these, or is beyond the limits.
    BatchError, PlanRangeError, PlanError
        As ``plan.explain`` and ``plan.explain_verification`` raise.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.backends.serve.limits import ServeLimits
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> answer = explanation_answer(plan, [[2048, 0], [1, 4095]], False, ServeLimits())
    >>> answer["total_us"] == plan.explain([(2048, 0), (1, 4095)]).total_us
    True
    """
    if isinstance(asked, dict):
        if asked.keys() != set(_VERIFIED):
            raise BackendError(
                f'"explain" must be a list of [new_tokens, context_len], or an object of '
                f"{', '.join(_VERIFIED)}; got {shown(asked, 100)}"
            )
        if with_error:
            raise BackendError("standard errors of steps that verify drafts are not known: leave it away")
        sizes = [whole_number(name, asked[name], most=_MOST, error=BatchError) for name in _VERIFIED]
        explained = plan.explain_verification(*sizes)
    else:
        if isinstance(asked, list) and len(asked) > limits.max_detailed_requests:
            raise BackendError(
                f"{len(asked)} requests are more than the {limits.max_detailed_requests} of an explanation"
            )
        explained = plan.explain(asked, with_error=with_error)
    answer = {
        "total_us": explained.total_us,
        "origin": explained.origin,
        "operators": [operator._asdict() for operator in explained.operators],
    }
    if with_error:
        answer["relative_error"] = explained.relative_error
    return dict(for_json(answer))


def memory_answer(plan: StepPlan, max_tokens: Any = None, max_seqs: Any = None) -> dict[str, Any]:
    """Say what one GPU of a plan holds, as :func:`fastroof.backends.plan_facts.plan_facts` does.

    Parameters
    ----------
    plan : StepPlan
        Whose memory.
    max_tokens, max_seqs : int, optional
        As of ``plan.memory_of``.

    Raises
    ------
    BackendError
        If a limit is not a whole number.
    """
    given = {"max_tokens": max_tokens, "max_seqs": max_seqs}
    sizes = {
        name: whole_number(f'"{name}"', value, most=_MOST, error=BackendError)
        for name, value in given.items()
        if value is not None
    }
    return plan_facts(plan, **sizes)


def pipeline_answer(plan: StepPlan, asked: Any, limits: ServeLimits) -> dict[str, Any]:
    """Time micro-batches that follow each other through the stages of a plan.

    Parameters
    ----------
    plan : StepPlan
        With any number of stages.
    asked : list
        One list of [new_tokens, context_len] a micro-batch.
    limits : ServeLimits
        Most micro-batches times stages, and requests of them.

    Returns
    -------
    dict
        ``pipeline_us``, ``cycle_us``, and ``stage_us``: of each micro-batch in each stage.

    Raises
    ------
    BackendError, BatchError, PlanRangeError
        If they are too many, or cannot be timed.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.backends.serve.limits import ServeLimits
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels", pp=2)
    >>> answer = pipeline_answer(plan, [[[1, 999]] * 16] * 2, ServeLimits())
    >>> answer["pipeline_us"] > answer["cycle_us"] > answer["stage_us"][0][0]
    True
    """
    batch = StepBatch.from_requests(asked)
    check_detailed(batch.num_steps, len(plan.stages), len(batch.new_tokens), limits)
    return {
        "pipeline_us": plan.pipeline_us(batch),
        "cycle_us": plan.cycle_us(batch),
        "stage_us": floats_for_json(plan.stage_times_us(batch)),
    }


def transfer_answer(
    prefill: StepPlan, decode: StepPlan, asked: dict[str, Any], limits: ServeLimits
) -> dict[str, Any]:
    """Time the KV caches of prompts on their way from a prefill engine to a decode engine.

    Parameters
    ----------
    prefill, decode : StepPlan
        Plans of both.
    asked : dict
        ``prompts``: tokens of each; and if known ``bytes_per_s`` of a GPU's link, by default NVLink's, and
        ``latency_us``, by default 0: as of :class:`fastroof.simulation.disaggregated.Link`.
    limits : ServeLimits
        Most prompts.

    Returns
    -------
    dict
        ``transfer_us`` and ``kv_bytes``, a number a prompt: once it has the link, and of all GPUs together.

    Raises
    ------
    BackendError
        If plans are of other models or caches, or a member is none.
    BatchError
        If a prompt is no number of tokens.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.backends.serve.limits import ServeLimits
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> transfer_answer(plan, plan, {"prompts": [1000], "bytes_per_s": 50e9}, ServeLimits())
    {'transfer_us': [2621.44], 'kv_bytes': [131072000]}
    """
    from fastroof.simulation.disaggregated import Link, takes_us, whole_kv_bytes

    if not asked.keys() <= _TRANSFER or "prompts" not in asked:
        raise BackendError(
            f'"kv_transfer" must be an object with "prompts", and may have bytes_per_s, latency_us and '
            f"decode_plan; got {shown(sorted(asked), 100)}"
        )
    if (prefill.model, prefill.kv_dtype) != (decode.model, decode.kv_dtype):
        raise BackendError(
            f"prefill and decode need one model and kv_dtype, got {prefill.model.name} with "
            f"{prefill.kv_dtype} KV and {decode.model.name} with {decode.kv_dtype} KV"
        )
    rate, latency_us = asked.get("bytes_per_s"), asked.get("latency_us", 0.0)
    if rate is not None and not (is_number(rate) and rate > 0):
        raise BackendError(f'"bytes_per_s" must be a number above 0, got {shown(rate)}')
    if not is_number(latency_us) or latency_us < 0:
        raise BackendError(f'"latency_us" must be microseconds of at least 0, got {shown(latency_us)}')
    prompts = int_array("prompts", asked["prompts"])
    if prompts.ndim != 1:
        raise BatchError(f'"prompts" must be one list of integers, got {shown(asked["prompts"])}')
    if prompts.size > limits.max_requests:
        raise BackendError(f"{prompts.size} prompts are more than the {limits.max_requests} of a message")
    if prompts.size and not (prompts.min() >= 1 and prompts.max() <= _MOST):
        wrong = prompts.min() if prompts.min() < 1 else prompts.max()
        raise BatchError(f"a prompt has from 1 to {_MOST} tokens, got {wrong}")
    sizes = prompts.astype(np.int64)
    link = Link(None if rate is None else float(rate), float(latency_us))
    with np.errstate(over="ignore"):  # what takes longer than a float can hold is null
        transfer_us = takes_us(prefill, decode, sizes, link)
    return {
        "transfer_us": floats_for_json(transfer_us),
        "kv_bytes": whole_kv_bytes(decode).kv_bytes(sizes).tolist(),
    }


def check_detailed(num_steps: int, stages: int, num_requests: int, limits: ServeLimits) -> None:
    """Refuse more steps, times stages, and requests than a call for more than times may have."""
    if num_steps * stages > limits.max_detailed_steps:
        times = f" in {stages} stages" if stages > 1 else ""
        raise BackendError(
            f"{num_steps} steps{times} are more than the {limits.max_detailed_steps} of a message that asks "
            "for more than their times: send several"
        )
    if num_requests > limits.max_detailed_requests:
        raise BackendError(
            f"{num_requests} requests are more than the {limits.max_detailed_requests} of a message that "
            "asks for more than times: send several"
        )
