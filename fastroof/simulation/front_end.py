"""Requests on their way through a front end: when the scheduler sees them, and what clients see of it.

Open loops: each request reaches the scheduler after its own time, and later if the API server is busy; the
scheduler takes them as they come. Closed loops: the first requests of all clients share the API server, later
ones take the mean time of the trace, or as long as the API server needs for all clients. Sessions: first
requests are those of an open loop; each that follows others takes its own time after them, without a queue at
the API server (an approximation, as it is sent at a time that only the simulation finds).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.compiled.simulation.api_server import shared_ends
from fastroof.compiled.simulation.records import FINISHED, TIMED_OUT
from fastroof.units import US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from fastroof.engines import FrontEnd
    from fastroof.simulation.engine import Outcomes
    from fastroof.simulation.settings import EngineSettings
    from fastroof.traces.trace import Trace

MOST_ROUNDS: Final = 4
"""Simulations in search of the time in a front end whose API server cannot keep up with a closed loop."""
CLOSE: Final = 0.01
"""Relative change of that time below which the search ends."""

LEAST_TIMEOUT_S: Final = 1e-6
"""Seconds that the engine has at least before a client gives up."""


@dataclass(frozen=True, eq=False)
class Passage:
    """A trace behind a front end.

    Attributes
    ----------
    sent : Trace
        What clients send.
    arrived : Trace
        What the scheduler sees, by arrival there.
    first_us, later_us : float
        In a closed loop, the time of the clients' first requests, and of all others. Else 0, and the time of
        a request without a prompt.
    follower_us : array of float, optional
        In sessions, the time of each request that follows others, as sent; NaN of the others.
    """

    sent: Trace
    arrived: Trace
    first_us: float = 0.0
    later_us: float = 0.0
    follower_us: Floats | None = None

    def settings(self, settings: EngineSettings) -> EngineSettings:
        """Return settings with which the engine's requests time out when their clients give up, or later."""
        if not self.later_us or settings.timeout_s == np.inf:
            return settings
        timeout_s = max(settings.timeout_s - self.later_us / US_PER_S, LEAST_TIMEOUT_S)
        return replace(settings, timeout_s=timeout_s)

    def client_outcomes(self, outcomes: Outcomes, timeout_s: float = np.inf) -> Outcomes:
        """Return the scheduler's outcomes as clients see them, in the order in which they sent them."""
        if self.arrived is self.sent:
            return outcomes
        sent = outcomes.by_request(lambda values, _: self.arrived.in_file_order(values))
        if self.sent.is_closed:
            arrival_us = outcomes.arrival_us
            is_first = arrival_us == self.first_us
            sent = sent._replace(arrival_us=np.where(is_first, 0.0, arrival_us - self.later_us))
        else:
            sent_us = self.sent.arrival_s * US_PER_S
            if self.follower_us is not None:
                follows = ~np.isnan(self.follower_us)
                sent_us[follows] = (self.arrived.in_file_order(outcomes.arrival_us) - self.follower_us)[
                    follows
                ]
            sent = sent._replace(arrival_us=sent_us)
        status = np.asarray(sent.status)
        late = (status == FINISHED) & (sent.last_us - sent.arrival_us > timeout_s * US_PER_S)
        if late.any():
            status = np.where(late, TIMED_OUT, status).astype(status.dtype)
            sent = sent._replace(status=status, last_us=np.where(late, np.nan, sent.last_us))
        return sent


def turns_of(sent: Trace, arrived: Trace) -> Longs:
    """Return the place of each request that arrives at the scheduler among those that clients sent."""
    return np.arange(len(sent)) if arrived is sent else arrived.order


def passage(front_end: FrontEnd, trace: Trace, servers: int, least_us: float = 0.0) -> Passage:
    """Send a trace through a front end with as many API servers, which take requests in turn.

    In a closed loop requests after the first take at least ``least_us``.
    """
    if front_end.adds_nothing:
        return Passage(trace, trace)
    request_us, token_us, server_us = front_end.times_us
    if trace.is_closed:
        mean_us = front_end.alone_us(float(trace.input_tokens.mean()))
        # all clients start together
        clients = min(int(trace.clients or 0), len(trace))
        first_us = mean_us + server_us * max(clients / servers - 1.0, 0.0)
        mean_us = max(mean_us, least_us)
        at_s = np.full(len(trace), first_us / US_PER_S)
        think_s = trace.think_s + mean_us / US_PER_S
        arrived = replace(trace, arrival_s=at_s, think_s=think_s, order=np.arange(len(trace)))
        return Passage(trace, arrived, float(arrived.arrival_s[0] * US_PER_S), mean_us)
    sent_us = trace.arrival_s * US_PER_S
    own_us = request_us + token_us * trace.input_tokens
    # without an order a trace is sorted again
    changes: dict[str, Any] = {"order": None}
    follower_us: Floats | None = None
    if trace.parent_offsets is None or trace.delay_s is None:
        arrived_us = _server_ends_us(sent_us, server_us, servers) + own_us
    else:
        follows = np.diff(trace.parent_offsets) > 0
        follower_us = np.where(follows, own_us + server_us, np.nan)
        changes["delay_s"] = np.where(follows, trace.delay_s + follower_us / US_PER_S, 0.0)
        arrived_us = sent_us + own_us + server_us
        arrived_us[~follows] = _server_ends_us(sent_us[~follows], server_us, servers) + own_us[~follows]
    changes["arrival_s"] = arrived_us / US_PER_S
    return Passage(trace, replace(trace, **changes), 0.0, front_end.alone_us(0.0), follower_us)


def run_behind(
    front_end: FrontEnd,
    trace: Trace,
    settings: EngineSettings,
    servers: int,
    run: Callable[[Trace, EngineSettings], Outcomes],
) -> Outcomes:
    """Run schedulers behind a front end, and return what clients see."""
    last = passage(front_end, trace, servers)
    outcomes = run(last.arrived, last.settings(settings))
    for _ in range(MOST_ROUNDS if trace.is_closed and front_end.server_ms else 0):
        # an API server hands on one request each server_ms, whatever the engine could take
        engine_us = float(np.nanmean(outcomes.last_us - outcomes.arrival_us))
        clients = min(int(trace.clients or 0), len(trace)) / servers
        least_us = front_end.server_ms * US_PER_MS * clients - engine_us - trace.think_s * US_PER_S
        if not least_us > last.later_us * (1.0 + CLOSE):
            break
        last = passage(front_end, trace, servers, least_us)
        outcomes = run(last.arrived, last.settings(settings))
    return last.client_outcomes(outcomes, settings.timeout_s)


def _server_ends_us(sent_us: Floats, server_us: float, servers: int) -> Floats:
    """Return when each request leaves its API server, us."""
    if not server_us:
        return sent_us.copy()
    ends_us = np.empty_like(sent_us)
    for server in range(min(servers, len(sent_us))):
        own_us = np.ascontiguousarray(sent_us[server::servers])
        left_us = np.empty_like(own_us)
        shared_ends(own_us, server_us, np.empty_like(own_us), left_us)
        ends_us[server::servers] = left_us
    return ends_us
