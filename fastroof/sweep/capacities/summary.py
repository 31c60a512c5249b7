"""What a sweep over capacities hands back: counts, times, what was left out, and the best of each group."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from fastroof.columns import Column
from fastroof.sweep.capacities.columns import COLUMNS
from fastroof.sweep.result_rows import SummaryRows

__all__ = ["LOST", "CapacitySummary"]

LOST: Final = {
    "tp": "the model does not divide by tp",
    "layout": "the GPUs do not divide into replicas",
    "tables": "no measured table",
    "plan": "no plan of the model",
    "engine": "the engine has no room for a request, or its settings contradict each other",
    "limits": "no rate keeps the limits",
}
"""What a deployment is counted as infeasible for, in words."""


@dataclass(frozen=True)
class CapacitySummary(SummaryRows):
    """What a sweep over capacities did, and the best deployment of each group.

    Attributes
    ----------
    best : tuple of dict
        For each group of the spec's ``per`` the row with the most requests a second of a GPU: values by the
        names of the columns.
    candidates : int
        All deployments, the infeasible ones included.
    feasible : int
        Those that keep the limits at some rate.
    rows : int
        Rows written.
    infeasible : dict of str to int
        The others, by a key of :data:`LOST`.
    skipped : dict of str to tuple of str
        What was left out, and what was wrong with it, by such a key.
    evaluate_s : float
        Seconds spent simulating, without loading, compiling plans and writing; summed over threads.
    total_s : float
        Seconds of the whole call.
    output : Path
        The results.
    """

    kind: ClassVar[str] = "capacities"

    best: tuple[dict[str, Any], ...]
    candidates: int
    feasible: int
    rows: int
    infeasible: dict[str, int]
    skipped: dict[str, tuple[str, ...]]
    evaluate_s: float
    total_s: float
    output: Path

    def best_columns(self) -> tuple[Column, ...]:
        """Columns of every sweep over capacities, then the percentiles that have a limit, ms."""
        limited = dict.fromkeys(name for row in self.best for name in row)
        for column in COLUMNS:
            limited.pop(column.name, None)
        return (*COLUMNS, *(Column(name, "float", "ms", "at requests_per_s", 0) for name in limited))

    def best_rows(self) -> list[dict[str, Any]]:
        """Return the best deployments, values by the columns' names."""
        return list(self.best)

    def document(self) -> dict[str, Any]:
        """Return all of it as values that JSON has, but for the path."""
        return asdict(self)
