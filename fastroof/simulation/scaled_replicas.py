"""Pools of a run and their replicas over time, which an autoscaler starts and stops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.arrow import arrow_schema
from fastroof.columns import Column
from fastroof.compiled.simulation.records import Rows
from fastroof.simulation.autoscaling import Autoscaler
from fastroof.simulation.pools import EnginePool
from fastroof.simulation.requests import engine_use
from fastroof.units import SECONDS_PER_HOUR, US_PER_S

if TYPE_CHECKING:
    import pyarrow as pa

    from fastroof.simulation.engine import Outcomes


class FixedFleet(NamedTuple):
    """A fixed number of replicas on the same trace: what they cost, and whether they keep the limits."""

    replicas: int
    gpu_hours: float
    share: float
    percentile: float | None
    kept: dict[str, bool]

    @property
    def keeps(self) -> bool:
        """Whether all limits are kept."""
        return all(self.kept.values())


FLEET_COLUMNS: Final = (
    Column("time_s", "float", "s", "time from which the numbers hold", 0),
    Column("starting", "int", "", "replicas that start", 0),
    Column("serving", "int", "", "replicas that take requests", 0),
    Column("draining", "int", "", "replicas that finish their last requests", 0),
)
"""Columns of :attr:`Simulation.fleet`."""

_MEAN_COLUMNS: Final = tuple(
    Column(column.name, "float", "", f"mean number of {column.meaning}", 0) for column in FLEET_COLUMNS[1:]
)


class ReplicaCounts(NamedTuple):
    """Times of changes, us, and the replicas that start, serve and drain from then on."""

    times_us: Floats
    starting: Longs
    serving: Longs
    draining: Longs

    @classmethod
    def of_lives(cls, lives: Rows) -> ReplicaCounts:
        """Return the counts of replicas that an autoscaler started."""
        starts = np.minimum(np.minimum(lives["ready_us"], lives["drained_us"]), lives["stopped_us"])
        drains = np.minimum(lives["drained_us"], lives["stopped_us"])
        edges = np.concatenate([lives["ordered_us"], starts, drains, lives["stopped_us"]])
        times_us, place = np.unique(edges, return_inverse=True)
        at = [np.bincount(places, minlength=len(times_us)) for places in place.reshape(4, -1)]
        return cls(times_us, *(np.cumsum(begin - end) for begin, end in itertools.pairwise(at)))

    @property
    def held(self) -> Longs:
        """Replicas on GPUs."""
        return self.starting + self.serving + self.draining

    def mean_over(self, edges_us: Floats, numbers: Longs) -> Floats:
        """Return the mean of numbers of replicas between neighbouring times."""
        upto = np.concatenate([[0.0], np.cumsum(numbers[:-1] * np.diff(self.times_us))])
        means: Floats = np.diff(np.interp(edges_us, self.times_us, upto)) / np.diff(edges_us)
        return means

    @property
    def mean_up(self) -> float:
        """Mean number of replicas that serve or drain over the run; NaN of a run without a duration."""
        return self._mean(self.serving + self.draining)

    def _mean(self, numbers: Longs) -> float:
        edges_us = self.times_us[[0, -1]]
        return float(self.mean_over(edges_us, numbers)[0]) if edges_us[1] > edges_us[0] else math.nan

    def answers(self, rule: Autoscaler, lives: Rows, gpu_s: float) -> dict[str, Any]:
        """Return what a rule did, as results have it."""
        held = self.held[:-1] if len(self.held) > 1 else self.held
        return {
            "rule": rule.text,
            **{name: value for name, value in vars(rule).items() if name not in ("metric", "target", "low")},
            "replicas": {"mean": self._mean(self.held), "min": int(held.min()), "max": int(held.max())},
            "started": int((lives["ordered_us"] > self.times_us[0]).sum()),
            "stopped": int(np.isfinite(lives["drained_us"]).sum()),
            "gpu_hours": gpu_s / SECONDS_PER_HOUR,
        }

    def table(self, made_from: Mapping[str, str]) -> pa.Table:
        """Return the counts as a table."""
        import pyarrow as pa

        times_us, *numbers = self
        schema = arrow_schema(FLEET_COLUMNS, made_from)
        return pa.table([pa.array(values) for values in (times_us / US_PER_S, *numbers)], schema=schema)

    def with_counts(self, series: pa.Table, most_replicas: int, end_us: float) -> pa.Table:
        """Return a series whose shares are of replicas that serve or drain, with the mean numbers of each."""
        import pyarrow as pa

        starts_us = series["time_s"].to_numpy() * US_PER_S
        edges_us = np.append(starts_us, max(end_us, np.nextafter(starts_us[-1], math.inf)))
        up = self.mean_over(edges_us, self.serving + self.draining)
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.where(up > 0.0, most_replicas / up, 0.0)
        for name in ("kv_use", "busy"):
            place = series.schema.get_field_index(name)
            values = pa.array(series[name].to_numpy() * factor)
            series = series.set_column(place, series.schema.field(name), values)
        for field, number in zip(arrow_schema(_MEAN_COLUMNS, {}), self[1:], strict=True):
            series = series.append_column(field, pa.array(self.mean_over(edges_us, number)))
        return series


class PoolRun(NamedTuple):
    """A pool, its outcomes, None if it got no request, and with a rule the lives of its replicas."""

    pool: EnginePool
    outcomes: Outcomes | None
    lives: Rows | None

    @classmethod
    def of_pools(cls, pools: Sequence[EnginePool], outcomes: Outcomes) -> list[PoolRun]:
        """Return what each of one or two pools did."""
        each = [outcomes] if len(pools) == 1 else [outcomes.prefill, outcomes.decode]
        lives = outcomes.lives
        return [
            cls(pool, own, None if lives is None or pool.autoscaler is None else lives[lives["pool"] == at])
            for at, (pool, own) in enumerate(zip(pools, each, strict=True))
        ]

    @property
    def counts(self) -> ReplicaCounts | None:
        """Replicas over time; None without a rule."""
        return None if self.lives is None else ReplicaCounts.of_lives(self.lives)

    def gpu_s(self, duration_s: float) -> float:
        """Return the seconds of all GPUs, with a rule from decisions to start replicas until they stop."""
        if self.lives is None:
            return duration_s * self.pool.gpus
        held_us = float((self.lives["stopped_us"] - self.lives["ordered_us"]).sum())
        return held_us / US_PER_S * int(self.pool.plan.layout.world_size)

    def scaling(self) -> dict[str, Any]:
        """Return what the pool's rule did, as results have it; empty without a rule."""
        rule, counts = self.pool.autoscaler, self.counts
        if rule is None or counts is None or self.lives is None:
            return {}
        return {"autoscaling": counts.answers(rule, self.lives, self.gpu_s(0.0))}

    def answers(self, duration_us: float) -> dict[str, Any]:
        """Return the results of one of two pools."""
        pool, outcomes = self.pool, self.outcomes
        return {
            "tp": pool.plan.tp,
            "replicas": pool.most_replicas,
            "steps": outcomes.counters["steps"] if outcomes else 0,
            "busy": engine_use(outcomes, pool.engines, duration_us)["busy"] if outcomes else 0.0,
            **self.scaling(),
        }


def fewest_that_keep(keeps: Callable[[int], bool], most: int) -> int:
    """Find the least number up to ``most`` that keeps the limits, by doubling and bisection; 0 if none."""
    below, number = 0, 1
    while not keeps(number):
        if number == most:
            return 0
        below, number = number, min(2 * number, most)
    while number - below > 1:
        middle = (below + number) // 2
        if keeps(middle):
            number = middle
        else:
            below = middle
    return number
