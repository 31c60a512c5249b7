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
    """What became of a trace's requests, in the trace's order.

    Attributes
    ----------
    arrival_us, first_us, last_us : ndarray of float64, shape (requests,)
        When each arrived, had its first token and its last, us; nan where it never had.
    preemptions : ndarray of int32, shape (requests,)
        How often it lost its blocks.
    status : ndarray of uint8, shape (requests,)
        FINISHED, TIMED_OUT or REJECTED.
    replica : ndarray of int32, shape (requests,)
        Which engine served it; -1 where none did.
    gaps : ndarray of int64, shape (GAP_BINS,)
        Times between tokens of one request, counted by length: bins of
        :mod:`fastroof.compiled.simulation.records`.
    series : ndarray of float64, shape (SERIES_BINS, len(SERIES))
        Over time, in bins of ``bin_us`` from 0 on.
    bin_us : float
        Width of a bin, us.
    counters : dict of str to int or float
        ``steps`` and of these ``mixed_steps``, ``prefill_steps`` and ``decode_steps``; ``preemptions``,
        ``prefill_tokens``, ``decode_tokens``, ``cached_tokens``; ``busy_us``, ``end_us``; ``peak_running``,
        ``peak_waiting``, ``peak_blocks``, ``num_gpu_blocks``, of all engines.
    cached_tokens : ndarray of int32, shape (requests,), optional
        Tokens that each found in a pool of blocks, where one was simulated.
    """

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
    """Add up the counters of several engines; they end when the last of them ends.

    Parameters
    ----------
    counters : sequence of dict
        Of each engine.

    Examples
    --------
    >>> added_up([{"steps": 3, "end_us": 9.0}, {"steps": 4, "end_us": 7.0}])
    {'steps': 7, 'end_us': 9.0}
    """
    return {
        name: max(of_each) if name == "end_us" else sum(of_each)
        for name in counters[0]
        for of_each in [[one[name] for one in counters]]
    }
