"""A simulated run and its results: percentiles, throughput, goodput, series, the effect of step errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.arrow import ArrowRows
from fastroof.caching import lazy_property
from fastroof.columns import ORIGINS
from fastroof.errors import BatchError, SimulationError
from fastroof.plan.step_error import decode_origins
from fastroof.simulation import step_range
from fastroof.simulation.answers import answers_html, duration_us, run_answers
from fastroof.simulation.energy import EnergyPart, run_energy
from fastroof.simulation.kv_tiers import tier_notes
from fastroof.simulation.pools import EnginePool, Link, engines_of
from fastroof.simulation.requests import (
    RequestTimes,
    checked_limits,
    checked_requests_path,
    mean_step,
    request_table,
    series_table,
    spread,
    write_table,
)
from fastroof.simulation.run_warnings import queue_growth, range_warnings, run_warnings
from fastroof.simulation.scaled_replicas import FixedFleet, PoolRun, ReplicaCounts, fewest_that_keep
from fastroof.simulation.session_answers import session_table
from fastroof.units import SECONDS_PER_HOUR, US_PER_MS, US_PER_S

if TYPE_CHECKING:
    import pyarrow as pa

    from fastroof.simulation.engine import Outcomes
    from fastroof.simulation.step_range import StepError
    from fastroof.traces.trace import Trace


SHORT_QUEUE: Final = 2
"""If fewer requests ever wait, the load is not near saturation."""


class Simulation(ArrowRows):
    """The results of a simulation, made by :func:`fastroof.simulate`.

    Of two pools everything is over both; ``replica`` is the decode engine, empty if a request ended with its
    prefill.

    Parameters
    ----------
    pools : sequence of EnginePool
        The engines: one pool, or two that prefill and decode.
    trace : Trace
        The requests.
    outcomes : Outcomes
        The outcome of each request, in the trace's sorted order.
    link : Link, optional
        The link between two pools.
    rerun : callable, optional
        Simulates the trace again with all steps multiplied by a factor, on other pools if some are given, and
        returns the outcomes; by default without a front end.

    Attributes
    ----------
    plan : StepPlan
        Plan of the last pool.
    settings : EngineSettings
        Its engines' settings.
    replicas : int
        Maximum number of replicas of all pools.

    Raises
    ------
    SimulationError
        If the simulation was not run to its end.

    Examples
    --------
    >>> import fastroof
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    >>> trace = fastroof.Trace([0.0, 0.1, 0.2], [1000, 2000, 500], [100, 50, 1])
    >>> sim = fastroof.simulate(plan, trace)
    >>> sim.requests["status"].to_pylist()
    ['finished', 'finished', 'finished']
    >>> sim.summary()["tpot_ms"]["p50"] < 20.0
    True
    """

    def __init__(
        self,
        pools: Sequence[EnginePool],
        trace: Trace,
        outcomes: Outcomes,
        *,
        link: Link | None = None,
        rerun: Callable[..., Outcomes] | None = None,
    ) -> None:
        self.pools = tuple(pools)
        self.plan, self.settings = self.pools[-1].plan, self.pools[-1].settings
        self.trace = trace
        self.outcomes = outcomes
        self.link = link
        self.replicas = sum(pool.most_replicas for pool in self.pools)
        self._rerun = rerun or self._run_engines
        self._fixed: dict[int, Outcomes] = {}
        self.times: Final = RequestTimes.of(trace, outcomes)
        unfinished = int((self.times.is_finished & ~np.isfinite(self.times.e2e_ms)).sum())
        if unfinished:
            raise SimulationError(
                f"{unfinished:,} of {len(self):,} requests were unfinished when the simulation ended; "
                "results need a complete run"
            )

    def __len__(self) -> int:
        return len(self.times.is_finished)

    def __repr__(self) -> str:
        finished = int(self.times.is_finished.sum())
        took_s = duration_us(self.outcomes) / US_PER_S
        return (
            f"Simulation({self.plan.model.name!r} on {self.plan.gpu.name!r}, {len(self):,} requests, "
            f"{finished:,} finished in {took_s:,.4g} s)"
        )

    @property
    def engines(self) -> int:
        """Number of engines that step independently: replicas, or their ranks if not in lockstep."""
        return sum(pool.engines for pool in self.pools)

    @property
    def gpus(self) -> int:
        """GPUs of all engines."""
        return sum(pool.gpus for pool in self.pools)

    @property
    def made_from(self) -> dict[str, str]:
        """The inputs of the results by name: plans, settings, rule and link of the pools, and the trace."""
        first, last = self.pools[0], self.pools[-1]
        facts = {**last.plan.made_from, **_named("", vars(self.settings))}
        facts |= {"fastroof.trace": self.trace.name, "fastroof.replicas": str(self.replicas)}
        if last.drafting is not None:
            facts["fastroof.speculative_decoding"] = str(last.drafting.speculation)
        if self.link is None:
            return facts | _named("autoscale.", vars(last.autoscaler) if last.autoscaler else {})
        facts |= {f"prefill.{name}": value for name, value in first.plan.made_from.items()}
        facts |= _named("prefill.", vars(first.settings) | {"replicas": first.replicas})
        return facts | _named("decode.", {"replicas": last.replicas}) | _named("link.", self.link._asdict())

    @lazy_property
    def _runs(self) -> list[PoolRun]:
        return PoolRun.of_pools(self.pools, self.outcomes)

    @lazy_property
    def _counts(self) -> ReplicaCounts | None:
        """Replicas over time of a pool by itself that a rule starts and stops."""
        return self._runs[0].counts if len(self.pools) == 1 else None

    @property
    def gpu_hours(self) -> float:
        """GPU hours, with an autoscaler from the decisions to start replicas until these stop."""
        duration_s = duration_us(self.outcomes) / US_PER_S
        return sum(run.gpu_s(duration_s) for run in self._runs) / SECONDS_PER_HOUR

    # -- requests and time -----------------------------------------------------------------------

    @lazy_property
    def requests(self) -> pa.Table:
        """Requests as a table, a row each, in the order of the trace's file.

        Returns
        -------
        pyarrow.Table
            ``arrival_s``, ``input_tokens``, ``output_tokens``, ``ttft_ms``, ``tpot_ms``, ``e2e_ms`` (null
            without such a time), ``preemptions``, ``replica``, ``status`` (finished, timed_out or rejected);
            ``cached_tokens`` if any are given, or with a simulated prefix cache those found at the first
            admission, of which ``tokens_from_NAME`` in each KV tier; with sessions ``session`` and ``turn``;
            with two pools ``prefill_replica`` and ``transfer_ms``. Fields have units and meanings as
            metadata, the table its inputs.
        """
        return request_table(self.trace, self.outcomes, self.times, self.made_from)

    @lazy_property
    def sessions(self) -> pa.Table:
        """Sessions as a table, a row each, by their first requests.

        Returns
        -------
        pyarrow.Table
            ``session``, ``requests``, ``turns``, ``start_s``, ``e2e_ms`` from its first arrival to its last
            token (null if a request did not finish), ``input_tokens`` and ``output_tokens`` of all requests,
            and ``status``: finished or cut.

        Raises
        ------
        SimulationError
            If no request of the trace follows another.
        """
        if not self.trace.has_parents:
            raise SimulationError(
                f"trace {self.trace.name!r} has no sessions: give it parents, or a workload turns"
            )
        return session_table(self.trace, self.outcomes, self.times, self.made_from)

    def to_arrow(self) -> pa.Table:
        """Return :attr:`requests`; :meth:`to_pandas` and :meth:`to_polars` return data frames."""
        return self.requests

    def _repr_html_(self) -> str:
        """Return the summary as HTML for notebooks, without simulating again."""
        return answers_html(self.summary(with_range=False), repr(self))

    def write_requests(self, path: str | Path) -> Path:
        """Write :attr:`requests` to a file, atomically.

        Parameters
        ----------
        path : str or Path
            Ends in .parquet or .csv; an existing file is replaced.

        Returns
        -------
        Path
            The file.

        Raises
        ------
        FastroofError
            If the suffix is another, or the file cannot be written.
        """
        path = checked_requests_path(path)
        write_table(self.requests, path)
        return path

    def series(self) -> pa.Table:
        """Return the engines' state over time, all replicas together.

        Returns
        -------
        pyarrow.Table
            At most 512 rows, for intervals of equal length except the last, in which the run ends:
            ``time_s``, the start on the trace's clock; mean ``running`` and ``waiting`` requests; the shares
            ``kv_use`` and ``busy``; ``computed_tokens_per_s`` of prompts and outputs, and
            ``output_tokens_per_s``. The length is in the metadata, ``fastroof.stretch_s``. With an autoscaler
            of one pool the shares are of replicas that serve or drain, and mean replicas follow that are
            ``starting``, ``serving`` and ``draining``.
        """
        table = series_table(self.outcomes, self.engines, self.made_from)
        if self._counts is None:
            return table
        return self._counts.with_counts(table, self.replicas, float(self.outcomes.counters["end_us"]))

    @lazy_property
    def fleet(self) -> pa.Table:
        """Replicas over time, a row each time that a number changes.

        Returns
        -------
        pyarrow.Table
            ``time_s`` on the trace's clock, and from then on the replicas that are ``starting``, ``serving``
            and ``draining``, of all pools with an autoscaler; all 0 at the end of the run.

        Raises
        ------
        SimulationError
            If no pool has an autoscaler.
        """
        if self.outcomes.lives is None:
            raise SimulationError(f"all {self.replicas:,} replicas serve from the start: no autoscaler")
        return ReplicaCounts.of_lives(self.outcomes.lives).table(self.made_from)

    def summary(
        self,
        *,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        e2e_ms: float | None = None,
        percentile: float | None = step_range.LIMIT_PERCENTILE,
        with_range: bool | None = None,
    ) -> dict[str, Any]:
        """Return the results of the whole run.

        Parameters
        ----------
        ttft_ms, tpot_ms, e2e_ms : float, optional
            Limits, ms; with any of them the results include ``goodput``.
        percentile : float or None, default 99
            Percentile over all requests that must keep the limits; None for the mean.
        with_range : bool, optional
            Whether to include ``range``, see :meth:`range`, which simulates twice more. By default it is
            computed if requests queue or there are limits, and included if the load is near saturation, one
            standard error of a step decides whether a limit holds, or that error is unknown.

        Returns
        -------
        dict
            ``ttft_ms``, ``tpot_ms``, ``itl_ms``, ``e2e_ms``, each ``{mean, p50, p90, p95, p99}``, over
            finished requests; ``itl_ms`` over all gaps between two tokens of a request. ``requests``, of
            which ``finished``, ``timed_out``, ``rejected``; ``duration_s``, from the first request to the end
            of the last step, and over it ``requests_per_s``, ``input_tokens_per_s`` and
            ``output_tokens_per_s`` of finished requests; ``arrivals_per_s``; ``steps``, of which
            ``mixed_steps``, ``prefill_steps``, ``decode_steps``; ``preemptions``; ``running``, ``waiting``
            and ``kv_use``, each ``{mean, peak}``, means over the duration; ``busy``, the share of it in which
            steps ran; ``warnings``, sentences. With draft tokens ``acceptance_length``, the mean tokens that
            a decode keeps of a step; ``itl_ms`` is then over the times between two steps, whose tokens come
            together. With a simulated prefix cache ``prefix_cache``: its ``hit_rate``, ``found_tokens`` over
            ``looked_up_tokens`` of prompts at their first admission; ``found_again_tokens``, after
            preemptions; ``evictions`` of blocks. With KV tiers ``kv_tiers``:
            shares of prompts found in the GPU and in each of ``tiers``, bytes that it sent, got and lost,
            its peak, and how long requests and steps waited for them. With sessions
            ``session_e2e_ms``, from the first arrival of a session to its last token, over those whose
            requests all finished; and ``sessions``: how many, ``finished``, ``requests_each``, and
            ``by_turn`` requests, mean tokens, ``ttft_ms`` and ``e2e_ms`` of each (the 32nd: all later ones).

            With two pools ``transfer_ms`` of requests that were handed over; and ``pools``: of ``prefill``
            and ``decode``, their ``tp``, ``replicas``, ``steps``, ``busy`` (of ranks in lockstep any rank's)
            and ``autoscaling``; shares are those of the most replicas. With an autoscaler ``autoscaling``:
            the ``rule`` and its parameters; ``replicas``, ``{mean, min, max}`` of those on GPUs; how many
            were ``started`` and ``stopped``; ``gpu_hours``; and with one pool and limits ``fixed``, what
            other fleets do with the same requests: ``replicas``, ``gpu_hours``, the ``share`` of requests
            within all limits, ``percentile`` and ``kept``, as ``at_peak`` of the most replicas of this run,
            and as ``fewest`` of the fewest that keep all limits, None if not even ``max_replicas`` do.

        Raises
        ------
        BatchError
            If a limit is not a number above 0.

        Notes
        -----
        Percentiles of requests are exact, interpolated linearly by rank as in NumPy and vLLM's benchmark.
        Those of ``itl_ms`` come from a histogram with bins by exponent and seven bits of mantissa, within 0.4
        % of the exact ones (``fastroof.simulation.requests.GAP_ERROR``).
        """
        limits = checked_limits({"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "e2e_ms": e2e_ms})
        answers = run_answers(self.trace, self.outcomes, self.times, self.engines)
        if limits:
            answers["goodput"] = self.goodput(**limits, percentile=percentile)
        if answers["steps"]:
            error = self.step_error
            relative = error.relative if error.is_known else None
            answers |= {"relative_error": relative, "basis": error.basis}
            (origin,) = decode_origins(self.plan, *self._mean_step, has_drafts=self._has_drafts)
            answers["origin"] = ORIGINS[origin]
        has_queue = answers["waiting"]["peak"] >= SHORT_QUEUE
        if with_range or (with_range is None and (has_queue or limits)):
            found = self._effect_of_error(limits, percentile)
            if with_range or found["near_saturation"] or found["flips"] or not self.step_error.is_known:
                answers["range"] = found | self._scaled_answers
        notes = run_warnings(self.trace, self.outcomes, self.times)
        duration_s = answers["duration_s"]
        notes += tier_notes(self.outcomes.tiers, duration_s)
        answers["warnings"] = [*notes, *range_warnings(answers.get("range"))]
        return answers | (
            self._of_pools() if len(self.pools) > 1 else self._of_rule(answers, limits, percentile)
        )

    def _of_pools(self) -> dict[str, Any]:
        """Return the results of two pools and their transfers."""
        sent_us = self.outcomes.transfer_us
        assert sent_us is not None
        over_us = duration_us(self.outcomes)
        each = zip(("prefill", "decode"), self._runs, strict=True)
        return {
            "transfer_ms": spread(sent_us[np.isfinite(sent_us)] / US_PER_MS),
            "pools": {name: run.answers(over_us) for name, run in each},
        }

    def _of_rule(
        self, answers: Mapping[str, Any], limits: Mapping[str, float], percentile: float | None
    ) -> dict[str, Any]:
        """Return what a rule did, and shares of the replicas that were up; empty without a rule."""
        rule, counts = self.pools[0].autoscaler, self._counts
        if rule is None or counts is None:
            return {}
        found: dict[str, Any] = {}
        up = counts.mean_up
        if not math.isnan(up):
            found["busy"] = answers["busy"] * (self.replicas / up)
            mean = answers["kv_use"]["mean"] * (self.replicas / up)
            found["kv_use"] = answers["kv_use"] | {"mean": mean}
        found |= self._runs[0].scaling()
        if limits:
            fixed = partial(self.fixed, limits=limits, percentile=percentile)
            fewest = fewest_that_keep(lambda count: fixed(count).keeps, rule.max_replicas)
            found["autoscaling"]["fixed"] = {
                "at_peak": fixed(found["autoscaling"]["replicas"]["max"])._asdict(),
                "fewest": fixed(fewest)._asdict() if fewest else None,
            }
        return found

    def fixed(
        self,
        replicas: int,
        limits: Mapping[str, float],
        percentile: float | None = step_range.LIMIT_PERCENTILE,
    ) -> FixedFleet:
        """Return what a fixed number of replicas of one pool does with the same requests."""
        pool = self.pools[0]._replace(replicas=replicas, autoscaler=None)
        if replicas not in self._fixed:
            self._fixed[replicas] = self._rerun(1.0, [pool])
        outcomes = self._fixed[replicas]
        times = RequestTimes.of(self.trace, outcomes)
        hours = duration_us(outcomes) / US_PER_S / SECONDS_PER_HOUR
        kept = step_range.limits_kept(times, limits, percentile)
        share = float(times.within(limits).mean())
        return FixedFleet(replicas, hours * pool.gpus, share, percentile, kept)

    def goodput(
        self,
        *,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        e2e_ms: float | None = None,
        percentile: float | None = step_range.LIMIT_PERCENTILE,
    ) -> dict[str, Any]:
        """Return how many requests are within every limit.

        Parameters
        ----------
        ttft_ms, tpot_ms, e2e_ms : float, optional
            Limits, ms; at least one. A request with one output token is within any ``tpot_ms``.
        percentile : float or None, default 99
            Percentile over all requests that must keep the limits; None for the mean.

        Returns
        -------
        dict
            ``limits``; ``requests`` that finished within all of them, their ``share`` of all, and their
            ``requests_per_s`` over the duration; ``percentile``; ``kept``, whether the percentile is within
            each limit; unfinished requests count as inf.

        Raises
        ------
        BatchError
            If no limit is given, one is not a number above 0, or the percentile is invalid.
        """
        limits = checked_limits({"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "e2e_ms": e2e_ms})
        if not limits:
            raise BatchError("goodput needs a limit: ttft_ms, tpot_ms or e2e_ms")
        goodput = self.times.goodput(limits, duration_us(self.outcomes))
        kept = step_range.limits_kept(self.times, limits, percentile)
        return {**goodput, "percentile": percentile, "kept": kept}

    energy = run_energy

    @property
    def energy_parts(self) -> list[EnergyPart]:
        """GPUs by plan, for :meth:`energy`, with an autoscaler while it holds them."""
        duration_s = duration_us(self.outcomes) / US_PER_S
        return [
            EnergyPart(
                run.pool.plan, run.pool.settings, run.outcomes, run.pool.engines, run.pool.gpus,
                run.gpu_s(duration_s), run.pool.drafting is not None,
            )
            for run in self._runs
        ]  # fmt: skip

    @lazy_property
    def _mean_step(self) -> tuple[float, float]:
        """Mean decodes of a step of one rank, and the mean tokens that each attends to."""
        return mean_step(self.outcomes, self.settings, self.plan.layout.dp // engines_of(self.plan))

    @property
    def _has_drafts(self) -> bool:
        return any(pool.drafting is not None for pool in self.pools)

    @lazy_property
    def step_error(self) -> StepError:
        """The standard error that all steps have in common, and its source."""
        return step_range.step_error(self.plan, *self._mean_step, has_drafts=self._has_drafts)

    def range(
        self,
        *,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        e2e_ms: float | None = None,
        percentile: float | None = step_range.LIMIT_PERCENTILE,
    ) -> dict[str, Any]:
        """Return the results with steps one standard error faster, and slower.

        Parameters
        ----------
        ttft_ms, tpot_ms, e2e_ms : float, optional
            Limits, ms.
        percentile : float or None, default 99
            Percentile over all requests that must keep the limits; None for the mean.

        Returns
        -------
        dict
            ``relative_error`` of a step, None if unknown, and its ``basis``; ``amplification``, the log
            change of the 99th percentile of TTFT or E2E, whichever is larger, over that of steps;
            ``near_saturation``, whether that is above 2, which only queues cause, or the queue still grows at
            the end of the arrivals with the slower steps; ``flips``, limits that hold on one side only; and,
            if the error is known, ``[fast, slow]`` of ``ttft_ms``, ``tpot_ms``, ``itl_ms``, ``e2e_ms``,
            ``requests_per_s``, ``output_tokens_per_s``, ``preemptions`` and ``timed_out``.

        Raises
        ------
        BatchError
            If a limit is not a number above 0, or the percentile is invalid.
        """
        limits = checked_limits({"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "e2e_ms": e2e_ms})
        return self._effect_of_error(limits, percentile) | self._scaled_answers

    def _effect_of_error(self, limits: Mapping[str, float], percentile: float | None) -> dict[str, Any]:
        """Return the part of :meth:`range` that says whether the error of steps matters."""
        error = self.step_error
        found: dict[str, Any] = {
            "relative_error": error.relative if error.is_known else None,
            "basis": error.basis,
            "near_saturation": False,
            "amplification": None,
            "flips": [],
        }
        if not error.is_known:
            return found
        (_, fast), (slowed, slow) = self.scaled_runs
        amplified = step_range.amplification(fast, slow, error.relative)
        found["amplification"] = None if math.isnan(amplified) else amplified
        growth = queue_growth(self.trace, slowed)
        is_growing = growth is not None and growth.is_growing
        found["near_saturation"] = is_growing or amplified > step_range.AMPLIFIED
        found["flips"] = step_range.flipped_limits(fast, slow, limits, percentile)
        return found

    @property
    def _scaled_answers(self) -> dict[str, Any]:
        """The results of both runs of :meth:`range`; none if the error is unknown."""
        if not self.step_error.is_known:
            return {}
        return step_range.paired(*(run_answers(self.trace, *run, self.engines) for run in self.scaled_runs))

    @lazy_property
    def scaled_runs(self) -> list[tuple[Outcomes, RequestTimes]]:
        """The same run with steps one standard error faster, and slower; that error must be known."""

        def timed(scale: float) -> tuple[Outcomes, RequestTimes]:
            outcomes = self._rerun(scale)
            return outcomes, RequestTimes.of(self.trace, outcomes)

        # each thread sees the stop flag of this call
        contexts = copy_context(), copy_context()
        with ThreadPoolExecutor(2) as threads:
            scales = self.step_error.time_scales
            return list(threads.map(lambda scale, context: context.run(timed, scale), scales, contexts))

    def _run_engines(self, time_scale: float, pools: Sequence[EnginePool] | None = None) -> Outcomes:
        from fastroof.simulation.fleet_run import run_fleet

        return run_fleet(pools or self.pools, self.trace, link=self.link, time_scale=time_scale)


def _named(prefix: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Return values as text by the names of a table's metadata."""
    return {f"fastroof.{prefix}{name}": str(value) for name, value in values.items()}
