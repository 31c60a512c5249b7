"""Cutting a sweep over steps into units: a plan and a slice of the lengths."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from fastroof.models import load_model
from fastroof.sweep.steps.spec import StepSpec
from fastroof.sweep.units import PlanKey, UnitPiece, slices

__all__ = ["step_pieces"]

EVALUATIONS_A_UNIT: Final = 2**26
"""A fraction of a second of work: how long an interrupt has to wait."""
ROWS_A_UNIT: Final = 2**18


def step_pieces(spec: StepSpec) -> Iterator[UnitPiece]:
    """Yield units in the order of the rows: models, layouts, dtypes, kv_dtypes, lengths."""
    batches = len(spec.batch_size)
    rows_a_length = batches if spec.keep == "all" else 1
    most = min(ROWS_A_UNIT // rows_a_length, EVALUATIONS_A_UNIT // batches)
    for model in spec.models:
        loaded = load_model(model)
        longest = loaded.max_position
        within = sum(kv_len <= longest for kv_len in spec.kv_len)
        for (tp, split), (dtype, kv_dtype) in itertools.product(spec.splits, spec.formats(loaded)):
            key = PlanKey(model, spec.gpu, tp, dtype, kv_dtype, spec.runtime, *split)
            for start, stop in slices(within, most):
                yield UnitPiece(key, "steps", start, stop, (stop - start) * batches, stop == within)
