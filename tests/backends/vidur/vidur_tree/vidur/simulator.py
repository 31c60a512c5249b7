"""Stand-in, see the package: one replica, driven by a queue of events."""

import heapq
import random

from .entities import Request
from .execution_time_predictor import ExecutionTimePredictorRegistry
from .scheduler import SarathiReplicaScheduler


def poisson_requests(count, per_second, seed):
    """Requests of a few hundred to a few thousand tokens, at times that are independent of each other."""
    draw = random.Random(seed)
    time = 0.0
    requests = []
    for _ in range(count):
        time += draw.expovariate(per_second)
        requests.append(Request(time, draw.randint(100, 3000), draw.randint(2, 300)))
    return requests


class Simulator:
    def __init__(self, config, requests):
        self._requests = requests
        self._predictor = ExecutionTimePredictorRegistry.get(
            config.execution_time_predictor_config.get_type(),
            predictor_config=config.execution_time_predictor_config,
            replica_config=config.cluster_config.replica_config,
            replica_scheduler_config=config.cluster_config.replica_scheduler_config,
            metrics_config=config.metrics_config,
        )
        self._scheduler = SarathiReplicaScheduler(config.cluster_config.replica_scheduler_config)
        self.batches = 0

    def run(self):
        """Return when the last request is done, s."""
        events = [(request.arrived_at, request.id, request, None) for request in self._requests]
        heapq.heapify(events)
        busy, time = False, 0.0
        while events:
            time, _, request, batch = heapq.heappop(events)
            if batch is None:
                self._scheduler.add_request(request)
            else:
                batch.on_batch_end(time)
                self._scheduler.on_batch_end(batch)
                busy = False
            if not busy and (batch := self._scheduler.get_next_batch()):
                execution_time = self._predictor.get_execution_time(batch, 0)
                assert 0.0 <= execution_time.model_time <= execution_time.total_time
                # a batch's end sorts after arrivals of the same time
                ends = (time + execution_time.total_time, 2**62 + batch.id, None, batch)
                heapq.heappush(events, ends)
                self.batches += 1
                busy = True
        assert self._scheduler.is_empty()
        return time
