"""A prefix cache and the engine over it, naively: see ``fastroof.compiled.simulation.prefix_cache``.

Every block is there by itself, with who holds it and the key of what is in it. The key of a prompt's block is
the ids of all blocks up to it, that of a session's the request whose own it is and its place. Free blocks
without a key are taken first, then those of the queue, an ordered dictionary, oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

from tests.reference.scheduler import Request, Scheduler, Step


class Pool:
    """Blocks, who holds them, what is in them."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.made = 0
        """Blocks that were ever taken; those that were not are blank, too."""
        self.blank: list[int] = []
        self.queue: OrderedDict[int, None] = OrderedDict()
        self.holders: dict[int, int] = {}
        self.keys: dict[int, Hashable] = {}
        self.block_of: dict[Hashable, int] = {}
        self.chains: dict[int, tuple[set[Hashable], list[int]]] = {}
        """Keys that a request computes itself, and blocks with them that others computed meanwhile: it holds
        these, too."""
        self.evictions = 0

    @property
    def free(self) -> int:
        """Blocks that no request holds."""
        return self.num_blocks - self.made + len(self.blank) + len(self.queue)

    def find(self, keys: Sequence[Hashable]) -> list[int]:
        """The blocks with the first of these keys, as far as there are any without a gap."""
        found = []
        for key in keys:
            if key not in self.block_of:
                break
            found.append(self.block_of[key])
        return found

    def in_use(self, found: Sequence[int]) -> int:
        """How many of these blocks others hold."""
        return sum(self.holders[block] > 0 for block in found)

    def hold(self, found: Sequence[int]) -> None:
        for block in found:
            if self.holders[block] == 0:
                del self.queue[block]
            self.holders[block] += 1

    def take(self) -> int:
        if self.blank:
            block = self.blank.pop()
        elif self.made < self.num_blocks:
            block = self.made
            self.made += 1
        else:
            block, _ = self.queue.popitem(last=False)
            self.evictions += 1
            del self.block_of[self.keys.pop(block)]
        self.holders[block] = 1
        return block

    def keep(self, block: int, key: Hashable) -> None:
        """Have a block found by its key from now on, unless another is."""
        if block in self.keys or key in self.block_of:
            return
        self.keys[block] = key
        self.block_of[key] = block
        for keys, others in self.chains.values():
            if key in keys:
                others.append(block)
                self.holders[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.holders[block] -= 1
            if self.holders[block] == 0:
                if block in self.keys:
                    self.queue[block] = None
                else:
                    self.blank.append(block)


class PooledScheduler(Scheduler):
    """The scheduler whose blocks are those of a pool."""

    def __init__(self, settings: Any, trace: Any) -> None:
        self.pool = Pool(settings.num_gpu_blocks)
        super().__init__(settings)
        self.trace = trace
        self.tables: dict[int, list[int]] = {}
        self.found: list[int] = []
        self.first_found: dict[int, int] = {}
        self.found_again_tokens = 0

    @property
    def free(self) -> int:
        return self.pool.free

    @free.setter
    def free(self, blocks: int) -> None:
        """The pool counts by itself."""

    def key(self, request: Request, place: int) -> Hashable:
        size, trace, index = self.settings.block_size, self.trace, request.index
        if trace.hash_ids is not None:
            if (place + 1) * size > request.prompt:
                return "own", index, place
            per_id = trace.hash_block_size // size
            first = trace.hash_offsets[index]
            ids = trace.hash_ids[first : first + place // per_id + 1]
            return "prompt", tuple(ids.tolist()), place % per_id
        while place < self.shared_blocks(index):
            parent = self.first_parent(index)
            if parent is None:
                return "all", place
            index = parent
        return "own", index, place

    def first_parent(self, index: int) -> int | None:
        trace = self.trace
        if trace.parents is None or trace.parent_offsets[index] == trace.parent_offsets[index + 1]:
            return None
        return int(trace.parents[trace.parent_offsets[index]])

    def shared_blocks(self, index: int) -> int:
        """Whole blocks at the start of a prompt that are its first parent's, or those of all without one."""
        trace, parent = self.trace, self.first_parent(index)
        if trace.history_tokens is None:
            return 0
        tokens = min(int(trace.history_tokens[index]), int(trace.input_tokens[index]))
        if parent is not None:
            tokens = min(tokens, int(trace.input_tokens[parent]) + int(trace.output_tokens[parent]) - 1)
        return tokens // self.settings.block_size

    def cached(self, request: Request) -> int:
        if request.cached:
            self.found = []
            return request.cached
        size = self.settings.block_size
        self.found = self.pool.find([self.key(request, place) for place in range(request.whole // size)])
        return min(len(self.found), (request.whole - 1) // size) * size

    def needs(self, tokens: int) -> int:
        return self.blocks_of(tokens) - self.pool.in_use(self.found)

    def _run(
        self, step: Step, request: Request, new: int, *, is_prompt: bool, verifies: bool = False
    ) -> None:
        if request.computed == request.started and is_prompt:
            self._count_found(request)
        super()._run(step, request, new, is_prompt=is_prompt, verifies=verifies)
        request.has_decoded = not is_prompt
        if is_prompt:
            self._keep(request, min(request.computed, request.prompt))

    def _count_found(self, request: Request) -> None:
        """Count what a request found that begins now."""
        if request.index in self.first_found:
            self.found_again_tokens += request.computed
        self.first_found.setdefault(request.index, request.computed)

    def _keep(self, request: Request, known: int) -> None:
        blocks = self.tables[request.index][: known // self.settings.block_size]
        for place, block in enumerate(blocks):
            self._publish(request, place, block)

    def _publish(self, request: Request, place: int, block: int) -> None:
        key = self.key(request, place)
        self.pool.chains[request.index][0].discard(key)
        self.pool.keep(block, key)

    def _take_blocks(self, request: Request, tokens: int) -> bool:
        if request.index not in self.tables:
            self.pool.hold(self.found)
            self.tables[request.index] = list(self.found)
            places = range(len(self.found), request.prompt // self.settings.block_size)
            self.pool.chains[request.index] = {self.key(request, place) for place in places}, []
        table = self.tables[request.index]
        more = max(self.blocks_of(tokens) - len(table), 0)
        if more > self.pool.free:
            return False
        table += [self.pool.take() for _ in range(more)]
        return True

    def trim(self, request: Request) -> None:
        table = self.tables[request.index]
        first = self.blocks_of(request.prompt)
        self.pool.give_back(table[first:])
        del table[first:]

    def publish(self, request: Request) -> None:
        if request.index in self.tables:
            self._keep(request, self._known(request))

    def let_go(self, request: Request) -> None:
        self.publish(request)
        self.pool.give_back(self._take_from(request))

    def _take_from(self, request: Request) -> list[int]:
        """Take a request's blocks from it; of those that others computed, too, its own are free."""
        table = self.tables.pop(request.index, [])
        places = range(request.prompt // self.settings.block_size)
        place_of = {self.key(request, place): place for place in places}
        _, others = self.pool.chains.pop(request.index, (None, []))
        for place, block in sorted((place_of[self.pool.keys[block]], block) for block in others):
            if place < len(table):
                self.pool.give_back([table[place]])
            table[place : place + 1] = [block]
        return table

    def _known(self, request: Request) -> int:
        """Tokens that are computed and known: the last of a decode is not if steps are made early."""
        if request.seen == request.output:
            return request.prompt + request.output - 1
        is_unseen = self.settings.async_scheduling and request.has_decoded
        return request.computed - request.kept * is_unseen
