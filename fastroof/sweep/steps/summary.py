"""What a sweep over steps hands back: counts, times, what was left out, and the best step of each plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from fastroof.columns import Column
from fastroof.sweep.result_rows import SummaryRows
from fastroof.sweep.steps.columns import COLUMNS

__all__ = ["BestStep", "StepSummary", "with_standings"]


@dataclass(frozen=True)
class BestStep:
    """The step of one plan and kv_len that gives the most tokens a second within the limits.

    Attributes
    ----------
    model, dtype, kv_dtype : str
        What runs.
    tp, pp, dp, ep : int
        How the model is split.
    kv_len : int
        Tokens that each request attends to.
    batch_size : int
        Requests in the step; 0 where no batch is within the limits, and then the times are None.
    step_us : float or None
        Time of the step, us.
    tokens_per_s, tokens_per_s_per_gpu : float or None
        Output tokens, tokens/s.
    limited_by : str
        What stops the next larger batch: memory, tpot, throughput or batch grid.
    origin : str or None
        How the step's latency was made: measured to modelled.
    relative_error : float or None
        Standard error of the step's time over it; None where the spec has no ``with_error``.
    standing : str or None
        ``best`` of its model in tokens/s a GPU, or ``tie`` where it falls short of that by less than the
        standard error of the difference; None for the others, and where errors are unknown.
    """

    model: str
    tp: int
    pp: int
    dp: int
    ep: int
    dtype: str
    kv_dtype: str
    kv_len: int
    batch_size: int
    step_us: float | None
    tokens_per_s: float | None
    tokens_per_s_per_gpu: float | None
    limited_by: str
    origin: str | None
    relative_error: float | None = None
    standing: str | None = None


@dataclass(frozen=True)
class StepSummary(SummaryRows):
    """What a sweep over steps did, and the best step of each plan.

    Attributes
    ----------
    best : tuple of BestStep
        One a plan, at the spec's report_kv_len or the evaluated length nearest to it.
    runtime : str
        The engine whose steps they are.
    plans : int
        Plans that were evaluated.
    evaluations : int
        Steps that were timed, or found to be beyond memory.
    rows : int
        Rows written.
    infeasible : dict of str to int
        Of the evaluations, those beyond ``memory``, and of the others those beyond the ``tpot`` limit.
    skipped : dict of str to tuple of str
        What was not evaluated: for each reason, the names of the plans or models.
    evaluate_s : float
        Seconds spent timing steps, without loading, compiling and writing; summed over threads.
    total_s : float
        Seconds of the whole call.
    output : Path
        The results.
    """

    kind: ClassVar[str] = "steps"

    best: tuple[BestStep, ...]
    runtime: str
    plans: int
    evaluations: int
    rows: int
    infeasible: dict[str, int]
    skipped: dict[str, tuple[str, ...]]
    evaluate_s: float
    total_s: float
    output: Path

    @property
    def evaluations_per_s(self) -> float:
        """Steps timed a second of evaluating, by one thread."""
        return self.evaluations / self.evaluate_s if self.evaluate_s else 0.0

    def best_columns(self) -> tuple[Column, ...]:
        """Columns of the fields of :class:`BestStep`, in their order."""
        known = {column.name: column for column in COLUMNS}
        standing = Column("standing", "text", "", "best of its model, or tie; empty for the others")
        return tuple(known.get(each.name, standing) for each in fields(BestStep))

    def best_rows(self) -> list[dict[str, Any]]:
        """Return the best steps, values by the columns' names."""
        return [asdict(step) for step in self.best]

    def document(self) -> dict[str, Any]:
        """Return all of it as values that JSON has, but for the path."""
        return {**asdict(self), "evaluations_per_s": self.evaluations_per_s}


def with_standings(steps: Sequence[BestStep]) -> tuple[BestStep, ...]:
    """Say which step is the best of its model, and which ones cannot be told from it."""
    best: dict[tuple[str, int], BestStep] = {}
    for step in steps:
        leader = best.get((step.model, step.kv_len))
        if step.relative_error is not None and (leader is None or _rate(step) > _rate(leader)):
            best[step.model, step.kv_len] = step
    return tuple(replace(s, standing=_standing(s, best.get((s.model, s.kv_len)))) for s in steps)


def _rate(step: BestStep) -> float:
    return step.tokens_per_s_per_gpu or 0.0


def _standing(step: BestStep, best: BestStep | None) -> str | None:
    if step is best:
        return "best"
    if best is None or step.relative_error is None or best.relative_error is None:
        return None
    short = math.log(_rate(best) / _rate(step))
    return "tie" if short < math.hypot(step.relative_error, best.relative_error) else None
