"""Operators that depend on a number of rows alone: their latency at every number, and sums of them."""

from __future__ import annotations

from fastroof.arrays import Flags, Floats
from fastroof.compiled.jit import jit
from fastroof.compiled.search import curve_point

__all__ = ["curve_rows", "sum_rows"]


@jit
def curve_rows(axis: Floats, value: Floats, flag: Flags, out: Floats, origin: Flags) -> None:
    """Look one curve up at 0, 1, 2, ...: entry 0, no work, gets nothing."""
    last = len(axis) - 1
    i = 0
    out[:1] = 0.0
    origin[:1] = 0
    for x in range(1, len(out)):
        while i < last - 1 and axis[i + 1] <= x:
            i += 1
        out[x], origin[x] = curve_point(axis, value, flag, i, i + 2, float(x))


@jit
def sum_rows(values: Floats, times: Floats, sums: Floats) -> None:
    """Sum operators, a plan a row: ``sums[plan] = sum of times[plan, operator] * values[operator]``."""
    for plan in range(len(sums)):
        row = sums[plan]
        for operator in range(len(values)):
            value = values[operator]
            factor = times[plan, operator]
            for x in range(len(row)):
                row[x] += factor * value[x]
