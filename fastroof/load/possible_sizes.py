"""Rows of sizes that no call can have: refused where tables are read, left out where files are imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from fastroof.arrays import Array, Bools
from fastroof.operators.operator import Operator

__all__ = ["ImpossibleSizes", "impossible_sizes"]

_AT_MOST: Final = (
    ("q_len", "kv_len", "kv_len counts the prefix and the new tokens"),
    ("topk", "num_experts", "a token goes to different experts"),
    ("num_experts", "num_slots", "every expert has a place"),
    ("num_nodes", "num_gpus", "a node has one at least"),
)
"""Sizes, which others they are at most, and why."""


class ImpossibleSizes(NamedTuple):
    """Rows that one rule refuses."""

    rows: Bools
    size: str
    largest: str
    why: str


def impossible_sizes(operator: Operator, columns: Mapping[str, Array]) -> Iterator[ImpossibleSizes]:
    """Find rows of sizes that no call can have, but for those that one column alone tells."""
    names = {column.name for column in (*operator.keys, *operator.axes)}
    for size, largest, why in _AT_MOST:
        if names.issuperset((size, largest)):
            rows = columns[size] > columns[largest]
            if rows.any():
                yield ImpossibleSizes(rows, size, largest, why)
