"""What stands between the network and a Flight server: TLS, connections, and the size of messages.

A connection has :data:`FIRST_S` to have something answered, and as much longer as what it sends takes at
:data:`FIRST_BYTES_PER_S`; what has been asked in full is waited for. Where there are too many, those give way
that were not let in (:mod:`fastroof.backends.serve.connections`). The server behind hears of a connection
once something has come of it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from pathlib import Path
from threading import Lock, Thread
from typing import Final

from fastroof.backends.serve.connections import FIRST_S, NONE_LEFT, Connections, Standing, peer_of
from fastroof.backends.serve.flight_frames import ClientFrames, Frames, ServerFrames, UnderWay, goaway
from fastroof.backends.serve.flight_messages import MessageRefused

__all__ = ["Guard"]

BUFFER_BYTES: Final = 2**18
TURN: Final = 16
"""Times that one direction is read before the other has its turn."""

HANDSHAKE_S: Final = 10.0
LINGER_S: Final = 1.0
FIRST_BYTES_PER_S: Final = 2**14
"""Slowest first question that is waited for, beyond :data:`FIRST_S`."""

_POLL_MS: Final = 1000
_LEAVES_S: Final = 1.0
_WOULD_BLOCK: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Guard:
    """Passes connections on to a Flight server on a Unix socket, but no message that is too long.

    Parameters
    ----------
    listener : socket
        Bound to the address to listen on.
    behind : Path
        The server's Unix socket.
    max_message_bytes, max_calls : int
        As in :class:`ServeLimits`.
    tls : ssl.SSLContext, optional
        What to answer clients with.
    """

    def __init__(
        self,
        listener: socket.socket,
        behind: Path,
        max_message_bytes: int,
        max_calls: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        most_bytes = max_message_bytes * max_calls
        self.under_way = UnderWay(most_bytes, max(max_message_bytes, most_bytes // 2))
        self._listener = listener
        self._behind = str(behind)
        self._max_message_bytes = max_message_bytes
        self._tls = tls
        self._lock = Lock()
        self._connections: Connections[_Connection] = Connections(max_calls)
        self._carried: dict[Thread, _Connection] = {}
        self._open = True
        listener.listen()
        self._accepting = Thread(target=self._accept, name="fastroof-flight-accept", daemon=True)
        self._accepting.start()

    def refuse_new(self) -> None:
        """Take no more connections."""
        self._open = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._accepting.join()
        self._listener.close()

    def cut(self) -> None:
        """End every connection, whatever is under way on it."""
        with self._lock:
            for connection in self._carried.values():
                connection.cut()

    def wait(self, timeout_s: float) -> bool:
        """Wait until every connection has ended; False where some have not in that time."""
        until = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._carried)
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _accept(self) -> None:
        while True:
            try:
                client, address = self._listener.accept()
            except OSError as error:
                if not self._open:
                    return
                with self._lock:
                    goes = self._connections.most_dispensable() if error.errno in NONE_LEFT else None
                if goes is None:
                    time.sleep(0.1)  # those who come must wait until somebody has gone
                else:
                    self._send_away(goes)
                continue
            connection = _Connection(client, peer_of(address))
            thread = Thread(target=self._carry, args=(connection,), name="fastroof-flight", daemon=True)
            connection.thread = thread
            with self._lock:
                goes = self._connections.admit(connection)
                if goes is not connection:
                    self._carried[thread] = connection
            if goes is connection:
                client.close()
                continue
            if goes is not None:
                self._send_away(goes)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread to spare
                self._end(connection)

    def _send_away(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.forget(connection)
            connection.cut()
        # until it has gone: so there are never more threads than connections may be
        connection.thread.join(_LEAVES_S)

    def _end(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.forget(connection)
            del self._carried[connection.thread]
            connection.client.close()

    def _carry(self, connection: _Connection) -> None:
        try:
            client = connection.client
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                client.settimeout(HANDSHAKE_S)
                client = self._tls.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
                with self._lock:
                    connection.client = client
                    if connection.is_cut:
                        return
                client.do_handshake()
            client.settimeout(FIRST_S)
            first = client.recv(BUFFER_BYTES)
            if not first:
                return
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
                server.connect(self._behind)
                frames = connection.frames = ClientFrames(self._max_message_bytes, self.under_way)
                try:
                    _pump(client, server, frames, first)
                finally:
                    frames.close()
        except OSError:
            pass  # the client or the server has gone, or the client does not speak TLS, or not at all
        finally:
            self._end(connection)


class _Connection:
    """A client's connection, and the thread that carries it."""

    def __init__(self, client: socket.socket, peer: str) -> None:
        self.client = client
        self.peer = peer
        self.thread: Thread
        self.frames: ClientFrames | None = None
        self.is_cut = False

    @property
    def standing(self) -> Standing:
        """What has come of it."""
        return Standing.SILENT if self.frames is None else self.frames.standing

    def cut(self) -> None:
        """End it: its thread notices."""
        self.is_cut = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.client, socket.SHUT_RDWR)  # of TLS, the socket below it


class _Way:
    """Bytes from one socket to another."""

    def __init__(
        self, source: socket.socket, sink: socket.socket, frames: Frames, first: bytes = b""
    ) -> None:
        self.source, self.sink, self.frames, self._first = source, sink, frames, first
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        self.has_more = False

    @property
    def is_empty(self) -> bool:
        """Whether all that was read has been passed on."""
        return self._start == self._end

    def move(self) -> bool:
        """Pass on what there is until a socket would block; False at the end of the source."""
        self.has_more = False
        for _ in range(TURN):
            if self.is_empty:
                try:
                    received = self._receive()
                except _WOULD_BLOCK:
                    return True
                if not received:
                    return False
                self.frames.feed(self._buffer[:received])
                self._start, self._end = 0, received
            try:
                self._start += self.sink.send(self._buffer[self._start : self._end])
            except _WOULD_BLOCK:
                return True
        self.has_more = True
        return True

    def _receive(self) -> int:
        if not self._first:
            return self.source.recv_into(self._buffer)
        received = len(self._first)
        self._buffer[:received] = self._first
        self._first = b""
        return received


def _pump(client: socket.socket, server: socket.socket, frames: ClientFrames, first: bytes) -> None:
    """Carry a connection until either end closes it, or a message is refused, or nothing is asked."""
    client.setblocking(False)
    server.setblocking(False)
    up, down = _Way(client, server, frames, first), _Way(server, client, ServerFrames(frames))
    poll = select.poll()
    began_s = time.monotonic()
    while True:
        try:
            if frames.standing == Standing.SILENT:
                longest_s = FIRST_S + frames.received_bytes / FIRST_BYTES_PER_S
                if time.monotonic() - began_s > longest_s:
                    raise MessageRefused(f"nothing that could be answered was asked in {FIRST_S:g} s")
            if not up.move() or not down.move():
                return
        except MessageRefused as refusal:
            if down.is_empty and down.frames.between:
                _say_why(client, str(refusal))
            return
        if up.has_more or down.has_more:
            continue
        to_client = select.POLLIN if up.is_empty else 0
        to_server = select.POLLIN if down.is_empty else 0
        poll.register(client, to_client if down.is_empty else to_client | select.POLLOUT)
        poll.register(server, to_server if up.is_empty else to_server | select.POLLOUT)
        # now and then all the same: TLS may need to read before it can write
        for descriptor, event in poll.poll(_POLL_MS):
            frames.under_way.moved_s = time.monotonic()
            if event & (select.POLLHUP | select.POLLERR) and (descriptor == client.fileno() or not to_server):
                return


def _say_why(client: socket.socket, reason: str) -> None:
    """Send the reason, then read on for a moment: closed with bytes unread, the reason would be lost."""
    until = time.monotonic() + LINGER_S
    client.settimeout(LINGER_S)
    client.sendall(goaway(reason))
    client.shutdown(socket.SHUT_WR)
    unread = bytearray(BUFFER_BYTES)
    while time.monotonic() < until and client.recv_into(unread):
        pass
