"""Pools that prefill and decode apart, naively: one after the other, and event by event.

Engines are those of ``tests.reference.replicas``; here is what goes on between them. Times are us.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.reference.block_pool import PooledScheduler
from tests.reference.replicas import Engine, Ranks, Route, Served, run_engines
from tests.reference.scheduler import (
    TIMED_OUT,
    US_PER_S,
    Request,
    Scheduler,
    StepUs,
    freed_children,
    send,
)


def sent_us(ready_us: Sequence[float], worker: Sequence[int], lasts_us: Sequence[float]) -> list[float]:
    """When prompts are there over one link a prefill worker, each in the order in which they are ready."""
    free_us: dict[int, float] = {}
    there_us = [0.0] * len(ready_us)
    for index in sorted(range(len(ready_us)), key=lambda at: ready_us[at]):
        begin_us = max(ready_us[index], free_us.get(worker[index], 0.0))
        there_us[index] = free_us[worker[index]] = begin_us + lasts_us[index]
    return there_us


class NaivePool(NamedTuple):
    """Engines of one kind; ``trace`` is what is served, if they have prefix caches."""

    settings: Any
    step_us: StepUs
    replicas: int
    route: Route
    ranks: int = 1
    rules: Ranks | None = None
    trace: Any = None


def run_naive_pools(
    requests: list[Request], prefill: NaivePool, decode: NaivePool, lasts_us: Callable[[int], float]
) -> tuple[Served, list[float], Served, list[int]]:
    """Prefill, send and decode.

    Returns what the prefill pool did, when decode engines had what, us, what they did, and who it was: the
    last three by arrival there.
    """
    first = [Request(one.index, one.prompt, 1, one.cached, one.arrival_us) for one in requests]
    prefilled = run_engines(first, *prefill[:4])
    goes_on = [one.index for one in requests if one.output > 1]
    there_us = sent_us(
        [prefilled.last_us[at] for at in goes_on],
        [prefilled.replica[at] for at in goes_on],
        [lasts_us(requests[at].prompt) for at in goes_on],
    )
    # a trace is in seconds
    there_us = [at_us / US_PER_S * US_PER_S for at_us in there_us]
    in_order = sorted(range(len(goes_on)), key=lambda at: there_us[at])
    decodes = [
        Request(place, one.prompt + 1, one.output - 1, one.prompt, there_us[at])
        for place, at in enumerate(in_order)
        for one in [requests[goes_on[at]]]
    ]
    decoded = run_engines(decodes, *decode[:4])
    return prefilled, [there_us[at] for at in in_order], decoded, [goes_on[at] for at in in_order]


class KeepsPrompts(Scheduler):
    """A scheduler that keeps the blocks of finished prompts until it lets them go."""

    keeps: Callable[[Request], bool]

    def leave(self, request: Request) -> None:
        if request in self.running and request.seen == request.output and self.keeps(request):
            self.running.remove(request)
        else:
            super().leave(request)

    def let_go(self, request: Request) -> None:
        """Free the blocks of a prompt that was sent."""
        self.free += request.blocks
        request.blocks = 0


class KeepsCachedPrompts(PooledScheduler):
    """The same over a prefix cache."""

    keeps: Callable[[Request], bool]

    def leave(self, request: Request) -> None:
        if request in self.running and request.seen == request.output and self.keeps(request):
            self._keep(request, self._known(request))
            self.running.remove(request)
        else:
            super().leave(request)

    def let_go(self, request: Request) -> None:
        if request.index in self.tables:
            self._keep(request, request.prompt)
            self.pool.give_back(self.tables.pop(request.index))


class TakesReserved(Scheduler):
    """A scheduler whose requests arrive with their blocks, and start before preempted ones."""

    looked_at: Request

    def arrive(self, request: Request) -> None:
        request.came = self.came
        self.came += 1
        self.waiting.insert(sum(not one.preemptions for one in self.waiting), request)

    def preempt(self, victim: Request) -> None:
        super().preempt(victim)
        self.waiting.popleft()
        self.waiting.insert(sum(not one.preemptions for one in self.waiting), victim)

    def cached(self, request: Request) -> int:
        self.looked_at = request
        return super().cached(request)

    def needs(self, tokens: int) -> int:
        return self.blocks_of(tokens) - self.looked_at.blocks


@dataclass
class PoolEngine(Engine):
    """An engine of a pool, and the requests that are assigned to it but not sent yet."""

    wanting: deque[Request] = field(default_factory=deque)
    on_the_way: int = 0

    @property
    def waiting(self) -> int:
        return super().waiting + len(self.wanting) + self.on_the_way


class NaiveLink(NamedTuple):
    """How prompts are sent: ``layers`` one by one if above 0."""

    lasts_us: Callable[[int], float]
    first_token: str = "transfer"
    is_shared: bool = True
    latency_us: float = 0.0
    layers: int = 0
    reserves: bool = False


@dataclass
class NaivePools:
    """Both pools, event by event.

    At one instant: requests come, prefill engines end steps, transfers begin, transfers end, decode engines
    end steps; of one kind the first engine goes first, and of requests the first in the trace.
    """

    requests: list[Request]
    prefill: NaivePool
    decode: NaivePool
    link: NaiveLink
    clients: int = 0
    think_us: float = 0.0

    def __post_init__(self) -> None:
        count = len(self.requests)
        again = self.link.first_token == "decode"
        self.timeout_us = self.prefill.settings.timeout_s * US_PER_S
        self.goes_on = [again or one.output > 1 for one in self.requests]
        self.prompts = [Request(one.index, one.prompt, 1, one.cached) for one in self.requests]
        self.decodes = [
            Request(one.index, one.prompt, one.output, one.prompt - 1)
            if again
            else Request(one.index, one.prompt + 1, one.output - 1, one.prompt)
            for one in self.requests
        ]
        self.fills, self.decoders = (
            [
                PoolEngine(pool.settings, pool.step_us, pool.ranks, pool.rules, pool.trace)
                for _ in range(pool.replicas)
            ]
            for pool in (self.prefill, self.decode)
        )
        if self.link.reserves:
            for engine in self.fills:
                engine.schedulers = [self._keeper() for _ in engine.schedulers]
            for engine in self.decoders:
                engine.schedulers = [TakesReserved(self.decode.settings)]
        self.prefill_replica, self.replica = [-1] * count, [-1] * count
        self.home: list[Any] = [None] * count
        self.ready_us, self.there_us = [math.nan] * count, [math.nan] * count
        self.step_us = [0.0] * count
        self.free_us: dict[int, float] = {}
        self.beginning: list[int] = []
        """Prompts that are ready, by time and number."""
        self.ending: list[int] = []
        """Prompts that are sent, by arrival and number."""
        self.handed = 0
        self.freed: set[int] = set()
        self.unsent = deque(self.requests if self.clients else ())
        self.coming = deque(() if self.clients else [one for one in self.requests if not one.parents])

    def _keeper(self) -> Any:
        settings, trace = self.prefill.settings, self.prefill.trace
        own: Any = KeepsPrompts(settings) if trace is None else KeepsCachedPrompts(settings, trace)
        own.keeps = lambda request: self.goes_on[request.index]
        return own

    def run(self) -> None:
        for _ in range(self.clients):
            self._send_next(0.0)
        while True:
            fill = min(self.fills, key=lambda engine: engine.next_us)
            decoder = min(self.decoders, key=lambda engine: engine.next_us)
            events: list[tuple[float, Callable[[], None]]] = [
                (self.coming[0].arrival_us if self.coming else math.inf, self._route),
                (fill.next_us, lambda fill=fill: self._fill(fill)),
                (self.ready_us[self.beginning[0]] if self.beginning else math.inf, self._begin),
                (self.there_us[self.ending[0]] if self.ending else math.inf, self._hand_over),
                (decoder.next_us, lambda decoder=decoder: self._finish_event(decoder)),
            ]
            self.now_us, event = min(events, key=lambda one: one[0])
            if self.now_us == math.inf:
                return
            event()

    def _send_next(self, at_us: float) -> None:
        if self.unsent:
            self.coming.append(send(self.unsent.popleft(), at_us, self.timeout_us))

    def _end(self, request: Request, status: int) -> None:
        request.status = status
        if self.clients:
            self._send_next(self.now_us + self.think_us)
        for child in freed_children(request, self.requests):
            if child.index not in self.freed:
                self.freed.add(child.index)
                send(child, max(child.arrival_us, self.now_us + child.delay_us), self.timeout_us)
                insort(self.coming, child, key=lambda one: (one.arrival_us, one.index))

    def _route(self) -> None:
        """Send what comes by now to prefill engines."""
        while self.coming and self.coming[0].arrival_us <= self.now_us:
            at = self.coming.popleft().index
            prompt, given = self.prompts[at], self.requests[at]
            for one in (prompt, self.decodes[at]):
                one.arrival_us, one.deadline_us = given.arrival_us, given.deadline_us
            self.prefill_replica[at] = self.prefill.route(at, prompt, self.fills)
            self.fills[self.prefill_replica[at]].push(prompt)

    def _take_ended(self, engine: Engine) -> None:
        """Let requests go on that ended in a prefill engine's event."""
        for ended in sorted(engine.ended, key=lambda one: one.index):
            at = ended.index
            if ended.status == TIMED_OUT or not self.goes_on[at]:
                self._end(self.requests[at], ended.status)
                continue
            self.ready_us[at] = self.now_us
            insort(self.beginning, at, key=lambda one: (self.ready_us[one], one))
        engine.ended = []
        self._route()

    def _fill(self, engine: Any) -> None:
        ending = engine.queue[0] if engine.queue else []
        took_us = max(engine._times_us(ending)) if ending else 0.0
        engine.complete()
        for rank, step in zip(engine.schedulers, ending, strict=False):
            for request in step.with_token:
                self.step_us[request.index] = took_us
                self.home[request.index] = engine, rank
        self._take_ended(engine)
        engine.drop()
        self._take_ended(engine)
        self._schedule(engine)

    def _begin(self) -> None:
        at = self.beginning.pop(0)
        if self.link.layers:
            batch = [at]
            while self.beginning and self._is_of_one_step(self.beginning[0], at):
                batch.append(self.beginning.pop(0))
            self._send_layers(batch)
        elif self.link.reserves:
            to = self.decode.route(self.handed, self.decodes[at], self.decoders)
            self.handed += 1
            self.replica[at] = to
            self.decoders[to].wanting.append(self.decodes[at])
            self._grant(self.decoders[to])
        else:
            self._send(at, self.ready_us[at])

    def _is_of_one_step(self, one: int, other: int) -> bool:
        return self.ready_us[one] == self.ready_us[other] and self.home[one][0] is self.home[other][0]

    def _send(self, at: int, from_us: float) -> None:
        begin_us, link = from_us, self.prefill_replica[at]
        if self.link.is_shared:
            begin_us = max(from_us, self.free_us.get(link, 0.0))
        self.free_us[link] = begin_us + self.link.lasts_us(self.requests[at].prompt)
        self._note_end(at, self.free_us[link])

    def _note_end(self, at: int, end_us: float) -> None:
        self.there_us[at] = end_us / US_PER_S * US_PER_S
        insort(self.ending, at, key=lambda one: (self.there_us[one], one))

    def _send_layers(self, batch: list[int]) -> None:
        """Send prompts of one step: one layer of each, then the next, no layer before it is computed."""
        layers, ready_us = self.link.layers, self.ready_us[batch[0]]
        computed_us = [
            ready_us - self.step_us[batch[0]] * (layers - 1 - layer) / layers for layer in range(layers)
        ]
        link = self.prefill_replica[batch[0]]
        for together in [batch] if self.link.is_shared else [[at] for at in batch]:
            sent_us = self.free_us.get(link, 0.0) if self.link.is_shared else 0.0
            end_us = {}
            for layer in range(layers):
                for at in together:
                    a_layer_us = self.link.lasts_us(self.requests[at].prompt) / layers
                    end_us[at] = sent_us = max(sent_us, computed_us[layer]) + a_layer_us
            self.free_us[link] = sent_us
            for at in together:
                self._note_end(at, end_us[at] + self.link.latency_us)

    def _let_go(self, at: int) -> None:
        """Free the blocks of a prompt; an engine that has no step goes on at once."""
        if not self.link.reserves:
            return
        engine, rank = self.home[at]
        rank.let_go(self.prompts[at])
        if not engine.queue:
            self._wake(engine, self._take_ended)

    def _wake(self, engine: Any, take_ended: Callable[[Engine], None]) -> None:
        engine.now_us = self.now_us
        self._route()
        engine.drop()
        take_ended(engine)
        self._schedule(engine)

    def _schedule(self, engine: Any) -> None:
        engine.schedule()
        if self.link.reserves and not engine.queue and any(rank.waiting for rank in engine.schedulers):
            # the only one that ran may have lost its blocks
            engine.schedule()

    def _give_up(self, at: int) -> None:
        self._end(self.requests[at], TIMED_OUT)
        self._let_go(at)

    def _grant(self, engine: Any) -> None:
        """Reserve room for prompts that want to be sent, in order, while there is any."""
        rank = engine.schedulers[0]
        while engine.wanting:
            request = engine.wanting[0]
            if request.deadline_us <= self.now_us:
                engine.wanting.popleft()
                self._give_up(request.index)
                continue
            has = len(rank.waiting) + len(rank.running) + len(engine.sent) + engine.on_the_way
            lost = [one for one in rank.waiting if one.preemptions and one.sent < one.output]
            tokens = request.prompt + (request.output if rank.settings.reserve_output else 0)
            if lost or has >= rank.settings.max_num_seqs or not rank._take_blocks(request, tokens):
                return
            engine.wanting.popleft()
            engine.on_the_way += 1
            self._send(request.index, self.now_us)

    def _hand_over(self) -> None:
        at = self.ending.pop(0)
        request = self.decodes[at]
        if self.link.reserves:
            engine = self.decoders[self.replica[at]]
            engine.on_the_way -= 1
        if request.deadline_us <= self.now_us:
            self._give_up(at)
            if self.link.reserves:
                engine.schedulers[0].free += request.blocks
                request.blocks = 0
                if engine.queue:
                    self._grant(engine)
                else:
                    self._wake(engine, self._end_finished)
                    self._grant(engine)
            return
        request.arrival_us = self.now_us
        if not self.link.reserves:
            self.replica[at] = self.decode.route(self.handed, request, self.decoders)
            self.handed += 1
        self.decoders[self.replica[at]].push(request)
        self._let_go(at)

    def _end_finished(self, engine: Engine) -> None:
        """End requests that ended in a decode engine's event."""
        for ended in sorted(engine.ended, key=lambda one: one.index):
            self._end(self.requests[ended.index], ended.status)
        engine.ended = []

    def _finish_event(self, engine: Any) -> None:
        engine.complete()
        self._end_finished(engine)
        engine.drop()
        self._end_finished(engine)
        self._schedule(engine)
        if self.link.reserves:
            self._grant(engine)
