"""Serving on standard input and output: a message of JSON a line in, a reply a line out, in order.

Blank lines are skipped; a last line without an end is read as well. A client may send many messages before it
reads a reply, as long as it also reads: a pipe holds at most 1 MiB each way, and a server whose replies
nobody takes stops reading.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import sys
import termios
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from fastroof.backends.serve.answer import ServedPlans
from fastroof.backends.serve.messages import answer_line, error_reply, write_reply
from fastroof.errors import BackendError

if TYPE_CHECKING:
    from fastroof.backends.serve.limits import ServeLimits
    from fastroof.plan import StepPlan

_PIPE_BYTES: Final = 2**20  # of a widened pipe, and of one read
_FLUSH_BYTES: Final = 2**16
_MOST_PARTS: Final = 512  # of one writev; Linux takes 1024


@contextlib.contextmanager
def protocol_output() -> Iterator[int]:
    """Keep standard output for replies, and yield where to write them; other prints go to standard error."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield output
    finally:
        sys.stdout.flush()
        os.dup2(output, 1)
        os.close(output)


def serve_stdio(
    plans: Mapping[str, StepPlan],
    *,
    limits: ServeLimits | None = None,
    input_fd: int = 0,
    output_fd: int = 1,
) -> None:
    """Answer lines on standard input until it ends, nobody reads, or SIGTERM or SIGINT comes.

    Parameters
    ----------
    plans : mapping of str to StepPlan
        By name.
    limits : ServeLimits, optional
        What is refused.
    input_fd, output_fd : int
        The two pipes.

    Raises
    ------
    BackendError
        If there are no plans, or more than the limits allow. A message never raises.

    Notes
    -----
    After a signal every line that had arrived whole is answered, one that had arrived in part gets an error,
    and the function returns. A second signal ends the process at once.
    """
    served = ServedPlans(plans, limits)
    with _stop_signals() as stop_fd:
        serve_pipe(served, input_fd, output_fd, stop_fd)


@contextlib.contextmanager
def _stop_signals() -> Iterator[int]:
    """Yield a file descriptor that becomes readable when SIGTERM or SIGINT comes."""

    def end_at_the_next(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)

    stop_fd, signal_fd = os.pipe()
    os.set_blocking(signal_fd, False)
    # written when the signal comes; a handler in Python may wait for the poll that it should end
    former_fd = signal.set_wakeup_fd(signal_fd)
    former = {number: signal.signal(number, end_at_the_next) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop_fd
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(former_fd)
        os.close(stop_fd)
        os.close(signal_fd)


def serve_pipe(served: ServedPlans, input_fd: int, output_fd: int, stop_fd: int | None = None) -> None:
    """Answer lines from one blocking file descriptor on another, until it ends or ``stop_fd`` is readable."""
    for fd in (input_fd, output_fd):
        with contextlib.suppress(OSError, AttributeError):  # of Linux only, and of pipes
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    output = Outflow(output_fd)
    reader = LineReader(Inflow(input_fd, output, stop_fd), served.limits)
    with contextlib.suppress(BrokenPipeError):
        while True:
            try:
                line = reader.next_line()
            except BackendError as error:
                output.put(write_reply(error_reply(error)) + b"\n")
                continue
            if line is None:
                break
            if line.strip():
                output.put(answer_line(served, line))
        output.flush()


class Outflow:
    """Writes to a blocking file descriptor, in few calls."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._parts: list[memoryview] = []
        self._num_bytes = 0

    def put(self, part: bytes) -> None:
        """Add bytes to be written."""
        self._parts.append(memoryview(part))
        self._num_bytes += len(part)
        if self._num_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write everything; raises BrokenPipeError if nobody reads any more."""
        parts, self._parts, self._num_bytes = self._parts, [], 0
        while parts:
            written = os.writev(self.fd, parts[:_MOST_PARTS])
            done = 0
            while done < len(parts) and written >= len(parts[done]):
                written -= len(parts[done])
                done += 1
            del parts[:done]
            if written:
                parts[0] = parts[0][written:]


class Inflow:
    """Reads a blocking file descriptor until it ends or ``stop_fd`` is readable; flushes the output first.

    Once the server is stopped, what the pipe holds at that moment is still read.
    """

    def __init__(self, fd: int, output: Outflow, stop_fd: int | None = None) -> None:
        self._fd = fd
        self._output = output
        self._stop_fd = stop_fd
        self._left: int | None = None
        self._poll = select.poll()
        self._poll.register(output.fd, 0)
        self._poll.register(fd, select.POLLIN)  # a socket is both
        if stop_fd is not None:
            self._poll.register(stop_fd, select.POLLIN)

    @property
    def was_stopped(self) -> bool:
        """Whether the server was stopped, rather than the stream ended."""
        return self._left is not None

    def read_into(self, room: memoryview) -> int:
        """Wait for bytes and read them; 0 at the end. Raises BrokenPipeError as :meth:`Outflow.flush`."""
        self._output.flush()
        if self._left is None:
            for fd, event in self._poll.poll():
                if fd == self._output.fd and event & (select.POLLERR | select.POLLNVAL):
                    raise BrokenPipeError
                if fd == self._stop_fd:
                    # no more than a pipe holds: a file would hold everything that is still to come
                    self._left = min(_arrived_bytes(self._fd), _PIPE_BYTES)
        if self._left is None:
            return os.readv(self._fd, [room])
        if not self._left:
            return 0
        count = os.readv(self._fd, [room[: self._left]])
        self._left = self._left - count if count else 0
        return count


def _arrived_bytes(fd: int) -> int:
    try:
        held = fcntl.ioctl(fd, termios.FIONREAD, struct.pack("i", 0))
    except OSError:  # a device that holds nothing
        return 0
    return int(struct.unpack("i", held)[0])


class LineReader:
    """Finds lines in what a pipe holds; longer ones than the limits allow are dropped as they come."""

    def __init__(self, inflow: Inflow, limits: ServeLimits) -> None:
        self._inflow = inflow
        self._limits = limits
        self._held = bytearray()
        self._searched = 0
        self._room = memoryview(bytearray(_PIPE_BYTES))
        self._is_dropping = False

    def next_line(self) -> bytes | None:
        """Wait for the next line, without its end; None at the end of all.

        Raises a BackendError once for a line that is too long or was cut off; the call after it goes on.
        """
        while True:
            end = self._held.find(b"\n", self._searched)
            if end >= 0:
                line = bytes(self._held[:end])
                del self._held[: end + 1]
                self._searched = 0
                if self._is_dropping:
                    self._is_dropping = False
                    continue
                self._limits.check_line(len(line))
                return line
            if self._is_dropping:
                self._held.clear()
            elif len(self._held) > self._limits.json_bytes:
                self._is_dropping = True
                self._limits.check_line(len(self._held))
            self._searched = len(self._held)
            count = self._inflow.read_into(self._room)
            if not count:
                return self._last_line()
            self._held += self._room[:count]

    def _last_line(self) -> bytes | None:
        line = bytes(self._held)
        self._held.clear()
        self._searched = 0
        if not line or self._is_dropping:
            return None
        if self._inflow.was_stopped:
            raise BackendError(f"the server was stopped after {len(line)} bytes of a line")
        return line
