"""What the parts of kernels_bench meet at: points, providers, timers, monitors, clocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastroof.arrays import Floats
from fastroof.operators.registry import OPERATORS


@dataclass(frozen=True)
class Point:
    """One kernel at one size, named by the columns of its operator's table."""

    # A key of :data:`fastroof.operators.registry.OPERATORS`: gemm, attention_prefill, attention_decode, ...
    operator: str
    # Every key and axis column of that schema but the latency: ``{"dtype": "bf16", "m": 64, ...}``.
    values: Mapping[str, Any]
    # Which points a time budget drops first: the highest number. 0 is never dropped before 1.
    priority: int = field(default=0, compare=False)
    group: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        """Stable text that names the point: what resuming and merging go by."""
        return f"{self.operator} {json.dumps(dict(self.values), sort_keys=True)}"

    @property
    def family(self) -> str:
        """The points that share one correctness check: same operator, dtypes and head shape."""
        keys = {c.name: self.values[c.name] for c in OPERATORS[self.operator].keys}
        return f"{self.operator} {json.dumps(keys, sort_keys=True)}"


@dataclass(frozen=True)
class Availability:
    """Whether a provider works on this host."""

    works: bool
    # Why not, as advice; empty if it works.
    reason: str = ""
    versions: Mapping[str, str] | None = None


class Prepared(Protocol):
    """Inputs of one point on the device, ready to launch."""

    kernel: str
    num_sets: int
    # Optional columns of the row that only some operators have.
    columns: Mapping[str, int]

    def run(self, index: int) -> None:
        """Launch the kernel on input set ``index`` without waiting for it."""

    def result(self, index: int) -> Floats:
        """What the last run on that set wrote, in float64 on the host."""

    def reference(self, index: int) -> Floats:
        """What it should have written, computed in float64 from the same inputs."""

    def close(self) -> None:
        """Give the device memory back."""


class Provider(Protocol):
    """Something that launches kernels: torch, flashinfer, vllm, cpu."""

    name: str

    def availability(self) -> Availability:
        """Whether it works on this host, and why not."""

    def refuses(self, point: Point) -> str | None:
        """Why this point is not for this provider; None where it is."""

    def prepare(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        """Make random inputs for a point, of at most ``max_bytes`` in all."""


@dataclass(frozen=True)
class Timing:
    """Timed replays of one point, in us per call: their median, quartiles and minimum."""

    latency_us: float
    p25_us: float
    p75_us: float
    min_us: float
    num_replays: int


@dataclass(frozen=True)
class DeviceState:
    """Device state while a point's replays run; NaN if not reported."""

    sm_clock_mhz: float = float("nan")
    power_w: float = float("nan")
    temperature_c: float = float("nan")
    throttle_reasons: int = 0


class Timer(Protocol):
    """Times a prepared point."""

    def time(
        self, prepared: Prepared, read: Callable[[], DeviceState], warm_up_us: float = 0.0
    ) -> tuple[Timing, DeviceState]:
        """Warm up, for ``warm_up_us`` at least, and replay; ``read`` is called half-way."""


class Monitor(Protocol):
    """Reads the device's state; never changes it."""

    def read(self) -> DeviceState:
        """Clock, power, temperature and throttle reasons now."""

    def power_limited_us(self) -> float:
        """Time that the power limit has held clocks back since the driver loaded; NaN if not reported."""
        return float("nan")

    def facts(self) -> Mapping[str, Any]:
        """GPU name, driver, power cap, memory: what provenance holds."""


Clock = Callable[[], float]
"""Seconds on a clock that only rises, as ``time.monotonic``; tests bring their own."""
