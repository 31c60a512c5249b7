"""Replicas and ranks, naively: engines that step by themselves, and who gets the next request.

Ranks of attention data parallelism step together, or are engines by themselves.

The scheduler of each engine is that of ``tests.reference.scheduler``; here is what goes on around it. Times
are us.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fastroof.compiled import steps
from fastroof.plan.calls import rank_rules
from tests.reference.block_pool import PooledScheduler
from tests.reference.scheduler import (
    FINISHED,
    TIMED_OUT,
    US_PER_S,
    Request,
    Scheduler,
    Step,
    StepUs,
    freed_children,
    send,
)
from tests.reference.scheduler import requests_of as linked_requests

WAITING_WEIGHT = 4


@dataclass
class Ranks:
    """How ranks step: ``together`` returns the time of a step of all ranks, us, from the step of each.

    ``settings`` is an engine's data_parallel; ``experts_us`` returns the time of parts that depend on
    the tokens of all ranks, from that number and whether the step has decodes alone.
    """

    settings: Any
    step_us: StepUs
    experts_us: Callable[[float, bool], float]
    floor_us: float = 0.0
    hides_host: bool = False
    """Whether the host launches a step with prompts, ``floor_us``, while the one made before it runs."""

    @classmethod
    def of_plan(cls, plan: Any) -> Ranks | None:
        """The rules of a plan; None if its ranks are separate engines."""
        if not rank_rules(plan).in_lockstep:
            return None
        header = [int(plan.arena[slot]) for slot in (steps.EXPERT_AT, steps.DECODE_EXPERT_AT)]
        rows = [plan.arena[at : at + plan.max_tokens + 1] for at in header]

        def experts_us(total: float, is_decode: bool) -> float:
            if not header[0]:
                return 0.0
            tokens = min(max(total / plan.layout.dp, 1.0), float(plan.max_tokens))
            at = min(int(tokens), plan.max_tokens - 1)
            low, high = rows[is_decode][at : at + 2]
            return float(low + (high - low) * (tokens - at))

        floor_us = float(plan.arena[steps.PREFILL_FLOOR_US])
        arena = plan.arena.copy()
        arena[steps.PREFILL_FLOOR_US] = 0.0
        kernels = replace(plan, arena=arena)
        hides_host = plan.profile.scheduling.hides_host
        return cls(plan.profile.data_parallel, kernels.step_scalar, experts_us, floor_us, hides_host)

    def note_times(
        self, made: Sequence[Step], before: Sequence[Step] | None, schedulers: Sequence[Scheduler] = ()
    ) -> None:
        """Note the time of each rank's own step, us, where experts compute what all ranks have."""
        dp = len(made)
        tokens = [sum(step.new_tokens) if step.requests else self.settings.idle_tokens for step in made]
        fullest = max(sum(step.new_tokens) for step in made)
        is_decode = all(is_of_decodes(step) for step in made)
        seen = self.seen(sum(tokens), fullest, dp, self.settings.decode_tokens if is_decode else None)
        for rank, step in enumerate(made):
            if not step.requests:
                continue
            if not is_of_decodes(step):
                last = before[rank] if before and self.hides_host else None
                step.host_us = max(self.floor_us - (last.time_us - last.host_us if last else 0.0), 0.0)
            own = self.experts_us(dp * sum(step.new_tokens), is_of_decodes(step))
            us = max(self.step_us(step.new_tokens, step.context_len), step.host_us)
            if schedulers:
                us = schedulers[rank].with_fetches(us)
            us += self.experts_us(seen, is_decode) - own
            step.time_us = max(us, step.host_us)

    def seen(self, total: int, fullest: int, dp: int, decode_tokens: str | None) -> int:
        """Tokens that experts compute."""
        rule = decode_tokens or self.settings.prompt_tokens
        is_padded = {
            "sum": False,
            "fullest": True,
            "graphs": fullest <= self.settings.graph_tokens,
            "half_full": 2 * total >= dp * fullest,
        }[rule]
        return dp * fullest if is_padded else total


def is_of_decodes(step: Step) -> bool:
    """Whether all of a step are timed as decodes: one token after others."""
    return all(n == 1 and c > 0 for n, c in zip(step.new_tokens, step.context_len, strict=True))


@dataclass
class Engine:
    """One engine, or ranks whose steps start together, with what it has been sent."""

    settings: Any
    step_us: StepUs
    ranks: int = 1
    rules: Ranks | None = None
    trace: Any = None
    """What is served, if each rank has a prefix cache."""
    scheduler: Callable[[], Any] | None = None
    """Makes the scheduler of each rank, if these are others."""
    given: int = 0
    """Requests that its ranks were given."""
    held_steps: int = 0
    """Steps that prompts have waited for those of other ranks."""
    in_a_row: int = 0
    """Steps since all ranks were idle."""
    free_from: int = 0
    """Of those, the number from which prompts may run, in an engine that runs them first."""
    now_us: float = 0.0
    end_us: float = 0.0
    steps: int = 0
    ended: list[Request] = field(default_factory=list)
    """Requests that ended in its last event."""
    sent: deque[Request] = field(default_factory=deque)
    queue: deque[list[Step]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        make = self.scheduler or (
            (lambda: Scheduler(self.settings))
            if self.trace is None
            else (lambda: PooledScheduler(self.settings, self.trace))
        )
        self.schedulers: list[Any] = [make() for _ in range(self.ranks)]
        self.given_up: list[Request] = []
        """Requests whose clients gave up before they were admitted."""
        self.pushed = 0
        self.pushed_tokens = 0

    @property
    def waiting(self) -> int:
        here = sum(not self._drains(one) for rank in self.schedulers for one in rank.waiting)
        fetching = [one for rank in self.schedulers for one in rank.fetching if one[1].status is None]
        return len(self.sent) + here + len(fetching)

    @property
    def running(self) -> int:
        drain = sum(self._drains(one) for rank in self.schedulers for one in rank.waiting)
        return drain + sum(len(rank.running) for rank in self.schedulers)

    @staticmethod
    def _drains(request: Request) -> bool:
        """Whether its last token is under way, with which it keeps a place though it lost its blocks."""
        return request.sent == request.output

    @property
    def blocks(self) -> int:
        return sum(self.settings.num_gpu_blocks - rank.free for rank in self.schedulers)

    def push(self, request: Request) -> None:
        """Take a request that is on its way or here."""
        self.sent.append(request)
        self.pushed += 1
        self.pushed_tokens += request.prompt

    def looked_up_tokens(self) -> int:
        """Tokens of prompts that were admitted, or given up before they were."""
        return sum(one.prompt for one in self.given_up) + sum(
            int(rank.trace.input_tokens[index]) for rank in self.schedulers for index in rank.first_found
        )

    @property
    def next_us(self) -> float:
        """When its next event is."""
        if self.queue:
            return self.end_us
        times_us = [one.arrival_us for one in [*self.sent][:1]]
        times_us += [rank.idle_until_us for rank in self.schedulers if rank.fetching]
        return max(self.now_us, min(times_us)) if times_us else math.inf

    def advance(self, until_us: float) -> None:
        """Do all that happens before a time."""
        while self.next_us < until_us:
            self.complete()
            self.drop()
            self.schedule()

    def complete(self) -> None:
        """Go to the next event, which may end a step."""
        self.now_us = self.next_us
        self.ended = []
        if not self.queue:
            return
        self._drop(lambda deadline_us: deadline_us < self.now_us)
        self.steps += 1
        for rank, step in zip(self.schedulers, self.queue.popleft(), strict=True):
            for request in step.with_token:
                if request.status is not None:
                    continue
                request.seen += 1
                if request.seen == 1:
                    request.first_us = self.now_us
                if request.seen == request.output:
                    request.last_us = self.now_us
                    self._leave(rank, request, FINISHED)

    def arrive(self) -> None:
        while self.sent and self.sent[0].arrival_us <= self.now_us:
            rule = self.rules.settings.assignment if self.rules else "least_load"
            has = [
                (len(rank.waiting) + len(rank.fetching), len(rank.running), rank.blocks)
                for rank in self.schedulers
            ]
            self.schedulers[assigned(rule, has, self.given)].arrive(self.sent.popleft())
            self.given += 1

    def drop(self) -> None:
        """Let requests out that have no time left."""
        self.arrive()
        self._drop(lambda deadline_us: deadline_us <= self.now_us)

    def _drop(self, is_over: Callable[[float], bool]) -> None:
        for rank in self.schedulers:
            for request in rank.in_order:
                if is_over(request.deadline_us):
                    self._leave(rank, request, TIMED_OUT)

    def schedule(self) -> None:
        """Make steps until one runs and, with asynchronous scheduling, one more is made."""
        self.arrive()
        while len(self.queue) < (2 if self.settings.async_scheduling else 1):
            for rank in self.schedulers:
                rank.now_us = self.now_us
            begins = self._prompts_begin()
            for rank in self.schedulers:
                rank.begins_us = self.now_us
                if self.queue:
                    rank.begins_us += max(self._times_us(self.queue[0]))
            made = [rank.make_step(admits=begins, pauses=self._pauses(rank)) for rank in self.schedulers]
            if not any(step.requests for step in made):
                was_pause = self.in_a_row < self.free_from
                if not self.queue:
                    self.in_a_row = self.free_from = 0
                if self.queue or not was_pause:
                    break
                continue
            if self.rules is not None:
                self.rules.note_times(made, self.queue[-1] if self.queue else None, self.schedulers)
            else:
                for rank, step in zip(self.schedulers, made, strict=True):
                    if step.requests:
                        step.time_us = rank.with_fetches(self.step_us(step.new_tokens, step.context_len))
            self.queue.append(made)
            self.in_a_row += 1
            if any(any(step.is_prompt) for step in made):
                self.free_from = self.in_a_row + self.settings.prefill_decode_interval
        if self.queue:
            self.end_us = self.now_us + max(self._times_us(self.queue[0]))

    def _times_us(self, made: Sequence[Step]) -> list[float]:
        return [step.time_us for step in made if step.requests]

    def _pauses(self, rank: Scheduler) -> bool | None:
        """Whether a rank's prompts wait: all ranks count the same steps; None of an engine by itself."""
        if self.ranks == 1:
            return None
        if self.settings.order == "prefill_first":
            return self.in_a_row < self.free_from
        is_off = self.in_a_row % self.settings.prefill_schedule_interval > 0
        return is_off and rank.has_decodes and not rank.is_backlogged

    def _prompts_begin(self) -> bool:
        """Whether waiting prompts may begin: all ranks have one, one has no decodes, or time is up."""
        wait = self.rules.settings.balance_steps if self.rules else 0
        if not wait:
            return True
        if not all(rank.has_prompt for rank in self.schedulers):
            self.held_steps += 1
            if all(rank.decodes for rank in self.schedulers) and self.held_steps < wait:
                return False
        self.held_steps = 0
        return True

    def _leave(self, rank: Any, request: Request, status: int) -> None:
        if self.trace is not None and request.index not in rank.first_found:
            self.given_up.append(request)
        rank.leave(request)
        request.status = status
        self.ended.append(request)


def assigned(rule: str, has: Sequence[tuple[int, int, int]], given: int) -> int:
    """Which rank gets a request, of the requests that wait and run at each and the blocks that it holds.

    ``given`` are the requests that they were given before.
    """
    places = range(len(has))
    if rule == "round_robin":
        return given % len(has)
    if rule == "fewest_tokens":
        active = [waiting + running for waiting, running, _ in has]
        share = max(math.ceil((sum(active) + 1) / len(has)), max(active))
        return min((at for at in places if active[at] < share), key=lambda at: has[at][2], default=0)
    return min(places, key=lambda at: WAITING_WEIGHT * has[at][0] + has[at][1])


@dataclass
class RanksApart:
    """Engines that are the ranks of one replica."""

    engines: Sequence[Engine]

    @property
    def waiting(self) -> int:
        return sum(engine.waiting for engine in self.engines)

    @property
    def running(self) -> int:
        return sum(engine.running for engine in self.engines)

    @property
    def blocks(self) -> int:
        return sum(engine.blocks for engine in self.engines)

    @property
    def pushed(self) -> int:
        return sum(engine.pushed for engine in self.engines)


Route = Callable[[int, Request, Sequence[Engine]], int]
"""Which engine gets the request of this index."""


def round_robin(index: int, request: Request, engines: Sequence[Engine]) -> int:
    return index % len(engines)


def least_outstanding(index: int, request: Request, engines: Sequence[Engine]) -> int:
    return min(range(len(engines)), key=lambda at: engines[at].waiting + engines[at].running)


def least_load(index: int, request: Request, engines: Sequence[Engine]) -> int:
    """Go where waiting requests, four times, and running ones are fewest."""
    return min(range(len(engines)), key=lambda at: WAITING_WEIGHT * engines[at].waiting + engines[at].running)


def least_kv(index: int, request: Request, engines: Sequence[Engine]) -> int:
    """Go where fewest blocks are held; of equals, where fewest wait, then where fewest run."""
    return min(
        range(len(engines)),
        key=lambda at: (engines[at].blocks, engines[at].waiting, engines[at].running),
    )


def prefix_aware(index: int, request: Request, engines: Sequence[Engine]) -> int:
    """Go where the fewest blocks come together: held, of prompts that wait, and to compute for this one.

    Of equals go to the one that was sent the fewest requests.
    """
    return min(range(len(engines)), key=lambda at: (blocks_to_come(request, engines[at]), engines[at].pushed))


def blocks_to_come(request: Request, engine: Any) -> int:
    """Blocks that an engine, or ranks apart, will hold with a request."""
    engines = engine.engines if isinstance(engine, RanksApart) else [engine]
    ranks = [rank for one in engines for rank in one.schedulers]
    size = ranks[0].settings.block_size
    most = (request.prompt - 1) // size
    held = max(len(rank.pool.find([rank.key(request, place) for place in range(most)])) for rank in ranks)
    waiting = sum(one.pushed_tokens - one.looked_up_tokens() for one in engines)
    return int(engine.blocks + ranks[0].blocks_of(waiting + request.prompt - held * size))


def drawn_route(drawn: Sequence[Sequence[int]]) -> Route:
    """The one with fewer requests of two drawn replicas."""

    def route(index: int, request: Request, engines: Sequence[Engine]) -> int:
        return min(drawn[index], key=lambda at: engines[at].waiting + engines[at].running)

    return route


def ranks_apart(route: Route, apart: int, rule: str) -> Route:
    """Route to replicas of so many engines each, and within one by a rule of ranks."""
    given = Counter[int]()

    def choose(index: int, request: Request, engines: Sequence[Engine]) -> int:
        replicas = [RanksApart(engines[at : at + apart]) for at in range(0, len(engines), apart)]
        replica = route(index, request, replicas)  # type: ignore[arg-type]
        has = [(one.waiting, one.running, one.blocks) for one in replicas[replica].engines]
        given[replica] += 1
        return replica * apart + assigned(rule, has, given[replica] - 1)

    return choose


ROUTES: dict[str, Route] = {
    "round_robin": round_robin,
    "least_outstanding": least_outstanding,
    "least_load": least_load,
    "least_kv": least_kv,
    "prefix_aware": prefix_aware,
}


class Served(NamedTuple):
    """What became of a trace: its requests in its order, who served each, and the engines."""

    requests: list[Request]
    replica: list[int]
    engines: list[Engine]

    @property
    def first_us(self) -> list[float]:
        return [request.first_us for request in self.requests]

    @property
    def last_us(self) -> list[float]:
        return [request.last_us for request in self.requests]


def requests_of(trace: Any, settings: Any) -> list[Request]:
    requests = linked_requests(trace)
    for request, arrival_s in zip(requests, trace.arrival_s, strict=True):
        request.arrival_us = float(arrival_s) * US_PER_S
        request.deadline_us = request.arrival_us + settings.timeout_s * US_PER_S
    return requests


def run_engines(
    requests: list[Request],
    settings: Any,
    step_us: StepUs,
    replicas: int,
    route: Route,
    *,
    ranks: int = 1,
    rules: Ranks | None = None,
    trace: Any = None,
    scheduler: Callable[[], Any] | None = None,
) -> Served:
    """Serve requests, sorted by arrival, by so many engines of a kind."""
    engines = [Engine(settings, step_us, ranks, rules, trace, scheduler) for _ in range(replicas)]
    replica = []
    for index, request in enumerate(requests):
        for engine in engines:
            engine.advance(request.arrival_us)
        at = route(index, request, engines)
        engines[at].push(request)
        replica.append(at)
    for engine in engines:
        engine.advance(math.inf)
    return Served(requests, replica, engines)


def run_closed_loop(
    requests: list[Request],
    settings: Any,
    step_us: StepUs,
    replicas: int,
    route: Route,
    clients: int = 0,
    think_us: float = 0.0,
    *,
    ranks: int = 1,
    rules: Ranks | None = None,
    trace: Any = None,
    scheduler: Callable[[], Any] | None = None,
) -> Served:
    """Serve sessions, or clients who send a request ``think_us`` after the end of their last, event by event.

    Of engines whose steps end at one time, the first goes first; of an engine's instants, the requests that
    it ends free its room, their clients' next ones are routed, then its next step is made.
    """
    engines = [Engine(settings, step_us, ranks, rules, trace, scheduler) for _ in range(replicas)]
    timeout_us = settings.timeout_s * US_PER_S
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
            at = route(request.index, request, engines)
            replica[request.index] = at
            engines[at].push(request)

    def send_ended(engine: Engine) -> None:
        for ended in engine.ended:
            send_next(engine.now_us + think_us)
            for child in freed_children(ended, requests):
                if child.index in freed:
                    # its parents ended at once
                    continue
                freed.add(child.index)
                send(child, max(child.arrival_us, engine.now_us + child.delay_us), timeout_us)
                insort(coming, child, key=lambda one: (one.arrival_us, one.index))
        engine.ended = []
        route_until(engine.now_us)

    for _ in range(clients):
        send_next(0.0)
    while True:
        at = min(range(replicas), key=lambda at: engines[at].next_us)
        if coming and coming[0].arrival_us <= engines[at].next_us:
            route_until(coming[0].arrival_us)
            continue
        engine = engines[at]
        if engine.next_us == math.inf:
            return Served(requests, replica, engines)
        engine.complete()
        send_ended(engine)
        engine.drop()
        send_ended(engine)
        engine.schedule()
