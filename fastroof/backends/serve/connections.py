"""Which connections a server keeps: those that say nothing never keep out one that asks.

Whoever reaches a port can open connections and hold them. What tells clients apart before a token has been
shown is the address and what came of the connection so far (:class:`Standing`), so where there is no more
room, one that has shown nothing gives way to the newcomer: the one of least standing, the oldest of these, of
the peer that has most of them. A client with a token shows it in its first request, before as many others
have come as there may be.
"""

from __future__ import annotations

import errno
import ipaddress
from collections import Counter
from enum import IntEnum
from typing import Any, Final, Generic, Protocol, TypeVar

__all__ = [
    "CONNECTIONS_A_CALL",
    "FIRST_S",
    "NONE_LEFT",
    "PEER_CONNECTIONS_A_CALL",
    "Connections",
    "Standing",
    "peer_of",
]

CONNECTIONS_A_CALL: Final = 8
"""Connections for each call that may run at once: clients keep them between calls."""

PEER_CONNECTIONS_A_CALL: Final = 4
"""The same of one peer, so that no peer takes all."""

FIRST_S: Final = 10.0
"""Seconds that a connection has to ask something that is answered."""

NONE_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of taking a connection that are over once another has gone."""

_PEER_BITS: Final = 64  # of an IPv6 address: one machine has many


class Standing(IntEnum):
    """What has come of a connection so far."""

    SILENT = 0
    """Nothing was asked, or nothing that is let in."""
    ASKED = 1
    """There is a question that is not answered yet."""
    LET_IN = 2
    """Something was answered to who may ask."""


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
    """Connections that are open, at most so many in all and of one peer; for one thread at a time.

    Parameters
    ----------
    max_calls : int
        Calls that may run at once.

    Examples
    --------
    >>> from dataclasses import make_dataclass
    >>> Caller = make_dataclass("Caller", ["i", "standing", ("peer", str, "a")], eq=False)
    >>> held = Connections(1)
    >>> for i in range(4):
    ...     assert held.admit(Caller(i, Standing(i % 2))) is None
    >>> held.admit(Caller(4, Standing.SILENT)).i, len(held)
    (0, 4)
    """

    def __init__(self, max_calls: int) -> None:
        self._most = CONNECTIONS_A_CALL * max_calls
        self._most_a_peer = PEER_CONNECTIONS_A_CALL * max_calls
        self._held: dict[Connection, None] = {}  # the oldest first
        self._of_peer: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def admit(self, connection: Connection) -> Connection | None:
        """Take a connection.

        Returns
        -------
        Connection or None
            What is to be closed and counts no longer: one that gives way, or the new one itself where all
            others are of clients that were let in.
        """
        if self._of_peer[connection.peer] >= self._most_a_peer:
            goes = self._least([each for each in self._held if each.peer == connection.peer])
        elif len(self._held) >= self._most:
            goes = self.most_dispensable()
        else:
            goes = None
            self._add(connection)
            return None
        if goes is None:
            return connection
        self.forget(goes)
        self._add(connection)
        return goes

    def most_dispensable(self) -> Connection | None:
        """The connection that should go first, where one has to; None where all were let in."""
        waiting = [each for each in self._held if each.standing < Standing.LET_IN]
        if not waiting:
            return None
        [(peer, _)] = Counter(each.peer for each in waiting).most_common(1)
        return self._least([each for each in waiting if each.peer == peer])

    def forget(self, connection: Connection) -> None:
        """Count a connection no longer, where it still is."""
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
        least = min(held, key=lambda each: each.standing)
        return None if least.standing == Standing.LET_IN else least


def peer_of(address: Any) -> str:
    """Whose connection it is, by the address that it came from: of IPv6, the network of 64 bits.

    Examples
    --------
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
