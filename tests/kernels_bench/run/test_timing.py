"""How many calls and replays, their statistics, and when a point is measured again."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.errors import MeasureError
from kernels_bench import replays as rule
from kernels_bench.protocol import DeviceState, Timing
from kernels_bench.replays import relative_iqr, schedule, summarise, suspicion
from kernels_bench.run.timing import CpuTimer, GraphTimer
from tests.kernels_bench.fakes import FakePrepared, FakeProvider, gemm


@given(st.floats(0.1, 1e6), st.integers(1, 5000))
def test_schedule_keeps_its_promises(call_us: float, num_sets: int) -> None:
    plan = schedule(call_us, num_sets)
    replay_us = plan.calls * call_us
    assert 1 <= plan.calls <= rule.MAX_CALLS
    if num_sets <= rule.MAX_CALLS:
        assert plan.calls % num_sets == 0, "a part of a round leaves inputs in the L2"
    if replay_us < rule.REPLAY_US * (1 - 1e-9):
        assert plan.calls + num_sets > rule.MAX_CALLS, "a short replay where a longer one was possible"
    assert plan.warm_up * replay_us >= rule.WARM_UP_US * (1 - 1e-9)
    kept = plan.replays - rule.DROPPED
    assert rule.LEAST_REPLAYS <= kept <= rule.NUM_REPLAYS
    if kept > rule.LEAST_REPLAYS:
        assert kept * replay_us <= rule.POINT_US * (1 + 1e-9)


@pytest.mark.parametrize(
    ("call_us", "num_sets", "calls", "replays"),
    [(5.0, 1, 100, 21), (5.0, 34, 102, 21), (2.0, 2048, 2048, 21), (400.0, 3, 3, 21), (20_000.0, 1, 1, 7)],
)
def test_schedule_by_hand(call_us: float, num_sets: int, calls: int, replays: int) -> None:
    plan = schedule(call_us, num_sets)
    assert (plan.calls, plan.replays) == (calls, replays)


@pytest.mark.parametrize("call_us", [0.0, -1.0, math.nan, math.inf])
def test_a_call_without_a_time_is_an_error(call_us: float) -> None:
    with pytest.raises(MeasureError, match="need a time above 0"):
        schedule(call_us, 1)


def test_no_input_sets_is_an_error() -> None:
    with pytest.raises(MeasureError, match="at least one input set"):
        schedule(1.0, 0)


def test_summary_drops_the_first_and_divides_by_calls() -> None:
    replays = [9999.0, *np.arange(400.0, 420.0)]
    timing = summarise(replays, calls=10)
    assert timing == Timing(40.95, 40.475, 41.425, 40.0, 20)


def test_one_slow_replay_moves_nothing_but_many_do() -> None:
    steady = [500.0 + i % 3 for i in range(21)]
    one = [*steady[:-1], 5000.0]
    many = [500.0 if i % 2 else 600.0 for i in range(21)]
    assert summarise(one, 1).latency_us == summarise(steady, 1).latency_us
    assert relative_iqr(summarise(one, 1)) < 0.05
    assert relative_iqr(summarise(many, 1)) > 0.05


@given(st.lists(st.floats(1e-3, 1e6), min_size=2, max_size=40), st.integers(1, 2048))
def test_summary_is_ordered(replays: list[float], calls: int) -> None:
    timing = summarise(replays, calls)
    assert timing.min_us <= timing.p25_us <= timing.latency_us <= timing.p75_us
    shuffled = replays[1:]
    random.Random(0).shuffle(shuffled)
    assert summarise([replays[0], *shuffled], calls) == timing


@pytest.mark.parametrize("replays", [[], [1.0], [1.0, 0.0], [1.0, -2.0], [1.0, math.nan]])
def test_no_durations_is_an_error(replays: list[float]) -> None:
    with pytest.raises(MeasureError, match="need durations above 0"):
        summarise(replays, 1)


def timing(iqr_us: float) -> Timing:
    return Timing(10.0, 10.0 - iqr_us / 2, 10.0 + iqr_us / 2, 9.0, 20)


@pytest.mark.parametrize(
    ("iqr_us", "clock_mhz", "sentinels", "expected"),
    [
        (0.49, 1900.0, (1900.0,), (False, False)),
        (0.51, 1900.0, (1900.0,), (True, False)),
        (0.0, 1844.0, (1900.0,), (False, False)),
        (0.0, 1842.0, (1900.0,), (False, True)),
        (0.0, 1958.0, (1900.0,), (False, True)),
        (0.0, 1700.0, (1700.0, 1980.0), (False, False)),
        (0.0, 1400.0, (1700.0, 1980.0), (False, True)),
        (0.0, math.nan, (1900.0,), (False, False)),
        (0.0, 1400.0, (math.nan, math.nan), (False, False)),
        (0.0, 1400.0, (), (False, False)),
    ],
)
def test_suspicion(
    iqr_us: float, clock_mhz: float, sentinels: tuple[float, ...], expected: tuple[bool, bool]
) -> None:
    state = DeviceState(sm_clock_mhz=clock_mhz)
    assert suspicion(timing(iqr_us), state, sentinels) == expected


class SteppedKernel:
    """A kernel of known duration on a clock that only it moves."""

    kernel, num_sets = "stepped", 4

    def __init__(self, call_us: float) -> None:
        self.call_us, self.now_s = call_us, 0.0
        self.ran: list[int] = []

    def run(self, index: int) -> None:
        self.ran.append(index)
        self.now_s += self.call_us * 1e-6

    def seconds(self) -> float:
        return self.now_s


def test_cpu_timer_measures_a_known_duration_and_rotates() -> None:
    kernel = SteppedKernel(25.0)
    timed, state = CpuTimer(seconds=kernel.seconds).time(kernel, DeviceState)  # type: ignore[arg-type]
    assert state == DeviceState()
    assert timed.latency_us == pytest.approx(25.0, rel=1e-6)
    assert timed.num_replays == 20
    assert [kernel.ran.count(i) for i in range(4)] == [len(kernel.ran) // 4] * 4


class FakeCuda:
    """As much of torch.cuda as a graph needs: a call costs time when replayed, not when captured."""

    class OutOfMemoryError(RuntimeError):
        pass

    def __init__(
        self, call_us: float, host_us: float = 40.0, breaks_capture: Exception | None = None
    ) -> None:
        self.call_us, self.host_us, self.breaks = call_us, host_us, breaks_capture
        self.now_us, self.capturing, self.live, self.waited = 0.0, None, 0, False
        self.reached_us = 0.0
        self.replayed: list[list[int]] = []
        outer = self

        class CUDAGraph:
            def __init__(self) -> None:
                self.calls: list[int] = []
                outer.live += 1

            def capture_begin(self, capture_error_mode: str) -> None:
                outer.capturing = self.calls

            def capture_end(self) -> None:
                outer.capturing = None
                if outer.breaks is not None:
                    raise RuntimeError("capture was invalidated")

            def replay(self) -> None:
                outer.replayed.append(list(self.calls))
                outer.now_us += outer.call_us * len(self.calls)

            def reset(self) -> None:
                self.calls = []
                outer.live -= 1

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: Any) -> None:
                self.at_us = outer.now_us

            def synchronize(self) -> None:
                outer.reached_us = self.at_us

            def elapsed_time(self, other: Any) -> float:
                return (other.at_us - self.at_us) / 1e3  # type: ignore[no-any-return]

        self.CUDAGraph, self.Event = CUDAGraph, Event

    def Stream(self) -> Any:
        return SimpleNamespace(synchronize=lambda: None, wait_stream=self.wait)

    def wait(self, other: str) -> None:
        self.waited = other == "where inputs were made"

    def current_stream(self) -> str:
        return "where inputs were made"

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield


class GraphKernel:
    kernel = "graph kernel"

    def __init__(self, cuda: FakeCuda, num_sets: int) -> None:
        self.cuda, self.num_sets = cuda, num_sets

    def run(self, index: int) -> None:
        assert self.cuda.waited, "ran before its inputs were made"
        if self.cuda.capturing is None:
            self.cuda.now_us += self.cuda.host_us  # launched one by one, the host is what takes time
            return
        if self.cuda.breaks is not None:
            raise self.cuda.breaks
        self.cuda.capturing.append(index)


def graph_timer(cuda: FakeCuda) -> GraphTimer:
    return GraphTimer(torch=SimpleNamespace(cuda=cuda))


@pytest.mark.parametrize(("call_us", "num_sets"), [(5.0, 30), (2.5, 7), (900.0, 2), (700.0, 1)])
def test_graph_timer_measures_the_kernel_and_not_the_launches(call_us: float, num_sets: int) -> None:
    cuda = FakeCuda(call_us)
    begun_at: list[float] = []

    def read() -> DeviceState:
        begun_at.append(cuda.now_us - cuda.reached_us)
        return DeviceState(1500.0)

    timed, state = graph_timer(cuda).time(GraphKernel(cuda, num_sets), read)  # type: ignore[arg-type]
    assert state.sm_clock_mhz == 1500.0
    assert len(begun_at) == 1, "read once, while replays that are enqueued have not run"
    assert begun_at[0] >= 2 * 500.0
    assert timed.latency_us == pytest.approx(call_us, rel=1e-9)
    last = cuda.replayed[-1]
    assert last == [i % num_sets for i in range(len(last))]
    assert len(last) % num_sets == 0
    assert len(last) * call_us >= 500.0
    assert cuda.live == 0, "a graph was not given back"
    soaked = FakeCuda(call_us)
    graph_timer(soaked).time(GraphKernel(soaked, num_sets), DeviceState, 5e5)  # type: ignore[arg-type]
    assert soaked.now_us > cuda.now_us + 4.9e5


def test_a_kernel_that_cannot_be_captured_is_named() -> None:
    cuda = FakeCuda(5.0, breaks_capture=RuntimeError("operation not permitted when stream is capturing"))
    with pytest.raises(MeasureError, match=r"graph kernel cannot be captured.*not permitted"):
        graph_timer(cuda).time(GraphKernel(cuda, 1), DeviceState)  # type: ignore[arg-type]
    assert cuda.capturing is None, "the capture was left open"


def test_out_of_memory_in_a_graph_is_a_memory_error() -> None:
    cuda = FakeCuda(5.0, breaks_capture=FakeCuda.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    with pytest.raises(MemoryError, match="Tried to allocate"):
        graph_timer(cuda).time(GraphKernel(cuda, 1), DeviceState)  # type: ignore[arg-type]


def test_graph_timer_without_cuda_names_the_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MeasureError, match=r"torch cannot be imported.*--providers cpu"):
        GraphTimer()
    cpu_torch = SimpleNamespace(
        __version__="2.11.0+cpu",
        cuda=SimpleNamespace(is_available=lambda: False),
        version=SimpleNamespace(cuda=None),
    )
    monkeypatch.setitem(sys.modules, "torch", cpu_torch)
    with pytest.raises(MeasureError, match="built for the CPU"):
        GraphTimer()


def test_fake_prepared_is_a_prepared() -> None:
    """The fakes that the runner's tests rest on refuse what a real one refuses."""
    prepared = FakePrepared(gemm(1), FakeProvider())
    with pytest.raises(AssertionError, match="not run"):
        prepared.result(0)
