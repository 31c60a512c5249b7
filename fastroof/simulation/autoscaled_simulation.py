"""The results of a run whose replicas a rule starts and stops, and what fixed fleets do instead."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.arrow import arrow_schema
from fastroof.caching import lazy_property
from fastroof.columns import Column
from fastroof.compiled.simulation.records import Rows
from fastroof.simulation.answers import duration_us
from fastroof.simulation.autoscaling import Autoscaler
from fastroof.simulation.energy import EnergyPart
from fastroof.simulation.pools import Pool
from fastroof.simulation.requests import RequestTimes, checked_limits
from fastroof.simulation.simulation import Simulation
from fastroof.simulation.step_range import limits_kept
from fastroof.traces.trace import Trace
from fastroof.units import SECONDS_PER_HOUR, US_PER_S

if TYPE_CHECKING:
    import pyarrow as pa

    from fastroof.simulation.engine import Outcomes


class FixedFleet(NamedTuple):
    """A fixed number of replicas on the same trace: what they cost, and whether they keep the limits."""

    replicas: int
    gpu_hours: float
    share: float
    p99_within: dict[str, bool]

    @property
    def keeps(self) -> bool:
        """Whether the 99th percentile is within every limit."""
        return all(self.p99_within.values())


FLEET_COLUMNS: Final = (
    Column("time_s", "float", "s", "time from which the numbers hold", 0),
    Column("starting", "int", "", "replicas that start", 0),
    Column("serving", "int", "", "replicas that take requests", 0),
    Column("draining", "int", "", "replicas that finish their last requests", 0),
)
"""Columns of :attr:`AutoscaledSimulation.fleet`."""

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

    def answers(self, rule: Autoscaler, lives: Rows, gpu_hours: float) -> dict[str, Any]:
        """Return what a rule did, as results have it."""
        held = self.held[:-1] if len(self.held) > 1 else self.held
        return {
            "rule": rule.text,
            **{name: value for name, value in vars(rule).items() if name not in ("metric", "target", "low")},
            "replicas": {"mean": self._mean(self.held), "min": int(held.min()), "max": int(held.max())},
            "started": int((lives["ordered_us"] > self.times_us[0]).sum()),
            "stopped": int(np.isfinite(lives["drained_us"]).sum()),
            "gpu_hours": gpu_hours,
        }


def gpu_hours_of(pool: Pool, lives: Rows) -> float:
    """GPU hours from the decisions to start replicas until these stop."""
    held_us = float((lives["stopped_us"] - lives["ordered_us"]).sum())
    return held_us / US_PER_S / SECONDS_PER_HOUR * int(pool.plan.layout.world_size)


class AutoscaledSimulation(Simulation):
    """The results of a simulation whose replicas a rule starts and stops.

    Shares of the KV cache and of time in which steps run are of replicas that serve or drain. Made by
    :func:`fastroof.simulate` with ``autoscale``.

    Parameters
    ----------
    pool : Pool
        The engines, with a rule.
    trace : Trace
        The requests.
    run : callable
        Simulates the trace with all steps multiplied by a factor, and with another pool if one is given.

    Attributes
    ----------
    autoscaler : Autoscaler
        The rule.
    """

    def __init__(self, pool: Pool, trace: Trace, run: Callable[..., Outcomes]) -> None:
        assert pool.autoscaler is not None
        self.autoscaler = pool.autoscaler
        self._pool, self._run = pool, run
        self._fixed: dict[int, Outcomes] = {}
        super().__init__(pool.plan, trace, pool.settings, run(1.0), replicas=pool.most_replicas, rerun=run)

    @property
    def made_from(self) -> dict[str, str]:
        """The inputs of the results: plan, trace, settings and rule, by name."""
        rule = {f"fastroof.autoscale.{name}": str(value) for name, value in vars(self.autoscaler).items()}
        return {**super().made_from, **rule}

    @property
    def _lives(self) -> Rows:
        lives = self.outcomes.lives
        assert lives is not None
        return lives

    @lazy_property
    def fleet(self) -> pa.Table:
        """Replicas over time, a row each time that a number changes.

        Returns
        -------
        pyarrow.Table
            ``time_s`` on the trace's clock, and from then on the replicas that are ``starting``, ``serving``
            and ``draining``; all 0 at the end of the run.
        """
        import pyarrow as pa

        schema = arrow_schema(FLEET_COLUMNS, self.made_from)
        times_us, *numbers = self._counts
        return pa.table([pa.array(values) for values in (times_us / US_PER_S, *numbers)], schema=schema)

    @lazy_property
    def _counts(self) -> ReplicaCounts:
        return ReplicaCounts.of_lives(self._lives)

    @property
    def gpu_hours(self) -> float:
        """GPU hours from the decisions to start replicas until these stop."""
        return gpu_hours_of(self._pool, self._lives)

    @property
    def energy_parts(self) -> list[EnergyPart]:
        """GPUs by plan, for :meth:`energy`, while the rule holds them."""
        return [super().energy_parts[0]._replace(gpu_s=self.gpu_hours * SECONDS_PER_HOUR)]

    def series(self) -> pa.Table:
        """Return the engines' state over time, all replicas together.

        Returns
        -------
        pyarrow.Table
            As :meth:`Simulation.series`, then the mean replicas that are ``starting``, ``serving`` and
            ``draining``.
        """
        import pyarrow as pa

        table = super().series()
        starts_us = table["time_s"].to_numpy() * US_PER_S
        end_us = max(float(self.outcomes.counters["end_us"]), np.nextafter(starts_us[-1], math.inf))
        edges_us = np.append(starts_us, end_us)
        counts = self._counts
        up = counts.mean_over(edges_us, counts.serving + counts.draining)
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.where(up > 0.0, self.replicas / up, 0.0)
        for name in ("kv_use", "busy"):
            field = table.schema.field(name)
            values = table[name].to_numpy() * factor
            table = table.set_column(table.schema.get_field_index(name), field, pa.array(values))
        for field, number in zip(arrow_schema(_MEAN_COLUMNS, {}), counts[1:], strict=True):
            table = table.append_column(field, pa.array(counts.mean_over(edges_us, number)))
        return table

    def summary(self, **given: Any) -> dict[str, Any]:
        """Return the results of the whole run.

        Parameters
        ----------
        **given
            As in :meth:`Simulation.summary`.

        Returns
        -------
        dict
            As in :meth:`Simulation.summary`, and ``autoscaling``: the ``rule`` and its parameters;
            ``replicas``, ``{mean, min, max}`` of those on GPUs; how many were ``started`` and ``stopped``;
            ``gpu_hours``; and with limits ``fixed``, what other fleets do with the same requests:
            ``replicas``, ``gpu_hours``, the ``share`` of requests within all limits and ``p99_within``, as
            ``at_peak`` of the most replicas of this run, and as ``fewest`` of the fewest that keep the 99th
            percentile within all limits, None if not even ``max_replicas`` do.
        """
        answers = super().summary(**given)
        up = self._counts.mean_up
        if not math.isnan(up):
            answers["busy"] *= self.replicas / up
            answers["kv_use"]["mean"] *= self.replicas / up
        answers["autoscaling"] = self._counts.answers(self.autoscaler, self._lives, self.gpu_hours)
        limits = checked_limits({name: given.get(name) for name in ("ttft_ms", "tpot_ms", "e2e_ms")})
        if limits:
            fewest = self.fewest_fixed(limits)
            peak = self.fixed(answers["autoscaling"]["replicas"]["max"], limits)
            answers["autoscaling"]["fixed"] = {
                "at_peak": peak._asdict(),
                "fewest": None if fewest is None else fewest._asdict(),
            }
        return answers

    def fixed(self, replicas: int, limits: Mapping[str, float]) -> FixedFleet:
        """Return what a fixed number of replicas does with the same requests."""
        if replicas not in self._fixed:
            fixed = self._pool._replace(replicas=replicas, autoscaler=None)
            self._fixed[replicas] = self._run(1.0, fixed)
        outcomes = self._fixed[replicas]
        times = RequestTimes.of(self.trace, outcomes)
        hours = duration_us(outcomes) / US_PER_S / SECONDS_PER_HOUR
        return FixedFleet(
            replicas,
            hours * replicas * int(self.plan.layout.world_size),
            float(times.within(limits).mean()),
            limits_kept(times, limits),
        )

    def fewest_fixed(self, limits: Mapping[str, float]) -> FixedFleet | None:
        """Return the fewest fixed replicas, up to ``max_replicas``, that keep the limits; None without."""
        from fastroof.simulation.fewest_replicas import fewest_that_keep

        fewest = fewest_that_keep(lambda count: self.fixed(count, limits).keeps, self.autoscaler.max_replicas)
        return self.fixed(fewest, limits) if fewest else None
