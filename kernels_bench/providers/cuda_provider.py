"""What the providers of GPU kernels share: a device, and one launch an operator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

from kernels_bench.protocol import Availability, Point, Prepared
from kernels_bench.providers.device import Device, cuda_device, oom_as_memory_error


class Launch(NamedTuple):
    """How a provider measures one operator."""

    # ``refuses(point)``: why a point is not for the provider; None where it is.
    refuses: Callable[[Point], str | None]
    # ``prepare(point, seed, max_bytes)``: random inputs for a point, ready to launch.
    prepare: Callable[[Point, int, int], Prepared]
    # ``kernel(point)``: what would be launched for a point that is not refused, in words.
    kernel: Callable[[Point], str]


class CudaProvider(ABC):
    """A provider of GPU kernels."""

    name: str
    lacks: ClassVar[str] = "does not measure"
    """How it refuses an operator without a launch."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = device

    @property
    def device(self) -> Device:
        """Where inputs live."""
        if self._device is None:
            self._device = cuda_device()
        return self._device

    @property
    @abstractmethod
    def launches(self) -> Mapping[str, Launch]:
        """What it launches, by operator."""

    @abstractmethod
    def availability(self) -> Availability:
        """Return whether it works on this host, and why not."""

    def refuses(self, point: Point) -> str | None:
        """Return why a point is not for this provider, or None."""
        launch = self.launches.get(point.operator)
        return f"{self.name} {self.lacks} {point.operator}" if launch is None else launch.refuses(point)

    def kernel(self, point: Point) -> str:
        """Name what would be launched for a point that is not refused; nothing runs."""
        return self.launches[point.operator].kernel(point)

    def prepare(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        """Make random inputs for a point and plan its kernel."""
        with oom_as_memory_error():
            return self.launches[point.operator].prepare(point, seed, max_bytes)
