"""The best of a sweep's deployments within a percentile: the closed form's leaders, simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from fastroof.config import load_gpu
from fastroof.errors import FastroofError
from fastroof.models import TP_SIZES
from fastroof.sweep.answers import complexity
from fastroof.sweep.deployments import DeploymentSpec, DeploymentSweep
from fastroof.sweep.percentile_capacity import (
    ALMOST_NO_LOAD,
    LEAST_REQUESTS,
    MOST_REQUESTS,
    REQUESTS_A_CLIENT,
    TOLERANCE,
    PercentileCapacity,
    Setting,
    SimulatedKind,
    percentile_limits,
    weight,
)
from fastroof.units import SECONDS_PER_HOUR

if TYPE_CHECKING:
    from fastroof.sweep.kind import GpuTables

SCREENED_REQUESTS: Final = 2000
SCREENED_SHARE: Final = 4
"""Kinds and settings are compared by a share of the requests, at least that many; the best by all."""

LEAST_KINDS: Final = 8
"""Minimum number of kinds to simulate."""

MOST_KINDS: Final = 64
"""Maximum number of kinds to simulate."""

FEW: Final = 2
"""Kinds of each family to simulate even if others serve more."""

BATCH: Final = 4
"""Kinds that are simulated together; a constant, so that any number of threads gives the same answer."""

BOUND_MARGIN: Final = 1.25
"""Factor on the closed form's rate within limits on means, which no percentile of the kind should exceed."""

FAMILIES: Final = ("aggregated", "experts_across_nodes", "stages_across_nodes", "disaggregated")
"""Ways to deploy a model, the first of which the others are compared with: replicas within a node."""

STEP: Final = 2 * TOLERANCE
"""Gain from which a setting counts as better than another."""

_T = TypeVar("_T")
_R = TypeVar("_R")


class Leader(NamedTuple):
    """A kind of deployment with its best setting."""

    kind: SimulatedKind
    setting: Setting
    rate: float
    place: int


class Found(NamedTuple):
    """Deployments within a percentile, as rows at the rate that each serves; how many were simulated.

    ``nearest`` has the row and percentiles, ms, of the kind that comes closest if none keeps the limits.
    """

    served: tuple[tuple[dict[str, Any], PercentileCapacity], ...]
    simulated: int
    nearest: tuple[dict[str, Any], dict[str, float]] | None


class PercentileSearch:
    """Searches the kinds of a spec for the largest rate, per GPU or cost, within limits on a percentile."""

    def __init__(
        self,
        spec: DeploymentSpec,
        tables_by_gpu: Mapping[str, GpuTables],
        percentile: float,
        requests: int | None,
        seed: int,
        threads: int,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> None:
        self.spec, self.seed, self.threads = spec, seed, threads
        self._progress, self._done, self._known = progress, 0, 0
        self._given_requests = requests
        self.most_kinds = MOST_KINDS
        self.lost: list[str] = []
        self.requests = self._screened = 0
        self._tables_by_gpu = tables_by_gpu
        self.percentile = percentile
        self.limits = percentile_limits(spec, percentile)

    def found(self, rows: Sequence[dict[str, Any]], least: int) -> Found:
        """Rank the kinds of some rows, the best by the closed form first; at least ``least`` of them."""
        clients = max((row["clients"] for row in rows[:LEAST_KINDS]), default=0.0)
        enough = min(max(LEAST_REQUESTS, math.ceil(REQUESTS_A_CLIENT * clients)), MOST_REQUESTS)
        self.requests = enough if self._given_requests is None else self._given_requests
        self._screened = min(self.requests, max(SCREENED_REQUESTS, enough // SCREENED_SHARE))
        self._expect(min(len(rows), max(LEAST_KINDS, 2 * least)) + least)
        leaders, simulated, nearest = self._leaders(rows, least)
        ranked_leaders = self._by_value(leaders)
        # and the best of each family, whose distance is part of the answer, and simpler ones, which may tie
        placed = [(at, one.kind.row) for at, one in enumerate(ranked_leaders)]
        firsts: dict[Any, int] = {family_of(self.spec, row): at for at, row in reversed(placed)}
        firsts |= {
            of: at for at, row in reversed(placed) if (of := complexity(row)) < complexity(placed[0][1])
        }
        top = [one for at, one in enumerate(ranked_leaders) if at < least or at in firsts.values()]
        self._known = self._done
        self._expect(len(top))
        capacities = self._mapped(self._capacity, top)
        served = []
        for leader, most in zip(top, capacities, strict=True):
            requested = leader.kind.row["request_rate_per_s"]
            if most.why_not or (most.requests_per_s > 0.0 and most.requests_per_s >= (requested or 0.0)):
                served.append(self._row(leader, most))
            elif requested is not None and nearest is None:
                values = leader.kind.values_ms(leader.setting, requested, self.requests, self.seed)
                nearest = leader.kind.row, values
        self._report(is_end=True)
        return Found(tuple(served), simulated, nearest)

    def _leaders(
        self, rows: Sequence[dict[str, Any]], least: int
    ) -> tuple[list[Leader], int, tuple[dict[str, Any], dict[str, float]] | None]:
        """Simulate kinds until none of the others could serve more by the closed form."""
        bounds = [row["requests_per_s"] / weight(self.spec, row) for row in rows]
        # at a given rate, the closed form says nothing about how much more a deployment serves
        is_rate = self.spec.rate is not None
        leaders: list[Leader] = []
        failed: list[SimulatedKind] = []
        simulated = 0

        def simulate(batch: Sequence[int]) -> None:
            nonlocal simulated
            self._expect(len(batch) + least)
            for kind, leader, tried in self._mapped(
                self._simulated_kind, [(rows[at], at + 1) for at in batch]
            ):
                simulated += tried
                if leader is not None:
                    leaders.append(leader)
                elif kind is not None:
                    failed.append(kind)

        families = [family_of(self.spec, row) for row in rows]
        done = 0
        while done < min(len(rows), self.most_kinds):
            batch = range(done, min(done + BATCH, len(rows)))
            enough = done >= max(LEAST_KINDS, 2 * least)
            if enough and is_rate and sum(self._is_enough(one) for one in leaders) >= least:
                break
            best = max((self._value(one) for one in leaders), default=0.0)
            if enough and not is_rate and max(bounds[place] for place in batch) * BOUND_MARGIN < best:
                break
            simulate(batch)
            done = batch.stop
        for name in dict.fromkeys(families):
            of_family = [place for place, other in enumerate(families) if other == name]
            simulate([place for place in of_family[:FEW] if place >= done])
        return leaders, simulated, self._nearest(failed) if failed and not leaders else None

    def _simulated_kind(
        self, question: tuple[dict[str, Any], int]
    ) -> tuple[SimulatedKind | None, Leader | None, int]:
        """Find a kind's best setting by moving from the closed form's along both limits of a step."""
        row, place = question
        try:
            kind = SimulatedKind(self.spec, row, self._tables_by_gpu, self.limits)
        except FastroofError:
            return None, None, 0
        steps = Settings.of(self.spec, kind)
        at = steps.start(row)
        tried = {at: kind.rate(steps.setting(at), self._screened, self.seed)}
        moved = True
        while moved:
            moved = False
            for move in MOVES:
                while (to := steps.moved(at, move)) is not None and to not in tried:
                    setting, enough = steps.setting(to), tried[at] * (1.0 + STEP)
                    if enough and not kind.serves(setting, enough, self._screened, self.seed):
                        tried[to] = 0.0
                        break
                    tried[to] = kind.rate(setting, self._screened, self.seed)
                    if tried[to] <= enough:
                        break
                    at, moved = to, True
        leader = Leader(kind, steps.setting(at), tried[at], place) if tried[at] else None
        return kind, leader, len(tried)

    def _capacity(self, leader: Leader) -> PercentileCapacity:
        return leader.kind.capacity(leader.setting, leader.place, self.requests, self.seed)

    def _value(self, leader: Leader) -> float:
        return leader.rate / weight(self.spec, leader.kind.row)

    def _is_enough(self, leader: Leader) -> bool:
        return leader.rate >= (leader.kind.row["request_rate_per_s"] or 0.0)

    def _by_value(self, leaders: Iterable[Leader]) -> list[Leader]:
        if self.spec.rate is None:
            return sorted(leaders, key=lambda one: (-self._value(one), one.place))
        # those that serve the rate as the closed form has them, by what they cost at it
        return sorted(
            leaders,
            key=lambda one: (one.place, 0.0) if self._is_enough(one) else (math.inf, -self._value(one)),
        )

    def _row(self, leader: Leader, most: PercentileCapacity) -> tuple[dict[str, Any], PercentileCapacity]:
        """Return a leader's row at its rate: times are means of the simulated requests."""
        row, requested = leader.kind.row, leader.kind.row["request_rate_per_s"]
        if most.why_not:
            return row, most
        per_s = most.requests_per_s if requested is None else requested
        at = (leader.setting, per_s, self.requests, self.seed)
        if requested is not None:
            most = most._replace(values_ms=leader.kind.values_ms(*at))
        means = leader.kind.means_ms(*at)
        clients = per_s * means["request_latency_ms"] / 1e3
        alike = _at_load(self.spec, row, leader.setting, clients, self._tables_by_gpu)
        row = row_at(self.spec, alike, means, per_s, per_s * row["osl"], clients)
        return row, most._replace(clients=clients)

    def _nearest(self, failed: Sequence[SimulatedKind]) -> tuple[dict[str, Any], dict[str, float]] | None:
        """Return the kind whose worst percentile is least above its limit with hardly any load."""
        found = []
        for kind in failed:
            with suppress(FastroofError):
                found.append((kind.row, self._least_ms(kind)))
        worst = [max(value / self.limits[name] for name, value in values.items()) for _, values in found]
        return found[worst.index(min(worst))] if found else None

    def _least_ms(self, kind: SimulatedKind) -> dict[str, float]:
        steps = Settings.of(self.spec, kind)
        return kind.values_ms(steps.setting(steps.start(kind.row)), ALMOST_NO_LOAD, self._screened, self.seed)

    def _mapped(self, function: Callable[[_T], _R], values: Sequence[_T]) -> list[_R]:
        with ThreadPoolExecutor(self.threads) if self.threads > 1 else nullcontext() as pool:
            results = []
            for result in (map if pool is None else pool.map)(function, values):
                results.append(result)
                self._done += 1
                self._report(is_end=False)
            return results

    def _expect(self, more: int) -> None:
        """Report that at least so many more deployments are simulated; the best ones are twice."""
        self._known = max(self._known, self._done + more)
        self._report(is_end=False)

    def _report(self, *, is_end: bool) -> None:
        if self._progress is not None:
            # the last one ends with the ranking
            done = self._done if is_end else max(min(self._done, self._known - 1), 0)
            self._progress(done, self._known, "deployments simulated")


MOVES: Final = (
    (0, 1, 0), (0, -1, 0), (1, 0, 0), (-1, 0, 0), (0, 0, 1), (0, 0, -1),
    (0, 2, 0), (0, -2, 0), (2, 0, 0), (-2, 0, 0),
)  # fmt: skip
"""Moves that are tried; by two where a single one gains less than what counts as better."""

Point = tuple[int, int, int]


class Settings(NamedTuple):
    """Settings of a kind to try, as a grid: limits on requests and on tokens of a step, prefill workers."""

    seqs: tuple[int, ...]
    budgets: tuple[int, ...]
    prefill_workers: tuple[int, ...]

    @classmethod
    def of(cls, spec: DeploymentSpec, kind: SimulatedKind) -> Settings:
        """Return those of a spec that the kind's engine runs."""
        from fastroof.sweep.deployments.evaluate import limits_to_try

        new = math.ceil(kind.row["isl"] * (1.0 - kind.row["prefix_hit"]))
        is_chunked = kind.plan.profile.scheduling.chunked_prefill
        budgets = [tokens for tokens in spec.max_num_batched_tokens if is_chunked or tokens >= new]
        workers = int(kind.row["prefill_workers"] + kind.row["decode_workers"])
        # without total_gpus, a spec lists the numbers of workers itself
        prefill = (int(kind.row["prefill_workers"]),)
        shares = tuple(range(1, workers)) if workers and spec.total_gpus is not None else prefill
        return cls(tuple(sorted(limits_to_try(spec, kind.plan))), tuple(budgets), shares)

    def start(self, row: Mapping[str, Any]) -> Point:
        """Return where to start: the closed form's step, and room for some more requests than it runs."""
        engines = max(row["replicas"], row["decode_workers"], 1) * row["dp"] * row["pp"]
        running = 1.5 * row["effective_concurrency"] / engines
        at = next((at for at, seqs in enumerate(self.seqs) if seqs >= running), len(self.seqs) - 1)
        workers = self.prefill_workers.index(int(row["prefill_workers"]))
        return at, self.budgets.index(row["max_num_batched_tokens"]), workers

    def moved(self, at: Point, move: Point) -> Point | None:
        """Return a neighbour; None beyond the grid."""
        to = at[0] + move[0], at[1] + move[1], at[2] + move[2]
        is_inside = all(0 <= place < len(axis) for place, axis in zip(to, self, strict=True))
        return to if is_inside else None

    def setting(self, at: Point) -> Setting:
        """Return a point of the grid."""
        return Setting(self.budgets[at[1]], self.seqs[at[0]], self.prefill_workers[at[2]])


def row_at(
    spec: DeploymentSpec,
    row: Mapping[str, Any],
    means: Mapping[str, float],
    per_s: float,
    tokens_per_s: float,
    clients: float,
) -> dict[str, Any]:
    """Return a row with what was simulated: mean times, ms, requests/s, output tokens/s and clients."""
    per_gpu = tokens_per_s / row["total_gpus"]
    price = spec.price(row["gpu"])
    tpot_ms = None if math.isnan(means["tpot_ms"]) else means["tpot_ms"]
    return {
        **row,
        **means,
        **dict.fromkeys(("tpot_ms", "itl_ms"), tpot_ms),
        "clients": clients,
        "requests_per_s": per_s,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": per_gpu,
        "tokens_per_s_per_user": None if tpot_ms is None else 1e3 / tpot_ms,
        "cost_per_million_tokens": None if price is None else price / SECONDS_PER_HOUR * 1e6 / per_gpu,
    }


def _at_load(
    spec: DeploymentSpec,
    row: Mapping[str, Any],
    setting: Setting,
    clients: float,
    tables_by_gpu: Mapping[str, GpuTables],
) -> dict[str, Any]:
    """Return the closed form's row at the spec's rate, or with some clients, for what is not simulated."""
    from fastroof.sweep.executors import local_results
    from fastroof.sweep.kinds import load_deployment_spec

    key = spec.plan_key(row)
    split = {name: row[name] for name in ("tp", "pp", "dp", "ep")}
    first, workers = setting.prefill_workers, int(row["prefill_workers"] + row["decode_workers"])
    row = {**row, "prefill_workers": first, "decode_workers": workers - first}
    copies = {
        name: [int(row[name])] if row[name] else None
        for name in ("replicas", "prefill_workers", "decode_workers")
    }
    limits = {name: getattr(setting, name) for name in ("max_num_batched_tokens", "max_num_seqs")}
    same = ("mode", "dtype", "kv_dtype", "isl", "osl", "prefix_hit")
    changes: dict[str, Any] = {
        **{name: [row[name]] for name in same}, **{name: [most] for name, most in limits.items()},
        **(split if spec.split is None else {"split": [split]}), "total_gpus": None, **copies,
        **({"clients": [max(round(clients), 1)]} if spec.rate is None
           else {"rate": [row["request_rate_per_s"]]}),
        "models": [key.model], "gpus": [key.gpu], "routing": [key.routing], "engine": [key.engine],
        "keep": "all", "histogram": False,
    }  # fmt: skip
    sweep = DeploymentSweep(load_deployment_spec(spec, changes))
    (result,) = local_results(sweep, sweep.units(), tables_by_gpu)
    rows: list[dict[str, Any]] = result.rows.to_pylist()
    return {**(rows[0] if rows else row), **limits, "exceeds": None}


def family_of(spec: DeploymentSpec, row: Mapping[str, Any]) -> str:
    """Return the family of a row, or of the sizes of a layout, one of :data:`FAMILIES`."""
    if row["mode"] == "disaggregated":
        return FAMILIES[3]
    node = next(each.linked_gpus for each in map(load_gpu, spec.gpus) if each.name == row["gpu"])
    if row["tp"] * row["pp"] * row["dp"] <= min(node, TP_SIZES[-1]):
        return FAMILIES[0]
    return FAMILIES[2] if row["pp"] > 1 else FAMILIES[1]
