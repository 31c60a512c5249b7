"""Shards of a sweep: its units are dealt out to jobs, whose files are merged later."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from fastroof.checks import is_whole_number, shown
from fastroof.errors import SweepError
from fastroof.sweep.units import WorkUnit

MAX_SHARDS: Final = 100_000


class Shard(NamedTuple):
    """One of the jobs that share a sweep: ``number`` from 1 to ``total``."""

    number: int
    total: int

    @classmethod
    def from_text(cls, text: str) -> Shard:
        """Parse a shard such as ``"3/16"``.

        Raises
        ------
        SweepError
            If the text has another form.

        Examples
        --------
        >>> Shard.from_text("3/16")
        Shard(number=3, total=16)
        """
        written = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
        if written is None:
            raise SweepError(f"shard must be i/n, like 1/8 to 8/8 for eight jobs, got {shown(text)}")
        return cls(*map(int, written.groups())).checked()

    def checked(self) -> Shard:
        """Return the shard itself if it is valid.

        Raises
        ------
        SweepError
            If the number is not from 1 to the total.
        """
        whole = all(is_whole_number(value) for value in self)
        if not whole or not 1 <= self.number <= self.total <= MAX_SHARDS:
            raise SweepError(
                f"shard must be i/n with i from 1 to n and n up to {MAX_SHARDS:,}, "
                f"got {self.number}/{self.total}"
            )
        return self

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


def shard_units(units: Sequence[WorkUnit], shard: Shard) -> list[WorkUnit]:
    """Deal out units, largest first, each to the shard with the least work; return one shard's units."""
    load = [(0, number) for number in range(1, shard.total + 1)]
    mine = []
    for unit in sorted(units, key=lambda unit: (-unit.size, unit.number)):
        size, number = load[0]
        # a unit without evaluations is work too: its plan is compiled
        heapq.heapreplace(load, (size + max(unit.size, 1), number))
        if number == shard.number:
            mine.append(unit)
    return sorted(mine, key=lambda unit: unit.number)
