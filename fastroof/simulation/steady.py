"""Runs long enough for a steady state: more draws or repeats of a trace, which requests count, and chance.

The first requests find an empty engine and the last ones an emptying one, and percentiles of a short run are
those of few congested moments: both make a capacity too high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from fastroof.simulation.session_runs import mean_rate, prompts_of_laps, repeated_sessions, session_starts
from fastroof.traces.trace import Trace
from fastroof.traces.workload import Workload

if TYPE_CHECKING:
    from fastroof.arrays import Floats, Longs
    from fastroof.simulation.engine import Outcomes

LEAST_REQUESTS: Final = 20_000
"""Requests that count, at least: a run of so many takes milliseconds."""

MOST_REQUESTS: Final = 4 * LEAST_REQUESTS
"""Requests that count, at most, where only chance asks for more."""

TURNOVERS: Final = 50
"""Requests that count for each one in the system, at least."""

MOST_TURNED_OVER: Final = 2**20
"""Requests that count, at most, for any number in the system."""

MOST_STEPS: Final = 2**21
"""Steps of a run, at most, beyond the requests given: about 0.1 s."""

RAMP: Final = 1 / 4
"""Requests before those that count, as a share of them: 12 for each one in the system."""

DRAIN: Final = 1 / 16
"""Requests after those that count, as a share of them."""

PIECES: Final = 16
"""Pieces of a run that are compared for the sampling error."""


class Run(NamedTuple):
    """A trace to simulate, its rate, and which of its requests count.

    ``per_s`` is the rate that a workload was drawn at, else the mean of the trace, requests/s. ``cycle`` is
    the number of counted requests after which they repeat; all of them if they do not. With ``session``, the
    session of each request, ``counted`` and ``cycle`` are of sessions in order of starts.
    """

    trace: Trace
    per_s: float
    counted: slice
    cycle: int
    session: Longs | None = None

    @classmethod
    def whole(cls, trace: Trace, drawn_per_s: float | None = None) -> Run:
        """Return a run whose requests all count, of a trace or of requests, or sessions, drawn at a rate."""
        per_s = mean_rate(trace) if drawn_per_s is None else drawn_per_s
        if not trace.has_parents:
            return cls(trace, per_s, slice(0, len(trace)), len(trace))
        starts = session_starts(trace)
        if drawn_per_s is not None:
            per_s = drawn_per_s * (len(trace) / starts.sessions)
        return cls(trace, per_s, slice(0, starts.sessions), starts.sessions, starts.session)

    @property
    def requests(self) -> int:
        """Number of requests that count; of sessions, as many as the counted ones have."""
        first, stop = self.counted.start, self.counted.stop
        if self.session is None:
            return int(stop - first)
        return int(np.count_nonzero((self.session >= first) & (self.session < stop)))

    @property
    def is_repeated(self) -> bool:
        """Whether the counted requests, or sessions, repeat."""
        return bool(self.cycle < self.counted.stop - self.counted.start)

    def places(self, outcomes: Outcomes) -> slice | Longs:
        """Return the requests that count; with sessions, those that come while the counted ones start."""
        if self.session is None:
            return self.counted
        arrival_us, starts_us = outcomes.arrival_us, self._starts_us(outcomes)
        begin_us, end_us = starts_us[self.counted.start], starts_us[self.counted.stop]
        if not begin_us < end_us:
            # all start at once
            begin_us, end_us = -math.inf, math.inf
        inside = np.flatnonzero((arrival_us >= begin_us) & (arrival_us < end_us))
        return inside[np.argsort(arrival_us[inside], kind="stable")]

    def _starts_us(self, outcomes: Outcomes) -> Floats:
        """Return when sessions start, and inf after the last."""
        assert self.session is not None
        starts_us = np.full(int(self.session.max()) + 2, math.inf)
        np.minimum.at(starts_us, self.session, outcomes.arrival_us)
        return starts_us

    def open_requests(self, outcomes: Outcomes) -> float:
        """Return the requests of sessions that are open at once in a steady state: starts/s x their time."""
        assert self.session is not None
        starts_us = self._starts_us(outcomes)[:-1]
        ends_us = starts_us.copy()
        # a request that timed out has no last token
        np.fmax.at(ends_us, self.session, outcomes.last_us)
        each = len(self.session) / len(starts_us)
        start_us = starts_us[self.counted]
        passed_us = float(start_us[-1] - start_us[0])
        if not passed_us:
            return each * len(start_us)
        return each * float((ends_us - starts_us)[self.counted].mean()) * (len(start_us) - 1) / passed_us

    def pieces(self, places: slice | Longs) -> list[Longs]:
        """Return the counted places of the requests in each piece; repeats of a request are in one piece."""
        some: Longs = np.arange(places.start, places.stop) if isinstance(places, slice) else places
        if self.session is None or self.is_repeated:
            of_cycle = some if self.session is None else self.session[some]
            piece = (of_cycle - self.counted.start) % self.cycle * PIECES // self.cycle
        else:
            piece = np.arange(len(some)) * PIECES // len(some)
        return [some[piece == one] for one in range(PIECES)]


def drawn_run(traffic: Trace | Workload, rate: float | None = None) -> Run:
    """Return a run whose requests all count: a trace, or a workload at a rate, by default its own."""
    if isinstance(traffic, Trace):
        return Run.whole(traffic)
    if traffic.is_closed:
        return Run.whole(traffic.trace())
    return Run.whole(traffic.trace(rate), traffic.requests_per_s if rate is None else rate)


def steady_run(traffic: Trace | Workload, requests: int, rate: float | None = None) -> Run:
    """Return a run in which at least ``requests`` count, after a ramp and before a drain.

    A workload is drawn; a trace, or a workload whose rate changes over the run, is repeated as a whole. Each
    repeat has separate hash_ids: a prefix cache finds in it what it finds in the trace. Sessions are drawn or
    repeated as a whole, so that the counted ones have about as many requests.
    """
    if isinstance(traffic, Workload) and traffic.has_one_rate:
        before, after = math.ceil(RAMP * requests), math.ceil(DRAIN * requests)
        drawn = drawn_run(replace(traffic, requests=before + requests + after), rate)
        if drawn.session is not None:
            return _sessions_run(drawn)
        return drawn._replace(counted=slice(before, before + requests), cycle=requests)
    run = drawn_run(traffic, rate)
    trace = run.trace
    if trace.has_parents:
        return _repeated_run(run, requests)
    cycle = len(trace)
    requests = -(-requests // cycle) * cycle
    before, after = math.ceil(RAMP * requests), math.ceil(DRAIN * requests)
    lap, place = np.divmod(np.arange(-before, requests + after), cycle)
    arrival_s = lap * (cycle / mean_rate(trace)) + trace.arrival_s[place]
    # laps overlap if the given period is short
    arrival_s -= arrival_s.min()
    repeated = Trace(arrival_s, **prompts_of_laps(trace, lap, place), name=trace.name)
    return Run(repeated, run.per_s, slice(before, before + requests), cycle)


def _sessions_run(run: Run) -> Run:
    """Return a run of drawn sessions, of which those between ramp and drain count."""
    sessions = run.cycle
    all_parts = 1.0 + RAMP + DRAIN
    before, after = (math.ceil(part * sessions / all_parts) for part in (RAMP, DRAIN))
    if before + after >= sessions:
        return run
    return run._replace(counted=slice(before, sessions - after), cycle=sessions - before - after)


def _repeated_run(run: Run, requests: int) -> Run:
    """Return a run of a trace's sessions, repeated as a whole."""
    if not mean_rate(run.trace) < math.inf:
        return run
    cycle = run.cycle
    sessions = -(-requests // len(run.trace)) * cycle
    before, after = math.ceil(RAMP * sessions), math.ceil(DRAIN * sessions)
    repeated = Run.whole(repeated_sessions(run.trace, -before, sessions + after))
    return repeated._replace(per_s=run.per_s, counted=slice(before, before + sessions), cycle=cycle)


def enough_requests(requests: int, in_system: float, affordable: int) -> int:
    """Return how many requests should count for a steady state with some number in the system."""
    turned_over = min(math.ceil(TURNOVERS * in_system), MOST_TURNED_OVER)
    return max(requests, _doubled(max(LEAST_REQUESTS, turned_over), affordable))


def _doubled(wanted: int, affordable: int) -> int:
    """Return the least number by doubling or halving that is enough, or the largest affordable one.

    Runs of the same size have the same draws, whatever number was given.
    """
    doublings = math.ceil(math.log2(wanted / LEAST_REQUESTS))
    if affordable < LEAST_REQUESTS * 2**doublings:
        doublings = math.floor(math.log2(max(affordable, 1) / LEAST_REQUESTS))
    return max(int(LEAST_REQUESTS * 2.0**doublings), 1)


def affordable_requests(run: Run, decodes: float, max_num_batched_tokens: int) -> int:
    """Return with how many requests a run has about as many steps as it may."""
    outputs, prompts = float(run.trace.output_tokens.mean()), float(run.trace.input_tokens.mean())
    steps = outputs / max(decodes, 1.0) + prompts / max_num_batched_tokens
    return int(MOST_STEPS / steps)


def more_requests(requests: int, sampling_error: float | None, tolerance: float, affordable: int) -> int:
    """Return how many requests should count for a sampling error within the tolerance."""
    if sampling_error is None or sampling_error <= tolerance or requests >= MOST_REQUESTS:
        return requests
    wanted = requests * (sampling_error / tolerance) ** 2
    return max(requests, _doubled(math.ceil(min(wanted, MOST_REQUESTS)), affordable))


def error_of_mean(values: Sequence[float] | Floats) -> float | None:
    """Return the standard error of the mean of equal pieces; None if any is unknown."""
    measured = np.asarray(values, float)
    if len(measured) < 2 or not np.isfinite(measured).all():
        return None
    return float(measured.std(ddof=1)) / math.sqrt(len(measured))
