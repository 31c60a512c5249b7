"""What Numba cannot express and LLVM can: loads that no store changes, and vector loads of pairs.

A loop that reads tables and writes an output stays scalar in Numba: the store might change the table,
and there is no ``restrict``. ``table_load`` and ``output_store`` mark their instruction with the
metadata ``alias.scope`` / ``noalias`` of two scopes, TABLE and OUTPUT, after which LLVM vectorises the
loop. Every load of the loop has to be a ``table_load``, the streamed inputs' too, and the output must
not overlap any of them: a wrapper that lets the caller pass ``out`` checks that.

``line_lanes`` is the other trick: LLVM does not know that two values it needs are adjacent, and gathers them
one by one (11 cycles for a gather of eight on a Zen 5). Loading pairs and unpacking them takes a third of
that.

With NUMBA_DISABLE_JIT or NUMBA_BOUNDSCHECK set, and when loops run as Python (fastroof.compiled.layout), each
is the plain expression it stands for, so that every index is checked. Both forms give the same bits. The
instructions are in fastroof.compiled.intrinsics.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fastroof.arrays import Ints
from fastroof.compiled.jit import jit
from fastroof.compiled.layout import LANES, TILE, is_plain


def _settings() -> tuple[bool, bool]:
    """Whether loops run as Python, and whether they check indices."""
    if is_plain():
        return True, False
    from numba.core import config

    return bool(getattr(config, "DISABLE_JIT")), bool(getattr(config, "BOUNDSCHECK"))  # noqa: B009


_NO_JIT, _CHECKED = _settings()
PLAIN: Final = _NO_JIT or _CHECKED
"""Whether plain expressions replace the intrinsics."""


@jit
def _plain_load(array: Any, index: Any) -> Any:
    return array[index]


@jit
def _plain_store(array: Any, index: Any, value: Any) -> None:
    array[index] = value


def _plain_float_bits(x: Any) -> int:
    return int(np.float64(x).view(np.int64))


@jit
def _plain_prefetch(array: Any, index: Any) -> None:
    return


@jit
def _plain_line_lanes(lines: Any, at: Any, first: int, x: Any, start: int, out: Any) -> None:
    for lane in range(LANES):
        where = at[first + lane]
        out[start + lane] = lines[where] + lines[where + 1] * float(x[start + lane])


@jit
def _plain_fence() -> None:
    return


def _chosen(name: str, plain: Any, is_plain: bool) -> Any:
    """Return the plain expression or the intrinsic of a name."""
    if is_plain:
        return plain
    from fastroof.compiled import intrinsics

    return getattr(intrinsics, name)


table_load = _chosen("table_load", _plain_load, PLAIN)
"""``table_load(array, index)``: ``array[index]``, which no ``output_store`` of this loop changes."""

output_store = _chosen("output_store", _plain_store, PLAIN)
"""``output_store(array, index, value)``: ``array[index] = value``, which no ``table_load`` reads."""

float_bits = _chosen("float_bits", _plain_float_bits, _NO_JIT)
"""``float_bits(x)``: the bits of a float64 as an int64: sign, 11 bits of exponent, 52 of mantissa."""

prefetch = _chosen("prefetch", _plain_prefetch, PLAIN)
"""``prefetch(array, index)``: fetch the element's cache line, to be read once; any index is valid."""

line_lanes = _chosen("line_lanes", _plain_line_lanes, PLAIN)
"""``line_lanes(lines, at, first, x, start, out)``: points of eight straight lines.

``out[start + i] = lines[at[first + i]] + lines[at[first + i] + 1] * x[start + i]`` for i in 0 to 7,
``lines`` and ``out`` float64, ``at`` uint32, ``x`` integer.
"""

streamed_lanes = _chosen("streamed_lanes", _plain_line_lanes, PLAIN)
"""``line_lanes`` with a store past the caches; ``out[start]`` must begin a cache line."""

store_fence = _chosen("store_fence", _plain_fence, PLAIN)
"""``store_fence()``: order ``streamed_lanes`` before other threads' loads, as stores otherwise are."""


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


request_lanes = _chosen("request_lanes", _plain_request_lanes, PLAIN)
"""``request_lanes(new_tokens, context_len, first, count, room)``: 1 to 64 requests from ``first`` on.

Returns int64: a bit for each request that is not a decode; the sum of contexts; the sum of max(room -
context, 0); and the OR of all new - 1, context and context + new - 1: if it has a bit from the 28th on, some
size is invalid and the sums are undefined.
"""

lowest_bit = _chosen("lowest_bit", _plain_lowest_bit, PLAIN)
"""``lowest_bit(bits)``: the position of the lowest set bit; at least one must be set."""

bit_count = _chosen("bit_count", _plain_bit_count, PLAIN)
"""``bit_count(bits)``: the number of set bits of 64."""
