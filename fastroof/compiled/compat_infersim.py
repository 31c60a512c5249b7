"""The row of a measured file that InferSim reads: nearest, floor, or ceiling in the shape.

Rows are in file order, since InferSim's answers depend on it. A block is the rows of one key: rows
``starts[b]:starts[b + 1]`` belong to ``keys[b]``. Every loop returns row numbers, or one of the negative
codes below where InferSim falls back.
"""

from __future__ import annotations

from fastroof.arrays import Ints
from fastroof.compiled.jit import jit

NO_KEY = -1
EMPTY_BLOCK = -2
UNDER_FIRST_ROW = -3

CEILING_LIMIT = 1e9


@jit
def _is_key(keys: Ints, block: int, query: Ints, i: int) -> bool:
    same = True
    for c in range(keys.shape[1]):
        same &= keys[block, c] == query[c, i]
    return same


@jit
def _block_of(keys: Ints, query: Ints, i: int, guess: int) -> int:
    """Block whose key is ``query[:, i]``, or NO_KEY; ``guess`` is tried first."""
    if guess >= 0 and _is_key(keys, guess, query, i):
        return guess
    for block in range(len(keys)):
        if _is_key(keys, block, query, i):
            return block
    return NO_KEY


@jit
def _rows_of(starts: Ints, axes: Ints, block: int) -> tuple[int, int]:
    """First row of a block and the one after its last, within the file."""
    return max(starts[block], 0), min(starts[block + 1], axes.shape[1])


@jit
def nearest_row(keys: Ints, starts: Ints, axes: Ints, query: Ints, at: Ints, row: Ints) -> None:
    """Return the key's row with the least sum of distances along the axes, the first of a tie."""
    block = NO_KEY
    for i in range(len(row)):
        block = _block_of(keys, query, i, block)
        if block < 0:
            row[i] = NO_KEY
            continue
        start, stop = _rows_of(starts, axes, block)
        row[i] = EMPTY_BLOCK
        least = 0
        for r in range(start, stop):
            distance = 0
            for a in range(len(axes)):
                distance += abs(axes[a, r] - at[a, i])
            if r == start or distance < least:
                least = distance
                row[i] = r


@jit
def floor_row(keys: Ints, starts: Ints, axes: Ints, query: Ints, at: Ints, row: Ints) -> None:
    """Return the key's last row before the first one beyond ``at``: the floor if rows are sorted."""
    block = NO_KEY
    for i in range(len(row)):
        block = _block_of(keys, query, i, block)
        if block < 0:
            row[i] = NO_KEY
            continue
        start, stop = _rows_of(starts, axes, block)
        r = start
        while r < stop and axes[0, r] <= at[0, i]:
            r += 1
        row[i] = r - 1 if r > start else UNDER_FIRST_ROW


@jit
def _ceiling_block(keys: Ints, query: Ints, i: int) -> int:
    """Return the device's block with the nearest k and n that are at least the query's, or NO_KEY."""
    nearest = NO_KEY
    least = CEILING_LIMIT
    for block in range(len(keys)):
        if keys[block, 0] != query[0, i] or keys[block, 1] < query[1, i] or keys[block, 2] < query[2, i]:
            continue
        # in float64, where no square overflows, and exact under the limit
        beyond_k = float(keys[block, 1] - query[1, i])
        beyond_n = float(keys[block, 2] - query[2, i])
        distance = beyond_k * beyond_k + beyond_n * beyond_n
        if distance < least:
            least = distance
            nearest = block
    return nearest


@jit
def ceiling_shape_row(keys: Ints, starts: Ints, axes: Ints, query: Ints, at: Ints, row: Ints) -> None:
    """Return a GEMM's row: the nearest (k, n) not below the query's, then the last m not above ``at``."""
    block = NO_KEY
    for i in range(len(row)):
        same = i > 0 and (
            query[0, i] == query[0, i - 1]
            and query[1, i] == query[1, i - 1]
            and query[2, i] == query[2, i - 1]
        )
        if not same:
            block = _ceiling_block(keys, query, i)
        if block < 0:
            row[i] = NO_KEY
            continue
        start, stop = _rows_of(starts, axes, block)
        r = stop - 1
        while r >= start and axes[0, r] > at[0, i]:
            r -= 1
        row[i] = r if r >= start else UNDER_FIRST_ROW
