"""Runs that are faster than their own kernels: which, and what speculative decoding makes of them.

No column of a public sample says that a run drafted tokens. What tells is how it was launched (see
fastroof/engines/README.md), or that it took less time a token than the kernels of a plain step do: rules
that look at labels, measured times and kernels alone, never at an engine's fitted costs. Such runs are
judged apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from benchmarks.accuracy.sample_cleaning import INFERENCEMAX
from fastroof.acceptance import MTP
from fastroof.engines import Recipe, recipe_for
from fastroof.serving.evidence.rows import ServingRow
from fastroof.serving.evidence.validation import faster_than_kernels
from fastroof.serving.speculation import SpeculativeDecoding

BY_RECIPE: Final = "the public benchmark's recipe of it drafts by the model's own draft layer"
BY_LABEL: Final = (
    "the public benchmark launched this version with and without drafts, its database calls the runs without "
    "DeepSeek-V3, and this one has no such label"
)

_PLAIN: Final = "DeepSeek-V3"

DRAFTING: Final = ("deepseek-v3", "glm-5", "qwen3.5-397b-a17b")
"""Models of the sample whose checkpoints bring a draft layer."""

ACCEPTED: Final = tuple(round(1.2 + 0.1 * i, 1) for i in range(20))
"""Tokens a step that are tried, of 1 and the drafts."""


def speculative_runs(rows: Sequence[ServingRow], kernels_ms: Sequence[float]) -> list[str]:
    """Say which runs are faster than plain steps of their kernels can be.

    Parameters
    ----------
    rows : sequence of ServingRow
        Measured runs.
    kernels_ms : sequence of float
        TPOT of each by its kernels alone, ms; nan where there is none.

    Returns
    -------
    list of str
        Why a run is taken to speculate; empty for one that is not.

    Examples
    --------
    >>> speculative_runs([], [])
    []
    """
    timed = faster_than_kernels(rows, kernels_ms)
    return [told or by_time for told, by_time in zip(_by_recipe(rows), timed, strict=True)]


def _recipe(row: ServingRow, speculative: bool | None = None) -> Recipe | None:
    """How the public benchmark launched a run."""
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
    """Why runs speculate by how they were launched, whatever they took; empty where that is not known."""

    def launched(row: ServingRow) -> tuple[str, ...]:
        return row.engine, row.engine_version, row.gpu, row.dtype, row.whole_model

    def is_plain(row: ServingRow) -> bool:
        return any(_PLAIN in label for label in (row.checkpoint, row.also_as))

    told = {launched(row) for row in rows if is_plain(row)}
    reasons = []
    for row in rows:
        recipe = _recipe(row)
        if recipe is not None and recipe.speculative:
            reasons.append(BY_RECIPE)
        elif launched(row) in told and not is_plain(row) and _recipe(row, speculative=True) is not None:
            reasons.append(BY_LABEL)
        else:
            reasons.append("")
    return reasons


def drafts_of(row: ServingRow, accepted: float) -> SpeculativeDecoding | None:
    """Return what such a run drafts: as its recipe says, else three tokens, or one a rank of attention.

    None for models whose checkpoints have no draft layer.
    """
    if row.whole_model not in DRAFTING:
        return None
    recipe = _recipe(row, speculative=True)
    drafts = recipe.drafts(row.dp)[0] if recipe is not None else 1 if row.dp > 1 else 3
    return SpeculativeDecoding(drafts, accepted=min(accepted, drafts + 1.0), draft=MTP)


def accepted_without(
    rows: Sequence[ServingRow], predict: Callable[[ServingRow, float], float]
) -> list[float]:
    """Find the tokens accepted in a step, for each run from the runs of other GPUs, formats and versions.

    Parameters
    ----------
    rows : sequence of ServingRow
        Runs that speculate.
    predict : callable
        TPOT of a run, ms, at so many accepted tokens a step; nan where it cannot be timed.

    Returns
    -------
    list of float
        One of :data:`ACCEPTED` for each run, with the smallest mean absolute relative error on the runs of
        all other groups with as many drafts; nan where there is no other group.
    """
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
