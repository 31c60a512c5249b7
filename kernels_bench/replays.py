"""Replays of a point: how many calls and replays a timing takes, and its statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fastroof.errors import MeasureError
from kernels_bench.protocol import DeviceState, Timing

MAX_RELATIVE_IQR: Final = 0.05
MAX_CLOCK_SHARE: Final = 0.03
WARM_UP_US: Final = 3000.0
REPLAY_US: Final = 500.0
"""Least length of the warm-up, and of each replay."""
NUM_REPLAYS: Final = 20
LEAST_REPLAYS: Final = 5
POINT_US: Final = 120_000.0
"""What the replays beyond the least may take: a prefill of 10 ms is not replayed 20 times."""
DROPPED: Final = 1
"""First replays that do not count."""
MAX_CALLS: Final = 2048
"""Most calls in one graph, since each takes the host about 5 us to capture."""


@dataclass(frozen=True)
class Schedule:
    """Calls of a replay, and replays: to warm up, and timed ones, those that are dropped included."""

    calls: int
    warm_up: int
    replays: int


def pilot_calls(num_sets: int) -> int:
    """Return the calls of the first graph, which finds how long a call takes: every input set once."""
    return max(1, min(num_sets, MAX_CALLS))


def schedule(call_us: float, num_sets: int, warm_up_us: float = WARM_UP_US) -> Schedule:
    """Decide how many calls a replay has, and how many replays there are.

    >>> schedule(5.0, num_sets=30)
    Schedule(calls=120, warm_up=5, replays=21)
    >>> schedule(10_000.0, num_sets=1)
    Schedule(calls=1, warm_up=1, replays=13)
    """
    if not (math.isfinite(call_us) and call_us > 0):
        raise MeasureError(f"a call took {call_us} us; need a time above 0: did the kernel run at all?")
    if num_sets < 1:
        raise MeasureError(f"num_sets is {num_sets}; a provider prepares at least one input set")
    rounds = math.ceil(REPLAY_US / (call_us * num_sets))
    calls = min(rounds * num_sets, max(1, MAX_CALLS // num_sets) * num_sets, MAX_CALLS)
    replay_us = calls * call_us
    fitting = int(POINT_US // replay_us)
    return Schedule(
        calls=calls,
        warm_up=max(1, math.ceil(warm_up_us / replay_us)),
        replays=max(LEAST_REPLAYS, min(NUM_REPLAYS, fitting)) + DROPPED,
    )


def summarise(replays_us: Sequence[float], calls: int, dropped: int = DROPPED) -> Timing:
    """Summarise timed replays as microseconds a call.

    >>> summarise([900.0, 500.0, 510.0, 490.0], calls=100).latency_us
    5.0
    """
    kept = np.asarray(replays_us[dropped:], np.float64) / calls
    if kept.size == 0 or not (np.isfinite(kept).all() and (kept > 0).all()):
        raise MeasureError(f"replays took {list(replays_us)} us; need durations above 0 after the first")
    p25, median, p75 = np.percentile(kept, (25, 50, 75))
    return Timing(float(median), float(p25), float(p75), float(kept.min()), int(kept.size))


def relative_iqr(timing: Timing) -> float:
    """Distance of the quartiles over the median."""
    return (timing.p75_us - timing.p25_us) / timing.latency_us


def suspicion(timing: Timing, state: DeviceState, clocks_mhz: Sequence[float]) -> tuple[bool, bool]:
    """Return what speaks against a measurement; either has it made again."""
    clocks = [c for c in clocks_mhz if math.isfinite(c)]
    off = False
    if clocks and math.isfinite(state.sm_clock_mhz):
        low, high = min(clocks) * (1 - MAX_CLOCK_SHARE), max(clocks) * (1 + MAX_CLOCK_SHARE)
        off = not low <= state.sm_clock_mhz <= high
    return relative_iqr(timing) > MAX_RELATIVE_IQR, off
