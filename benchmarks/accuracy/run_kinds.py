"""The kind of a measured run: defective, speculative, admission-limited, host-bound, judged and others.

Kinds come from measured times, lists of known runs and kernel times, never from the validated prediction.
No column marks draft tokens: a run is speculative by the public benchmark's recipes, or if it takes less time
per token than the kernels of a plain step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from benchmarks.accuracy.published_rows import BURST, BenchRun
from benchmarks.accuracy.sample_cleaning import INFERENCEMAX
from fastroof.acceptance import MTP
from fastroof.documents import parse_table
from fastroof.engines import Recipe, recipe_for
from fastroof.errors import TableError
from fastroof.evidence.rows import ServedModel, ServingRow
from fastroof.evidence.validation import INDEPENDENT, SPECULATIVE, WAITING, faster_than_kernels, is_waiting
from fastroof.plan.speculation import SpeculativeDecoding

BY_RECIPE: Final = "the public benchmark's recipe of it drafts by the model's own draft layer"
BY_LABEL: Final = (
    "the public benchmark launched this version with and without drafts, its database calls the runs without "
    "DeepSeek-V3, and this one has no such label"
)

_PLAIN: Final = "DeepSeek-V3"

DRAFTING: Final = ("deepseek-v3", "glm-5", "qwen3.5-397b-a17b")
"""Models of the sample whose checkpoints contain a draft layer."""

ACCEPTED: Final = tuple(round(1.2 + 0.1 * i, 1) for i in range(20))
"""Accepted tokens per step to try, as shares between 1 and all drafts."""


def speculative_runs(rows: Sequence[ServingRow], kernels_ms: Sequence[float]) -> list[str]:
    """Return which runs are faster than plain steps of their kernels."""
    timed = faster_than_kernels(rows, kernels_ms)
    return [by_recipe or by_time for by_recipe, by_time in zip(_by_recipe(rows), timed, strict=True)]


def _recipe(row: ServingRow, speculative: bool | None = None) -> Recipe | None:
    """Return the public benchmark's recipe of a run."""
    if row.bench != INFERENCEMAX or row.is_disaggregated:
        return None
    return recipe_for(
        row.engine,
        row.engine_version,
        row.gpu,
        row.whole_model,
        row.dtype,
        layout=(row.tp, row.dp, row.ep),
        measured_on=row.measured_on,
        speculative=speculative,
    )


def _by_recipe(rows: Sequence[ServingRow]) -> list[str]:
    """Return why runs speculate by their recipes; empty if unknown."""

    def launched(row: ServingRow) -> tuple[str, ...]:
        return row.engine, row.engine_version, row.gpu, row.dtype, row.whole_model

    def is_plain(row: ServingRow) -> bool:
        return any(_PLAIN in label for label in (row.checkpoint, row.also_as))

    plain = {launched(row) for row in rows if is_plain(row)}
    reasons = []
    for row in rows:
        recipe = _recipe(row)
        if recipe is not None and recipe.speculative:
            reasons.append(BY_RECIPE)
        elif launched(row) in plain and not is_plain(row) and _recipe(row, speculative=True) is not None:
            reasons.append(BY_LABEL)
        else:
            reasons.append("")
    return reasons


def drafts_of(row: ServingRow, accepted: float) -> SpeculativeDecoding | None:
    """Return a run's draft tokens: its recipe's, else three, or one with attention data parallelism."""
    if row.whole_model not in DRAFTING:
        return None
    recipe = _recipe(row, speculative=True)
    drafts = recipe.drafts(row.dp)[0] if recipe is not None else 1 if row.dp > 1 else 3
    return SpeculativeDecoding(drafts, accepted=min(accepted, drafts + 1.0), draft=MTP)


def accepted_without(
    rows: Sequence[ServingRow], predict: Callable[[ServingRow, float], float]
) -> list[float]:
    """Return the accepted tokens per step of each run, from runs of other GPUs, formats and versions."""
    if not rows:
        return []
    errors = np.array([[predict(row, accepted) / row.tpot_ms - 1.0 for accepted in ACCEPTED] for row in rows])
    groups = [(row.gpu, row.dtype, row.engine, row.engine_version) for row in rows]
    ranks = np.array([row.dp > 1 for row in rows])
    found = []
    for i, group in enumerate(groups):
        others = np.array([other != group for other in groups]) & (ranks == ranks[i])
        others &= ~np.isnan(errors).any(axis=1)
        if not others.any():
            found.append(float("nan"))
            continue
        found.append(ACCEPTED[int(np.abs(errors[others]).mean(axis=0).argmin())])
    return found


_FILE: Final = "defects.toml"


class Defect(NamedTuple):
    """A known defect of some runs."""

    model: str
    gpu: str
    engine: str
    versions: tuple[str, ...]
    reason: str
    source: str
    concurrency: float | None = None

    def holds_for(self, row: ServingRow) -> bool:
        """Return whether a run has the defect."""
        return (
            (self.model, self.gpu, self.engine) == (row.whole_model, row.gpu, row.engine)
            and row.engine_version in self.versions
            and self.concurrency in (None, row.concurrency)
        )


@cache
def known_defects() -> tuple[Defect, ...]:
    """Read defects.toml."""
    text = Path(__file__).with_name(_FILE).read_text("utf-8")
    tables = parse_table(text, _FILE, TableError).tables("defects")
    return tuple(table.build(Defect, versions=tuple(table.value("versions"))) for table in tables)


def defect_of(row: ServingRow) -> str:
    """Return the known defect of a run, or an empty text."""
    return next((defect.reason for defect in known_defects() if defect.holds_for(row)), "")


JUDGED, DISAGGREGATED = "judged", "disaggregated"
ADMISSION_LIMITED, HOST_BOUND, DEFECTIVE = "admission-limited", "host-bound", "defective"
KINDS: Final = (JUDGED, INDEPENDENT, DISAGGREGATED, SPECULATIVE, ADMISSION_LIMITED, HOST_BOUND, DEFECTIVE)
"""Kinds in the order of tables."""


def kind_of(row: ServingRow, speculates: str) -> tuple[str, str]:
    """Return the kind of a run, and the reason."""
    defect = defect_of(row)
    if defect:
        return DEFECTIVE, defect
    if speculates:
        return SPECULATIVE, speculates
    if row.is_disaggregated:
        return DISAGGREGATED, "some workers prefill, others decode"
    if not row.architecture:
        return INDEPENDENT, "its source is no sample that constants are fitted to"
    is_in_order = row.schedule.get("order") != "prefill_first"
    if is_in_order and is_waiting(row):
        return ADMISSION_LIMITED, f"its requests wait for more than {WAITING:.0%} of their time"
    return JUDGED, ""


def kind_of_independent(row: ServedModel) -> str:
    """Return the kind of a run that nothing is fitted to."""
    if not isinstance(row, BenchRun):
        return INDEPENDENT
    if row.is_host_bound:
        return HOST_BOUND
    # all requests of a burst wait by its protocol
    return ADMISSION_LIMITED if row.protocol != BURST and is_waiting(row) else INDEPENDENT
