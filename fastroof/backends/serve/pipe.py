"""The two ends of a server's pipes: reading until they end or the server is stopped, writing in few calls."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import termios
from typing import Final

__all__ = ["PIPE_BYTES", "Inflow", "Outflow", "widen"]

PIPE_BYTES: Final = 2**20
"""What a pipe holds once it is widened, and what is read of it at once."""

_FLUSH_BYTES: Final = 2**16
_MOST_PARTS: Final = 512  # of one writev; Linux takes 1024


def widen(fd: int) -> None:
    """Let a pipe hold as much as it may: fewer turns between its two ends. Others stay as they are."""
    with contextlib.suppress(OSError, AttributeError):  # Linux's alone
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


class Outflow:
    """Writes to a file descriptor what was put together.

    Parameters
    ----------
    fd : int
        Where to, blocking.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._parts: list[memoryview] = []
        self._num_bytes = 0

    def put(self, *parts: bytes | memoryview) -> None:
        """Keep bytes to be written; whoever gives a memoryview leaves what it shows as it is."""
        for part in parts:
            self._parts.append(memoryview(part))
            self._num_bytes += len(part)
        if self._num_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write everything; raises BrokenPipeError where nobody reads any more."""
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
    """Reads a file descriptor until it ends or the server is stopped.

    Parameters
    ----------
    fd : int
        Where from, blocking.
    output : Outflow
        Flushed before anything is waited for; when nobody reads it any more, reading ends too.
    stop_fd : int, optional
        Becomes readable when the server is to stop: then what the pipe holds at that moment is still read.
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
        """Whether the server was told to stop, rather than the stream ended."""
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
                    self._left = min(_arrived_bytes(self._fd), PIPE_BYTES)
        if self._left is None:
            return os.readv(self._fd, [room])
        if not self._left:
            return 0
        count = os.readv(self._fd, [room[: self._left]])
        self._left = self._left - count if count else 0
        return count

    def end_words(self) -> str:
        """Say why no more bytes come."""
        return "the server was stopped" if self.was_stopped else "the stream ended"


def _arrived_bytes(fd: int) -> int:
    try:
        held = fcntl.ioctl(fd, termios.FIONREAD, struct.pack("i", 0))
    except OSError:  # a device that holds nothing
        return 0
    return int(struct.unpack("i", held)[0])
