"""A fleet, naively: pools of engines that serve a trace, event by event.

The pools are those of ``tests.reference.pools``. Times are us from the trace's start.

At one instant: the autoscaler looks, the front end goes on, requests come, engines of the first pool go on,
transfers begin, transfers end, engines of the second pool go on. Of engines the first goes first, and of
requests the first in the trace.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from tests.reference.engines import Engine, Flight, TakesReserved, drains
from tests.reference.front_end import FrontEnd, Times
from tests.reference.pools import Pool, Replica, Scaler
from tests.reference.scheduler import (
    REJECTED,
    TIMED_OUT,
    US_PER_S,
    Request,
    Scheduler,
    StepUs,
    freed_children,
    never_fits,
    requests_of,
    send,
)


class Fleet:
    """A pool that serves a trace, and who got each request: an open loop, clients, or sessions."""

    def __init__(self, trace: Any, *pools: Pool, front_end: Times | None = None) -> None:
        self.trace, self.pools, self.pool = trace, pools, pools[0]
        self.front_end = None if front_end is None else FrontEnd(front_end, self._arrive, self._give_up_there)
        pool = pools[0]
        self.timeout_us = pool.settings.timeout_s * US_PER_S
        self.requests = requests_of(trace)
        for request in self.requests:
            send(request, float(trace.arrival_s[request.index]) * US_PER_S, self.timeout_us)
            if self._never_fits(request) or any(self.requests[at].status for at in request.parents):
                request.status = REJECTED
        self.sent_us = [request.arrival_us for request in self.requests]
        there = [request for request in self.requests if request.status is None]
        self.now_us = min((request.arrival_us for request in there), default=0.0)
        self.replica = [-1] * len(self.requests)
        self.prompts = self.requests
        """Requests as the pool sees them."""
        for one in pools:
            one.begin(self.now_us)
        # those to come, with their arrivals known, and those that wait for a client of a closed loop
        is_closed = trace.clients is not None
        first = [one for one in there if not one.parents]
        self.unsent = deque(first if is_closed else ())
        self.coming = deque(() if is_closed else first)
        self.freed: set[int] = set()
        self.over: set[int] = set()
        """Sessions that have ended."""
        for _ in range(trace.clients or 0):
            self._send_next(self.now_us)

    def run(self) -> Any:
        """Serve all; returns itself."""
        while True:
            next_us, happen = min(self.events(), key=lambda one: one[0])
            if next_us == math.inf:
                break
            check = min(self.scalers, key=lambda one: one.check_us, default=None)
            if check is not None and check.check_us <= next_us:
                check.check()
                continue
            self.now_us = next_us
            happen()
        assert all(request.status is not None for request in self.requests), "some wait for ever"
        for scaler in self.scalers:
            scaler.close(max(engine.now_us for engine in self.engines))
        return self

    @property
    def scalers(self) -> list[Scaler]:
        return [pool.scaler for pool in self.pools if pool.scaler is not None]

    def _never_fits(self, request: Request) -> bool:
        return never_fits(request, self.pool.settings, self.pool.beyond)

    @property
    def engines(self) -> list[Engine]:
        """All that ever served."""
        return [engine for pool in self.pools for one in pool.lives for engine in one.engines]

    @property
    def flights(self) -> list[Flight]:
        return [flight for engine in self.engines for flight in engine.done]

    @property
    def gaps_us(self) -> list[float]:
        return [gap_us for engine in self.engines for gap_us in engine.gaps_us]

    @property
    def free_blocks(self) -> int:
        return sum(rank.free for engine in self.engines for rank in engine.schedulers)

    @property
    def lives(self) -> list[tuple[float, ...]]:
        """Each time that a scaled replica served: its pool and place, and when it was ordered, ready, drained
        and stopped."""
        return [
            (at, one.place, one.ordered_us, one.ready_us, one.drained_us, one.stopped_us)
            for at, pool in enumerate(self.pools)
            if pool.rule is not None
            for one in pool.lives
        ]

    def events(self) -> list[tuple[float, Callable[[], None]]]:
        """What may happen next and when; of one instant, in this order."""
        arrives_us = self.coming[0].arrival_us if self.coming else math.inf
        found = [(arrives_us, self._route), self._next_of(self.pool)]
        if self.front_end is not None:
            return [(self.front_end.next_us, self.front_end.go_on), *found]
        return found

    def _next_of(self, pool: Pool) -> tuple[float, Callable[[], None]]:
        engine = min(pool.engines, key=lambda one: one.next_us)
        return engine.next_us, partial(self._go_on, engine)

    def _route(self) -> None:
        """Send what comes by now to engines."""
        while self.coming and self.coming[0].arrival_us <= self.now_us:
            given = self.coming.popleft()
            request = self.prompts[given.index]
            request.arrival_us, request.deadline_us = given.arrival_us, given.deadline_us
            self.sent_us[given.index] = given.arrival_us
            replica = self.pool.chosen(request, given.index, self.now_us)
            if self.front_end is None:
                self._arrive(request, replica)
            else:
                self.front_end.send(request, replica, self.now_us)

    def _arrive(self, request: Request, replica: Replica) -> None:
        """Hand a request to an engine of its replica."""
        self.replica[request.index] = replica.place
        self.pool.engine_of(replica).sent.append(request)

    def _give_up_there(self, request: Request, status: int) -> None:
        """End a request in the front end, whose client gave up."""
        self._end(self.requests[request.index], status)

    def _go_on(self, engine: Engine) -> None:
        """Let an engine do what it does at its next event."""
        engine.complete()
        self._settle(engine)
        engine.drop()
        self._settle(engine)
        engine.schedule()

    def _settle(self, engine: Engine) -> None:
        """Let those go on that wait for what ended in an engine."""
        ended, engine.ended = sorted(engine.ended, key=lambda one: one[0].index), []
        for request, rank in ended:
            self._ended(engine, request, rank)
        if engine.pool is self.pool:
            self._route()

    def _ended(self, engine: Engine, request: Request, rank: Any) -> None:
        self._end(request, request.status)

    def _end(self, request: Request, status: int | None) -> None:
        """Let the client send its next request, and requests start that wait for this one."""
        request.status = status
        if self._is_over(request):
            self._send_next(self.now_us + self.trace.think_s * US_PER_S)
        for child in freed_children(request, self.requests):
            # parents may end at once
            if child.index not in self.freed:
                self.freed.add(child.index)
                send(child, max(child.arrival_us, self.now_us + child.delay_us), self.timeout_us)
                insort(self.coming, child, key=lambda one: (one.arrival_us, one.index))

    def _is_over(self, request: Request) -> bool:
        """Whether a client has nothing left to do for the request, or for its session, and did before."""
        if self.trace.parents is None:
            return True
        session = int(self.trace.session[request.index])
        if session in self.over:
            return False
        open_ones = [one for one in self.requests if one.status is None]
        if any(self.trace.session[one.index] == session for one in open_ones):
            return False
        self.over.add(session)
        return True

    def _send_next(self, at_us: float) -> None:
        if self.unsent:
            request = send(self.unsent.popleft(), at_us, self.timeout_us)
            insort(self.coming, request, key=lambda one: (one.arrival_us, one.index))


def serve(
    trace: Any,
    settings: Any,
    step_us: StepUs,
    *,
    time_scale: float = 1.0,
    scheduler: Scheduler | None = None,
    host_us: float = 0.0,
) -> Fleet:
    """Serve a trace with one engine, by a scheduler if given."""
    pool = Pool(
        settings,
        lambda new, context: step_us(new, context) * time_scale,
        host_us=host_us * time_scale,
        scheduler=Scheduler if scheduler is None else lambda _: scheduler,
    )
    return Fleet(trace, pool).run()


class Link(NamedTuple):
    """How prompts are sent: ``layers`` one by one if above 0, or when ``reserves`` has found them room."""

    lasts_us: Callable[[int], float]
    first_token: str = "transfer"
    is_shared: bool = True
    latency_us: float = 0.0
    layers: int = 0
    reserves: bool = False


class LinkedFleet(Fleet):
    """A pool that prefills and one that decodes, with a link from each prefill replica.

    With reservations a prompt keeps its blocks until it is sent, which waits for room where it decodes.
    """

    def __init__(
        self, trace: Any, prefill: Pool, decode: Pool, link: Link, front_end: Times | None = None
    ) -> None:
        self.decode, self.link = decode, link
        if link.reserves:
            decode.scheduler = TakesReserved
        super().__init__(trace, prefill, decode, front_end=front_end)
        count = len(self.requests)
        self.prompts, self.decodes = ([*each] for each in zip(*map(self._parts, self.requests), strict=True))
        self.goes_on = [one.output > 0 for one in self.decodes]
        self.decode_replica = [-1] * count
        self.decoder: list[Any] = [None] * count
        self.home: list[Any] = [None] * count
        """The engine and the rank that computed each prompt."""
        self.took_us = [0.0] * count
        """What the step took that computed the end of each prompt."""
        self.ready_us, self.there_us = [math.nan] * count, [math.nan] * count
        self.beginning: list[int] = []
        """Prompts that are ready, by time and number."""
        self.ending: list[int] = []
        """Prompts that are sent, by arrival and number."""
        self.free_us = defaultdict[int, float](float)
        """When each link has sent what it was given."""
        self.handed = 0

    def _parts(self, one: Request) -> tuple[Request, Request]:
        """A request's prompt, and its decodes, without output if it ends with the prompt."""
        again = self.link.first_token == "decode"
        keeps = self.link.reserves and one.output > 1 - again
        prompt = Request(one.index, one.prompt, 1, one.cached, is_sent_on=keeps)
        if again:
            return prompt, Request(one.index, one.prompt, one.output, one.prompt - 1)
        return prompt, Request(one.index, one.prompt + 1, one.output - 1, one.prompt)

    def _never_fits(self, request: Request) -> bool:
        prompt, decode = self._parts(request)
        decodes = decode.output > 0 and never_fits(decode, self.decode.settings, self.decode.beyond)
        return never_fits(prompt, self.pool.settings, self.pool.beyond) or decodes

    def events(self) -> list[tuple[float, Callable[[], None]]]:
        begins_us = self.ready_us[self.beginning[0]] if self.beginning else math.inf
        ends_us = self.there_us[self.ending[0]] if self.ending else math.inf
        transfers = [(begins_us, self._begin), (ends_us, self._hand_over)]
        return [*super().events(), *transfers, self._next_of(self.decode)]

    def _go_on(self, engine: Engine) -> None:
        super()._go_on(engine)
        if self.link.reserves and engine.pool is self.decode:
            self._grant(engine)

    def _ended(self, engine: Engine, request: Request, rank: Any) -> None:
        at = request.index
        if engine.pool is self.decode or request.status == TIMED_OUT or not self.goes_on[at]:
            self._end(self.requests[at], request.status)
            return
        self.decodes[at].deadline_us = request.deadline_us
        self.home[at], self.took_us[at] = (engine, rank), engine.took_us
        self.ready_us[at] = self.now_us
        insort(self.beginning, at, key=lambda one: (self.ready_us[one], one))

    def _begin(self) -> None:
        """Begin a transfer, or let it want to begin."""
        at = self.beginning.pop(0)
        if self.link.layers:
            batch = [at]
            while self.beginning and self._is_of_one_step(self.beginning[0], at):
                batch.append(self.beginning.pop(0))
            self._send_layers(batch)
        elif self.link.reserves:
            self._choose(at)
            self.decoder[at].wanting.append(self.decodes[at])
            self._grant(self.decoder[at])
        else:
            self._send(at)

    def _choose(self, at: int) -> None:
        """Choose where a prompt decodes."""
        chosen = self.decode.chosen(self.decodes[at], self.handed, self.now_us)
        self.decode_replica[at], self.decoder[at] = chosen.place, self.decode.engine_of(chosen)
        self.handed += 1

    def _is_of_one_step(self, one: int, other: int) -> bool:
        return self.ready_us[one] == self.ready_us[other] and self.home[one][0] is self.home[other][0]

    def _send(self, at: int) -> None:
        begin_us, link = self.now_us, self.replica[at]
        if self.link.is_shared:
            begin_us = max(begin_us, self.free_us[link])
        self.free_us[link] = begin_us + self.link.lasts_us(self.requests[at].prompt)
        self._note_end(at, self.free_us[link])

    def _note_end(self, at: int, end_us: float) -> None:
        # a trace is in seconds
        self.there_us[at] = end_us / US_PER_S * US_PER_S
        insort(self.ending, at, key=lambda one: (self.there_us[one], one))

    def _send_layers(self, batch: list[int]) -> None:
        """Send prompts of one step: one layer of each, then the next, no layer before it is computed."""
        layers, took_us = self.link.layers, self.took_us[batch[0]]
        computed_us = [self.now_us - took_us * (layers - 1 - layer) / layers for layer in range(layers)]
        link = self.replica[batch[0]]
        for together in [batch] if self.link.is_shared else [[at] for at in batch]:
            sent_us = self.free_us[link] if self.link.is_shared else 0.0
            end_us = {}
            for layer in range(layers):
                for at in together:
                    a_layer_us = self.link.lasts_us(self.requests[at].prompt) / layers
                    end_us[at] = sent_us = max(sent_us, computed_us[layer]) + a_layer_us
            self.free_us[link] = sent_us
            for at in together:
                self._note_end(at, end_us[at] + self.link.latency_us)

    def _grant(self, engine: Engine) -> None:
        """Reserve room for prompts that want to be sent, in order, while there is any."""
        rank = engine.schedulers[0]
        while engine.wanting:
            request = engine.wanting[0]
            if request.deadline_us <= self.now_us:
                engine.wanting.popleft()
                self._give_up(request.index)
                continue
            has = len(rank.waiting) + rank.slots_in_use + len(engine.sent) + engine.on_the_way
            lost = [one for one in rank.waiting if one.preemptions and not drains(one)]
            tokens = request.prompt
            if rank.settings.reserve_output:
                tokens += request.output + self.decode.beyond
            if lost or has >= rank.slots or not rank._take_blocks(request, tokens):
                return
            engine.wanting.popleft()
            engine.on_the_way += 1
            self._send(request.index)

    def _hand_over(self) -> None:
        """End a transfer, and with it the wait of a request whose client has not given up."""
        at = self.ending.pop(0)
        request, engine = self.decodes[at], self.decoder[at]
        if self.link.reserves:
            engine.on_the_way -= 1
        if request.deadline_us <= self.now_us:
            self._give_up(at)
            if self.link.reserves:
                engine.schedulers[0].let_go(request)
                if not engine.queue:
                    self._wake(engine)
                self._grant(engine)
            return
        request.arrival_us = self.now_us
        if not self.link.reserves:
            self._choose(at)
        self.decoder[at].sent.append(request)
        self._let_go(at)

    def _give_up(self, at: int) -> None:
        self._end(self.requests[at], TIMED_OUT)
        self._let_go(at)

    def _let_go(self, at: int) -> None:
        """Free the blocks of a prompt; an engine that has no step goes on at once."""
        if self.link.reserves:
            engine, rank = self.home[at]
            rank.let_go(self.prompts[at])
            if not engine.queue:
                self._wake(engine)

    def _wake(self, engine: Engine) -> None:
        engine.now_us = self.now_us
        self._route()
        engine.drop()
        self._settle(engine)
        engine.schedule()
