"""Replicas over a pool of blocks each, naively: engines that can be stopped, and a router that asks them."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from tests.reference.block_pool import PooledScheduler
from tests.reference.scheduler import US_PER_S, Request, Step, StepUs


class Replica:
    """One engine, open loop, whose clients do not give up."""

    def __init__(self, trace: Any, settings: Any, step_us: StepUs) -> None:
        self.scheduler = PooledScheduler(settings, trace)
        self.settings, self.step_us = settings, step_us
        self.coming: deque[Request] = deque()
        self.queue: deque[Step] = deque()
        self.now_us = self.end_us = 0.0
        self.sent = 0

    def push(self, request: Request) -> None:
        self.coming.append(request)
        self.sent += 1

    def advance(self, until_us: float) -> None:
        """Do all that happens before a time."""
        while True:
            next_us = max(self.now_us, self.coming[0].arrival_us) if self.coming else math.inf
            if self.queue:
                next_us = self.end_us
            if next_us >= until_us:
                return
            self.now_us = next_us
            self._end_step()
            while self.coming and self.coming[0].arrival_us <= self.now_us:
                self.scheduler.waiting.append(self.coming.popleft())
            while len(self.queue) <= int(self.settings.async_scheduling):
                made = self.scheduler.make_step()
                if not made.requests:
                    break
                self.queue.append(made)
            if self.queue:
                self.end_us = self.now_us + self.step_us(self.queue[0].new_tokens, self.queue[0].context_len)

    def _end_step(self) -> None:
        for request in self.queue.popleft().with_token if self.queue else ():
            request.seen += 1
            if request.seen == 1:
                request.first_us = self.now_us
            if request.seen == request.output:
                request.last_us = self.now_us
                self.scheduler.leave(request)

    def blocks_to_come(self, request: Request) -> int:
        """Blocks in use, and those that prompts which wait and this one would take at most."""
        scheduler = self.scheduler
        most = (request.prompt - 1) // self.settings.block_size
        held = scheduler.pool.find([scheduler.key(request, place) for place in range(most)])
        waiting = [
            each for each in (*self.coming, *scheduler.waiting) if each.index not in scheduler.first_found
        ]
        tokens = sum(each.prompt for each in (*waiting, request)) - len(held) * self.settings.block_size
        return self.settings.num_gpu_blocks - len(scheduler.pool.queue) + scheduler.blocks_of(tokens)


def serve_prefix_aware(
    trace: Any, settings: Any, step_us: StepUs, count: int
) -> tuple[list[Request], list[int], list[Replica]]:
    """Send each request where it takes the fewest blocks; of equals to that which was sent the fewest."""
    replicas = [Replica(trace, settings, step_us) for _ in range(count)]
    sizes = zip(trace.input_tokens, trace.output_tokens, trace.cached_tokens, strict=True)
    requests = [Request(index, *map(int, each)) for index, each in enumerate(sizes)]
    chosen = []
    for request in requests:
        request.arrival_us = float(trace.arrival_s[request.index]) * US_PER_S
        for replica in replicas:
            replica.advance(request.arrival_us)
        loads = [(replica.blocks_to_come(request), replica.sent) for replica in replicas]
        chosen.append(loads.index(min(loads)))
        replicas[chosen[-1]].push(request)
    for replica in replicas:
        replica.advance(math.inf)
    return requests, chosen, replicas
