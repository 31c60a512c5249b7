"""Plans served over HTTP: the application of plans on what listens for HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fastroof.errors import BackendError

try:
    from uvicorn.server import ServerState

    from fastroof.backends.serve.http_app import PlanApp
    from fastroof.backends.serve.http_listener import HttpListener
except ModuleNotFoundError as error:
    raise BackendError(
        f"serving over HTTP needs {error.name}: pip install 'fastroof[http]' would do"
    ) from None

from fastroof.backends.serve.address import is_loopback, listening_socket, tls_context
from fastroof.backends.serve.answer import ServedPlans
from fastroof.backends.serve.http_requests import LOCAL_HOSTS
from fastroof.backends.serve.limits import ServeLimits
from fastroof.backends.serve.process import DRAIN_S, compile_loops, serve_until_told

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = ["DRAIN_S", "HttpServer", "serve_http"]


class HttpServer(HttpListener):
    """An HTTP server of plans, listening from when it is made to when it is drained.

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
    >>> import fastroof, json, urllib.request
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> with HttpServer({"small": plan}) as server:
    ...     asked = urllib.request.Request(
    ...         f"http://127.0.0.1:{server.port}/message",
    ...         b'{"batch_size": 64, "kv_len": 4096}',
    ...         {"Content-Type": "application/json"},
    ...     )
    ...     with urllib.request.urlopen(asked) as reply:
    ...         json.load(reply)["latency_us"] == [plan.decode_us(64, 4096)]
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
        tls = tls_context(tls_cert, tls_key, "http/1.1")
        for plan in plans.values():
            compile_loops(plan)
        listener = listening_socket(host, port, token, tls is not None)
        is_open = token is None and is_loopback(host, port)
        hosts = LOCAL_HOSTS | {host.lower()} if is_open else None
        state = ServerState()
        app = PlanApp(plans, served, token, hosts, lambda: len(state.connections))
        super().__init__(app, listener, limits.max_calls, tls, state)


def serve_http(
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
    """Serve plans over HTTP until SIGTERM or SIGINT, then finish the calls in flight.

    A second signal cuts them off.

    Parameters
    ----------
    plans, host, port, token, tls_cert, tls_key, limits
        As of :class:`HttpServer`.
    ready : callable, optional
        Called with the port once it listens.
    drain_timeout_s : float
        Seconds that calls have to end in.

    Raises
    ------
    BackendError
        As :class:`HttpServer`; or outside of a program's main thread, the only one to get signals.
    """
    serve_until_told(
        lambda: HttpServer(plans, host, port, token=token, tls_cert=tls_cert, tls_key=tls_key, limits=limits),
        ready,
        drain_timeout_s,
    )
