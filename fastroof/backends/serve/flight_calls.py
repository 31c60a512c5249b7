"""Calls of a Flight server: who may make them, how many run, and when they have ended."""

from __future__ import annotations

import hmac
import time
from threading import Lock
from typing import Any, Final

from pyarrow import flight

__all__ = ["ERRORS_IN_STREAM", "Calls", "Doorman"]

ERRORS_IN_STREAM: Final = ("fastroof-errors", "in-stream")
"""The header of a call by which a client says that it reads errors among the answers of a stream."""


class Calls:
    """Counts calls, refuses those that are too many, and knows which of them are at work.

    Parameters
    ----------
    max_calls : int
        Calls at once.
    """

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._lock = Lock()
        self._draining = False
        self._working = 0
        self._idle_since_s = time.monotonic()
        self.running = 0

    def start(self) -> None:
        """Count a call that starts."""
        with self._lock:
            if self._draining:
                raise flight.FlightUnavailableError("the server is stopping: no new calls are taken")
            if self.running >= self._max_calls:
                raise flight.FlightUnavailableError(
                    f"{self.running} calls are running, as many as may at once: try again later"
                )
            self.running += 1

    def end(self) -> None:
        """Count a call that has ended."""
        with self._lock:
            self.running -= 1

    def drain(self) -> None:
        """Refuse every call from now on."""
        with self._lock:
            self._draining = True
            self._idle_since_s = time.monotonic()

    @property
    def draining(self) -> bool:
        """Whether new calls are refused."""
        return self._draining

    def idle_s(self) -> float:
        """Seconds since the last answer; 0 while there is work."""
        with self._lock:
            return 0.0 if self._working else time.monotonic() - self._idle_since_s

    def __enter__(self) -> None:
        with self._lock:
            self._working += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._working -= 1
            self._idle_since_s = time.monotonic()


class _Call(flight.ServerMiddleware):  # type: ignore[misc]
    def __init__(self, calls: Calls, reads_errors: bool) -> None:
        self._calls = calls
        self.reads_errors = reads_errors

    def call_completed(self, exception: Any) -> None:
        """Count it no longer."""
        self._calls.end()


class Doorman(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Asks each call for its token, and counts those that have it.

    Parameters
    ----------
    calls : Calls
        Where they are counted.
    token : str or None
        What ``authorization: Bearer`` must carry.
    """

    def __init__(self, calls: Calls, token: str | None) -> None:
        self._calls = calls
        self._token = None if token is None else f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: dict[str, list[Any]]) -> Any:
        """Let a call in, or raise what refuses it."""
        if self._token is not None:
            given = headers.get("authorization") or [""]
            first = given[0] if isinstance(given[0], bytes) else str(given[0]).encode()
            if len(given) != 1 or not hmac.compare_digest(first, self._token):
                raise flight.FlightUnauthenticatedError(
                    "the token is missing or wrong: send `authorization: Bearer TOKEN`"
                )
        name, value = ERRORS_IN_STREAM
        self._calls.start()
        return _Call(self._calls, value in headers.get(name, []))
