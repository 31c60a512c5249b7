"""Sessions at other rates and repeated, for capacities: their starts are scaled, their delays are not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.checks import is_number, shown
from fastroof.errors import TraceError
from fastroof.traces.trace import Trace
from fastroof.traces.trace_checks import ids_at
from fastroof.traces.trace_sessions import only_follow, places_of

if TYPE_CHECKING:
    from fastroof.simulation.engine import Outcomes


class Starts(NamedTuple):
    """The session of each request, numbered by their first arrivals, and these, s."""

    session: Longs
    start_s: Floats

    @property
    def sessions(self) -> int:
        """Number of sessions."""
        return len(self.start_s)


def session_starts(trace: Trace) -> Starts:
    """Return the sessions of a trace by their starts."""
    assert trace.session is not None
    _, first, session = np.unique(trace.session, return_index=True, return_inverse=True)
    place = np.empty_like(first)
    place[np.argsort(first)] = np.arange(len(first))
    return Starts(place[session], trace.arrival_s[np.sort(first)])


def requests_per_session(trace: Trace) -> float | None:
    """Return the mean number of requests of a session; None without sessions."""
    return len(trace) / session_starts(trace).sessions if trace.has_parents else None


def mean_rate(trace: Trace) -> float:
    """Return the requests/s of a trace: of sessions, their starts/s times the requests of each.

    Where a trace is repeated, it is after ``len(trace) / mean_rate(trace)`` seconds.
    """
    if not trace.has_parents or trace.period_s is not None:
        return trace.requests_per_s
    start_s = session_starts(trace).start_s
    duration_s = float(start_s[-1] - start_s[0])
    return (1.0 - 1.0 / len(start_s)) * len(trace) / duration_s if duration_s else math.inf


def at_load(trace: Trace, rate: float | None = None, clients: int | None = None) -> Trace:
    """Return a trace at a rate, of sessions if it has some, from clients of a closed loop, or unchanged."""
    if rate is not None and clients is not None:
        raise TraceError(f"give a rate or clients, got {shown(rate)} and {shown(clients)}")
    if clients is not None:
        return trace.by_clients(clients)
    if rate is None:
        return trace
    if not is_number(rate) or rate <= 0:
        raise TraceError(f"rate must be requests/s, or sessions/s, above 0, got {shown(rate)}")
    per_s = mean_rate(trace)
    if not 0.0 < per_s < math.inf:
        raise TraceError(f"trace {shown(trace.name)} has no rate to scale: all arrives at once")
    return trace.rate_scaled(rate * (requests_per_session(trace) or 1.0) / per_s)


def sped_up(trace: Trace, factor: float, time_scale: float) -> Trace:
    """Return sessions that start ``factor`` times as often, inf at once, with delays over ``time_scale``.

    The file's rows are those of the trace's file: sessions may pass each other.
    """
    assert trace.parents is not None
    assert trace.parent_offsets is not None
    assert trace.delay_s is not None
    if factor == math.inf or time_scale != 1.0:
        has_none = only_follow(trace.arrival_s, trace.delay_s, trace.parents, trace.parent_offsets)
        changed: dict[str, Any] = {
            "arrival_s": np.where(has_none | (factor == math.inf), 0.0, trace.arrival_s),
            "delay_s": trace.delay_s / time_scale,
            "order": None,
        }
        faster = replace(trace, **changed)
        object.__setattr__(faster, "order", trace.order[faster.order])
        trace = faster
    return trace if factor == math.inf else trace.rate_scaled(factor)


def in_rows_of(trace: Trace, faster: Trace, outcomes: Outcomes) -> Outcomes:
    """Return outcomes of the same sessions at another rate in the order of a trace's requests."""
    return outcomes.by_request(lambda values, _: faster.in_file_order(np.asarray(values))[trace.order])


def repeated_sessions(trace: Trace, first: int, stop: int) -> Trace:
    """Return sessions ``first`` to ``stop`` of a trace that is repeated endlessly, its own from 0 on.

    No hash_ids are those of another repeat.
    """
    assert trace.parents is not None
    assert trace.parent_offsets is not None
    assert trace.delay_s is not None
    starts = session_starts(trace)
    lap, place = np.divmod(np.arange(first, stop), starts.sessions)
    # the rows of a session, one session after the other
    by_session = np.argsort(starts.session, kind="stable")
    each = np.bincount(starts.session)
    first_of = np.cumsum(each) - each
    within = np.empty_like(by_session)
    within[by_session] = np.arange(len(trace)) - np.repeat(first_of, each)
    owner = np.repeat(np.arange(len(place)), each[place])
    rows = by_session[places_of(first_of[place], each[place])]
    new_first = np.cumsum(each[place]) - each[place]
    counts = np.diff(trace.parent_offsets)[rows]
    parents = trace.parents[places_of(trace.parent_offsets[:-1][rows], counts)]
    lap_s = len(trace) / mean_rate(trace)
    follows = only_follow(trace.arrival_s, trace.delay_s, trace.parents, trace.parent_offsets)[rows]
    moved_s = trace.arrival_s[rows] + lap[owner] * lap_s
    # laps overlap if the given period is short
    moved_s -= moved_s[~follows].min()
    return Trace(
        np.where(follows, 0.0, np.maximum(moved_s, 0.0)),
        **prompts_of_laps(trace, lap[owner], rows),
        parents=np.repeat(new_first[owner], counts) + within[parents],
        parent_offsets=np.concatenate([[0], np.cumsum(counts)]),
        delay_s=trace.delay_s[rows],
        session=owner,
        name=trace.name,
    )


def prompts_of_laps(trace: Trace, lap: Longs, rows: Longs) -> dict[str, Any]:
    """Return sizes and hash_ids of rows of a trace; no two laps have hash_ids in common."""
    names = ["input_tokens", "output_tokens", "cached_tokens"]
    if trace.history_tokens is not None:
        # starts of prompts that all have in common, such as a system prompt, stay in common
        names.append("history_tokens")
    sizes = {name: getattr(trace, name)[rows] for name in names}
    if trace.hash_ids is None or trace.hash_offsets is None:
        return sizes
    distinct, of_id = np.unique(trace.hash_ids, return_inverse=True)
    ids, offsets = ids_at(of_id, trace.hash_offsets, rows)
    return sizes | {
        "hash_ids": ids + np.repeat((lap - lap[0]) * len(distinct), np.diff(offsets)),
        "hash_offsets": offsets,
        "hash_block_size": trace.hash_block_size,
    }
