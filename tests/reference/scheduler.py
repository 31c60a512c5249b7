"""A scheduler, naively: requests and the steps that are made of them, each step a walk over its batch.

What the compiled loop does in a few sums is written out here, to be read: no calendar, no phases, no slots.
Times are us from the trace's start. What happens around a scheduler is in ``tests.reference.engines``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

US_PER_S = 1e6
FINISHED, TIMED_OUT, REJECTED = range(3)

StepUs = Callable[[list[int], list[int]], float]
"""What a step takes, us, of the new tokens and the context of each of its requests."""


@dataclass(eq=False)
class Request:
    """A request on its way. What is computed and sent counts from when it is scheduled, what is seen from
    the end of that step."""

    index: int
    prompt: int
    output: int
    cached: int
    arrival_us: float = math.nan
    deadline_us: float = math.inf
    computed: int = 0
    started: int = 0
    """What was computed when it was admitted last."""
    kept: int = 1
    """Tokens that its last step gives it."""
    has_decoded: bool = False
    """Whether it has decoded since its prompt was computed."""
    came: int = 0
    """How many came before it to its engine."""
    sent: int = 0
    is_cut: bool = False
    blocks: int = 0
    preemptions: int = 0
    seen: int = 0
    first_us: float = math.nan
    newest_us: float = math.nan
    last_us: float = math.nan
    status: int | None = None
    parents: list[int] = field(default_factory=list)
    """Requests that have to end before this one starts."""
    delay_us: float = 0.0
    is_sent_on: bool = False
    """Whether it keeps its blocks after its end, until they are sent to another engine."""

    @property
    def whole(self) -> int:
        """Tokens that must be in the KV cache before the next one can be produced."""
        return self.prompt + self.sent

    @property
    def to_compute(self) -> int:
        """Tokens that its next step may compute; none where its last one is under way (it drains)."""
        return 0 if self.sent == self.output else self.whole - self.computed


@dataclass
class Step:
    """A step: its requests, which of them compute a prompt (again) and which have a token after it, and what
    it takes."""

    requests: list[Request] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    context_len: list[int] = field(default_factory=list)
    is_prompt: list[bool] = field(default_factory=list)
    verifies: list[bool] = field(default_factory=list)
    with_token: list[Request] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """How many tokens each of these gets."""
    has_prompt: bool = False
    time_us: float = 0.0
    host_us: float = 0.0

    @property
    def computes_prompts(self) -> bool:
        """Whether it has a chunk that is not like a decode."""
        every = zip(self.new_tokens, self.context_len, self.verifies, strict=True)
        return any(not verifies and (new > 1 or not past) for new, past, verifies in every)


@dataclass
class Scheduler:
    """Who waits, who runs, and what is free; ``settings`` are fastroof.simulation's EngineSettings.

    Of ``lanes``, one for each pipeline stage, else one, the ``lane`` whose turn it is makes a step.
    """

    settings: Any
    waiting: deque[Request] = field(default_factory=deque)
    lanes: list[list[Request]] = field(default_factory=lambda: [[]])
    lane: int = 0
    drafts: Any = None
    """The draft tokens of ``tests.reference.drafts``."""

    def __post_init__(self) -> None:
        self.free: int = self.settings.num_gpu_blocks
        self.steps = 0
        self.came = 0
        self.prompt_step: int | None = None
        """The last step that computed a prompt; a prompt with one token to compute is a decode to vLLM."""
        self.now_us = self.begins_us = 0.0
        """The time, and when the step that is made next begins."""
        self.fetching: list[Any] = []
        """Requests that wait for blocks from tiers of KV cache, which this one does not have."""
        self.is_backlogged = False
        """Whether requests waited after the last step that prompts were free to join."""
        self.admits_whole: bool = self.settings.admit_whole_prompt

    def turn_to(self, lane: int, now_us: float, begins_us: float) -> None:
        """Let a lane make the next step, which begins at a time."""
        self.lane, self.now_us, self.begins_us = lane, now_us, begins_us
        # the prompt that another lane cut goes on in this one
        if (self.settings.order == "mixed" or self.has_slot) and not any(one.is_cut for one in self.running):
            for other in self.lanes:
                cut = next((one for one in other if one.is_cut), None)
                if cut is not None:
                    other.remove(cut)
                    self.running.append(cut)
                    break
        # one that was preempted starts with room for all of it; else lanes may preempt forever
        lost = len(self.lanes) > 1 and any(one.preemptions for one in self.waiting)
        self.admits_whole = self.settings.admit_whole_prompt or lost

    @property
    def running(self) -> list[Request]:
        """Requests of the lane whose turn it is, in order of admission."""
        return self.lanes[self.lane]

    @property
    def slots_in_use(self) -> int:
        return sum(map(len, self.lanes))

    @property
    def slots(self) -> int:
        """Requests that may run; in engines that run prompts first, each lane has its part."""
        most: int = self.settings.max_num_seqs
        if self.settings.order == "prefill_first":
            return max(most // len(self.lanes), 1) * len(self.lanes)
        return most

    @property
    def has_slot(self) -> bool:
        """Whether one more may begin in this lane."""
        if self.settings.order == "prefill_first":
            return len(self.running) < self.slots // len(self.lanes)
        return self.slots_in_use < self.slots

    def arrive(self, request: Request) -> None:
        request.came = self.came
        self.came += 1
        self.waiting.append(request)

    @property
    def in_order(self) -> list[Request]:
        """All requests in the order in which they came."""
        return sorted((*chain(*self.lanes), *self.waiting), key=lambda request: request.came)

    @property
    def has_decodes(self) -> bool:
        """Whether any that runs has its prompt computed."""
        return any(not request.is_cut for request in self.running)

    @property
    def pauses(self) -> bool:
        """Whether an engine by itself lets prompts, also those that were cut, wait for a later step."""
        if self.prompt_step is None or not self.has_decodes or self.is_backlogged:
            return False
        since = self.steps - self.prompt_step
        if self.settings.order == "mixed":
            return since < self.settings.prefill_schedule_interval
        return since <= self.settings.prefill_decode_interval

    @property
    def waits_for_slots(self) -> bool:
        """Whether prompts that wait do so until more slots are free."""
        if not self.has_decodes or any(request.is_cut for request in self.running):
            return False
        slots = self.settings.max_num_seqs
        return slots - len(self.running) < min(self.settings.min_free_slots_delay, slots)

    @property
    def decodes(self) -> int:
        """Requests that run and have a token to come in the next step."""
        return sum(request.to_compute > 0 and not request.is_cut for request in self.running)

    @property
    def verified(self) -> int:
        """Tokens that a decode computes."""
        return self.drafts.tokens if self.drafts else 1

    @property
    def lookahead(self) -> int:
        """Tokens more for which those that run take blocks."""
        return self.drafts.lookahead if self.drafts else 0

    @property
    def has_prompt(self) -> bool:
        """Whether the next step could compute a prompt: one that was cut, or the first that waits."""
        if any(request.is_cut for request in self.running):
            return True
        settings = self.settings
        budget = settings.max_num_batched_tokens
        if settings.order == "mixed":
            budget -= self.decodes * self.verified
        if not self.waiting or budget <= 0 or not self.has_slot:
            return False
        request = self.waiting[0]
        context = self.cached(request)
        new = request.whole - context
        if new > budget and not settings.chunked_prefill:
            return False
        return max(map(self.needs, self._tokens_needed(request, context + min(new, budget)))) <= self.free

    @property
    def idle_until_us(self) -> float:
        """When something happens to those that wait for blocks, if no step runs."""
        return math.inf

    def with_fetches(self, step_us: float) -> float:
        """What a step takes with what it waits for."""
        return step_us

    def cached(self, request: Request) -> int:
        """Tokens that a request that waits need not compute."""
        return request.cached

    def needs(self, tokens: int) -> int:
        """Free blocks that so many tokens take of the request that was looked at last."""
        return self.blocks_of(tokens)

    def _tokens_needed(self, request: Request, upto: int) -> tuple[int, int]:
        """Tokens that a request takes blocks of when it begins, and of which it wants to see room."""
        tokens = upto
        if self.settings.reserve_output:
            tokens = request.prompt + request.output + self.verified - 1
        return tokens, max(tokens, request.whole) if self.admits_whole else tokens

    def make_step(self, *, admits: bool = True, pauses: bool | None = None) -> Step:
        """Schedule one step, which is empty where there is nothing to do.

        None begins without ``admits``; prompts wait if it ``pauses``, by default as an engine by itself.
        """
        step = Step()
        budget = self.settings.max_num_batched_tokens
        pauses = self.pauses if pauses is None else pauses
        admits = admits and not self.waits_for_slots
        if self.settings.order == "mixed":
            left, preempted = self._run_running(step, budget, no_cut=pauses)
            if admits and not preempted:
                self._admit(step, left, only_single=pauses)
            if not pauses and not preempted:
                self.is_backlogged = bool(self.waiting)
            self._count(step)
            return step
        # prompts alone: the one that was cut, which is the last that runs, then those that wait
        if not pauses:
            left, preempted = self._run_running(step, budget, only_cut=True)
            if admits and not preempted:
                self._admit(step, left)
        if not step.requests:
            self._run_running(step, len(self.running) * self.verified, no_cut=True)
        self._count(step)
        return step

    def _count(self, step: Step) -> None:
        """Count a step, and note whether it computes prompts."""
        if step.requests:
            self.steps += 1
        if step.has_prompt:
            self.prompt_step = self.steps - 1

    def _run_running(
        self, step: Step, budget: int, *, only_cut: bool = False, no_cut: bool = False
    ) -> tuple[int, bool]:
        """Run those that run, in order of admission; the last ones give their blocks where some lack.

        Returns what is left of the budget, and whether anybody was preempted.
        """
        preempted = False
        place = 0
        while place < len(self.running):
            request = self.running[place]
            place += 1
            new = min(request.to_compute, budget)
            verifies = self.drafts is not None and new > 0 and not request.is_cut
            if verifies:
                new = self.verified
                assert new <= budget
            if not new or (only_cut and not request.is_cut) or (no_cut and request.is_cut):
                continue
            while not self._take_blocks(request, request.computed + new + self.lookahead):
                victim = self.running[-1]
                self.preempt(victim)
                preempted = True
                if victim is request:
                    return budget, preempted
            budget -= new
            step.has_prompt |= request.is_cut
            self._run(step, request, new, is_prompt=request.is_cut, verifies=verifies)
        return budget, preempted

    def _admit(self, step: Step, budget: int, *, only_single: bool = False) -> None:
        """Admit those that wait, first come, first served: none is skipped.

        With ``only_single`` only those with one token to compute, and none beside a prompt that was cut.
        """
        settings = self.settings
        if only_single and any(request.is_cut for request in self.running):
            return
        while self.waiting and budget and self.has_slot:
            request = self.waiting[0]
            context = self.cached(request)
            new = request.whole - context
            is_prompt = new > 1 or settings.order == "prefill_first"
            if is_prompt and only_single:
                return
            if new > budget and not settings.chunked_prefill:
                return
            new = min(new, budget)
            tokens, in_all = self._tokens_needed(request, context + new)
            # an engine may want room for all of a prompt, though it takes blocks chunk by chunk
            if self.needs(in_all) > self.free or not self._take_blocks(request, tokens):
                return
            self.running.append(self.waiting.popleft())
            request.computed = request.started = context
            budget -= new
            step.has_prompt |= is_prompt
            self._run(step, request, new, is_prompt=True)

    def _run(
        self, step: Step, request: Request, new: int, *, is_prompt: bool, verifies: bool = False
    ) -> None:
        step.requests.append(request)
        step.new_tokens.append(new)
        step.context_len.append(request.computed)
        step.is_prompt.append(is_prompt)
        step.verifies.append(verifies)
        request.kept = self.drafts.kept(request.index, request.output - request.sent) if verifies else 1
        request.computed += request.kept if verifies else new
        request.is_cut = request.computed < request.whole
        if not request.is_cut:
            request.sent += request.kept
            step.with_token.append(request)
            step.tokens.append(request.kept)

    @property
    def blocks(self) -> int:
        held: int = self.settings.num_gpu_blocks - self.free
        return held

    def blocks_of(self, tokens: int) -> int:
        """Blocks that so many tokens of one request take."""
        return -(-tokens // self.settings.block_size)

    def _take_blocks(self, request: Request, tokens: int) -> bool:
        more = max(self.blocks_of(tokens) - request.blocks, 0)
        if more > self.free:
            return False
        request.blocks += more
        self.free -= more
        return True

    def preempt(self, victim: Request) -> None:
        """Take a request's blocks and place: it computes its prompt and all that it has sent again."""
        self.leave(victim)
        victim.preemptions += 1
        victim.computed = victim.cached = 0
        self.waiting.appendleft(victim)

    def leave(self, request: Request) -> None:
        """Give a place and blocks back: a request may have lost both while its last token was under way."""
        runs = next((lane for lane in self.lanes if request in lane), None)
        if request.is_sent_on and request.seen == request.output and runs is not None:
            self.publish(request)
            if self.drafts and not self.settings.reserve_output:
                self.trim(request)
        else:
            self.let_go(request)
        (self.waiting if runs is None else runs).remove(request)

    def trim(self, request: Request) -> None:
        """Free the blocks of a request beyond its prompt's."""
        more = request.blocks - self.blocks_of(request.prompt)
        request.blocks -= more
        self.free += more

    def publish(self, request: Request) -> None:
        """Let others find what a request has computed, which needs a prefix cache."""

    def let_go(self, request: Request) -> None:
        """Free a request's blocks."""
        self.free += request.blocks
        request.blocks = 0


def never_fits(request: Request, settings: Any, beyond: int = 0) -> bool:
    """Whether a request could never run to its end, even alone; it takes blocks for tokens beyond its own."""
    blocks = -(-(request.prompt + request.output + beyond) // settings.block_size)
    most = request.prompt - request.cached
    if not settings.reserve_output:
        # preempted with its last token before it, it computes all of this at once
        most = request.prompt + request.output - 1
    too_long = not settings.chunked_prefill and most > settings.max_num_batched_tokens
    return blocks > settings.num_gpu_blocks or too_long


def requests_of(trace: Any) -> list[Request]:
    sizes = zip(trace.input_tokens, trace.output_tokens, trace.cached_tokens, strict=True)
    requests = [Request(index, *map(int, each)) for index, each in enumerate(sizes)]
    if trace.parents is not None:
        for request in requests:
            first, last = trace.parent_offsets[request.index : request.index + 2]
            request.parents = trace.parents[first:last].tolist()
            request.delay_us = float(trace.delay_s[request.index]) * US_PER_S
    return requests


def freed_children(ended: Request, requests: list[Request]) -> list[Request]:
    """Requests whose last parent is the one that ended."""
    return [
        one
        for one in requests
        if ended.index in one.parents
        and one.status is None
        and all(requests[at].status is not None for at in one.parents)
    ]


def send(request: Request, at_us: float, timeout_us: float) -> Request:
    """Have a client send its request."""
    request.arrival_us = at_us
    request.deadline_us = at_us + timeout_us
    return request
