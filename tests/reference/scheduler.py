"""A serving engine, naively: requests through its scheduler, step by step, each step a walk over its batch.

What the compiled loop does in a few sums is written out here, to be read: no calendar, no phases, no lanes.
Times are us from the trace's start, on one clock that only steps and arrivals move.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    """A step: its requests, which of them compute a prompt (again) and which have a token after it, and when
    it ran."""

    requests: list[Request] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    context_len: list[int] = field(default_factory=list)
    is_prompt: list[bool] = field(default_factory=list)
    with_token: list[Request] = field(default_factory=list)
    has_prompt: bool = False
    start_us: float = math.nan
    end_us: float = math.nan
    time_us: float = 0.0
    host_us: float = 0.0

    @property
    def computes_prompts(self) -> bool:
        """Whether it has a chunk that is not like a decode."""
        return any(new > 1 or not past for new, past in zip(self.new_tokens, self.context_len, strict=True))


class Served(NamedTuple):
    """What became of a trace: its requests in its order, the steps, and all gaps between tokens, us."""

    requests: list[Request]
    steps: list[Step]
    gaps_us: list[float]
    free_blocks: int


@dataclass
class Scheduler:
    """Who waits, who runs, and what is free; ``settings`` are fastroof.simulation's EngineSettings."""

    settings: Any
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)

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

    def arrive(self, request: Request) -> None:
        request.came = self.came
        self.came += 1
        self.waiting.append(request)

    @property
    def in_order(self) -> list[Request]:
        """All requests in the order in which they came."""
        return sorted((*self.running, *self.waiting), key=lambda request: request.came)

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
    def has_prompt(self) -> bool:
        """Whether the next step could compute a prompt: one that was cut, or the first that waits."""
        if any(request.is_cut for request in self.running):
            return True
        settings = self.settings
        budget = settings.max_num_batched_tokens - (self.decodes if settings.order == "mixed" else 0)
        if not self.waiting or budget <= 0 or len(self.running) >= settings.max_num_seqs:
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
        tokens = request.prompt + request.output if self.settings.reserve_output else upto
        return tokens, max(tokens, request.whole) if self.settings.admit_whole_prompt else tokens

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
            self._run_running(step, len(self.running), no_cut=True)
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
            if not new or (only_cut and not request.is_cut) or (no_cut and request.is_cut):
                continue
            while not self._take_blocks(request, request.computed + new):
                victim = self.running[-1]
                self.preempt(victim)
                preempted = True
                if victim is request:
                    return budget, preempted
            budget -= new
            step.has_prompt |= request.is_cut
            self._run(step, request, new, is_prompt=request.is_cut)
        return budget, preempted

    def _admit(self, step: Step, budget: int, *, only_single: bool = False) -> None:
        """Admit those that wait, first come, first served: none is skipped.

        With ``only_single`` only those with one token to compute, and none beside a prompt that was cut.
        """
        settings = self.settings
        if only_single and any(request.is_cut for request in self.running):
            return
        while self.waiting and budget and len(self.running) < settings.max_num_seqs:
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

    def _run(self, step: Step, request: Request, new: int, *, is_prompt: bool) -> None:
        step.requests.append(request)
        step.new_tokens.append(new)
        step.context_len.append(request.computed)
        step.is_prompt.append(is_prompt)
        request.computed += new
        request.is_cut = request.computed < request.whole
        if not request.is_cut:
            request.sent += 1
            step.with_token.append(request)

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
        self.free += request.blocks
        request.blocks = 0
        (self.running if request in self.running else self.waiting).remove(request)


def never_fits(request: Request, settings: Any) -> bool:
    """Whether a request could never run to its end, even alone."""
    blocks = -(-(request.prompt + request.output) // settings.block_size)
    most = request.prompt - request.cached
    if not settings.reserve_output:
        # preempted with its last token before it, it computes all of this at once
        most = request.prompt + request.output - 1
    too_long = not settings.chunked_prefill and most > settings.max_num_batched_tokens
    return blocks > settings.num_gpu_blocks or too_long


def serve(
    trace: Any,
    settings: Any,
    step_us: StepUs,
    *,
    time_scale: float = 1.0,
    scheduler: Scheduler | None = None,
    host_us: float = 0.0,
) -> Served:
    """Serve a trace, ``trace`` and ``settings`` as fastroof.simulation names them, by a scheduler if given.

    At one instant: the step that ends then ends (its tokens are seen, a client of a closed loop that has its
    last one sends its next request ``think_s`` later), what has arrived until then waits, clients whose time
    is up are gone, and steps are made until there is one that runs and, with asynchronous scheduling, one
    more.

    ``step_us`` is what kernels take. A step with prompts takes the host ``host_us`` to launch, from when the
    step made before it starts, or when the host has launched that if it has prompts itself.
    """
    requests = requests_of(trace)
    timeout_us = settings.timeout_s * US_PER_S
    engine = Scheduler(settings) if scheduler is None else scheduler
    # those to come, with their arrivals known, and those that wait for a client of a closed loop
    coming: deque[Request] = deque()
    unsent: deque[Request] = deque()
    for request in requests:
        if never_fits(request, settings) or any(requests[at].status == REJECTED for at in request.parents):
            request.status = REJECTED
        elif request.parents:
            request.arrival_us = float(trace.arrival_s[request.index]) * US_PER_S
            continue
        elif trace.clients is not None:
            unsent.append(request)
        if trace.clients is None:
            send(request, float(trace.arrival_s[request.index]) * US_PER_S, timeout_us)
            if request.status is None:
                coming.append(request)

    def send_next(at_us: float) -> None:
        if unsent:
            coming.append(send(unsent.popleft(), at_us, timeout_us))

    for _ in range(trace.clients or 0):
        send_next(0.0)

    steps: list[Step] = []
    gaps_us: list[float] = []
    # the step that runs, and the one that was made while it runs
    queue: deque[Step] = deque()
    depth = 2 if settings.async_scheduling else 1
    now_us = 0.0

    def leave(request: Request, status: int) -> None:
        engine.leave(request)
        request.status = status
        if trace.clients is not None:
            send_next(now_us + trace.think_s * US_PER_S)
        for child in freed_children(request, requests):
            send(child, max(child.arrival_us, now_us + child.delay_us), timeout_us)
            insort(coming, child, key=lambda one: (one.arrival_us, one.index))

    def arrive(until_us: float) -> None:
        while coming and coming[0].arrival_us <= until_us:
            engine.arrive(coming.popleft())

    def give_up(until_us: float) -> None:
        for request in engine.in_order:
            if request.deadline_us <= until_us:
                leave(request, TIMED_OUT)

    while coming or engine.waiting or engine.running or engine.fetching or queue:
        arrive(now_us)
        give_up(now_us)
        # clients that take no time to think are back at once
        arrive(now_us)
        while len(queue) < depth:
            engine.now_us = now_us
            engine.begins_us = now_us + queue[-1].time_us if queue else now_us
            made = engine.make_step()
            if not made.requests:
                break
            made.time_us = step_us(made.new_tokens, made.context_len) * time_scale
            if made.computes_prompts:
                hidden_us = queue[-1].time_us - queue[-1].host_us if queue else 0.0
                made.host_us = max(host_us * time_scale - hidden_us, 0.0)
                made.time_us = max(made.time_us, made.host_us)
            made.time_us = engine.with_fetches(made.time_us)
            queue.append(made)
        if not queue:
            if engine.fetching:
                arrivals = [request.arrival_us for request in [*coming][:1]]
                now_us = max(now_us, min([engine.idle_until_us, *arrivals]))
                continue
            if engine.waiting:
                raise RuntimeError(f"{len(engine.waiting)} requests wait for ever")
            if not coming:
                break
            now_us = coming[0].arrival_us
            continue
        step = queue.popleft()
        step.start_us = now_us
        now_us += step.time_us
        step.end_us = now_us
        steps.append(step)
        # clients whose time was up while the step ran, before those that come or have their last token now
        before_us = math.nextafter(now_us, -math.inf)
        arrive(before_us)
        give_up(before_us)
        for request in step.with_token:
            if request.status is not None or now_us > request.deadline_us:
                # its client is gone
                continue
            request.seen += 1
            if request.seen == 1:
                request.first_us = now_us
            else:
                gaps_us.append(now_us - request.newest_us)
            request.newest_us = now_us
            if request.seen == request.output:
                request.last_us = now_us
                leave(request, FINISHED)
    return Served(requests, steps, gaps_us, engine.free)


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
