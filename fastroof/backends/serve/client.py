"""A client of ``fastroof serve --http``."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlencode, urlsplit

import numpy as np
import pyarrow as pa

from fastroof import errors
from fastroof.arrays import Floats, Ints
from fastroof.backends.serve.arrow_steps import (
    ARROW_TYPE,
    DECODE_COLUMNS,
    RAGGED_COLUMNS,
    read_times,
    write_stream,
)
from fastroof.backends.serve.limits import UNIX, is_loopback
from fastroof.checks import shown
from fastroof.documents import parse_json
from fastroof.errors import BackendError, BatchError, FastroofError
from fastroof.given_arrays import common_shape
from fastroof.run import StepBatch
from fastroof.run.batch import int_array

if TYPE_CHECKING:
    from typing import Self

STEPS_A_REQUEST: Final = 2**19
_REQUESTS_A_BODY: Final = 2**20
_HEADERS_BYTES: Final = 2**12
_INT32: Final = np.iinfo(np.int32)

Steps = StepBatch | Iterable[Iterable[tuple[int, int]]]


class TimesAndErrors(NamedTuple):
    """Times of steps in microseconds, and one standard error over each."""

    latency_us: Floats
    relative_error: Floats


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a server on a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket's path."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class PlanClient:
    """Times steps by the plans of a server.

    Arrays of steps travel as Arrow IPC streams, in parts that the server accepts; everything else as JSON.
    One call runs at a time, on a connection that stays open; threads that should run in parallel take a
    client each. In a forked child a client connects anew.

    Parameters
    ----------
    url : str
        Where the server listens: ``http://127.0.0.1:8080``, ``unix:PATH``, or ``https://`` of its proxy.
    token : str, optional
        What the server asks for; not sent to another machine without TLS.
    tls_root : Path, optional
        PEM file of the certificate to trust, if the system does not.
    timeout_s : float, default 120
        Longest wait for the server to accept or send something.

    Raises
    ------
    BackendError
        If there is no such server, or it refuses the token.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.backends.serve.http_server import HttpServer
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"))
    >>> with HttpServer({"small": plan}) as server, PlanClient(f"http://127.0.0.1:{server.port}") as client:
    ...     one_us = client.decode_us(64, 4096)
    ...     two_us = client.step_us([[(2048, 0)], [(1, 4095)] * 64])
    >>> bool(two_us[1] == one_us)
    True
    """

    def __init__(
        self, url: str, *, token: str | None = None, tls_root: Path | None = None, timeout_s: float = 120.0
    ) -> None:
        self._lock, self._process = Lock(), os.getpid()
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            self._connection = _connection(url, token, tls_root, timeout_s)
        except (OSError, ValueError) as error:
            if isinstance(error, FastroofError):
                raise
            raise BackendError(f"cannot connect to {shown(url, 80)}: {error}") from None
        try:
            self.description: dict[str, Any] = self.ask({"describe": True})
        except FastroofError:
            self.close()
            raise
        limits = self.description["limits"]
        # a request takes 16 bytes, and a step of them as much again
        fits = max(1, (limits["max_message_bytes"] - _HEADERS_BYTES) // 32)
        self._most_steps = min(STEPS_A_REQUEST, limits["max_steps"], fits)
        self._most_requests = min(_REQUESTS_A_BODY, limits["max_requests"], fits)
        self._detailed = limits["max_detailed_steps"], limits["max_detailed_requests"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._connection.close()

    @property
    def plan_names(self) -> list[str]:
        """Names of the plans, in order."""
        return [plan["name"] for plan in self.description["plans"]]

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message of JSON, and return its reply without the id.

        Parameters
        ----------
        message : mapping
            One of :mod:`fastroof.backends.serve.messages`: ``{"plan": name, "explain": [[2048, 0]]}``,
            ``{"memory": True}``, ``{"simulate": {"workload": {"rate": 10}}}``.

        Raises
        ------
        FastroofError
            What the server answered.
        """
        body = json.dumps(dict(message)).encode()
        reply: dict[str, Any] = _parsed(self._post("/message", "application/json", body))
        reply.pop("id", None)
        return reply

    def decode_us(self, batch_size: Any, kv_len: Any, plan: str | int | None = None) -> Any:
        """Time decode steps of ``batch_size`` requests that each attend to ``kv_len`` tokens.

        Parameters
        ----------
        batch_size, kv_len : int or array_like of int
            Broadcast; kv_len counts the new token.
        plan : str or int, optional
            Which plan, by name or number; needed if several are served.

        Returns
        -------
        float or ndarray of float64
            Microseconds a step, of the broadcast shape: to the bit what ``plan.decode_us`` returns there.

        Raises
        ------
        BackendError
            If the call fails, or the plan is not served.
        BatchError, PlanRangeError
            As of :meth:`StepPlan.decode_us`.
        """
        sizes = _broadcast(batch_size, kv_len)
        if not sizes[0].shape:
            # for one step JSON takes two thirds of the time
            one = {"plan": plan, "batch_size": int(sizes[0]), "kv_len": int(sizes[1])}
            return float(self.ask(one)["latency_us"][0])
        [times] = self._decodes(plan, sizes, False, self._most_steps)
        return times.reshape(sizes[0].shape)

    def decode_with_errors(
        self, batch_size: Any, kv_len: Any, plan: str | int | None = None
    ) -> TimesAndErrors:
        """Time decode steps, with one standard error over each, as ``plan.decode_error`` has it.

        Parameters
        ----------
        batch_size, kv_len, plan
            As for :meth:`decode_us`.

        Returns
        -------
        TimesAndErrors
            Microseconds a step and its relative error, of the broadcast shape with at least one dimension.
        """
        sizes = _broadcast(batch_size, kv_len)
        shape = sizes[0].shape or (1,)
        found = self._decodes(plan, sizes, True, min(self._most_steps, self._detailed[0]))
        return TimesAndErrors(*(column.reshape(shape) for column in found))

    def _decodes(self, plan: str | int | None, sizes: list[Ints], errors: bool, most: int) -> list[Floats]:
        flat = [_narrow(array.reshape(-1)) for array in sizes]
        starts = range(0, flat[0].size, most)

        def part(steps: slice) -> Any:
            return pa.record_batch([pa.array(array[steps]) for array in flat], names=DECODE_COLUMNS)

        return self._times(plan, errors, part, [slice(at, at + most) for at in starts], flat[0].size)

    def step_us(self, steps: Steps, plan: str | int | None = None) -> Floats:
        """Time steps of any requests.

        Parameters
        ----------
        steps : StepBatch, or one list of (new_tokens, context_len) a step
            The steps.
        plan : str or int, optional
            Which plan, by name or number; needed if several are served.

        Returns
        -------
        ndarray of float64, shape (steps,)
            Microseconds a step: to the bit what ``plan.step_us`` returns there.

        Raises
        ------
        BackendError
            If the call fails, or the plan is not served.
        BatchError, PlanRangeError
            As of :meth:`StepPlan.step_us`.
        """
        return self._steps(plan, steps, False, self._most_steps, self._most_requests)[0]

    def step_with_errors(self, steps: Steps, plan: str | int | None = None) -> TimesAndErrors:
        """Time steps of any requests, with one standard error over each, as ``plan.step_error`` has it."""
        most_steps, most_requests = self._detailed
        most = min(self._most_steps, most_steps), min(self._most_requests, most_requests)
        return TimesAndErrors(*self._steps(plan, steps, True, *most))

    def _steps(
        self, plan: str | int | None, steps: Steps, errors: bool, most_steps: int, most_requests: int
    ) -> list[Floats]:
        batch = steps if isinstance(steps, StepBatch) else StepBatch.from_requests(steps)
        offsets = batch.offsets
        columns = [pa.array(_narrow(values)) for values in (batch.new_tokens, batch.context_len)]

        def part(steps: slice) -> Any:
            first, last = int(offsets[steps.start]), int(offsets[steps.stop])
            starts = (offsets[steps.start : steps.stop + 1] - first).astype(np.int32)
            lists = [pa.ListArray.from_arrays(starts, values[first:last]) for values in columns]
            return pa.record_batch(lists, names=RAGGED_COLUMNS)

        parts, at = [], 0
        while at < batch.num_steps:
            fits = int(np.searchsorted(offsets, offsets[at] + most_requests, side="right")) - 1
            end = min(max(fits, at + 1), at + most_steps, batch.num_steps)
            parts.append(slice(at, end))
            at = end
        return self._times(plan, errors, part, parts, batch.num_steps)

    def _times(
        self,
        plan: str | int | None,
        errors: bool,
        part: Callable[[slice], Any],
        parts: list[slice],
        num_steps: int,
    ) -> list[Floats]:
        """Ask for each part of the steps; times come first, then errors if asked for."""
        query = {"errors": "true"} if errors else {}
        if plan is not None:
            query["plan"] = str(plan)
        path = "/steps?" + urlencode(query) if query else "/steps"
        found = [np.empty(num_steps) for _ in range(1 + errors)]
        for steps in parts:
            body = self._post(path, ARROW_TYPE, write_stream(part(steps)), steps.start)
            for row, column in zip(found, read_times(body), strict=True):
                row[steps] = column
        return found

    def _post(self, path: str, kind: str, body: bytes, before: int = 0) -> bytes:
        """Send a request and return the body of its reply; raise what the server answers otherwise."""
        if self._process != os.getpid():
            # a fork shares the parent's connection, and its lock as a call of another thread left it
            self._lock, self._process = Lock(), os.getpid()
            self._connection.close()
        with self._lock:
            reused = self._connection.sock is not None
            try:
                try:
                    status, reply = self._exchange(path, kind, body)
                except (http.client.RemoteDisconnected, ConnectionError):
                    self._connection.close()
                    if not reused:
                        raise
                    # the server closes connections that were idle for long
                    status, reply = self._exchange(path, kind, body)
            except BaseException as error:
                self._connection.close()  # what comes next belongs to another request
                if isinstance(error, OSError | http.client.HTTPException):
                    raise BackendError(f"the request failed: {error or type(error).__name__}") from None
                raise
        if status != 200:
            answer = _refusal(status, reply)
            of = getattr(errors, str(answer.get("error")), None)
            refused = of if isinstance(of, type) and issubclass(of, FastroofError) else BackendError
            counted = f" (counted from step {before})" if before else ""
            raise refused(f"{answer.get('message')}{counted}")
        return reply

    def _exchange(self, path: str, kind: str, body: bytes) -> tuple[int, bytes]:
        self._connection.request("POST", path, body, {"Content-Type": kind, **self._headers})
        response = self._connection.getresponse()
        return response.status, response.read()


def _connection(
    url: str, token: str | None, tls_root: Path | None, timeout_s: float
) -> http.client.HTTPConnection:
    if url.startswith(UNIX):
        return _UnixConnection(url.removeprefix(UNIX), timeout_s)
    address = urlsplit(url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise BackendError(f"a URL like http://127.0.0.1:8080 or unix:PATH is needed, got {shown(url, 80)}")
    if address.scheme == "https":
        context = ssl.create_default_context(cafile=tls_root)
        return http.client.HTTPSConnection(address.hostname, address.port, timeout=timeout_s, context=context)
    if token is not None and not is_loopback(address.hostname):
        raise BackendError("the token could be read on its way to another machine: use https://")
    return http.client.HTTPConnection(address.hostname, address.port, timeout=timeout_s)


def _broadcast(batch_size: Any, kv_len: Any) -> list[Ints]:
    arrays = [
        int_array(name, value) for name, value in zip(DECODE_COLUMNS, (batch_size, kv_len), strict=True)
    ]
    shapes = {name: array.shape for name, array in zip(DECODE_COLUMNS, arrays, strict=True)}
    shape = common_shape(shapes, BatchError)
    return [np.broadcast_to(array, shape) for array in arrays]


def _narrow(array: Ints) -> Ints:
    """Return sizes as int32 if they fit, or as int64: half the bytes to send."""
    if array.dtype == np.int32:
        return array
    fits = not array.size or (array.min() >= _INT32.min and array.max() <= _INT32.max)
    return array.astype(np.int32 if fits else np.int64)


def _refusal(status: int, reply: bytes) -> dict[str, Any]:
    """Return the error of a reply, which may be a proxy's."""
    with contextlib.suppress(BackendError):
        if isinstance(answer := _parsed(reply), dict) and "message" in answer:
            return answer
    return {"message": f"the server, or a proxy before it, answered {status}: {shown(reply[:80], 100)}"}


def _parsed(reply: bytes) -> dict[str, Any]:
    parsed: dict[str, Any] = parse_json(reply, "a reply", BackendError, most_bytes=len(reply))
    return parsed
