"""KV caches on their way from one pool of engines to another, and the gaps that they make."""

from __future__ import annotations

from fastroof.arrays import Floats, Ints, Longs
from fastroof.compiled.jit import jit
from fastroof.compiled.simulation.state import Record, add_gaps


@jit
def link_ends(
    ready_us: Floats, takes_us: Floats, link: Ints, order: Longs, free_us: Floats, out: Floats
) -> None:
    """When each transfer has ended: a link sends one at a time, in the order in which they are ready."""
    for i in range(len(order)):
        transfer = order[i]
        at = link[transfer]
        begin_us = max(ready_us[transfer], free_us[at])
        free_us[at] = begin_us + takes_us[transfer]
        out[transfer] = free_us[at]


@jit
def count_gaps(gaps_us: Floats, record: Record) -> None:
    """Count gaps one by one."""
    for i in range(len(gaps_us)):
        add_gaps(record, gaps_us[i], 1)
