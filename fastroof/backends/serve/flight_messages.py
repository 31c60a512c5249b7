"""What a Flight message holds, as far as it has to be known before gRPC takes memory for it.

Arrow decompresses record batches to any size, so a compressed one is refused. Read here are protobuf's
fields and, of Arrow's ``Message.fbs``, the one place that says whether a batch is compressed; everything else
is left to gRPC and Arrow to judge.
"""

from __future__ import annotations

import struct
from typing import Final

__all__ = ["HEAD_BYTES", "MessageRefused", "check_flight_message"]

HEAD_BYTES: Final = 2**16
"""Bytes of a message that may be anything but the body of a record batch."""

_DATA_HEADER, _DATA_BODY = 2, 1000  # fields of Flight's FlightData
_OWN_FIELDS: Final = (1, _DATA_HEADER, 3, _DATA_BODY)
_VARINT, _BYTES = 0, 2  # kinds of a field of a protobuf message
_FIXED_BYTES: Final = {1: 8, 5: 4}
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3  # members of Arrow's MessageHeader


class MessageRefused(Exception):
    """The connection that this came from is closed, with the reason."""


def check_flight_message(head: bytes | bytearray, message_bytes: int) -> None:
    """Refuse a message whose record batch is compressed, or that hides what it is behind its body.

    Parameters
    ----------
    head : bytes
        The first bytes of the message, ``HEAD_BYTES`` or all of them.
    message_bytes : int
        Length of the message.

    Raises
    ------
    MessageRefused
        With the reason. What is malformed otherwise is let through, for gRPC and Arrow to refuse.
    """
    at = field = 0
    try:
        while at < len(head):
            field, wire, at = _tag(head, at)
            if wire == _BYTES:
                size, at = _varint(head, at)
                if field == _DATA_HEADER and _is_compressed(head[at : at + size]):
                    raise MessageRefused("compressed record batches are not taken: write them as they are")
                at += size
            elif wire == _VARINT:
                value, at = _varint(head, at)
                # Flight reads its own fields as bytes, whatever their tag says, but for a descriptor's kind
                if field in _OWN_FIELDS and (field > 1 or value > 2):
                    raise MessageRefused(f"field {field} of a Flight message holds bytes, not a number")
            elif wire in _FIXED_BYTES and field not in _OWN_FIELDS:
                at += _FIXED_BYTES[wire]
            else:
                raise MessageRefused(f"field {field} of a Flight message is of no kind that Flight has")
    except IndexError:
        at = field = 0
    if len(head) < message_bytes and (field != _DATA_BODY or at != message_bytes):
        raise MessageRefused(
            f"only the body of a record batch may be longer than {HEAD_BYTES} bytes, and it comes last"
        )


def _tag(data: bytes | bytearray, at: int) -> tuple[int, int, int]:
    """Number and kind of the field of a protobuf message that starts here, and where its value does."""
    tag, at = _varint(data, at)
    return tag >> 3, tag & 7, at


def _varint(data: bytes | bytearray, at: int) -> tuple[int, int]:
    """Read the low 32 bits of a variable-length integer: what protobuf reads of tags and lengths."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            return value & 0xFFFFFFFF, at
        shift += 7


def _is_compressed(message: bytes | bytearray) -> bool:
    """Whether an Arrow IPC message, a flatbuffer, says that the buffers of its batch are compressed."""
    try:
        table = struct.unpack_from("<I", message)[0]
        kind_at, header_at = _field(message, table, 1), _field(message, table, 2)
        if not kind_at or not header_at:
            return False
        kind = message[kind_at]
        batch = header_at + struct.unpack_from("<I", message, header_at)[0]
        if kind == _DICTIONARY_BATCH:
            data_at = _field(message, batch, 1)
            if not data_at:
                return False
            batch = data_at + struct.unpack_from("<I", message, data_at)[0]
        elif kind != _RECORD_BATCH:
            return False
        return bool(_field(message, batch, 3))
    except (struct.error, IndexError):
        return False  # Arrow's own check of flatbuffers refuses it


def _field(message: bytes | bytearray, table: int, index: int) -> int:
    """Position of a field of a flatbuffer's table, 0 where it is left out."""
    vtable = table - struct.unpack_from("<i", message, table)[0]
    entry = 4 + 2 * index
    if vtable < 0:
        raise IndexError
    if entry >= struct.unpack_from("<H", message, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", message, vtable + entry)[0]
    return table + int(offset) if offset else 0
