"""A front end, naively: the API servers of each replica, then what no request waits for. Times are us."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.reference.scheduler import TIMED_OUT, US_PER_S, Request


def shared_ends(sent_us: Sequence[float], takes_us: float) -> list[float]:
    """When each request leaves a thread that all requests on it share equally, moment by moment."""
    left = dict.fromkeys(range(0), 0.0)
    ends = [0.0] * len(sent_us)
    now_us, following = 0.0, 0
    while left or following < len(sent_us):
        due_us = now_us + min(left.values()) * len(left) if left else float("inf")
        sent = following < len(sent_us) and sent_us[following] < due_us
        until_us = sent_us[following] if sent else due_us
        for request in left:
            left[request] -= (until_us - now_us) / len(left)
        now_us = until_us
        if sent:
            left[following] = takes_us
            following += 1
        for request in [one for one, rest in left.items() if rest <= 1e-9 * takes_us]:
            ends[request] = now_us
            del left[request]
    return ends


class Server:
    """One thread, shared equally by the requests in it, of which each takes the same.

    ``got_us`` is what each would have got that came when the thread was idle for the last time.
    """

    def __init__(self, takes_us: float) -> None:
        self.takes_us = takes_us
        self.inside: list[Request] = []
        self.before_us: list[float] = []
        """What others had got when each came."""
        self.got_us = self.now_us = 0.0

    @property
    def leaves_us(self) -> float:
        if not self.inside:
            return math.inf
        rest_us = self.before_us[0] + self.takes_us - self.got_us
        return max(self.now_us, self.now_us + rest_us * len(self.inside))

    @property
    def gives_up_us(self) -> float:
        return min((one.deadline_us for one in self.inside if one.status is None), default=math.inf)

    @property
    def next_us(self) -> float:
        return min(self.leaves_us, self.gives_up_us)

    def enter(self, request: Request, now_us: float) -> None:
        self.got_us = self.got_us + (now_us - self.now_us) / len(self.inside) if self.inside else 0.0
        self.now_us = now_us
        self.inside.append(request)
        self.before_us.append(self.got_us)

    def leave(self) -> Request:
        self.now_us, self.got_us = self.leaves_us, self.before_us.pop(0) + self.takes_us
        return self.inside.pop(0)


class Times(NamedTuple):
    """What a request, a prompt token and a server's thread take, and the servers of a replica."""

    request_us: float
    token_us: float
    server_us: float
    servers: int


class FrontEnd:
    """What is between clients and engines of a pool: ``arrive`` and ``end`` are what requests do next."""

    def __init__(
        self, times: Times, arrive: Callable[[Request, Any], None], end: Callable[[Request, int], None]
    ) -> None:
        self.times, self.arrive, self.end = times, arrive, end
        self.servers: dict[tuple[int, int], Server] = {}
        self.passed: list[tuple[float, int, Request]] = []
        """Requests that have left their server, by when they arrive or give up."""
        self.replica_of: dict[int, Any] = {}

    def send(self, request: Request, replica: Any, now_us: float) -> None:
        """Let a request in that is sent now to a replica."""
        self.replica_of[request.index] = replica
        replica.passing.append(request)
        place = (replica.place, (replica.given - 1) % self.times.servers)
        if not self.times.server_us:
            self._go_on(request, now_us)
            return
        self.servers.setdefault(place, Server(self.times.server_us)).enter(request, now_us)

    def _go_on(self, request: Request, now_us: float) -> None:
        arrives_us = now_us + (self.times.request_us + self.times.token_us * request.prompt)
        # a trace is in seconds
        due_us = min(arrives_us / US_PER_S * US_PER_S, request.deadline_us)
        insort(self.passed, (due_us, request.index, request))

    @property
    def next_us(self) -> float:
        servers_us = min((one.next_us for one in self.servers.values()), default=math.inf)
        return min(servers_us, self.passed[0][0] if self.passed else math.inf)

    def go_on(self) -> None:
        """Let the next thing happen."""
        now_us = self.next_us
        for _, server in sorted(self.servers.items(), key=lambda one: one[0]):
            if server.gives_up_us <= now_us:
                given_up = min(
                    (one for one in server.inside if one.status is None), key=lambda one: one.deadline_us
                )
                self._give_up(given_up)
                return
            if server.leaves_us <= now_us:
                request = server.leave()
                if request.status is None:
                    self._go_on(request, now_us)
                return
        _, _, request = self.passed.pop(0)
        if request.deadline_us <= now_us:
            self._give_up(request)
            return
        self._leave(request)
        request.arrival_us = now_us
        self.arrive(request, self.replica_of[request.index])

    def _leave(self, request: Request) -> None:
        self.replica_of[request.index].passing.remove(request)

    def _give_up(self, request: Request) -> None:
        self._leave(request)
        request.status = TIMED_OUT
        self.end(request, TIMED_OUT)


def outside_us(times_us: tuple[float, float, float], isl: float, clients: float, engine_us: float) -> float:
    """The mean time of a request outside the engine in a closed loop."""
    request_us, token_us, server_us = times_us
    # the API server hands on one request each server_us, whatever the engine could take
    return max(request_us + server_us + token_us * isl, clients * server_us - engine_us)
