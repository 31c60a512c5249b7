"""Where a server may listen, and what it takes to listen beyond this machine."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from pathlib import Path

from fastroof.errors import BackendError

__all__ = ["is_loopback", "listening_socket", "tls_context"]


def is_loopback(host: str, port: int = 0) -> bool:
    """Tell whether a name or address means this machine, in all that it resolves to.

    Raises
    ------
    BackendError
        If it resolves to nothing.

    Examples
    --------
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
    """Bind a socket, unless others could reach it without a token or read what it says.

    Parameters
    ----------
    host, port : str, int
        Where to listen; port 0 picks one.
    token : str or None
        What clients will be asked for.
    tls : bool
        Whether connections will be encrypted.

    Raises
    ------
    BackendError
        If the address cannot be had, or lies beyond this machine and token or TLS is missing.
    """
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
    # asyncio turns Nagle's algorithm off, which costs 40 ms a reply, where the protocol is named
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise BackendError(f"{host}:{port} cannot be listened on: {error.strerror}") from None
    return listener


def tls_context(cert: Path | None, key: Path | None, protocol: str) -> ssl.SSLContext | None:
    """Read a certificate and its key; None where neither is given.

    Parameters
    ----------
    cert, key : Path or None
        PEM files.
    protocol : str
        What is spoken, as ALPN calls it: ``h2``, ``http/1.1``.

    Raises
    ------
    BackendError
        If one of them is missing or cannot be used.
    """
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise BackendError("TLS takes both a certificate and its key, as PEM files: one of them is missing")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    try:
        # no passphrase is asked for: nobody may be there to type it
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise BackendError(f"the TLS certificate {cert} with the key {key} cannot be used: {error}") from None
    return context
