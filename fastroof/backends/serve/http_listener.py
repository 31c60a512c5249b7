"""uvicorn in a thread, on a socket that is bound already, and a process that serves until a signal.

TLS, slow clients and whoever floods a port are for a reverse proxy in front of it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from signal import SIGINT, SIGTERM, signal
from threading import Thread, current_thread, main_thread
from typing import TYPE_CHECKING, Any, Final, TypeVar

import uvicorn

from fastroof.errors import BackendError
from fastroof.host import share_heaps

if TYPE_CHECKING:
    from typing import Self

DRAIN_S: Final = 30.0
"""Seconds that calls have to end in, once a server is stopping."""

CONNECTIONS_A_CALL: Final = 8
"""Connections for each call that may run, as clients keep them between calls; more get status 503."""

_IDLE_S: Final = 60
_TICK_S: Final = 0.05
_HEAD_BYTES: Final = 2**14


class HttpListener:
    """An HTTP server of an ASGI application, listening from when it is made to when it is drained."""

    def __init__(self, asgi: Any, listener: socket.socket, max_calls: int) -> None:
        self.address: Final = listener.getsockname()
        self._server = uvicorn.Server(
            uvicorn.Config(
                asgi,
                http="h11",
                loop="asyncio",
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                timeout_keep_alive=_IDLE_S,
                limit_concurrency=CONNECTIONS_A_CALL * max_calls,
                h11_max_incomplete_event_size=_HEAD_BYTES,
            )
        )
        self._died: BaseException | None = None
        self._thread = Thread(target=self._run, args=(listener,), name="fastroof-http-loop", daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.001)
        if not self._server.started:
            listener.close()
            where = self.address if isinstance(self.address, str) else f"{self.address[0]}:{self.port}"
            raise BackendError(f"{where} cannot be served: {self._died}") from self._died

    @property
    def port(self) -> int:
        """The port that it listens on; 0 for a Unix socket."""
        return int(self.address[1]) if isinstance(self.address, tuple) else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.drain(0.0 if kind else DRAIN_S)

    def drain(self, timeout_s: float = DRAIN_S, is_hurried: Callable[[], bool] = lambda: False) -> bool:
        """Take no more connections, finish the calls in flight, and stop.

        Calls still running after ``timeout_s``, or once ``is_hurried``, are cut off. Returns whether every
        call in flight ended.
        """
        if not self._thread.is_alive():
            return True
        until = time.monotonic() + timeout_s
        self._server.should_exit = True
        while self._thread.is_alive() and time.monotonic() < until and not is_hurried():
            self._thread.join(_TICK_S)
        finished = not self._thread.is_alive()
        self._server.force_exit = True
        with suppress(RuntimeError):  # the loop has closed
            for each in list(self._server.server_state.connections):
                each.loop.call_soon_threadsafe(each.transport.abort)
        self._thread.join()
        if isinstance(self.address, str):
            Path(self.address).unlink(missing_ok=True)
        return finished

    def _run(self, listener: socket.socket) -> None:
        try:
            self._server.run([listener])
        except BaseException as error:
            self._died = error


Listener = TypeVar("Listener", bound=HttpListener)


def serve_until_stopped(
    make: Callable[[], Listener], ready: Callable[[Listener], None], drain_timeout_s: float
) -> None:
    """Serve until SIGTERM or SIGINT, then finish the calls in flight; a second signal cuts them off."""
    if current_thread() is not main_thread():
        raise BackendError("signals reach the main thread only: call it there, or use the server's class")
    # a heap for each of dozens of threads would keep growing by what others left
    share_heaps(2)
    came: list[int] = []
    before = {number: signal(number, lambda number, _: came.append(number)) for number in (SIGTERM, SIGINT)}
    try:
        with make() as server:
            ready(server)
            while not came:
                time.sleep(_TICK_S)
            server.drain(drain_timeout_s, lambda: len(came) > 1)
    finally:
        for number, handler in before.items():
            signal(number, handler)
