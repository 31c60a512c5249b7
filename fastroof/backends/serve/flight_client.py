"""A client of plans that are served over Arrow Flight."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
from pyarrow import flight

from fastroof import errors
from fastroof.arrays import Floats, Ints
from fastroof.backends.serve.address import is_loopback
from fastroof.backends.serve.flight_calls import ERRORS_IN_STREAM
from fastroof.backends.serve.flight_steps import ERRORS
from fastroof.backends.serve.steps_asked import TimesAndErrors
from fastroof.checks import shown
from fastroof.documents import parse_json
from fastroof.errors import BackendError, BatchError, FastroofError
from fastroof.run import StepBatch
from fastroof.run.batch import int_array

__all__ = ["FlightSteps"]


STEPS_A_MESSAGE: Final = 2**18
"""Steps sent at once: one message of 4 MiB is computed while little of it is waiting elsewhere."""

_REQUESTS_A_MESSAGE: Final = 2**20
_HEADERS_BYTES: Final = 2**12
_DECODES: Final = ("batch_size", "kv_len")
_REQUESTS: Final = ("new_tokens", "context_len")


class FlightSteps:
    """Times steps by the plans of another process.

    One call runs at a time: threads that are to run side by side take one each.

    Parameters
    ----------
    location : str
        Where the server listens, as ``grpc://127.0.0.1:8815``, or ``grpc+tls://`` with TLS.
    token : str, optional
        What the server asks for; not sent to another machine without TLS.
    tls_root : Path, optional
        PEM file of the certificate to trust, where the system does not.

    Raises
    ------
    BackendError
        If there is no such server, or it refuses the token.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.backends.serve.flight import FlightServer
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> with FlightServer({"small": plan}) as server, FlightSteps(f"grpc://127.0.0.1:{server.port}") as steps:
    ...     steps.plans()["small"]["gpu"], steps.decode_us("small", 64, 4096) == plan.decode_us(64, 4096)
    ('h100', True)
    """

    def __init__(self, location: str, *, token: str | None = None, tls_root: Path | None = None) -> None:
        self._lock = Lock()
        self._streams: dict[tuple[str, ...], tuple[Any, Any]] = {}
        address = urlsplit(location)
        if address.scheme not in ("grpc", "grpc+tcp", "grpc+tls") or not address.hostname:
            raise BackendError(f"a location like grpc://127.0.0.1:8815 is needed, got {shown(location, 80)}")
        if token is not None and address.scheme != "grpc+tls" and not is_loopback(address.hostname):
            raise BackendError("the token could be read on its way to another machine: use grpc+tls://")
        headers = [tuple(word.encode() for word in ERRORS_IN_STREAM)]
        if token is not None:
            headers.append((b"authorization", f"Bearer {token}".encode()))
        self._options = flight.FlightCallOptions(headers=headers)
        with _as_backend_errors():
            root = None if tls_root is None else Path(tls_root).read_bytes()
            self._client = flight.FlightClient(location, tls_root_certs=root)
        try:
            limits = self.health()["limits"]
        except FastroofError:
            self._client.close()
            raise
        # a request is 16 bytes, and a step of them as much again
        fits = max(1, (limits["max_message_bytes"] - _HEADERS_BYTES) // 32)
        self._most_steps = min(STEPS_A_MESSAGE, limits["max_steps"], fits)
        self._most_requests = min(_REQUESTS_A_MESSAGE, limits["max_requests"], fits)
        self._detailed = limits["max_detailed_steps"], limits["max_detailed_requests"]

    def __enter__(self) -> FlightSteps:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the streams and the connection."""
        with self._lock:
            for key in list(self._streams):
                self._drop(key)
            self._client.close()

    def health(self) -> dict[str, Any]:
        """Ask what the server serves: its version, plans, limits and the calls that are running."""
        with _as_backend_errors():
            results = list(self._client.do_action(flight.Action("health", b""), self._options))
            health: dict[str, Any] = parse_json(results[0].body.to_pybytes(), "a reply", BackendError)
            return health

    def plans(self) -> dict[str, dict[str, str]]:
        """Ask for the plans by name, each with its model, gpu, tp, dtype, kv_dtype, runtime and so on."""
        with _as_backend_errors():
            served = {}
            for info in self._client.list_flights(options=self._options):
                words = info.schema.metadata or {}
                served[info.descriptor.path[0].decode()] = {k.decode(): v.decode() for k, v in words.items()}
            return served

    def simulate(self, plan: str, **asked: Any) -> dict[str, Any]:
        """Simulate an engine on the server.

        Parameters
        ----------
        plan : str
            Which plan, by name.
        **asked
            ``workload={...}`` or ``trace={...}``, ``options={...}``, ``requests=True``, as
            :mod:`fastroof.backends.serve.simulations` says; a trace of more than some thousand requests is
            too long for this call.

        Returns
        -------
        dict
            ``summary``, and ``requests`` if they were asked for.

        Raises
        ------
        FastroofError
            As :func:`fastroof.simulate`, or a BackendError of the server.
        """
        return self.ask({"plan": plan, "simulate": asked})

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Ask the server anything that a line of JSON may ask.

        Parameters
        ----------
        message : dict
            One of :mod:`fastroof.backends.serve.json_lines`: ``{"plan": name, "explain": [[2048, 0]]}``.

        Returns
        -------
        dict
            The reply, without an id.

        Raises
        ------
        FastroofError
            What was wrong with it, or a BackendError of the server.

        Examples
        --------
        >>> import fastroof
        >>> from fastroof.backends.serve.flight import FlightServer
        >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
        >>> with FlightServer({"small": plan}) as server:
        ...     with FlightSteps(f"grpc://127.0.0.1:{server.port}") as steps:
        ...         reply = steps.ask({"plan": "small", "memory": True})
        >>> reply["memory"]["max_kv_tokens"] == plan.memory.max_kv_tokens
        True
        """
        body = json.dumps(message).encode()
        with _as_backend_errors():
            results = list(self._client.do_action(flight.Action("message", body), self._options))
            answer: dict[str, Any] = parse_json(results[0].body.to_pybytes(), "a reply", BackendError)
            if "error" in answer:
                _raise_told(answer, 0)
            del answer["id"]
            return answer

    def decode_us(self, plan: str, batch_size: Any, kv_len: Any) -> Any:
        """Time decode steps of ``batch_size`` requests that each attend to ``kv_len`` tokens.

        Parameters
        ----------
        plan : str
            Its name.
        batch_size, kv_len : int or array_like of int
            Broadcast; kv_len counts the new token.

        Returns
        -------
        float or ndarray of float64
            Microseconds a step, of the broadcast shape: to the bit what ``plan.decode_us`` returns there.

        Raises
        ------
        BackendError
            If the call fails or no plan has that name.
        BatchError, PlanRangeError
            As of :meth:`StepPlan.decode_us`.
        """
        batch, kv = _broadcast(batch_size, kv_len)
        [times] = self._decodes((plan,), batch, kv, self._most_steps)
        return times.reshape(batch.shape) if batch.shape else float(times[0])

    def decode_with_errors(self, plan: str, batch_size: Any, kv_len: Any) -> TimesAndErrors:
        """Time decode steps, and say how sure that is.

        Parameters
        ----------
        plan : str
            Its name.
        batch_size, kv_len : int or array_like of int
            Broadcast.

        Returns
        -------
        TimesAndErrors
            Microseconds a step and one standard error over it, as ``plan.decode_error`` says; of the
            broadcast shape, and of one dimension at least.

        Raises
        ------
        FastroofError
            As :meth:`decode_us`.
        """
        batch, kv = _broadcast(batch_size, kv_len)
        shape = batch.shape or (1,)
        found = self._decodes((plan, ERRORS), batch, kv, min(self._most_steps, self._detailed[0]))
        return TimesAndErrors(*(column.reshape(shape) for column in found))

    def _decodes(self, path: tuple[str, ...], batch: Ints, kv: Ints, most: int) -> Floats:
        flat = [_as_sent(array.reshape(-1)) for array in (batch, kv)]
        found = np.empty((len(path), flat[0].size))

        def message(steps: slice) -> Any:
            return pa.record_batch([pa.array(array[steps]) for array in flat], names=_DECODES)

        starts = range(0, flat[0].size, most)
        self._exchange(path, message, [slice(at, at + most) for at in starts], found)
        return found

    def step_us(self, plan: str, batch: StepBatch) -> Floats:
        """Time ragged steps.

        Parameters
        ----------
        plan : str
            Its name.
        batch : StepBatch
            The steps.

        Returns
        -------
        ndarray of float64, shape (steps,)
            Microseconds a step: to the bit what ``plan.step_us`` returns there.

        Raises
        ------
        BackendError
            If the call fails or no plan has that name.
        BatchError, PlanRangeError
            As of :meth:`StepPlan.step_us`.
        """
        times: Floats = self._steps((plan,), batch, self._most_steps, self._most_requests)[0]
        return times

    def step_with_errors(self, plan: str, batch: StepBatch) -> TimesAndErrors:
        """Time ragged steps, and say how sure that is: as :meth:`step_us`, with ``plan.step_error``."""
        most_steps, most_requests = self._detailed
        most = min(self._most_steps, most_steps), min(self._most_requests, most_requests)
        return TimesAndErrors(*self._steps((plan, ERRORS), batch, *most))

    def _steps(self, path: tuple[str, ...], batch: StepBatch, most_steps: int, most_requests: int) -> Floats:
        offsets = batch.offsets
        columns = [pa.array(values) for values in (batch.new_tokens, batch.context_len)]

        def message(steps: slice) -> Any:
            first, last = int(offsets[steps.start]), int(offsets[steps.stop])
            starts = offsets[steps.start : steps.stop + 1] - first
            lists = [pa.LargeListArray.from_arrays(starts, values[first:last]) for values in columns]
            return pa.record_batch(lists, names=_REQUESTS)

        parts, at = [], 0
        while at < batch.num_steps:
            fits = int(np.searchsorted(offsets, offsets[at] + most_requests, side="right")) - 1
            end = min(max(fits, at + 1), at + most_steps, batch.num_steps)
            parts.append(slice(at, end))
            at = end
        found = np.empty((len(path), batch.num_steps))
        self._exchange(path, message, parts, found)
        return found

    def _exchange(
        self, path: tuple[str, ...], message: Callable[[slice], Any], parts: list[slice], found: Floats
    ) -> None:
        """Ask for each part of the steps; times come first, and errors where the path asks for them."""
        with self._lock:
            for part in parts:
                for row, column in zip(found, self._ask(path, message(part), part.start), strict=True):
                    row[part] = column

    def _ask(self, path: tuple[str, ...], batch: Any, before: int) -> list[Any]:
        """Send one record batch on the stream of its path and columns, and await the answer's columns."""
        key = (*path, *(str(of) for of in batch.schema.types))
        try:
            with _as_backend_errors():
                if key not in self._streams:
                    descriptor = flight.FlightDescriptor.for_path(*path)
                    writer, reader = self._client.do_exchange(descriptor, self._options)
                    self._streams[key] = writer, reader
                    writer.begin(batch.schema)
                writer, reader = self._streams[key]
                writer.write_batch(batch)
                answer = reader.read_chunk()
        except BaseException:
            # what it would say next belongs to another question
            self._drop(key)
            raise
        if answer.app_metadata is not None:
            _raise_told(parse_json(answer.app_metadata.to_pybytes(), "a reply", BackendError), before)
        return [column.to_numpy() for column in answer.data.columns]

    def _drop(self, key: tuple[str, ...]) -> None:
        """End a stream; what is still on its way is of no interest."""
        writer, reader = self._streams.pop(key, (None, None))
        if writer is not None:
            with suppress(pa.ArrowException, OSError):
                writer.done_writing()
            reader.cancel()
            with suppress(pa.ArrowException, OSError):
                writer.close()


def _broadcast(batch_size: Any, kv_len: Any) -> tuple[Ints, Ints]:
    arrays = [int_array(name, value) for name, value in zip(_DECODES, (batch_size, kv_len), strict=True)]
    try:
        batch, kv = np.broadcast_arrays(*arrays)
    except ValueError:
        raise BatchError(f"shapes do not broadcast: {arrays[0].shape} and {arrays[1].shape}") from None
    return batch, kv


def _as_sent(array: Ints) -> Ints:
    """Sizes as a server takes them: int32 or int64."""
    return array if array.dtype in (np.int32, np.int64) else array.astype(np.int64)


def _raise_told(told: dict[str, str], before: int) -> None:
    of = getattr(errors, told["error"], None)
    kind = of if isinstance(of, type) and issubclass(of, FastroofError) else BackendError
    counted = f" (counted from step {before})" if before else ""
    raise kind(told["message"] + counted)


@contextmanager
def _as_backend_errors() -> Iterator[None]:
    try:
        yield
    except FastroofError:
        raise
    except StopIteration:
        raise BackendError("the server has ended the stream: connect again") from None
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise BackendError(_said(error)) from None


def _said(error: Exception) -> str:
    """What a server said, out of what gRPC and Arrow put around it."""
    text = str(error).removeprefix("Flight returned unavailable error, with message: ")
    _, hung_up, reason = text.partition("Debug Text: ")
    for end in (")). gRPC", ")) (", ". gRPC client debug context:", ". Client context:", ". Detail: "):
        text, reason = text.partition(end)[0], reason.partition(end)[0]
    return f"the server has closed the connection: {reason}" if hung_up else text or type(error).__name__
