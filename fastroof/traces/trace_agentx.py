"""Read recorded agents in the KV-cache tester's format, which aiperf and InferenceX's AgentX replay.

One JSON object per session: ``id``, ``block_size``, ``hash_id_scope`` and ``requests`` in order. A request
has ``t`` (seconds from the session's start), ``in`` and ``out`` tokens, ``hash_ids`` and, if known, its
``api_time`` and the ``think_time`` before it. An entry of type ``subagent`` holds the requests of an agent
that the request before it started; the request after it waits for that agent, unless it was left alone.
(Fields: github.com/ai-dynamo/aiperf, src/aiperf/dataset/loader/weka_trace_models.py, Apache-2.0.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

from fastroof.checks import is_number, is_whole_number, shown, whole_number
from fastroof.documents import parse_json
from fastroof.errors import TraceError
from fastroof.traces.trace import HASH_IDS
from fastroof.traces.trace_formats import PLAIN, NamedColumns, Reading

MARK: Final = b'"hash_id_scope"'
"""What a file of this format holds, and others do not."""

BOM: Final = b"\xef\xbb\xbf"

LEFT_ALONE: Final = "async_launched"
"""Status of an agent that no request waits for."""

COLUMNS: Final = NamedColumns(
    PLAIN, "t", 1.0, "in", "out", "", HASH_IDS, session="session", parent="parent", delay="delay_s"
)


def agent_rows(what: str, content: bytes, reading: Reading) -> AgentRows:
    """Return the rows of a file of sessions."""
    if reading.own.names or reading.others:
        raise TraceError(f"{what} holds sessions of agents, whose fields have fixed names: leave columns out")
    sessions = AgentRows(what)
    for number, one in _documents(what, content):
        sessions.add(f"{what}, session {number}", one)
    if not sessions.labels:
        raise TraceError(f"{what} has no requests")
    return sessions


def _documents(what: str, content: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the sessions of a file: one document, a list of them, or one a line."""
    content = content.removeprefix(BOM)
    lines = [line for line in content.splitlines() if line.strip()]
    is_by_line = len(lines) > 1 and lines[0].rstrip().endswith(b"}") and lines[0].count(MARK) == 1
    if is_by_line:
        documents = [parse_json(line, f"{what}, line {at}", TraceError) for at, line in enumerate(lines, 1)]
    else:
        document = parse_json(content, what, TraceError)
        documents = document if isinstance(document, list) else [document]
    for number, one in enumerate(documents, 1):
        if not isinstance(one, dict) or not isinstance(one.get("requests"), list):
            raise TraceError(f"{what}, session {number} must be an object with requests, got {shown(one)}")
        yield number, one


class AgentRows:
    """Values of the columns of a file of sessions, labels of its rows, and tokens per block."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.values: dict[str, list[Any]] = {name: [] for name in COLUMNS.needed}
        self.labels: list[str] = []
        self.block_size = 0
        self.sessions = 0
        self.scope = 0
        self.ids: dict[tuple[int, Any], int] = {}
        self.ends_s: list[float] = []
        """Recorded ends of requests, s from their session's start."""

    def add(self, where: str, one: dict[str, Any]) -> None:
        """Add a session."""
        size = whole_number(f"{where}: block_size", one.get("block_size"), error=TraceError)
        if self.block_size not in (0, size):
            raise TraceError(
                f"{where}: block_size is {size}, of earlier requests {self.block_size}: all must be equal"
            )
        self.block_size = size
        # local ids mean nothing to other sessions
        self.scope = 0 if one.get("hash_id_scope") == "global" else self.sessions + 1
        last: int | None = None
        waits: list[int] = []
        for number, request in enumerate(one["requests"], 1):
            place = f"{where}, request {number}"
            if not isinstance(request, dict):
                raise TraceError(f"{place} must be an object, got {shown(request)}")
            if request.get("type") != "subagent":
                last, waits = self._request(place, request, [*_some(last), *waits]), []
                continue
            inner = request.get("requests")
            if not isinstance(inner, list):
                raise TraceError(f"{place}: an agent must have requests, got {shown(inner)}")
            before = last
            for at, turn in enumerate(inner, 1):
                if not isinstance(turn, dict):
                    raise TraceError(f"{place}.{at} must be an object, got {shown(turn)}")
                since = request if at == 1 else turn
                before = self._request(f"{place}.{at}", turn, _some(before), since.get("t"))
            if inner and request.get("status") != LEFT_ALONE:
                waits += _some(before)
        self.sessions += 1

    def _request(self, place: str, request: dict[str, Any], parents: list[int], since: Any = None) -> int:
        """Add a request that starts after others. Returns its row."""
        start_s = _seconds(place, "t", request.get("t") if since is None else since)
        think_s, took_s = request.get("think_time"), request.get("api_time")
        delay_s = 0.0
        if parents and think_s is not None:
            delay_s = _seconds(place, "think_time", think_s)
        elif parents:
            delay_s = max(start_s - max(self.ends_s[row] for row in parents), 0.0)
        sizes: dict[str, Any] = {}
        for name in ("in", "out"):
            sizes[name] = request.get(name)
            if not is_whole_number(sizes[name], 0):
                raise TraceError(f"{place}: {name} must be whole tokens from 0, got {shown(sizes[name])}")
        row = len(self.labels)
        values = {
            "t": 0.0 if parents else start_s,
            **sizes,
            HASH_IDS: self._blocks(place, request.get(HASH_IDS, []), int(sizes["in"])),
            "session": self.sessions,
            "parent": parents,
            "delay_s": delay_s,
        }
        for name, value in values.items():
            self.values[name].append(value)
        self.labels.append(place.removeprefix(f"{self.what}, "))
        self.ends_s.append(start_s + (0.0 if took_s is None else _seconds(place, "api_time", took_s)))
        return row

    def _blocks(self, place: str, ids: Any, tokens: int) -> list[int]:
        """Return the ids of a prompt's blocks; a partial one at the end that has none gets its own."""
        if not isinstance(ids, list) or not all(is_whole_number(one) for one in ids):
            raise TraceError(f"{place}: {HASH_IDS} must be a list of whole numbers, got {shown(ids)}")
        keys: list[tuple[int, Any]] = [(self.scope, one) for one in ids]
        needed = -(-tokens // self.block_size)
        if len(keys) > needed:
            has = f"{HASH_IDS} has {len(keys)} ids, and a prompt of {tokens} tokens {needed} blocks"
            raise TraceError(f"{place}: {has}")
        # tokens without an id, such as those of a partial block, are in no other prompt
        keys += [(-1 - len(self.labels), at) for at in range(len(keys), needed)]
        return [self.ids.setdefault(key, len(self.ids)) for key in keys]


def _some(row: int | None) -> list[int]:
    return [] if row is None else [row]


def _seconds(place: str, name: str, value: Any) -> float:
    """Return seconds of at least 0."""
    if not is_number(value) or not 0 <= float(value) < math.inf:
        raise TraceError(f"{place}: {name} must be seconds of at least 0, got {shown(value)}")
    return float(value)
