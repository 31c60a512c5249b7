"""What a reader of a simulation must know beside its numbers, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.simulation.outcomes import Outcomes
    from fastroof.simulation.request_times import RequestTimes
    from fastroof.simulation.trace import Trace

__all__ = ["QueueGrowth", "queue_growth", "range_notes", "run_notes"]

FEW_REQUESTS: Final = 200
"""Of fewer, less than two are beyond the 99th percentile."""

GROWTH_DEVIATIONS: Final = 3.0
GROWTH_SHARE: Final = 0.05
MANY_PREEMPTED: Final = 0.05


class QueueGrowth(NamedTuple):
    """Requests without their first token, half-way through the arrivals and at their end."""

    half_way: int
    at_end: int
    arrived: int
    served_per_s: float
    arrived_per_s: float

    @property
    def is_growing(self) -> bool:
        """Whether the queue grew by more than arrivals at random make it, and by a twentieth of them."""
        grown = self.at_end - self.half_way
        return bool(grown > max(GROWTH_DEVIATIONS * self.arrived**0.5, GROWTH_SHARE * self.arrived))


def queue_growth(trace: Trace, outcomes: Outcomes) -> QueueGrowth | None:
    """Describe queue growth over the second half of the arrivals; None for a closed loop."""
    arrival_us, first_us = outcomes.arrival_us, outcomes.first_us
    if trace.is_closed or len(arrival_us) < 2:
        return None
    start_us, end_us = float(arrival_us[0]), float(arrival_us[-1])
    middle_us = (start_us + end_us) / 2.0
    seconds = (end_us - middle_us) / US_PER_S
    if seconds <= 0.0:
        return None
    # one that never had its first token left the queue when it timed out, or was never in it
    waited = np.isfinite(first_us)
    arrivals, firsts = arrival_us[waited], first_us[waited]
    if not len(arrivals):
        return None

    def upto(times: Floats, us: float) -> int:
        return int(np.count_nonzero(times <= us))

    arrived = [upto(arrivals, us) for us in (middle_us, end_us)]
    served = [upto(firsts, us) for us in (middle_us, end_us)]
    return QueueGrowth(
        arrived[0] - served[0],
        arrived[1] - served[1],
        arrived[1] - arrived[0],
        (served[1] - served[0]) / seconds,
        (arrived[1] - arrived[0]) / seconds,
    )


def run_notes(trace: Trace, outcomes: Outcomes, times: RequestTimes) -> list[str]:
    """Say what the numbers of a simulation do not say of themselves."""
    count, finished = len(times.is_finished), int(times.is_finished.sum())
    status = np.bincount(np.asarray(outcomes.status), minlength=3).tolist()
    notes = []
    if status[2]:
        notes.append(
            f"{status[2]:,} of {count:,} requests were rejected: prompt and output together are longer than "
            "the KV cache or the plan holds; they are in no percentile"
        )
    if status[1]:
        notes.append(
            f"{status[1]:,} of {count:,} requests timed out; they are in no percentile, and break every limit"
        )
    growth = queue_growth(trace, outcomes)
    if growth is not None and growth.is_growing:
        notes.append(
            "the load is above what is served: in the second half of the arrivals "
            f"{growth.arrived_per_s:,.3g} requests/s came and {growth.served_per_s:,.3g} had their first "
            f"token, {growth.half_way:,} waited half-way and {growth.at_end:,} at the end; a longer trace "
            "would have longer times"
        )
    preempted = int(np.count_nonzero(outcomes.preemptions))
    if preempted > MANY_PREEMPTED * count:
        notes.append(
            f"{preempted:,} of {count:,} requests lost their KV cache and computed it again: "
            "memory is what limits this load"
        )
    if 0 < finished < FEW_REQUESTS:
        notes.append(f"of {finished:,} requests the 99th percentile is that of the slowest one or two")
    return notes


def range_notes(found: Mapping[str, Any] | None) -> list[str]:
    """Say where the error of a step decides an answer, or that it is not known; nothing without a range."""
    if found is None:
        return []
    if found["relative_error"] is None:
        return [f"how far off the time of a step may be is {found['basis']}"]
    percent = found["relative_error"] * 100.0
    notes = []
    if found["near_saturation"]:
        low, high = found["ttft_ms"]["p99"]
        least, most = found["e2e_ms"]["p99"]
        notes.append(
            f"near saturation or beyond: steps {percent:.1f} % faster or slower, one standard error, make "
            f"the 99th percentile of TTFT {low:,.0f} or {high:,.0f} ms, that of E2E {least:,.0f} or "
            f"{most:,.0f} ms"
        )
    notes.extend(
        f"whether the 99th percentile of {_LIMIT_WORDS[name]} is within its limit is open: steps "
        f"{percent:.1f} % faster and slower, one standard error, differ in it"
        for name in found["flips"]
    )
    return notes


_LIMIT_WORDS: Final = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E latency"}
