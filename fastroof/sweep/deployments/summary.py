"""What a sweep over deployments hands back: counts, times, what was left out, and the best of each group."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from fastroof.columns import Column
from fastroof.sweep.deployments.columns import COLUMNS
from fastroof.sweep.result_rows import SummaryRows

__all__ = ["INFEASIBLE", "DeploymentSummary"]

INFEASIBLE: Final = {
    "memory": "a request does not fit the memory",
    "tp": "the model does not divide by tp",
    "layout": "the GPUs do not divide by tp, or are too few for workers of both kinds",
    "context": "beyond the model's context",
    "rate": "the request rate is out of reach",
    "tables": "no measured table",
    "plan": "no plan of the model",
    "plan size": "a step larger than any plan",
    "whole_prompt": "a prompt is larger than a step, and the engine does not cut it",
    "ttft": "beyond the TTFT limit",
    "tpot": "beyond the TPOT limit",
    "request_latency": "beyond the request latency limit",
    "kv_share": "beyond the limit on the KV cache",
    "total_gpus": "beyond the limit on GPUs",
}
"""What a candidate is counted as infeasible for, in words."""


@dataclass(frozen=True)
class DeploymentSummary(SummaryRows):
    """What a sweep over deployments did, and the best deployment of each group.

    Attributes
    ----------
    best : tuple of dict
        For each group of the spec's ``per`` the row with the best objective within the limits: values by
        the names of :data:`fastroof.sweep.deployments.COLUMNS`.
    candidates : int
        All that there are, the infeasible ones included.
    feasible : int
        Those that are possible and within all limits.
    rows : int
        Rows written.
    infeasible : dict of str to int
        The others, by the first reason met: a key of :data:`INFEASIBLE`.
    skipped : dict of str to tuple of str
        Plans that could not be compiled: for each reason, what was wrong.
    histograms : dict of tuple to list of int
        Where the spec asks for them: for each group's values of the spec's ``per``, how many feasible
        candidates have an objective from 2**(-20 + i/4) up to 2**(-20 + (i + 1)/4), for i from 0 to 239.
    evaluate_s : float
        Seconds spent estimating, without loading, compiling plans and writing; summed over threads.
    total_s : float
        Seconds of the whole call.
    output : Path
        The results.
    """

    kind: ClassVar[str] = "deployments"

    best: tuple[dict[str, Any], ...]
    candidates: int
    feasible: int
    rows: int
    infeasible: dict[str, int]
    skipped: dict[str, tuple[str, ...]]
    histograms: dict[tuple[Any, ...], list[int]]
    evaluate_s: float
    total_s: float
    output: Path

    @property
    def candidates_per_s(self) -> float:
        """Candidates a second of evaluating, by one thread."""
        return self.candidates / self.evaluate_s if self.evaluate_s else 0.0

    def best_columns(self) -> tuple[Column, ...]:
        """:data:`fastroof.sweep.deployments.COLUMNS`."""
        return COLUMNS

    def best_rows(self) -> list[dict[str, Any]]:
        """Return the best deployments, values by the columns' names."""
        return list(self.best)

    def document(self) -> dict[str, Any]:
        """Return all of it as values that JSON has, but for the path; groups of histograms in words."""
        histograms = {", ".join(map(str, group)): counts for group, counts in self.histograms.items()}
        return {**asdict(self), "histograms": histograms, "candidates_per_s": self.candidates_per_s}
