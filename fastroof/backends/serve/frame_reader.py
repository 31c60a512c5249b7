"""Requests out of a stream of bytes, wherever it is broken."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from fastroof.backends.serve.frames import (
    NO_ID,
    REQUEST_HEADER,
    REQUEST_MAGIC,
    FrameError,
    RequestHeader,
)
from fastroof.backends.serve.limits import ServeLimits
from fastroof.backends.serve.pipe import PIPE_BYTES, Inflow

__all__ = ["Frame", "FrameReader"]

_SEARCHED_AT_ONCE: Final = 2**20


class Frame(NamedTuple):
    """A whole request, in memory that the next one overwrites."""

    header: RequestHeader
    data: memoryview


class FrameReader:
    """Finds requests in what a pipe holds.

    Parameters
    ----------
    inflow : Inflow
        Where bytes come from.
    limits : ServeLimits
        Longer requests are dropped as they come.
    first : bytes
        What was read already.

    Notes
    -----
    It holds one buffer, as long as the longest request so far and 1 MiB.
    """

    def __init__(self, inflow: Inflow, limits: ServeLimits, first: bytes = b"") -> None:
        self._inflow = inflow
        self._limits = limits
        self._room = np.empty(PIPE_BYTES, np.uint8).data
        self._room[: len(first)] = first
        self._start, self._end = 0, len(first)  # bytes held
        self._taken = 0  # bytes of them that were given out or dropped
        self._is_lost = False  # between requests, on the way to the next start of one

    def next_frame(self) -> Frame | None:
        """Wait for the next request; None at the end.

        Raises
        ------
        FrameError
            Once for each that cannot be used; the call after it goes on.
        """
        self._start += self._taken
        self._taken = 0
        if self._is_lost and not self._find_start():
            return None
        if not self._hold(REQUEST_HEADER.size):
            if self._start < self._end:
                raise self._cut_short(REQUEST_HEADER.size, NO_ID)
            return None
        try:
            header = RequestHeader.read(self._held(REQUEST_HEADER.size), self._limits)
        except FrameError:
            self._taken = 1
            self._is_lost = True
            raise
        size = REQUEST_HEADER.size + header.body_bytes
        if not self._hold(size):
            raise self._cut_short(size, header.request_id)
        self._taken = size
        data = self._held(size)
        # after a gap requests lie anywhere, until the buffer has been empty
        return Frame(header, np.array(data).data if self._start % 8 else data)

    def failed(self) -> None:
        """Go on inside the request given out last, if another starts there: then it was cut short."""
        inside = _next_start(self._held(self._taken), 1)
        self._is_lost = inside < self._taken
        self._taken = inside

    def _cut_short(self, size: int, request_id: int) -> FrameError:
        self._taken = self._end - self._start
        message = f"{self._inflow.end_words()} after {self._taken} bytes of a request of {size}"
        self.failed()
        return FrameError(message, request_id)

    def _held(self, count: int) -> memoryview:
        return self._room[self._start : self._start + count]

    def _find_start(self) -> bool:
        """Drop bytes up to the next start of a request."""
        while True:
            at = _next_start(self._held(self._end - self._start), 0)
            self._start += at
            if self._end - self._start >= len(REQUEST_MAGIC):
                self._is_lost = False
                return True
            if not self._hold(len(REQUEST_MAGIC)):
                return False

    def _hold(self, count: int) -> bool:
        """Read until so many bytes are held."""
        if self._start == self._end:
            self._start = self._end = 0
        if self._start + count > len(self._room):
            self._move(count)
        while self._end - self._start < count:
            got = self._inflow.read_into(self._room[self._end :])
            if not got:
                return False
            self._end += got
        return True

    def _move(self, count: int) -> None:
        """Move what is held to the start of a buffer that has room for ``count`` bytes."""
        held = bytes(self._held(self._end - self._start))
        if count > len(self._room):
            # untouched memory is not held: a length alone costs nothing
            self._room = np.empty(count + PIPE_BYTES, np.uint8).data
        self._room[: len(held)] = held
        self._start, self._end = 0, len(held)


def _next_start(data: memoryview, begin: int) -> int:
    """Where a request starts from ``begin`` on, as far as ``data`` tells; its length if nowhere."""
    overlap = len(REQUEST_MAGIC) - 1
    for at in range(begin, len(data), _SEARCHED_AT_ONCE):
        offset = bytes(data[at : at + _SEARCHED_AT_ONCE + overlap]).find(REQUEST_MAGIC)
        if offset >= 0:
            return at + offset
    for at in range(max(begin, len(data) - overlap), len(data)):
        if REQUEST_MAGIC.startswith(bytes(data[at:])):
            return at
    return len(data)
