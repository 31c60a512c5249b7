"""Deployments judged by a replayed trace: each is simulated as `fastroof simulate` would, at a load."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from fastroof.checks import check_flag, shown
from fastroof.config import load_gpu
from fastroof.engines import load_engine
from fastroof.errors import FastroofError, SweepError
from fastroof.models import load_model
from fastroof.models.execution import AUTO as ANY_ROUTING
from fastroof.sweep.deployments import DeploymentSpec
from fastroof.sweep.kinds import load_deployment_spec
from fastroof.sweep.percentile_capacity import PercentileCapacity, Setting, checked_percentile
from fastroof.sweep.percentile_search import LEAST_KINDS, Leader, PercentileSearch, row_at

if TYPE_CHECKING:
    from fastroof.engines.scheduling import Scheduling
    from fastroof.simulation import Fleet, Simulation
    from fastroof.simulation.capacity_search import Limits
    from fastroof.sweep.kind import GpuTables
    from fastroof.traces.trace import Trace

MOST_TOKENS: Final = 2**34
"""Output tokens that a search simulates, in two or three minutes: fewer deployments for longer traces."""

SIMULATIONS: Final = 16
"""Simulations to find the largest load of a deployment."""

LOWEST_SHARE: Final = 2.0**-12
"""Share of a trace's rate at which its requests, or sessions, hardly meet."""


@dataclass(frozen=True)
class Replay:
    """The requests that deployments are judged by: a trace, once, of which all requests count.

    Parameters
    ----------
    trace : Trace or what :func:`fastroof.load_trace` takes
        The requests.
    rate : float, optional
        Requests/s, or sessions/s of a trace with sessions, that deployments must serve within the limits; by
        default they are compared at the most that each serves.
    clients : int, optional
        Clients of a closed loop, instead of arrivals: each has one session, or request, after the other.
    sessions : bool, default False
        Whether the load is the most clients, each with a session open, instead of the highest rate.
    router, prefix_cache, kv_tiers
        As of a :class:`fastroof.Pool`; for separate workers of those that prefill.

    Raises
    ------
    SweepError
        If more than one load is given.
    TraceError
        If the load is invalid, or one that the trace cannot have.
    """

    trace: Any
    rate: float | None = None
    clients: int | None = None
    sessions: bool = False
    router: str = "round_robin"
    prefix_cache: str = "auto"
    kv_tiers: Any = None

    def __post_init__(self) -> None:
        from fastroof.simulation.session_runs import at_load
        from fastroof.traces.trace import Trace
        from fastroof.traces.trace_files import load_trace

        check_flag("sessions", self.sessions, SweepError)
        loads = {"rate": self.rate, "clients": self.clients, "sessions": self.sessions or None}
        given = [name for name, value in loads.items() if value is not None]
        if len(given) > 1:
            raise SweepError(f"a replay has one load, got {' and '.join(given)}")
        trace = self.trace if isinstance(self.trace, Trace) else load_trace(self.trace)
        object.__setattr__(self, "trace", trace)
        if trace.is_closed:
            raise SweepError(f"trace {shown(trace.name)} has clients: give their number to the replay")
        at_load(trace, self.rate, self.clients)  # refuses a load that the trace cannot have

    @property
    def osl(self) -> int:
        """Mean output tokens."""
        return max(round(float(self.trace.output_tokens.mean())), 1)

    def isl(self, percentile: float | None = None) -> int:
        """Return a percentile of the tokens of prompts, or their mean."""
        import numpy as np

        prompts, at = self.trace.input_tokens, None if percentile is None else checked_percentile(percentile)
        return round(float(prompts.mean() if at is None else np.percentile(prompts, at)))

    @cached_property
    def most_hits(self) -> float:
        """Share of prompts that a cache would find which never loses a block."""
        from fastroof.traces.prompt_tree import GIVEN, prompt_tree, source_of_hits

        trace: Trace = self.trace
        prompts = float(trace.input_tokens.sum(dtype=float))
        if source_of_hits(trace, self.prefix_cache, self.router) == GIVEN:
            return float(trace.cached_tokens.sum(dtype=float)) / prompts
        if trace.hash_ids is not None:
            size = trace.hash_block_size
            segments = prompt_tree(trace, size).segments
            distinct = int((segments["stop"] - segments["start"]).sum())
            return (int((trace.input_tokens // size).sum()) - distinct) * size / prompts
        return 0.0 if trace.history_tokens is None else float(trace.history_tokens.sum(dtype=float)) / prompts

    @property
    def is_closed(self) -> bool:
        """Whether clients of a closed loop send the requests."""
        return self.sessions or self.clients is not None

    @property
    def requests_each(self) -> float:
        """Mean requests of a session; 1 without sessions."""
        from fastroof.simulation.session_runs import requests_per_session

        return requests_per_session(self.trace) or 1.0

    def bounds(self, spec: DeploymentSpec) -> list[DeploymentSpec]:
        """Return specs whose closed form bounds what deployments serve: nothing cached is ever lost."""
        if (spec.isl, spec.osl) != ((self.isl(),), (self.osl,)):
            raise SweepError(
                f"isl and osl of a specification must be the means of the replay, {self.isl()} and {self.osl}"
            )
        hits = min(self.most_hits, 0.999)
        ways = "prefill_workers", "decode_workers", "max_num_batched_tokens"
        given = {"per": list(dict.fromkeys([*spec.per, *ways]))}
        changes: dict[str, dict[str, Any]] = {
            "aggregated": {"prefix_hit": hits},
            # the closed form of separate workers knows no prefix cache
            "disaggregated": {"isl": max(round(self.isl() * (1.0 - hits)), 1)},
        }
        return [load_deployment_spec(spec, {**given, "mode": mode, **changes[mode]}) for mode in spec.mode]

    def check(self, percentile: float | None, why_mean: str) -> None:
        """Raise if deployments of a spec cannot be ranked by simulations of the trace."""
        if percentile is None:
            raise SweepError("a replay applies limits to a percentile: leave out mean (percentile=None)")
        if why_mean:
            raise SweepError(f"a replay needs limits on times and an objective of throughput: {why_mean}")

    @property
    def load_words(self) -> str:
        """Name the load that deployments are compared at."""
        if self.clients is not None:
            return f"{self.clients:,} {self._noun} at once"
        if self.rate is not None:
            return f"{self.rate:,.4g} {self._noun}/s"
        return f"the most {self._noun} at once" if self.sessions else f"the highest rate of {self._noun}"

    @property
    def _noun(self) -> str:
        return "sessions" if self.trace.has_parents else "requests"


class ReplayedKind:
    """A deployment that serves the trace, with the fleet that `fastroof simulate` makes of its options."""

    def __init__(
        self,
        spec: DeploymentSpec,
        row: dict[str, Any],
        tables_by_gpu: Mapping[str, GpuTables],
        replay: Replay,
        limits: Mapping[str, float],
    ) -> None:
        from fastroof.simulation import Fleet, Link, Pool
        from fastroof.simulation.capacity_search import parsed_limits
        from fastroof.sweep.deployments.evaluate import drafts_of
        from fastroof.sweep.unit_plans import Lost, unit_plan

        rate = None if replay.rate is None else replay.rate * replay.requests_each
        self.spec, self.replay = spec, replay
        self.row = {**row, "request_rate_per_s": rate}
        self.options: dict[str, Any] = dict(limits)
        self.limits: Limits = parsed_limits(limits, None, math.inf)
        key, drafts = spec.plan_key(row), spec.speculation
        tables = tables_by_gpu[key.gpu]
        own = load_engine(key.engine).on(tables.gpu, load_model(key.model).ranks(key.dp)).scheduling
        given = limits_apart(own, row)
        tokens, seqs, _ = own.step_limits(*given.values())
        sizes = own.plan_sizes(tokens, seqs, 0 if drafts is None else drafts.num_draft_tokens)
        plan = unit_plan(spec, key, tables, **sizes)
        if isinstance(plan, Lost):
            raise SweepError(plan.message)
        settings: dict[str, Any] = {**given, "speculation": drafts_of(spec, plan, key, tables)}
        caches: dict[str, Any] = {"prefix_cache": replay.prefix_cache, "kv_tiers": replay.kv_tiers}
        if row["mode"] == "aggregated":
            self.fleet: Fleet = Fleet([Pool(plan, row["replicas"], **caches, **settings)], replay.router)
        else:
            pools = (
                Pool(plan, row["prefill_workers"], **caches, **settings),
                Pool(plan, row["decode_workers"], **settings),
            )
            self.fleet = Fleet(pools, replay.router, Link(spec.link_bytes_per_s))

    def most(self, *, with_range: bool) -> PercentileCapacity:
        """Return what the deployment serves within the limits; 0 requests/s if it does not."""
        from fastroof.simulation.capacity import capacity
        from fastroof.simulation.capacity_search import NO_LIMIT
        from fastroof.simulation.most_sessions import most_sessions

        replay, gpus = self.replay, self.row["total_gpus"]
        if replay.clients is not None:
            return self._at_clients(replay.clients, with_range=with_range)
        if replay.sessions:
            found = most_sessions(self.fleet, replay.trace, with_range=with_range, **self.options)
            if not found.sessions:
                return PercentileCapacity(0.0, 0.0, 0.0, 0.0, found.limit, 0)
            most = self._at_clients(found.sessions, with_range=False)
            each = most.requests_per_s / found.sessions
            return most._replace(low=found.low * each, high=found.high * each, limit=found.limit)
        rate = capacity(self.fleet, replay.trace, steady=False, with_range=with_range, **self.options)
        seen = rate.seen.get(math.inf if rate.limit == NO_LIMIT else rate.requests_per_s)
        tokens_per_s = 0.0 if seen is None else seen.served_per_s * float(replay.trace.output_tokens.mean())
        return PercentileCapacity(
            rate.requests_per_s, rate.low, rate.high, tokens_per_s / gpus, rate.limit, 0,
            values_ms=rate.at_capacity, requests=len(replay.trace),
        )  # fmt: skip

    def _at_clients(self, clients: int, *, with_range: bool) -> PercentileCapacity:
        """Return what so many clients get; 0 requests/s if it is not within the limits."""
        sim = self.simulated(clients=clients)
        measured = self.limits.measure(sim.trace, sim.outcomes)
        answers = sim.summary(with_range=False)
        per_s, tokens_per_s = answers["requests_per_s"], answers["output_tokens_per_s"]
        low = high = per_s
        if with_range and sim.step_error.is_known:
            high, low = (
                self.simulated(clients=clients, time_scale=scale).summary(with_range=False)["requests_per_s"]
                for scale in sim.step_error.time_scales
            )
        shares = {
            limit.name: value / limit.most_ms
            for limit, value in zip(self.limits.percentiles, measured.values_ms, strict=True)
        }
        holds = self.limits.holds(measured)
        return PercentileCapacity(
            per_s if holds else 0.0, min(low, per_s), max(high, per_s),
            tokens_per_s / self.row["total_gpus"], max(shares, key=lambda name: shares[name]), 0,
            values_ms=self.limits.by_name(measured), clients=float(clients), requests=len(sim),
        )  # fmt: skip

    def simulated(self, *, time_scale: float = 1.0, **load: Any) -> Simulation:
        """Simulate the trace at a load: a rate, or clients."""
        from fastroof.simulation import simulate
        from fastroof.simulation.session_runs import at_load

        return simulate(self.fleet, at_load(self.replay.trace, **load), time_scale=time_scale)

    def values_ms(self, *_: Any) -> dict[str, float]:
        """Return the limited percentiles at the load that was given to the replay, or hardly any."""
        from fastroof.simulation.session_runs import mean_rate

        replay = self.replay
        load: dict[str, Any] = {"clients": replay.clients or 1}
        if not replay.is_closed:
            load = {"rate": replay.rate or mean_rate(replay.trace) / replay.requests_each * LOWEST_SHARE}
        sim = self.simulated(**load)
        return self.limits.by_name(self.limits.measure(sim.trace, sim.outcomes))


def limits_apart(own: Scheduling, row: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the limits of a row's steps; None for the engine's own."""
    names = "max_num_batched_tokens", "max_num_seqs"
    return {name: row[name] if row[name] != getattr(own, name) else None for name in names}


def simulate_options(spec: DeploymentSpec, row: Mapping[str, Any], replay: Replay) -> dict[str, Any]:
    """Return the options with which `fastroof simulate` replays the trace on the deployment of a row."""
    from fastroof.simulation.capacity_search import printed_rate
    from fastroof.units import GB

    key, drafts = spec.plan_key(row), spec.speculation
    own = load_engine(key.engine).on(load_gpu(key.gpu), load_model(key.model).ranks(key.dp)).scheduling
    sizes = {name: row[name] for name in ("pp", "dp", "ep") if row[name] > 1}
    routing = None if key.routing == ANY_ROUTING else key.routing
    options = {"model": key.model, "gpu": key.gpu, "tp": key.tp, **sizes, "routing": routing}
    options |= {name: getattr(key, name) for name in ("dtype", "kv_dtype", "engine")}
    options |= {name: getattr(spec, name) for name in ("tables", "front_end", "lora", "allow_modelled")}
    options |= limits_apart(own, row)
    if row["mode"] == "aggregated":
        options["replicas"] = row["replicas"]
    else:
        link = spec.link_bytes_per_s
        options |= {"prefill_replicas": row["prefill_workers"], "decode_replicas": row["decode_workers"]}
        options |= {"kv_bandwidth": None if link is None else link / GB}
    if drafts is not None:
        accepted = drafts.accepted
        options |= {
            "num_draft_tokens": drafts.num_draft_tokens,
            "accepted": ",".join(map(str, accepted)) if isinstance(accepted, tuple) else accepted,
            "draft": drafts.drafter,
        }
    if drafts is not None and drafts.draft_model is not None:
        options["draft"] += f",tp={drafts.draft_tp or key.tp},dtype={drafts.draft_dtype}"
    if replay.is_closed:
        options["clients"] = int(row["clients"])
    else:
        options["rate"] = replay.rate or printed_rate(row["requests_per_s"] / replay.requests_each)
    return {name: value for name, value in options.items() if value is not None and value is not False}


class ReplaySearch(PercentileSearch):
    """Ranks the deployments of a spec by simulations of a trace, those that the closed form likes first."""

    def __init__(
        self,
        spec: DeploymentSpec,
        tables_by_gpu: Mapping[str, GpuTables],
        percentile: float,
        replay: Replay,
        threads: int,
        progress: Any = None,
    ) -> None:
        super().__init__(spec, tables_by_gpu, percentile, None, 0, threads, progress)
        self.replay = replay
        each = 1 if replay.clients is not None else SIMULATIONS
        tokens = each * int(replay.trace.output_tokens.sum(dtype=int))
        self.most_kinds = max(MOST_TOKENS // tokens, LEAST_KINDS)

    def found(self, rows: Sequence[dict[str, Any]], least: int) -> Any:
        """Rank deployments, as for requests at random; say so if the trace is too long for all of them."""
        if len(rows) > self.most_kinds:
            warnings.warn(
                f"{len(self.replay.trace):,} requests take long to replay: of {len(rows):,} deployments up "
                f"to {self.most_kinds} are simulated, those that the closed form ranks first; limit takes "
                "the first requests only",
                stacklevel=2,
            )
        self.lost.clear()
        found = super().found(rows, least)
        if self.lost and not found.simulated:
            raise SweepError(min(self.lost))
        return found

    def _simulated_kind(self, question: tuple[dict[str, Any], int]) -> Any:
        row, place = question
        try:
            kind: Any = ReplayedKind(self.spec, row, self._tables_by_gpu, self.replay, self.limits)
            most = kind.most(with_range=False)
        except FastroofError as error:
            # such as a request that has no room
            self.lost.append(str(error))
            return None, None, 0
        setting = Setting(row["max_num_batched_tokens"], row["max_num_seqs"], row["prefill_workers"])
        # what it serves over the replay: a short burst may come at any rate
        served_per_s = most.tokens_per_s_per_gpu * row["total_gpus"] / row["osl"]
        return kind, Leader(kind, setting, served_per_s, place) if most.requests_per_s else None, 1

    def _capacity(self, leader: Leader) -> PercentileCapacity:
        kind: Any = leader.kind
        most: PercentileCapacity = kind.most(with_range=True)
        return most._replace(place=leader.place)

    def _row(self, leader: Leader, most: PercentileCapacity) -> tuple[dict[str, Any], PercentileCapacity]:
        """Return a deployment's row at its load, with the figures that `fastroof simulate` prints."""
        from fastroof.simulation.capacity_search import printed_rate

        kind: Any = leader.kind
        rate = self.replay.rate or printed_rate(most.requests_per_s / self.replay.requests_each)
        load = {"clients": int(most.clients)} if self.replay.is_closed else {"rate": rate}
        sim = kind.simulated(**load)
        answers = sim.summary(with_range=False)
        names = {"ttft_ms": "ttft_ms", "tpot_ms": "tpot_ms", "request_latency_ms": "e2e_ms"}
        means = {column: answers[name]["mean"] for column, name in names.items()}
        tokens, per_s = answers["output_tokens_per_s"], answers["requests_per_s"]
        if "rate" in load:
            per_s = load["rate"] * self.replay.requests_each
        clients = load.get("clients", per_s * means["request_latency_ms"] / 1e3)
        row = row_at(self.spec, kind.row, means, per_s, tokens, clients)
        row |= {
            "effective_concurrency": answers["running"]["mean"],
            "kv_share": answers["kv_use"]["mean"],
            "relative_error": answers.get("relative_error"),
            "prefix_hit": answers.get("prefix_cache", {"hit_rate": self.replay.most_hits})["hit_rate"],
        }
        values = kind.limits.by_name(kind.limits.measure(sim.trace, sim.outcomes))
        return row, most._replace(values_ms=values, clients=float(clients))

    def _least_ms(self, kind: Any) -> dict[str, float]:
        values: dict[str, float] = kind.values_ms()
        return values
