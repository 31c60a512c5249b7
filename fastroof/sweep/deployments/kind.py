"""Sweeps over deployments: units, reduction of rows, and summary."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

from fastroof.columns import Column
from fastroof.sweep.deployments.columns import columns_of
from fastroof.sweep.deployments.spec import DeploymentSpec
from fastroof.sweep.kind import GpuTables, SweepKind, SweepTotals
from fastroof.sweep.result_rows import CandidateSummary
from fastroof.sweep.units import PlanKey, UnitResult, WorkUnit, numbered_units, plan_units, slices

if TYPE_CHECKING:
    import pyarrow as pa


CANDIDATES_A_UNIT: Final = 2**18
"""A fraction of a second of work, which is how long an interrupt may have to wait."""
KEPT_A_UNIT: Final = 2**14
"""Candidates per unit if all rows are kept: a row takes half a kB."""
CANDIDATES_A_BLOCK: Final = 2**20
"""Candidates of a block, whose rows are held until all of its plans are evaluated."""
CANDIDATES_A_PLAN: Final = 2**16
"""Candidates of a plan in a block of many plans: to compile a plan costs as much as 10,000 candidates."""

_BLOCK_KEYS: Final = {
    "model": "models", "gpu": "gpus", "mode": "mode", "isl": "isl", "osl": "osl",
    "clients": "clients", "request_rate_per_s": "rate", "prefix_hit": "prefix_hit",
}  # fmt: skip
"""Keys of a spec that list a column's values in the order of groups."""


def deployment_blocks(spec: DeploymentSpec) -> Iterator[DeploymentSpec]:
    """Cut a sweep into smaller ones, whose results one after another are those of the whole."""
    is_cut = spec.keep != "all"
    return _blocks(spec, list(itertools.takewhile(_BLOCK_KEYS.__contains__, spec.per)) if is_cut else [])


def _blocks(spec: DeploymentSpec, columns: list[str]) -> Iterator[DeploymentSpec]:
    """Cut the first of some columns into values, or slices of values, until blocks are small enough."""
    candidates, plans = spec.num_candidates, spec.num_plans * len(spec.layouts_by_split)
    most = max(CANDIDATES_A_BLOCK, CANDIDATES_A_PLAN * plans)
    if candidates <= most or not columns:
        yield spec
        return
    key = _BLOCK_KEYS[columns[0]]
    values = getattr(spec, key)
    together = len(values) * most // candidates if columns[0] in spec.load_axes else 1
    for start, stop in slices(len(values), together):
        yield from _blocks(spec.model_copy(update={key: values[start:stop]}), columns[1:])


def deployment_units(spec: DeploymentSpec) -> Iterator[WorkUnit]:
    """Yield a block's units in order: models, GPUs, modes, splits, formats, engines, candidates."""
    loads = math.prod(map(len, spec.load_axes.values()))
    is_each_kept = spec.keep == "all" or spec.objective == "energy"
    most = KEPT_A_UNIT if is_each_kept else CANDIDATES_A_UNIT
    formats = {one: spec.formats(*one) for one in itertools.product(spec.models, spec.gpus)}
    for model, gpu, mode, (tp, split) in itertools.product(spec.models, spec.gpus, spec.mode, spec.splits):
        gpus = tp * split.pp * split.dp
        possible = len(spec.layouts(mode, gpus))
        impossible = (spec.num_layouts(mode, gpus) - possible) * loads
        for dtype, kv_dtype, engine in formats[model, gpu]:
            key = PlanKey(model, gpu, tp, dtype, kv_dtype, engine, *split)
            yield from plan_units(key, mode, possible * loads, most, lost=impossible)


INFEASIBLE: Final = {
    "memory": "a request does not fit in memory",
    "tp": "the model does not divide by tp",
    "layout": "the GPUs do not divide by tp, or are too few for prefill and decode workers",
    "context": "beyond the model's context",
    "rate": "the request rate cannot be reached",
    "tables": "no measured table",
    "plan": "the model cannot be compiled into a plan",
    "plan size": "a step is larger than any plan",
    "whole_prompt": "a prompt is larger than a step, and the engine does not chunk prompts",
    "ttft": "beyond the TTFT limit",
    "tpot": "beyond the TPOT limit",
    "request_latency": "beyond the request latency limit",
    "kv_share": "beyond the limit on KV cache use",
    "total_gpus": "beyond the limit on GPUs",
}
"""Descriptions of the reasons why candidates are infeasible."""


@dataclass(frozen=True)
class DeploymentSummary(CandidateSummary):
    """Counts of a sweep over deployments, and the best deployment of each group.

    ``infeasible`` is by a key of :data:`INFEASIBLE`.

    Attributes
    ----------
    histograms : dict of tuple to list of int
        If the spec enables them: for each group's values of the spec's ``per``, the number of feasible
        candidates with an objective from 2**(-20 + i/4) up to 2**(-20 + (i + 1)/4), for i from 0 to 239.
    """

    kind: ClassVar[str] = "deployments"

    histograms: dict[tuple[Any, ...], list[int]]

    @property
    def candidates_per_s(self) -> float:
        """Return the candidates evaluated per second and thread."""
        return self.candidates / self.evaluate_s if self.evaluate_s else 0.0

    def best_columns(self) -> tuple[Column, ...]:
        """Return :data:`fastroof.sweep.deployments.COLUMNS`."""
        has_joules = any("joules_per_token" in row for row in self.best)
        return columns_of("energy" if has_joules else "")

    def document(self) -> dict[str, Any]:
        """Return all fields as JSON values, except the path; histogram groups become text keys."""
        histograms = {", ".join(map(str, group)): counts for group, counts in self.histograms.items()}
        return {**asdict(self), "histograms": histograms, "candidates_per_s": self.candidates_per_s}


_NO_LAYOUT: Final = "no number of total_gpus divides by tp into the workers that the mode needs"


@dataclass(frozen=True)
class DeploymentSweep(SweepKind):
    """A sweep over deployments.

    An evaluation is one candidate: a layout of a model on GPUs under one load. The best of a group may be in
    any unit, so rows are reduced across units.
    """

    spec: DeploymentSpec

    name: ClassVar[str] = "deployments"
    # a decode step, a mixed step, and the full and last chunks of a prompt
    steps_per_evaluation: ClassVar[int] = 4
    lost_whole: ClassVar[Mapping[str, str]] = {"tp": "", "layout": _NO_LAYOUT, "tables": "", "plan": ""}

    @property
    def columns(self) -> tuple[Column, ...]:
        """Return the columns of the results."""
        return columns_of(self.spec.objective)

    @property
    def has_final_rows(self) -> bool:
        """Return whether units' rows are final, which they are if all are kept."""
        return self.spec.keep == "all"

    @cached_property
    def blocks(self) -> tuple[DeploymentSpec, ...]:
        """Return the specs of the blocks."""
        return tuple(deployment_blocks(self.spec))

    def units(self) -> list[WorkUnit]:
        """Cut the sweep into blocks of groups, plans and modes, and long ones into slices of candidates."""
        return numbered_units(
            unit._replace(block=block)
            for block, spec in enumerate(self.blocks)
            for unit in deployment_units(spec)
        )

    def evaluate(self, unit: WorkUnit, tables_by_gpu: Mapping[str, GpuTables]) -> UnitResult:
        """Estimate a unit's candidates."""
        from fastroof.sweep.deployments.evaluate import evaluate_deployments

        return evaluate_deployments(self.blocks[unit.block], unit, tables_by_gpu[unit.plan.gpu])

    def reduced(self, rows: pa.Table) -> pa.Table:
        """Drop rows that others of their group beat; keep the order."""
        from fastroof.sweep.deployments.reductions import reduced_rows

        return reduced_rows(self.spec, rows)

    def ordered(self, rows: pa.Table) -> pa.Table:
        """Sort rows into the order of the results: by group, best first or along the front."""
        from fastroof.sweep.deployments.reductions import ordered_rows

        return ordered_rows(self.spec, rows)

    def best_rows(self, rows: pa.Table) -> pa.Table:
        """Return the best row of each group within the limits."""
        from fastroof.sweep.deployments.reductions import best_rows

        return best_rows(self.spec, rows)

    def summary(self, totals: SweepTotals) -> DeploymentSummary:
        """Return the best of each group, and the summed histograms."""
        return DeploymentSummary.of(totals, histograms=_histograms(totals.for_summary))


def _histograms(parts: list[dict[str, Any]]) -> dict[tuple[Any, ...], list[int]]:
    """Add up the histograms of units, by group."""
    total: dict[tuple[Any, ...], list[int]] = {}
    for part in parts:
        group, counts = tuple(part["group"]), part["counts"]
        before = total.get(group, [0] * len(counts))
        total[group] = [a + b for a, b in zip(before, counts, strict=True)]
    return total
