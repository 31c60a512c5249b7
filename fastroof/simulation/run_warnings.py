"""Warnings about a run's results: requests left out, growing queues, preemptions, the error of steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.simulation.engine import Outcomes
    from fastroof.simulation.requests import RequestTimes
    from fastroof.traces.trace import Trace

FEW_REQUESTS: Final = 200
"""Of fewer requests, less than two are beyond the 99th percentile."""

GROWTH_DEVIATIONS: Final = 3.0
GROWTH_SHARE: Final = 0.05
MANY_PREEMPTED: Final = 0.05


class QueueGrowth(NamedTuple):
    """Requests without a first token half-way through the arrivals and at their end, and rates between."""

    half_way: int
    at_end: int
    arrived: int
    served_per_s: float
    arrived_per_s: float

    @property
    def is_growing(self) -> bool:
        """Whether the queue grew by more than random arrivals explain, and by more than 5 % of them."""
        grown = self.at_end - self.half_way
        return bool(grown > max(GROWTH_DEVIATIONS * self.arrived**0.5, GROWTH_SHARE * self.arrived))


def queue_growth(trace: Trace, outcomes: Outcomes) -> QueueGrowth | None:
    """Describe queue growth over the second half of the arrivals; None for a closed loop."""
    arrival_us, first_us = outcomes.arrival_us, outcomes.first_us
    if trace.is_closed or len(arrival_us) < 2:
        return None
    if trace.has_parents:
        order = np.argsort(arrival_us)
        arrival_us, first_us = arrival_us[order], first_us[order]
    start_us, end_us = float(arrival_us[0]), float(arrival_us[-1])
    middle_us = (start_us + end_us) / 2.0
    seconds = (end_us - middle_us) / US_PER_S
    if seconds <= 0.0:
        return None
    # a request without a first token left the queue when it timed out, or was never in it
    waited = np.isfinite(first_us)
    arrivals, firsts = arrival_us[waited], first_us[waited]
    if not len(arrivals):
        return None

    def upto(times: Floats, us: float) -> int:
        return int(np.count_nonzero(times <= us))

    arrived = [upto(arrivals, us) for us in (middle_us, end_us)]
    finished = [upto(firsts, us) for us in (middle_us, end_us)]
    return QueueGrowth(
        arrived[0] - finished[0],
        arrived[1] - finished[1],
        arrived[1] - arrived[0],
        (finished[1] - finished[0]) / seconds,
        (arrived[1] - arrived[0]) / seconds,
    )


def run_warnings(trace: Trace, outcomes: Outcomes, times: RequestTimes) -> list[str]:
    """Return warnings about a simulation's results."""
    count, finished = len(times.is_finished), int(times.is_finished.sum())
    status = np.bincount(np.asarray(outcomes.status), minlength=3).tolist()
    notes = []
    if status[2]:
        notes.append(
            f"{status[2]:,} of {count:,} requests were rejected, as prompt and output together exceed the "
            "KV cache or the plan; percentiles leave them out"
        )
    if status[1]:
        notes.append(
            f"{status[1]:,} of {count:,} requests timed out; percentiles leave them out, and they break "
            "every limit"
        )
    growth = queue_growth(trace, outcomes)
    if growth is not None and growth.is_growing:
        notes.append(
            "the load exceeds the throughput: in the second half of the arrivals "
            f"{growth.arrived_per_s:,.3g} requests/s arrived and {growth.served_per_s:,.3g} got their first "
            f"token; {growth.half_way:,} waited half-way, {growth.at_end:,} at the end; times grow with the "
            "length of the trace"
        )
    preempted = int(np.count_nonzero(outcomes.preemptions))
    if preempted > MANY_PREEMPTED * count:
        notes.append(
            f"{preempted:,} of {count:,} requests were preempted and recomputed their KV cache: memory "
            "limits this load"
        )
    if 0 < finished < FEW_REQUESTS:
        notes.append(f"with {finished:,} requests, the 99th percentile is that of the slowest one or two")
    return notes


def range_warnings(found: Mapping[str, Any] | None) -> list[str]:
    """Return warnings where the error of a step changes a result or is unknown; none without a range."""
    if found is None:
        return []
    if found["relative_error"] is None:
        return [f"the error of step times is {found['basis']}"]
    percent = found["relative_error"] * 100.0
    notes = []
    if found["near_saturation"]:
        low, high = found["ttft_ms"]["p99"]
        least, most = found["e2e_ms"]["p99"]
        notes.append(
            f"near saturation or beyond: with steps {percent:.1f} % faster or slower, one standard error, "
            f"the 99th percentile of TTFT is {low:,.0f} or {high:,.0f} ms, that of E2E {least:,.0f} or "
            f"{most:,.0f} ms"
        )
    notes.extend(
        f"whether {_LIMIT_NAMES[name]} keeps its limit depends on the error of steps, ±{percent:.1f} % (one "
        "standard error)"
        for name in found["flips"]
    )
    return notes


_LIMIT_NAMES: Final = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E latency"}
