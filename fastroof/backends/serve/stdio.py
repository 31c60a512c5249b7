"""Serving on standard input and output: a message of JSON a line in, a reply a line out, in order.

Blank lines are skipped; a last line without an end is read as well. A client may send many messages before it
reads a reply, as long as it also reads: a pipe holds at most 1 MiB each way, and a server whose replies
nobody takes stops reading.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from fastroof.backends.serve.answers import ServedPlans, answer_line, error_reply, write_reply
from fastroof.errors import BackendError
from fastroof.host import lengthen_pipe

if TYPE_CHECKING:
    from fastroof.backends.serve.limits import ServeLimits
    from fastroof.plan import StepPlan

_PIPE_BYTES: Final = 2**20  # of a widened pipe, and of one read
_FLUSH_BYTES: Final = 2**16


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
    plans: Mapping[str, StepPlan], *, limits: ServeLimits | None = None, input_fd: int = 0, output_fd: int = 1
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
        lengthen_pipe(fd, _PIPE_BYTES)
    pipe = _Pipe(input_fd, output_fd, stop_fd)
    with contextlib.suppress(BrokenPipeError):
        for line in _lines(pipe, served.limits):
            if isinstance(line, BackendError):
                pipe.put(write_reply(error_reply(line)) + b"\n")
            elif line.strip() or len(line) > served.limits.json_bytes:
                pipe.put(answer_line(served, line))
        pipe.flush()


def _lines(pipe: _Pipe, limits: ServeLimits) -> Iterator[bytes | BackendError]:
    """Yield lines without their ends, and an error for each that is too long or was cut off."""
    held = bytearray()
    is_dropping = False
    while part := pipe.read():
        *ends, rest = part.split(b"\n")
        for end in ends:
            held += end
            if not is_dropping:
                yield bytes(held)
            is_dropping = False
            held.clear()
        held += rest
        if len(held) > limits.json_bytes and not is_dropping:
            is_dropping = True
            yield bytes(held)  # which is refused for its length
        if is_dropping:
            held.clear()
    if held and pipe.is_stopped:
        yield BackendError(f"the server was stopped after {len(held)} bytes of a line")
    elif held:
        yield bytes(held)


class _Pipe:
    """Two blocking file descriptors: few reads and writes, and none of the first once stopped and empty."""

    def __init__(self, input_fd: int, output_fd: int, stop_fd: int | None) -> None:
        self._input_fd, self._output_fd, self._stop_fd = input_fd, output_fd, stop_fd
        self._replies = bytearray()
        self._left_bytes = _PIPE_BYTES
        self.is_stopped = False
        self._poll = select.poll()
        self._poll.register(output_fd, 0)
        self._poll.register(input_fd, select.POLLIN)  # a socket is both
        if stop_fd is not None:
            self._poll.register(stop_fd, select.POLLIN)

    def put(self, reply: bytes) -> None:
        """Add a reply to be written."""
        self._replies += reply
        if len(self._replies) >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write everything; raises BrokenPipeError if nobody reads any more."""
        replies = memoryview(bytes(self._replies))
        self._replies.clear()
        while replies:
            replies = replies[os.write(self._output_fd, replies) :]

    def read(self) -> bytes:
        """Wait for bytes and return them, none at the end; raises BrokenPipeError if nobody reads any more.

        Once the server is stopped, what the pipe holds is still read, but no more than that: a file would
        hold everything that is still to come.
        """
        self.flush()
        events = dict(self._poll.poll(0 if self.is_stopped else None))
        if events.get(self._output_fd, 0) & (select.POLLERR | select.POLLNVAL):
            raise BrokenPipeError
        if self._stop_fd in events and not self.is_stopped:
            self.is_stopped = True
            return self.read()
        if not self.is_stopped:
            part = os.read(self._input_fd, _PIPE_BYTES)
            if not part:  # a signal just before the end may have come after the poll
                self.is_stopped = self._stop_fd in dict(self._poll.poll(0))
            return part
        if self._input_fd not in events or not self._left_bytes:
            return b""
        part = os.read(self._input_fd, self._left_bytes)
        self._left_bytes -= len(part)
        return part
