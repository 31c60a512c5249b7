"""A front end, naively: requests share one thread of the API server, moment by moment."""

from __future__ import annotations

from collections.abc import Sequence


def shared_ends(sent_us: Sequence[float], takes_us: float) -> list[float]:
    """When each request leaves a thread that all requests on it share equally."""
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


def outside_us(times_us: tuple[float, float, float], isl: float, clients: float, engine_us: float) -> float:
    """The mean time of a request outside the engine in a closed loop."""
    request_us, token_us, server_us = times_us
    # the API server hands on one request each server_us, whatever the engine could take
    return max(request_us + server_us + token_us * isl, clients * server_us - engine_us)
