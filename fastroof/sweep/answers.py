"""Answers of the best of a sweep's deployments: ranked choices with reasons, as rows and as HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastroof.arrow import ArrowRows
from fastroof.sweep.deployments import DeploymentSpec
from fastroof.sweep.deployments.columns import MINIMIZED, columns_of
from fastroof.sweep.percentile_capacity import TOLERANCE, PercentileCapacity
from fastroof.sweep.result_rows import CHOICE_PLACE, rows_as_html, rows_as_table

if TYPE_CHECKING:
    import pyarrow as pa


class Nearest(NamedTuple):
    """Deployment that comes nearest to limits that no deployment keeps, by its means or with hardly any load.

    ``values`` are what the limits are on, ``exceeds`` these over the limits, the worst first.
    """

    row: dict[str, Any]
    exceeds: dict[str, float]
    values: dict[str, float]
    limits_on: str = "mean"


class Margin(NamedTuple):
    """How far a deployment is from one limit."""

    name: str
    value: float
    limit: float
    left: float


class Choice(NamedTuple):
    """A deployment with the reasons for its rank.

    ``behind`` is the share of the best that it lacks: below 0 if a simpler deployment is recommended instead.
    It is a tie up to ``tie_within``, the error of such a comparison.
    """

    row: dict[str, Any]
    objective: float
    relative_error: float | None
    behind: float
    is_tie: bool
    tie_within: float
    margins: tuple[Margin, ...] = ()
    at_edge: bool = False
    percentile: PercentileCapacity | None = None


class Comparison(NamedTuple):
    """The best deployment of a family, ``gain`` (a share) above the best that stays within nodes.

    ``choice`` is None if none of the family is within the limits, ``gain`` if one of the two is missing.
    Lower costs are gains.
    """

    family: str
    choice: Choice | None
    gain: float | None


class Answer(NamedTuple):
    """Ranked deployments for one model and load.

    ``limits_on`` is what the limits apply to, ``p99`` or ``mean``; ``why_mean`` says why not to a requested
    percentile. ``simulated`` counts the deployments that were simulated. ``infeasible`` are by the means.
    ``families`` compares the ways to deploy that the spec has. ``default_limits`` are those, in ms, that the
    question did not give.
    """

    group: dict[str, Any]
    choices: tuple[Choice, ...]
    candidates: int
    feasible: int
    infeasible: dict[str, int]
    nearest: Nearest | None = None
    limits_on: str = "mean"
    why_mean: str = ""
    simulated: int = 0
    families: tuple[Comparison, ...] = ()
    default_limits: Mapping[str, float] = {}


@dataclass(frozen=True)
class Answers(ArrowRows):
    """Ranked deployments for each model and load, in the order of the spec.

    ``configurations`` counts the deployments that were compared, ``candidates`` these under each load.
    """

    answers: tuple[Answer, ...]
    objective: str
    candidates: int
    configurations: int
    skipped: tuple[str, ...]
    total_s: float

    def to_arrow(self) -> pa.Table:
        """Return the choices of all answers as an Arrow table: rank first, then the rows' columns."""
        return rows_as_table(
            (*CHOICE_PLACE, *columns_of(self.objective)), self._rows(), objective=self.objective
        )

    def _repr_html_(self) -> str:
        """Return the choices of all answers as HTML for notebooks."""
        caption = f"best of {self.configurations:,} deployments by {self.objective}"
        return rows_as_html((*CHOICE_PLACE, *columns_of(self.objective)), self._rows(), caption)

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "place": place,
                "standing": "best" if place == 1 else "tie" if choice.is_tie else "behind",
                "behind": choice.behind,
                **choice.row,
            }
            for answer in self.answers
            for place, choice in enumerate(answer.choices, 1)
        ]


def margins_of(spec: DeploymentSpec, values: Mapping[str, Any]) -> tuple[Margin, ...]:
    """Return how far values, as those of a row, are from each limit, the nearest first."""
    margins = [
        Margin(name, values[name], limit, 1.0 - values[name] / limit)
        for name, limit in spec.constraints.model_dump().items()
        # an output of one token has no time per token
        if limit is not None and values.get(name) is not None
    ]
    return tuple(sorted(margins, key=lambda margin: margin.left))


def nearest_of(
    spec: DeploymentSpec, row: dict[str, Any], values: Mapping[str, Any], limits_on: str = "mean"
) -> Nearest:
    """Return by how much values of a row exceed each limit, the worst first."""
    margins = margins_of(spec, values)
    exceeds = {margin.name: margin.value / margin.limit for margin in margins}
    return Nearest(row, exceeds, {margin.name: margin.value for margin in margins}, limits_on)


LAYOUT_ERROR: Final = 0.055
"""Median error of the ratio of two layouts' TPOT, of one model, GPU, engine and load in public benchmarks."""

EQUAL: Final = 1e-8
"""Values that differ by less, by rounding, are equal."""


def _are_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two deployments run the same kernels, whose errors then cancel."""
    return all(one[name] == other[name] for name in ("gpu", "dtype", "kv_dtype", "engine"))


Ranked = tuple[dict[str, Any], PercentileCapacity | None]


def tie_within(spec: DeploymentSpec, pair: Sequence[Ranked]) -> float:
    """Return the error of a comparison of two deployments; 0 at a given rate, at which only GPUs count."""
    if spec.rate is not None:
        return 0.0
    if not _are_alike(pair[0][0], pair[1][0]):
        stated = [row["relative_error"] if most is None else most.relative_error for row, most in pair]
        errors = [error for error in stated if error is not None]
        return math.hypot(*errors) if len(errors) == 2 else 0.0
    # kernels and engine err alike; each load is within a tolerance, and simulated rates vary by chance
    chances = [most.sampling_error or 0.0 for _, most in pair if most is not None]
    return math.hypot(LAYOUT_ERROR, TOLERANCE, TOLERANCE, *chances)


def complexity(row: Mapping[str, Any]) -> tuple[bool, int]:
    """Return how complex a deployment is: separate workers, and then the ways in which a copy is split."""
    return row["mode"] != "aggregated", sum(row[size] > 1 for size in ("tp", "pp", "dp", "ep"))


def ranked_choices(spec: DeploymentSpec, objective: str, found: Sequence[Ranked]) -> list[Choice]:
    """Return deployments, the best first, with the reasons for their rank; of ties, the simplest is first."""
    sign = -1.0 if spec.objective in MINIMIZED else 1.0

    def order(one: Ranked) -> tuple[bool, float, int, float]:
        row, most = one
        # values that differ only by rounding are equal: at a given rate, equal GPU counts tie
        value = float(f"{-sign * row[objective]:.8e}")
        more = row["request_latency_ms"] if most is None else -most.requests_per_s
        return most is not None and bool(most.why_not), value, row["total_gpus"], more

    ordered = sorted(found, key=order)

    def judged(place: int, best: int) -> Choice:
        pair = ordered[place], ordered[best]
        is_simulated = not any(most is not None and most.why_not for _, most in pair)
        ratio = (pair[0][0][objective] / pair[1][0][objective]) ** sign if is_simulated else math.nan
        within = tie_within(spec, pair)
        is_tie = place != best and abs(math.log(ratio)) < max(within, EQUAL)
        row, most = pair[0]
        error = row["relative_error"]
        return Choice(row, row[objective], error, 1.0 - ratio, is_tie, within, percentile=most)

    # at a given rate, which has no error, equals are in order already
    equals = [
        place
        for place, (row, _) in enumerate(ordered)
        if place == 0 or (spec.rate is None and judged(place, 0).is_tie and _are_alike(row, ordered[0][0]))
    ]
    best = min(equals, key=lambda place: complexity(ordered[place][0]), default=0)
    return [judged(place, best) for place in sorted(range(len(ordered)), key=lambda place: place != best)]
