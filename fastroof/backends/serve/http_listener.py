"""What listens for HTTP, whatever the application is, and a process that serves until a signal.

uvicorn waits for ever for a client that sends no request, reads no reply, or does not close. Here a
connection has :data:`HEAD_S` for its first request, :data:`IDLE_S` for another one, and :data:`STALLED_S` to
take something of a reply. If there are too many connections, those give way whose clients were not let in
(:mod:`fastroof.backends.serve.limits`), from before their TLS handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from threading import Event, Thread, current_thread, main_thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from fastroof.backends.serve.http_requests import ASKS, CUT, JSON_TYPE, LET_IN, framing_fault
from fastroof.backends.serve.limits import NONE_LEFT, Connections, Standing, peer_of
from fastroof.backends.serve.messages import error_reply, write_reply
from fastroof.errors import BackendError
from fastroof.processors import share_heaps

if TYPE_CHECKING:
    from typing import Self

    from fastroof.backends.serve.http_requests import Calls

DRAIN_S: Final = 30.0
"""Seconds that calls have to end in, once a server is stopping."""

HEAD_S: Final = 10.0
IDLE_S: Final = 60.0
STALLED_S: Final = 30.0
HANDSHAKE_S: Final = 10.0
_HEAD_BYTES: Final = 2**14
_READ_BYTES: Final = 2**20
_SWEEP_S: Final = 0.5
_CLOSING_S: Final = 5.0
_BACKLOG: Final = 128
_GONE: Final = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
_NO_FILES_S: Final = 0.1  # until the next connection is taken if no file descriptors are left


class HttpApp(Protocol):
    """An application: its ASGI callable, and the calls that are counted to stop it.

    The state of a request has functions ``LET_IN``, to be called once its client may ask, ``ASKS``, before
    its body is waited for, and ``CUT``, which ends its connection.
    """

    asgi: Any
    calls: Calls


class _Arrival:
    """A connection from when it is accepted, before any TLS or HTTP."""

    def __init__(self, taken: socket.socket, peer: str) -> None:
        self.taken = taken
        self.peer = peer
        self.standing = Standing.SILENT

    def asks(self) -> None:
        """Note that its client has begun a request."""
        self.standing = Standing.ASKED

    def let_in(self) -> None:
        """Note that its client may ask."""
        self.standing = Standing.LET_IN

    def cut(self) -> None:
        """End it: what serves it notices."""
        with contextlib.suppress(OSError):
            self.taken.shutdown(socket.SHUT_RDWR)


class _Connection(H11Protocol):
    """A connection that knows when something last came of it."""

    left: Callable[[], None]
    moved_s: float
    unsent = 0
    has_asked = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        # read at once: every turn of the loop costs a long body about 0.3 ms (asyncio's own is 256 KiB)
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]
        self.moved_s = time.monotonic()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it no longer."""
        super().connection_lost(exc)
        self.left()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.has_asked = True
        self.moved_s = time.monotonic()
        super().on_response_complete()

    def handle_events(self) -> None:
        """Handle what has come; refuse a head whose length a proxy may read differently."""
        if self.conn.their_state is h11.IDLE and (why := framing_fault(self.conn.trailing_data[0])):
            self.send_400_response(why)
            return
        super().handle_events()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP with an error in the form of all of them."""
        body = write_reply(error_reply(BackendError(f"this is not a request of HTTP/1.1: {msg}")))
        headers = [("content-type", JSON_TYPE), ("content-length", str(len(body))), ("connection", "close")]
        for event in (
            h11.Response(status_code=400, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def sweep(self, now_s: float) -> None:
        """End it if its client lets it hang."""
        unsent = self.transport.get_write_buffer_size()
        is_working = self.cycle is not None and not self.cycle.response_complete
        if is_working and _has_left(self.transport):
            self.transport.abort()
            return
        if (is_working and not unsent) or unsent != self.unsent:
            self.moved_s = now_s
        self.unsent = unsent
        longest = STALLED_S if unsent or self.transport.is_closing() else IDLE_S if self.has_asked else HEAD_S
        if now_s - self.moved_s > longest:
            self.transport.abort()


def _has_left(transport: asyncio.Transport) -> bool:
    """Whether the client has closed its end: unread bytes before that hide it from asyncio."""
    taken = transport.get_extra_info("socket")
    if taken is None or taken.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(taken.fileno(), _GONE)
    return bool(poll.poll(0))


class HttpListener:
    """An HTTP server of an application, listening from when it is made to when it is drained.

    ``max_calls`` decides how many connections there may be.
    """

    def __init__(
        self,
        app: HttpApp,
        listener: socket.socket,
        max_calls: int,
        tls: ssl.SSLContext | None = None,
        state: ServerState | None = None,
    ) -> None:
        self._app = app
        self._listener = listener
        self._tls = tls
        self._state = state or ServerState()
        host, self.port = listener.getsockname()[:2]
        self._arrivals: Connections[_Arrival] = Connections(max_calls)
        self._drained = False
        self._listens = Event()
        self._died: BaseException | None = None
        self._thread = Thread(target=self._run, name="fastroof-http-loop", daemon=True)
        self._thread.start()
        self._listens.wait()
        if self._died is not None:
            self._thread.join()
            raise BackendError(
                f"{host}:{self.port} cannot be served: {type(self._died).__name__}: {self._died}"
            ) from self._died

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drain(0.0 if kind else DRAIN_S)

    def drain(self, timeout_s: float = DRAIN_S, pause: Callable[[float], bool] | None = None) -> bool:
        """Refuse new calls, finish those in flight, and stop; ``/healthz`` reports it meanwhile.

        Calls still running after ``timeout_s``, or once ``pause`` (which waits some seconds) returns True,
        are cut off. Returns whether every call in flight ended.
        """
        if self._drained:
            return True
        self._drained = True
        calls = self._app.calls
        calls.is_draining = True
        until = time.monotonic() + timeout_s
        hurried = False
        while not hurried and time.monotonic() < until and calls.running > 0:
            hurried = (pause or _sleep)(0.02)
        finished = not calls.running
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(2 * _CLOSING_S)
        return finished

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._listens.is_set():
                raise
            self._died = error
            self._listener.close()
        finally:
            self._listens.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        config = uvicorn.Config(
            self._app.asgi,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(IDLE_S),
            h11_max_incomplete_event_size=_HEAD_BYTES,
        )
        config.load()
        self._set_date()

        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        accepting = self._loop.create_task(self._accept(config))
        self._listens.set()
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _SWEEP_S)
            self._set_date()
            for each in self._connections():
                each.sweep(time.monotonic())
        accepting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await accepting
        self._listener.close()
        for each in self._connections():
            each.shutdown()
        until = time.monotonic() + (_CLOSING_S if not self._app.calls.running else 0.0)
        while self._state.connections and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for each in self._connections():
            each.transport.abort()
        await asyncio.sleep(0)

    async def _accept(self, config: uvicorn.Config) -> None:
        welcomes: set[asyncio.Task[None]] = set()
        while True:
            try:
                taken, address = await self._loop.sock_accept(self._listener)
            except OSError as error:
                goes = self._arrivals.most_dispensable() if error.errno in NONE_LEFT else None
                if goes is not None:
                    self._arrivals.forget(goes)
                    goes.cut()
                await asyncio.sleep(_NO_FILES_S)
                continue
            arrival = _Arrival(taken, peer_of(address))
            goes = self._arrivals.admit(arrival)
            if goes is arrival:
                taken.close()
                continue
            if goes is not None:
                goes.cut()
            welcome = self._loop.create_task(self._welcome(config, arrival))
            welcomes.add(welcome)
            welcome.add_done_callback(welcomes.discard)

    async def _welcome(self, config: uvicorn.Config, arrival: _Arrival) -> None:
        """Serve a connection, over TLS if required."""

        def connection() -> _Connection:
            made = _Connection(
                config, self._state, {ASKS: arrival.asks, LET_IN: arrival.let_in, CUT: arrival.cut}
            )
            made.left = lambda: self._arrivals.forget(arrival)
            return made

        try:
            await self._loop.connect_accepted_socket(
                connection,
                arrival.taken,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S if self._tls else None,
            )
        except BaseException as error:
            self._arrivals.forget(arrival)
            arrival.taken.close()
            if not isinstance(error, OSError):  # it has left, or does not use TLS
                raise

    def _connections(self) -> list[Any]:
        return list(self._state.connections)

    def _set_date(self) -> None:
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]


def _sleep(pause_s: float) -> bool:
    time.sleep(pause_s)
    return False


def serve_until_stopped(
    make: Callable[[], HttpListener], ready: Callable[[int], None] | None, drain_timeout_s: float
) -> None:
    """Serve until SIGTERM or SIGINT, then finish the calls in flight; a second signal cuts them off."""
    # a heap for each of dozens of threads would keep growing by what others left
    share_heaps(2)
    with _stop_signals() as arrived, make() as server:
        if ready is not None:
            ready(server.port)
        while not arrived(3600.0):
            pass
        server.drain(drain_timeout_s, arrived)


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[float], bool]]:
    """Yield what waits for SIGTERM or SIGINT, some seconds at most, and returns whether one arrived."""
    if current_thread() is not main_thread():
        raise BackendError("signals reach the main thread only: call it there, or use the server's class")
    here, there = socket.socketpair()
    here.setblocking(False)
    there.setblocking(False)

    def noted(number: int, frame: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            there.send(b"!")

    def arrived(timeout_s: float) -> bool:
        if not select.select([here], [], [], timeout_s)[0]:
            return False
        here.recv(1)
        return True

    before = {number: signal.signal(number, noted) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        here.close()
        there.close()
