"""A second scheduler in plain Python, of open loops: a witness for the first, and a baseline of speed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.units import US_PER_S

WAITING_WEIGHT: Final = 4
"""Running requests that a waiting one counts as, where a new one goes to the rank with the least load."""


class TimedRequest(NamedTuple):
    """One request; its first chunk finds cached tokens of its prompt."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Schedule:
    """How an engine makes steps of requests: the limits of one rank; the steps of all ranks start together.

    An asynchronous one makes a step while the one before it runs, so that arrivals, free places and free
    blocks are seen a step late.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int = 16
    ranks: int = 1
    is_asynchronous: bool = True

    def blocks_of(self, tokens: int) -> int:
        """Return the blocks that so many tokens of one request need."""
        return -(-tokens // self.block_size)


class ReplayedTimes(NamedTuple):
    """When each client had its first and last token, on the clock of the arrivals."""

    first_token_s: Floats
    last_token_s: Floats
    steps: int
    preemptions: int


RankStep = tuple[list[int], list[int]]
"""New tokens and context of each request that a rank runs in a step."""


@dataclass(eq=False)
class _Request:
    """A request on its way: what is computed and sent counts from when it is scheduled."""

    index: int
    prompt: int
    output: int
    cached: int
    computed: int = 0
    sent: int = 0
    blocks: int = 0
    tokens_seen: int = 0

    @property
    def to_compute(self) -> int:
        """Tokens that its next step may compute; none where its last one is under way."""
        return 0 if self.sent == self.output else self.prompt + self.sent - self.computed


class _Scheduled(NamedTuple):
    """A step as one rank runs it, and the requests that have a token after it."""

    new_tokens: list[int]
    context_len: list[int]
    with_token: list[_Request]


@dataclass
class _Rank:
    schedule: Schedule
    waiting: deque[_Request] = field(default_factory=deque)
    running: list[_Request] = field(default_factory=list)
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.free = self.schedule.num_blocks

    @property
    def load(self) -> int:
        return WAITING_WEIGHT * len(self.waiting) + len(self.running)

    def make_step(self) -> _Scheduled:
        """Schedule one step: running requests first, in order of admission, then waiting ones."""
        step = _Scheduled([], [], [])
        budget = self.schedule.max_num_batched_tokens
        preempted = False
        place = 0
        while place < len(self.running) and budget:
            request = self.running[place]
            new = min(request.to_compute, budget)
            if new and not self._take_blocks(request, request.computed + new):
                preempted = True
                victim = self._preempt_last()
                if victim is request:
                    break
                continue
            if new:
                budget -= self._run(step, request, new)
            place += 1
        while not preempted and budget and self.waiting and len(self.running) < self.schedule.max_num_seqs:
            request = self.waiting[0]
            computed = request.cached
            whole = request.prompt + request.sent
            # an engine admits a prompt only if all of it has room, though it takes blocks chunk by chunk
            if self.schedule.blocks_of(whole) > self.free:
                break
            new = min(whole - computed, budget)
            self._take_blocks(request, computed + new)
            request.computed = computed
            self.running.append(self.waiting.popleft())
            budget -= self._run(step, request, new)
        return step

    def _run(self, step: _Scheduled, request: _Request, new: int) -> int:
        step.new_tokens.append(new)
        step.context_len.append(request.computed)
        request.computed += new
        if request.computed == request.prompt + request.sent:
            request.sent += 1
            step.with_token.append(request)
        return new

    def _take_blocks(self, request: _Request, tokens: int) -> bool:
        needed = self.schedule.blocks_of(tokens) - request.blocks
        if needed > self.free:
            return False
        if needed > 0:
            request.blocks += needed
            self.free -= needed
        return True

    def _preempt_last(self) -> _Request:
        victim = self.running.pop()
        self._release(victim)
        # it computes its prompt and what it has sent again, from the start
        victim.computed = victim.cached = 0
        self.waiting.appendleft(victim)
        self.preemptions += 1
        return victim

    def _release(self, request: _Request) -> None:
        self.free += request.blocks
        request.blocks = 0

    def finish(self, request: _Request) -> None:
        """Give its place and blocks back; it may have lost both while its last token was under way."""
        self._release(request)
        (self.running if request in self.running else self.waiting).remove(request)


def replay(
    requests: Sequence[TimedRequest],
    step_us: Callable[[Sequence[RankStep]], float],
    schedule: Schedule,
) -> ReplayedTimes:
    """Replay requests through the scheduler of vLLM, with what a step of each rank's requests takes, us.

    Where steps are scheduled asynchronously, step k + 1 is made when step k starts: with the arrivals until
    then, and with the places and blocks of requests that ended with step k - 1. An idle engine starts at an
    arrival. A new request goes to the rank with the least load. After a preemption nothing is cached.
    """
    by_arrival = sorted(range(len(requests)), key=lambda index: requests[index].arrival_s)
    arrivals = deque(by_arrival)
    ranks = [_Rank(schedule) for _ in range(schedule.ranks)]
    first_s, last_s = np.full(len(requests), math.nan), np.full(len(requests), math.nan)
    # those that run, then those that were made while these run
    queue: deque[list[_Scheduled]] = deque()
    depth = 2 if schedule.is_asynchronous else 1
    now_s, end_s, steps = 0.0, 0.0, 0
    while True:
        while arrivals and requests[arrivals[0]].arrival_s <= now_s:
            _arrive(requests, arrivals.popleft(), ranks)
        while len(queue) < depth:
            made = [rank.make_step() for rank in ranks]
            if not any(step.new_tokens for step in made):
                break
            queue.append(made)
            if len(queue) == 1:
                end_s = now_s + _step_s(made, step_us)
        if not queue:
            if not arrivals:
                break
            now_s = requests[arrivals[0]].arrival_s
            continue
        now_s = end_s
        steps += 1
        for rank, step in zip(ranks, queue.popleft(), strict=True):
            for request in step.with_token:
                request.tokens_seen += 1
                if request.tokens_seen == 1:
                    first_s[request.index] = now_s
                if request.tokens_seen == request.output:
                    last_s[request.index] = now_s
                    rank.finish(request)
        if queue:
            end_s = now_s + _step_s(queue[0], step_us)
    return ReplayedTimes(first_s, last_s, steps, sum(rank.preemptions for rank in ranks))


def _arrive(requests: Sequence[TimedRequest], index: int, ranks: Sequence[_Rank]) -> None:
    request = requests[index]
    least = min(ranks, key=lambda rank: rank.load)
    least.waiting.append(_Request(index, request.prompt_tokens, request.output_tokens, request.cached_tokens))


def _step_s(step: Sequence[_Scheduled], step_us: Callable[[Sequence[RankStep]], float]) -> float:
    return step_us([(of_rank.new_tokens, of_rank.context_len) for of_rank in step]) / US_PER_S
