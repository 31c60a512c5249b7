"""Energy of a simulated run: busy power by the mean steps of each interval of its series, and idle time.

The loops count steps and tokens, not joules. Steps with prompts are taken to be spread evenly over busy time,
with the run's mean number of prompt tokens next to the interval's running requests.

A pipeline stage is busy for an equal part of each step: in all, the sum of step times over the number of
stages. Otherwise it is idle. An interval's running requests are in batches in proportion to the run's mean.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from fastroof.errors import SimulationError
from fastroof.plan.calls import rank_rules
from fastroof.plan.energy import BusyLoad, basis_of, busy_watts, check_power, energy_error
from fastroof.simulation.requests import BLOCKS_US, BUSY_US, RUNNING_US
from fastroof.units import UJ_PER_J, US_PER_S

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.simulation.engine import Outcomes
    from fastroof.simulation.requests import RequestTimes
    from fastroof.simulation.settings import EngineSettings
    from fastroof.simulation.step_range import StepError
    from fastroof.traces.trace import Trace


class EnergyPart(NamedTuple):
    """GPUs of one plan, what its engines did, and the seconds of all of them, busy and idle."""

    plan: StepPlan
    settings: EngineSettings
    outcomes: Outcomes | None
    engines: int
    gpus: int
    gpu_s: float
    has_drafts: bool = False


class SimulatedRun(Protocol):
    """What the energy of a run is made of: attributes of :class:`fastroof.Simulation`."""

    trace: Trace

    @property
    def energy_parts(self) -> list[EnergyPart]:
        """Its GPUs by plan."""

    @property
    def times(self) -> RequestTimes:
        """Times of its requests."""

    @property
    def step_error(self) -> StepError:
        """Standard error of its steps."""


def run_energy(self: SimulatedRun) -> dict[str, Any]:
    """Return the energy of the run.

    Returns
    -------
    dict
        ``joules`` of all GPUs over the duration, or while an autoscaler holds them, of which ``busy_joules``
        in steps and ``idle_joules`` in the rest; ``joules_per_token`` of finished requests' outputs;
        ``watts_per_gpu``; ``relative_error``, one standard error of power and step times; and ``basis``,
        ``measured`` or ``modelled``, as in :meth:`fastroof.StepPlan.energy`.

    Raises
    ------
    SimulationError
        If the GPU's power is unknown, or draft tokens are verified.
    """
    parts = self.energy_parts
    for part in parts:
        check_power(part.plan.gpu, SimulationError)
        if part.has_drafts:
            raise SimulationError("energy of a run needs speculation=None: the power of drafts is unknown")
    whole_s = sum(part.gpu_s for part in parts)
    busy_j = idle_j = 0.0
    for part in parts:
        joules, busy_s = (0.0, 0.0) if part.outcomes is None else _busy_of(part, part.outcomes)
        busy_j += joules
        idle_j += max(part.gpu_s - busy_s, 0.0) * part.plan.gpu.idle_w
    tokens = int(self.trace.output_tokens[self.times.is_finished].sum())
    return {
        "joules": busy_j + idle_j,
        "busy_joules": busy_j,
        "idle_joules": idle_j,
        "joules_per_token": (busy_j + idle_j) / tokens if tokens else math.nan,
        "watts_per_gpu": (busy_j + idle_j) / whole_s if whole_s > 0.0 else math.nan,
        "relative_error": float(energy_error(self.step_error.relative)),
        "basis": max(basis_of(part.plan.gpu) for part in parts),
    }


def _busy_of(part: EnergyPart, outcomes: Outcomes) -> tuple[float, float]:
    """Return the joules of GPUs while they compute, and how many seconds of GPUs that is."""
    plan, counters = part.plan, outcomes.counters
    series = outcomes.series[outcomes.series[:, BUSY_US] > 0.0]
    together, pp = rank_rules(plan).together, plan.layout.pp
    busy_us = series[:, BUSY_US]
    running = series[:, RUNNING_US] / busy_us / together
    if pp > 1:
        with_decodes = counters["decode_steps"] + counters["mixed_steps"]
        mean_running = series[:, RUNNING_US].sum() / busy_us.sum() / together
        running = running * (counters["decode_tokens"] / max(with_decodes, 1) / mean_running)
        busy_us = busy_us * (counters["busy_us"] / busy_us.sum())
    alike = np.ones(len(series))
    # counters are of all ranks
    mixed, prompt_steps = counters["mixed_steps"], counters["mixed_steps"] + counters["prefill_steps"]
    load = BusyLoad(
        decodes=running,
        beside=running * (mixed / max(prompt_steps, 1)),
        kv_len=series[:, BLOCKS_US] * part.settings.block_size / np.maximum(series[:, RUNNING_US], 1.0),
        prompt_tokens=alike * (counters["prefill_tokens"] / max(prompt_steps, 1)),
        new_tokens=alike * (counters["prefill_tokens"] / len(outcomes.status)),
        prompt_steps_per_us=alike * (prompt_steps / together / max(pp * float(busy_us.sum()), 1.0)),
    )
    gpus = part.gpus / part.engines
    joules = float(busy_us @ busy_watts(plan.bottleneck, load)) / UJ_PER_J
    return joules * gpus, float(busy_us.sum()) / US_PER_S * gpus
