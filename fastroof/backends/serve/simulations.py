"""Simulations for other processes: a trace or a workload in a message, percentiles in the answer.

A request for one is ``{"simulate": {...}}``, with these members:

==============  =============================================================================================
``trace``       lists ``arrival_s``, ``input_tokens``, ``output_tokens`` and, if known, ``cached_tokens``; or
``workload``    the arguments of :class:`fastroof.simulation.Workload`, lengths as numbers or distributions
``options``     those of :func:`fastroof.simulate` that are in :data:`OPTIONS`; optional
``requests``    true: what became of each request as well; optional
==============  =============================================================================================

The answer is ``{"summary": {...}, "requests": {column: [...], ...}}``: what ``Simulation.summary()`` says,
and the columns of ``Simulation.requests``. What is not a number is null. Nothing in a message names a file.
"""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.backends.serve.json_values import for_json
from fastroof.checks import is_whole_number, shown
from fastroof.errors import BackendError
from fastroof.stopping import check_stopped

if TYPE_CHECKING:
    from fastroof.backends.serve.limits import ServeLimits
    from fastroof.plan import StepPlan
    from fastroof.simulation import Trace

__all__ = ["OPTIONS", "simulation_answer"]

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
    "routing",
    "seed",
    "on_too_long",
    "time_scale",
)
"""What a message may say of an engine, by the arguments of :func:`fastroof.simulate`."""

_MEMBERS: Final = frozenset({"trace", "workload", "options", "requests"})
_TRACE_COLUMNS: Final = frozenset({"arrival_s", "input_tokens", "output_tokens", "cached_tokens"})
_LENGTHS: Final = ("input_tokens", "output_tokens", "cached_tokens")
_DISTRIBUTIONS: Final = ("lognormal:", "uniform:", "share:")
_WORDS: Final = (
    '"simulate" must be an object with a "trace" or a "workload", and may have "options" and "requests"'
)
_SLOT_BYTES, _BUCKET_BYTES = 128, 32


def simulation_answer(plan: StepPlan, asked: Any, limits: ServeLimits) -> dict[str, Any]:
    """Simulate what a message asks for.

    Parameters
    ----------
    plan : StepPlan
        What times steps.
    asked : dict
        As the module says.
    limits : ServeLimits
        What is refused before any of it is drawn or run.

    Returns
    -------
    dict
        Ready for JSON.

    Raises
    ------
    BackendError
        If the message has other members than these, or asks for more than the limits allow.
    FastroofError
        As :func:`fastroof.simulate` and what it is given raise.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.backends.serve.limits import ServeLimits
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> asked = {"workload": {"rate": 5, "requests": 100}, "options": {"max_num_seqs": 64}}
    >>> simulation_answer(plan, asked, ServeLimits())["summary"]["finished"]
    100
    """
    import fastroof

    if not isinstance(asked, dict) or not asked.keys() <= _MEMBERS:
        raise BackendError(f"{_WORDS}, got {shown(asked, 100)}")
    if ("trace" in asked) == ("workload" in asked):
        raise BackendError(f"{_WORDS}: give one of the two, got {sorted(asked)}")
    wants_requests = asked.get("requests", False)
    if type(wants_requests) is not bool:
        raise BackendError(f'"requests" must be true or false, got {shown(wants_requests)}')
    options = _options(asked.get("options", {}))
    most = limits.max_answered_requests if wants_requests else limits.max_simulated_requests
    if "trace" in asked:
        trace = _trace(asked["trace"], most)
    else:
        _check_drawing(asked["workload"], options, limits)
        trace = _drawn(asked["workload"], most)
    _check_work(plan, trace, options, limits)
    simulated = fastroof.simulate(plan, trace, **options)
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
