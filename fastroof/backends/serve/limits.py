"""What a server accepts at most: sizes, addresses to listen on, connections.

Anyone who reaches a port can open connections and hold them. Until a token has been shown, clients differ
only in their address and in what has come of the connection so far (:class:`Standing`). When there is no room
left, a connection that has shown nothing gives way to a new one: the one of the lowest standing, the oldest
of these, of the peer that has most of them.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl
from collections import Counter
from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from fastroof.checks import whole_number
from fastroof.errors import BackendError
from fastroof.stopping import Stop

CONNECTIONS_A_CALL: Final = 8  # of each call that may run: clients keep connections between calls
PEER_CONNECTIONS_A_CALL: Final = 4  # the same of one peer, so that no peer takes all
NONE_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PEER_BITS: Final = 64  # of an IPv6 address: one machine has many


@dataclass(frozen=True)
class ServeLimits:
    """Limits of a server: a request beyond them gets an error, and costs neither memory nor another's call.

    Attributes
    ----------
    max_plans : int
        Plans it serves.
    max_steps, max_requests : int
        Steps of a call, and requests of all its steps together.
    max_detailed_steps, max_detailed_requests : int
        The same for a call that asks for more than times: standard errors, stages (each step counts once per
        stage), micro-batches of a pipeline, an explanation. Such a step takes up to a few microseconds.
    max_message_bytes : int
        Longest message.
    max_line_bytes : int
        Longest message of JSON, which takes about twenty times its length to parse; never more than
        ``max_message_bytes``.
    max_calls : int
        Concurrent calls; further ones are refused and may be retried. A pipe carries one at a time.
    max_simulated_requests, max_answered_requests : int
        Requests of a simulation, and of one whose answer lists all of them.
    max_simulated_steps : int
        Steps that a simulation may take, as :func:`fastroof.simulation.settings.simulated_steps` counts them:
        output tokens, prompt chunks, and looks at replicas.
    max_call_s : int
        Seconds that a call may take once it has been read; a stream of lines is one call. Simulations end at
        once, everything else between its parts, which take seconds at most by the other limits.

    Raises
    ------
    BackendError
        If a limit is not a whole number of at least 1.

    Examples
    --------
    >>> ServeLimits(max_steps=1000).max_steps
    1000
    """

    max_plans: int = 64
    max_steps: int = 2**22
    max_requests: int = 2**24
    max_detailed_steps: int = 2**18
    max_detailed_requests: int = 2**20
    max_message_bytes: int = 2**28
    max_line_bytes: int = 2**23
    max_calls: int = 32
    max_simulated_requests: int = 2**20
    max_answered_requests: int = 2**17
    max_simulated_steps: int = 2**28
    max_call_s: int = 60

    def __post_init__(self) -> None:
        for each in fields(self):
            whole_number(each.name, getattr(self, each.name), error=BackendError)

    @property
    def json_bytes(self) -> int:
        """Longest message of JSON, whichever way it comes."""
        return min(self.max_line_bytes, self.max_message_bytes)

    def check_line(self, num_bytes: int) -> None:
        """Refuse a message of JSON that is longer than a line may be."""
        if num_bytes > self.json_bytes:
            raise BackendError(
                f"a message of JSON is longer than the {self.json_bytes} bytes of a line: send several"
            )


def call_stop(limit_s: int) -> Stop:
    """Return what ends a call at its time limit, from now on."""
    return Stop(limit_s, f"the call took longer than the limit of {limit_s} s (max_call_s): ask for less")


# Addresses


def is_loopback(host: str, port: int = 0) -> bool:
    """Whether a name or address means only this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    return all(ipaddress.ip_address(address[0]).is_loopback for _, address in _addresses(host, port))


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    if not host:
        raise BackendError("a host to listen on is needed: 127.0.0.1, or 0.0.0.0 for every address")
    if not 0 <= port < 2**16:
        raise BackendError(f"a port is from 0 to 65535, got {port}")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise BackendError(f"no address belongs to the host {host!r}: {error}") from None
    return [(family, (str(address[0]), int(address[1]))) for family, _, _, _, address in addresses]


def listening_socket(host: str, port: int, token: str | None, tls: bool) -> socket.socket:
    """Bind a socket (port 0 picks one), unless other machines reach it without a token and TLS."""
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token != ""):
        raise BackendError("a token must be printable ASCII without spaces around it, and not empty")
    if not is_loopback(host, port):
        missing = [
            what for what, given in (("a token", token), ("a TLS certificate and key", tls)) if not given
        ]
        if missing:
            raise BackendError(
                f"{host} can be reached from other machines: listening there needs {' and '.join(missing)}; "
                "127.0.0.1 needs neither"
            )
    family, address = _addresses(host, port)[0]
    # asyncio turns off Nagle's algorithm, which costs 40 ms a reply, only if the protocol is named
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise BackendError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


def tls_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Read a certificate and its key (PEM files); None if neither is given."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise BackendError("TLS takes both a certificate and its key, as PEM files: one of them is missing")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # an empty password, or OpenSSL would wait for someone to type it
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise BackendError(f"the TLS certificate {cert} with the key {key} cannot be used: {error}") from None
    return context


# Connections


class Standing(IntEnum):
    """What has come of a connection so far."""

    SILENT = 0  # no request, or none that was allowed
    ASKED = 1  # a request that is not answered yet
    LET_IN = 2  # an answer to a client that may ask


class Held(Protocol):
    """A connection, as far as its place is concerned."""

    @property
    def peer(self) -> str:
        """Whose it is."""

    @property
    def standing(self) -> Standing:
        """What has come of it."""


Connection = TypeVar("Connection", bound=Held)


class Connections(Generic[Connection]):
    """Open connections, limited in all and per peer; for one thread at a time."""

    def __init__(self, max_calls: int) -> None:
        self._most = CONNECTIONS_A_CALL * max_calls
        self._most_a_peer = PEER_CONNECTIONS_A_CALL * max_calls
        self._held: dict[Connection, None] = {}  # the oldest first
        self._of_peer: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def admit(self, connection: Connection) -> Connection | None:
        """Take a connection; return the one to close instead: the new one if all others were let in."""
        if self._of_peer[connection.peer] >= self._most_a_peer:
            goes = self._least([each for each in self._held if each.peer == connection.peer])
        elif len(self._held) >= self._most:
            goes = self.most_dispensable()
        else:
            self._add(connection)
            return None
        if goes is None:
            return connection
        self.forget(goes)
        self._add(connection)
        return goes

    def most_dispensable(self) -> Connection | None:
        """Return the connection to close first; None if all were let in."""
        waiting = [each for each in self._held if each.standing < Standing.LET_IN]
        if not waiting:
            return None
        [(peer, _)] = Counter(each.peer for each in waiting).most_common(1)
        return self._least([each for each in waiting if each.peer == peer])

    def forget(self, connection: Connection) -> None:
        """Count a connection no longer; it may be gone already."""
        if connection in self._held:
            del self._held[connection]
            self._of_peer[connection.peer] -= 1
            if not self._of_peer[connection.peer]:
                del self._of_peer[connection.peer]

    def _add(self, connection: Connection) -> None:
        self._held[connection] = None
        self._of_peer[connection.peer] += 1

    @staticmethod
    def _least(held: list[Connection]) -> Connection | None:
        least = min(held, key=lambda each: each.standing, default=None)
        return None if least is None or least.standing == Standing.LET_IN else least


def peer_of(address: Any) -> str:
    """Return whose connection it is, by its address: for IPv6, the network of 64 bits.

    >>> peer_of(("127.0.0.2", 4711)), peer_of(("2001:db8::1:2", 4711, 0, 0))
    ('127.0.0.2', '2001:db8::')
    """
    text = str(address[0]).partition("%")[0] if address else ""
    try:
        host = ipaddress.ip_address(text)
    except ValueError:
        return text
    if host.version == 4:
        return text
    if host.ipv4_mapped is not None:
        return str(host.ipv4_mapped)
    return str(ipaddress.ip_network((int(host), _PEER_BITS), strict=False).network_address)
