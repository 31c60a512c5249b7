"""Cuts a CUDA library to the machine code of one GPU architecture, so that it compresses.

A library's .nv_fatbin section is a row of containers (header of 16 bytes: magic, version, header size, size),
each a row of entries (kind 1 PTX, 2 machine code). Kept entries move to the front of their container, whose
size shrinks to them; the rest up to the next container is zeroed. No container moves, so no pointer changes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from fastroof.errors import MeasureError

MAGIC: Final = b"\x50\xed\x55\xba"
HEADER: Final = 16
PTX: Final = 1
MACHINE_CODE: Final = 2
_ENTRY_HEADERS: Final = range(32, 4097)


class Entry(NamedTuple):
    """Code for one architecture; ``data`` has its header too."""

    kind: int
    arch: int
    data: bytes


class Pruned(NamedTuple):
    """What pruning came to, in bytes of code."""

    kept_bytes: int
    dropped_bytes: int


def containers(library: bytes | bytearray) -> Iterator[tuple[int, int, list[Entry]]]:
    """Yield where each container begins and ends, and its entries."""
    at = 0
    while (at := library.find(MAGIC, at)) >= 0:
        if len(library) < at + HEADER:
            return
        version, header, size = struct.unpack_from("<HHQ", library, at + 4)
        here, end, entries = at + HEADER, at + HEADER + size, list[Entry]()
        if version == 1 and header == HEADER and end <= len(library):
            while here + 32 <= end:
                kind, _, head, body = struct.unpack_from("<HHIQ", library, here)
                if kind not in (PTX, MACHINE_CODE) or head not in _ENTRY_HEADERS or here + head + body > end:
                    break
                arch = struct.unpack_from("<I", library, here + 28)[0]
                entries.append(Entry(kind, arch, bytes(library[here : here + head + body])))
                here += head + body
        if entries and here == end:
            yield at, end, entries
            at = end
        else:
            at += len(MAGIC)  # the bytes of the magic by chance


def prune(library: bytearray, arch: int) -> Pruned:
    """Keep of a library, in place, only the machine code of an architecture such as 90.

    A container must not be empty. One without code for the architecture keeps the smallest entry of the
    library: a call of its kernels fails with "no kernel image".
    """
    found = list(containers(library))
    codes = [entry for _, _, entries in found for entry in entries if entry.kind == MACHINE_CODE]
    if not any(entry.arch == arch for entry in codes):
        archs = sorted({entry.arch for entry in codes})
        raise MeasureError(f"a library has no code for sm_{arch}, only for {archs or 'no GPU'}")
    smallest = min(codes, key=lambda entry: len(entry.data))
    kept = dropped = 0
    for begin, end, entries in found:
        mine = [entry for entry in entries if entry.kind == MACHINE_CODE and entry.arch == arch]
        body = b"".join(entry.data for entry in mine or [smallest])
        room = end - begin - HEADER
        if len(body) > room:  # PTX alone, shorter than any machine code
            body = entries[0].data
        struct.pack_into("<Q", library, begin + 8, len(body))
        library[begin + HEADER : end] = body + bytes(room - len(body))
        kept, dropped = kept + len(body), dropped + room - len(body)
    return Pruned(kept, dropped)
