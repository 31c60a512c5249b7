"""Times prepared points: how many calls, how many replays, and what they say.

Own code, because neither published harness does all of what a kernel of 5 us needs (both read at the
versions named): ``triton.testing.do_bench_cudagraph`` (3.6) captures one call on one set of inputs, so
a kernel whose inputs fit finds them in the L2; ``flashinfer.testing.bench_gpu_time`` (0.6.14) rotates
inputs only over the few iterations of its graph, sizes that graph without regard to the length of a
replay, and keeps the first replay. Here one graph runs over every input set a whole number of times and
lasts at least 0.5 ms, so that the resolution of events (about 0.5 us) is under 0.2 % of what is timed.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any, Final

import numpy as np

from fastroof.errors import MeasureError
from fastroof.units import US_PER_MS, US_PER_S
from kernels_bench.protocol import DeviceState, Prepared, Timing

__all__ = [
    "CpuTimer",
    "GraphTimer",
    "ReplayRule",
    "Schedule",
    "is_suspicious",
    "relative_iqr",
    "schedule",
    "summarise",
    "suspicion",
]

MAX_RELATIVE_IQR: Final = 0.05
MAX_CLOCK_SHARE: Final = 0.03


@dataclass(frozen=True)
class ReplayRule:
    """What a measurement of one point is made of.

    Attributes
    ----------
    warm_up_us : float
        Replays before the timed ones last at least this, us.
    replay_us : float
        A replay lasts at least this, us.
    num_replays : int
        Replays that are timed and kept.
    least_replays : int
        Replays that a point has even where ``point_us`` is used up.
    point_us : float
        What the timed replays of one point may take, us: a prefill of 10 ms is not replayed 20 times.
    dropped : int
        First replays that are timed and dropped.
    max_calls : int
        Most calls in one graph, since each takes the host about 5 us to capture.
    """

    warm_up_us: float = 3000.0
    replay_us: float = 500.0
    num_replays: int = 20
    least_replays: int = 5
    point_us: float = 120_000.0
    dropped: int = 1
    max_calls: int = 2048


@dataclass(frozen=True)
class Schedule:
    """How a point is timed once it is known how long a call takes.

    Attributes
    ----------
    calls : int
        Calls in one replay.
    warm_up : int
        Replays before the timed ones.
    replays : int
        Timed replays, the dropped ones included.
    """

    calls: int
    warm_up: int
    replays: int


def pilot_calls(num_sets: int, rule: ReplayRule) -> int:
    """Return the calls of the first graph, which finds how long a call takes: every input set once."""
    return max(1, min(num_sets, rule.max_calls))


def schedule(call_us: float, num_sets: int, rule: ReplayRule | None = None) -> Schedule:
    """Decide how many calls a replay has, and how many replays there are.

    Parameters
    ----------
    call_us : float
        About how long one call takes, us.
    num_sets : int
        Input sets that the calls rotate over.
    rule : ReplayRule, optional
        The lengths to keep.

    Returns
    -------
    Schedule
        Whole rounds over the input sets: a part of a round would have the next replay find its first
        inputs still in the L2. Where even one round is above ``max_calls``, the sets beyond are not used.

    Raises
    ------
    MeasureError
        If the call took no time, or the provider prepared no input.

    Examples
    --------
    >>> schedule(5.0, num_sets=30)
    Schedule(calls=120, warm_up=5, replays=21)
    >>> schedule(10_000.0, num_sets=1)
    Schedule(calls=1, warm_up=1, replays=13)
    """
    rule = rule or ReplayRule()
    if not (math.isfinite(call_us) and call_us > 0):
        raise MeasureError(f"a call took {call_us} us; need a time above 0: did the kernel run at all?")
    if num_sets < 1:
        raise MeasureError(f"num_sets is {num_sets}; a provider prepares at least one input set")
    rounds = math.ceil(rule.replay_us / (call_us * num_sets))
    calls = min(rounds * num_sets, max(1, rule.max_calls // num_sets) * num_sets, rule.max_calls)
    replay_us = calls * call_us
    fitting = int(rule.point_us // replay_us)
    return Schedule(
        calls=calls,
        warm_up=max(1, math.ceil(rule.warm_up_us / replay_us)),
        replays=max(rule.least_replays, min(rule.num_replays, fitting)) + rule.dropped,
    )


def summarise(replays_us: Sequence[float], calls: int, dropped: int = 1) -> Timing:
    """Summarise timed replays as microseconds a call.

    Parameters
    ----------
    replays_us : sequence of float
        Duration of each replay in the order they ran, us.
    calls : int
        Calls in each replay.
    dropped : int
        First replays to leave out: they still carry the start of the graph.

    Returns
    -------
    Timing
        No other replay is left out: one slow replay in twenty moves neither median nor quartiles, and
        many slow ones are what :func:`is_suspicious` is for.

    Raises
    ------
    MeasureError
        If nothing is left, or a duration is not above zero.

    Examples
    --------
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
    """Say what speaks against a measurement.

    Parameters
    ----------
    timing : Timing
        What was timed.
    state : DeviceState
        What the device said right after.
    clocks_mhz : sequence of float
        SM clocks of the last round of sentinels; those it did not tell are NaN.

    Returns
    -------
    tuple of bool
        Whether the quartiles are more than 5 % of the median apart, and whether the clock is more
        than 3 % outside those of the sentinels. A GEMM that draws full power runs at a lower clock
        than a copy, so what counts is the range of the sentinels, not one of them.
    """
    clocks = [c for c in clocks_mhz if math.isfinite(c)]
    off = False
    if clocks and math.isfinite(state.sm_clock_mhz):
        low, high = min(clocks) * (1 - MAX_CLOCK_SHARE), max(clocks) * (1 + MAX_CLOCK_SHARE)
        off = not low <= state.sm_clock_mhz <= high
    return relative_iqr(timing) > MAX_RELATIVE_IQR, off


def is_suspicious(timing: Timing, state: DeviceState, clocks_mhz: Sequence[float]) -> bool:
    """Say whether a point should be measured again: either of :func:`suspicion`."""
    return any(suspicion(timing, state, clocks_mhz))


class CpuTimer:
    """Times a prepared point of the cpu provider with the host's clock.

    Parameters
    ----------
    rule : ReplayRule, optional
        The lengths to keep.
    seconds : callable
        A clock in seconds.
    """

    def __init__(self, rule: ReplayRule | None = None, seconds: Callable[[], float] = perf_counter) -> None:
        self._rule = rule or ReplayRule()
        self._seconds = seconds

    def time(self, prepared: Prepared) -> Timing:
        """Warm up, replay, and summarise."""
        rule = self._rule
        pilot = pilot_calls(prepared.num_sets, rule)
        self._replay_us(prepared, pilot)
        plan = schedule(self._replay_us(prepared, pilot) / pilot, prepared.num_sets, rule)
        for _ in range(plan.warm_up):
            self._replay_us(prepared, plan.calls)
        replays = [self._replay_us(prepared, plan.calls) for _ in range(plan.replays)]
        return summarise(replays, plan.calls, rule.dropped)

    def _replay_us(self, prepared: Prepared, calls: int) -> float:
        run, num_sets = prepared.run, prepared.num_sets
        start = self._seconds()
        for call in range(calls):
            run(call % num_sets)
        return (self._seconds() - start) * US_PER_S


class GraphTimer:
    """Times a prepared point as replays of a CUDA graph that rotates over its input sets.

    Parameters
    ----------
    rule : ReplayRule, optional
        The lengths to keep.
    torch : module, optional
        Stands in for torch in tests.

    Raises
    ------
    MeasureError
        If there is no torch, or no GPU for it.
    """

    def __init__(self, rule: ReplayRule | None = None, torch: Any = None) -> None:
        self._rule = rule or ReplayRule()
        self._torch = _cuda_torch() if torch is None else torch
        self._stream = self._torch.cuda.Stream()

    def time(self, prepared: Prepared) -> Timing:
        """Warm up, replay, and summarise.

        Raises
        ------
        MeasureError
            If the kernel cannot be captured in a CUDA graph: without one, a short kernel's time is that
            of the host's launches, which no table should hold.
        MemoryError
            If the device has no memory left for its outputs.
        """
        torch = self._torch
        try:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                return self._time(prepared)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def _time(self, prepared: Prepared) -> Timing:
        rule, stream = self._rule, self._stream
        # Libraries choose kernels and make workspaces in their first calls, which a graph must not hold.
        for index in range(min(prepared.num_sets, 3)):
            prepared.run(index)
        stream.synchronize()
        pilot = pilot_calls(prepared.num_sets, rule)
        graph = self._capture(prepared, pilot)
        try:
            self._replays_us(graph, 1)
            plan = schedule(self._replays_us(graph, 1)[0] / pilot, prepared.num_sets, rule)
            if plan.calls != pilot:
                graph.reset()
                graph = self._capture(prepared, plan.calls)
            for _ in range(plan.warm_up):
                graph.replay()
            replays = self._replays_us(graph, plan.replays)
        finally:
            graph.reset()
        return summarise(replays, plan.calls, rule.dropped)

    def _capture(self, prepared: Prepared, calls: int) -> Any:
        torch = self._torch
        graph = torch.cuda.CUDAGraph()
        try:
            _record(graph, prepared, calls)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise MeasureError(
                f"{prepared.kernel} cannot be captured in a CUDA graph, so it cannot be timed: {error}"
            ) from error
        return graph

    def _replays_us(self, graph: Any, count: int) -> list[float]:
        """Enqueue all replays at once, so that the host's own pauses fall between none of them."""
        events = [self._torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record(self._stream)
        for event in events[1:]:
            graph.replay()
            event.record(self._stream)
        self._stream.synchronize()
        return [a.elapsed_time(b) * US_PER_MS for a, b in pairwise(events)]


def _record(graph: Any, prepared: Prepared, calls: int) -> None:
    """Capture calls on the current stream.

    Not with ``torch.cuda.graph``, which empties the allocator's cache (and collected garbage, before
    2.9) each time: with two graphs a point that would cost more than the measuring.
    """
    collecting = gc.isenabled()
    gc.disable()  # freeing some older graph in the middle of a capture would spoil it
    try:
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in range(calls):
                prepared.run(call % prepared.num_sets)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    finally:
        if collecting:
            gc.enable()


def _cuda_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MeasureError(
            f"torch cannot be imported ({error}); a GPU needs it (pip install 'fastroof[gpu]'), "
            "or pass --providers cpu"
        ) from None
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch {torch.__version__} is built for " + (f"CUDA {built}" if built else "the CPU")
        raise MeasureError(f"no CUDA device is usable here: {why}; see nvidia-smi, or pass --providers cpu")
    return torch
