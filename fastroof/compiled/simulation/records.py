"""What a simulation keeps of its steps, in bounded memory: a histogram of gaps, and series over time.

Gaps between a request's tokens fall into bins by exponent and seven bits of the mantissa: a bin is less than
0.8 % wide. Series have a number of bins of equal width from 0 on; when time runs over the last, they become
twice as wide.
"""

from __future__ import annotations

from typing import NamedTuple

from fastroof.arrays import Floats, Longs
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.llvm import float_bits

__all__ = [
    "GAP_BINS",
    "SERIES_BINS",
    "SERIES_FIELDS",
    "BinPart",
    "Record",
    "add_gaps",
    "add_interval",
    "add_part",
    "bin_of",
    "gap_bin",
]

MANTISSA_BITS = 7
GAP_SHIFT = 52 - MANTISSA_BITS
FIRST_KEY = 1023 << MANTISSA_BITS  # 1 us
GAP_BINS = 41 << MANTISSA_BITS
"""From 1 us on, what is shorter in the first; up to 25 days."""

SERIES_BINS = 512

# Fields of the series: integrals over a bin's time, and tokens by the end of their steps.
RUNNING_US, WAITING_US, BLOCKS_US, BUSY_TIME_US, NEW_TOKENS, OUTPUT_TOKENS = range(6)
SERIES_FIELDS = 6


class Record(NamedTuple):
    """Counts of gaps by bin, the series, and in ``width_us`` the width of one of its bins, us."""

    gaps: Longs
    series: Floats
    width_us: Floats


class BinPart(NamedTuple):
    """Steps within one bin of the series, not yet added to it: their time, blocks over it, how many."""

    length_us: float
    blocks_us: float
    steps: int


@jit_stateful_inline
def gap_bin(gap_us: float) -> int:
    """Bin of a gap."""
    key = (float_bits(gap_us) >> GAP_SHIFT) - FIRST_KEY
    return int(min(max(key, 0), GAP_BINS - 1))


@jit_stateful_inline
def bin_of(record: Record, time_us: float) -> tuple[int, float]:
    """Bin of the series that a time is in, and its end; one that has ended already beyond the last bin."""
    width = record.width_us[0]
    i = int(time_us / width)
    return (i, (i + 1) * width) if i < SERIES_BINS else (0, 0.0)


@jit_stateful_inline
def add_part(record: Record, i: int, part: BinPart, running: int, waiting: int, decodes: int) -> None:
    """Add steps of decodes to the bin that they are in."""
    series = record.series
    series[i, RUNNING_US] += part.length_us * running
    series[i, WAITING_US] += part.length_us * waiting
    series[i, BLOCKS_US] += part.blocks_us
    series[i, BUSY_TIME_US] += part.length_us
    series[i, NEW_TOKENS] += part.steps * decodes
    series[i, OUTPUT_TOKENS] += part.steps * decodes


@jit_stateful_inline
def add_gaps(record: Record, gap_us: float, count: int) -> None:
    """Count gaps of one length."""
    record.gaps[gap_bin(gap_us)] += count


@jit_stateful
def _widen(record: Record) -> None:
    series = record.series
    half = SERIES_BINS // 2
    for i in range(half):
        for field in range(SERIES_FIELDS):
            series[i, field] = series[2 * i, field] + series[2 * i + 1, field]
    series[half:] = 0.0
    record.width_us[0] *= 2.0


@jit_stateful
def _add_across(
    record: Record,
    from_us: float,
    to_us: float,
    running: int,
    waiting: int,
    blocks: int,
    tokens: tuple[int, int],
) -> None:
    """:func:`add_interval` of any interval: a part to each bin that it touches."""
    while to_us >= record.width_us[0] * SERIES_BINS:
        _widen(record)
    series, width = record.series, record.width_us[0]
    last = int(to_us / width)
    for i in range(int(from_us / width), last + 1):
        part_us = min(to_us, (i + 1) * width) - max(from_us, i * width)
        series[i, RUNNING_US] += part_us * running
        series[i, WAITING_US] += part_us * waiting
        series[i, BLOCKS_US] += part_us * blocks
        series[i, BUSY_TIME_US] += part_us
    series[last, NEW_TOKENS] += tokens[0]
    series[last, OUTPUT_TOKENS] += tokens[1]


@jit_stateful_inline
def add_interval(
    record: Record,
    from_us: float,
    to_us: float,
    running: int,
    waiting: int,
    blocks: int,
    tokens: tuple[int, int],
) -> None:
    """Add a step: what was there while it ran, and the tokens that it computed and that it made."""
    width = record.width_us[0]
    place = from_us / width
    i = int(place)
    if to_us < (i + 1) * width and i < SERIES_BINS:
        series = record.series
        length_us = to_us - from_us
        series[i, RUNNING_US] += length_us * running
        series[i, WAITING_US] += length_us * waiting
        series[i, BLOCKS_US] += length_us * blocks
        series[i, BUSY_TIME_US] += length_us
        series[i, NEW_TOKENS] += tokens[0]
        series[i, OUTPUT_TOKENS] += tokens[1]
    else:
        _add_across(record, from_us, to_us, running, waiting, blocks, tokens)
