"""TTFT that a test bench adds to the engine's steps, learned from runs of other models.

HTTP, tokenizers and routers take time per request, per token and per client; asynchronous scheduling makes a
prompt wait for steps. The terms and their constants are chosen without the predicted model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.serving.evidence.rows import ServingRow
from fastroof.units import US_PER_MS


class FrontEnd(NamedTuple):
    """Terms that are added to TTFT."""

    request_ms: float = 0.0
    client_ms: float = 0.0
    token_us: float = 0.0
    steps: float = 0.0

    def added_ms(self, row: ServingRow, tpot_ms: float) -> float:
        """Return the time added to a run's TTFT, ms."""
        return float(sum(one * of for one, of in zip(self, _sizes(row, tpot_ms), strict=True)))

    def __str__(self) -> str:
        """Return the non-zero terms in words."""
        units = ("ms a request", "ms a client", "us a prompt token", "steps")
        words = [f"{value:.3g} {unit}" for value, unit in zip(self, units, strict=True) if value]
        return ", ".join(words) or "nothing"


class PromptTime(NamedTuple):
    """A run without queueing, and its predicted TTFT and TPOT, ms, without a front end."""

    row: ServingRow
    ttft_ms: float
    tpot_ms: float


FORMS: Final[tuple[tuple[str, ...], ...]] = (
    (),
    ("request_ms",),
    ("token_us",),
    ("request_ms", "client_ms"),
    ("request_ms", "token_us"),
    ("request_ms", "steps"),
    ("request_ms", "client_ms", "token_us"),
    ("request_ms", "client_ms", "token_us", "steps"),
)
"""Forms of terms, the simplest first."""

BETTER: Final = 0.002
"""Improvement of the mean relative error that a more complex form needs."""
ROUNDS: Final = 8
"""Iterations of reweighted least squares."""
NEAR: Final = 0.05
"""Relative error above which absolute errors are minimised, squares below."""


class _Fit(NamedTuple):
    """Runs as arrays; slopes have one column per term."""

    missing: Floats
    slopes: Floats
    weights: Floats


def front_ends(
    runs: Sequence[PromptTime], split: Callable[[ServingRow], Hashable] = lambda row: row.whole_model
) -> list[FrontEnd]:
    """Return the front end of each run, from runs of its bench in other splits."""
    benches = [(run.row.bench or run.row.frontend, run.row.engine) for run in runs]
    splits = [split(run.row) for run in runs]
    known: dict[Hashable, FrontEnd] = {}
    for bench, left_out in dict.fromkeys(zip(benches, splits, strict=True)):
        if not bench[0]:
            continue
        others = [i for i, of in enumerate(benches) if of[0] == bench[0] and splits[i] != left_out]
        own = [i for i in others if benches[i] == bench]
        scopes = [scope for scope in (own, others) if scope]
        known[bench, left_out] = _chosen(runs, splits, scopes) if scopes else FrontEnd()
    return [known.get(key, FrontEnd()) for key in zip(benches, splits, strict=True)]


def _chosen(
    runs: Sequence[PromptTime], splits: Sequence[Hashable], scopes: Sequence[Sequence[int]]
) -> FrontEnd:
    """Fit the form with the least leave-one-split-out error in the first scope."""
    judged = _by_split(scopes[0], splits)
    best: tuple[float, Sequence[int], tuple[str, ...]] | None = None
    for scope in scopes:
        if len(_by_split(scope, splits)) < 2:
            continue
        for form in FORMS:
            errors = []
            for left_out, places in judged.items():
                rest = [i for i in scope if splits[i] != left_out]
                if rest:
                    errors.append(_error(runs, places, _fitted(runs, rest, splits, form)))
            error = float(np.mean(errors)) if errors else np.inf
            if best is None or error < best[0] - BETTER:
                best = (error, scope, form)
    if best is None:
        # one split cannot choose a form: use its constant
        return _fitted(runs, scopes[-1], splits, ("request_ms",))
    return _fitted(runs, best[1], splits, best[2])


def _by_split(places: Sequence[int], splits: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = {}
    for i in places:
        found.setdefault(splits[i], []).append(i)
    return found


def _sizes(row: ServingRow, tpot_ms: float) -> tuple[float, ...]:
    """Return the number of units of each term, in ms per unit."""
    return 1.0, row.concurrency, row.mean_isl / US_PER_MS, tpot_ms


def _error(runs: Sequence[PromptTime], places: Sequence[int], front_end: FrontEnd) -> float:
    """Return the mean relative error of runs."""
    errors = [
        abs((run.ttft_ms + front_end.added_ms(run.row, run.tpot_ms)) / run.row.ttft_ms - 1.0)
        for run in (runs[i] for i in places)
    ]
    return float(np.mean(errors))


def _fitted(
    runs: Sequence[PromptTime], places: Sequence[int], splits: Sequence[Hashable], form: tuple[str, ...]
) -> FrontEnd:
    """Fit the terms of a form to relative errors; each split has the same weight."""
    if not form:
        return FrontEnd()
    columns = [FrontEnd._fields.index(name) for name in form]
    counts = {name: len(of) for name, of in _by_split(places, splits).items()}
    chosen = [runs[i] for i in places]
    measured = np.array([run.row.ttft_ms for run in chosen])
    slopes = np.array([_sizes(run.row, run.tpot_ms) for run in chosen])[:, columns] / measured[:, None]
    missing = 1.0 - np.array([run.ttft_ms for run in chosen]) / measured
    weights = np.array([1.0 / counts[splits[i]] for i in places])
    constants = _non_negative(_Fit(missing, slopes, weights))
    return FrontEnd(**dict(zip(form, constants.tolist(), strict=True)))


def _non_negative(fit: _Fit) -> Floats:
    """Return non-negative constants with the least absolute errors, by reweighted least squares."""
    weights = fit.weights
    constants = np.zeros(fit.slopes.shape[1])
    for _ in range(ROUNDS):
        constants = _least_squares(fit._replace(weights=weights))
        off = np.abs(fit.missing - fit.slopes @ constants)
        weights = fit.weights / np.maximum(off, NEAR)
    return constants


def _least_squares(fit: _Fit) -> Floats:
    """Return non-negative least squares by trying every set of positive constants."""
    weighted = fit.slopes * fit.weights[:, None]
    gram, target = weighted.T @ fit.slopes, weighted.T @ fit.missing
    count = len(target)
    best, least = np.zeros(count), 0.0
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            part = list(chosen)
            solution = np.linalg.lstsq(gram[np.ix_(part, part)], target[part], rcond=None)[0]
            if (solution < 0.0).any():
                continue
            loss = float(solution @ gram[np.ix_(part, part)] @ solution - 2.0 * solution @ target[part])
            if loss < least:
                best, least = np.zeros(count), loss
                best[part] = solution
    return best
