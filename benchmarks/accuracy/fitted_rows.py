"""The measured rows to fit: which, their labels and kernel times, and fits of some of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.accuracy.fit import equal_weights, fit_costs
from benchmarks.accuracy.rows import dataset_names
from benchmarks.accuracy.run_kinds import defect_of
from fastroof.arrays import Bools, Floats, Longs
from fastroof.engines import EngineProfile, StepCosts, recipe_for
from fastroof.engines.values import holds_for, is_version
from fastroof.errors import FastroofError, TableError
from fastroof.evidence.kernel_times import NUM_COLUMNS, KernelTimes, alike_rows, predicted_us, times_of_plan
from fastroof.evidence.rows import ServingRow
from fastroof.evidence.validation import WAITING, is_waiting
from fastroof.tables import Tables


def is_of(row: ServingRow, versions: str) -> bool:
    """Return whether a run is in a range of versions; without a version only in the empty range."""
    if not is_version(row.engine_version):
        return versions == ""
    return holds_for(versions, row.engine_version)


def chosen_rows(
    rows: Iterable[ServingRow], gpus: Container[str], base: EngineProfile, datasets: Sequence[str] | None
) -> tuple[list[ServingRow], Counter[str]]:
    """Select the rows to fit by data set, and count the profile's other rows by reason."""
    of_engine = [
        row for row in rows if row.engine_profile.name == base.name and row.gpu in gpus and not row.left_out
    ]
    names = dataset_names(of_engine)
    on = ", ".join(sorted({row.gpu for row in of_engine}))
    if not of_engine:
        raise TableError(f"no serving rows of {base.name} to fit on {_listed(gpus)}")
    unknown = [name for name in datasets or () if name not in names]
    if unknown:
        raise TableError(f"{base.name} on {on} has no data set {unknown[0]!r}; it has {', '.join(names)}")
    short = [row.row for row in of_engine if row.mean_osl <= 1.0]
    if short:
        raise TableError(f"row {short[0]!r} has no output token after the first, so no time per token")
    reasons, kept = Counter[str](), list[ServingRow]()
    for name in names:
        if datasets and name not in datasets:
            continue
        for row in of_engine:
            if row.dataset != name:
                continue
            reason = _not_fitted(row, base)
            if reason:
                reasons[reason] += 1
            else:
                kept.append(row)
    if not kept:
        raise TableError(f"no row of {base.name} can be fitted: {', '.join(reasons)}")
    return kept, reasons


def _listed(gpus: Container[str]) -> str:
    return ", ".join(gpus) if isinstance(gpus, Iterable) else str(gpus)


def _not_fitted(row: ServingRow, base: EngineProfile) -> str:
    """Return why a row is not fitted; empty if it is."""
    if row.is_disaggregated:
        return "prompts run on other engines"
    if row.pp > 1:
        return "pipeline stages"
    if is_waiting(row):
        return f"TTFT above {WAITING:.0%} of a request's time: it waited to be admitted"
    recipe = recipe_for(
        row.engine, row.engine_version, row.gpu, row.model, row.dtype, measured_on=row.measured_on
    )
    if recipe is not None and recipe.speculative:
        return "its recipe drafts tokens"
    defect = defect_of(row)
    if defect:
        return defect
    for one in base.fit.left_out if base.fit is not None else ():
        if (
            one.model in ("", row.whole_model)
            and one.gpu in ("", row.gpu)
            and one.format in ("", row.dtype)
            and (not one.versions or is_of(row, one.versions))
        ):
            return one.reason
    return ""


class TimedRows(NamedTuple):
    """Rows with a plan, their times, and reasons of the others."""

    rows: tuple[ServingRow, ...]
    times: KernelTimes
    refused: Mapping[str, int]


def time_rows(
    rows: Sequence[ServingRow],
    tables: Mapping[str, Tables],
    profile: EngineProfile,
    costs: StepCosts | None = None,
) -> TimedRows:
    """Time the kernels of rows of several GPUs, except those without a plan."""
    columns = np.full((NUM_COLUMNS, len(rows)), np.nan)
    refused: dict[str, int] = {}
    for places in alike_rows(rows):
        try:
            columns[:, places] = times_of_plan(
                [rows[i] for i in places], tables[rows[places[0]].gpu], profile, costs
            )[:NUM_COLUMNS]
        except FastroofError as error:
            refused[str(error)] = refused.get(str(error), 0) + len(places)
    there = ~np.isnan(columns[0])
    kept = tuple(row for row, is_there in zip(rows, there, strict=True) if is_there)
    return TimedRows(kept, KernelTimes(*columns[:, there]), refused)


FEWEST_ROWS: Final = 10
"""Data sets with fewer rows count less in a fit and its error."""


@dataclass(frozen=True)
class RowLabels:
    """Labels of each row."""

    dataset: npt.NDArray[np.str_]
    model: npt.NDArray[np.str_]
    gpu: npt.NDArray[np.str_]
    version: npt.NDArray[np.str_]
    bench: npt.NDArray[np.str_]
    tp: Longs

    @classmethod
    def of(cls, rows: Sequence[ServingRow]) -> RowLabels:
        """Return the labels of rows."""
        return cls(
            np.array([row.dataset for row in rows]),
            np.array([row.whole_model for row in rows]),
            np.array([row.gpu for row in rows]),
            np.array([row.engine_version for row in rows]),
            np.array([row.bench_label for row in rows]),
            np.array([row.tp for row in rows], np.int64),
        )

    @property
    def cell(self) -> npt.NDArray[np.str_]:
        """Data set and GPU: each cell has the same weight."""
        return np.array([f"{d} {g}" for d, g in zip(self.dataset, self.gpu, strict=True)])

    @property
    def cluster(self) -> npt.NDArray[np.str_]:
        """Model, tp and GPU: rows with correlated errors."""
        return np.array([f"{m} {t} {g}" for m, t, g in zip(self.model, self.tp, self.gpu, strict=True)])


@dataclass(eq=False)
class FittedRows:
    """Rows to fit, and the costs that an engine has for physical reasons: only their sizes are fitted."""

    times: KernelTimes
    labels: RowLabels
    costs: tuple[str, ...]
    _cells: Longs = field(init=False)

    def __post_init__(self) -> None:
        """Number the cells once."""
        self._cells = np.unique(self.labels.cell, return_inverse=True)[1]

    @property
    def every(self) -> Bools:
        """A mask of all rows."""
        return np.ones(len(self._cells), bool)

    def weights(self, rows: Bools) -> Floats:
        """Return weights of the selected rows: every data set of a GPU has the same total."""
        return equal_weights(self._cells[rows], FEWEST_ROWS)

    def fit(self, rows: Bools) -> dict[str, float]:
        """Fit the costs to the selected rows."""
        return fit_costs(self.times.pick(rows), self.weights(rows), self.costs)

    def errors(self, costs: Mapping[str, float]) -> Floats:
        """Return the relative error of every row."""
        return np.asarray(predicted_us(self.times, costs) / self.times.measured_us - 1.0)
