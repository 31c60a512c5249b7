"""A client of ``fastroof serve --stdio``: plans in a process of their own."""

from __future__ import annotations

import json
import os
import select
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Ints
from fastroof.backends.serve import frames
from fastroof.backends.serve.pipe import widen
from fastroof.backends.serve.steps_asked import TimesAndErrors
from fastroof.checks import shown
from fastroof.documents import parse_json
from fastroof.errors import BackendError, BatchError, FastroofError
from fastroof.run import StepBatch
from fastroof.run.batch import int_array

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Reply", "StdioClient"]


_END_TIMEOUT_S: Final = 10.0
_READ_BYTES: Final = 2**16  # more of a long reply goes straight to where it belongs
_MOST_WORDS_BYTES: Final = 2**16


class Reply(NamedTuple):
    """A reply as it came: times, times and standard errors, JSON, or an error."""

    request_id: int
    answer: Floats | TimesAndErrors | str | FastroofError


class StdioClient:
    """Plans in a server of their own, at the other end of a pipe.

    Parameters
    ----------
    plans : sequence of str
        ``MODEL[,KEY=VALUE...]`` each, as on the command line of ``fastroof serve``.
    options : sequence of str
        More of that command line: ``["--gpu", "h200", "--max-steps", "1000"]``.

    Raises
    ------
    BackendError
        If the server does not start; the message is its own.

    Notes
    -----
    A wrong step raises the error that the plan itself would raise, and the server goes on. For one thread
    at a time.

    Examples
    --------
    >>> with StdioClient(["llama-3.1-8b"]) as step:
    ...     one_us = step.decode_us(64, 4096)
    ...     two_us = step.step_us([[(2048, 0)], [(1, 4095)] * 64])
    >>> bool(two_us[1] == one_us)
    True
    """

    def __init__(self, plans: Sequence[str], options: Sequence[str] = ()) -> None:
        command = [sys.executable, "-m", "fastroof", "serve", *plans, "--stdio", *options]
        self._said_bytes = 0
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, bufsize=0
        )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._to, self._from = self._server.stdin.fileno(), self._server.stdout.fileno()
        for fd in (self._to, self._from):
            widen(fd)
        # a full pipe is waited for where replies are taken meanwhile
        os.set_blocking(self._to, False)
        self._both = select.poll()
        self._both.register(self._to, select.POLLOUT)
        self._both.register(self._from, select.POLLIN)
        self._inbox = bytearray()  # what came and was not asked for yet
        self._next_id = 0
        try:
            self._send(frames.DESCRIBE, 0, ())
            self.description: dict[str, Any] = _parsed(str(self.receive_reply().answer))
        except BaseException:
            self.close()
            raise
        if warnings := self._words():
            print(warnings, file=sys.stderr)

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._server.pid

    @property
    def plan_names(self) -> list[str]:
        """Names of the plans, in order."""
        return [plan["name"] for plan in self.description["plans"]]

    def decode_us(self, batch_size: Any, kv_len: Any, plan: str | int = 0) -> Any:
        """Time decode steps, as ``plan.decode_us`` does.

        Parameters
        ----------
        batch_size, kv_len : int or array_like of int
            Broadcast.
        plan : str or int
            Which plan, by name or number.

        Returns
        -------
        float or ndarray of float64
            Microseconds a step, of the broadcast shape.

        Raises
        ------
        FastroofError
            As ``plan.decode_us``, or a BackendError of the server.
        """
        if type(batch_size) is type(kv_len) is type(plan) is int:
            try:
                frame = frames.one_decode_frame(self._next_id, plan, batch_size, kv_len)
            except struct.error:
                raise BatchError(
                    f"sizes must fit int64, got {batch_size} and {kv_len}, plan {plan}"
                ) from None
            self._next_id += 1
            self.send_bytes(frame)
            return float(self.receive()[0])
        arrays = [int_array("batch_size", batch_size), int_array("kv_len", kv_len)]
        batch, kv = np.broadcast_arrays(*arrays)
        self.send_decode(batch.reshape(-1), kv.reshape(-1), plan)
        times = self.receive().reshape(batch.shape)
        return times if times.shape else float(times)

    def step_us(self, steps: StepBatch | Iterable[Iterable[tuple[int, int]]], plan: str | int = 0) -> Floats:
        """Time ragged steps, as ``plan.step_us`` does.

        Parameters
        ----------
        steps : StepBatch, or one list of (new_tokens, context_len) a step
            The steps.
        plan : str or int
            Which plan, by name or number.

        Returns
        -------
        ndarray of float64, shape (steps,)
            Microseconds a step.

        Raises
        ------
        FastroofError
            As ``plan.step_us``, or a BackendError of the server.
        """
        self.send_steps(steps, plan)
        return self.receive()

    def step_scalar(self, new_tokens: list[int], context_len: list[int], plan: int = 0) -> float:
        """Time one step of any requests, us, as ``plan.step_scalar`` does."""
        try:
            if len(new_tokens) != len(context_len):
                raise TypeError
            frame = frames.one_step_frame(self._next_id, plan, new_tokens, context_len)
        except (TypeError, OverflowError, struct.error):
            raise BatchError(
                "two lists of integers of one length are needed, got "
                f"{shown(new_tokens)} and {shown(context_len)} for plan {shown(plan)}"
            ) from None
        self._next_id += 1
        self.send_bytes(frame)
        return float(self.receive()[0])

    def send_decode(self, batch_size: Any, kv_len: Any, plan: str | int = 0) -> None:
        """Send decode steps, given as arrays of one length, without waiting for :meth:`receive`."""
        arrays = [int_array("batch_size", batch_size), int_array("kv_len", kv_len)]
        narrow = all(array.dtype == np.int32 for array in arrays)
        dtype = np.int32 if narrow else np.int64
        sizes: list[Ints] = [np.ascontiguousarray(array, dtype) for array in arrays]
        if sizes[0].shape != sizes[1].shape or sizes[0].ndim != 1:
            raise BackendError(f"one list each is needed, got shapes {sizes[0].shape} and {sizes[1].shape}")
        self._send(frames.DECODE, plan, sizes)

    def send_steps(self, steps: StepBatch | Iterable[Iterable[tuple[int, int]]], plan: str | int = 0) -> None:
        """Send ragged steps without waiting for :meth:`receive`."""
        batch = steps if isinstance(steps, StepBatch) else StepBatch.from_requests(steps)
        self._send(frames.RAGGED, plan, [batch.new_tokens, batch.context_len, batch.offsets])

    def receive(self) -> Floats:
        """Wait for the reply to the first request that has none yet.

        Returns
        -------
        ndarray of float64, shape (steps,)
            Microseconds a step.

        Raises
        ------
        FastroofError
            What the server answered.
        """
        answer = self.receive_reply().answer
        if isinstance(answer, FastroofError):
            raise answer
        if isinstance(answer, str | tuple):
            raise BackendError("the next reply is not of times alone: receive_reply() takes it")
        return answer

    def decode_with_errors(self, batch_size: Any, kv_len: Any, plan: str | int = 0) -> TimesAndErrors:
        """Time decode steps, and say how sure that is.

        Parameters
        ----------
        batch_size, kv_len : int or array_like of int, shape (steps,)
            Broadcast.
        plan : str or int
            Which plan, by name or number.

        Returns
        -------
        TimesAndErrors
            Microseconds a step, and one standard error over it, as ``plan.decode_error`` says.

        Raises
        ------
        FastroofError
            As ``plan.decode_us``, or a BackendError of the server.
        """
        sizes = np.broadcast_arrays(
            np.atleast_1d(int_array("batch_size", batch_size)), int_array("kv_len", kv_len)
        )
        self._send(frames.DECODE_ERRORS, plan, [np.ascontiguousarray(size, np.int64) for size in sizes])
        return self._receive_errors()

    def step_with_errors(
        self, steps: StepBatch | Iterable[Iterable[tuple[int, int]]], plan: str | int = 0
    ) -> TimesAndErrors:
        """Time ragged steps, and say how sure that is: as :meth:`step_us`, with ``plan.step_error``."""
        batch = steps if isinstance(steps, StepBatch) else StepBatch.from_requests(steps)
        self._send(frames.RAGGED_ERRORS, plan, [batch.new_tokens, batch.context_len, batch.offsets])
        return self._receive_errors()

    def _receive_errors(self) -> TimesAndErrors:
        answer = self.receive_reply().answer
        if isinstance(answer, FastroofError):
            raise answer
        assert isinstance(answer, TimesAndErrors)
        return answer

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message of JSON, as of :mod:`fastroof.backends.serve.message_forms`, and wait for its reply.

        Parameters
        ----------
        message : mapping
            Such as ``{"memory": True}`` or ``{"explain": [[2048, 0], [1, 4095]]}``.

        Returns
        -------
        dict
            The reply, without its id.

        Raises
        ------
        FastroofError
            What the server answered.
        """
        self.send_bytes(frames.message_frame(self._next_id, json.dumps(dict(message)).encode()))
        self._next_id += 1
        answer = self.receive_reply().answer
        if isinstance(answer, FastroofError):
            raise answer
        reply: dict[str, Any] = _parsed(str(answer))
        reply.pop("id", None)
        return reply

    def send_bytes(self, *parts: bytes | memoryview) -> None:
        """Send bytes as they are, such as the parts of :func:`frames.request_frame`."""
        left = [memoryview(part) for part in parts if len(part)]
        while left:
            try:
                count = os.writev(self._to, left)
            except BlockingIOError:
                self._wait_for_room()
                continue
            except BrokenPipeError:
                raise self._ended() from None
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def receive_reply(self) -> Reply:
        """Wait for the next reply, whatever it is; an error is returned, not raised."""
        while len(self._inbox) < frames.REPLY_HEADER.size:
            self._inbox += self._read()
        header = bytes(self._inbox[: frames.REPLY_HEADER.size])
        del self._inbox[: frames.REPLY_HEADER.size]
        magic, version, status, _, request_id, body_bytes, count = frames.REPLY_HEADER.unpack(header)
        if magic != frames.REPLY_MAGIC or version != frames.VERSION:
            raise BackendError(f"this is no reply of version {frames.VERSION}: {header[:16].hex(' ')}")
        if status == frames.TIMES:
            times = np.empty(count)
            if count:
                self._fill(times.data.cast("B"))
            return Reply(request_id, times)
        if status == frames.TIMES_AND_ERRORS:
            both = np.empty((2, count))
            if count:
                self._fill(both.data.cast("B"))
            return Reply(request_id, TimesAndErrors(*both))
        body = bytearray(body_bytes)
        self._fill(memoryview(body))
        text = body[:count].decode()
        if status == frames.JSON_TEXT:
            return Reply(request_id, text)
        return Reply(request_id, frames.ERROR_STATUS.get(status, BackendError)(text))

    def close(self) -> None:
        """End the server, and what it still computes."""
        for stream in (self._server.stdin, self._server.stdout):
            if stream is not None:
                stream.close()
        try:
            self._server.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, kind: int, plan: str | int, arrays: Sequence[Ints]) -> None:
        self.send_bytes(*frames.request_frame(self._next_id, kind, plan, arrays))
        self._next_id += 1

    def _wait_for_room(self) -> None:
        """Wait until the server reads on, and take its replies meanwhile: it waits for that in turn."""
        for fd, event in self._both.poll():
            if fd == self._from and event & select.POLLIN:
                self._inbox += self._read()

    def _read(self) -> bytes:
        got = os.read(self._from, _READ_BYTES)
        if not got:
            raise self._ended()
        return got

    def _fill(self, room: memoryview) -> None:
        count = min(len(room), len(self._inbox))
        room[:count] = self._inbox[:count]
        del self._inbox[:count]
        while count < len(room):
            got = os.readv(self._from, [room[count:]])
            if not got:
                raise self._ended()
            count += got

    def _ended(self) -> BackendError:
        code = self._server.wait()
        return BackendError(f"the server ended with exit code {code}: {self._words() or 'it said nothing'}")

    def _words(self) -> str:
        """What the server said on standard error since it was last asked."""
        said = os.pread(self._said.fileno(), _MOST_WORDS_BYTES, self._said_bytes)
        self._said_bytes += len(said)
        return said.decode(errors="replace").strip()


def _parsed(reply: str) -> dict[str, Any]:
    parsed: dict[str, Any] = parse_json(reply, "a reply", BackendError, most_bytes=len(reply))
    return parsed
