"""The binary form of requests and replies on a pipe.

Everything is little-endian. A message is a header and a body; both are multiples of 8 bytes, so that in a
buffer that starts on 8 bytes every array can be read where it lies. Replies come in the order of requests.

Request, a header of 48 bytes:

======  =======  ===============================================================================
offset  type     what
======  =======  ===============================================================================
0       8 bytes  ``F5 46 52 73 74 65 70 FA``
8       uint16   version, 1
10      uint8    kind: 0 describe the plans, 1 decode steps, 2 ragged steps, 3 decode steps and 4 ragged
                 steps with standard errors, 5 a message of JSON
11      uint8    width of a size, bytes: 4 (int32) or 8 (int64); 8 in a kind without sizes
12      uint32   number of the plan, from 0; ``FFFFFFFF``: it is named at the end of the body; not
                 read in kinds 0 and 5
16      uint64   id, which comes back in the reply; any but ``FFFFFFFFFFFFFFFF``
24      uint64   bytes of the body, a multiple of 8
32      uint64   steps, or bytes of a message
40      uint64   requests of all steps together; 0 unless the steps are ragged
======  =======  ===============================================================================

Body, each part filled up with zeros to a multiple of 8 bytes:

===============  =========================================================================================
decode steps     ``batch_size[steps]``, ``kv_len[steps]``, as in ``plan.decode_us``
ragged steps     ``new_tokens[requests]``, ``context_len[requests]``, ``offsets[steps + 1]`` (always int64),
                 as in ``StepBatch``
a named plan     its name in UTF-8, at most 256 bytes
a message        UTF-8: a line of :mod:`fastroof.backends.serve.json_lines`, and no longer than one may be
===============  =========================================================================================

Reply, a header of 40 bytes:

======  =======  ===============================================================================
offset  type     what
======  =======  ===============================================================================
0       8 bytes  ``F5 46 52 74 69 6D 65 FA``
8       uint16   version, 1
10      uint16   status: 0 times, 1 JSON, 2 times and standard errors, from 16 an error
                 (:data:`ERROR_STATUS`)
12      uint32   0
16      uint64   id of the request; ``FFFFFFFFFFFFFFFF`` where what came held none
24      uint64   bytes of the body, a multiple of 8
32      uint64   steps, or bytes of text
======  =======  ===============================================================================

Body: the steps' microseconds as float64, and behind all of them, if they were asked for, the standard error
of each over its time, as of ``plan.decode_error`` and ``plan.step_error``; or UTF-8 text, filled up with
zeros: JSON of a description or of the reply to a message, as its line would have got it, or the message of an
error, also where a message of JSON is refused.

A request that cannot be used gets one error, and nothing ends:

* After a whole body that cannot be timed, the next request follows.
* After a header that cannot be used (another start, another version, a length that its counts contradict,
  more than the server's limits) the length is not believed, however large: bytes are dropped as they come,
  and not held, until the eight first bytes of a request come again.
* A request cut short takes the bytes that it lacks from the next one, so its error comes when they have come,
  or the stream ends. No size that can be timed holds the first bytes of a request, nor does UTF-8, so it
  fails for certain, and the server goes on from the first of them that it finds inside: of whole requests
  none is lost.

fastroof 0.1.0 knows kinds 0 to 2 and refuses the others by their number.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastroof.arrays import Floats, Ints
from fastroof.checks import shown
from fastroof.errors import BackendError, BatchError, FastroofError, PlanRangeError

if TYPE_CHECKING:
    from fastroof.backends.serve.limits import ServeLimits
    from fastroof.backends.serve.steps_asked import TimesAndErrors

__all__ = [
    "DECODE",
    "DECODE_ERRORS",
    "DESCRIBE",
    "ERROR_STATUS",
    "JSON_TEXT",
    "MESSAGE",
    "NO_ID",
    "RAGGED",
    "RAGGED_ERRORS",
    "REPLY_HEADER",
    "REPLY_MAGIC",
    "REQUEST_HEADER",
    "REQUEST_MAGIC",
    "TIMES",
    "TIMES_AND_ERRORS",
    "VERSION",
    "FrameError",
    "RequestHeader",
    "error_reply",
    "json_reply",
    "message_frame",
    "one_decode_frame",
    "one_step_frame",
    "one_time_reply",
    "request_frame",
    "times_and_errors_reply",
    "times_reply",
]

# 0xF5 and 0xFA are in no UTF-8 text, and any of the bytes on top of an int32 makes it no size.
REQUEST_MAGIC: Final = b"\xf5FRstep\xfa"
REPLY_MAGIC: Final = b"\xf5FRtime\xfa"
VERSION: Final = 1
REQUEST_HEADER: Final = struct.Struct("<8sHBBIQQQQ")
REPLY_HEADER: Final = struct.Struct("<8sHHIQQQ")

_ONE_TIME: Final = struct.Struct(REPLY_HEADER.format + "d")
_ONE_DECODE: Final = struct.Struct(REQUEST_HEADER.format + "qq")

DESCRIBE, DECODE, RAGGED, DECODE_ERRORS, RAGGED_ERRORS, MESSAGE = range(6)
TIMES, JSON_TEXT, TIMES_AND_ERRORS = range(3)
NAMED: Final = 2**32 - 1
NO_ID: Final = 2**64 - 1
MOST_NAME_BYTES: Final = 256

ERROR_STATUS: Final[dict[int, type[FastroofError]]] = {
    16: BackendError,
    17: BatchError,
    18: PlanRangeError,
    19: FastroofError,
}
"""The error that the status of a reply stands for; 19 is any other."""

_KINDS: Final = {
    DESCRIBE: "describe",
    DECODE: "decode",
    RAGGED: "ragged",
    DECODE_ERRORS: "decode with errors",
    RAGGED_ERRORS: "ragged with errors",
    MESSAGE: "message",
}
_DECODE_KINDS: Final = (DECODE, DECODE_ERRORS)
_RAGGED_KINDS: Final = (RAGGED, RAGGED_ERRORS)
_PLANLESS_KINDS: Final = (DESCRIBE, MESSAGE)
_FORMATS: Final[dict[int, Any]] = {1: "B", 4: "i", 8: "l"}
_WIDTHS: Final = (4, 8)
_NO_INTS = memoryview(array("l"))


class FrameError(BackendError):
    """A request that cannot be used; ``request_id`` is the one in its header, or NO_ID."""

    def __init__(self, message: str, request_id: int = NO_ID) -> None:
        super().__init__(message)
        self.request_id = request_id


class RequestHeader(NamedTuple):
    """The header of a request, checked; the names are those of the specification.

    ``num_steps`` is the length of the text, bytes, where the request is a message.
    """

    kind: int
    width: int
    plan: int
    request_id: int
    body_bytes: int
    num_steps: int
    num_requests: int

    @classmethod
    def read(cls, frame: memoryview, limits: ServeLimits) -> RequestHeader:
        """Read and check the first bytes of a frame.

        Raises
        ------
        FrameError
            If it is none of version 1, contradicts itself or is beyond the limits.
        """
        magic, version, kind, width, plan, request_id, *sizes = REQUEST_HEADER.unpack_from(frame)
        if magic != REQUEST_MAGIC:
            raise FrameError(
                f"a request starts with {REQUEST_MAGIC.hex(' ')}, got {magic.hex(' ')}: bytes up to the next "
                "such start are dropped"
            )
        if version != VERSION:
            raise FrameError(f"version {version} of a request, this server reads {VERSION}", request_id)
        header = cls(kind, width, plan, request_id, *sizes)
        try:
            header._check(limits)
        except BackendError as error:
            raise FrameError(str(error), request_id) from None
        return header

    def _check(self, limits: ServeLimits) -> None:
        if self.kind not in _KINDS:
            known = ", ".join(f"{kind} {name}" for kind, name in _KINDS.items())
            raise BackendError(f"kind {self.kind} of a request: there are {known}")
        if self.width not in _WIDTHS:
            raise BackendError(f"sizes of {self.width} bytes: they are 4 (int32) or 8 (int64)")
        if self.kind == MESSAGE:
            limits.check_line(self.num_steps)
        elif self.num_steps > limits.max_steps:
            raise BackendError(_too_many("steps", self.num_steps, limits.max_steps))
        if self.num_requests > limits.max_requests:
            raise BackendError(_too_many("requests", self.num_requests, limits.max_requests))
        if self.body_bytes > limits.max_message_bytes:
            raise BackendError(_too_many("bytes", self.body_bytes, limits.max_message_bytes))
        array_bytes = 0
        for width, count in self._arrays():
            array_bytes += _padded(width * count)
        name_bytes = self.body_bytes - array_bytes
        is_named = self.plan == NAMED and self.kind not in _PLANLESS_KINDS
        fits = 8 <= name_bytes <= MOST_NAME_BYTES and name_bytes % 8 == 0 if is_named else name_bytes == 0
        has_requests = self.num_requests and self.kind not in _RAGGED_KINDS
        if not fits or has_requests or (self.num_steps and self.kind == DESCRIBE):
            if self.kind == MESSAGE:
                raise BackendError(
                    f"a message of {self.num_steps} bytes takes {array_bytes} and has 0 requests beside; its "
                    f"body has {self.body_bytes}, its header {self.num_requests} requests"
                )
            extra = f", and the name of a plan 8 to {MOST_NAME_BYTES}" if is_named else ""
            raise BackendError(
                f"{self.num_steps} steps and {self.num_requests} requests of int{8 * self.width} in a "
                f"{_KINDS[self.kind]} request: they take {array_bytes} bytes{extra}; its body has "
                f"{self.body_bytes}"
            )

    def _arrays(self) -> tuple[tuple[int, int], ...]:
        """Width and length of each array of the body."""
        if self.kind in _DECODE_KINDS:
            return ((self.width, self.num_steps),) * 2
        if self.kind == MESSAGE:
            return ((1, self.num_steps),)
        if self.kind in _RAGGED_KINDS:
            return (self.width, self.num_requests), (self.width, self.num_requests), (8, self.num_steps + 1)
        return ()

    def body(self, frame: memoryview) -> tuple[str | int, list[memoryview]]:
        """Which plan a whole frame asks for, and its arrays as they lie in it: integers, or bytes of text.

        Raises
        ------
        FrameError
            If what fills it up is not zeros, or the name of the plan is not UTF-8.
        """
        at = REQUEST_HEADER.size
        arrays = []
        for width, count in self._arrays():
            end = at + width * count
            arrays.append(frame[at:end].cast(_FORMATS[width]) if count else _NO_INTS)
            at = _padded(end)
            if end != at and any(frame[end:at]):
                raise FrameError("an array must be filled up with zeros to 8 bytes", self.request_id)
        if self.plan != NAMED or self.kind in _PLANLESS_KINDS:
            return self.plan, arrays
        try:
            return bytes(frame[at:]).rstrip(b"\0").decode(), arrays
        except UnicodeDecodeError:
            raise FrameError("the name of a plan must be UTF-8", self.request_id) from None


def _too_many(name: str, count: int, most: int) -> str:
    return f"{count} {name} are more than the {most} of a message: send several"


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def request_frame(
    request_id: int, kind: int, plan: str | int = 0, arrays: Sequence[Ints] = ()
) -> list[bytes | memoryview]:
    """Write a request, as parts to be sent one after the other.

    Parameters
    ----------
    request_id : int
        Comes back in the reply.
    kind : int
        DESCRIBE, DECODE, RAGGED, DECODE_ERRORS or RAGGED_ERRORS.
    plan : str or int
        Name or number.
    arrays : sequence of ndarray
        As the body holds them: all int32 or all int64, but offsets always int64. Contiguous.

    Examples
    --------
    >>> import numpy as np
    >>> sizes = np.array([64, 65]), np.array([4096, 4096])
    >>> [len(part) for part in request_frame(7, DECODE, 0, sizes)]
    [48, 16, 16]
    """
    name = plan.encode() if isinstance(plan, str) else b""
    if len(name) > MOST_NAME_BYTES:
        raise BackendError(f"the name of a plan is at most {MOST_NAME_BYTES} bytes, got {shown(plan)}")
    width = arrays[0].itemsize if arrays else 8
    parts: list[bytes | memoryview] = []
    for ints in arrays:
        if ints.size:
            parts.append(ints.data.cast("B"))
        if ints.nbytes % 8:
            parts.append(bytes(-ints.nbytes % 8))
    if isinstance(plan, str) and kind != DESCRIBE:
        parts.append(name.ljust(max(8, _padded(len(name))), b"\0"))
    ragged = kind in _RAGGED_KINDS
    header = REQUEST_HEADER.pack(
        REQUEST_MAGIC,
        VERSION,
        kind,
        width,
        NAMED if isinstance(plan, str) else plan,
        request_id,
        sum(map(len, parts)),
        (len(arrays[-1]) - ragged) if arrays else 0,
        len(arrays[0]) if ragged else 0,
    )
    return [header, *parts]


def message_frame(request_id: int, text: bytes) -> bytes:
    """Write a request that is a message of JSON.

    Examples
    --------
    >>> len(message_frame(7, b'{"memory": true}'))
    64
    """
    size = _padded(len(text))
    sizes = REQUEST_MAGIC, VERSION, MESSAGE, 8, 0, request_id, size, len(text), 0
    return REQUEST_HEADER.pack(*sizes) + text.ljust(size, b"\0")


def one_decode_frame(request_id: int, plan: int, batch_size: int, kv_len: int) -> bytes:
    """Write the request of one decode step, of a plan by its number."""
    sizes = REQUEST_MAGIC, VERSION, DECODE, 8, plan, request_id, 16, 1, 0, batch_size, kv_len
    return _ONE_DECODE.pack(*sizes)


def one_step_frame(request_id: int, plan: int, new_tokens: list[int], context_len: list[int]) -> bytes:
    """Write the request of one step of any requests, of a plan by its number."""
    count = len(new_tokens)
    header = REQUEST_MAGIC, VERSION, RAGGED, 8, plan, request_id, 16 * count + 16, 1, count
    return REQUEST_HEADER.pack(*header) + array("l", (*new_tokens, *context_len, 0, count)).tobytes()


def times_reply(times: Floats, request_id: int) -> tuple[bytes | memoryview, ...]:
    """Write the reply that holds times, as parts; the last is the array's own memory."""
    header = REPLY_HEADER.pack(REPLY_MAGIC, VERSION, TIMES, 0, request_id, times.nbytes, times.size)
    return (header, times.data.cast("B")) if times.size else (header,)


def times_and_errors_reply(answer: TimesAndErrors, request_id: int) -> tuple[bytes | memoryview, ...]:
    """Write the reply that holds times and standard errors, as parts; the last are the arrays' own memory."""
    times, errors = answer
    num_bytes = times.nbytes + errors.nbytes
    header = REPLY_HEADER.pack(REPLY_MAGIC, VERSION, TIMES_AND_ERRORS, 0, request_id, num_bytes, times.size)
    return (header, times.data.cast("B"), errors.data.cast("B")) if times.size else (header,)


def one_time_reply(time_us: float, request_id: int) -> bytes:
    """Write the reply that holds the time of one step."""
    return _ONE_TIME.pack(REPLY_MAGIC, VERSION, TIMES, 0, request_id, 8, 1, time_us)


def json_reply(text: bytes, request_id: int) -> bytes:
    """Write the reply that holds JSON: a description, or the reply to a message."""
    return _text_reply(text, JSON_TEXT, request_id)


def error_reply(error: FastroofError, request_id: int) -> bytes:
    """Write the reply that stands for an error."""
    status = next(status for status, kind in ERROR_STATUS.items() if isinstance(error, kind))
    return _text_reply(str(error).encode(errors="backslashreplace"), status, request_id)


def _text_reply(body: bytes, status: int, request_id: int) -> bytes:
    size = _padded(len(body))
    header = REPLY_HEADER.pack(REPLY_MAGIC, VERSION, status, 0, request_id, size, len(body))
    return header + body.ljust(size, b"\0")
