"""What a simulation leaves behind: times of every request, counts, a histogram and series."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from fastroof.arrays import Flags, Floats, Ints, Longs
from fastroof.compiled.simulation.state import FINISHED, REJECTED, TIMED_OUT

__all__ = ["FINISHED", "REJECTED", "SERIES", "STATUS_WORDS", "TIMED_OUT", "Outcomes", "added_up"]

STATUS_WORDS: Final = ("finished", "timed_out", "rejected")
"""What a status is called."""

SERIES: Final = ("running", "waiting", "blocks", "busy", "new_tokens", "output_tokens")
"""Columns of ``Outcomes.series``: the first four integrated over time, us; the last two counted."""


class Outcomes(NamedTuple):
    """What became of a trace's requests, in the trace's order."""

    arrival_us: Floats
    first_us: Floats
    last_us: Floats
    preemptions: Ints
    status: Flags
    replica: Ints
    gaps: Longs
    series: Floats
    bin_us: float
    counters: dict[str, Any]
    cached_tokens: Ints | None = None


def added_up(counters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up the counters of several engines; they end when the last of them ends."""
    return {
        name: max(of_each) if name == "end_us" else sum(of_each)
        for name in counters[0]
        for of_each in [[one[name] for one in counters]]
    }
