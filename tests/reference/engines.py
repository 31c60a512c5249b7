"""Engines, naively: ranks that step together, each with its queue and its KV blocks.

Each has a scheduler of ``tests.reference.scheduler``; here is what goes on around them. Times are us.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fastroof.compiled import steps
from fastroof.plan.calls import rank_rules
from tests.reference.scheduler import FINISHED, TIMED_OUT, Request, Scheduler, Step, StepUs

WAITING_WEIGHT = 4


@dataclass
class Ranks:
    """How ranks step that wait for each other.

    ``settings`` is an engine's data_parallel; ``experts_us`` returns the time of parts that depend on
    the tokens of all ranks, from that number and whether the step has decodes alone.
    """

    settings: Any
    step_us: StepUs
    experts_us: Callable[[float, bool], float]
    floor_us: float = 0.0
    hides_host: bool = False
    """Whether the host launches a step with prompts, ``floor_us``, while the one made before it runs."""
    drafts: Any = None

    @classmethod
    def of_plan(cls, plan: Any) -> Ranks | None:
        """The rules of a plan; None if its ranks are separate engines."""
        if not rank_rules(plan).in_lockstep:
            return None
        plan = plan.bottleneck
        header = [int(plan.arena[slot]) for slot in (steps.EXPERT_AT, steps.DECODE_EXPERT_AT)]
        rows = [plan.arena[at : at + plan.max_num_batched_tokens + 1] for at in header]

        def experts_us(total: float, is_decode: bool) -> float:
            if not header[0]:
                return 0.0
            tokens = min(max(total / plan.layout.dp, 1.0), float(plan.max_num_batched_tokens))
            at = min(int(tokens), plan.max_num_batched_tokens - 1)
            low, high = rows[is_decode][at : at + 2]
            return float(low + (high - low) * (tokens - at))

        floor_us = float(plan.arena[steps.PREFILL_FLOOR_US])
        arena = plan.arena.copy()
        arena[steps.PREFILL_FLOOR_US] = 0.0
        kernels = replace(plan, arena=arena)
        hides_host = plan.profile.scheduling.hides_host
        return cls(plan.profile.data_parallel, kernels.step_scalar, experts_us, floor_us, hides_host)

    def note_times(
        self, made: Sequence[Step], before: Sequence[Step] = (), schedulers: Sequence[Scheduler] = ()
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
                last = before[rank] if before and self.hides_host else Step()
                step.host_us = max(self.floor_us - (last.time_us - last.host_us), 0.0)
            own = self.experts_us(dp * sum(step.new_tokens), is_of_decodes(step))
            draft_us = 0.0
            if self.drafts is not None:
                us, draft_us = self.drafts.times_us(step, 0.0)
            else:
                us = self.step_us(step.new_tokens, step.context_len)
            us = max(us, step.host_us) + draft_us
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
    return not step.computes_prompts


class TakesReserved(Scheduler):
    """A scheduler whose requests arrive with their blocks, and start before preempted ones."""

    def arrive(self, request: Request) -> None:
        super().arrive(request)
        self._start_with_new()

    def preempt(self, victim: Request) -> None:
        super().preempt(victim)
        self._start_with_new()

    def _start_with_new(self) -> None:
        self.waiting = deque(sorted(self.waiting, key=lambda one: one.preemptions > 0))

    def cached(self, request: Request) -> int:
        self.looked_at = request
        return super().cached(request)

    def needs(self, tokens: int) -> int:
        return self.blocks_of(tokens) - self.looked_at.blocks


class Flight(NamedTuple):
    """A step of all ranks, of one lane of each, and when it runs."""

    lane: int
    made: list[Step]
    start_us: float
    end_us: float

    @property
    def time_us(self) -> float:
        return max(step.time_us for step in self.made if step.requests)


class Engine:
    """One engine of a pool of ``tests.reference.pools``, with what it has been sent.

    Its ranks' schedulers have a lane for each pipeline stage.
    """

    def __init__(self, pool: Any) -> None:
        self.pool, self.settings = pool, pool.settings
        if pool.stages > 1:
            # a lane's step is made when the one before it has ended
            self.settings = replace(pool.settings, async_scheduling=False)
        self.depth = 2 if self.settings.async_scheduling else 1
        self.schedulers = [pool.scheduler(self.settings) for _ in range(pool.ranks)]
        for rank in self.schedulers:
            rank.drafts = pool.drafts
            rank.lanes = [[] for _ in range(pool.stages)]
        self.sent: deque[Request] = deque()
        self.wanting: deque[Request] = deque()
        """Requests that wait for room here before they are sent."""
        self.on_the_way = 0
        """Requests that have room, and are being sent."""
        self.queue: deque[Flight] = deque()
        self.free_us = [0.0] * pool.stages
        """When each stage has done what it was given."""
        self.ended: list[tuple[Request, Any]] = []
        """Requests that ended in its last event, and their ranks."""
        self.now_us = self.took_us = 0.0
        """When its last event was, and how long the step took that ended then."""
        self.first = 0
        """The lane whose step is made first."""
        self.done: list[Flight] = []
        """What has ended."""
        self.gaps_us: list[float] = []
        """All gaps between tokens."""
        self.given = 0
        """Requests that its ranks were given."""
        self.held_steps = 0
        """Steps that prompts have waited for those of other ranks."""
        self.in_a_row = 0
        """Steps since all ranks were idle."""
        self.free_from = 0
        """Of those, the number from which prompts may run, in an engine that runs them first."""

    @property
    def waiting(self) -> int:
        here = sum(not drains(one) for rank in self.schedulers for one in rank.waiting)
        fetching = sum(one[1].status is None for rank in self.schedulers for one in rank.fetching)
        return len(self.sent) + here + fetching + len(self.wanting) + self.on_the_way

    @property
    def running(self) -> int:
        drain = sum(drains(one) for rank in self.schedulers for one in rank.waiting)
        return drain + sum(rank.slots_in_use for rank in self.schedulers)

    @property
    def blocks(self) -> int:
        return sum(rank.blocks for rank in self.schedulers)

    @property
    def next_us(self) -> float:
        """When its next event is."""
        if self.queue:
            return self.queue[0].end_us
        times_us = [one.arrival_us for one in [*self.sent][:1]]
        times_us += [rank.idle_until_us for rank in self.schedulers if rank.fetching]
        return max(self.now_us, min(times_us)) if times_us else math.inf

    def complete(self) -> None:
        """Go to the next event, which may end a step."""
        self.now_us = self.next_us
        self.first = 0
        if not self.queue:
            return
        self._drop(lambda deadline_us: deadline_us < self.now_us)
        flight = self.queue.popleft()
        self.first, self.took_us = flight.lane, flight.time_us
        self.done.append(flight)
        for rank, step in zip(self.schedulers, flight.made, strict=True):
            for request, tokens in zip(step.with_token, step.tokens, strict=True):
                if request.status is not None:
                    continue
                request.seen += tokens
                if math.isnan(request.first_us):
                    request.first_us = self.now_us
                else:
                    self.gaps_us.append(self.now_us - request.newest_us)
                request.newest_us = self.now_us
                if request.seen == request.output:
                    request.last_us = self.now_us
                    self._leave(rank, request, FINISHED)

    def arrive(self) -> None:
        while self.sent and self.sent[0].arrival_us <= self.now_us:
            rule = self.pool.rules.settings.assignment if self.pool.rules else "least_load"
            has = [
                (len(rank.waiting) + len(rank.fetching), rank.slots_in_use, rank.blocks)
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
                if request.status is None and is_over(request.deadline_us):
                    self._leave(rank, request, TIMED_OUT)

    def _leave(self, rank: Any, request: Request, status: int) -> None:
        rank.leave(request)
        request.status = status
        self.ended.append((request, rank))

    def schedule(self) -> None:
        """Make steps until each lane has one and, with asynchronous scheduling, one more."""
        self.arrive()
        # again if prompts paused beside no decodes, or the only request that ran gave its blocks back
        for _ in range(2):
            for turn in range(self.pool.stages):
                lane = (self.first + turn) % self.pool.stages
                for _ in range(self.depth - sum(flight.lane == lane for flight in self.queue)):
                    if not self._make_step(lane):
                        break
            if self.queue:
                return

    def _make_step(self, lane: int) -> bool:
        """Make a step of one lane; returns whether it has any request."""
        ranks = self.schedulers
        for rank in ranks:
            rank.turn_to(lane, self.now_us, max(self.now_us, self.free_us[0]))
        begins = self._prompts_begin()
        made = [rank.make_step(admits=begins, pauses=self._pauses(rank)) for rank in ranks]
        if not any(step.requests for step in made):
            if not self.queue:
                self.in_a_row = self.free_from = 0
            return False
        before = self.queue[-1].made if self.queue and self.depth > 1 else [Step()] * len(made)
        if self.pool.rules is not None:
            self.pool.rules.note_times(made, before, ranks)
        else:
            for rank, step, last in zip(ranks, made, before, strict=True):
                if step.requests:
                    self._note_time(rank, step, last)
        flight = Flight(lane, made, max(self.now_us, self.free_us[0]), math.nan)
        at_us = self.now_us
        for stage, free_us in enumerate(self.free_us):
            at_us = self.free_us[stage] = max(at_us, free_us) + flight.time_us / len(self.free_us)
        self.queue.append(flight._replace(end_us=at_us))
        self.in_a_row += 1
        if any(any(step.is_prompt) for step in made):
            self.free_from = self.in_a_row + self.settings.prefill_decode_interval
        return True

    def _note_time(self, rank: Scheduler, step: Step, last: Step) -> None:
        """Note a step's time; one with prompts is launched from when the last one starts, or is launched."""
        draft_us = 0.0
        if self.pool.drafts is not None:
            step.time_us, draft_us = self.pool.drafts.times_us(step)
        else:
            step.time_us = self.pool.step_us(step.new_tokens, step.context_len)
        if step.computes_prompts:
            step.host_us = max(self.pool.host_us - (last.time_us - last.host_us), 0.0)
            step.time_us = max(step.time_us, step.host_us)
        step.time_us += draft_us
        step.time_us = rank.with_fetches(step.time_us)

    def _pauses(self, rank: Scheduler) -> bool | None:
        """Whether a rank's prompts wait: all ranks count the same steps; None of an engine by itself."""
        if len(self.schedulers) == 1:
            return None
        if self.settings.order == "prefill_first":
            return self.in_a_row < self.free_from
        is_off = self.in_a_row % self.settings.prefill_schedule_interval > 0
        return is_off and rank.has_decodes and not rank.is_backlogged

    def _prompts_begin(self) -> bool:
        """Whether waiting prompts may begin: all ranks have one, one has no decodes, or time is up."""
        wait = self.pool.rules.settings.balance_steps if self.pool.rules else 0
        if not wait:
            return True
        if not all(rank.has_prompt for rank in self.schedulers):
            self.held_steps += 1
            if all(rank.decodes for rank in self.schedulers) and self.held_steps < wait:
                return False
        self.held_steps = 0
        return True


def drains(request: Request) -> bool:
    """Whether its last token is under way, with which it keeps a place though it lost its blocks."""
    return request.sent == request.output


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
