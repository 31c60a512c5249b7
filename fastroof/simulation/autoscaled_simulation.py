"""The results of a run whose replicas a rule starts and stops, and what fixed fleets do instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.arrow import arrow_schema
from fastroof.caching import lazy_property
from fastroof.columns import Column
from fastroof.compiled.simulation.autoscaling import LIFE_DRAINED, LIFE_ORDERED, LIFE_STOPPED
from fastroof.simulation.answers import duration_us
from fastroof.simulation.autoscaling import Autoscaler
from fastroof.simulation.energy import run_energy
from fastroof.simulation.requests import RequestTimes, checked_limits
from fastroof.simulation.settings import EngineSettings
from fastroof.simulation.simulation import Simulation
from fastroof.simulation.step_range import limits_kept
from fastroof.traces.trace import Trace
from fastroof.units import SECONDS_PER_HOUR, US_PER_S

if TYPE_CHECKING:
    import pyarrow as pa

    from fastroof.plan import StepPlan
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


class AutoscaledSimulation(Simulation):
    """The results of a simulation whose replicas a rule starts and stops.

    Shares of the KV cache and of time in which steps run are of replicas that serve or drain. Made by
    :func:`fastroof.simulate` with ``autoscale``.

    Parameters
    ----------
    plan : StepPlan
        Timed the steps.
    trace : Trace
        The requests.
    settings : EngineSettings
        Settings of the engines.
    autoscaler : Autoscaler
        The rule.
    run : callable
        Simulates the trace with all steps multiplied by a factor.
    run_fixed : callable
        Simulates the trace with a fixed number of replicas.

    Attributes
    ----------
    autoscaler : Autoscaler
        The rule.
    """

    def __init__(
        self,
        plan: StepPlan,
        trace: Trace,
        settings: EngineSettings,
        autoscaler: Autoscaler,
        run: Callable[[float], Outcomes],
        run_fixed: Callable[[int], Outcomes],
    ) -> None:
        self.autoscaler = autoscaler
        self._run_fixed = run_fixed
        self._fixed: dict[int, Outcomes] = {}
        super().__init__(plan, trace, settings, run(1.0), replicas=autoscaler.max_replicas, rerun=run)

    @property
    def made_from(self) -> dict[str, str]:
        """The inputs of the results: plan, trace, settings and rule, by name."""
        rule = {f"fastroof.autoscale.{name}": str(value) for name, value in vars(self.autoscaler).items()}
        return {**super().made_from, **rule}

    @property
    def _lives(self) -> Floats:
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

        times_us, *numbers = self._numbers
        values = {"time_s": times_us / US_PER_S}
        values |= dict(zip(("starting", "serving", "draining"), numbers, strict=True))
        schema = arrow_schema(FLEET_COLUMNS, self.made_from)
        return pa.table([pa.array(values[name]) for name in schema.names], schema=schema)

    @lazy_property
    def _numbers(self) -> tuple[Floats, Any, Any, Any]:
        """Times of changes, us, and the replicas that start, serve and drain from then on."""
        _, ordered, ready, drained, stopped = self._lives.T
        starts = np.minimum(np.minimum(ready, drained), stopped)
        drains = np.minimum(drained, stopped)
        edges = np.concatenate([ordered, starts, drains, stopped])
        times_us, place = np.unique(edges, return_inverse=True)
        ordered_at, served_at, drains_at, stopped_at = place.reshape(4, -1)

        def changes(begin: Any, end: Any) -> Any:
            steps = np.bincount(begin, minlength=len(times_us)) - np.bincount(end, minlength=len(times_us))
            return np.cumsum(steps)

        return (
            times_us, changes(ordered_at, served_at), changes(served_at, drains_at),
            changes(drains_at, stopped_at),
        )  # fmt: skip

    def _mean_over(self, edges_us: Floats, numbers: Any) -> Floats:
        """Return the mean of numbers of replicas between neighbouring times."""
        times_us = self._numbers[0]
        upto = np.concatenate([[0.0], np.cumsum(numbers[:-1] * np.diff(times_us))])
        means: Floats = np.diff(np.interp(edges_us, times_us, upto)) / np.diff(edges_us)
        return means

    @property
    def gpu_hours(self) -> float:
        """GPU hours from the decisions to start replicas until these stop."""
        held_us = float((self._lives[:, LIFE_STOPPED] - self._lives[:, LIFE_ORDERED]).sum())
        return held_us / US_PER_S / SECONDS_PER_HOUR * int(self.plan.layout.world_size)

    def energy(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the energy of the run, as :meth:`Simulation.energy`, over the GPUs' hours."""
        return run_energy(self, self.gpu_hours * SECONDS_PER_HOUR)

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
        _, starting, serving, draining = self._numbers
        up = self._mean_over(edges_us, serving + draining)
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.where(up > 0.0, self.replicas / up, 0.0)
        for name in ("kv_use", "busy"):
            field = table.schema.field(name)
            values = table[name].to_numpy() * factor
            table = table.set_column(table.schema.get_field_index(name), field, pa.array(values))
        numbers = (starting, serving, draining)
        for field, number in zip(arrow_schema(_MEAN_COLUMNS, {}), numbers, strict=True):
            table = table.append_column(field, pa.array(self._mean_over(edges_us, number)))
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
        rule = self.autoscaler
        times_us, starting, serving, draining = self._numbers
        edges_us = times_us[[0, -1]]
        held = starting + serving + draining
        between = held[:-1] if len(held) > 1 else held
        is_long = edges_us[1] > edges_us[0]
        if is_long:
            up = float(self._mean_over(edges_us, serving + draining)[0])
            answers["busy"] *= self.replicas / up
            answers["kv_use"]["mean"] *= self.replicas / up
        mean = float(self._mean_over(edges_us, starting + serving + draining)[0]) if is_long else math.nan
        answers["autoscaling"] = {
            "rule": rule.text,
            **{name: value for name, value in vars(rule).items() if name not in ("metric", "target", "low")},
            "replicas": {"mean": mean, "min": int(between.min()), "max": int(between.max())},
            "started": int((self._lives[:, LIFE_ORDERED] > edges_us[0]).sum()),
            "stopped": int(np.isfinite(self._lives[:, LIFE_DRAINED]).sum()),
            "gpu_hours": self.gpu_hours,
        }
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
            self._fixed[replicas] = self._run_fixed(replicas)
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
