"""A Vidur-style event loop over Vidur's own requests and batches: a plan against a constant predictor.

Run it with Vidur's source tree on PYTHONPATH: ``python -m tests.examples.vidur_tree``.
"""

import time
from collections import deque
from importlib import import_module
from typing import Any

from fastroof.backends.vidur import tree

vidur_config, vidur_entities = import_module("vidur.config"), import_module("vidur.entities")


class ConstantPredictor:
    """The cheapest predictor there is: one ExecutionTime, made once."""

    def __init__(self) -> None:
        self.answer = vidur_entities.ExecutionTime(32, *[0.02] * 12, *[0.0] * 7)

    def get_execution_time(self, batch: Any, pipeline_stage: int) -> Any:
        """Return the same time for every batch."""
        return self.answer


def simulate(predictor: Any, requests: int = 400, chunk_size: int = 512, most: int = 64) -> tuple[float, int]:
    """Serve requests that are all there at 0 s, decodes first; return when the last ends, s, and batches."""
    waiting = deque(vidur_entities.Request(0.0, 200 + 7 * i % 1500, 20 + i % 50) for i in range(requests))
    running: list[Any] = []
    clock_s, batches = 0.0, 0
    while waiting or running:
        while waiting and len(running) < most:
            running.append(waiting.popleft())
        chosen, num_tokens, left = [], [], chunk_size
        for request in sorted(running, key=lambda r: not r.is_prefill_complete):
            rest = request.num_prefill_tokens - request.num_processed_tokens
            tokens = 1 if request.is_prefill_complete else min(left, rest)
            if tokens:
                chosen.append(request)
                num_tokens.append(tokens)
                left -= tokens
        batch = vidur_entities.Batch(0, chosen, num_tokens)
        execution_time = predictor.get_execution_time(batch, 0)
        assert execution_time.model_time <= execution_time.total_time
        clock_s += execution_time.total_time
        batch.on_batch_end(clock_s)
        running = [request for request in running if not request.completed]
        batches += 1
    return clock_s, batches


if __name__ == "__main__":
    replica = vidur_config.ReplicaConfig(model_name="meta-llama/Meta-Llama-3-8B", device="h100")
    fastroof = tree.FastroofExecutionTimePredictor(tree.FastroofExecutionTimePredictorConfig(), replica)
    for name, predictor in (("constant", ConstantPredictor()), ("fastroof", fastroof)) * 2:
        start = time.perf_counter()
        end_s, batches = simulate(predictor)
        wall_us = (time.perf_counter() - start) * 1e6 / batches
        print(f"{name}: {batches} batches end at {end_s:.2f} s; {wall_us:.1f} us of this machine a batch")
