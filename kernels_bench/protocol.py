"""The few interfaces that the parts of kernels_bench meet at: providers, timers, monitors, clocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fastroof.arrays import Floats
from kernels_bench.points import Point

__all__ = ["Availability", "Clock", "DeviceState", "Monitor", "Prepared", "Provider", "Timer", "Timing"]


@dataclass(frozen=True)
class Availability:
    """Whether a provider works on this host.

    Attributes
    ----------
    works : bool
        Whether it can measure here.
    reason : str
        Why not, in words a person can act on; empty where it works.
    versions : mapping of str to str
        Versions of what it uses, for the provenance.
    """

    works: bool
    reason: str = ""
    versions: Mapping[str, str] | None = None


class Prepared(Protocol):
    """Inputs of one point on the device, ready to launch.

    Attributes
    ----------
    kernel : str
        The kernel or library call that is measured, for the ``kernel`` column.
    num_sets : int
        Input sets that calls rotate over, together larger than twice the L2.
    """

    kernel: str
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
        """Make random inputs for a point, of at most ``max_bytes`` in all.

        Raises
        ------
        MemoryError
            If the device cannot hold them; ``torch.cuda.OutOfMemoryError`` is turned into it.
        """


@dataclass(frozen=True)
class Timing:
    """Timed replays of one point, in us per call.

    Attributes
    ----------
    latency_us, p25_us, p75_us, min_us : float
        Median, quartiles and minimum over the replays.
    num_replays : int
        Timed replays.
    """

    latency_us: float
    p25_us: float
    p75_us: float
    min_us: float
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
