"""A simulated run and its results: percentiles, throughput, goodput, series, the effect of step errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.arrow import ArrowRows
from fastroof.caching import lazy_property
from fastroof.errors import BatchError, SimulationError
from fastroof.simulation import step_range
from fastroof.simulation.answers import answers_html, duration_us, run_answers
from fastroof.simulation.energy import EnergyPart, run_energy
from fastroof.simulation.kv_tiers import tier_notes
from fastroof.simulation.pools import engines_of
from fastroof.simulation.requests import (
    RequestTimes,
    checked_limits,
    checked_requests_path,
    mean_step,
    request_table,
    series_table,
    write_table,
)
from fastroof.simulation.run_warnings import queue_growth, range_warnings, run_warnings
from fastroof.simulation.session_answers import session_table
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    import pyarrow as pa

    from fastroof.plan import StepPlan
    from fastroof.simulation.engine import Outcomes
    from fastroof.simulation.settings import EngineSettings
    from fastroof.simulation.step_range import StepError
    from fastroof.traces.trace import Trace


SHORT_QUEUE: Final = 2
"""If fewer requests ever wait, the load is not near saturation."""


class Simulation(ArrowRows):
    """The results of a simulation.

    Parameters
    ----------
    plan : StepPlan
        Timed the steps.
    trace : Trace
        The requests.
    settings : EngineSettings
        Settings of the engines.
    outcomes : Outcomes
        The outcome of each request, in the trace's sorted order.
    replicas : int, default 1
        Number of engines.
    rerun : callable, optional
        Simulates the trace again with all steps multiplied by a factor and returns the outcomes; by default
        with one engine.

    Raises
    ------
    SimulationError
        If the simulation was not run to its end.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.simulation.fleet_run import run_engine
    >>> from fastroof.simulation.settings import EngineSettings
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    >>> trace = fastroof.Trace([0.0, 0.1, 0.2], [1000, 2000, 500], [100, 50, 1])
    >>> settings = EngineSettings.of_plan(plan)
    >>> sim = Simulation(plan, trace, settings, run_engine(plan, trace, settings))
    >>> sim.requests["status"].to_pylist()
    ['finished', 'finished', 'finished']
    >>> sim.summary()["tpot_ms"]["p50"] < 20.0
    True
    """

    def __init__(
        self,
        plan: StepPlan,
        trace: Trace,
        settings: EngineSettings,
        outcomes: Outcomes,
        *,
        replicas: int = 1,
        rerun: Callable[[float], Outcomes] | None = None,
    ) -> None:
        self.plan = plan
        self.trace = trace
        self.settings = settings
        self.outcomes = outcomes
        self.replicas = replicas
        self._rerun = rerun
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
        return engines_of(self.plan) * self.replicas

    @property
    def gpus(self) -> int:
        """GPUs of all engines."""
        return int(self.plan.layout.world_size) * self.replicas

    @property
    def made_from(self) -> dict[str, str]:
        """The inputs of the results: plan, trace and settings, by name."""
        settings = {f"fastroof.{name}": str(value) for name, value in vars(self.settings).items()}
        facts = {"fastroof.trace": self.trace.name, "fastroof.replicas": str(self.replicas)}
        return {**self.plan.made_from, **settings, **facts}

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
            admission, of which ``tokens_from_NAME`` in each KV tier; with sessions ``session`` and ``turn``.
            Fields have units and meanings as metadata, the table its inputs.
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
            ``output_tokens_per_s``. The length is in the metadata, ``fastroof.stretch_s``.
        """
        return series_table(self.outcomes, self.engines, self.made_from)

    def summary(
        self,
        *,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        e2e_ms: float | None = None,
        with_range: bool | None = None,
    ) -> dict[str, Any]:
        """Return the results of the whole run.

        Parameters
        ----------
        ttft_ms, tpot_ms, e2e_ms : float, optional
            Limits of each request, ms; with any of them the results include ``goodput``.
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
            steps ran; ``warnings``, sentences. With a simulated prefix cache ``prefix_cache``: its
            ``hit_rate``, ``found_tokens`` over ``looked_up_tokens`` of prompts at their first admission;
            ``found_again_tokens``, after preemptions; ``evictions`` of blocks. With KV tiers ``kv_tiers``:
            shares of prompts found in the GPU and in each of ``tiers``, bytes that it sent, got and lost,
            its peak, and how long requests and steps waited for them. With sessions
            ``session_e2e_ms``, from the first arrival of a session to its last token, over those whose
            requests all finished; and ``sessions``: how many, ``finished``, ``requests_each``, and
            ``by_turn`` requests, mean tokens, ``ttft_ms`` and ``e2e_ms`` of each (the 32nd: all later ones).

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
            answers["goodput"] = self.goodput(**limits)
        has_queue = answers["waiting"]["peak"] >= SHORT_QUEUE
        if with_range or (with_range is None and (has_queue or limits)):
            found = self._effect_of_error(limits)
            if with_range or found["near_saturation"] or found["flips"] or not self.step_error.is_known:
                answers["range"] = found | self._scaled_answers
        notes = run_warnings(self.trace, self.outcomes, self.times)
        duration_s = answers["duration_s"]
        notes += tier_notes(self.outcomes.tiers, duration_s)
        answers["warnings"] = [*notes, *range_warnings(answers.get("range"))]
        return answers

    def goodput(
        self, *, ttft_ms: float | None = None, tpot_ms: float | None = None, e2e_ms: float | None = None
    ) -> dict[str, Any]:
        """Return how many requests are within every limit.

        Parameters
        ----------
        ttft_ms, tpot_ms, e2e_ms : float, optional
            Limits, ms; at least one. A request with one output token is within any ``tpot_ms``.

        Returns
        -------
        dict
            ``limits``; ``requests`` that finished within all of them, their ``share`` of all, and their
            ``requests_per_s`` over the duration; ``p99_within``, whether the 99th percentile over all
            requests is within each limit; unfinished ones count as inf.

        Raises
        ------
        BatchError
            If no limit is given, or one is not a number above 0.
        """
        limits = checked_limits({"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "e2e_ms": e2e_ms})
        if not limits:
            raise BatchError("goodput needs a limit: ttft_ms, tpot_ms or e2e_ms")
        goodput = self.times.goodput(limits, duration_us(self.outcomes))
        return {**goodput, "p99_within": step_range.limits_kept(self.times, limits)}

    energy = run_energy

    @property
    def energy_parts(self) -> list[EnergyPart]:
        """GPUs by plan, for :meth:`energy`."""
        gpu_s = duration_us(self.outcomes) / US_PER_S * self.gpus
        return [EnergyPart(self.plan, self.settings, self.outcomes, self.engines, self.gpus, gpu_s)]

    @lazy_property
    def step_error(self) -> StepError:
        """The standard error that all steps have in common, and its source."""
        ranks = self.plan.layout.dp // engines_of(self.plan)
        return step_range.step_error(self.plan, *mean_step(self.outcomes, self.settings, ranks))

    def range(
        self, *, ttft_ms: float | None = None, tpot_ms: float | None = None, e2e_ms: float | None = None
    ) -> dict[str, Any]:
        """Return the results with steps one standard error faster, and slower.

        Parameters
        ----------
        ttft_ms, tpot_ms, e2e_ms : float, optional
            Limits of the 99th percentile, ms.

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
            If a limit is not a number above 0.
        """
        limits = checked_limits({"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "e2e_ms": e2e_ms})
        return self._effect_of_error(limits) | self._scaled_answers

    def _effect_of_error(self, limits: Mapping[str, float]) -> dict[str, Any]:
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
        found["flips"] = step_range.flipped_limits(fast, slow, limits)
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
        run = self._rerun or self._run_engine

        def timed(scale: float) -> tuple[Outcomes, RequestTimes]:
            outcomes = run(scale)
            return outcomes, RequestTimes.of(self.trace, outcomes)

        # each thread sees the stop flag of this call
        contexts = copy_context(), copy_context()
        with ThreadPoolExecutor(2) as threads:
            scales = self.step_error.time_scales
            return list(threads.map(lambda scale, context: context.run(timed, scale), scales, contexts))

    def _run_engine(self, time_scale: float) -> Outcomes:
        from fastroof.simulation.fleet_run import run_engine

        return run_engine(self.plan, self.trace, self.settings, time_scale=time_scale)
