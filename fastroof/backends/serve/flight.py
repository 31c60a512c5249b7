"""Plans served over Arrow Flight: record batches of steps go in, record batches of times come out.

``DoExchange`` is the service. Its descriptor names a plan, by path or as the command; the path ``[plan,
"errors"]`` asks for standard errors beside times, a column ``relative_error``. The client's record
batches hold a step a row, of equal decodes (``batch_size``, ``kv_len``) or of any requests (``new_tokens``
and ``context_len``, a list each), and each is answered, in order, by one record batch of ``latency_us``. A
batch that cannot be timed ends the call with an error, as what makes all of it impossible does (an unknown
plan, other columns). Where the call has the header ``fastroof-errors: in-stream``, such a batch is answered
by an empty one whose metadata is JSON, ``{"error": ..., "message": ...}``, and the stream goes on. A message
that is too long or compressed ends the connection it came by.

``ListFlights``, ``GetFlightInfo`` and ``GetSchema`` describe the plans in the metadata of their schema, and
the action ``health`` says what is served. A stream is one call for as long as it is open.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from pyarrow.flight import Location

from fastroof.backends.serve.address import listening_socket, tls_context
from fastroof.backends.serve.answer import ServedPlans
from fastroof.backends.serve.flight_calls import Calls
from fastroof.backends.serve.flight_guard import Guard
from fastroof.backends.serve.flight_service import PlanService
from fastroof.backends.serve.limits import ServeLimits
from fastroof.backends.serve.process import DRAIN_S, compile_loops, serve_until_told, wait_while

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = ["DRAIN_S", "FlightServer", "serve_flight"]

IDLE_S: Final = 1.0
"""Seconds without work after which an open stream is not waited for."""

_CLOSING_S: Final = 5.0
_LONGEST_FOLDER: Final = 64


class FlightServer:
    """A Flight server of plans, listening from when it is made to when it is drained.

    Parameters
    ----------
    plans : mapping of str to StepPlan
        By the name that clients ask for.
    host, port : str, int
        Where to listen; port 0 picks one.
    token : str, optional
        What clients have to show; needed beyond this machine.
    tls_cert, tls_key : Path, optional
        PEM files of a certificate chain and its key; needed beyond this machine.
    limits : ServeLimits
        What is refused.

    Raises
    ------
    BackendError
        If plans are none or too many, or the address, token or certificate will not do.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.backends.serve.flight_client import FlightSteps
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> with FlightServer({"small": plan}) as server, FlightSteps(f"grpc://127.0.0.1:{server.port}") as steps:
    ...     bool(steps.decode_us("small", [64], [4096])[0] == plan.decode_us(64, 4096))
    True
    """

    def __init__(
        self,
        plans: Mapping[str, StepPlan],
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
        limits: ServeLimits | None = None,
    ) -> None:
        limits = limits or ServeLimits()
        served = ServedPlans(plans, limits)
        tls = tls_context(tls_cert, tls_key, "h2")
        for plan in plans.values():
            compile_loops(plan)
        listener = listening_socket(host, port, token, tls is not None)
        self.port: int = listener.getsockname()[1]
        self._calls = Calls(limits.max_calls)
        self._folder = _socket_folder()
        behind = Path(self._folder.name) / "socket"
        location = Location.for_grpc_unix(str(behind))
        self._service = PlanService(location, dict(plans), served, self._calls, token)
        self._guard = Guard(listener, behind, limits.max_message_bytes, limits.max_calls, tls)
        self._drained = False

    def __enter__(self) -> FlightServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drain(0.0 if kind else DRAIN_S)

    def drain(self, timeout_s: float = DRAIN_S, pause: Callable[[float], bool] | None = None) -> bool:
        """Refuse new calls, finish those in flight, and stop.

        Parameters
        ----------
        timeout_s : float
            How long calls may take to end; then they are cut off. A stream on which nothing happens for a
            second is not waited for.
        pause : callable, optional
            Waits for so many seconds; True from it means that there is no more time.

        Returns
        -------
        bool
            Whether every call in flight came to its end.
        """
        if self._drained:
            return True
        self._drained = True
        self._calls.drain()
        self._guard.refuse_new()
        wait_while(lambda: self._calls.running > 0 and not self._is_quiet(), timeout_s, pause)
        finished = not self._calls.running or self._is_quiet()
        stopping = Thread(target=_stop, args=(self._service,), name="fastroof-flight-stop", daemon=True)
        stopping.start()
        if self._calls.running or not self._guard.wait(_CLOSING_S):
            self._guard.cut()
            self._guard.wait(_CLOSING_S)
        stopping.join(_CLOSING_S)
        self._folder.cleanup()
        return finished

    def _is_quiet(self) -> bool:
        wire = self._guard.under_way
        moved_s = time.monotonic() - wire.moved_s
        return min(self._calls.idle_s(), moved_s) > IDLE_S and not wire.messages


def _socket_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder that no other user may look into, of a name that a socket's path and a URI can hold."""
    usual = tempfile.gettempdir()
    fits = len(usual) <= _LONGEST_FOLDER and quote(usual) == usual
    return tempfile.TemporaryDirectory(prefix="fastroof-flight-", dir=usual if fits else "/tmp")


def _stop(service: PlanService) -> None:
    with service:
        pass


def serve_flight(
    plans: Mapping[str, StepPlan],
    host: str,
    port: int,
    *,
    token: str | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    limits: ServeLimits = ServeLimits(),  # noqa: B008 - it is frozen
    ready: Callable[[int], None] | None = None,
    drain_timeout_s: float = DRAIN_S,
) -> None:
    """Serve plans over Arrow Flight until SIGTERM or SIGINT, then finish the calls in flight.

    A second signal cuts them off.

    Parameters
    ----------
    plans, host, port, token, tls_cert, tls_key, limits
        As of :class:`FlightServer`.
    ready : callable, optional
        Called with the port once it listens.
    drain_timeout_s : float
        Seconds that calls have to end in.

    Raises
    ------
    BackendError
        As :class:`FlightServer`; or outside of a program's main thread, the only one to get signals.
    """
    serve_until_told(
        lambda: FlightServer(
            plans, host, port, token=token, tls_cert=tls_cert, tls_key=tls_key, limits=limits
        ),
        ready,
        drain_timeout_s,
    )
