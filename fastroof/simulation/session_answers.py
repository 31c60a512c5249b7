"""Results of sessions: the time from a session's first request to its last answer, and times by turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from fastroof.arrays import Bools, Floats, Longs
from fastroof.arrow import arrow_schema
from fastroof.columns import Column
from fastroof.simulation.requests import RequestTimes, spread
from fastroof.simulation.session_runs import session_starts
from fastroof.units import US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastroof.simulation.engine import Outcomes
    from fastroof.traces.trace import Trace

MOST_TURNS: Final = 32
"""Turns with results of their own; the last has those of all later ones."""

SESSION_COLUMNS: Final = (
    Column("session", "int", "", "number of the session", 0),
    Column("requests", "int", "", "requests of the session", 0),
    Column("turns", "int", "", "requests that follow each other, at most", 0),
    Column("start_s", "float", "s", "arrival of its first request", 0),
    Column(
        "e2e_ms", "float", "ms", "from its first arrival to its last token; empty if a request did not end"
    ),
    Column("input_tokens", "int", "tokens", "prompt tokens of all requests"),
    Column("output_tokens", "int", "tokens", "output tokens of all requests"),
    Column("status", "text", "", "finished if all of its requests are, else cut"),
)
"""Columns of :attr:`Simulation.sessions`."""


class Sessions(NamedTuple):
    """Sessions by the order of their first requests, and of which each request is and in which turn."""

    number: Longs
    session_of: Longs
    turn: Longs
    start_us: Floats
    end_us: Floats
    is_finished: Bools


def sessions_of(trace: Trace, outcomes: Outcomes, times: RequestTimes) -> Sessions:
    """Return the sessions of a run."""
    assert trace.session is not None
    starts = session_starts(trace)
    session_of, count = starts.session, starts.sessions
    number = np.empty(count, np.int64)
    number[session_of] = trace.session
    start_us, end_us = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(start_us, session_of, outcomes.arrival_us)
    np.maximum.at(end_us, session_of, np.where(times.is_finished, outcomes.last_us, -np.inf))
    unfinished = np.bincount(session_of, weights=~times.is_finished, minlength=count)
    return Sessions(number, session_of, trace.turns, start_us, end_us, unfinished == 0)


def session_results(trace: Trace, outcomes: Outcomes, times: RequestTimes) -> dict[str, Any]:
    """Return the results of sessions by name; none if the trace has no requests that follow others."""
    if not trace.has_parents:
        return {}
    found = sessions_of(trace, outcomes, times)
    e2e_ms = (found.end_us - found.start_us)[found.is_finished] / US_PER_MS
    by_turn = []
    upto = np.minimum(found.turn, MOST_TURNS)
    for turn in range(1, int(upto.max()) + 1):
        is_turn = upto == turn
        of_turn = times.of_places(np.flatnonzero(is_turn))
        one: dict[str, Any] = {
            "turn": turn,
            "requests": int(is_turn.sum()),
            "input_tokens": float(trace.input_tokens[is_turn].mean()),
            "output_tokens": float(trace.output_tokens[is_turn].mean()),
        }
        by_turn.append(one | {name: spread(of_turn.of_finished(name)) for name in ("ttft_ms", "e2e_ms")})
    return {
        "session_e2e_ms": spread(e2e_ms),
        "sessions": {
            "sessions": len(found.number),
            "finished": int(found.is_finished.sum()),
            "requests_each": len(trace) / len(found.number),
            "by_turn": by_turn,
        },
    }


def session_table(
    trace: Trace, outcomes: Outcomes, times: RequestTimes, made_from: Mapping[str, str]
) -> pa.Table:
    """Return sessions as a table, a row each, in the order of their first requests."""
    found = sessions_of(trace, outcomes, times)
    count = len(found.number)
    turns = np.zeros(count, np.int64)
    np.maximum.at(turns, found.session_of, found.turn)
    e2e_ms = np.where(found.is_finished, (found.end_us - found.start_us) / US_PER_MS, np.nan)
    values: dict[str, Any] = {
        "session": found.number,
        "requests": np.bincount(found.session_of, minlength=count),
        "turns": turns,
        "start_s": found.start_us / US_PER_S,
        "e2e_ms": e2e_ms,
        "status": np.where(found.is_finished, "finished", "cut"),
    }
    for name in ("input_tokens", "output_tokens"):
        sums = np.bincount(found.session_of, weights=getattr(trace, name), minlength=count)
        values[name] = sums.astype(np.int64)
    schema = arrow_schema(SESSION_COLUMNS, made_from)
    columns = [pa.array(values[field.name], field.type, from_pandas=True) for field in schema]
    return pa.table(columns, schema=schema)
