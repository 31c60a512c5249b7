"""Cutting a sweep over deployments into units: a plan, a mode and a slice of the candidates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final

from fastroof.models import load_model
from fastroof.sweep.deployments.layouts import layouts, num_layouts
from fastroof.sweep.deployments.spec import DeploymentSpec
from fastroof.sweep.units import PlanKey, UnitPiece, slices

__all__ = ["deployment_pieces"]

CANDIDATES_A_UNIT: Final = 2**18
"""A fraction of a second of work: how long an interrupt has to wait."""
KEPT_A_UNIT: Final = 2**14
"""Candidates of a unit that writes them all: a row takes half a kB."""


def deployment_pieces(spec: DeploymentSpec) -> Iterator[UnitPiece]:
    """Yield units in the order of the rows: models, GPUs, modes, splits, formats, runtimes, candidates."""
    loads = math.prod(map(len, spec.load_axes.values()))
    most = KEPT_A_UNIT if spec.keep == "all" else CANDIDATES_A_UNIT
    formats = {model: spec.formats(load_model(model)) for model in spec.models}
    for model, gpu, mode, (tp, split) in itertools.product(spec.models, spec.gpus, spec.mode, spec.splits):
        gpus = tp * split.pp * split.dp
        possible = len(layouts(spec, mode, gpus))
        # a unit of what cannot be laid out counts it
        impossible = (num_layouts(spec, mode, gpus) - possible) * loads
        for (dtype, kv_dtype), runtime in itertools.product(formats[model], spec.runtime):
            key = PlanKey(model, gpu, tp, dtype, kv_dtype, runtime, *split)
            for start, stop in slices(possible * loads, most):
                size = stop - start + (impossible if start == 0 else 0)
                yield UnitPiece(key, mode, start, stop, size, stop == possible * loads)
