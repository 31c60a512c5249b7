"""Kernel times of the two mean steps of a measured row, computed once for all fitted costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Floats, Longs
from fastroof.engines import EngineProfile, StepCosts
from fastroof.engines.values import UNKNOWN_VERSION
from fastroof.evidence.predictions import Plans, predict_step_ms
from fastroof.evidence.rows import ServingRow
from fastroof.evidence.steps.measured_steps import MeasuredStep
from fastroof.plan.curves import num_allreduces
from fastroof.plan.kernel_counts import num_kernels
from fastroof.serving.estimate import estimate
from fastroof.serving.scenarios import STEADY
from fastroof.tables import Tables
from fastroof.units import PS_PER_US, US_PER_MS

COSTS: Final = (
    "step_us", "sequence_us", "logit_ps", "allreduce_us", "layer_us", "prefill_us", "prefill_layer_us",
    "prefill_floor_layer_us", "kernel_us",
)  # fmt: skip
"""The costs of an engine that can be fitted."""

ROUNDS: Final = 3
"""Maximum number of repetitions of a fit, whose numbers of steps depend on the costs that it finds."""

OWN_LAYERS: Final = "own_layers"
"""Prefix of the names of layer costs of architectures; the column number follows."""

FLOOR: Final = "prefill_floor_layer_us"
NUM_COLUMNS: Final = 11
"""Number of columns of :class:`KernelTimes` without ``own_layers``, which only some fits have."""


class KernelTimes(NamedTuple):
    """Measured rows and the kernels of the two mean steps of each, one entry per row.

    ``num_kernels`` are those of a decode step with a pause before them. Costs that a profile has from other
    evidence are in the times.
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
    vocab: Floats
    num_kernels: Floats
    own_layers: Floats | None = None

    def pick(self, rows: Bools | Longs) -> KernelTimes:
        """Return the selected rows, by a mask or their indices."""
        layers = None if self.own_layers is None else self.own_layers[rows]
        return KernelTimes(*(column[rows] for column in self[:NUM_COLUMNS]))._replace(own_layers=layers)

    @property
    def kernels_us(self) -> Floats:
        """Return the time per output token of kernels only."""
        alone_us: Floats = self.decode_steps * self.decode_us + self.mixed_steps * self.mixed_us
        return alone_us


class Columns(NamedTuple):
    """Factors of some costs in a row's two steps, one column per cost: as additions and as floors."""

    decode: Floats
    mixed: Floats
    mixed_floor: Floats


def predicted_us(times: KernelTimes, costs: Mapping[str, float]) -> Floats:
    """Predict time per output token from kernels and costs, us."""
    return mean_us(times, columns_of(times, list(costs)), np.array([*costs.values()], np.float64))


def columns_of(times: KernelTimes, names: Sequence[str]) -> Columns:
    """Return the factors of each cost."""
    columns = Columns(*(np.zeros((len(times.measured_us), len(names))) for _ in Columns._fields))
    for i, name in enumerate(names):
        for column, factor in zip(columns, _factors(times, name), strict=True):
            column[:, i] = factor
    return columns


Factor = Floats | float


def _factors(times: KernelTimes, name: str) -> tuple[Factor, Factor, Factor]:
    """Return a cost's factors in a decode step and in a step that prefills, and its floor's in the latter."""
    if name.startswith(OWN_LAYERS):
        assert times.own_layers is not None
        own = times.own_layers[:, int(name.partition(".")[2])]
        return own, own, 0.0
    if name == "logit_ps":
        decodes, mixed = (
            n * times.vocab / PS_PER_US for n in (times.decode_sequences, times.mixed_sequences)
        )
        return decodes, mixed, 0.0
    factors: dict[str, tuple[Factor, Factor, Factor]] = {
        "step_us": (1.0, 1.0, 0.0),
        "sequence_us": (times.decode_sequences, times.mixed_sequences, 0.0),
        "allreduce_us": (times.num_allreduces, times.num_allreduces, 0.0),
        "layer_us": (times.num_layers, times.num_layers, 0.0),
        "kernel_us": (times.num_kernels, times.num_kernels, 0.0),
        "prefill_us": (0.0, 1.0, 0.0),
        "prefill_layer_us": (0.0, times.num_layers, 0.0),
        FLOOR: (0.0, 0.0, times.num_layers),
    }
    return factors[name]


def mean_us(times: KernelTimes, columns: Columns, costs: Floats) -> Floats:
    """Return the time per output token, us: the mean of both steps."""
    decode_us = times.decode_us + columns.decode @ costs
    mixed_us = np.maximum(times.mixed_us + columns.mixed @ costs, columns.mixed_floor @ costs)
    both_us: Floats = times.decode_steps * decode_us + times.mixed_steps * mixed_us
    return both_us


def kernel_times(
    rows: Sequence[ServingRow], tables: Tables, profile: EngineProfile, costs: StepCosts | None = None
) -> KernelTimes:
    """Time the kernels of the two mean steps of each row, see :func:`times_of_plan` for ``costs``."""
    columns = np.empty((NUM_COLUMNS, len(rows)))
    for places in alike_rows(rows):
        columns[:, places] = times_of_plan([rows[i] for i in places], tables, profile, costs)[:NUM_COLUMNS]
    return KernelTimes(*columns)


def alike_rows(rows: Sequence[ServingRow]) -> list[list[int]]:
    """Return the indices of rows grouped by plan and schedule."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(rows):
        # nan does not equal nan
        rounds = -1.0 if math.isnan(row.requests_per_client) else row.requests_per_client
        schedule = (*row.schedule.values(), rounds)
        key = (
            row.gpu, row.model, row.layout, row.plan_dtype, row.kv_dtype, row.exchange, row.engine_version,
            schedule, str(row.speculation), row.draft_model, row.draft_tp,
            row.started_settings, row.memory_fraction,
        )  # fmt: skip
        alike.setdefault(key, []).append(i)
    return list(alike.values())


def times_of_plan(
    rows: Sequence[ServingRow], tables: Tables, profile: EngineProfile, costs: StepCosts | None = None
) -> KernelTimes:
    """Return the kernel times of the rows of one plan, without the costs that are fitted.

    How many steps of each kind there are depends on how long they take: with ``costs`` it is as an engine of
    these would run them.
    """
    version, plans = rows[0].engine_version or UNKNOWN_VERSION, Plans(tables)
    plan = plans.get(rows[0], rows[0].started(profile.at(version)).unfitted())
    unfitted = plan.profile.costs
    if costs is not None:
        # whole, also for versions later than the fitted runs
        fitted = replace(profile, costs=costs, fit=None).at(version)
        plan = plans.get(rows[0], rows[0].started(fitted))
    rounds = rows[0].requests_per_client
    predicted = estimate(
        plan,
        [row.mean_isl for row in rows],
        [row.mean_osl for row in rows],
        [row.concurrency for row in rows],
        **rows[0].schedule,
        requests_per_client=STEADY if math.isnan(rounds) else rounds,
        speculation=plans.speculation(rows[0], plan),
    )
    share = predicted.mixed_share
    is_apart = rows[0].schedule.get("order") == "prefill_first"
    # a step with only prompts produces no output token
    decode_steps, mixed_steps = (
        (np.ones(len(rows)), share / (1.0 - share)) if is_apart else (1.0 - share, share)
    )
    if rows[0].speculation is not None:
        # a step produces several tokens of a request
        steps_us = decode_steps * predicted.decode_step_us + mixed_steps * predicted.mixed_step_us
        each = predicted.tpot_ms * US_PER_MS / steps_us
        decode_steps, mixed_steps = decode_steps * each, mixed_steps * each
    allreduces = num_allreduces(plan.row_curves)
    kernels = num_kernels(plan.row_curves, plan.attention, has_prefill=False)
    mixed_sequences = predicted.prompts + (0.0 if is_apart else predicted.decodes)
    counts = (plan.model.architecture, float(plan.model.num_blocks), allreduces, kernels)
    both = plan.profile.costs, unfitted
    step_us, unfitted_step_us = (one.of_step_us(*counts) for one in both)
    sequence_us, unfitted_sequence_us = (one.of_sequence_us(plan.model.vocab) for one in both)
    prompt_us, unfitted_prompt_us = (one.of_prefill_us(float(plan.model.num_blocks)) for one in both)
    a_step_us, a_sequence_us = step_us - unfitted_step_us, sequence_us - unfitted_sequence_us
    return KernelTimes(
        measured_us=np.array([row.tpot_ms for row in rows]) * US_PER_MS,
        decode_us=predicted.decode_step_us - a_step_us - a_sequence_us * predicted.decodes,
        mixed_us=predicted.mixed_step_us
        - a_step_us
        - a_sequence_us * mixed_sequences
        - (prompt_us - unfitted_prompt_us),
        decode_sequences=predicted.decodes,
        mixed_sequences=mixed_sequences,
        decode_steps=decode_steps,
        mixed_steps=mixed_steps,
        num_layers=np.full(len(rows), float(plan.model.num_blocks)),
        num_allreduces=np.full(len(rows), float(allreduces)),
        vocab=np.full(len(rows), float(plan.model.vocab)),
        num_kernels=np.full(len(rows), kernels),
    )


def step_times(steps: Sequence[MeasuredStep], tables: Tables, profile: EngineProfile) -> KernelTimes:
    """Return the kernel times of whole steps, each as one step of a decode or a mixed kind."""
    plans = Plans(tables)
    kernels = [plans.get(step, (step.profile or profile).kernels_alone()) for step in steps]
    kernels_us = [
        predict_step_ms(step, plan, plans.drafter(step, plan)) * US_PER_MS
        for step, plan in zip(steps, kernels, strict=True)
    ]
    sequences = np.array([len(step.new_tokens) for step in steps], np.float64)
    decodes = np.array([step.is_decode for step in steps])
    return KernelTimes(
        measured_us=np.array([step.latency_us for step in steps]),
        decode_us=np.where(decodes, kernels_us, 0.0),
        mixed_us=np.where(decodes, 0.0, kernels_us),
        decode_sequences=np.where(decodes, sequences, 0.0),
        mixed_sequences=np.where(decodes, 0.0, sequences),
        decode_steps=decodes.astype(np.float64),
        mixed_steps=(~decodes).astype(np.float64),
        num_layers=np.array([float(plan.model.num_blocks) for plan in kernels]),
        num_allreduces=np.array([float(num_allreduces(plan.row_curves)) for plan in kernels]),
        vocab=np.array([float(plan.model.vocab) for plan in kernels]),
        num_kernels=np.array(
            [num_kernels(plan.row_curves, plan.attention, has_prefill=False) for plan in kernels]
        ),
    )


def joined(parts: Sequence[KernelTimes]) -> KernelTimes:
    """Return the kernel times of several sources one after another."""
    columns = zip(*(part[:NUM_COLUMNS] for part in parts), strict=True)
    return KernelTimes(*(np.concatenate(column) for column in columns))
