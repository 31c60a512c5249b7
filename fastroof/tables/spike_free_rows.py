"""Rows of a table with isolated spikes replaced by what their neighbours give, as lookups use them.

:mod:`fastroof.load.spikes` finds the spikes. Their latency is interpolated along the axis on which they stand
out most, as between any two measured points; the first point of a line takes its neighbour's latency / B.
Other axes do not work: in a cluster of wrong rows the neighbours along them are wrong too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastroof.arrays import Flags, Floats
from fastroof.columns import LATENCY, ORIGIN_EXTRAPOLATED, ORIGIN_INTERPOLATED, ORIGIN_MEASURED
from fastroof.config import GpuSpec
from fastroof.load import MeasuredTable
from fastroof.load.scaled import launch_us, work_us


class SpikeFreeRows(NamedTuple):
    """Latency and origin of every row, arrays of shape (rows,)."""

    latency_us: Floats
    origin: Flags


def spike_free_rows(table: MeasuredTable, gpu: GpuSpec) -> SpikeFreeRows:
    """Replace the isolated spikes of a table."""
    latency_us, spikes = table.columns[LATENCY.name], table.spikes
    origin = np.full(table.num_rows, ORIGIN_MEASURED, np.uint8)
    if not len(spikes.row):
        return SpikeFreeRows(latency_us, origin)
    is_first = spikes.before < 0
    before = np.where(is_first, spikes.row, spikes.before)
    here_us, before_us, after_us = (
        work_us(table.operator, {name: values[rows] for name, values in table.columns.items()}, gpu)
        for rows in (spikes.row, before, spikes.after)
    )
    if is_first.any():
        least_us = launch_us(latency_us, table.groups())[spikes.row]
    else:
        least_us = np.ones(len(spikes.row))
    held_us = spikes.after_us * (least_us + here_us) / (least_us + after_us)
    rise = after_us - before_us
    sizes = np.stack(list(table.schema.independent_axes(table.columns).values()))
    here, low, high = (sizes[spikes.axis, rows] for rows in (spikes.row, before, spikes.after))
    # within a window B does not grow, so the size itself is the weight
    by_size = (here - low) / (high - low)
    weight = np.where(rise > 0.0, (here_us - before_us) / np.where(rise > 0.0, rise, 1.0), by_size)
    line_us = spikes.before_us + (spikes.after_us - spikes.before_us) * weight
    instead_us = np.where(is_first, np.maximum(held_us, least_us), line_us)
    rows = np.flatnonzero(spikes.every_row)
    usable_us = latency_us.copy()
    usable_us[rows] = instead_us[spikes.of_row[rows]]
    origin[rows] = np.where(is_first, ORIGIN_EXTRAPOLATED, ORIGIN_INTERPOLATED)[spikes.of_row[rows]]
    return SpikeFreeRows(usable_us, origin)
