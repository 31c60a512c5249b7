"""Answers of the best of a sweep's deployments: ranked choices with reasons, as rows and as HTML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fastroof.arrow import pandas_frame, polars_frame
from fastroof.sweep.deployments import DeploymentSpec
from fastroof.sweep.deployments.columns import columns_of
from fastroof.sweep.percentile_capacity import PercentileCapacity
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
    """A deployment with the reasons for its rank."""

    row: dict[str, Any]
    objective: float
    relative_error: float | None
    behind: float
    is_tie: bool
    margins: tuple[Margin, ...]
    at_edge: bool
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
    ``families`` compares the ways to deploy that the spec has.
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


class Answers(NamedTuple):
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

    def to_pandas(self) -> Any:
        """Return the rows of :meth:`to_arrow` as a ``pandas.DataFrame``."""
        return pandas_frame(self.to_arrow())

    def to_polars(self) -> Any:
        """Return the rows of :meth:`to_arrow` as a ``polars.DataFrame``."""
        return polars_frame(self.to_arrow())

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
        if limit is not None and values[name] is not None
    ]
    return tuple(sorted(margins, key=lambda margin: margin.left))
