"""An autoscaler over naive engines: replicas that come and go, each time as new ones.

The engines are those of ``tests.reference.replicas``; here is when the rule looks, what it wants, and who
serves. Times are us.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from tests.reference.replicas import Engine, RanksApart, Route, assigned
from tests.reference.scheduler import Request, freed_children, send


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


@dataclass(eq=False)
class Replica:
    """One life of a replica, on GPUs of this place."""

    place: int
    engines: list[Engine]
    ordered_us: float
    ready_us: float
    drained_us: float = math.inf
    stopped_us: float = math.inf
    given: int = 0

    def serves(self, now_us: float) -> bool:
        return self.ready_us <= now_us < self.drained_us

    def starts(self, now_us: float) -> bool:
        return now_us < self.ready_us and self.drained_us == math.inf

    @property
    def is_empty(self) -> bool:
        return not any(engine.waiting + engine.running or engine.queue for engine in self.engines)

    @property
    def in_all(self) -> Any:
        """Its engines as one."""
        return RanksApart(self.engines) if len(self.engines) > 1 else self.engines[0]


@dataclass
class Fleet:
    """Replicas of now and of before, and the rule."""

    rule: Rule
    start_us: float
    make: Callable[[], list[Engine]]
    route: Route
    ranks_rule: str
    lives: list[Replica] = field(default_factory=list)
    wanted: list[tuple[float, int]] = field(default_factory=list)
    checks: int = 0
    routed: int = 0

    def __post_init__(self) -> None:
        for place in range(self.rule.first):
            self.lives.append(Replica(place, self.make(), self.start_us, self.start_us))
        self.wanted.append((self.start_us, self.rule.first))

    @property
    def check_us(self) -> float:
        return self.start_us + (self.checks + 1) * self.rule.interval_us

    def of_places(self, which: Callable[[Replica], bool]) -> list[Replica]:
        return sorted((one for one in self.lives if which(one)), key=lambda one: one.place)

    @property
    def engines(self) -> list[Engine]:
        """Engines of replicas that are not off, in the order of their places."""
        return [
            engine for one in self.of_places(lambda one: one.stopped_us == math.inf) for engine in one.engines
        ]

    def turn_off(self) -> None:
        for one in self.lives:
            if one.drained_us < math.inf and one.stopped_us == math.inf and one.is_empty:
                one.stopped_us = max(one.drained_us, *(engine.now_us for engine in one.engines))

    def check(self) -> None:
        rule, now_us = self.rule, self.check_us
        self.checks += 1
        self.turn_off()
        serving = self.of_places(lambda one: one.serves(now_us))
        starting = self.of_places(lambda one: one.starts(now_us))
        current = len(serving) + len(starting)
        wanted = self.rule_wants(self.total(serving), len(serving), current)
        self.routed = 0
        self.wanted.append((now_us, wanted))
        if wanted < current:
            recent = takewhile(lambda one: one[0] >= now_us - rule.window_us, reversed(self.wanted))
            wanted = min(max(count for _, count in recent), current)
        wanted = min(wanted, max(2 * current, current + 4))
        wanted = min(max(wanted, rule.fewest), rule.most)
        newest_first = sorted(serving, key=lambda one: (-one.ready_us, -one.place))
        newest_first = sorted(starting, key=lambda one: (-one.ready_us, -one.place)) + newest_first
        for one in newest_first[: max(current - wanted, 0)]:
            one.drained_us = now_us
            if one.starts(now_us) or one in starting:
                one.stopped_us = now_us
        taken = {one.place for one in self.lives if one.stopped_us == math.inf}
        free = [place for place in range(rule.most) if place not in taken]
        for place in free[: max(wanted - current, 0)]:
            self.lives.append(Replica(place, self.make(), now_us, now_us + rule.startup_us))

    def total(self, serving: Sequence[Replica]) -> float:
        """The metric of all that serve."""
        engines = [engine for one in serving for engine in one.engines]
        if self.rule.metric == "rate":
            return self.routed / (self.rule.interval_us * 1e-6)
        if self.rule.metric == "kv":
            ranks = sum(len(engine.schedulers) for engine in serving[0].engines)
            return sum(one.blocks for one in engines) / (ranks * engines[0].settings.num_gpu_blocks)
        waiting = sum(engine.waiting for engine in engines)
        return float(
            waiting if self.rule.metric == "queue" else waiting + sum(one.running for one in engines)
        )

    def rule_wants(self, total: float, serving: int, current: int) -> int:
        rule = self.rule
        if rule.low is not None:
            if current > serving:
                return current
            return current + (total / serving > rule.target) - (total / serving < rule.low)
        if abs(total / (rule.target * current) - 1.0) <= rule.tolerance:
            return current
        return math.ceil(total / rule.target)

    def push(self, request: Request, now_us: float) -> int:
        serving = self.of_places(lambda one: one.serves(now_us))
        one = serving[self.route(request.index, request, [each.in_all for each in serving])]
        has = [(engine.waiting, engine.running, engine.blocks) for engine in one.engines]
        engine = one.engines[assigned(self.ranks_rule, has, one.given) if len(has) > 1 else 0]
        one.given += 1
        self.routed += 1
        engine.push(request)
        return one.place

    def close(self) -> None:
        self.turn_off()
        end_us = max(engine.now_us for one in self.lives for engine in one.engines)
        for one in self.lives:
            if one.stopped_us == math.inf:
                one.stopped_us = max(end_us, one.ordered_us)

    def rows(self) -> Iterator[tuple[float, ...]]:
        for one in self.lives:
            yield one.place, one.ordered_us, one.ready_us, one.drained_us, one.stopped_us


def drawn_route(drawn: Sequence[Sequence[int]], below: int) -> Route:
    """The one with fewer requests of two drawn numbers, spread over serving replicas."""

    def route(index: int, request: Request, engines: Sequence[Engine]) -> int:
        two = [one * len(engines) // below for one in drawn[index]]
        return min(two, key=lambda at: engines[at].waiting + engines[at].running)

    return route


def serve_open_loop(requests: list[Request], fleet: Fleet) -> list[int]:
    """Serve requests, sorted by arrival; what happens before a check or an arrival has happened."""
    replica = []
    for request in requests:
        while fleet.check_us <= request.arrival_us:
            for engine in fleet.engines:
                engine.advance(fleet.check_us)
            fleet.check()
        for engine in fleet.engines:
            engine.advance(request.arrival_us)
        replica.append(fleet.push(request, request.arrival_us))
    while True:
        for engine in fleet.engines:
            engine.advance(fleet.check_us)
        if all(one.is_empty for one in fleet.lives):
            break
        fleet.check()
    fleet.close()
    return replica


def serve_with_feedback(
    requests: list[Request], fleet: Fleet, timeout_us: float, clients: int = 0, think_us: float = 0.0
) -> list[int]:
    """Serve sessions, or clients who send a request after the end of their last, event by event."""
    freed: set[int] = set()
    unsent = deque(requests if clients else ())
    coming = deque(() if clients else (one for one in requests if not one.parents))
    replica = [-1] * len(requests)

    def send_next(at_us: float) -> None:
        if unsent:
            coming.append(send(unsent.popleft(), at_us, timeout_us))

    def route_until(now_us: float) -> None:
        while coming and coming[0].arrival_us <= now_us:
            request = coming.popleft()
            replica[request.index] = fleet.push(request, now_us)

    def send_ended(engine: Engine) -> None:
        for ended in engine.ended:
            send_next(engine.now_us + think_us)
            for child in freed_children(ended, requests):
                if child.index in freed:
                    continue
                freed.add(child.index)
                send(child, max(child.arrival_us, engine.now_us + child.delay_us), timeout_us)
                insort(coming, child, key=lambda one: (one.arrival_us, one.index))
        engine.ended = []
        route_until(engine.now_us)

    for _ in range(clients):
        send_next(fleet.start_us)
    while True:
        engine = min(fleet.engines, key=lambda one: one.next_us)
        arrival_us = coming[0].arrival_us if coming else math.inf
        next_us = min(arrival_us, engine.next_us)
        if next_us == math.inf:
            fleet.close()
            return replica
        if fleet.check_us <= next_us:
            fleet.check()
        elif arrival_us <= engine.next_us:
            route_until(arrival_us)
        else:
            engine.complete()
            send_ended(engine)
            engine.drop()
            send_ended(engine)
            engine.schedule()
