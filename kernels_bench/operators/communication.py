"""Collectives: what the GPUs of a group send each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

import numpy as np

from fastroof.arrays import Floats
from kernels_bench.operators.operator import Columns, MeasuredOperator, Values


class CollectiveOperator(MeasuredOperator):
    """All-gather, reduce-scatter and all-to-all."""

    name = "collective"
    bandwidth_share = 0.7
    launch_us = 10.0
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "collective": ("all_gather", "reduce_scatter", "alltoall")
    }

    def impossible(self, given: Values) -> str | None:
        """A single GPU sends nothing."""
        if reason := super().impossible(given):
            return reason
        if given["num_gpus"] < 2:
            return f"num_gpus {given['num_gpus']}: a collective needs at least 2"
        return None

    def set_bytes(self, columns: Columns, moved_bytes: Floats) -> Floats:
        """A message of each GPU, in and out."""
        return np.asarray(2.0 * columns["message_bytes"] * columns["num_gpus"], np.float64)


class AllreduceOperator(CollectiveOperator):
    """Sums over all GPUs."""

    name = "allreduce"
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"mode": ("graph", "eager", "nccl")}


ALLREDUCE: Final = AllreduceOperator.name
COLLECTIVE: Final = CollectiveOperator.name
BY_RANKS: Final = (ALLREDUCE, COLLECTIVE)
"""Operators that ranks measure together, a process a GPU, where all others are measured by one process."""

OPERATORS: Final = (AllreduceOperator(), CollectiveOperator())
