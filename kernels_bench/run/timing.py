"""Timers of prepared points: CUDA graphs on a GPU, a clock on the host.

Own code, because neither published harness does all of what a kernel of 5 us needs:
``triton.testing.do_bench_cudagraph`` (3.6) captures one call on one set of inputs, which then lie in the L2;
``flashinfer.testing.bench_gpu_time`` (0.6.14) sizes its graph without regard to the length of a replay. Here
one graph runs over every input set a whole number of times and lasts at least 0.5 ms, so that the resolution
of events (about 0.5 us) is under 0.2 % of what is timed.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

from fastroof.errors import MeasureError
from fastroof.units import US_PER_MS, US_PER_S
from kernels_bench.protocol import DeviceState, Prepared, Timing
from kernels_bench.replays import WARM_UP_US, pilot_calls, schedule, summarise


class CpuTimer:
    """Times a prepared point of the cpu provider with the host's clock."""

    def __init__(self, seconds: Callable[[], float] = perf_counter) -> None:
        self._seconds = seconds

    def time(
        self, prepared: Prepared, read: Callable[[], DeviceState], warm_up_us: float = 0.0
    ) -> tuple[Timing, DeviceState]:
        """Warm up, replay, and summarise."""
        pilot = pilot_calls(prepared.num_sets)
        self._replay_us(prepared, pilot)
        plan = schedule(self._replay_us(prepared, pilot) / pilot, prepared.num_sets)
        for _ in range(plan.warm_up):
            self._replay_us(prepared, plan.calls)
        replays = [self._replay_us(prepared, plan.calls) for _ in range(plan.replays)]
        return summarise(replays, plan.calls), read()

    def _replay_us(self, prepared: Prepared, calls: int) -> float:
        run, num_sets = prepared.run, prepared.num_sets
        start = self._seconds()
        for call in range(calls):
            run(call % num_sets)
        return (self._seconds() - start) * US_PER_S


class GraphTimer:
    """Times a prepared point as replays of a CUDA graph that rotates over its input sets."""

    def __init__(self, torch: Any = None) -> None:
        self._torch = _cuda_torch() if torch is None else torch
        self._stream = self._torch.cuda.Stream()

    def time(
        self, prepared: Prepared, read: Callable[[], DeviceState], warm_up_us: float = 0.0
    ) -> tuple[Timing, DeviceState]:
        """Warm up, replay, and summarise."""
        torch = self._torch
        try:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                return self._time(prepared, read, warm_up_us)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def _time(
        self, prepared: Prepared, read: Callable[[], DeviceState], warm_up_us: float
    ) -> tuple[Timing, DeviceState]:
        # Libraries choose kernels and make workspaces in their first calls, which a graph must not hold.
        for index in range(min(prepared.num_sets, 3)):
            prepared.run(index)
        self._stream.synchronize()
        pilot = pilot_calls(prepared.num_sets)
        graph = self._capture(prepared, pilot)
        try:
            self._replays_us(graph, 1, DeviceState)
            (pilot_us,), _ = self._replays_us(graph, 1, DeviceState)
            plan = schedule(pilot_us / pilot, prepared.num_sets, max(WARM_UP_US, warm_up_us))
            if plan.calls != pilot:
                graph.reset()
                graph = self._capture(prepared, plan.calls)
            for _ in range(plan.warm_up):
                graph.replay()
            replays, state = self._replays_us(graph, plan.replays, read)
        finally:
            graph.reset()
        return summarise(replays, plan.calls), state

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

    def _replays_us(
        self, graph: Any, count: int, read: Callable[[], DeviceState]
    ) -> tuple[list[float], DeviceState]:
        """Enqueue all replays at once, so that the host's own pauses fall between none of them.

        The state is read once half of them ran, the others being queued: an idle GPU clocks up.
        """
        events = [self._torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record(self._stream)
        for event in events[1:]:
            graph.replay()
            event.record(self._stream)
        events[count // 2].synchronize()
        state = read()
        self._stream.synchronize()
        return [a.elapsed_time(b) * US_PER_MS for a, b in pairwise(events)], state


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
