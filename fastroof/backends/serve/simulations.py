"""Simulations that a message may ask for, and what they cost, known before anything is drawn.

``{"simulate": {...}}`` has a ``trace``, lists of its requests, or a ``workload``, the arguments of
:class:`fastroof.simulation.Workload` without files; ``options`` are arguments of :func:`fastroof.simulate`.
The answer is ``{"summary": {...}, "requests": {column: [...], ...}}``: ``Simulation.summary()`` and, if
``requests`` is true, the columns of ``Simulation.requests``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from fastroof.checks import is_number, shown
from fastroof.errors import BackendError
from fastroof.stopping import check_stopped

if TYPE_CHECKING:
    from fastroof.backends.serve.limits import ServeLimits
    from fastroof.plan import StepPlan
    from fastroof.simulation import Simulation as Simulated
    from fastroof.simulation import Trace
    from fastroof.simulation.settings import EngineSettings

_NUMBERS: Final = r"[0-9.:eE+-]{1,80}"
_MOST_RATES: Final = 366 * 24


def _one_of(number: str, pattern: str, words: str) -> Any:
    """Return the type of a number, or of a text of one of some forms, none of which is a path."""

    def checked(value: Any, info: ValidationInfo) -> Any:
        is_text = type(value) is str and re.fullmatch(pattern, value) is not None
        if not is_text and not (type(value) is int if number == "integer" else is_number(value)):
            raise BackendError(f'"{info.field_name}" must be {words}; got {shown(value)}')
        return value

    schema = {"anyOf": [{"type": number, "minimum": 0}, {"type": "string", "pattern": f"^({pattern})$"}]}
    return PlainValidator(checked), WithJsonSchema(schema)


_WORDS: Final = "a whole number, lognormal:MEAN:SIGMA[:MOST] or uniform:LEAST:MOST"
_CACHED: Final = f"auto|history|(lognormal|uniform|share):{_NUMBERS}"
_DELAY: Final = f"(exponential|lognormal|uniform):{_NUMBERS}"
_DELAY_WORDS: Final = "seconds, exponential:MEAN, lognormal:MEAN:SIGMA or uniform:LEAST:MOST"

Length = Annotated[Any, *_one_of("integer", f"(lognormal|uniform):{_NUMBERS}", _WORDS)]
Cached = Annotated[Any, *_one_of("integer", _CACHED, f"{_WORDS}, share:SHARE, history or auto")]
Seconds = Annotated[Any, *_one_of("number", _DELAY, _DELAY_WORDS)]
Rates = Annotated[list[float], Field(min_length=1, max_length=_MOST_RATES)]


class _Given(BaseModel):
    """Arguments that were given, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def given(self) -> dict[str, Any]:
        """Return them by name, lists as tuples."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        return {name: tuple(value) if type(value) is list else value for name, value in values.items()}


class Workload(_Given):
    """Requests to draw: the arguments of ``fastroof.Workload`` that name no file."""

    rate: float | None = Field(None, gt=0, description="mean requests/s, or sessions/s")
    arrivals: Literal["", "poisson", "gamma", "constant", "ramp", "hourly", "closed"] = ""
    burstiness: float = Field(1.0, gt=0, description="shape of gamma-distributed gaps")
    ramp: Rates | None = Field(None, description="requests/s at the ends of equally long parts of the run")
    hourly: Rates | None = Field(None, description="requests/s in each hour")
    clients: int | None = Field(None, ge=1, description="of a closed loop")
    think_s: Seconds = Field(0.0, description="from an answer to a client's or session's next request")
    requests: int = Field(1000, ge=1)
    isl: Length = Field(1024, description="tokens of a prompt")
    osl: Length = Field(128, description="tokens of an output")
    cached_tokens: Cached = Field("auto", description="prompt tokens in the prefix cache")
    turns: Length = Field(1, description="turns of a session")
    calls: Length = Field(1, description="calls in each turn")
    tool_s: Seconds = Field(0.0, description="from a call to the next of its turn")
    growth_tokens: Length | None = Field(None, description="new tokens of a session's later prompts")
    system_tokens: int = Field(0, ge=0, description="tokens that all prompts begin with")
    seed: int = Field(0, ge=0)
    name: str = Field("workload", max_length=100)


def _bounded(value: Any, info: ValidationInfo) -> Any:
    """Count a list before its elements are read."""
    if type(value) is list:
        limits: ServeLimits = info.context  # type: ignore[assignment]
        _check_count("requests", len(value), limits.max_simulated_requests)
    return value


class TraceColumns(_Given):
    """Requests one by one."""

    arrival_s: Annotated[list[float], BeforeValidator(_bounded)]
    input_tokens: Annotated[list[int], BeforeValidator(_bounded)]
    output_tokens: Annotated[list[int], BeforeValidator(_bounded)]
    cached_tokens: Annotated[list[int], BeforeValidator(_bounded)] = Field(
        [], description="prompt tokens in the prefix cache (default: 0)"
    )


class Options(_Given):
    """Arguments of ``fastroof.simulate``; null is the engine's own."""

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    replicas: int = Field(1, ge=1)
    async_scheduling: bool | None = None
    order: Literal["mixed", "prefill_first"] | None = None
    chunked_prefill: bool | None = None
    admit_whole_prompt: bool = True
    reserve_output: bool | None = None
    timeout_s: float | None = None
    prefill_schedule_interval: int | None = None
    prefill_decode_interval: int | None = None
    min_free_slots_delay: int | None = None
    router: Literal[
        "round_robin", "least_outstanding", "least_load", "least_kv", "power_of_two", "prefix_aware"
    ] = "round_robin"
    seed: int = Field(0, ge=0)
    on_too_long: Literal["error", "reject"] = "error"
    time_scale: float = 1.0


class Simulation(BaseModel):
    """Traffic and an engine."""

    model_config = ConfigDict(extra="forbid", strict=True)
    trace: TraceColumns | None = None
    workload: Workload | None = None
    options: Options = Field(default_factory=lambda: Options.model_construct())
    requests: bool = Field(False, description="the times of each request as well")

    @model_validator(mode="after")
    def _has_one(self) -> Simulation:
        if (self.trace is None) == (self.workload is None):
            raise BackendError('"simulate" needs either "trace" or "workload"')
        return self


def simulated(plan: StepPlan, asked: Simulation, limits: ServeLimits) -> Simulated:
    """Simulate what a message asks for, unless it is too much."""
    from fastroof.simulation import simulate

    options = asked.options.given()
    trace = _trace(asked, limits)
    check_stopped()
    _check_cost(plan, trace, asked, options, limits)
    return simulate(plan, trace, **options)


def _trace(asked: Simulation, limits: ServeLimits) -> Trace:
    from fastroof.simulation import Workload as DrawnWorkload
    from fastroof.simulation import load_trace

    most = limits.max_answered_requests if asked.requests else limits.max_simulated_requests
    if asked.trace is not None:
        columns = {name: getattr(asked.trace, name) for name in asked.trace.model_fields_set}
        _check_count("requests", max(map(len, columns.values())), most)
        return load_trace({name: np.array(values) for name, values in columns.items()})
    assert asked.workload is not None
    workload = DrawnWorkload(**asked.workload.given())
    _check_count("requests", workload.requests, most)
    _check_count("clients", workload.clients or 1, most)
    return workload.trace()


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise BackendError(f"{count} {what} are more than the {most} of a simulation here: ask for fewer")


def _check_cost(
    plan: StepPlan, trace: Trace, asked: Simulation, options: dict[str, Any], limits: ServeLimits
) -> None:
    """Refuse what would take long or much memory."""
    from fastroof.simulation.pools import ranks_of
    from fastroof.simulation.settings import EngineSettings, simulated_steps

    names = EngineSettings.__dataclass_fields__
    settings = EngineSettings.of_plan(plan, **{name: options[name] for name in names if name in options})
    replicas = options.get("replicas", 1)
    steps = simulated_steps(trace, settings, replicas, options.get("router", "round_robin"), ranks_of(plan))
    if steps > limits.max_simulated_steps:
        on = f" on {replicas} replicas" if replicas > 1 else ""
        raise BackendError(
            f"{len(trace)} requests{on} may take {steps} steps, more than the {limits.max_simulated_steps} "
            "of a simulation here (max_simulated_steps): ask for less"
        )
    num_bytes = simulated_bytes(plan, trace, settings, replicas, asked.requests)
    if num_bytes > limits.max_simulated_bytes:
        raise BackendError(
            f"{len(trace)} requests on {replicas} replicas would take {num_bytes} bytes, more than the "
            f"{limits.max_simulated_bytes} of a simulation here (max_simulated_bytes): ask for less"
        )


REQUEST_BYTES: Final = 640
ANSWERED_BYTES: Final = 1500
"""Memory of a request, and of one that is answered: in the trace, the arrays and results of three runs."""

_RUNS_AT_ONCE: Final = 2
"""A summary may simulate again with faster and with slower steps, at the same time."""


def simulated_bytes(
    plan: StepPlan, trace: Trace, settings: EngineSettings, replicas: int, answers_requests: bool
) -> int:
    """Return about how much memory a call takes: the engines of all replicas and ranks, and all requests."""
    from fastroof.compiled.simulation.series import GAP_BINS, SERIES_BINS, SERIES_FIELDS
    from fastroof.simulation.fleet_arrays import state_bytes
    from fastroof.simulation.pools import EnginePool
    from fastroof.traces.prompt_tree import GIVEN, LRU

    # sessions have a prefix cache, of at most a segment and a tail for each request
    pool = EnginePool(plan, settings, replicas, prefix_cache=LRU if trace.has_parents else GIVEN)
    state = state_bytes(pool, int(trace.output_tokens.max()), len(trace), len(trace))
    record = 8 * (GAP_BINS + SERIES_BINS * SERIES_FIELDS)
    # each replica may have a record of its own, and there are two for all together
    engines = state + (replicas + 2) * record
    each = ANSWERED_BYTES if answers_requests else REQUEST_BYTES
    return _RUNS_AT_ONCE * engines + each * len(trace)
