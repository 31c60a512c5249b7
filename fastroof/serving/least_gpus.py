"""Smallest deployments: serving estimates inverted, from a request rate to replicas and GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Floats, Longs
from fastroof.arrow import ArrowResult
from fastroof.checks import is_number, whole_number
from fastroof.columns import Column
from fastroof.compiled import sizing as loops
from fastroof.config import GpuSpec, load_gpu
from fastroof.defaults import DEFAULT_ENGINE
from fastroof.engines import EngineProfile, load_engine
from fastroof.errors import BatchError, MissingTableError, PlanError
from fastroof.models import Layout, ModelSpec
from fastroof.models.execution import AUTO
from fastroof.models.layout import TP_SIZES
from fastroof.plan import StepPlan, compile_plan
from fastroof.plan.execution import checked_model
from fastroof.plan.start import check_room
from fastroof.serving.scenarios import broadcast, engine_limits
from fastroof.serving.sizing import RATE_LIMITS, RateCurve, ReplicaOptions, positive, rate_curve
from fastroof.serving.speculation import SpeculatedPlan, SpeculativeDecoding, speculated
from fastroof.tables import Tables

MAX_SIZE: Final = 2**20
"""Maximum tokens or requests of a step."""

MOST_RATE_PER_S: Final = 1e9
"""Of more, the number of replicas would not be exact."""


@dataclass(frozen=True, eq=False)
class LeastGpus(ArrowResult):
    """The smallest deployments that serve some request rates, in the scenarios' shape.

    Attributes
    ----------
    total_gpus, tp, replicas : int or ndarray of int64
        Total GPUs, GPUs of a replica, and replicas; 0 if no deployment meets the limits.
    concurrency : float or ndarray of float64
        Clients of all replicas: the fewest with which they serve the rate within the limits.
    ttft_ms, tpot_ms, request_latency_ms : float or ndarray of float64
        What those clients see, as in :class:`fastroof.serving.ServingEstimate`. If no deployment meets the
        limits, the values of a single client on the last tp that was tried; nan if not even one fits.
    tokens_per_s_per_gpu : float or ndarray of float64
        Output tokens/s at the requested rate, divided by all GPUs.
    max_request_rate_per_s : float or ndarray of float64
        Maximum request rate of the same GPUs within the limits, 1/s; 0 without GPUs.
    limited_by : int or ndarray of uint8
        What limits that rate: an index into :data:`RATE_LIMITS`. Without GPUs, the limit that even a single
        client exceeds.
    refused : dict of int to str
        Tensor-parallel sizes that could not be tried, and why.
    made_from : mapping of str to str
        fastroof's version, the tables' hash, and the plans' common settings: metadata of its Arrow table.
    """

    total_gpus: Any
    tp: Any
    replicas: Any
    concurrency: Any
    ttft_ms: Any
    tpot_ms: Any
    request_latency_ms: Any
    tokens_per_s_per_gpu: Any
    max_request_rate_per_s: Any
    limited_by: Any
    refused: dict[int, str]
    made_from: Mapping[str, str] = field(default_factory=dict, repr=False)

    arrow_columns = (
        Column("total_gpus", "int", "GPUs", "total GPUs; 0 if no deployment meets the limits", 0),
        Column("tp", "int", "GPUs", "GPUs of a replica", 0),
        Column("replicas", "int", "", "replicas that share the load evenly", 0),
        Column("concurrency", "float", "", "fewest clients with which they serve the rate"),
        Column("ttft_ms", "float", "ms", "mean time to first token"),
        Column("tpot_ms", "float", "ms", "mean time per output token after the first"),
        Column("request_latency_ms", "float", "ms", "ttft_ms + tpot_ms * (osl - 1)"),
        Column("tokens_per_s_per_gpu", "float", "tokens/s", "output tokens at the rate, over all GPUs"),
        Column("max_request_rate_per_s", "float", "1/s", "maximum request rate of those GPUs", 0),
        Column("limited_by", "text", "", "what limits that rate"),
    )
    arrow_names: ClassVar[Mapping[str, tuple[str, ...]]] = {"limited_by": RATE_LIMITS}

    def columns(self) -> dict[str, Any]:
        """All fields except refused and made_from; limited_by as codes."""
        return {column.name: getattr(self, column.name) for column in self.arrow_columns}


def replica_plans(
    model: ModelSpec,
    gpu: GpuSpec,
    tables: Tables | None,
    tp: Sequence[int],
    options: Mapping[str, Any],
    *,
    budget: int,
    running: int | None = None,
) -> tuple[list[StepPlan], dict[int, str]]:
    """Compile the plans of one replica, and collect the tp that cannot be compiled or have no room."""
    plans: list[StepPlan] = []
    refused = {}
    for size in tp:
        try:
            plan = compile_plan(model, gpu, tables, tp=size, **options)
        except (PlanError, MissingTableError) as error:
            refused[size] = str(error)
            continue
        memory = plan.memory_of(max_tokens=budget, max_seqs=running)
        try:
            check_room(plan, memory, running, PlanError)
        except PlanError as error:
            refused[size] = str(error)
            continue
        plans.append(plan)
    if not plans:
        reasons = {why: [size for size in tp if refused[size] == why] for why in refused.values()}
        raise PlanError("; ".join(f"tp={', '.join(map(str, n))}: {why}" for why, n in reasons.items()))
    return plans, refused


def least_gpus(
    model: ModelSpec | str | Path | Mapping[str, Any],
    gpu: GpuSpec | str | Path | Mapping[str, Any],
    tables: Tables | None,
    request_rate_per_s: Any,
    isl: Any,
    osl: Any,
    *,
    ttft_ms: Any = np.inf,
    tpot_ms: Any = np.inf,
    request_latency_ms: Any = np.inf,
    tp: int | Sequence[int] = TP_SIZES,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    routing: str | None = None,
    allow_modelled: bool = False,
    dtype: str = AUTO,
    kv_dtype: str = AUTO,
    engine: EngineProfile | str | Path | Mapping[str, Any] = DEFAULT_ENGINE,
    method: str = "roofline",
    max_batched_tokens: int | None = None,
    max_seqs: int | None = None,
    chunked_prefill: bool | None = None,
    kv_reservation: str | None = None,
    speculation: SpeculativeDecoding | None = None,
    prefix_hit: float = 0.0,
    memory_fraction: float | None = None,
    **plan_options: Any,
) -> LeastGpus:
    """Find the fewest GPUs that serve a request rate within limits, and the layout on them.

    Parameters
    ----------
    model, gpu, tables, dtype, kv_dtype, engine, method
        As in :func:`fastroof.compile_plan`.
    request_rate_per_s : number or array_like
        Requests/s, all replicas together. Broadcast, as are the next five.
    isl, osl : number or array_like
        Mean tokens of a prompt, and of an output including its first token.
    ttft_ms, tpot_ms, request_latency_ms : number or array_like
        Limits of the mean time to first token, time per output token and time of a whole request, ms; inf
        for no limit.
    tp : int or sequence of int
        Tensor-parallel sizes that a replica may use.
    pp, dp, ep, routing, allow_modelled
        As in :func:`fastroof.compile_plan`, with every tp; combinations that are invalid are in
        ``refused``.
    max_batched_tokens, max_seqs : int, optional
        Max tokens per step and max concurrent requests of a replica (default: the engine's own).
    chunked_prefill, kv_reservation : bool and str, optional
        As in :func:`fastroof.serving.estimate`.
    speculation : SpeculativeDecoding, optional
        As in :func:`fastroof.serving.estimate`; a ``tp`` on which the draft does not run is refused.
    prefix_hit : float
        Share of a prompt found in the prefix cache.
    memory_fraction : float, optional
        As in :func:`fastroof.compile_plan`.
    **plan_options
        Other options of :func:`fastroof.compile_plan`.

    Returns
    -------
    LeastGpus
        Arrays of the broadcast shape; scalars if every argument is a scalar.

    Raises
    ------
    PlanError
        If the model cannot be served on any ``tp``; the message says why.
    BatchError
        If a value is not a number above 0, a rate is above 1e9, or a request is longer than the model's
        sequences.

    Notes
    -----
    A replica with c clients serves X(c) requests/s, see :func:`fastroof.serving.estimate`; c is a mean
    number of requests in flight, so it need not be an integer. All c up to the limits of KV cache,
    ``max_seqs`` and token budget that meet the time limits are candidates::

        X_max    = max X(c) over them
        replicas = ceil(request_rate / X_max)
        c        = the smallest of them with replicas x X(c) >= request_rate
        GPUs     = tp x pp x dp x replicas, minimal over tp; on a tie, the one with the highest maximum rate

    Kernel times are not monotonic, so many c are tried: all integers, and below 64 steps of 1/64 of the power
    of two below, so that X_max is at most 1.6 % below that of a c in between. Load is spread evenly over
    replicas and arrives evenly; limits apply to means.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.serving.least_gpus import least_gpus
    >>> tables = fastroof.load_tables("h100")
    >>> sized = least_gpus("llama-3.1-8b", "h100", tables, [10, 100], isl=1000, osl=200, tpot_ms=20)
    >>> bool(sized.total_gpus[0] < sized.total_gpus[1])
    True
    """
    model = checked_model(model)
    gpu = gpu if isinstance(gpu, GpuSpec) else load_gpu(gpu)
    given = {
        "request_rate_per_s": request_rate_per_s,
        "isl": isl,
        "osl": osl,
        "ttft_ms": ttft_ms,
        "tpot_ms": tpot_ms,
        "request_latency_ms": request_latency_ms,
    }
    shape, arrays = broadcast({name: positive(name, value) for name, value in given.items()})
    scenarios = dict(zip(given, arrays, strict=True))
    _check_lengths(model, scenarios)
    spec = gpu if isinstance(gpu, GpuSpec) else load_gpu(gpu)
    profile = load_engine(engine).on(spec)
    rules = engine_limits(profile, chunked_prefill=chunked_prefill, kv_reservation=kv_reservation)
    max_batched_tokens, max_seqs, asked_seqs = profile.scheduling.step_limits(max_batched_tokens, max_seqs)
    seqs = whole_number("max_seqs", max_seqs, most=MAX_SIZE, error=BatchError)
    budget = whole_number("max_batched_tokens", max_batched_tokens, most=MAX_SIZE, error=BatchError)
    rules = rules._replace(max_batched_tokens=budget, max_seqs=float(seqs), asked_seqs=asked_seqs)
    sizes = (tp,) if isinstance(tp, int) else tuple(dict.fromkeys(tp))
    if not sizes:
        raise PlanError(f"tp is empty; valid sizes are {', '.join(map(str, TP_SIZES))}")
    verified = 1 if speculation is None else 1 + speculation.num_draft_tokens
    options = {
        "pp": pp,
        "dp": dp,
        "ep": ep,
        "routing": routing,
        "allow_modelled": allow_modelled,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "engine": profile,
        "method": method,
        "memory_fraction": memory_fraction,
        **plan_options,
        # a mean step may exceed the budget by rounding
        "max_tokens": profile.scheduling.largest_step(budget, seqs * verified) + 1,
        # prompts that are prefilled next to decodes are sequences too
        "max_seqs": seqs + budget,
    }
    plans, refused = replica_plans(model, gpu, tables, sizes, options, budget=budget, running=asked_seqs)
    rows = _none(arrays[0].size)
    pairs, which = np.unique(np.stack(arrays[1:3], axis=1), axis=0, return_inverse=True)
    if not is_number(prefix_hit) or not 0.0 <= prefix_hit <= 1.0:
        raise BatchError(f"prefix_hit must be from 0 to 1, got {prefix_hit!r}")
    replica_options = ReplicaOptions(rules, kv_reservation, speculation, float(prefix_hit))
    for target in _with_drafts(plans, refused, speculation):
        if target.tokens > budget:
            raise BatchError(
                f"max_batched_tokens must be at least {target.tokens}: one request verifies them"
            )
        for number, (a_prompt, an_output) in enumerate(pairs.tolist()):
            curve = rate_curve(target, a_prompt, an_output, replica_options)
            chosen = np.flatnonzero(which.reshape(-1) == number)
            layout = target.plan.layout
            _take_smaller(rows, chosen, layout, curve, {n: a[chosen] for n, a in scenarios.items()})
    values = {name: row.reshape(shape) if shape else row[0].item() for name, row in rows.items()}
    shared = {name: value for name, value in plans[0].made_from.items() if name != "fastroof.tp"}
    return LeastGpus(**values, refused=refused, made_from=shared)


def _with_drafts(
    plans: Sequence[StepPlan], refused: dict[int, str], speculation: SpeculativeDecoding | None
) -> list[SpeculatedPlan]:
    """Return the plans as the loops read them; plans that the draft does not run on are refused."""
    targets = []
    for plan in plans:
        try:
            targets.append(speculated(plan, speculation))
        except PlanError as error:
            refused[plan.tp] = str(error)
    if not targets:
        raise PlanError("; ".join(f"tp={size}: {why}" for size, why in refused.items()))
    return targets


def _check_lengths(model: ModelSpec, scenarios: Mapping[str, Floats]) -> None:
    rates = scenarios["request_rate_per_s"]
    if (rates > MOST_RATE_PER_S).any():
        raise BatchError(f"request_rate_per_s must be at most {MOST_RATE_PER_S:g}, got {rates.max():g}")
    for name in ("isl", "osl"):
        if (scenarios[name] < 1).any():
            raise BatchError(f"{name} must be at least 1, got {scenarios[name].min():g}")
    longest = float((scenarios["isl"] + scenarios["osl"]).max(initial=0.0))
    if longest > model.max_position:
        raise BatchError(
            f"isl + osl is up to {longest:g} tokens, the maximum of {model.name} is {model.max_position}"
        )


def _none(count: int) -> dict[str, Array]:
    """Return the rows of the answer if no deployment serves the load."""
    kinds: dict[str, tuple[Any, float]] = dict.fromkeys(("total_gpus", "tp", "replicas"), (np.int64, 0))
    times = ("concurrency", "ttft_ms", "tpot_ms", "request_latency_ms", "tokens_per_s_per_gpu")
    kinds |= dict.fromkeys(times, (np.float64, np.nan))
    kinds |= {"max_request_rate_per_s": (np.float64, 0.0), "limited_by": (np.uint8, 0)}
    return {name: np.full(count, value, kind) for name, (kind, value) in kinds.items()}


def _take_smaller(
    rows: dict[str, Array],
    chosen: Longs,
    layout: Layout,
    curve: RateCurve,
    scenarios: Mapping[str, Floats],
) -> None:
    """Replace larger deployments, or slower ones of equal size, by replicas of one plan."""
    count = len(chosen)
    places = np.empty((3, count), np.int64)
    fewest = loops.FewestReplicas(places[0], places[1], places[2], np.empty(count, np.uint8))
    rates = scenarios["request_rate_per_s"]
    ttft_ms, tpot_ms, request_ms = (scenarios[f"{name}_ms"] for name in ("ttft", "tpot", "request_latency"))
    loops.least_replicas(curve.replica, rates, ttft_ms, tpot_ms, request_ms, fewest)
    limited_by = np.where(fewest.limited_by == loops.LIMITED_BY_ROOM, curve.room, fewest.limited_by)
    gpus = layout.world_size * fewest.replicas
    serves = fewest.replicas > 0
    most = np.zeros(count)
    most[serves] = fewest.replicas[serves] * curve.replica.requests_per_s[fewest.most_at[serves]]
    before = rows["total_gpus"][chosen]
    smaller = serves & ((before == 0) | (gpus < before))
    smaller |= serves & (gpus == before) & (most > rows["max_request_rate_per_s"][chosen])
    nothing = ~serves & (before == 0)
    single = chosen[nothing]
    rows["limited_by"][single] = limited_by[nothing]
    times = ("ttft_ms", "tpot_ms", "request_latency_ms")
    for name, curve_ms in zip(times, curve.replica[2:], strict=True):
        rows[name][single] = curve_ms[0] if len(curve_ms) else np.nan
    place, at = chosen[smaller], fewest.runs_at[smaller]
    rows["total_gpus"][place] = gpus[smaller]
    rows["tp"][place] = layout.tp
    rows["replicas"][place] = fewest.replicas[smaller]
    rows["concurrency"][place] = fewest.replicas[smaller] * curve.replica.clients[at]
    for name, curve_ms in zip(times, curve.replica[2:], strict=True):
        rows[name][place] = curve_ms[at]
    rows["tokens_per_s_per_gpu"][place] = (rates * scenarios["osl"])[smaller] / gpus[smaller]
    rows["max_request_rate_per_s"][place] = most[smaller]
    rows["limited_by"][place] = limited_by[smaller]
