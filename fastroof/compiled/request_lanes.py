"""Sums over up to 64 requests in vector registers, which LLVM does not find by itself.

Written as a loop, sums over a step's requests end in a scalar loop over the last ones, and widen each size
to 64 bits. Here a vector has as many requests as fit, the last vector is a masked load, and 32 bits a lane
are enough: of 64 sizes of 28 bits each of 16 lanes has four. Requests that are no decodes, few in most
steps, come back as bits: what only they need is added up one by one.

Where indices have to be checked (fastroof.compiled.llvm.PLAIN), it is the plain loop that it stands for. The
instructions are in fastroof.compiled.request_vectors.
"""

from __future__ import annotations

from typing import Any

from fastroof.arrays import Ints
from fastroof.compiled.jit import jit
from fastroof.compiled.layout import TILE
from fastroof.compiled.llvm import PLAIN

__all__ = ["TILE", "bit_count", "lowest_bit", "request_lanes"]


@jit
def _plain_request_lanes(
    new_tokens: Ints, context_len: Ints, first: int, count: int, room: int
) -> tuple[int, int, int, int]:
    bits = contexts = rooms = high = 0
    for request in range(count):
        more, context = int(new_tokens[first + request]) - 1, int(context_len[first + request])
        if more != 0 or context == 0:
            bits |= 1 << request
        contexts += context
        rooms += max(room - context, 0)
        high |= more | context | (more + context)
    return bits, contexts, rooms, high


@jit
def _plain_lowest_bit(bits: int) -> int:
    place = 0
    while not (bits >> place) & 1:
        place += 1
    return place


@jit
def _plain_bit_count(bits: int) -> int:
    count = 0
    for place in range(TILE):
        count += (bits >> place) & 1
    return count


def _chosen(name: str, plain: Any) -> Any:
    if PLAIN:
        return plain
    from fastroof.compiled import request_vectors

    return getattr(request_vectors, name)


request_lanes = _chosen("request_lanes", _plain_request_lanes)
"""``request_lanes(new_tokens, context_len, first, count, room)``: 1 to 64 requests from ``first`` on.

Returns int64: a bit for each that is no decode, the sum of contexts, of max(room - context, 0), and the bits
of all of new - 1, context and context + new - 1: none from the 28th on, or some size is impossible and
the sums are any.
"""

lowest_bit = _chosen("lowest_bit", _plain_lowest_bit)
"""``lowest_bit(bits)``: the place of the lowest bit that is set, of at least one."""

bit_count = _chosen("bit_count", _plain_bit_count)
"""``bit_count(bits)``: how many of 64 bits are set."""
