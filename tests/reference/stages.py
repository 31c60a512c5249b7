"""An engine with pipeline stages, naively: batches that follow each other through them.

Each batch is a scheduler of ``tests.reference.scheduler``, over waiting requests and blocks that all share.
Times are us.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from tests.reference.scheduler import (
    FINISHED,
    TIMED_OUT,
    US_PER_S,
    Request,
    Scheduler,
    Step,
    StepUs,
    freed_children,
    requests_of,
    send,
)


class Batch(Scheduler):
    """A batch's scheduler; ``engine`` has what all batches share."""

    def __init__(self, settings: Any, engine: Stages) -> None:
        self.engine = engine
        super().__init__(settings, engine.waiting)

    @property
    def free(self) -> int:
        return self.engine.free

    @free.setter
    def free(self, blocks: int) -> None:
        self.engine.free = blocks


@dataclass
class Stages:
    """An engine of so many stages."""

    settings: Any
    step_us: StepUs
    stages: int
    trace: Any
    waiting: deque[Request] = field(default_factory=deque)
    free: int = 0
    now_us: float = 0.0

    def __post_init__(self) -> None:
        # a batch is scheduled when its step before has ended
        self.settings = replace(self.settings, async_scheduling=False)
        self.batches: list[Any] = []
        for _ in range(self.stages):
            self.batches.append(Batch(self.settings, self))
            self.batches[-1].number = len(self.batches) - 1
        self.free_us = [0.0] * self.stages
        self.in_flight: deque[tuple[Any, Step]] = deque()
        self.came = 0
        self.requests = requests_of(self.trace)
        self.timeout_us = self.settings.timeout_s * US_PER_S
        is_closed = self.trace.clients is not None
        self.unsent = deque(self.requests if is_closed else ())
        self.coming: deque[Request] = deque()
        for request in self.requests:
            request.arrival_us = float(self.trace.arrival_s[request.index]) * US_PER_S
            if not is_closed and not request.parents:
                self.coming.append(send(request, request.arrival_us, self.timeout_us))

    def serve(self) -> list[Request]:
        for _ in range(self.trace.clients or 0):
            self._send_next(0.0)
        while self.in_flight or self.coming:
            first = self.batches[0]
            if self.in_flight:
                first, step = self.in_flight.popleft()
                self.now_us = step.end_us
                before_us = math.nextafter(self.now_us, -math.inf)
                self._arrive(before_us)
                self._give_up(before_us)
                self._see(first, step)
            else:
                self.now_us = max(self.now_us, self.coming[0].arrival_us)
            self._arrive(self.now_us)
            self._give_up(self.now_us)
            self._arrive(self.now_us)
            self._schedule(first.number)
            if not self.in_flight and self.waiting:
                self._schedule(first.number)
        return self.requests

    def _send_next(self, at_us: float) -> None:
        if self.unsent:
            self.coming.append(send(self.unsent.popleft(), at_us, self.timeout_us))

    def _arrive(self, until_us: float) -> None:
        while self.coming and self.coming[0].arrival_us <= until_us:
            self.batches[0].arrive(self.coming.popleft())

    def _leave(self, batch: Any, request: Request, status: int) -> None:
        batch.leave(request)
        request.status = status
        if self.trace.clients is not None:
            self._send_next(self.now_us + self.trace.think_s * US_PER_S)
        for child in freed_children(request, self.requests):
            send(child, max(child.arrival_us, self.now_us + child.delay_us), self.timeout_us)
            insort(self.coming, child, key=lambda one: (one.arrival_us, one.index))

    def _give_up(self, until_us: float) -> None:
        for batch in self.batches:
            for request in [*batch.running, *(self.waiting if batch is self.batches[0] else ())]:
                if request.deadline_us <= until_us:
                    self._leave(batch, request, TIMED_OUT)

    def _see(self, batch: Any, step: Step) -> None:
        """Let clients see the tokens of a step."""
        for request in step.with_token:
            if request.status is not None:
                continue
            request.seen += 1
            if request.seen == 1:
                request.first_us = self.now_us
            if request.seen == request.output:
                request.last_us = self.now_us
                self._leave(batch, request, FINISHED)

    def _schedule(self, first: int) -> None:
        """Send steps of batches that are not on their way, in turn from the first on."""
        busy = [batch for batch, _ in self.in_flight]
        for at in range(self.stages):
            batch = self.batches[(first + at) % self.stages]
            if any(batch is one for one in busy):
                continue
            others = sum(len(one.running) for one in self.batches if one is not batch)
            most = self.settings.max_num_seqs - others
            if self.settings.order == "prefill_first":
                most = max(self.settings.max_num_seqs // self.stages, 1)
            # one that was preempted starts with room for all of it; else batches may preempt forever
            whole = self.settings.admit_whole_prompt or any(one.preemptions for one in self.waiting)
            changed = {"max_num_seqs": most, "admit_whole_prompt": whole}
            batch.settings = SimpleNamespace(**vars(self.settings) | changed)
            step = batch.make_step()
            if not step.requests:
                continue
            stage_us = self.step_us(step.new_tokens, step.context_len) / self.stages
            at_us = self.now_us
            for stage in range(self.stages):
                at_us = self.free_us[stage] = max(at_us, self.free_us[stage]) + stage_us
            step.end_us = at_us
            self.in_flight.append((batch, step))
