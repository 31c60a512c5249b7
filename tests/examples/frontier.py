"""Decode steps over Frontier's own requests and batches: a plan against a constant predictor.

Run it with Frontier's source tree on PYTHONPATH: ``python -m tests.examples.frontier``.
"""

import logging
import time
from importlib import import_module
from typing import Any

from fastroof.backends import frontier

config, entities = import_module("frontier.config"), import_module("frontier.entities")
CLUSTER = import_module("frontier.types").ClusterType.MONOLITHIC
logging.disable(logging.INFO)  # Frontier writes a line a token


class ConstantPredictor:
    """The cheapest predictor there is: one answer, made once."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def predict_stage_execution_time(
        self, batch: Any, stage_id: int, cluster_type: Any, num_layers: int = 1, layer_id: int = 0
    ) -> Any:
        """Return the same time for every batch."""
        return self.answer


def decode(predictor: Any, num_layers: int, requests: int = 32, steps: int = 500) -> float:
    """Prefill requests one by one and decode them together; seconds of the GPU."""
    running = [entities.Request(0.0, 200 + 50 * i, 2 * steps) for i in range(requests)]
    clock_s = 0.0

    def run(chosen: list[Any], num_tokens: list[int]) -> None:
        nonlocal clock_s
        batch = entities.Batch(0, chosen, num_tokens, is_moe=False)
        found = predictor.predict_stage_execution_time(batch, 0, CLUSTER, num_layers)
        clock_s += found.total_time
        for request, tokens in zip(chosen, num_tokens, strict=True):
            request.on_batch_end(clock_s, tokens, CLUSTER)

    for i, request in enumerate(running):
        run([request], [200 + 50 * i])
    for _ in range(steps):
        run(running, [1] * requests)
    return clock_s


if __name__ == "__main__":
    replica = config.ReplicaConfig(
        model_name="Qwen/Qwen3-32B", device="h100", network_device="h100_dgx", attn_tensor_parallel_size=2
    )
    plans = frontier.FastroofExecutionTimePredictor(
        frontier.FastroofExecutionTimePredictorConfig(), replica, cluster_type=CLUSTER
    )
    layers = plans.plan.model.num_layers
    constant = ConstantPredictor(frontier.StepExecutionTime(plans.plan, [1] * 32, [1000] * 32))
    for name, predictor in (("constant", constant), ("fastroof", plans)) * 2:
        start = time.perf_counter()
        end_s = decode(predictor, layers)
        wall_us = (time.perf_counter() - start) * 1e6 / 532
        print(f"{name}: 532 batches end at {end_s:.2f} s; {wall_us:.1f} us of this machine a batch")
