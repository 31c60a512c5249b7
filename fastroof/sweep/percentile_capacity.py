"""The rate at which a deployment of a sweep keeps limits on a percentile of each time, by simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastroof.checks import shown
from fastroof.errors import FastroofError, SimulationError, SweepError
from fastroof.sweep.deployments import DeploymentSpec

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.simulation.capacity_search import CapacitySearch, Measurement, Simulate
    from fastroof.simulation.settings import EngineSettings
    from fastroof.simulation.steady import Run
    from fastroof.sweep.kind import GpuTables
    from fastroof.traces.trace import Trace
    from fastroof.traces.workload import Workload


LIMITED: Final = {"ttft_ms": "ttft", "tpot_ms": "tpot", "itl_ms": "itl", "request_latency_ms": "e2e"}
"""Limits on times, and the names of these times in simulations."""

TOLERANCE: Final = 0.01
"""Relative tolerance of a rate."""

ALMOST_NO_LOAD: Final = 1e-6
"""Requests/s at which a request never meets another."""

LEAST_REQUESTS: Final = 10_000
MOST_REQUESTS: Final = 40_000
REQUESTS_A_CLIENT: Final = 20
"""Requests to simulate by default for each in the system, so that the first and last ones weigh little."""


class PercentileCapacity(NamedTuple):
    """What a deployment serves while a percentile of each time keeps its limit.

    ``values_ms`` has the percentiles at that rate, by limit; ``clients`` is the mean number of requests in
    the system; ``requests`` how many were simulated; ``place`` is the rank by the closed form.
    """

    requests_per_s: float
    low: float
    high: float
    tokens_per_s_per_gpu: float
    limit: str
    place: int
    why_not: str = ""
    values_ms: Mapping[str, float] = {}
    clients: float = math.nan
    requests: int = 0
    sampling_error: float | None = None

    @property
    def relative_error(self) -> float | None:
        """Return half of the log range that the steps' error spans; None if unknown."""
        return math.log(self.high / self.low) / 2.0 if 0.0 < self.low < self.high else None


class Setting(NamedTuple):
    """Limits of an engine's steps; of separate workers also how many prefill."""

    max_num_batched_tokens: int
    max_num_seqs: int
    prefill_workers: int = 0


def checked_percentile(percentile: Any) -> float:
    """Return a percentile; raise if it is not one."""
    if isinstance(percentile, bool) or not isinstance(percentile, int | float) or not 0 < percentile <= 100:
        raise SweepError(f"percentile must be a number above 0 and up to 100, got {shown(percentile)}")
    return percentile


def percentile_limits(spec: DeploymentSpec, percentile: float) -> dict[str, float]:
    """Return the spec's limits on times as limits on a percentile, named as capacities name them."""
    checked_percentile(percentile)
    constraints = spec.constraints.model_dump()
    return {
        limit_name(name, percentile): constraints[name] for name in LIMITED if constraints[name] is not None
    }


def limit_name(constraint: str, percentile: float) -> str:
    """Return the name that a limit of a spec has among those of a capacity: ``ttft_p99_ms``."""
    from fastroof.simulation.capacity_search import limit_name as name_of

    return name_of(LIMITED[constraint], percentile)


def request_workload(row: Mapping[str, Any], requests: int, seed: int) -> Workload:
    """Return a Poisson workload in which all requests have a row's lengths."""
    from fastroof.traces.workload import Workload

    isl = int(row["isl"])
    cached = min(round(isl * row["prefix_hit"]), isl - 1)
    return Workload(
        rate=1.0, requests=requests, isl=isl, osl=int(row["osl"]), cached_tokens=cached,
        seed=seed,
    )  # fmt: skip


class SimulatedKind:
    """A kind of deployment, compiled once for every setting of its engine."""

    def __init__(
        self,
        spec: DeploymentSpec,
        row: dict[str, Any],
        tables_by_gpu: Mapping[str, GpuTables],
        limits: Mapping[str, float],
    ) -> None:
        from fastroof.sweep.deployments.evaluate import largest_plan
        from fastroof.sweep.unit_plans import Lost

        self.spec, self.row, self.limits = spec, row, limits
        self.key = spec.plan_key(row)
        self.tables = tables_by_gpu[self.key.gpu]
        plan = largest_plan(spec, self.key, self.tables)
        if isinstance(plan, Lost):
            raise SweepError(plan.message)
        self.plan: StepPlan = plan

    def engine_settings(self, setting: Setting) -> EngineSettings:
        """Return the engine's settings; its memory is that of these limits."""
        from fastroof.simulation.settings import EngineSettings

        tokens = self.row["isl"] + self.plan.profile.memory.osl_reserved * self.row["osl"]
        budget, seqs = self._limits(setting)
        return EngineSettings.of_plan(
            self.plan, kv_len=tokens, max_num_batched_tokens=budget, max_num_seqs=seqs
        )

    def _limits(self, setting: Setting) -> tuple[int, int]:
        """Return the tokens and the requests of a step; mixed steps have a token for each request."""
        budget, seqs = setting.max_num_batched_tokens, setting.max_num_seqs
        return budget, min(seqs, self.plan.profile.scheduling.largest_step(budget, seqs))

    def runner(self, setting: Setting) -> Simulate:
        """Return a function that simulates a trace on the whole deployment."""
        from fastroof.simulation.capacity_runs import fleet_runner
        from fastroof.simulation.pools import EnginePool, Link

        engine, row = self.engine_settings(setting), self.row
        replicas, link = [int(row["replicas"])], None
        if row["mode"] != "aggregated":
            workers = int(row["prefill_workers"] + row["decode_workers"])
            replicas = [setting.prefill_workers, workers - setting.prefill_workers]
            link = Link(self.spec.link_bytes_per_s)
        return fleet_runner([EnginePool(self.plan, engine, count) for count in replicas], link, 1)

    def search(self, setting: Setting, requests: int, seed: int, tolerance: float) -> CapacitySearch:
        """Return the search for the largest rate of a draw of requests."""
        from fastroof.simulation.capacity_search import CapacitySearch, parsed_limits
        from fastroof.simulation.engine import refuse_too_long
        from fastroof.simulation.steady import steady_run

        run = steady_run(request_workload(self.row, requests, seed), requests)
        refuse_too_long(run.trace, self.engine_settings(setting), "use more GPUs")
        limits = parsed_limits(self.limits, None, max(tolerance, 1.0 / math.sqrt(requests)))
        return CapacitySearch(run, limits, self.runner(setting), tolerance)

    def rate(self, setting: Setting, requests: int, seed: int, tolerance: float = 2 * TOLERANCE) -> float:
        """Return the largest rate of a setting; 0 if nothing is served within the limits."""
        try:
            return self.search(setting, requests, seed, tolerance).found().requests_per_s
        except SimulationError:
            return 0.0

    def serves(self, setting: Setting, per_s: float, requests: int, seed: int) -> bool:
        """Return whether a setting serves a rate within the limits."""
        try:
            search = self.search(setting, requests, seed, TOLERANCE)
            return search.limits.holds(self._seen(setting, search, per_s))
        except SimulationError:
            return False

    def capacity(self, setting: Setting, place: int, requests: int, seed: int) -> PercentileCapacity:
        """Return what a setting serves, and the effect of the steps' error."""
        lost = PercentileCapacity(math.nan, math.nan, math.nan, math.nan, "", place)
        try:
            if self.row["mode"] == "aggregated":
                most = self._aggregated(setting, requests, seed)
            else:
                most = self._disaggregated(setting, requests, seed)
        except FastroofError as error:
            return lost._replace(why_not=str(error))
        tokens_per_s = most.requests_per_s * self.row["osl"]
        per_gpu = tokens_per_s / self.row["total_gpus"]
        return most._replace(tokens_per_s_per_gpu=per_gpu, place=place, requests=requests)

    def _aggregated(self, setting: Setting, requests: int, seed: int) -> PercentileCapacity:
        """Ask for the capacity as anyone would."""
        from fastroof.plan import compile_plan
        from fastroof.simulation.capacity import capacity

        budget, seqs = self._limits(setting)
        key, tables, row = self.key, self.tables, self.row
        plan = compile_plan(
            self.plan.model, tables.gpu, tables.tables, dtype=row["dtype"], kv_dtype=row["kv_dtype"],
            engine=key.engine, curves=tables.curves, **self.spec.plan_options, **key.layout_options,
            **self.plan.profile.scheduling.plan_sizes(budget, seqs),
        )  # fmt: skip
        most = capacity(
            plan, request_workload(row, requests, seed), replicas=int(row["replicas"]), tolerance=TOLERANCE,
            max_num_batched_tokens=budget, max_num_seqs=seqs, **dict[str, Any](self.limits),
        )  # fmt: skip
        return PercentileCapacity(
            most.requests_per_s, most.low, most.high, math.nan, most.limit, 0, values_ms=most.at_capacity,
            sampling_error=most.sampling_error,
        )  # fmt: skip

    def _disaggregated(self, setting: Setting, requests: int, seed: int) -> PercentileCapacity:
        """Search as a capacity does; one standard error of the steps changes transfers as much."""
        from fastroof.simulation.step_range import step_error

        search = self.search(setting, requests, seed, TOLERANCE)
        found, row = search.found(), self.row
        measured = search.measured_at(found)
        error = step_error(self.plan, measured.decodes, row["isl"] + row["osl"] / 2.0)
        low = high = found.requests_per_s
        if error.is_known:
            faster, slower = error.time_scales
            low = min(search.found(slower).requests_per_s, low)
            high = max(search.found(faster).requests_per_s, high)
        values = search.limits.by_name(measured if found.requests_per_s else None)
        return PercentileCapacity(
            found.requests_per_s, low, high, math.nan, found.limit, 0, values_ms=values,
            sampling_error=search.sampling_error(found),
        )  # fmt: skip

    def means_ms(self, setting: Setting, per_s: float, requests: int, seed: int) -> dict[str, float]:
        """Return the mean times of requests at a rate, ms, by the columns of a row."""
        from fastroof.simulation.requests import RequestTimes
        from fastroof.simulation.steady import steady_run

        run = steady_run(request_workload(self.row, requests, seed), requests)
        trace = _at_rate(run, per_s)
        times = RequestTimes.of(trace, self.runner(setting)(trace, 1.0)).of_places(run.counted)
        columns = {"ttft_ms": "ttft_ms", "tpot_ms": "tpot_ms", "request_latency_ms": "e2e_ms"}
        return {
            column: float(values.mean()) if len(values := times.of_finished(name)) else math.nan
            for column, name in columns.items()
        }

    def values_ms(self, setting: Setting, per_s: float, requests: int, seed: int) -> dict[str, float]:
        """Return the limited percentiles at a rate, ms, by limit."""
        search = self.search(setting, requests, seed, TOLERANCE)
        return search.limits.by_name(self._seen(setting, search, per_s))

    def _seen(self, setting: Setting, search: CapacitySearch, per_s: float) -> Measurement:
        """Return what a search measures at a rate."""
        trace = _at_rate(search.run, per_s)
        return search.limits.measure(trace, self.runner(setting)(trace, 1.0), search.run.counted)


def _at_rate(run: Run, per_s: float) -> Trace:
    """Return the requests of a run at a rate, as a capacity counts it."""
    return run.trace.rate_scaled(per_s / run.per_s)


def weight(spec: DeploymentSpec, row: Mapping[str, Any]) -> float:
    """Return the divisor that turns requests per second into the spec's objective."""
    if spec.objective == "goodput":
        return 1.0
    price = spec.price(row["gpu"]) if spec.objective == "cost" else None
    return float(row["total_gpus"]) * (price or 1.0)
