"""What a server accepts: sizes of messages and calls, and addresses to listen on."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from fastroof.checks import whole_number
from fastroof.errors import BackendError
from fastroof.stopping import Stop

UNIX: Final = "unix:"
"""Start of an address that is the path of a Unix socket."""


@dataclass(frozen=True)
class ServeLimits:
    """Limits of a server: a message beyond them gets an error before anything is drawn or allocated.

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
        Longest message; all bodies that a server holds at once have room for this, or for ``max_calls``
        messages of JSON if that is more.
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
    max_simulated_bytes : int
        Memory that a simulation may take, of all its engines, ranks and runs together.
    max_call_s : int
        Seconds that a call may take, from the head of its request; a stream of lines is one call.

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
    max_simulated_bytes: int = 2**30
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

    def check_steps(self, num_steps: int) -> None:
        """Refuse more steps than a call may ask for."""
        _check_count(num_steps, self.max_steps, f"{num_steps} steps")

    def check_requests(self, num_requests: int) -> None:
        """Refuse more requests than a call may ask for."""
        _check_count(num_requests, self.max_requests, f"{num_requests} requests")

    def check_detailed(self, num_steps: int, stages: int, num_requests: int) -> None:
        """Refuse more steps, times stages, and requests than a call for more than times may have."""
        steps = f"{num_steps} steps" + (f" in {stages} stages" if stages > 1 else "")
        _check_count(
            num_steps * stages, self.max_detailed_steps, steps, " that asks for more than their times"
        )
        requests = f"{num_requests} requests"
        _check_count(num_requests, self.max_detailed_requests, requests, " that asks for more than times")


def _check_count(count: int, most: int, what: str, clause: str = "") -> None:
    if count > most:
        raise BackendError(f"{what} are more than the {most} of a message{clause}: send several")


def call_stop(limit_s: int) -> Stop:
    """Return what ends a call at its time limit, from now on."""
    return Stop(limit_s, f"the call took longer than the limit of {limit_s} s (max_call_s): ask for less")


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


def listening_socket(host: str, port: int, token: str | None) -> socket.socket:
    """Bind a socket (port 0 picks one); what other machines reach needs a token."""
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token != ""):
        raise BackendError("a token must be printable ASCII without spaces around it, and not empty")
    if host.startswith(UNIX):
        return _unix_socket(Path(host.removeprefix(UNIX)))
    if token is None and not is_loopback(host, port):
        raise BackendError(
            f"{host} can be reached from other machines: listening there needs a token; "
            "127.0.0.1 and unix:PATH need none"
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


def _unix_socket(path: Path) -> socket.socket:
    """Bind a Unix socket that only its user may connect to, in place of one that nobody listens on."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.stat().st_mode) and not _is_served(path):
                path.unlink()
        former = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(former)
    except (OSError, ValueError) as error:
        listener.close()
        raise BackendError(f"cannot listen on {path}: {getattr(error, 'strerror', None) or error}") from None
    return listener


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(str(path)) == 0
