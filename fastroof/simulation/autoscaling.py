"""Replicas that are started and stopped by a rule: the rule, and a run with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.arrays import Longs
from fastroof.checks import is_number, one_of, shown, whole_number
from fastroof.compiled.simulation import autoscaling as loops
from fastroof.compiled.simulation.autoscaled_fleet import autoscaled_feedback_run, autoscaled_run
from fastroof.compiled.simulation.state import NUM_CLOCKS, NUM_SCALARS
from fastroof.errors import SimulationError
from fastroof.plan.calls import rank_rules
from fastroof.simulation.engine import (
    Outcomes,
    new_record,
    new_served,
    options_of,
    outcomes_of,
    raise_stuck,
    requests_of,
    too_long,
    with_rejected,
)
from fastroof.simulation.front_end import run_behind, turns_of
from fastroof.simulation.replicas import (
    MOST_REPLICAS,
    POOLED_ROUTINGS,
    ROUTINGS,
    fleet_counters,
    new_fleet,
)
from fastroof.simulation.settings import EngineSettings
from fastroof.traces.prompt_tree import GIVEN, LRU
from fastroof.traces.trace import Trace
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

METRICS: Final = ("queue", "concurrency", "kv", "rate")
"""What a rule looks at, by the numbers of the loops."""

LEAST_TARGET: Final = 1e-6
MOST_TARGET: Final = 1e9
LEAST_INTERVAL_S: Final = 1e-3
MOST_INTERVAL_S: Final = 1e6
MOST_LOOKBACK: Final = 10**6
FIRST_LIVES: Final = 1024
"""Replicas that are started before there must be room for more."""

_DRAWN_FROM: Final = 2**31 - 1


@dataclass(frozen=True)
class Autoscaler:
    """A rule that starts and stops replicas, as Kubernetes' HorizontalPodAutoscaler, KEDA or Dynamo does.

    Parameters
    ----------
    metric : {"queue", "concurrency", "kv", "rate"}
        Metric that the rule holds at a target per replica: requests that wait; requests that wait or run;
        the share of the KV cache that requests hold; requests/s since the last check.
    target : float
        Its target per replica.
    max_replicas : int
        Most replicas, including those that drain, as these hold their GPUs.
    startup_s : float
        Seconds from the decision to start a replica until it takes requests.
    min_replicas : int, default 1
        Fewest replicas.
    interval_s : float, default 15
        Seconds between checks.
    scale_down_delay_s : float, default 300
        Replicas are stopped down to the most that any check of so many seconds wanted.
    tolerance : float, default 0.1
        Relative distance from the target within which nothing changes.
    low : float, optional
        Change by one replica instead: one more above the target, one fewer below ``low``, none while one
        starts.

    Raises
    ------
    SimulationError
        If a value is invalid.

    Notes
    -----
    With a metric of ``total`` over replicas that serve, and ``current`` of them that serve or start, a check
    wants ``ceil(total / target)``, unless ``total / (target * current)`` is within the tolerance of 1; at
    most twice as many as there are, or four more. This is the autoscaler's rule for average values, which
    KEDA uses, with its defaults (kubernetes.io, Horizontal Pod Autoscaling, "Algorithm details" and "Scaling
    policies"). ``low`` is that of Dynamo's load planner; its defaults are ``kv``, 0.9, ``low=0.5``,
    ``interval_s=30`` and ``scale_down_delay_s=90``.

    Examples
    --------
    >>> Autoscaler("concurrency", 32, max_replicas=8, startup_s=120).text
    'concurrency:32'
    >>> Autoscaler.parsed("kv:0.9:0.5", max_replicas=4, startup_s=60).low
    0.5
    """

    metric: str
    target: float
    max_replicas: int
    startup_s: float
    min_replicas: int = 1
    interval_s: float = 15.0
    scale_down_delay_s: float = 300.0
    tolerance: float = 0.1
    low: float | None = None

    def __post_init__(self) -> None:
        one_of("metric", self.metric, METRICS, SimulationError)
        self._number("target", LEAST_TARGET, MOST_TARGET)
        for name in ("max_replicas", "min_replicas"):
            number = whole_number(name, getattr(self, name), 1, MOST_REPLICAS, SimulationError)
            object.__setattr__(self, name, number)
        if self.min_replicas > self.max_replicas:
            raise SimulationError(
                f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}"
            )
        self._number("startup_s", 0.0, MOST_INTERVAL_S)
        self._number("interval_s", LEAST_INTERVAL_S, MOST_INTERVAL_S)
        self._number("scale_down_delay_s", 0.0, MOST_INTERVAL_S)
        self._number("tolerance", 0.0, 1.0)
        if self.low is not None:
            self._number("low", 0.0, self.target)
        if self._lookback > MOST_LOOKBACK:
            raise SimulationError(
                f"scale_down_delay_s {self.scale_down_delay_s:g} is {self._lookback:,} checks of interval_s "
                f"{self.interval_s:g}; at most {MOST_LOOKBACK:,}"
            )

    def _number(self, name: str, least: float, most: float) -> None:
        value = getattr(self, name)
        if not is_number(value) or not least <= value <= most:
            raise SimulationError(f"{name} must be a number from {least:g} to {most:g}, got {shown(value)}")
        object.__setattr__(self, name, float(value))

    @property
    def _lookback(self) -> int:
        """Number of earlier checks within the delay."""
        return int(self.scale_down_delay_s / self.interval_s)

    @property
    def text(self) -> str:
        """The rule as text: ``concurrency:32`` or ``kv:0.9:0.5``."""
        low = "" if self.low is None else f":{self.low:g}"
        return f"{self.metric}:{self.target:g}{low}"

    @classmethod
    def parsed(cls, text: str, **given: Any) -> Autoscaler:
        """Return the rule of a text like ``concurrency:32``, with the other parameters by name."""
        metric, *numbers = text.split(":") if isinstance(text, str) else ("",)
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        if metric not in METRICS or len(values) not in (1, 2):
            raise SimulationError(
                f"autoscale needs METRIC:TARGET[:LOW] with a metric of {', '.join(METRICS)}, such as "
                f"concurrency:32 or kv:0.9:0.5, got {shown(text)}"
            )
        return cls(metric, values[0], low=values[1] if len(values) == 2 else None, **given)

    def scaler(self, first: int, engines: int, start_us: float, lives: int) -> loops.Scaler:
        """Return the rule, which begins with ``first`` replicas, and its arrays as the loop reads them."""
        most, is_fixed = self.max_replicas, self.max_replicas == self.min_replicas
        rule = loops.ScalingRule(
            METRICS.index(self.metric),
            self.target,
            -1.0 if self.low is None else self.low,
            self.tolerance,
            self.min_replicas,
            first,
            self.interval_s * US_PER_S,
            self.startup_s * US_PER_S,
            start_us,
            most if is_fixed else _DRAWN_FROM,
        )
        return loops.Scaler(
            rule,
            np.zeros(most, np.int64),
            np.zeros(most, np.int64),
            np.zeros(self._lookback + 1, np.int64),
            np.zeros(loops.NUM_COUNTS, np.int64),
            np.zeros((lives, loops.NUM_LIFE_COLUMNS)),
            np.zeros((engines, NUM_SCALARS), np.int64),
            np.zeros((engines, NUM_CLOCKS)),
        )


def run_autoscaled(
    plan: StepPlan,
    trace: Trace,
    settings: EngineSettings,
    autoscaler: Autoscaler,
    replicas: int = 1,
    routing: str = "round_robin",
    *,
    time_scale: float = 1.0,
    seed: int = 0,
    prefix_cache: str = GIVEN,
) -> Outcomes:
    """Serve a trace with replicas that a rule starts and stops; the front end is that of the most."""
    first = max(whole_number("replicas", replicas, error=SimulationError), autoscaler.min_replicas)
    if first > autoscaler.max_replicas:
        raise SimulationError(
            f"replicas {replicas}, with which autoscaling begins, is above max_replicas "
            f"{autoscaler.max_replicas}"
        )
    one_of("routing", routing, POOLED_ROUTINGS if prefix_cache == LRU else ROUTINGS, SimulationError)
    if plan.layout.pp > 1:
        raise SimulationError(
            f"pipeline stages are simulated with one engine, autoscaling with pp=1, got pp={plan.layout.pp}"
        )
    checks = trace.duration_s / autoscaler.interval_s
    if checks > loops.MOST_CHECKS:
        raise SimulationError(
            f"trace {shown(trace.name)} lasts {trace.duration_s:,.0f} s, {checks:,.0f} checks of interval_s "
            f"{autoscaler.interval_s:g}; at most {loops.MOST_CHECKS:,}"
        )

    def run(arrived: Trace, engine: EngineSettings) -> Outcomes:
        turns = turns_of(trace, arrived)
        return _run(plan, arrived, turns, engine, autoscaler, first, routing, time_scale, seed, prefix_cache)

    servers = autoscaler.max_replicas * plan.layout.dp
    return run_behind(plan.profile.front_end, trace, settings, servers, run)


def _run(
    plan: StepPlan,
    trace: Trace,
    turns: Longs,
    settings: EngineSettings,
    autoscaler: Autoscaler,
    first: int,
    routing: str,
    time_scale: float,
    seed: int,
    prefix_cache: str,
) -> Outcomes:
    """Serve a trace by the schedulers' own clock."""
    rejected = too_long(trace, settings)
    any_rejected = bool(rejected.any())
    options = options_of(plan.arena, settings, trace, time_scale, prefix_cache)
    rules, longest = rank_rules(plan), int(trace.output_tokens.max())
    most, lives = autoscaler.max_replicas, FIRST_LIVES + first
    while True:
        requests = requests_of(trace, settings, ~rejected if any_rejected else None, prefix_cache)
        count = len(requests.arrival_us)
        start_us = float(requests.arrival_us.min(initial=math.inf)) if count else 0.0
        scaler = autoscaler.scaler(first, most * rules.ranks, start_us, lives)
        drawn = np.random.default_rng(seed).integers(0, scaler.rule.drawn_from, (2, count), np.int32)
        fleet = new_fleet(routing, settings, requests, longest, most, rules, drawn, turns[~rejected])
        served, record, replica_of = new_served(settings, count), new_record(), np.zeros(count, np.int32)
        arguments = fleet, scaler, requests, served, record, replica_of
        if count and (trace.is_closed or trace.has_parents):
            clients = trace.clients or 0
            code = autoscaled_feedback_run(plan.arena, options._replace(clients=0), *arguments, clients)
        else:
            code = autoscaled_run(plan.arena, options, *arguments)
        if code != loops.CODE_FULL:
            break
        lives *= 4
    if code == loops.CODE_MANY_CHECKS:
        raise SimulationError(
            f"the run of {shown(trace.name)} lasts over {loops.MOST_CHECKS:,} checks of interval_s "
            f"{autoscaler.interval_s:g}; give a longer interval_s"
        )
    raise_stuck(code)
    counters = fleet_counters(fleet.states, prefix_cache)
    outcomes = outcomes_of(requests, served, replica_of, record, counters, prefix_cache)
    outcomes = outcomes._replace(lives=scaler.lives[: scaler.counts[loops.LIVES]].copy())
    return with_rejected(outcomes, trace, rejected) if any_rejected else outcomes
