"""Stand-ins for a device: a clock, an NVML, a timer and scripted providers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from typer.testing import CliRunner, Result

from kernels_bench.cli import app
from kernels_bench.protocol import Availability, DeviceState, Point, Timing
from kernels_bench.run.run_options import RunOptions, RunReport
from kernels_bench.run.runner import measure

CLOCK_MHZ = 1900.0
H100 = "NVIDIA H100 80GB HBM3"


def gemm(m: int, n: int = 64, k: int = 64, dtype: str = "bf16", priority: int = 1) -> Point:
    return Point("gemm", {"dtype": dtype, "m": m, "n": n, "k": k}, priority)


def gemms(count: int) -> list[Point]:
    return [gemm(m) for m in range(1, count + 1)]


class FakeClock:
    """Time passes only where someone spends it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def spend(self, seconds: float) -> None:
        self.now_s += seconds


class FakePrepared:
    """A kernel whose result is off by ``error``."""

    def __init__(self, point: Point, provider: FakeProvider) -> None:
        self.kernel = f"fake {point.operator}"
        self.num_sets, self.columns = 3, {"quantises_input": 0} if point.operator == "gemm" else {}
        self.point, self.provider = point, provider
        self.closed = False
        self.ran: list[int] = []

    def run(self, index: int) -> None:
        self.ran.append(index)

    def result(self, index: int) -> npt.NDArray[np.float64]:
        assert index in self.ran, "the result of a set that was not run"
        return np.full(4, 1.0 + self.provider.error_of(self.point))

    def reference(self, index: int) -> npt.NDArray[np.float64]:
        return np.ones(4)

    def close(self) -> None:
        self.closed = True


class FakeProvider:
    """Takes the given points, and fails at given ones."""

    def __init__(
        self,
        name: str = "fake",
        takes: Callable[[Point], bool] = lambda _: True,
        fails: Callable[[Point], Exception | None] = lambda _: None,
        error_of: Callable[[Point], float] = lambda _: 0.0,
    ) -> None:
        self.name = name
        self._takes, self._fails, self.error_of = takes, fails, error_of
        self.prepared: list[FakePrepared] = []
        self.max_bytes: list[int] = []

    def availability(self) -> Availability:
        return Availability(True, versions={self.name: "1"})

    def refuses(self, point: Point) -> str | None:
        return None if self._takes(point) else "not mine"

    def prepare(self, point: Point, seed: int, max_bytes: int) -> FakePrepared:
        self.max_bytes.append(max_bytes)
        error = self._fails(point)
        if error is not None:
            raise error
        self.prepared.append(FakePrepared(point, self))
        return self.prepared[-1]


class FakeTimer:
    """Gives timings out of a script, and lets time pass."""

    def __init__(
        self,
        clock: FakeClock | None = None,
        latency_us: Callable[[Point, int], tuple[float, float]] = lambda *_: (10.0, 0.0),
        seconds: float = 0.02,
    ) -> None:
        self.clock, self._latency_us, self._seconds = clock, latency_us, seconds
        self.times: dict[str, int] = {}
        self.warm_ups_us: dict[str, float] = {}
        self.keys: list[str] = []

    def time(
        self, prepared: Any, read: Callable[[], DeviceState], warm_up_us: float = 0.0
    ) -> tuple[Timing, DeviceState]:
        key = prepared.point.key
        self.warm_ups_us[key] = warm_up_us
        call = self.times.get(key, 0)
        self.times[key] = call + 1
        self.keys.append(key)
        if self.clock is not None:
            self.clock.spend(self._seconds)
        us, iqr_us = self._latency_us(prepared.point, call)
        return Timing(us, us - iqr_us / 2, us + iqr_us / 2, us - iqr_us, 20), read()


class FakeMonitor:
    """Says a scripted clock, read after read; the last one for ever."""

    def __init__(
        self, clocks_mhz: Sequence[float] = (CLOCK_MHZ,), name: str = "NVIDIA H100 80GB HBM3"
    ) -> None:
        self.clocks_mhz, self.name = list(clocks_mhz), name
        self.reads, self.limited_us = 0, 0.0

    def power_limited_us(self) -> float:
        self.limited_us += 250.0
        return self.limited_us

    def read(self) -> DeviceState:
        clock = self.clocks_mhz[min(self.reads, len(self.clocks_mhz) - 1)]
        self.reads += 1
        return DeviceState(clock, 400.0, 50.0, 0)

    def facts(self) -> Mapping[str, Any]:
        return {"gpu_name": self.name, "driver": "580.0", "power_limit_w": 700.0}


class NVMLError(Exception):
    pass


class FakeNvml:
    """An NVML that can only be read: any other call is an AttributeError."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = NVML_PERF_POLICY_POWER = 0

    def __init__(self, silent: Sequence[str] = (), **answers: Any) -> None:
        self.silent = set(silent)
        self.calls: list[str] = []
        self.answers = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetPowerUsage": 351_500,
            "nvmlDeviceGetTemperature": 44,
            "nvmlDeviceGetViolationStatus": SimpleNamespace(referenceTime=9_000_000, violationTime=2_500_000),
            "nvmlDeviceGetCurrentClocksEventReasons": 4,
            "nvmlDeviceGetName": b"NVIDIA H100 80GB HBM3",
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlSystemGetDriverVersion": "580.95.05",
            "nvmlSystemGetCudaDriverVersion_v2": 13000,
            "nvmlDeviceGetVbiosVersion": "96.00",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * 2**30, free=79 * 2**30),
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
            **answers,
        }

    def __getattr__(self, name: str) -> Any:
        if name not in self.answers:
            raise AttributeError(name)

        def answer(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in self.silent:
                raise NVMLError(name)
            return self.answers[name]

        return answer


def run(
    journal: Path,
    points: Sequence[Point],
    providers: Sequence[Any] | None = None,
    *,
    timer: Any = None,
    monitor: Any = None,
    clock: FakeClock | None = None,
    **options: Any,
) -> RunReport:
    """`measure` with fakes for whatever is not given."""
    clock = clock or FakeClock()
    return measure(
        points,
        [FakeProvider()] if providers is None else providers,
        timer or FakeTimer(clock),
        monitor or FakeMonitor(),
        clock,
        journal,
        RunOptions(**{"gpu": "h100", "run_id": "r", **options}),
    )


def command(*arguments: str | Path) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refused(*arguments: str | Path) -> str:
    """The one line that a refused command line gives."""
    result = command(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("kernels-bench: error: ")
    return line


def of_type(records: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [r for r in records if r["type"] == kind]
