"""Capacity of a sweep's deployments when a percentile of each time must keep the limit on its mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastroof.checks import shown
from fastroof.errors import FastroofError, SweepError
from fastroof.sweep.deployments import DeploymentSpec

if TYPE_CHECKING:
    from fastroof.simulation.workload import Workload
    from fastroof.sweep.kind import GpuTables


_LIMITS: Final = {"ttft_ms": "ttft", "tpot_ms": "tpot", "request_latency_ms": "e2e"}
"""Constraints on means, and the names of these times in simulations."""


class PercentileCapacity(NamedTuple):
    """Capacity of a deployment when a percentile of each time must keep the limit on its mean."""

    requests_per_s: float
    low: float
    high: float
    tokens_per_s_per_gpu: float
    limit: str
    place: int
    why_not: str = ""

    @property
    def relative_error(self) -> float | None:
        """Return half of the log range that the steps' error spans; None if unknown."""
        return math.log(self.high / self.low) / 2.0 if 0.0 < self.low < self.high else None


def percentile_limits(spec: DeploymentSpec, percentile: float) -> dict[str, float]:
    """Return the spec's limits on means as limits on a percentile, named as capacities name them."""
    if isinstance(percentile, bool) or not isinstance(percentile, int | float) or not 0 < percentile <= 100:
        raise SweepError(f"percentile must be a number above 0 and up to 100, got {shown(percentile)}")
    digits = f"{percentile:.3f}".rstrip("0").rstrip(".").replace(".", "_")
    constraints = spec.constraints.model_dump()
    limits = {
        f"{what}_p{digits}_ms": constraints[name]
        for name, what in _LIMITS.items()
        if constraints[name] is not None
    }
    if not limits:
        raise SweepError(
            f"percentile {percentile:g} needs a limit: set ttft_ms, tpot_ms or request_latency_ms in the "
            "spec's constraints"
        )
    return limits


def request_workload(row: Mapping[str, Any], requests: int, seed: int) -> Workload:
    """Return a Poisson workload in which all requests have a row's lengths."""
    from fastroof.simulation.workload import Workload

    isl = int(row["isl"])
    cached = min(round(isl * row["prefix_hit"]), isl - 1)
    return Workload(
        rate=1.0, requests=requests, input_tokens=isl, output_tokens=int(row["osl"]), cached_tokens=cached,
        seed=seed,
    )  # fmt: skip


def percentile_capacity(
    spec: DeploymentSpec,
    row: Mapping[str, Any],
    place: int,
    tables_by_gpu: Mapping[str, GpuTables],
    limits: Mapping[str, float],
    requests: int,
    seed: int,
) -> PercentileCapacity:
    """Simulate to find the capacity of one deployment."""
    lost = PercentileCapacity(math.nan, math.nan, math.nan, math.nan, "", place)
    if row["mode"] != "aggregated":
        return lost._replace(why_not="disaggregated deployments are not simulated")
    if row["num_draft_tokens"]:
        return lost._replace(why_not="draft tokens are not simulated")
    try:
        most = _capacity(spec, row, tables_by_gpu, limits, requests, seed)
    except FastroofError as error:
        return lost._replace(why_not=str(error))
    tokens_per_s = most.requests_per_s * row["osl"]
    return PercentileCapacity(
        most.requests_per_s, most.low, most.high, tokens_per_s / row["total_gpus"], most.limit, place
    )


def _capacity(
    spec: DeploymentSpec,
    row: Mapping[str, Any],
    tables_by_gpu: Mapping[str, GpuTables],
    limits: Mapping[str, float],
    requests: int,
    seed: int,
) -> Any:
    from fastroof.config import load_gpu
    from fastroof.engines import load_engine
    from fastroof.models import load_model
    from fastroof.models.execution import ROUTING
    from fastroof.plan import compile_plan
    from fastroof.simulation.capacity import capacity
    from fastroof.sweep.units import NO_ROUTING

    gpu, tables = next(
        (gpu, tables) for gpu, tables in tables_by_gpu.items() if load_gpu(gpu).name == row["gpu"]
    )
    model = next(load_model(name) for name in spec.models if load_model(name).name == row["model"])
    engine = next(name for name in spec.engine if load_engine(name).name == row["engine"])
    budget = int(row["max_num_batched_tokens"])
    # a step needs one token for each running request
    seqs = min(int(row["max_num_seqs"]), budget)
    plan = compile_plan(
        model, gpu, tables.tables, tp=row["tp"], pp=row["pp"], dp=row["dp"], ep=row["ep"],
        routing=ROUTING if row["routing"] == NO_ROUTING else row["routing"], dtype=row["dtype"],
        kv_dtype=row["kv_dtype"], engine=engine, method=spec.method, max_tokens=budget, max_seqs=seqs,
        curves=tables.curves, allow_modelled=spec.allow_modelled,
    )  # fmt: skip
    return capacity(
        plan, request_workload(row, requests, seed), replicas=int(row["replicas"]),
        max_num_batched_tokens=budget, max_num_seqs=seqs, block_size=None, **dict[str, Any](limits),
    )  # fmt: skip


def weights(spec: DeploymentSpec, rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the divisor that turns requests per second into the spec's objective."""
    if spec.objective == "tokens_per_s_per_user":
        raise SweepError(
            "objective 'tokens_per_s_per_user' does not depend on how many requests are served: with a "
            "percentile use 'tokens_per_s_per_gpu', 'goodput' or 'cost'"
        )
    if spec.objective == "goodput":
        return [1.0] * len(rows)
    prices = [spec.price(row["gpu"]) if spec.objective == "cost" else 1.0 for row in rows]
    return [row["total_gpus"] * (price or 1.0) for row, price in zip(rows, prices, strict=True)]


def ranked_anew(
    capacities: Sequence[PercentileCapacity], divided_by: Sequence[float], rates: Sequence[float | None]
) -> list[int]:
    """Order deployments by their capacity within the percentile."""

    def order(place: int) -> tuple[bool, bool, float, int]:
        most = capacities[place]
        if most.why_not:
            return True, True, 0.0, place
        requested = rates[place]
        misses = requested is not None and most.requests_per_s < requested
        return False, misses, -most.requests_per_s / divided_by[place], place

    return sorted(range(len(capacities)), key=order)
