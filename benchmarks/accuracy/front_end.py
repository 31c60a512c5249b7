"""Front ends of engines from clients' TTFT: what measured runs lack, fitted without the runs that it judges.

The form is that of :class:`fastroof.engines.FrontEnd`, the same for all engines; only its three sizes are
fitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Final, NamedTuple

import numpy as np

from benchmarks.accuracy.fit import non_negative_least_squares
from benchmarks.accuracy.sample_cleaning import INFERENCEMAX
from fastroof.arrays import Floats
from fastroof.engines import FrontEnd
from fastroof.engines.front_end import NAMES
from fastroof.evidence.predictions import front_end_ms
from fastroof.evidence.rows import CLIENT, ServingRow

ROUNDS: Final = 30
"""Iterations of reweighted least squares."""
NEAR: Final = 0.03
"""Relative error above which absolute errors are minimised, squares below."""
NORMAL_68: Final = 0.6827
"""Share of a normal distribution within one standard deviation."""


class PromptTime(NamedTuple):
    """A run without queueing, its profile, and its predicted TTFT by the engine's own clock, ms."""

    row: ServingRow
    profile: str
    engine_ms: float

    @property
    def missing(self) -> float:
        """Share of the measured TTFT that is not the engine's."""
        return 1.0 - self.engine_ms / self.row.ttft_ms

    @property
    def slopes(self) -> tuple[float, float, float]:
        """Share of the measured TTFT that one unit of each size is."""
        row = self.row
        units = (FrontEnd(request_ms=1.0), FrontEnd(token_us=1.0), FrontEnd(server_ms=1.0))
        request, token, server = (front_end_ms(unit, row) / row.ttft_ms for unit in units)
        return request, token, server


def engine_of(run: PromptTime) -> str:
    """Return the engine of a run, whose profiles share a front end."""
    return run.row.engine


def is_named(row: ServingRow) -> bool:
    """Return whether a run's front end is a named one, which is not fitted with those of engines."""
    return row.frontend in NAMES


def fitted(runs: Sequence[PromptTime]) -> FrontEnd:
    """Fit the sizes to relative errors; each model has the same weight. Plain servers come before routers."""
    plain = [run for run in runs if run.row.bench == INFERENCEMAX] or list(runs)
    plain = [run for run in plain if run.row.clock == CLIENT and not is_named(run.row)]
    if not plain:
        return FrontEnd()
    counts = Counter(run.row.whole_model for run in plain)
    shares = np.array([1.0 / counts[run.row.whole_model] for run in plain])
    sizes = _non_negative(
        np.array([run.missing for run in plain]), np.array([run.slopes for run in plain]), shares
    )
    request_ms, token_us, server_ms = (float(f"{size:.3g}") for size in sizes)
    return FrontEnd(request_ms, token_us, server_ms)


def fitted_without(
    runs: Sequence[PromptTime], split: Callable[[ServingRow], Hashable]
) -> dict[tuple[Hashable, ...], FrontEnd]:
    """Return the front end of each engine without each part of a split, from all others."""
    parts = dict.fromkeys((engine_of(run), split(run.row)) for run in runs)
    found: dict[tuple[Hashable, ...], FrontEnd] = {}
    for engine, left_out in parts:
        others = [run for run in runs if split(run.row) != left_out]
        own = [run for run in others if engine_of(run) == engine]
        found[engine, left_out] = fitted(own)
    return found


def residual(runs: Sequence[PromptTime], split: Callable[[ServingRow], Hashable]) -> float:
    """Return the relative standard error of TTFT with front ends fitted without each part of a split."""
    runs = [run for run in runs if not is_named(run.row)]
    of_parts = fitted_without(runs, split)
    errors = [
        abs(front_end_ms(of_parts[engine_of(run), split(run.row)], run.row) / run.row.ttft_ms - run.missing)
        for run in runs
    ]
    return float(np.quantile(errors, NORMAL_68))


def _non_negative(missing: Floats, slopes: Floats, shares: Floats) -> Floats:
    """Return non-negative sizes with the least absolute errors, by reweighted least squares."""
    weights = shares
    sizes = np.zeros(slopes.shape[1])
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        sizes = non_negative_least_squares(slopes * root[:, None], missing * root)
        off = np.abs(missing - slopes @ sizes)
        weights = shares / np.maximum(off, NEAR)
    return sizes


class TtftErrors(NamedTuple):
    """Relative errors of TTFT: mean, median and bias."""

    runs: int
    mean: float
    median: float
    bias: float

    @classmethod
    def of(cls, runs: Sequence[PromptTime], front_end_of: Callable[[PromptTime], FrontEnd]) -> TtftErrors:
        """Return the errors of runs with the front end of each."""
        errors = np.array([front_end_ms(front_end_of(run), run.row) / run.row.ttft_ms for run in runs])
        errors -= np.array([run.missing for run in runs])
        size = np.abs(errors)
        return cls(len(runs), float(size.mean()), float(np.median(size)), float(errors.mean()))

    def __str__(self) -> str:
        """Return the errors in per cent."""
        return f"{self.mean:.1%}, {self.median:.1%}, {self.bias:+.1%}"
