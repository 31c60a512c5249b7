"""What a message may ask of a plan besides the times of steps.

One step by operator, memory, micro-batches in a pipeline, KV caches on a link, and simulations.
``{"simulate": {...}}`` takes these members:

==============  =============================================================================================
``trace``       lists ``arrival_s``, ``input_tokens``, ``output_tokens`` and, if known, ``cached_tokens``; or
``workload``    the arguments of :class:`fastroof.simulation.Workload`, lengths as numbers or distributions
``options``     those of :func:`fastroof.simulate` that are in :data:`OPTIONS`; optional
``requests``    true: the times of each request as well; optional
==============  =============================================================================================

The answer is ``{"summary": {...}, "requests": {column: [...], ...}}``: ``Simulation.summary()`` and the
columns of ``Simulation.requests``. Nothing in a message names a file.
"""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.backends.plan_facts import plan_facts
from fastroof.backends.serve.forms import floats_for_json, for_json
from fastroof.checks import is_number, is_whole_number, shown, true_or_false, whole_number
from fastroof.errors import BackendError, BatchError
from fastroof.run import StepBatch
from fastroof.run.batch import int_array
from fastroof.stopping import check_stopped

if TYPE_CHECKING:
    from fastroof.backends.serve.limits import ServeLimits
    from fastroof.plan import StepPlan
    from fastroof.simulation import Trace

_VERIFIED: Final = ("batch_size", "kv_len", "tokens")
_TRANSFER: Final = frozenset({"prompts", "bytes_per_s", "latency_us", "decode_plan"})
_MOST: Final = 2**31 - 1


def explanation_answer(plan: StepPlan, asked: Any, with_error: bool, limits: ServeLimits) -> dict[str, Any]:
    """Break a step down by operator: a list of [new_tokens, context_len], or a step that verifies drafts."""
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
    """Return what one GPU of a plan holds."""
    given = {"max_tokens": max_tokens, "max_seqs": max_seqs}
    sizes = {
        name: whole_number(f'"{name}"', value, most=_MOST, error=BackendError)
        for name, value in given.items()
        if value is not None
    }
    return plan_facts(plan, **sizes)


def pipeline_answer(plan: StepPlan, asked: Any, limits: ServeLimits) -> dict[str, Any]:
    """Time micro-batches that follow each other through the stages of a plan."""
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
    """Time the KV caches of prompts on their way from a prefill engine to a decode engine."""
    from fastroof.simulation.pools import Link, takes_us, whole_kv_bytes

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


# Simulations

OPTIONS: Final = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_gpu_blocks",
    "block_size",
    "replicas",
    "async_scheduling",
    "order",
    "chunked_prefill",
    "admit_whole_prompt",
    "reserve_output",
    "timeout_s",
    "prefill_schedule_interval",
    "prefill_decode_interval",
    "min_free_slots_delay",
    "routing",
    "seed",
    "on_too_long",
    "time_scale",
)
"""What a message may say of an engine, by the arguments of :func:`fastroof.simulate`."""

_MEMBERS: Final = frozenset({"trace", "workload", "options", "requests"})
_TRACE_COLUMNS: Final = frozenset({"arrival_s", "input_tokens", "output_tokens", "cached_tokens"})
_LENGTHS: Final = ("input_tokens", "output_tokens", "cached_tokens", "growth_tokens", "turns", "calls")
_DISTRIBUTIONS: Final = ("lognormal:", "uniform:", "share:", "history")
_WORDS: Final = (
    '"simulate" must be an object with a "trace" or a "workload", and may have "options" and "requests"'
)
_SLOT_BYTES, _BUCKET_BYTES = 128, 32


def simulation_answer(plan: StepPlan, asked: Any, limits: ServeLimits) -> dict[str, Any]:
    """Simulate what a message asks for; limits are checked before anything is drawn or run."""
    from fastroof.simulation import simulate

    if not isinstance(asked, dict) or not asked.keys() <= _MEMBERS:
        raise BackendError(f"{_WORDS}, got {shown(asked, 100)}")
    if ("trace" in asked) == ("workload" in asked):
        raise BackendError(f"{_WORDS}: give one of the two, got {sorted(asked)}")
    wants_requests = true_or_false('"requests"', asked.get("requests", False), BackendError)
    options = _options(asked.get("options", {}))
    most = limits.max_answered_requests if wants_requests else limits.max_simulated_requests
    if "trace" in asked:
        trace = _trace(asked["trace"], most)
    else:
        _check_drawing(asked["workload"], options, limits)
        trace = _drawn(asked["workload"], most)
    _check_work(plan, trace, options, limits)
    simulated = simulate(plan, trace, **options)
    answer = {"summary": for_json(simulated.summary())}
    check_stopped()
    if wants_requests:
        answer["requests"] = for_json(simulated.requests.to_pydict())
    return answer


def _options(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not given.keys() <= set(OPTIONS):
        raise BackendError(f'"options" must be an object of {", ".join(OPTIONS)}, got {shown(given, 200)}')
    return given


def _trace(columns: Any, most: int) -> Trace:
    from fastroof.simulation import load_trace

    if not isinstance(columns, dict) or not columns.keys() <= _TRACE_COLUMNS:
        raise BackendError(
            f'"trace" must be lists of {", ".join(sorted(_TRACE_COLUMNS))}, got {shown(columns, 100)}'
        )
    arrays = {}
    for name, values in columns.items():
        if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
            raise BackendError(f'"{name}" of a trace must be a list of numbers, got {shown(values)}')
        _check_count(len(values), most)
        arrays[name] = np.array(values)
    return load_trace(arrays)


def _drawn(given: Any, most: int) -> Trace:
    from fastroof.simulation import Workload

    if not isinstance(given, dict):
        raise BackendError(f'"workload" must be an object of the arguments of Workload, got {shown(given)}')
    for name in _LENGTHS:
        length = given.get(name, 1)
        if not is_whole_number(length) and not (
            isinstance(length, str) and length.startswith(_DISTRIBUTIONS)
        ):
            raise BackendError(
                f'"{name}" of a workload must be a number, or a string that starts with '
                f"{', '.join(_DISTRIBUTIONS)}; got {shown(length)}"
            )
    if is_whole_number(given.get("requests")):
        _check_count(given["requests"], most)
    try:
        workload = Workload(**{name: _tuples(value) for name, value in given.items()})
    except TypeError as error:
        raise BackendError(f'"workload" must have the arguments of Workload: {error}') from None
    return workload.trace()


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise BackendError(f"{count} requests are more than the {most} of a simulation here: send fewer")


def _check_work(plan: StepPlan, trace: Trace, options: dict[str, Any], limits: ServeLimits) -> None:
    """Refuse what would take long or much memory, before anything is simulated."""
    from fastroof.simulation import simulate
    from fastroof.simulation.replicas import ranks_of
    from fastroof.simulation.settings import EngineSettings, simulated_steps

    arguments = signature(simulate).parameters
    names = [field.name for field in fields(EngineSettings) if field.name in arguments]
    settings = EngineSettings.of_plan(plan, **{n: options.get(n, arguments[n].default) for n in names})
    replicas, ranks = options.get("replicas", 1), ranks_of(plan)
    if not is_whole_number(replicas):
        return  # which is refused by who simulates
    seqs = min(settings.max_num_seqs, len(trace))
    a_rank = _SLOT_BYTES * seqs + _BUCKET_BYTES * int(trace.output_tokens.max()) + 8 * settings.block_size
    if replicas * ranks * a_rank > limits.max_message_bytes:
        raise BackendError(
            f"{replicas} replicas of {seqs} requests would take {replicas * ranks * a_rank} bytes, more than "
            f"{limits.max_message_bytes}: ask for fewer"
        )
    steps = simulated_steps(trace, settings, replicas, options.get("routing", "round_robin"), ranks)
    _check_steps(steps, len(trace), replicas, limits)


def _check_drawing(workload: Any, options: dict[str, Any], limits: ServeLimits) -> None:
    """Refuse at once what would take too many steps though each request had one: drawing takes time too."""
    from fastroof.simulation.settings import routed_steps

    requests: Any = workload.get("requests") if isinstance(workload, dict) else None
    replicas: Any = options.get("replicas", 1)
    if is_whole_number(requests) and is_whole_number(replicas):
        is_closed, routing = workload.get("clients") is not None, options.get("routing", "round_robin")
        steps = routed_steps(requests, requests, is_closed, replicas, routing)
        _check_steps(steps, requests, replicas, limits)


def _check_steps(steps: int, requests: int, replicas: int, limits: ServeLimits) -> None:
    if steps > limits.max_simulated_steps:
        on = f" on {replicas} replicas" if replicas > 1 else ""
        raise BackendError(
            f"{requests} requests{on} may take {steps} steps, more than the {limits.max_simulated_steps} of "
            "a simulation here (max_simulated_steps): ask for less"
        )
