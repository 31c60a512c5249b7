"""Errors of predictions: row by row, and summed up by data set, quantity and what else is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.errors import TableError
from fastroof.serving.evidence.rows import LeftOut

GROUPINGS: Final = (
    "model", "tp", "engine", "engine_version", "dtype", "isl", "osl", "concurrency", "runtime",
)  # fmt: skip
"""What errors can be grouped by, within a data set and quantity."""


class PredictedTime(NamedTuple):
    """One measured time beside its prediction.

    Attributes
    ----------
    dataset, row : str
        Where it is from.
    quantity : str
        ``tpot``, ``ttft``, ``e2e``, each a mean, or with a percentile behind it (``tpot p90``);
        ``throughput``; or a kind of step: ``decode`` (of one client too), ``prefill``, ``mixed``,
        ``unequal``.
    engine, engine_version, model, dtype, kv_dtype, runtime : str
        What was measured, and what it was predicted with.
    tp : int
        GPUs.
    isl, osl, concurrency : float
        Nominal lengths and clients; of a whole step its new tokens, 0 and its requests.
    fitted : bool
        Whether constants of the profile were fitted to this data set's TPOT.
    measured_ms, predicted_ms : float
        ms.
    aic_ms : float
        Prediction of aiconfigurator-core, ms; nan where there is none.
    gpu, architecture : str
        Where it ran, and what its model is left out with, whatever the format.
    kind : str
        What is judged apart: see benchmarks/accuracy/README.md.
    layout : str
        How its engine was split, in words.
    """

    dataset: str
    row: str
    quantity: str
    engine: str
    engine_version: str
    model: str
    dtype: str
    kv_dtype: str
    runtime: str
    tp: int
    isl: float
    osl: float
    concurrency: float
    fitted: bool
    measured_ms: float
    predicted_ms: float
    aic_ms: float
    gpu: str = ""
    architecture: str = ""
    kind: str = "judged"
    layout: str = ""

    @property
    def error(self) -> float:
        """Signed error, as a share of what was measured."""
        return self.predicted_ms / self.measured_ms - 1.0

    @property
    def aic_error(self) -> float:
        """The same of aiconfigurator-core."""
        return self.aic_ms / self.measured_ms - 1.0


class ErrorGroup(NamedTuple):
    """Errors of rows that belong together, as shares of what was measured.

    Attributes
    ----------
    dataset, quantity : str
        Which rows.
    values : dict
        What they have in common, as asked for.
    fitted : bool
        Whether constants were fitted to them.
    rows : int
        How many.
    mape, median, p90 : float
        Mean, median and 90th percentile of the absolute errors.
    bias : float
        Mean of the signed errors.
    aic_rows : int
        Rows that aiconfigurator-core has a prediction of.
    aic_mape, aic_bias : float
        Its errors on those; nan where there is none.
    kind : str
        Of its runs.
    """

    dataset: str
    quantity: str
    values: dict[str, Any]
    fitted: bool
    rows: int
    mape: float
    median: float
    p90: float
    bias: float
    aic_rows: int
    aic_mape: float
    aic_bias: float
    kind: str = "judged"


@dataclass(frozen=True)
class Validation:
    """Predictions beside what was measured.

    Attributes
    ----------
    gpu, tables_hash, version : str
        What predicted: the GPU and hash of the tables, and fastroof's version.
    runtime : str
        As asked for; ``auto`` is the profile of each row's engine.
    rows : tuple of PredictedTime
        Every time that was judged.
    left_out : tuple of LeftOut
        Rows that were not judged, by reason.
    """

    gpu: str
    tables_hash: str
    version: str
    runtime: str
    rows: tuple[PredictedTime, ...]
    left_out: tuple[LeftOut, ...]

    def errors(self, by: Sequence[str] = ()) -> tuple[ErrorGroup, ...]:
        """Sum errors up by data set, quantity and kind of run.

        Parameters
        ----------
        by : sequence of str
            What else to keep apart, of :data:`GROUPINGS`.

        Returns
        -------
        tuple of ErrorGroup
            In the order of the rows; numbers that they are kept apart by ascend.

        Raises
        ------
        TableError
            If there is no such grouping.
        """
        unknown = [name for name in by if name not in GROUPINGS]
        if unknown:
            raise TableError(f"errors can be grouped by {', '.join(GROUPINGS)}; got {', '.join(unknown)}")
        order = {name: i for i, name in enumerate(dict.fromkeys(row.dataset for row in self.rows))}
        groups: dict[tuple[Any, ...], list[PredictedTime]] = {}
        for row in self.rows:
            key = (order[row.dataset], row.quantity, row.kind, *(getattr(row, name) for name in by))
            groups.setdefault(key, []).append(row)
        quantities = {name: i for i, name in enumerate(dict.fromkeys(row.quantity for row in self.rows))}
        keys = sorted(groups, key=lambda key: (quantities[key[1]], key[0], *key[2:]))
        return tuple(_group(groups[key], dict(zip(by, key[3:], strict=True))) for key in keys)


def _group(rows: list[PredictedTime], values: dict[str, Any]) -> ErrorGroup:
    errors = np.array([row.error for row in rows])
    aic_errors = np.array([row.aic_error for row in rows if not math.isnan(row.aic_ms)])
    size = np.abs(errors)
    return ErrorGroup(
        rows[0].dataset,
        rows[0].quantity,
        values,
        any(row.fitted for row in rows),
        len(rows),
        float(size.mean()),
        float(np.median(size)),
        float(np.quantile(size, 0.9)),
        float(errors.mean()),
        len(aic_errors),
        float(np.abs(aic_errors).mean()) if len(aic_errors) else math.nan,
        float(aic_errors.mean()) if len(aic_errors) else math.nan,
        rows[0].kind,
    )
