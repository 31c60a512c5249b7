"""Kernels of another card, scaled: the tables of a card that nobody measured.

``kernels_of`` in a gpu.toml names a measured card with the same die. Each of its rows becomes
latency x B / B', where B is the roofline of the row on the card and B' that on the measured one: the least
latency of the row's kernel, its FLOPs over the peak (clock and SMs) and its bytes over the bandwidth. This is
the law by which kernels are borrowed between shapes. Rows of formats that the card has no units for are left
out. What is scaled serves behind what was measured on the card itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array, Floats, Longs
from fastroof.columns import LATENCY
from fastroof.config.gpu import GpuSpec
from fastroof.load.measured import MeasuredTable, MeasuredTables, RowsWhenNeeded
from fastroof.operators.operator import Columns
from fastroof.operators.registry import OPERATORS
from fastroof.units import US_PER_S

SCALED: Final = "scaled_from"
"""Key of a scaled table's provenance: the card that was measured."""

ALIKE_ERROR: Final = 0.15
"""Relative standard error of steps of scaled kernels: the largest of seven pairs of measured cards that share
a die (README.md)."""

ALIKE: Final = 1.5
"""Ratio of peaks and of bandwidths that none of those pairs exceeds."""

UNLIKE_ERROR: Final = 2 * ALIKE_ERROR
"""The same for cards that differ by more than any of those pairs: assumed."""


def scaled_from(provenance: Mapping[str, Any]) -> str:
    """Return the card that scaled rows were measured on; empty for rows of the card itself."""
    return str(provenance.get(SCALED, ""))


def scaled_name(source: str, measured: str) -> str:
    """Return the name of a measured card's source once it is scaled."""
    return f"{source} of {measured}, scaled"


def scaled_error(measured: GpuSpec, gpu: GpuSpec) -> float:
    """Return the relative standard error of steps of a card that runs another card's kernels."""
    if gpu.modelled_error:
        return gpu.modelled_error
    pairs = ((one.peak("bf16"), one.hbm_bytes_per_s) for one in (measured, gpu))
    ratios = [max(there / here, here / there) for there, here in zip(*pairs, strict=True)]
    return ALIKE_ERROR if max(ratios) <= ALIKE else UNLIKE_ERROR


def work_us(operator: str, columns: Columns, gpu: GpuSpec) -> Floats:
    """B of rows without its launch floor, us."""
    work = OPERATORS[operator].work(columns, gpu)
    compute_s = np.nan_to_num(work.flops / work.peak_flops_per_s)
    return np.asarray((compute_s + work.moved_bytes / work.bandwidth_bytes_per_s) * US_PER_S)


def launch_us(latency_us: Floats, groups: Mapping[Any, Longs]) -> Floats:
    """Smallest latency of each row's kernel, us."""
    least_us = np.empty(len(latency_us))
    for rows in groups.values():
        least_us[rows] = latency_us[rows].min()
    return least_us


def with_scaled(own: MeasuredTables | None, measured: MeasuredTables, gpu: GpuSpec) -> MeasuredTables:
    """Return a card's own tables, if any, with those of another card behind them, scaled."""
    names = list(dict.fromkeys((*(own.tables if own else ()), *measured.tables)))
    tables, others = {}, {}
    for name in names:
        scaled = (_scaled(table, measured.gpu_spec, gpu) for table in measured.candidates(name))
        first, *rest = (*(own.candidates(name) if own else ()), *scaled)
        tables[name] = first
        if rest:
            others[name] = tuple(rest)
    if own is not None:
        return replace(own, tables=tables, others=others)
    return MeasuredTables(gpu.name, tables, measured.root, spec=gpu, others=others)


def _scaled(table: MeasuredTable, measured: GpuSpec, gpu: GpuSpec) -> MeasuredTable:
    def read() -> dict[str, Array]:
        columns = table.columns
        there_us, here_us = (work_us(table.operator, columns, one) for one in (measured, gpu))
        least_us = launch_us(columns[LATENCY.name], table.groups())
        scaled_us = columns[LATENCY.name] * (least_us + here_us) / (least_us + there_us)
        there, here = (table.schema.peaks(columns, one)[0] for one in (measured, gpu))
        rows = np.isnan(there) | ~np.isnan(here)
        return {name: values[rows] for name, values in columns.items()} | {LATENCY.name: scaled_us[rows]}

    written = table.written
    if written is not None:
        both = f"{written.rows_sha256} {measured!r} {gpu!r}"
        written = written._replace(rows_sha256=hashlib.sha256(both.encode()).hexdigest())
    return replace(
        table,
        columns=RowsWhenNeeded(read),
        source=scaled_name(table.source, measured.name),
        provenance={**table.provenance, SCALED: measured.name},
        written=written,
    )
