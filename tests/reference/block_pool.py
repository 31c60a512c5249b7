"""A pool of KV blocks and the engine over it, naively: see ``fastroof.compiled.simulation.block_pool``.

Keys are tuples: of a prompt's block the id of its hash block and which part of it, of any other block its
request and its place. The queue of free blocks is an ordered dictionary, oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

from tests.reference.scheduler import Request, Scheduler, Step


class Pool:
    """Blocks, who holds them, what is in them."""

    def __init__(self, num_blocks: int) -> None:
        self.queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.holders = [0] * num_blocks
        self.keys: list[Hashable | None] = [None] * num_blocks
        self.blocks_of: dict[Hashable, OrderedDict[int, None]] = {}
        self.evictions = 0

    def find(self, keys: Sequence[Hashable]) -> list[int]:
        """The blocks with the first of these keys, as far as there are any without a gap."""
        found = []
        for key in keys:
            if key not in self.blocks_of:
                break
            found.append(next(iter(self.blocks_of[key])))
        return found

    def needed(self, found: Sequence[int], blocks: int) -> int:
        """Free blocks that so many blocks take, of which these are found."""
        return blocks - sum(self.holders[block] > 0 for block in found)

    def hold(self, found: Sequence[int]) -> None:
        for block in found:
            if self.holders[block] == 0:
                del self.queue[block]
            self.holders[block] += 1

    def take(self) -> int:
        block, _ = self.queue.popitem(last=False)
        key = self.keys[block]
        if key is not None:
            self.evictions += 1
            del self.blocks_of[key][block]
            if not self.blocks_of[key]:
                del self.blocks_of[key]
        self.keys[block] = None
        self.holders[block] = 1
        return block

    def keep(self, block: int, key: Hashable) -> None:
        """Have a block found by its key from now on."""
        if self.keys[block] is None:
            self.keys[block] = key
            self.blocks_of.setdefault(key, OrderedDict())[block] = None

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.queue[block] = None


class PooledScheduler(Scheduler):
    """The scheduler whose blocks are those of a pool."""

    def __init__(self, settings: Any, trace: Any) -> None:
        super().__init__(settings)
        self.pool = Pool(settings.num_gpu_blocks)
        self.trace = trace
        self.tables: dict[int, list[int]] = {}
        self.first_found: dict[int, int] = {}
        self.found_again_tokens = 0

    def key(self, request: Request, place: int) -> Hashable:
        """Key of a request's block."""
        size, trace = self.settings.block_size, self.trace
        if trace.hash_ids is None or (place + 1) * size > request.prompt:
            return "own", request.index, place
        per_id = trace.hash_block_size // size
        at = trace.hash_offsets[request.index] + place // per_id
        return "prompt", int(trace.hash_ids[at]), place % per_id

    def _admit(self, step: Step, budget: int, *, only_single: bool = False) -> None:
        settings, pool = self.settings, self.pool
        if only_single and any(request.is_cut for request in self.running):
            return
        while self.waiting and budget and len(self.running) < settings.max_num_seqs:
            request = self.waiting[0]
            found: list[int] = []
            computed = request.cached
            if not computed:
                most = (request.whole - 1) // settings.block_size
                found = pool.find([self.key(request, place) for place in range(most)])
                computed = len(found) * settings.block_size
            new = request.whole - computed
            is_prompt = new > 1
            if is_prompt and only_single:
                return
            if new > budget and not settings.chunked_prefill:
                return
            new = min(new, budget)
            in_all = request.whole if settings.admit_whole_prompt else computed + new
            if pool.needed(found, self.blocks_of(in_all)) > len(pool.queue):
                return
            pool.hold(found)
            self.tables[request.index] = found
            assert self._take_blocks(request, computed + new)
            if request.index in self.first_found:
                self.found_again_tokens += computed
            self.first_found.setdefault(request.index, computed)
            self.running.append(self.waiting.popleft())
            request.computed = computed
            budget -= new
            step.has_prompt |= is_prompt
            self._run(step, request, new, is_prompt=True)

    def _run(self, step: Step, request: Request, new: int, *, is_prompt: bool) -> None:
        super()._run(step, request, new, is_prompt=is_prompt)
        self._keep(request, min(request.computed, request.prompt + request.seen))

    def _keep(self, request: Request, known: int) -> None:
        table = self.tables[request.index]
        for place in range(known // self.settings.block_size):
            self.pool.keep(table[place], self.key(request, place))

    def _take_blocks(self, request: Request, tokens: int) -> bool:
        table = self.tables[request.index]
        more = max(self.blocks_of(tokens) - len(table), 0)
        if more > len(self.pool.queue):
            return False
        table += [self.pool.take() for _ in range(more)]
        return True

    def leave(self, request: Request) -> None:
        if request.index in self.tables:
            if request.seen == request.output:
                self._keep(request, request.prompt + request.output - 1)
            self.pool.give_back(self.tables.pop(request.index))
        self.free = len(self.pool.queue)
        (self.running if request in self.running else self.waiting).remove(request)


def leading_hits(trace: Any, num_blocks: int, block_size: int) -> tuple[int, int]:
    """Tokens found and tokens asked for, one request served after the other, by the least recently used."""
    cache: OrderedDict[Hashable, None] = OrderedDict()
    per_id = trace.hash_block_size // block_size
    found = 0
    for request, prompt in enumerate(trace.input_tokens.tolist()):
        ids = trace.hash_ids[trace.hash_offsets[request] : trace.hash_offsets[request + 1]].tolist()
        keys = [(ids[place // per_id], place % per_id) for place in range(prompt // block_size)]
        for key in keys[: (prompt - 1) // block_size]:
            if key not in cache:
                break
            found += block_size
        for key in reversed(keys):
            cache[key] = None
            cache.move_to_end(key)
            if len(cache) > num_blocks:
                cache.popitem(last=False)
    return found, int(trace.input_tokens.sum())
