"""Tiers of KV cache and the engine over them, naively: see ``fastroof.compiled.simulation.tiers``.

A tier is an ordered dictionary of keys of blocks, oldest first, and each block is looked up by itself.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import pairwise
from random import Random
from typing import Any

from fastroof.simulation.kv_tiers import KvTier
from tests.reference.block_pool import Pool, PooledScheduler
from tests.reference.scheduler import Request, Step


class Tier:
    """Blocks that are not in the GPU, or copies of them."""

    def __init__(self, tier: KvTier, blocks: int, block_us: float) -> None:
        self.tier = tier
        self.blocks = blocks
        self.block_us = block_us
        self.keys: OrderedDict[Hashable, None] = OrderedDict()
        self.below: Tier | None = None
        """The next tier, if it is written back to."""
        self.free_us = 0.0
        self.found_tokens = self.fetched = self.written = self.lost = self.most = 0

    @property
    def is_back(self) -> bool:
        return self.tier.writes == "write_back"

    def store(self, keys: Sequence[Hashable]) -> None:
        """Hold these as the newest, the last of them most so, and lose what there is no room for."""
        for key in keys:
            self.written += key not in self.keys
            self.keys[key] = None
            self.keys.move_to_end(key)
        while len(self.keys) > self.blocks:
            lost, _ = self.keys.popitem(last=False)
            self.lost += 1
            if self.below is not None:
                self.below.store([lost])
        self.most = max(self.most, len(self.keys))

    def fetch(self, blocks: int, now_us: float) -> float:
        """Send blocks after those that are sent already; returns when they are there."""
        self.fetched += blocks
        self.free_us = max(now_us, self.free_us) + blocks * self.block_us
        return self.free_us + self.tier.latency_us


class TieredPool(Pool):
    """A pool whose blocks go to tiers."""

    def __init__(self, num_blocks: int, tiers: Sequence[Tier]) -> None:
        super().__init__(num_blocks)
        self.tiers = tiers
        for tier, below in pairwise(tiers):
            tier.below = below if below.is_back else None

    def take(self) -> int:
        evicted = None
        if not self.blank and self.made == self.num_blocks:
            evicted = self.keys[next(iter(self.queue))]
        block = super().take()
        if evicted is not None and self.tiers and self.tiers[0].is_back:
            self.tiers[0].store([evicted])
        return block

    def keep(self, block: int, key: Hashable) -> None:
        is_new = block not in self.keys and key not in self.block_of
        super().keep(block, key)
        if is_new:
            self.give_up(key)

    def give_up(self, key: Hashable) -> None:
        for tier in self.tiers:
            if tier.is_back:
                tier.keys.pop(key, None)

    def give_back(self, blocks: Sequence[int], prompt_blocks: int = 0) -> None:
        super().give_back(blocks)
        freed = [i for i in reversed(range(len(blocks))) if blocks[i] in self.queue]
        for tier in self.tiers:
            if not tier.is_back:
                is_stored = [i for i in freed if tier.tier.stores_answers or i < prompt_blocks]
                tier.store([self.keys[blocks[i]] for i in is_stored])


class TieredScheduler(PooledScheduler):
    """The scheduler whose requests fetch what tiers have."""

    def __init__(self, settings: Any, trace: Any, tiers: Sequence[Tier], layers: int) -> None:
        super().__init__(settings, trace)
        self.pool = TieredPool(settings.num_gpu_blocks, tiers)
        self.tiers, self.layers = tiers, layers
        self.fetching: list[tuple[float, Request, int]] = []
        """When the wait of each ends, in this order, and the blocks that it has then."""
        self.arriving: set[int] = set()
        """Blocks that they wait for."""
        self.arrives_with: dict[int, Request] = {}
        self.fetched_by = 0.0
        self.sources: list[Tier] = []
        """Where those blocks are that the request looked at last would fetch."""
        self.keys: list[Hashable] = []
        """Of its blocks that the GPU or tiers have."""
        self.step_all_us = self.step_before_us = 0.0
        self.first_from: dict[int, list[int]] = {}
        self.wait_us = self.step_wait_us = 0.0

    @property
    def in_order(self) -> list[Request]:
        fetching = [request for _, request, _ in self.fetching if request.status is None]
        return sorted((*super().in_order, *fetching), key=lambda request: request.came)

    def cached(self, request: Request) -> int:
        own = super().cached(request)
        self.sources, self.keys = [], []
        if request.cached:
            return own
        size = self.settings.block_size
        most = (request.whole - 1) // size
        keys = [self.key(request, place) for place in range(request.whole // size)]
        self.keys = keys[: len(self.found)]
        for place in range(len(self.found), len(keys)):
            there = [tier for tier in self.tiers if keys[place] in tier.keys]
            if not there:
                break
            self.keys.append(keys[place])
            if place < most:
                self.sources.append(there[0])
        return min(len(self.keys), most) * size

    def _fetch(self, request: Request) -> tuple[float, float]:
        """Fetch from the tiers; return when all is there, and when blocks that do not come by layer are."""
        all_us = before_us = 0.0
        counts = [self.sources.count(tier) for tier in self.tiers]
        for tier, count in zip(self.tiers, counts, strict=True):
            if count:
                end_us = tier.fetch(count, self.now_us)
                all_us = max(all_us, end_us)
                if tier.tier.fetch != "by_layer":
                    before_us = max(before_us, end_us)
        if request.index not in self.first_from:
            self.first_from[request.index] = [count * self.settings.block_size for count in counts]
            for tier, tokens in zip(self.tiers, self.first_from[request.index], strict=True):
                tier.found_tokens += tokens
        return all_us, before_us

    def _note(self, request: Request, context: int) -> None:
        """Count what a request finds that is admitted or begins to wait."""
        if request.index in self.first_found:
            self.found_again_tokens += context
        self.first_found.setdefault(request.index, context)

    def _end_waits(self) -> None:
        """Free the blocks of those that gave up and whose wait is over."""
        while self.fetching and self.fetching[0][0] <= self.now_us:
            if self.fetching[0][1].status is None:
                return
            request = self._end_wait()
            self.pool.give_back(self._take_from(request), request.prompt // self.settings.block_size)

    def _end_wait(self) -> Request:
        _, request, _ = self.fetching.pop(0)
        self.arriving = {block for block in self.arriving if self.arrives_with[block] is not request}
        return request

    def make_step(self, **how: Any) -> Step:
        self._end_waits()
        self.step_all_us = self.step_before_us = 0.0
        return super().make_step(**how)

    def _admit(self, step: Step, budget: int, *, only_single: bool = False) -> None:
        settings = self.settings
        if only_single and any(request.is_cut for request in self.running):
            return
        while budget and self.has_slot:
            self._end_waits()
            is_fetched = bool(self.fetching) and self.fetching[0][0] <= self.now_us
            if is_fetched:
                _, request, reached = self.fetching[0]
                first_reached = reached
                keys, others = self.pool.chains[request.index]
                reached += len(others)
                context = min(reached, (request.whole - 1) // settings.block_size) * settings.block_size
            elif self.waiting:
                request = self.waiting[0]
                context = self.cached(request)
            else:
                return
            new = request.whole - context
            is_prompt = new > 1 or settings.order == "prefill_first"
            if is_prompt and only_single:
                return
            if new > budget and not settings.chunked_prefill:
                return
            new = min(new, budget)
            tokens, in_all = self._tokens_needed(request, context + new)
            if is_fetched:
                self._end_wait()
                table = self._take_from(request)
                self.tables[request.index], self.pool.chains[request.index] = table, (keys, [])
                most = (request.whole - 1) // settings.block_size
                more = context - min(first_reached, most) * settings.block_size
                if request.preemptions:
                    self.found_again_tokens += more
                else:
                    self.first_found[request.index] += more
                # the rest of its prompt is taken again as it is computed
                kept = self.blocks_of(tokens)
                self.pool.give_back(table[kept:])
                del table[kept:]
            elif any(tier.tier.fetch == "wait" for tier in self.sources) or self.arriving & {*self.found}:
                # it takes the blocks of its whole prompt meanwhile
                more = request.output + self.verified - 1 if settings.reserve_output else request.sent
                if not self._begin_fetch(request, request.prompt + more, context):
                    return
                continue
            elif self.needs(in_all) > self.free:
                return
            else:
                is_first = request.index not in self.first_found
                wanted = bool(self.sources) or len(self.keys) > len(self.found)
                self._take_fetched(request, tokens)
                if wanted:
                    all_us, before_us = self._fetch(request)
                    self.step_all_us = max(self.step_all_us, all_us)
                    self.step_before_us = max(self.step_before_us, before_us)
                elif is_first:
                    self.first_from[request.index] = [0] * len(self.tiers)
                self._note(request, context)
                self.waiting.popleft()
            self.running.append(request)
            request.computed = request.started = context
            budget -= new
            step.has_prompt |= is_prompt
            self._run(step, request, new, is_prompt=True)

    def _begin_fetch(self, request: Request, tokens: int, context: int) -> bool:
        if self.needs(tokens) > self.free:
            return False
        fetched = self._take_fetched(request, tokens)
        self.arriving |= {*fetched}
        self.arrives_with |= dict.fromkeys(fetched, request)
        self.waiting.popleft()
        all_us, _ = self._fetch(request)
        self._note(request, context)
        self.fetched_by = max(all_us, self.fetched_by, self.now_us)
        self.wait_us += self.fetched_by - self.now_us
        self.fetching.append((self.fetched_by, request, len(self.keys)))
        return True

    def _take_fetched(self, request: Request, tokens: int) -> list[int]:
        """Take a request's blocks; returns those from tiers, which are found in the GPU from now on."""
        there = len(self.found)
        for key in self.keys[there:]:
            self.pool.give_up(key)
        assert self._take_blocks(request, tokens)
        fetched = self.tables[request.index][there : len(self.keys)]
        for place, block in enumerate(fetched, there):
            self._publish(request, place, block)
        return fetched

    def _count_found(self, request: Request) -> None:
        """What was found is counted when a request is admitted or begins to wait."""

    def with_fetches(self, step_us: float) -> float:
        """What a step takes that waits for fetches before it begins and between its layers."""
        waits_us = max(self.step_before_us - self.begins_us, 0.0)
        left_us = self.step_all_us - self.begins_us - waits_us
        longer_us = step_us
        if self.step_all_us <= self.begins_us:
            return step_us
        if left_us > 0.0:
            longer_us = max(left_us + step_us / self.layers, step_us + left_us / self.layers)
        longer_us += waits_us
        self.step_wait_us += longer_us - step_us
        return longer_us

    @property
    def has_prompt(self) -> bool:
        decode_tokens = self.decodes * self.verified
        has_room = decode_tokens < self.settings.max_num_batched_tokens or self.settings.order != "mixed"
        has_room &= self.has_slot
        return super().has_prompt or (has_room and self.fetched_us <= self.now_us)

    @property
    def idle_until_us(self) -> float:
        """When something happens to those that wait, without a step and without arrivals."""
        return min([self.fetched_us, *(request.deadline_us for request in self.in_order)])

    @property
    def fetched_us(self) -> float:
        return self.fetching[0][0] if self.fetching else math.inf

    def leave(self, request: Request) -> None:
        # the blocks of one that waits for others are free when its wait is over
        if not any(other is request for _, other, _ in self.fetching):
            super().leave(request)

    def let_go(self, request: Request) -> None:
        self.publish(request)
        self.pool.give_back(self._take_from(request), request.prompt // self.settings.block_size)


def made_tiers(random: Random, block_bytes: int) -> list[KvTier]:
    """Draw tiers, those that are written back to first: of a few blocks or many, slow or fast."""
    count = random.choice([1, 1, 2, 3])
    backs = random.randint(0, count)
    return [
        KvTier(
            f"tier{i}",
            random.choice([0, 3, 10, 30, 100, 1000, 1000, 1000]) * block_bytes + random.choice([0, 1]),
            math.inf if random.random() < 0.2 else block_bytes / (1e-5 * 10.0 ** random.uniform(0, 3)),
            random.choice([0.0, 0.0, 50.0, 2000.0]),
            "write_back" if i < backs else "write_through",
            random.choice(["wait", "wait", "before_step", "by_layer"]),
            i < backs or random.random() < 0.6,
        )
        for i in range(count)
    ]
