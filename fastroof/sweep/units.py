"""What there is to evaluate: plans with the lengths they are evaluated at, and what falls out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fastroof.config import GpuSpec, ModelSpec, load_model, shard
from fastroof.errors import MissingTableError, PlanError
from fastroof.plan import StepPlan, compile_plan
from fastroof.plan.datasheet import DatasheetCurves
from fastroof.plan.table_curves import TableCurves
from fastroof.sweep.spec import SweepSpec
from fastroof.tables import Tables

__all__ = ["Skipped", "Unit", "unit_batches"]

UNITS_A_BATCH: Final = 64
ROWS_A_BATCH: Final = 2**20
EVALUATIONS_A_UNIT: Final = 2**26
"""A batch of such units takes a second or two: how long an interrupt has to wait."""

Ints = npt.NDArray[np.int64]


class Unit(NamedTuple):
    """A piece of work that depends on no other: a plan, over some of its lengths.

    Attributes
    ----------
    plan : StepPlan
        What to evaluate.
    kv_len : ndarray of int64
        At which lengths.
    report_kv_len : int
        The plan's length for the summary.
    number : int
        Place of the plan in the spec, from 1.
    is_last : bool
        Whether the plan is done after this.
    """

    plan: StepPlan
    kv_len: Ints
    report_kv_len: int
    number: int
    is_last: bool


class Skipped:
    """Names of what is not evaluated, by reason."""

    def __init__(self) -> None:
        # a dict as an ordered set
        self._names: dict[str, dict[str, None]] = {}

    def add(self, reason: str, name: str) -> None:
        """Remember a name, once."""
        self._names.setdefault(reason, {})[name] = None

    @property
    def by_reason(self) -> dict[str, tuple[str, ...]]:
        """Names by reason, each in the order of the spec."""
        return {reason: tuple(names) for reason, names in self._names.items()}

    def __str__(self) -> str:
        return "; ".join(f"{reason}: {', '.join(names)}" for reason, names in self._names.items())


def unit_batches(
    spec: SweepSpec, gpu: GpuSpec, tables: Tables | None, skipped: Skipped
) -> Iterator[list[Unit]]:
    """Compile plans batch by batch, so that neither plans nor rows pile up.

    Parameters
    ----------
    spec : SweepSpec
        What to sweep.
    gpu : GpuSpec
        Its GPU.
    tables : Tables or None
        That GPU's tables; None for the datasheet model.
    skipped : Skipped
        Gets what falls out.

    Yields
    ------
    list of Unit
        In the order of the rows.
    """
    batch: list[Unit] = []
    rows = 0
    rows_a_length = len(spec.batch_size) if spec.keep == "all" else 1
    most_lengths = min(ROWS_A_BATCH // rows_a_length, EVALUATIONS_A_UNIT // len(spec.batch_size))
    for unit in _units(spec, gpu, tables, skipped, max(1, most_lengths)):
        size = len(unit.kv_len) * rows_a_length
        if batch and (len(batch) == UNITS_A_BATCH or rows + size > ROWS_A_BATCH):
            yield batch
            batch, rows = [], 0
        batch.append(unit)
        rows += size
    if batch:
        yield batch


def _units(
    spec: SweepSpec, gpu: GpuSpec, tables: Tables | None, skipped: Skipped, most_lengths: int
) -> Iterator[Unit]:
    curves = DatasheetCurves(gpu) if tables is None else TableCurves(tables, spec.method)
    largest = spec.batch_size[-1]
    lengths = np.array(spec.kv_len)
    chosen = itertools.product(map(load_model, spec.models), spec.tp, spec.dtype, spec.kv_dtype)
    for number, (model, tp, dtype, kv_dtype) in enumerate(chosen, 1):
        name = f"{model.name} tp={tp} {dtype} kv {kv_dtype}"
        kv_len = _within_context(model, lengths, skipped)
        if not len(kv_len):
            continue
        try:
            shard(model, tp)
        except PlanError as error:
            skipped.add("cannot be split", str(error))
            continue
        try:
            plan = compile_plan(
                model, gpu, tables, tp=tp, dtype=dtype, kv_dtype=kv_dtype, runtime=spec.runtime,
                method=spec.method, max_tokens=largest, max_seqs=largest, curves=curves,
            )  # fmt: skip
        except MissingTableError as error:
            skipped.add("no measured table", f"{name}: {error}")
            continue
        except PlanError as error:
            skipped.add("no plan", f"{name}: {error}")
            continue
        if plan.memory.max_kv_tokens == 0:
            skipped.add("weights do not fit in memory", name)
            continue
        report = int(kv_len[np.argmin(np.abs(kv_len - spec.report_kv_len))])
        for start in range(0, len(kv_len), most_lengths):
            part = kv_len[start : start + most_lengths]
            yield Unit(plan, part, report, number, start + most_lengths >= len(kv_len))


def _within_context(model: ModelSpec, kv_len: Ints, skipped: Skipped) -> Ints:
    kept = kv_len[kv_len <= model.max_position]
    if len(kept) < len(kv_len):
        above = f"{len(kv_len) - len(kept)} of {len(kv_len)} kv_len are above {model.max_position}"
        skipped.add("beyond the model's context", f"{model.name}: {above}")
    return kept
