"""Cutting a sweep over capacities into units: a plan and some of its deployments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from fastroof.models import load_model
from fastroof.sweep.capacities.spec import CapacitySpec
from fastroof.sweep.units import PlanKey, UnitPiece, slices

__all__ = ["capacity_pieces"]

MODE: Final = "capacity"
DEPLOYMENTS_A_UNIT: Final = 8
"""A fraction of a second of work."""


def capacity_pieces(spec: CapacitySpec) -> Iterator[UnitPiece]:
    """Yield units in the order of the rows: models, GPUs, splits, formats, runtimes, deployments."""
    formats = {model: spec.formats(load_model(model)) for model in spec.models}
    for model, gpu, (tp, split) in itertools.product(spec.models, spec.gpus, spec.splits):
        gpus_each = tp * split.pp * split.dp
        possible, impossible = len(spec.deployments(gpus_each)), spec.num_impossible(gpus_each)
        for (dtype, kv_dtype), runtime in itertools.product(formats[model], spec.runtime):
            key = PlanKey(model, gpu, tp, dtype, kv_dtype, runtime, *split)
            for start, stop in slices(possible, DEPLOYMENTS_A_UNIT):
                # the first unit of a plan counts what cannot be laid out
                size = stop - start + (impossible if start == 0 else 0)
                yield UnitPiece(key, MODE, start, stop, size, stop == possible)
