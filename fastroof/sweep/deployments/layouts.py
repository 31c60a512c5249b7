"""How many GPUs a model is laid out on: replicas, or workers that prefill and workers that decode."""

from __future__ import annotations

import itertools
from typing import NamedTuple, Protocol

__all__ = ["Layout", "LayoutAxes", "layouts", "num_layouts"]


class LayoutAxes(Protocol):
    """What a spec says of layouts: numbers of GPUs, or of each kind of worker; None where it does not say."""

    @property
    def total_gpus(self) -> tuple[int, ...] | None:
        """GPUs of the whole deployment."""

    @property
    def replicas(self) -> tuple[int, ...] | None:
        """Copies of the model that do everything."""

    @property
    def prefill_workers(self) -> tuple[int, ...] | None:
        """Workers that only prefill."""

    @property
    def decode_workers(self) -> tuple[int, ...] | None:
        """Workers that only decode."""


class Layout(NamedTuple):
    """Replicas, each of which does everything, or workers of both kinds; the others are 0."""

    replicas: int
    prefill_workers: int
    decode_workers: int

    def total_gpus(self, gpus_each: int) -> int:
        """GPUs of all of them."""
        return gpus_each * sum(self)


def num_layouts(axes: LayoutAxes, mode: str, gpus_each: int) -> int:
    """Count the layouts that are asked for, those that are impossible included."""
    if axes.total_gpus is None:
        if mode == "aggregated":
            return len(axes.replicas or (1,))
        return len(axes.prefill_workers or (1,)) * len(axes.decode_workers or (1,))
    if mode == "aggregated":
        return len(axes.total_gpus)
    return sum(total // gpus_each - 1 if _splits(total, gpus_each) else 1 for total in axes.total_gpus)


def layouts(axes: LayoutAxes, mode: str, gpus_each: int) -> tuple[Layout, ...]:
    """List the possible layouts that are asked for: of a number of GPUs, every split into workers."""
    if mode == "aggregated":
        replicas = axes.replicas or (1,)
        if axes.total_gpus is not None:
            replicas = tuple(total // gpus_each for total in axes.total_gpus if total % gpus_each == 0)
        return tuple(Layout(count, 0, 0) for count in replicas)
    if axes.total_gpus is None:
        both = itertools.product(axes.prefill_workers or (1,), axes.decode_workers or (1,))
        return tuple(Layout(0, *pair) for pair in both)
    return tuple(
        Layout(0, prefill, total // gpus_each - prefill)
        for total in axes.total_gpus
        if _splits(total, gpus_each)
        for prefill in range(1, total // gpus_each)
    )


def _splits(total: int, gpus_each: int) -> bool:
    return total % gpus_each == 0 and total >= 2 * gpus_each
