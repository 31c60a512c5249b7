"""How many GPUs a model is laid out on: replicas, or workers that prefill and workers that decode."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from fastroof.sweep.deployments.spec import DeploymentSpec

__all__ = ["Layout", "layouts", "num_layouts"]


class Layout(NamedTuple):
    """Replicas, each of which does everything, or workers of both kinds; the others are 0."""

    replicas: int
    prefill_workers: int
    decode_workers: int

    def total_gpus(self, tp: int) -> int:
        """GPUs of all of them."""
        return tp * sum(self)


def num_layouts(spec: DeploymentSpec, mode: str, tp: int) -> int:
    """Count the layouts that a spec asks for, those that are impossible included."""
    if spec.total_gpus is None:
        if mode == "aggregated":
            return len(spec.replicas or (1,))
        return len(spec.prefill_workers or (1,)) * len(spec.decode_workers or (1,))
    if mode == "aggregated":
        return len(spec.total_gpus)
    return sum(total // tp - 1 if _splits(total, tp) else 1 for total in spec.total_gpus)


def layouts(spec: DeploymentSpec, mode: str, tp: int) -> tuple[Layout, ...]:
    """List the possible layouts that a spec asks for: of a number of GPUs, every split into workers.

    A number of GPUs that tp does not divide, or that is too small for both kinds of workers, is one
    impossible layout.
    """
    if mode == "aggregated":
        replicas = spec.replicas or (1,)
        if spec.total_gpus is not None:
            replicas = tuple(total // tp for total in spec.total_gpus if total % tp == 0)
        return tuple(Layout(count, 0, 0) for count in replicas)
    if spec.total_gpus is None:
        both = itertools.product(spec.prefill_workers or (1,), spec.decode_workers or (1,))
        return tuple(Layout(0, *pair) for pair in both)
    return tuple(
        Layout(0, prefill, total // tp - prefill)
        for total in spec.total_gpus
        if _splits(total, tp)
        for prefill in range(1, total // tp)
    )


def _splits(total: int, tp: int) -> bool:
    return total % tp == 0 and total >= 2 * tp
