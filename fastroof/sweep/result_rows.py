"""Result rows of sweeps as Arrow tables, frames and HTML for notebooks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from fastroof._version import __version__
from fastroof.arrow import ArrowRows, rows_html, rows_table
from fastroof.columns import Column

if TYPE_CHECKING:
    import pyarrow as pa

    from fastroof.sweep.kind import SweepTotals

CHOICE_PLACE: Final = (
    Column("place", "int", "", "1 for the recommended deployment of a model and load, then the runners-up"),
    Column("standing", "text", "", "best, tie (as good within the errors) or behind"),
    Column("behind", "float", "", "shortfall relative to the first; below 0: ahead of it, but less simple"),
)
"""Columns of an answer's choices that precede those of their rows."""

_SHOWN: Final = (
    "place", "standing", "model", "gpu", "mode", "tp", "pp", "dp", "ep", "replicas", "total_gpus", "dtype",
    "kv_dtype", "engine", "kv_len", "batch_size", "clients", "step_us", "ttft_ms", "tpot_ms",
    "tokens_per_s_per_gpu", "requests_per_s", "requests_per_s_per_gpu", "limit", "limited_by",
    "cost_per_million_tokens", "joules_per_token", "relative_error", "origin",
)  # fmt: skip


def rows_as_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], **metadata: str) -> pa.Table:
    """Return rows of a sweep as an Arrow table with fastroof's version in its metadata."""
    made_from = {"fastroof.version": __version__, **{f"fastroof.{k}": v for k, v in metadata.items()}}
    return rows_table(columns, rows, made_from)


def rows_as_html(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], caption: str) -> str:
    """Return rows of a sweep as HTML, with the main columns: layout, speed and origin."""
    return rows_html([column for column in columns if column.name in _SHOWN], rows, caption)


@dataclass(frozen=True)
class SweepSummary(ArrowRows):
    """The best results of a sweep, one row each, and counts.

    Attributes
    ----------
    rows : int
        Rows written.
    infeasible : dict of str to int
        Numbers of infeasible evaluations or candidates, by the first reason found.
    skipped : dict of str to tuple of str
        Names of skipped plans or models, or messages about them, by reason.
    evaluate_s : float
        Seconds spent evaluating, excluding loading, compiling plans and writing; summed over threads.
    total_s : float
        Seconds of the whole call.
    output : Path
        Path of the results.
    """

    kind: ClassVar[str]

    best: tuple[Any, ...]
    rows: int
    infeasible: dict[str, int]
    skipped: dict[str, tuple[str, ...]]
    evaluate_s: float
    total_s: float
    output: Path

    @abstractmethod
    def best_columns(self) -> tuple[Column, ...]:
        """Return the columns of the best rows."""

    @abstractmethod
    def best_rows(self) -> list[dict[str, Any]]:
        """Return the best rows as values by column name."""

    def document(self) -> dict[str, Any]:
        """Return all fields as JSON values, except the path."""
        return asdict(self)

    def to_arrow(self) -> pa.Table:
        """Return the best rows as an Arrow table; units and meanings are metadata of its fields."""
        return rows_as_table(self.best_columns(), self.best_rows(), kind=self.kind)

    def _repr_html_(self) -> str:
        """Return the best rows as HTML for notebooks."""
        rows = self.best_rows()
        caption = f"sweep over {self.kind}, {self.rows:,} rows written: best {len(rows):,}"
        return rows_as_html(self.best_columns(), rows, caption)


@dataclass(frozen=True)
class CandidateSummary(SweepSummary):
    """Counts of a sweep over candidates, and the best of each group.

    Attributes
    ----------
    best : tuple of dict
        The best row of each group of the spec's ``per``: values by column name.
    candidates : int
        Number of all candidates, including infeasible ones.
    feasible : int
        Number of candidates that are possible and within all limits.
    """

    best: tuple[dict[str, Any], ...]
    candidates: int
    feasible: int

    @classmethod
    def of(cls, totals: SweepTotals, **more: Any) -> Self:
        """Return the summary of a sweep's totals."""
        feasible = totals.evaluated - sum(totals.fields["infeasible"].values())
        best = tuple(totals.best_rows)
        return cls(best=best, candidates=totals.evaluated, feasible=feasible, **totals.fields, **more)

    def best_rows(self) -> list[dict[str, Any]]:
        """Return the best deployments as values by column name."""
        return list(self.best)
