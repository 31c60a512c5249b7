"""What a Flight client sends, looked at before gRPC takes memory for it.

A Flight server of pyarrow reads messages of any length (Arrow's ``GrpcServerImpl::Init`` sets no limit and
pyarrow has no option for one), and whole ones before it has seen a token. So they are measured one step
earlier, on the wire. What is read here is the little of HTTP/2 (RFC 9113, section 4.1) and of gRPC's framing
(a flag and a length before each message) that says where messages start and how long they are; everything
else is gRPC's to judge.
"""

from __future__ import annotations

import struct
import time
from threading import Lock
from typing import Final

from fastroof.backends.serve.connections import Standing
from fastroof.backends.serve.flight_messages import HEAD_BYTES, MessageRefused, check_flight_message

__all__ = ["PREFACE", "SHORT_BYTES", "ClientFrames", "Frames", "ServerFrames", "UnderWay", "goaway"]

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What every HTTP/2 connection starts with."""

_FRAME_HEADER: Final = struct.Struct(">BHBBI")  # length in 24 bits, kind, flags, stream
_DATA, _HEADERS, _RST_STREAM, _GOAWAY = 0, 1, 3, 7
_END_STREAM, _END_HEADERS, _PADDED = 0x1, 0x4, 0x8
_ENHANCE_YOUR_CALM: Final = 11

SHORT_BYTES: Final = 2**16
"""Messages of a connection up to so much in all take nobody's room: there is always some for a first call."""

_PREFIX_BYTES: Final = 5
_MOST_ENDED: Final = 1024


class UnderWay:
    """Messages that have begun and not ended, of all connections: how many bytes they will be at most.

    Those of connections that were not let in have room of their own: who announces messages and never sends
    them takes none of the others'.

    Parameters
    ----------
    most_bytes, most_strangers_bytes : int
        Of connections that were let in, and of others, which have as much by default.

    Attributes
    ----------
    messages : int
        How many there are.
    moved_s : float
        When bytes last went either way, by the monotonic clock.
    """

    def __init__(self, most_bytes: int, most_strangers_bytes: int | None = None) -> None:
        self._lock = Lock()
        self._most_bytes = {False: most_bytes, True: most_strangers_bytes or most_bytes}
        self._bytes = {False: 0, True: 0}
        self.messages = 0
        self.moved_s = time.monotonic()

    @property
    def message_bytes(self) -> int:
        """The lengths of those that count, in all."""
        return sum(self._bytes.values())

    def begin(self, message_bytes: int, is_strangers: bool = False) -> None:
        """Count a message; refuse it where all of them together would be too much."""
        with self._lock:
            held, most = self._bytes[is_strangers], self._most_bytes[is_strangers]
            if held + message_bytes > most:
                raise MessageRefused(
                    f"{self.messages} messages of {held} bytes are under way, and {message_bytes} more would "
                    f"pass {most}: try again"
                )
            self.messages += 1
            self._bytes[is_strangers] += message_bytes

    def end(self, message_bytes: int, is_strangers: bool = False) -> None:
        """Count a message no longer."""
        with self._lock:
            self.messages -= 1
            self._bytes[is_strangers] -= message_bytes


class Frames:
    """HTTP/2 frames in one direction: knows where they start, whatever pieces they come in."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._left = 0

    @property
    def between(self) -> bool:
        """Whether the last byte seen was the last of a frame."""
        return not self._left and not self._header

    def feed(self, data: memoryview) -> None:
        """Look at the next bytes."""
        at, end = 0, len(data)
        while at < end:
            if self._left:
                take = min(self._left, end - at)
                self.payload(data[at : at + take])
                self._left -= take
                at += take
            else:
                take = _FRAME_HEADER.size - len(self._header)
                if not self._header and take <= end - at:
                    high, low, kind, flags, stream = _FRAME_HEADER.unpack_from(data, at)
                else:
                    self._header += data[at : at + take]
                    if len(self._header) < _FRAME_HEADER.size:
                        return
                    high, low, kind, flags, stream = _FRAME_HEADER.unpack(self._header)
                    self._header.clear()
                at += take
                self._left = high << 16 | low
                self.frame(kind, flags, stream & 0x7FFFFFFF)
            if not self._left:
                self.frame_end()

    def frame(self, kind: int, flags: int, stream: int) -> None:
        """Take note of a frame that starts."""

    def payload(self, data: memoryview) -> None:
        """Take note of bytes of the frame that started last."""

    def frame_end(self) -> None:
        """Take note of the end of that frame."""


class ServerFrames(Frames):
    """What the server answers: tells which calls it has ended before their client did."""

    def __init__(self, client: ClientFrames) -> None:
        super().__init__()
        self._client = client

    def frame(self, kind: int, flags: int, stream: int) -> None:
        """Tell of a call that has ended, and of the first answer: what is refused has trailers alone."""
        if kind == _DATA:
            self._client.is_let_in = True
        elif kind == _RST_STREAM:
            self._client.ended(stream)
        if kind == _RST_STREAM or (kind == _HEADERS and flags & _END_STREAM):
            self._client.answered(stream)


class _Message:
    """A gRPC message that is being received."""

    __slots__ = ("begun", "checked", "counted", "head", "is_strangers", "left", "length", "prefix", "short")

    def __init__(self) -> None:
        self.prefix = bytearray()
        self.head = bytearray()
        self.length = self.left = self.counted = self.short = 0
        self.is_strangers = False
        self.begun = self.checked = False


class ClientFrames(Frames):
    """What a client sends: each message is checked before its last byte is passed on.

    Parameters
    ----------
    max_message_bytes : int
        Longest message that is let through.
    under_way : UnderWay
        Where messages are counted while they come.

    Attributes
    ----------
    is_let_in : bool
        Whether the server has answered a call: without its token it never does.
    received_bytes : int
        What has come in all.
    """

    def __init__(self, max_message_bytes: int, under_way: UnderWay) -> None:
        super().__init__()
        self.is_let_in = False
        self.received_bytes = 0
        self._questions: dict[int, bool] = {}
        self._last_call = 0
        self._short_bytes = 0
        self._max_message_bytes = max_message_bytes
        self.under_way = under_way
        self._preface = PREFACE
        self._messages: dict[int, _Message] = {}
        self._ended: dict[int, None] = {}
        self._stream: int | None = None
        self._last_of_stream = False

    def feed(self, data: memoryview) -> None:
        """Look at the next bytes; raises MessageRefused where they must not be passed on."""
        self.received_bytes += len(data)
        if self._preface:
            take = min(len(self._preface), len(data))
            if data[:take] != self._preface[:take]:
                raise MessageRefused("this is not HTTP/2: a Flight client is needed")
            self._preface = self._preface[take:]
            data = data[take:]
        super().feed(data)

    def frame(self, kind: int, flags: int, stream: int) -> None:
        """Take note of the stream that a frame of data belongs to."""
        self._stream = None
        if kind <= _HEADERS and not self.is_let_in:
            self._question(kind, flags, stream)
        self._last_of_stream = kind == _RST_STREAM
        if self._last_of_stream:
            self._forget(stream)
            self.answered(stream)
        elif kind == _DATA:
            if flags & _PADDED:
                raise MessageRefused("padded frames are not taken")
            self._stream = stream
            self._last_of_stream = bool(flags & _END_STREAM)

    def payload(self, data: memoryview) -> None:
        """Check the messages of a stream."""
        stream = self._stream
        if stream is None or stream in self._ended:
            return
        message = self._messages.get(stream)
        if message is not None and message.checked and len(data) < message.left:
            message.left -= len(data)  # nearly every frame of a long message
            return
        while data:
            message = self._messages.get(stream)
            if message is None:
                message = self._messages[stream] = _Message()
            data = self._prefix(message, data) if not message.begun else self._body(message, data)
            if message.begun and not message.left:
                self._forget(stream)

    def frame_end(self) -> None:
        """Forget a stream that its client has ended."""
        if self._stream is not None and self._last_of_stream:
            self._forget(self._stream)
            self._ended.pop(self._stream, None)

    def ended(self, stream: int) -> None:
        """Expect nothing of use from a stream that the server has ended; what still comes, gRPC drops."""
        self._forget(stream)
        self._ended[stream] = None
        if len(self._ended) > _MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    @property
    def standing(self) -> Standing:
        """What has come of the connection."""
        if self.is_let_in:
            return Standing.LET_IN
        return Standing.ASKED if any(self._questions.values()) else Standing.SILENT

    def answered(self, stream: int) -> None:
        """Expect no more answer to what a stream has asked."""
        self._questions.pop(stream, None)

    def _question(self, kind: int, flags: int, stream: int) -> None:
        """Take note of a call that opens, and of its end: of others gRPC takes no notice, ever."""
        if kind == _HEADERS and flags & _END_HEADERS and stream > self._last_call and stream % 2:
            self._last_call = stream
            self._questions[stream] = False
            if len(self._questions) > _MOST_ENDED:
                del self._questions[next(iter(self._questions))]
        if flags & _END_STREAM and stream in self._questions:
            self._questions[stream] = True

    def close(self) -> None:
        """Forget every message: the connection has ended."""
        for stream in list(self._messages):
            self._forget(stream)

    def _forget(self, stream: int) -> None:
        message = self._messages.pop(stream, None)
        if message is not None and message.begun:
            self._short_bytes -= message.short
            self.under_way.end(message.counted, message.is_strangers)

    def _prefix(self, message: _Message, data: memoryview) -> memoryview:
        take = min(_PREFIX_BYTES - len(message.prefix), len(data))
        message.prefix += data[:take]
        if len(message.prefix) == _PREFIX_BYTES:
            compressed, length = struct.unpack(">BI", message.prefix)
            if compressed:
                raise MessageRefused("compressed messages are not taken: call without compression")
            if length > self._max_message_bytes:
                raise MessageRefused(
                    f"a message of {length} bytes is longer than the {self._max_message_bytes} that are "
                    "read: send smaller record batches"
                )
            message.is_strangers = not self.is_let_in
            if self._short_bytes + length <= SHORT_BYTES:
                message.short = length
            else:
                message.counted = length
            self.under_way.begin(message.counted, message.is_strangers)
            self._short_bytes += message.short
            message.length = message.left = length
            message.begun = True
        return data[take:]

    def _body(self, message: _Message, data: memoryview) -> memoryview:
        take = min(message.left, len(data))
        head_bytes = min(HEAD_BYTES, message.length)
        missing = head_bytes - len(message.head)
        if missing:
            message.head += data[: min(missing, take)]
            if len(message.head) == head_bytes:
                check_flight_message(message.head, message.length)
                message.checked = True
        message.left -= take
        return data[take:]


def goaway(reason: str) -> bytes:
    """A frame that tells a client why its connection is closed."""
    payload = struct.pack(">II", 0x7FFFFFFF, _ENHANCE_YOUR_CALM) + reason.encode("ascii", "replace")
    return _FRAME_HEADER.pack(0, len(payload), _GOAWAY, 0, 0) + payload
