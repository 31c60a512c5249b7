"""Gaps between tokens by length, and a series of what runs over time."""

from __future__ import annotations

from typing import NamedTuple

from fastroof.arrays import Floats, Longs
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.llvm import float_bits

MANTISSA_BITS = 7
GAP_SHIFT = 52 - MANTISSA_BITS
FIRST_KEY = 1023 << MANTISSA_BITS  # 1 us
GAP_BINS = 41 << MANTISSA_BITS
"""Bins from 1 us to 25 days; shorter gaps are in the first bin."""

SERIES_BINS = 512

# fields of the series: integrals over a bin's time; tokens, counted when their step ends
RUNNING_US, WAITING_US, BLOCKS_US, BUSY_TIME_US, NEW_TOKENS, OUTPUT_TOKENS = range(6)
SERIES_FIELDS = 6


class Record(NamedTuple):
    """Gap counts by bin; the series, ``[bin, field]``; the width of the series' bins in ``width_us[0]``."""

    gaps: Longs
    series: Floats
    width_us: Floats


class BinPart(NamedTuple):
    """Steps within one bin of the series, not yet added: time, blocks times time, number of steps."""

    length_us: float
    blocks_us: float
    steps: int


@jit_stateful_inline
def gap_bin(gap_us: float) -> int:
    """Return the bin of a gap."""
    key = (float_bits(gap_us) >> GAP_SHIFT) - FIRST_KEY
    return int(min(max(key, 0), GAP_BINS - 1))


@jit_stateful_inline
def bin_of(record: Record, time_us: float) -> tuple[int, float]:
    """Return the series bin of a time and the bin's end; (0, 0.0) beyond the last bin."""
    width = record.width_us[0]
    i = int(time_us / width)
    return (i, (i + 1) * width) if i < SERIES_BINS else (0, 0.0)


@jit_stateful_inline
def add_part(record: Record, i: int, part: BinPart, running: int, waiting: int, decodes: int) -> None:
    """Add decode steps to their bin."""
    series = record.series
    series[i, RUNNING_US] += part.length_us * running
    series[i, WAITING_US] += part.length_us * waiting
    series[i, BLOCKS_US] += part.blocks_us
    series[i, BUSY_TIME_US] += part.length_us
    series[i, NEW_TOKENS] += part.steps * decodes
    series[i, OUTPUT_TOKENS] += part.steps * decodes


@jit_stateful_inline
def add_gaps(record: Record, gap_us: float, count: int) -> None:
    """Count ``count`` gaps of one length."""
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
    """Add a step that spans bins: a part to each bin."""
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
    """Add a step to the series: requests and blocks while it ran, tokens computed and tokens made."""
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
