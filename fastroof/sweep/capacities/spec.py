"""Spec and columns of a sweep over capacities: deployments, requests and limits on percentiles."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from fastroof.checks import shown
from fastroof.columns import Column
from fastroof.errors import SweepError
from fastroof.ranges import expand_sizes
from fastroof.sweep.spec import COUNTS, CandidateSpec, Names, Sizes, count_problem, out_of
from fastroof.sweep.units import EXECUTION, GPU, MODEL, SPLIT, WEIGHT_BYTES

if TYPE_CHECKING:
    from fastroof.simulation.capacity_search import Limits
    from fastroof.traces.trace import Trace
    from fastroof.traces.workload import Workload


_TRACE_KEYS: Final = (
    "trace", "format", "columns", "where", "limit", "rate_scale", "hash_block_size",
    "period_s",
)  # fmt: skip
_WORKLOAD_KEYS: Final = (
    "arrivals", "burstiness", "ramp", "requests", "isl", "osl", "cached_tokens", "seed",
)  # fmt: skip
_ANY_RATE: Final = 1.0
"""Placeholder rate of a workload: the search sets the rate."""


def requests_of(table: Mapping[str, Any]) -> Trace | Workload:
    """Return the trace or workload that a spec's ``workload`` table describes."""
    keys = _TRACE_KEYS if "trace" in table else _WORKLOAD_KEYS
    unknown = [key for key in table if key not in keys]
    if unknown:
        both = ", ".join(_WORKLOAD_KEYS) if "trace" not in table else "with a trace, " + ", ".join(keys[1:])
        or_trace = "" if "trace" in table else "; or trace, the path of a file"
        raise SweepError(f"unknown key: {', '.join(map(str, unknown))}; the keys are {both}{or_trace}")
    if "trace" in table:
        from fastroof.traces.trace_files import load_trace

        options = {key: value for key, value in table.items() if key != "trace"}
        trace: Trace = load_trace(table["trace"], **options)
        if trace.has_parents:
            raise SweepError(
                f"{shown(trace.name)} has sessions, which sweeps of capacities do not serve; find the "
                "capacity of each deployment with `fastroof capacity`"
            )
        return trace
    from fastroof.traces.workload import Workload

    fields = dict(table)
    if isinstance(fields.get("ramp"), list):
        fields["ramp"] = tuple(fields["ramp"])
    return Workload(rate=_ANY_RATE, **fields)


def requests_hash(requests: Trace | Workload) -> str:
    """Hash the drawn requests, to detect that a trace file has changed."""
    trace = requests.trace() if hasattr(requests, "trace") else requests
    names = ["arrival_s", "input_tokens", "output_tokens", "cached_tokens"]
    # what a prefix cache finds
    names += [
        name for name in ("hash_ids", "hash_offsets", "history_tokens") if getattr(trace, name) is not None
    ]
    block = f"{trace.hash_block_size or ''}{trace.period_s or ''}".encode()
    return hashlib.sha256(b"".join(getattr(trace, name).tobytes() for name in names) + block).hexdigest()


MAX_CANDIDATES: Final = 10**6
"""Maximum number of deployments of a sweep: a few hours on one core."""

GROUP_COLUMNS: Final = (
    "model", "gpu", "tp", "pp", "dp", "ep", "routing", "replicas", "total_gpus", "dtype", "kv_dtype",
    "engine", "max_num_batched_tokens", "max_num_seqs",
)  # fmt: skip
"""Columns that rows can be grouped by."""

ROUTERS: Final = ("round_robin", "least_outstanding", "least_load", "least_kv", "power_of_two")
"""Copy of :data:`fastroof.simulation.pools.ROUTINGS`, whose import needs numba."""

_LARGEST: Final = {
    "max_num_batched_tokens": 2**20,
    "max_num_seqs": 2**16,
    "replicas": 2**10,
    "total_gpus": 2**16,
}
_OF_ENGINE: Final = ("max_num_batched_tokens", "max_num_seqs")
_SLO: Final = "a table of limits, like {ttft_p99_ms = 500, tpot_p99_ms = 50}"
_WORKLOAD: Final = (
    "a table of the requests: {trace = 'FILE', limit = 10000}, or {requests = 10000, isl = 1024, "
    "osl = 'lognormal:200:0.5', arrivals = 'poisson', seed = 0}"
)

Deployment = tuple[int, int | None, int | None]
"""Replicas, max tokens per step and max concurrent requests; None is the engine's default."""


class CapacitySpec(CandidateSpec):
    """Spec of a sweep over capacities: deployments, requests and limits.

    Every combination of models, gpus, tp, pp, dp, ep, routing, dtype, kv_dtype, engine, replicas,
    max_num_batched_tokens and max_num_seqs is one deployment. All of them serve the same requests.
    :func:`fastroof.sweep.load_spec` creates and validates it.
    """

    router: str = Field(
        "round_robin", description=f"how replicas share the requests, one of {', '.join(ROUTERS)}"
    )
    max_num_batched_tokens: Sizes | None = Field(
        None, description=f"max tokens per step, {COUNTS}; default: each engine's own"
    )
    max_num_seqs: Sizes | None = Field(
        None,
        description=f"max concurrent requests per replica, {COUNTS}; default: each engine's own",
    )
    workload: dict[str, Any] = Field(description=_WORKLOAD)
    slo: dict[str, float] = Field(description=_SLO)
    tolerance: float = Field(
        0.01, gt=0, le=0.5, description="relative tolerance of the search for the rate, a number up to 0.5"
    )
    draws: int = Field(
        1, ge=1, le=1000, description="number of draws of the workload, a whole number up to 1,000"
    )
    steady: bool = Field(
        True,
        description="whether more requests are drawn, or a trace repeated, until the ramp does not matter",
    )
    keep: Literal["all", "best"] = Field("all", description="'all' or 'best'")
    per: Annotated[Names, out_of(GROUP_COLUMNS, may_be_empty=True)] = Field(
        ("model",), description=f"a list of columns out of {', '.join(GROUP_COLUMNS)}"
    )

    @field_validator("router")
    @classmethod
    def _check_router(cls, value: str) -> str:
        if value not in ROUTERS:
            raise ValueError(f"got {shown(value)}, need one of {', '.join(ROUTERS)}")
        return value

    @field_validator(*_LARGEST, mode="before")
    @classmethod
    def _check_sizes(cls, value: Any, info: ValidationInfo) -> tuple[int, ...] | None:
        return None if value is None else expand_sizes(value, _LARGEST[str(info.field_name)])

    @field_validator("workload", mode="after")
    @classmethod
    def _check_workload(cls, value: dict[str, Any]) -> dict[str, Any]:
        requests_of(value)
        return value

    @field_validator("slo", mode="before")
    @classmethod
    def _check_slo(cls, value: Any) -> Any:
        if isinstance(value, dict):
            _limits(value)
            return {key: float(most) for key, most in value.items() if most is not None}
        return value

    @model_validator(mode="after")
    def _check_together(self) -> CapacitySpec:
        problems = []
        if self.total_gpus is not None and self.replicas is not None:
            problems.append("total_gpus: determines replicas; give only one of them")
        if "trace" in self.workload and self.draws > 1:
            problems.append("draws: a trace from a file has one draw; only a workload can be drawn again")
        if problems:
            raise ValueError("; ".join(problems))
        names = ("models", "gpus", "dtype", "kv_dtype", "engine", "replicas", "total_gpus", *_OF_ENGINE)
        counts = {name: len(getattr(self, name) or (None,)) for name in names} | {"splits": len(self.splits)}
        count_problem(counts, "deployments", MAX_CANDIDATES, "")
        return self

    @functools.cached_property
    def requests(self) -> Trace | Workload:
        """Return the requests that all deployments serve; once read, they are pickled with the spec."""
        return requests_of(self.workload)

    @property
    def other_inputs(self) -> tuple[str, ...]:
        """Return the hash of the requests, whose file may change."""
        return (requests_hash(self.requests),)

    @property
    def limits(self) -> Limits:
        """Return the limits on percentiles and goodput."""
        return _limits(self.slo)

    def deployments(self, gpus_each: int) -> tuple[Deployment, ...]:
        """Return all deployments with replicas of ``gpus_each`` GPUs, in the order of the rows."""
        replicas = self.replica_counts(gpus_each)
        return tuple(
            itertools.product(replicas, self.max_num_batched_tokens or (None,), self.max_num_seqs or (None,))
        )

    def num_impossible(self, gpus_each: int) -> int:
        """Count the deployments on numbers of GPUs that do not divide into replicas."""
        per_layout = len(self.max_num_batched_tokens or (None,)) * len(self.max_num_seqs or (None,))
        lost = [total for total in self.total_gpus or () if total % gpus_each]
        return len(lost) * per_layout

    @property
    def num_candidates(self) -> int:
        """Return the number of all deployments, possible or not."""
        of_splits = (tp * split.pp * split.dp for tp, split in self.splits)
        return self.num_plans * sum(
            len(self.deployments(gpus)) + self.num_impossible(gpus) for gpus in of_splits
        )


def _limits(slo: dict[str, Any]) -> Limits:
    """Parse a table of limits."""
    from fastroof.simulation.capacity_search import parsed_limits

    times = {name: most for name, most in slo.items() if name != "goodput"}
    return parsed_limits(times, slo.get("goodput"), math.inf)


COLUMNS: Final = (
    MODEL,
    GPU,
    Column("tp", "int", "GPUs", "tensor-parallel size of a replica"),
    *SPLIT,
    Column("replicas", "int", "", "replicas that share the requests"),
    Column("total_gpus", "int", "GPUs", "GPUs of the whole deployment"),
    *EXECUTION,
    Column("max_num_batched_tokens", "int", "tokens", "max tokens per step"),
    Column("max_num_seqs", "int", "", "max concurrent requests per replica"),
    Column("requests_per_s_per_gpu", "float", "1/s", "requests_per_s / total_gpus", 0),
    Column(
        "requests_per_s", "float", "1/s", "highest rate within all limits; 0 if there is no such rate", 0
    ),
    Column(
        "limit", "text", "",
        "what breaks first above it: a limit's name, goodput, throughput; none if nothing breaks",
    ),
    Column("low", "float", "1/s", "requests_per_s with all steps one standard error longer", 0),
    Column("high", "float", "1/s", "requests_per_s with all steps one standard error shorter", 0),
    Column("relative_error", "float", "", "standard error of a step's time, in ln; empty if unknown"),
    Column(
        "sampling_error", "float", "",
        "relative standard error of requests_per_s by chance; empty if unknown", 0,
    ),
    Column("simulations", "int", "", "number of simulations of the requests"),
    WEIGHT_BYTES,
    Column("max_kv_tokens", "int", "tokens", "KV tokens that fit next to the weights of a replica", 0),
)  # fmt: skip
"""Columns of the results without those of the limits: one row per deployment."""


def capacity_columns(spec: CapacitySpec) -> tuple[Column, ...]:
    """Return the columns of a spec's results, with one for each percentile that has a limit."""
    limited = tuple(
        Column(
            limit.name, "float", "ms",
            f"at requests_per_s, at most {limit.most_ms:g}; empty if requests_per_s is 0", 0,
        )
        for limit in spec.limits.percentiles
    )  # fmt: skip
    return (*COLUMNS, *limited)
