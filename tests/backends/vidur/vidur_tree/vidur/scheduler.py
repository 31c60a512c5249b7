"""Stand-in, see the package: one replica's chunked prefill with paged KV cache, after Sarathi's scheduler."""

from collections import deque

from .entities import Batch


class SarathiReplicaScheduler:
    """Decodes first, then prefills under way, then new requests, chunk_size tokens in all.

    Where the KV cache is full, the request that came last gives up its blocks and starts anew.
    """

    def __init__(self, config):
        self._config = config
        self._queue = deque()
        self._running = []
        self._blocks = {}
        self._free_blocks = config.num_blocks

    def add_request(self, request):
        self._queue.append(request)

    def is_empty(self):
        return not self._queue and not self._running

    def _needed(self, tokens):
        return -(-tokens // self._config.block_size)

    def _reserve(self, request, tokens):
        more = self._needed(tokens) - self._blocks.get(request.id, 0)
        if more > self._free_blocks:
            return False
        self._blocks[request.id] = self._blocks.get(request.id, 0) + max(0, more)
        self._free_blocks -= max(0, more)
        return True

    def _free(self, request):
        self._free_blocks += self._blocks.pop(request.id)

    def _preempt(self, request):
        self._free(request)
        request.restart()
        self._queue.appendleft(request)

    def get_next_batch(self):
        requests, num_tokens = [], []
        left = self._config.chunk_size
        waiting = deque(sorted(self._running, key=lambda request: request.arrived_at))
        prefills = []
        self._running = []
        while waiting and left:
            request = waiting.popleft()
            if not request.is_prefill_complete:
                prefills.append(request)
                continue
            while not self._reserve(request, request.num_processed_tokens):
                victim = waiting.pop() if waiting else request
                self._preempt(victim)
                if victim is request:
                    break
            else:
                requests.append(request)
                num_tokens.append(1)
                left -= 1
        self._running = list(waiting)
        for request in prefills:
            tokens = min(left, request.num_prefill_tokens - request.num_processed_tokens)
            if tokens:
                requests.append(request)
                num_tokens.append(tokens)
                left -= tokens
            else:
                self._running.append(request)
        while self._queue and left and len(self._blocks) < self._config.batch_size_cap:
            if not self._reserve(self._queue[0], self._queue[0].num_prefill_tokens):
                break
            request = self._queue.popleft()
            tokens = min(left, request.num_prefill_tokens)
            requests.append(request)
            num_tokens.append(tokens)
            left -= tokens
        return Batch(0, requests, num_tokens) if requests else None

    def on_batch_end(self, batch):
        for request in batch.requests:
            if request.completed:
                self._free(request)
            else:
                self._running.append(request)
