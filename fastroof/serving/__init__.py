"""Serving estimates: time to first token, time per output token and throughput of engines in steady state."""

from fastroof.serving.disaggregated import (
    DisaggregatedEstimate,
    WorkerMatch,
    estimate_disaggregated,
    match_workers,
)
from fastroof.serving.estimate import KV_RESERVATIONS, ServingEstimate, estimate

__all__ = [
    "KV_RESERVATIONS",
    "DisaggregatedEstimate",
    "ServingEstimate",
    "WorkerMatch",
    "estimate",
    "estimate_disaggregated",
    "match_workers",
]
