"""A simulated run and its answers: percentiles, throughput, goodput, series, a step's error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.arrow import ArrowRows
from fastroof.errors import BatchError, SimulationError
from fastroof.lazy_property import lazy_property
from fastroof.simulation import step_range
from fastroof.simulation.answers import answers_html, duration_us, run_answers
from fastroof.simulation.replicas import engines_of
from fastroof.simulation.requests import (
    RequestTimes,
    checked_limits,
    checked_requests_path,
    mean_step,
    request_table,
    series_table,
    write_table,
)
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    import pyarrow as pa

    from fastroof.plan import StepPlan
    from fastroof.simulation.engine import Outcomes
    from fastroof.simulation.settings import EngineSettings
    from fastroof.simulation.step_range import StepError
    from fastroof.simulation.trace import Trace


FEW_REQUESTS: Final = 200
"""Of fewer, less than two are beyond the 99th percentile."""

GROWTH_DEVIATIONS: Final = 3.0
GROWTH_SHARE: Final = 0.05
MANY_PREEMPTED: Final = 0.05


class QueueGrowth(NamedTuple):
    """Requests without their first token, half-way through the arrivals and at their end."""

    half_way: int
    at_end: int
    arrived: int
    served_per_s: float
    arrived_per_s: float

    @property
    def is_growing(self) -> bool:
        """Whether the queue grew by more than arrivals at random make it, and by a twentieth of them."""
        grown = self.at_end - self.half_way
        return bool(grown > max(GROWTH_DEVIATIONS * self.arrived**0.5, GROWTH_SHARE * self.arrived))


def queue_growth(trace: Trace, outcomes: Outcomes) -> QueueGrowth | None:
    """Describe queue growth over the second half of the arrivals; None for a closed loop."""
    arrival_us, first_us = outcomes.arrival_us, outcomes.first_us
    if trace.is_closed or len(arrival_us) < 2:
        return None
    start_us, end_us = float(arrival_us[0]), float(arrival_us[-1])
    middle_us = (start_us + end_us) / 2.0
    seconds = (end_us - middle_us) / US_PER_S
    if seconds <= 0.0:
        return None
    # one that never had its first token left the queue when it timed out, or was never in it
    waited = np.isfinite(first_us)
    arrivals, firsts = arrival_us[waited], first_us[waited]
    if not len(arrivals):
        return None

    def upto(times: Floats, us: float) -> int:
        return int(np.count_nonzero(times <= us))

    arrived = [upto(arrivals, us) for us in (middle_us, end_us)]
    served = [upto(firsts, us) for us in (middle_us, end_us)]
    return QueueGrowth(
        arrived[0] - served[0],
        arrived[1] - served[1],
        arrived[1] - arrived[0],
        (served[1] - served[0]) / seconds,
        (arrived[1] - arrived[0]) / seconds,
    )


def run_notes(trace: Trace, outcomes: Outcomes, times: RequestTimes) -> list[str]:
    """Say what the numbers of a simulation do not say of themselves."""
    count, finished = len(times.is_finished), int(times.is_finished.sum())
    status = np.bincount(np.asarray(outcomes.status), minlength=3).tolist()
    notes = []
    if status[2]:
        notes.append(
            f"{status[2]:,} of {count:,} requests were rejected: prompt and output together are longer than "
            "the KV cache or the plan holds; they are in no percentile"
        )
    if status[1]:
        notes.append(
            f"{status[1]:,} of {count:,} requests timed out; they are in no percentile, and break every limit"
        )
    growth = queue_growth(trace, outcomes)
    if growth is not None and growth.is_growing:
        notes.append(
            "the load is above what is served: in the second half of the arrivals "
            f"{growth.arrived_per_s:,.3g} requests/s came and {growth.served_per_s:,.3g} had their first "
            f"token, {growth.half_way:,} waited half-way and {growth.at_end:,} at the end; a longer trace "
            "would have longer times"
        )
    preempted = int(np.count_nonzero(outcomes.preemptions))
    if preempted > MANY_PREEMPTED * count:
        notes.append(
            f"{preempted:,} of {count:,} requests lost their KV cache and computed it again: "
            "memory is what limits this load"
        )
    if 0 < finished < FEW_REQUESTS:
        notes.append(f"of {finished:,} requests the 99th percentile is that of the slowest one or two")
    return notes


def range_notes(found: Mapping[str, Any] | None) -> list[str]:
    """Say where the error of a step decides an answer, or that it is not known; nothing without a range."""
    if found is None:
        return []
    if found["relative_error"] is None:
        return [f"how far off the time of a step may be is {found['basis']}"]
    percent = found["relative_error"] * 100.0
    notes = []
    if found["near_saturation"]:
        low, high = found["ttft_ms"]["p99"]
        least, most = found["e2e_ms"]["p99"]
        notes.append(
            f"near saturation or beyond: steps {percent:.1f} % faster or slower, one standard error, make "
            f"the 99th percentile of TTFT {low:,.0f} or {high:,.0f} ms, that of E2E {least:,.0f} or "
            f"{most:,.0f} ms"
        )
    notes.extend(
        f"whether the 99th percentile of {_LIMIT_WORDS[name]} is within its limit is open: steps "
        f"{percent:.1f} % faster and slower, one standard error, differ in it"
        for name in found["flips"]
    )
    return notes


_LIMIT_WORDS: Final = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E latency"}


SHORT_QUEUE: Final = 2
"""Where never so many requests waited, no load is near saturation."""


class Simulation(ArrowRows):
    """What became of a trace's requests on an engine.

    Parameters
    ----------
    plan : StepPlan
        What timed the steps.
    trace : Trace
        The requests.
    settings : EngineSettings
        How the engine scheduled.
    outcomes : Outcomes
        What became of each request, in the trace's sorted order.
    replicas : int, default 1
        Engines that served them.
    rerun : callable, optional
        Simulates the same again with all steps multiplied by a number, and returns its outcomes; by default
        one engine.

    Raises
    ------
    SimulationError
        If the simulation has not come to its end: a part of a run is no answer.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.simulation.engine import run_engine
    >>> from fastroof.simulation.settings import EngineSettings
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"), runtime="vllm")
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
                f"{unfinished:,} of {len(self):,} requests were still on their way when the simulation "
                "ended: a part of a run is no answer"
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
        """Engines that step by themselves: replicas, or their ranks where these wait for nobody."""
        return engines_of(self.plan) * self.replicas

    @property
    def gpus(self) -> int:
        """GPUs of all engines."""
        return int(self.plan.layout.world_size) * self.replicas

    @property
    def made_from(self) -> dict[str, str]:
        """What the answers were made from: the plan, the trace, and the engine's settings."""
        said = {f"fastroof.{name}": str(value) for name, value in vars(self.settings).items()}
        own = {"fastroof.trace": self.trace.name, "fastroof.replicas": str(self.replicas)}
        return {**self.plan.made_from, **said, **own}

    # -- requests and time -----------------------------------------------------------------------

    @lazy_property
    def requests(self) -> pa.Table:
        """A row a request, in the order of the trace's file.

        Returns
        -------
        pyarrow.Table
            ``arrival_s``, ``input_tokens``, ``output_tokens``, ``ttft_ms``, ``tpot_ms``, ``e2e_ms`` (null
            where they never came), ``preemptions``, ``replica``, ``status``: finished, timed_out or
            rejected; ``cached_tokens``, found when it was first admitted, where a prefix cache was simulated.
            Units and meanings are metadata of its fields; the table's metadata say what it was
            made from.
        """
        return request_table(self.trace, self.outcomes, self.times, self.made_from)

    def to_arrow(self) -> pa.Table:
        """Return :attr:`requests`; :meth:`to_pandas` and :meth:`to_polars` have them as frames."""
        return self.requests

    def _repr_html_(self) -> str:
        """Return the summary as a notebook shows it, without simulating again."""
        return answers_html(self.summary(with_range=False), repr(self))

    def write_requests(self, path: str | Path) -> Path:
        """Write :attr:`requests` to a file, whole or not at all.

        Parameters
        ----------
        path : str or Path
            Ends in .parquet or .csv; a file of that name is replaced.

        Returns
        -------
        Path
            The file.

        Raises
        ------
        FastroofError
            If it ends otherwise, or cannot be written.
        """
        path = checked_requests_path(path)
        write_table(self.requests, path)
        return path

    def series(self) -> pa.Table:
        """Return how the engines did over time, all replicas together.

        Returns
        -------
        pyarrow.Table
            At most 512 rows, stretches of equal length but for the last, which the run ends in: ``time_s``
            where one begins, on the trace's clock; means of ``running`` and ``waiting`` requests, of
            ``kv_use`` and ``busy``, shares; ``computed_tokens_per_s``, of prompts and answers, and
            ``output_tokens_per_s``. The length is in its metadata, ``fastroof.stretch_s``.
        """
        return series_table(self.outcomes, self.engines, self.made_from)

    # -- answers ---------------------------------------------------------------------------------

    def summary(
        self,
        *,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        e2e_ms: float | None = None,
        with_range: bool | None = None,
    ) -> dict[str, Any]:
        """Return the answers of the whole run.

        Parameters
        ----------
        ttft_ms, tpot_ms, e2e_ms : float, optional
            Limits of a request, ms: with any of them the answers have ``goodput``.
        with_range : bool, optional
            Whether they have ``range``: see :meth:`range`, which simulates twice more. By default where the
            load is near saturation, or where one standard error of a step decides whether a limit is kept,
            or where that error is not known; it is looked for where requests queue or there are limits.

        Returns
        -------
        dict
            ``ttft_ms``, ``tpot_ms``, ``itl_ms``, ``e2e_ms``, each ``{mean, p50, p90, p95, p99}``, over the
            requests that finished; ``itl_ms`` over all gaps between two tokens of a request.
            ``requests``, of which ``finished``, ``timed_out``, ``rejected``; ``duration_s``, from the first
            request to the end of the last step, and by it ``requests_per_s``, ``input_tokens_per_s`` and
            ``output_tokens_per_s`` of the requests that finished; ``arrivals_per_s``; ``steps``, of which
            ``mixed_steps``, ``prefill_steps``, ``decode_steps``; ``preemptions``; ``running``, ``waiting``
            and ``kv_use``, each ``{mean, peak}``, means over the duration; ``busy``, the share of it in
            which steps ran; ``warnings``, sentences. Where a prefix cache was simulated, ``prefix_cache``:
            its ``hit_rate``, ``found_tokens`` over ``looked_up_tokens`` of prompts when they were first
            admitted; ``found_again_tokens``, by requests after a preemption; ``evictions``, of blocks.

        Raises
        ------
        BatchError
            If a limit is no number above 0.

        Notes
        -----
        Percentiles of requests are exact, between two requests linearly by rank, as numpy and vLLM's
        benchmark have them. Those of ``itl_ms`` are of a histogram with bins by exponent and seven bits of
        mantissa: within 0.4 % of the exact ones (``fastroof.simulation.requests.GAP_ERROR``).
        """
        limits = checked_limits({"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "e2e_ms": e2e_ms})
        answers = run_answers(self.trace, self.outcomes, self.times, self.engines)
        if limits:
            answers["goodput"] = self.goodput(**limits)
        has_queue = answers["waiting"]["peak"] >= SHORT_QUEUE
        if with_range or (with_range is None and (has_queue or limits)):
            found = self.range(**limits)
            if with_range or found["near_saturation"] or found["flips"] or not self.step_error.is_known:
                answers["range"] = found
        notes = run_notes(self.trace, self.outcomes, self.times)
        answers["warnings"] = [*notes, *range_notes(answers.get("range"))]
        return answers

    def goodput(
        self, *, ttft_ms: float | None = None, tpot_ms: float | None = None, e2e_ms: float | None = None
    ) -> dict[str, Any]:
        """Return how many requests kept every limit.

        Parameters
        ----------
        ttft_ms, tpot_ms, e2e_ms : float, optional
            Limits, ms; at least one. A request of one output token keeps any ``tpot_ms``.

        Returns
        -------
        dict
            ``limits``; ``requests`` that finished and kept all of them, their ``share`` of all, and
            ``requests_per_s`` of them over the duration; ``p99_within``, whether the 99th percentile over
            all requests is within each limit: one that did not finish took for ever.

        Raises
        ------
        BatchError
            If no limit is given, or one is no number above 0.
        """
        limits = checked_limits({"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "e2e_ms": e2e_ms})
        if not limits:
            raise BatchError("goodput needs a limit: ttft_ms, tpot_ms or e2e_ms")
        kept = self.times.goodput(limits, duration_us(self.outcomes))
        return {**kept, "p99_within": step_range.limits_kept(self.times, limits)}

    # -- what a step's error means ---------------------------------------------------------------

    @lazy_property
    def step_error(self) -> StepError:
        """How far off all steps together may be, one standard error, and where that is from."""
        ranks = self.plan.layout.dp // engines_of(self.plan)
        return step_range.step_error(self.plan, *mean_step(self.outcomes, self.settings, ranks))

    def range(
        self, *, ttft_ms: float | None = None, tpot_ms: float | None = None, e2e_ms: float | None = None
    ) -> dict[str, Any]:
        """Return the answers on steps that are one standard error faster, and slower.

        Parameters
        ----------
        ttft_ms, tpot_ms, e2e_ms : float, optional
            Limits of the 99th percentile, ms.

        Returns
        -------
        dict
            ``relative_error`` of a step, None where it is not known, and its ``basis``; ``amplification``,
            how much the 99th percentile of TTFT, or of E2E where that is more, changes over what steps
            change, in ln; ``near_saturation``,
            whether that is above 2, to which queues alone bring it, or the queue grows to the end of the
            arrivals on the slower steps; ``flips``, limits that are kept on one side and not on the
            other; and, where the error is known, ``[fast, slow]`` of each number of
            ``ttft_ms``, ``tpot_ms``, ``itl_ms``, ``e2e_ms``, ``requests_per_s``, ``output_tokens_per_s``,
            ``preemptions`` and ``timed_out``.

        Raises
        ------
        BatchError
            If a limit is no number above 0.
        """
        limits = checked_limits({"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "e2e_ms": e2e_ms})
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
        runs = self.scaled_runs
        fast, slow = (RequestTimes.of(self.trace, run) for run in runs)
        amplified = step_range.amplification(fast, slow, error.relative)
        found["amplification"] = None if math.isnan(amplified) else amplified
        growth = queue_growth(self.trace, runs[1])
        is_growing = growth is not None and growth.is_growing
        found["near_saturation"] = is_growing or amplified > step_range.AMPLIFIED
        found["flips"] = step_range.flipped_limits(fast, slow, limits)
        answers = (
            run_answers(self.trace, run, times, self.engines)
            for run, times in zip(runs, (fast, slow), strict=True)
        )
        return found | step_range.paired(*answers)

    @lazy_property
    def scaled_runs(self) -> tuple[Outcomes, Outcomes]:
        """The same run on steps one standard error faster, and slower; that error must be known."""
        with ThreadPoolExecutor(2) as threads:
            fast, slow = threads.map(self._rerun or self._run_engine, self.step_error.time_scales)
        return fast, slow

    def _run_engine(self, time_scale: float) -> Outcomes:
        from fastroof.simulation.engine import run_engine

        return run_engine(self.plan, self.trace, self.settings, time_scale=time_scale)
