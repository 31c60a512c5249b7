"""The few interfaces that the parts of kernels_bench meet at: providers, timers, monitors, clocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fastroof.arrays import Floats
from kernels_bench.points import Point


@dataclass(frozen=True)
class Availability:
    """Whether a provider works on this host."""

    # Whether it can measure here.
    works: bool
    # Why not, in words a person can act on; empty where it works.
    reason: str = ""
    # Versions of what it uses, for the provenance.
    versions: Mapping[str, str] | None = None


class Prepared(Protocol):
    """Inputs of one point on the device, ready to launch."""

    # The kernel or library call that is measured, for the ``kernel`` column.
    kernel: str
    # Input sets that calls rotate over, together larger than twice the L2.
    num_sets: int

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
    """Timed replays of one point, in us per call."""

    # Median, quartiles and minimum over the replays.
    latency_us: float
    p25_us: float
    p75_us: float
    min_us: float
    # Timed replays.
    num_replays: int


class Timer(Protocol):
    """Times a prepared point."""

    def time(self, prepared: Prepared) -> Timing:
        """Warm up, replay, and summarise."""


@dataclass(frozen=True)
class DeviceState:
    """What the device says of itself right after a point; NaN where it does not say."""

    sm_clock_mhz: float = float("nan")
    power_w: float = float("nan")
    temperature_c: float = float("nan")
    throttle_reasons: int = 0


class Monitor(Protocol):
    """Reads the device's state; never changes it."""

    def read(self) -> DeviceState:
        """Clock, power, temperature and throttle reasons now."""

    def facts(self) -> Mapping[str, Any]:
        """GPU name, driver, power cap, memory: what provenance holds."""


class Clock(Protocol):
    """Where the time of day comes from, so that tests can bring their own."""

    def seconds(self) -> float:
        """Seconds on a clock that only rises."""
