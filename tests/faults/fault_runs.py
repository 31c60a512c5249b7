"""Every fault of every operation: the n-th call of a kind fails, for n = 1, 2, ... until none does."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.faults.operations import Operation
from tests.faults.running import WRITING, Bench, Fault
from tests.faults.shim import How, Shim

__all__ = ["FAULTS", "Counts", "try_faults"]

ARRAY_BYTES = 2**15
"""Allocations from this size fail: smaller ones are mostly objects and a library's own."""

FAULTS: dict[str, tuple[Fault, ...]] = {
    name: tuple(Fault(kinds, 0, error, how, least) for error, how in ways)
    for name, kinds, least, ways in (
        ("open", ("open",), 0, ((errno.EACCES, How.ONCE), (errno.ENOSPC, How.EVER))),
        ("write", ("write",), 0, ((errno.ENOSPC, How.HALF), (errno.EIO, How.ONCE), (errno.EINTR, How.ONCE))),
        ("fsync", ("fsync",), 0, ((errno.EIO, How.ONCE), (errno.EINTR, How.ONCE))),
        ("close", ("close",), 0, ((errno.EIO, How.ONCE),)),
        ("rename", ("rename",), 0, ((errno.EACCES, How.ONCE), (errno.EIO, How.EVER))),
        ("link", ("link",), 0, ((errno.EPERM, How.EVER), (errno.ENOSPC, How.ONCE))),
        ("unlink", ("unlink",), 0, ((errno.EACCES, How.ONCE),)),
        ("mkdir", ("mkdir",), 0, ((errno.ENOSPC, How.ONCE),)),
        ("read-only", WRITING, 0, ((errno.EROFS, How.EVER),)),
        ("memory", ("alloc",), ARRAY_BYTES, ((errno.ENOMEM, How.ONCE),)),
        ("kill", WRITING, 0, ((0, How.KILL),)),
    )
} | {
    "file too large": tuple(
        Fault((), 1, 0, How.ONCE, largest_bytes=size) for size in (100, 1500, 6000, 40_000)
    )
}
"""What fails, and in which ways; ``kill`` ends the process before a call that writes."""


@dataclass
class Counts:
    """What faults of one kind led to in one operation."""

    tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, str] = field(default_factory=dict)


def try_faults(
    operation: Operation, inputs: Path, work: Path, shim: Shim, most: int, cases: int | None, seed: int
) -> Iterator[tuple[str, Counts]]:
    """Yield what the faults of each kind lead to.

    Parameters
    ----------
    operation : Operation
        Is run once for each.
    inputs, work : Path
        As :class:`Bench` has them.
    shim : Shim
        The faults.
    most : int
        How many calls of a kind are tried at most in each way: the first, the last and some between.
    cases : int or None
        Draw so many of all these.
    seed : int
        Of what is drawn.
    """
    bench = Bench(operation, inputs, work, shim)
    listed = [
        (name, start, replace(way, number=number))
        for start in bench.starts
        for counts in (bench.counts(start, ARRAY_BYTES),)
        for name, ways in FAULTS.items()
        for way in ways
        for number in _spread(way.number or sum(counts[kind] for kind in way.kinds), most)
    ]
    if cases is not None and cases < len(listed):
        listed = random.Random(f"{seed} {operation.name}").sample(listed, cases)
    for name in FAULTS:
        counts = Counts()
        for start, fault in [(start, fault) for kind, start, fault in listed if kind == name]:
            verdict = bench.tried(start, fault)
            if verdict.ended.code == 0 and not verdict.ended.met and not verdict.wrong:
                continue  # there are fewer calls than before, when memory is reused
            counts.tried += 1
            counts.outcomes[verdict.outcome] += 1
            if verdict.wrong:
                error = errno.errorcode.get(fault.error, "")
                place = f"{start}, {fault.how.name} {error} at {fault.number}"
                counts.wrong[f"{place}: {verdict.ended.where}"] = verdict.wrong
        if counts.tried:
            yield name, counts


def _spread(total: int, most: int) -> list[int]:
    """Return all numbers from 1, or the first, the last and some between."""
    if total <= most:
        return list(range(1, total + 1))
    return sorted({1 + round(i * (total - 1) / (most - 1)) for i in range(most)})
