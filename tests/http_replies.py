"""Requests that tests send to a server on this machine, and its replies."""

from __future__ import annotations

import http.client
import json
from typing import Any, NamedTuple

JSON = {"Content-Type": "application/json"}


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def read(self) -> Any:
        return json.loads(self.body)


def send(server: Any, method: str, path: str, body: Any = None, headers: Any = None, **named: str) -> Reply:
    """Send a request to a server with a port; ``named`` are headers with ``_`` for ``-``."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    others = {name.replace("_", "-"): value for name, value in named.items()}
    try:
        connection.request(method, path, body, {**(headers or {}), **others})
        got = connection.getresponse()
        return Reply(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())
    finally:
        connection.close()
