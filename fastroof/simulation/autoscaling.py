"""A rule that starts and stops replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from fastroof.checks import is_number, one_of, shown, whole_number
from fastroof.errors import SimulationError
from fastroof.simulation.settings import MOST_REPLICAS

METRICS: Final = ("queue", "concurrency", "kv", "rate")
"""What a rule looks at, by the numbers of the loops."""

LEAST_TARGET: Final = 1e-6
MOST_TARGET: Final = 1e9
LEAST_INTERVAL_S: Final = 1e-3
MOST_INTERVAL_S: Final = 1e6
MOST_LOOKBACK: Final = 10**6


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
        if self.lookback > MOST_LOOKBACK:
            raise SimulationError(
                f"scale_down_delay_s {self.scale_down_delay_s:g} is {self.lookback:,} checks of interval_s "
                f"{self.interval_s:g}; at most {MOST_LOOKBACK:,}"
            )

    def _number(self, name: str, least: float, most: float) -> None:
        value = getattr(self, name)
        if not is_number(value) or not least <= value <= most:
            raise SimulationError(f"{name} must be a number from {least:g} to {most:g}, got {shown(value)}")
        object.__setattr__(self, name, float(value))

    @property
    def lookback(self) -> int:
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
