"""Kernels of the two mean steps that a measured row is made of: timed once, whatever costs are fitted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Floats, Longs
from fastroof.engines import EngineProfile
from fastroof.errors import FastroofError
from fastroof.plan import StepPlan, compile_plan
from fastroof.plan.curves import num_allreduces
from fastroof.serving.estimate import estimate
from fastroof.serving.evidence.rows import ServingRow
from fastroof.tables import Tables
from fastroof.units import US_PER_MS

__all__ = ["KernelTimes", "TimedRows", "kernel_times", "plan_of_row", "time_rows"]


_COLUMNS: Final = 9
"""Of :class:`KernelTimes`, before what calibration adds."""


class KernelTimes(NamedTuple):
    """Measured rows beside the kernels of the steps that they are a mean of, one entry a row.

    Attributes
    ----------
    measured_us : ndarray of float64
        Time per output token, as measured.
    decode_us, mixed_us : ndarray of float64
        Kernels of a step of decodes alone, and of one that prefills too.
    decode_sequences, mixed_sequences : ndarray of float64
        Requests of such a step whose logits it needs.
    decode_steps, mixed_steps : ndarray of float64
        Such steps an output token: their sum is 1 where prompts share steps with decodes, and more where
        prompts run in steps of their own.
    num_layers : ndarray of float64
        Layers of the row's model, of an attention and an MLP each.
    num_allreduces : ndarray of float64
        All-reduces of a step.
    own_layers : ndarray of float64, shape (rows, costs), optional
        By each cost that an architecture has of its own: the row's layers where it is of it, else 0.
    """

    measured_us: Floats
    decode_us: Floats
    mixed_us: Floats
    decode_sequences: Floats
    mixed_sequences: Floats
    decode_steps: Floats
    mixed_steps: Floats
    num_layers: Floats
    num_allreduces: Floats
    own_layers: Floats | None = None

    def pick(self, rows: Bools | Longs) -> KernelTimes:
        """Return the chosen rows, by a mask or their places."""
        own = None if self.own_layers is None else self.own_layers[rows]
        return KernelTimes(*(column[rows] for column in self[:_COLUMNS]))._replace(own_layers=own)

    @property
    def kernels_us(self) -> Floats:
        """Time per output token of kernels alone."""
        alone_us: Floats = self.decode_steps * self.decode_us + self.mixed_steps * self.mixed_us
        return alone_us


class TimedRows(NamedTuple):
    """Rows that have a plan, their times, and why others have none.

    Attributes
    ----------
    rows : tuple of ServingRow
        Those that have one.
    times : KernelTimes
        An entry a row.
    refused : mapping of str to int
        How many have none, by reason.
    """

    rows: tuple[ServingRow, ...]
    times: KernelTimes
    refused: Mapping[str, int]


def plan_of_row(row: ServingRow, tables: Tables, profile: EngineProfile) -> StepPlan:
    """Compile the plan of a row.

    Raises
    ------
    FastroofError
        As :func:`fastroof.compile_plan` does.
    """
    layout = row.layout
    return compile_plan(
        row.model,
        tables.gpu,
        tables,
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        ep=layout.ep,
        dtype=row.plan_dtype,
        kv_dtype=row.kv_dtype,
        engine=profile,
        exchange=row.exchange or None,
        max_tokens=row.plan_tokens,
        allow_modelled=True,
    )


def kernel_times(
    rows: Sequence[ServingRow], tables: Tables, profile: EngineProfile, arrivals: str = "random"
) -> KernelTimes:
    """Time the kernels of the two mean steps of each row.

    Parameters
    ----------
    rows : sequence of ServingRow
        Measured runs.
    tables : Tables
        Kernels of their GPU.
    profile : EngineProfile
        How GEMMs are smoothed and fp8 scales found; its costs are left out.
    arrivals : str
        As :func:`fastroof.serving.estimate` takes it. The costs of the packaged profiles were fitted with
        arrivals at random moments.

    Returns
    -------
    KernelTimes
        An entry a row.

    Raises
    ------
    FastroofError
        If a row has no plan, or none that runs it.
    """
    columns = np.empty((_COLUMNS, len(rows)))
    for places in _alike(rows):
        columns[:, places] = _times([rows[i] for i in places], tables, profile, arrivals)[:_COLUMNS]
    return KernelTimes(*columns)


def time_rows(rows: Sequence[ServingRow], tables: Mapping[str, Tables], profile: EngineProfile) -> TimedRows:
    """Time the kernels of rows of several GPUs, those without a plan left out.

    Parameters
    ----------
    rows : sequence of ServingRow
        Measured runs.
    tables : mapping of str to Tables
        Kernels by GPU.
    profile : EngineProfile
        As :func:`kernel_times` takes it.

    Returns
    -------
    TimedRows
        In the order of the rows.
    """
    columns = np.full((_COLUMNS, len(rows)), np.nan)
    refused: dict[str, int] = {}
    for places in _alike(rows):
        try:
            columns[:, places] = _times([rows[i] for i in places], tables[rows[places[0]].gpu], profile)[
                :_COLUMNS
            ]
        except FastroofError as error:
            refused[str(error)] = refused.get(str(error), 0) + len(places)
    there = ~np.isnan(columns[0])
    kept = tuple(row for row, is_there in zip(rows, there, strict=True) if is_there)
    return TimedRows(kept, KernelTimes(*columns[:, there]), refused)


def _alike(rows: Sequence[ServingRow]) -> list[list[int]]:
    """Places of rows that have one plan and schedule."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(rows):
        # nan is no equal of nan
        rounds = -1.0 if math.isnan(row.requests_per_client) else row.requests_per_client
        schedule = (*row.schedule.values(), rounds)
        key = (
            row.gpu, row.model, row.layout, row.plan_dtype, row.kv_dtype, row.exchange, row.engine_version,
            schedule,
        )  # fmt: skip
        alike.setdefault(key, []).append(i)
    return list(alike.values())


def _times(
    rows: Sequence[ServingRow], tables: Tables, profile: EngineProfile, arrivals: str = "random"
) -> KernelTimes:
    """Rows of one plan."""
    plan = plan_of_row(rows[0], tables, profile.at(rows[0].engine_version).kernels_alone())
    rounds = rows[0].requests_per_client
    predicted = estimate(
        plan,
        [row.mean_isl for row in rows],
        [row.mean_osl for row in rows],
        [row.concurrency for row in rows],
        **rows[0].schedule,
        requests_per_client=None if math.isnan(rounds) else rounds,
        arrivals=arrivals,
    )
    share = predicted.mixed_share
    is_apart = rows[0].schedule.get("order") == "prefill_first"
    # a step of prompts alone gives nobody a token
    decode_steps, mixed_steps = (
        (np.ones(len(rows)), share / (1.0 - share)) if is_apart else (1.0 - share, share)
    )
    allreduces = num_allreduces(plan.row_curves)
    return KernelTimes(
        measured_us=np.array([row.tpot_ms for row in rows]) * US_PER_MS,
        decode_us=predicted.decode_step_us,
        mixed_us=predicted.mixed_step_us,
        decode_sequences=predicted.decodes,
        mixed_sequences=predicted.prompts + (0.0 if is_apart else predicted.decodes),
        decode_steps=decode_steps,
        mixed_steps=mixed_steps,
        num_layers=np.full(len(rows), float(plan.model.num_blocks)),
        num_allreduces=np.full(len(rows), float(allreduces)),
    )
