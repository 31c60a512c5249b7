"""What is read of a Flight connection before gRPC reads it: frames, lengths, and what is compressed."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.backends.serve.flight_frames import (
    PREFACE,
    SHORT_BYTES,
    ClientFrames,
    ServerFrames,
    UnderWay,
    goaway,
)
from fastroof.backends.serve.flight_messages import MessageRefused, check_flight_message


def _message(batch: Any, compression: str | None) -> bytes:
    """Arrow's message of a record batch, or of its dictionary, without the body."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)
    ) as out:
        out.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    messages = {message.type: message.metadata.to_pybytes() for message in reader}
    return bytes(messages.get("dictionary", messages["record batch"]))


def _bytes_field(number: int, value: bytes, length: int | None = None) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value) if length is None else length) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("coded", [False, True])
def test_compressed_batches_are_recognised(codec: str, coded: bool) -> None:
    values = pa.array([5] * 1000)
    batch = pa.record_batch({"a": values.dictionary_encode() if coded else values})
    plain, compressed = (_bytes_field(2, _message(batch, each)) for each in (None, codec))
    body = _bytes_field(1000, b"\0" * 50)
    check_flight_message(plain + body, len(plain + body))
    # wherever in the message it is, and if another comes after it
    for hidden in (compressed + body, body + compressed, plain + compressed, compressed + plain):
        with pytest.raises(MessageRefused, match="compressed"):
            check_flight_message(hidden, len(hidden))
    for tag in (2 << 3, 1000 << 3 | 1, 4 << 3 | 3):  # a field of Flight's as a number, and a group
        with pytest.raises(MessageRefused, match="Flight"):
            check_flight_message(_varint(tag) + compressed, len(compressed) + 2)


def test_only_the_body_is_long() -> None:
    head = _bytes_field(2, b"") + _bytes_field(1000, bytes(60_000), 10**6)
    head += bytes(2**16 - len(head))
    whole_bytes = len(_bytes_field(2, b"") + _bytes_field(1000, b"", 10**6)) + 10**6
    check_flight_message(head, whole_bytes)
    for longer, start in (
        (head, whole_bytes + 1),
        (_bytes_field(3, bytes(2**16), 10**6)[: 2**16], 10**6 + 4),
    ):
        with pytest.raises(MessageRefused, match="it comes last"):
            check_flight_message(longer, start)


def _frames(messages: list[bytes], frame_bytes: int, stream: int = 1) -> bytes:
    data = b"".join(struct.pack(">BI", 0, len(message)) + message for message in messages)
    parts = [data[at : at + frame_bytes] for at in range(0, len(data), frame_bytes)]
    frames = [struct.pack(">BHBBI", 0, len(part), 0, 0, stream) + part for part in parts]
    ping = struct.pack(">BHBBI", 0, 8, 6, 0, 0) + bytes(8)
    return PREFACE + ping.join(frames) + struct.pack(">BHBBI", 0, 0, 0, 1, stream)


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    frame_bytes=st.integers(1, 400),
    cuts=st.lists(st.integers(0, 4000), max_size=20),
)
def test_frames_in_any_pieces(sizes: list[int], frame_bytes: int, cuts: list[int]) -> None:
    """How the bytes are cut changes nothing: the longest message is found, and all of them end."""
    wire = memoryview(_frames([_bytes_field(3, bytes(size)) for size in sizes], frame_bytes))
    bounds = [0, *sorted(min(cut, len(wire)) for cut in cuts), len(wire)]
    under_way = UnderWay(10**6)

    def feed(frames: ClientFrames) -> None:
        for first, last in pairwise(bounds):
            frames.feed(wire[first:last])

    enough = ClientFrames(310, under_way)
    feed(enough)
    assert enough.between
    assert (under_way.messages, under_way.message_bytes) == (0, 0)
    less = ClientFrames(max(sizes) + 1, under_way)
    with pytest.raises(MessageRefused, match="longer than"):
        feed(less)
    less.close()
    assert (under_way.messages, under_way.message_bytes) == (0, 0)


def test_frames_that_are_refused() -> None:
    for wire, said in (
        (b"GET / HTTP/1.1\r\n\r\n", "not HTTP/2"),
        (PREFACE + struct.pack(">BHBBIB", 0, 9, 0, 8, 1, 3), "padded"),
        (PREFACE + struct.pack(">BHBBIBI", 0, 9, 0, 0, 1, 1, 4), "compressed messages"),
    ):
        with pytest.raises(MessageRefused, match=said):
            ClientFrames(100, UnderWay(100)).feed(memoryview(wire))
    long = SHORT_BYTES + 1
    under_way = UnderWay(long + 50)
    first, second, let_in = (ClientFrames(long, under_way) for _ in range(3))
    let_in.is_let_in = True
    begun = memoryview(PREFACE + struct.pack(">BHBBIBI", 0, 9, 0, 0, 1, 0, long))
    first.feed(begun)
    with pytest.raises(MessageRefused, match=f"1 messages of {long} bytes are under way"):
        second.feed(begun)
    # there is room for what is short, and for whom the server has let in
    ClientFrames(long, under_way).feed(
        memoryview(PREFACE + struct.pack(">BHBBIBI", 0, 9, 0, 0, 1, 0, SHORT_BYTES))
    )
    let_in.feed(begun)
    let_in.close()
    assert (under_way.messages, under_way.message_bytes) == (2, long)
    # the server resets the stream: what still comes of it is let pass
    ServerFrames(first).feed(memoryview(struct.pack(">BHBBII", 0, 4, 3, 0, 1, 0)))
    assert (under_way.messages, under_way.message_bytes) == (1, 0)
    first.feed(memoryview(bytes(4) + struct.pack(">BHBBIBI", 0, 9, 0, 0, 1, 0, 2**30)))
    assert goaway("why").endswith(b"why")
