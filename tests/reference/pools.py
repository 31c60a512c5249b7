"""Pools of engines, naively: equal engines behind a router, and replicas that a rule starts and stops.

The engines are those of ``tests.reference.engines``. Times are us.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from tests.reference.engines import WAITING_WEIGHT, Engine, Ranks, assigned
from tests.reference.scheduler import Request, Scheduler, StepUs


@dataclass(eq=False)
class Replica:
    """What a router sees as one: an engine, or ranks that step by themselves; and when it serves.

    With an autoscaler it is one life of a replica, on GPUs of this place.
    """

    place: int
    engines: list[Engine]
    ordered_us: float
    ready_us: float
    drained_us: float = math.inf
    stopped_us: float = math.inf
    given: int = 0
    arrived: int = 0
    passing: list[Request] = field(default_factory=list)
    """Requests in its front end."""

    @property
    def got(self) -> int:
        """Requests that it was sent, without those whose clients gave up before an engine had them."""
        return self.arrived + len(self.passing)

    @property
    def waiting(self) -> int:
        return len(self.passing) + sum(engine.waiting for engine in self.engines)

    @property
    def running(self) -> int:
        return sum(engine.running for engine in self.engines)

    @property
    def blocks(self) -> int:
        return sum(engine.blocks for engine in self.engines)

    @property
    def is_empty(self) -> bool:
        has_left = not any(one.waiting + one.running + one.blocks or one.queue for one in self.engines)
        return has_left and not self.passing

    def serves(self, now_us: float) -> bool:
        return self.ready_us <= now_us < self.drained_us

    def starts(self, now_us: float) -> bool:
        return now_us < self.ready_us and self.drained_us == math.inf


Route = Callable[[int, Request, Sequence[Replica]], int]
"""Which replica gets a request, of the number of those before it."""


def round_robin(turn: int, request: Request, replicas: Sequence[Replica]) -> int:
    return turn % len(replicas)


def _least(load: Callable[[Request, Replica], Any]) -> Route:
    """Go where the load is least; of equals, to the first."""
    return lambda turn, request, replicas: min(
        range(len(replicas)), key=lambda at: load(request, replicas[at])
    )


def blocks_to_come(request: Request, replica: Replica) -> int:
    """Blocks that come together: held, of prompts that wait, and to compute for this one."""
    ranks = [rank for engine in replica.engines for rank in engine.schedulers]
    size = ranks[0].settings.block_size
    most = (request.prompt - 1) // size
    held = max(len(rank.pool.find([rank.key(request, place) for place in range(most)])) for rank in ranks)
    waiting = sum(one.prompt for engine in replica.engines for one in engine.sent)
    waiting += sum(one.prompt for one in replica.passing)
    waiting += sum(one.prompt for rank in ranks for one in rank.waiting if one.index not in rank.first_found)
    return int(replica.blocks + ranks[0].blocks_of(waiting + request.prompt - held * size))


ROUTES: dict[str, Route] = {
    "round_robin": round_robin,
    "least_outstanding": _least(lambda _, one: one.waiting + one.running),
    "least_load": _least(lambda _, one: WAITING_WEIGHT * one.waiting + one.running),
    # of equals, where fewest wait, then where fewest run
    "least_kv": _least(lambda _, one: (one.blocks, one.waiting, one.running)),
    # of equals, the one that was sent the fewest requests
    "prefix_aware": _least(lambda request, one: (blocks_to_come(request, one), one.got)),
}


def power_of_two(seed: int, requests: int, below: int) -> Route:
    """The one with fewer requests of two drawn numbers, spread over the replicas that serve."""
    drawn = np.random.default_rng(seed).integers(0, below, (2, requests), np.int32).T.tolist()

    def route(turn: int, request: Request, replicas: Sequence[Replica]) -> int:
        two = [one * len(replicas) // below for one in drawn[turn]]
        return min(two, key=lambda at: replicas[at].waiting + replicas[at].running)

    return route


@dataclass(eq=False)
class Pool:
    """Equal engines behind a router.

    ``apart`` are engines of one replica, ``assignment`` how one of them is chosen; ``scheduler`` makes that
    of each rank from its settings. By a ``rule`` replicas start and stop.
    """

    settings: Any
    step_us: StepUs
    replicas: int = 1
    route: Route = round_robin
    ranks: int = 1
    stages: int = 1
    rules: Ranks | None = None
    host_us: float = 0.0
    """What the host takes to launch a step with prompts, if ``step_us`` are those of kernels alone."""
    drafts: Any = None
    """The draft tokens of ``tests.reference.drafts``."""
    apart: int = 1
    assignment: str = "least_load"
    scheduler: Callable[[Any], Any] = Scheduler
    rule: Rule | None = None
    scaler: Scaler | None = None
    lives: list[Replica] = field(default_factory=list)
    routed: int = 0
    """Requests that were sent to it since the autoscaler looked."""

    def __post_init__(self) -> None:
        if self.rules is not None:
            self.rules.drafts = self.drafts

    @property
    def beyond(self) -> int:
        """Tokens beyond the next one for which a decode takes blocks."""
        return self.drafts.tokens - 1 + self.drafts.lookahead if self.drafts else 0

    @classmethod
    def of_plan(
        cls,
        plan: Any,
        settings: Any,
        replicas: int = 1,
        router: str = "round_robin",
        *,
        drawn: tuple[int, int, int] = (0, 0, 1),
        time_scale: float = 1.0,
        **given: Any,
    ) -> Pool:
        """Engines of a plan; what is ``drawn`` is of a seed, for so many requests, below a number."""
        rules, dp, step_us = Ranks.of_plan(plan), plan.layout.dp, plan.bottleneck.step_scalar
        ranks, apart = (dp, 1) if rules is not None else (1, dp)
        return cls(
            settings,
            lambda new, context: step_us(new, context) * time_scale,
            replicas,
            power_of_two(*drawn) if router == "power_of_two" else ROUTES[router],
            ranks,
            plan.layout.pp,
            rules,
            apart=apart,
            assignment=plan.profile.data_parallel.assignment,
            **given,
        )

    def begin(self, now_us: float) -> None:
        """Let the first replicas serve."""
        self.scaler = None if self.rule is None else Scaler(self.rule, self, now_us)
        for place in range(self.replicas if self.rule is None else self.rule.first):
            self.start(place, now_us, now_us)

    def start(self, place: int, ordered_us: float, ready_us: float) -> None:
        engines = [Engine(self) for _ in range(self.apart)]
        self.lives.append(Replica(place, engines, ordered_us, ready_us))

    def of_places(self, which: Callable[[Replica], bool]) -> list[Replica]:
        return sorted((one for one in self.lives if which(one)), key=lambda one: one.place)

    @property
    def engines(self) -> list[Engine]:
        """Engines of replicas that are not off, in the order of their places."""
        replicas = self.of_places(lambda one: one.stopped_us == math.inf)
        return [engine for one in replicas for engine in one.engines]

    def chosen(self, request: Request, turn: int, now_us: float) -> Replica:
        """Choose the replica that gets a request."""
        serving = self.of_places(lambda one: one.serves(now_us))
        replica = serving[self.route(turn, request, serving)]
        replica.given += 1
        self.routed += 1
        return replica

    def engine_of(self, replica: Replica) -> Engine:
        """Choose the engine of a replica that gets its next request."""
        has = [(engine.waiting, engine.running, engine.blocks) for engine in replica.engines]
        replica.arrived += 1
        return replica.engines[assigned(self.assignment, has, replica.arrived - 1)]


class Rule(NamedTuple):
    """What a rule looks at, how much of it a replica may have, and how replicas start and stop."""

    metric: str
    target: float
    low: float | None
    tolerance: float
    fewest: int
    first: int
    most: int
    interval_us: float
    startup_us: float
    window_us: float


class Scaler:
    """A rule over a pool, whose replicas are new each time that they start."""

    def __init__(self, rule: Rule, pool: Pool, start_us: float) -> None:
        self.rule, self.pool, self.start_us = rule, pool, start_us
        self.wanted = [(start_us, rule.first)]
        self.checks = 0

    @property
    def check_us(self) -> float:
        return self.start_us + (self.checks + 1) * self.rule.interval_us

    def check(self) -> None:
        rule, pool, now_us = self.rule, self.pool, self.check_us
        self.checks += 1
        self._turn_off()
        serving = pool.of_places(lambda one: one.serves(now_us))
        starting = pool.of_places(lambda one: one.starts(now_us))
        current = len(serving) + len(starting)
        wanted = self._wants(self._total(serving), len(serving), current)
        pool.routed = 0
        self.wanted.append((now_us, wanted))
        if wanted < current:
            recent = takewhile(lambda one: one[0] >= now_us - rule.window_us, reversed(self.wanted))
            wanted = min(max(count for _, count in recent), current)
        wanted = min(wanted, max(2 * current, current + 4))
        wanted = min(max(wanted, rule.fewest), rule.most)
        newest_first = [
            one
            for those in (starting, serving)
            for one in sorted(those, key=lambda one: (-one.ready_us, -one.place))
        ]
        for one in newest_first[: max(current - wanted, 0)]:
            one.drained_us = now_us
            if one in starting:
                one.stopped_us = now_us
        taken = {one.place for one in pool.lives if one.stopped_us == math.inf}
        free = [place for place in range(rule.most) if place not in taken]
        for place in free[: max(wanted - current, 0)]:
            pool.start(place, now_us, now_us + rule.startup_us)

    def _turn_off(self) -> None:
        for one in self.pool.lives:
            if one.drained_us < math.inf and one.stopped_us == math.inf and one.is_empty:
                one.stopped_us = max(one.drained_us, *(engine.now_us for engine in one.engines))

    def _total(self, serving: Sequence[Replica]) -> float:
        """The metric of all that serve."""
        if self.rule.metric == "rate":
            return self.pool.routed / (self.rule.interval_us * 1e-6)
        if self.rule.metric == "kv":
            blocks = self.pool.settings.num_gpu_blocks * self.pool.apart * self.pool.ranks
            return sum(one.blocks for one in serving) / blocks
        waiting = sum(one.waiting for one in serving)
        return float(
            waiting if self.rule.metric == "queue" else waiting + sum(one.running for one in serving)
        )

    def _wants(self, total: float, serving: int, current: int) -> int:
        rule = self.rule
        if rule.low is not None:
            if current > serving:
                return current
            return current + (total / serving > rule.target) - (total / serving < rule.low)
        if abs(total / (rule.target * current) - 1.0) <= rule.tolerance:
            return current
        return math.ceil(total / rule.target)

    def close(self, end_us: float) -> None:
        """End all lives with the run."""
        self._turn_off()
        for one in self.pool.lives:
            if one.stopped_us == math.inf:
                one.stopped_us = max(end_us, one.ordered_us)
