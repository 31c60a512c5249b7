"""Your own rows, completed by another campaign's rows that are scaled to them.

An own grid is sparse; between and beyond its points another campaign knows the shape of the latency better.
At own points the ratio of own to other latency is known. Elsewhere it is the mean of the known ratios,
weighted by a normal density of the distance in octaves. Scaled rows are borrowed, never measured; README.md
has their errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Bools, Floats, Longs
from fastroof.caching import lazy_property
from fastroof.columns import LATENCY, ORIGIN, ORIGIN_BORROWED, ORIGIN_EXTRAPOLATED, ORIGIN_MEASURED, QUANTISES
from fastroof.load.measured import MeasuredTable, RowsWhenNeeded
from fastroof.load.scaled import scaled_from
from fastroof.load.sources import is_own
from fastroof.operators.operator import Columns, Key, Operator
from fastroof.tables.spike_free_rows import SpikeFreeRows
from fastroof.uncertainty.leave_one_out import LEVEL, NORMAL_80, UNKNOWN

OCTAVES: Final = 0.7
"""Standard deviation of the weights: of 0.35 to 1.0 the best for vLLM 0.31.0's rows over 0.25.0's (H100)."""

MOST_ERROR: Final = 0.1
"""Largest error with which rows are scaled: above that pair's 0.01 to 0.09. Beyond it, kernels differ."""

CELLS: Final = 2.0
"""Cells per octave within which ratios are averaged: there are fewer of them than rows."""


@dataclass(frozen=True)
class Campaign:
    """A table, its rows without spikes, which of its kernels are sound, and its lookups."""

    table: MeasuredTable
    usable: SpikeFreeRows
    is_sound: Callable[[Key], bool]
    lookup: Callable[..., Any]

    def kinds(self) -> dict[Key, Longs]:
        """Plain rows of sound kernels, by the kind of kernel."""
        schema, kinds = self.table.schema, dict[Key, list[Longs]]()
        plain = schema.plain_rows(self.table.columns)
        for key, rows in self.table.groups().items():
            if self.is_sound(key) and plain[rows].any():
                kinds.setdefault(kind_of(schema, key), []).append(rows[plain[rows]])
        return {kind: np.concatenate(rows) for kind, rows in kinds.items()}

    def rows(self, rows: Longs) -> dict[str, Array]:
        """Required columns of some rows, without spikes, and their origin."""
        read = {c.name for c in (*self.table.schema.required, QUANTISES)}
        columns = {name: values[rows] for name, values in self.table.columns.items() if name in read}
        return columns | {LATENCY.name: self.usable.latency_us[rows], ORIGIN: self.usable.origin[rows]}

    def at(self, columns: Columns) -> Any:
        """Look up sizes of one kind."""
        arguments = {name: columns[name] for name in self.table.schema.arguments}
        return self.lookup(**{n: v[0] if v.dtype == object else v for n, v in arguments.items()})


class Completed(NamedTuple):
    """Columns with origins, and by kind of kernel the relative standard error of scaled rows."""

    columns: dict[str, Array]
    errors: dict[Key, float]


class Completion:
    """Own rows and another campaign's; put together on first use."""

    def __init__(self, own: Callable[[], Campaign], other: Callable[[], Campaign]) -> None:
        self.own, self.other = own, other

    @lazy_property
    def made(self) -> Completed:
        """Own rows, and scaled rows at other sizes."""
        own, other = self.own(), self.other()
        parts, errors = [own.rows(np.arange(own.table.num_rows))], {}
        theirs = other.kinds()
        for kind, rows in own.kinds().items():
            if kind in theirs:
                scaled, error = _scaled(own.rows(rows), other, theirs[kind])
                if error <= MOST_ERROR:
                    parts.append(scaled)
                    errors[kind] = error
        return Completed({name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, errors)


@dataclass(frozen=True)
class CompletedTable(MeasuredTable):
    """A table of own and scaled rows, with the column ``origin``."""

    completion: Completion = field(kw_only=True)

    def error(self, key: Key) -> float:
        """Relative standard error that scaling adds to a kernel's answers."""
        return self.completion.made.errors.get(kind_of(self.schema, key), 0.0)


def kind_of(schema: Operator, key: Key) -> Key:
    """Return the part of a key within which kernels are scaled alike."""
    return tuple(v for c, v in zip(schema.keys, key, strict=True) if c.name in schema.completed_within)


def may_complete(own: MeasuredTable, other: MeasuredTable) -> bool:
    """Whether another source's rows may complete a table that kernels-bench measured: the same engine's."""
    if not own.schema.completed_within or not own.engine or own.engine != other.engine:
        return False
    return is_own(own.provenance) and not is_own(other.provenance) and not scaled_from(other.provenance)


def completed(own: MeasuredTable, other: MeasuredTable, completion: Completion) -> CompletedTable:
    """Return a table of own rows and of another's, scaled."""
    columns = RowsWhenNeeded(lambda: completion.made.columns)
    name = f"{own.source}, completed by {other.source}"
    return CompletedTable(own.operator, columns, name, own.files, own.provenance, completion=completion)


def _scaled(own: Columns, other: Campaign, theirs: Longs) -> tuple[dict[str, Array], float]:
    """Rows of one kind at sizes that own rows lack, scaled to these, and their relative standard error."""
    schema = other.table.schema
    names = [c.name for c in schema.keys if c.name not in schema.completed_within] + list(schema.free_axes())
    found = other.at(own)
    is_known = (found.origin <= ORIGIN_EXTRAPOLATED) & (own[ORIGIN] == ORIGIN_MEASURED)
    if not is_known.any():
        return {}, math.inf
    known = _log2_sizes({name: own[name][is_known] for name in names})
    log_ratio = np.log(own[LATENCY.name][is_known] / found.latency_us[is_known])
    rows = other.rows(theirs)
    more = list(_more_rows(own, rows, other))
    rows = {name: np.concatenate([values, *(one[name] for one in more)]) for name, values in rows.items()}
    have = set(zip(*(own[name].tolist() for name in names), strict=True))
    sizes = zip(*(rows[name].tolist() for name in names), strict=True)
    lacking = np.array([size not in have for size in sizes])
    rows = {name: values[lacking] for name, values in rows.items()}
    ratio = np.exp(mean_log_ratio(known, log_ratio, _log2_sizes({name: rows[name] for name in names})))
    rows[LATENCY.name] = rows[LATENCY.name] * ratio
    rows[ORIGIN] = np.full(len(ratio), ORIGIN_BORROWED, np.uint8)
    rows |= {name: np.full(len(ratio), own[name].min()) for name in (QUANTISES.name,) if name in own}
    free = set(schema.free_axes()) - set(schema.paired_axes)
    return rows, _error(known, log_ratio, [name not in free for name in names])


def _more_rows(own: Columns, rows: Columns, other: Campaign) -> Iterator[Columns]:
    """Yield lookups of the other campaign along the free axis of pairs of sizes that only own rows have."""
    schema = other.table.schema
    if not schema.paired_axes:
        return
    (free,) = (name for name in schema.free_axes() if name not in schema.paired_axes)
    pairs = {tuple(p) for p in zip(*(own[n].tolist() for n in schema.paired_axes), strict=True)}
    pairs -= {tuple(p) for p in zip(*(rows[n].tolist() for n in schema.paired_axes), strict=True)}
    axis = np.unique(rows[free])
    points = {name: np.repeat(values[:1], len(axis)) for name, values in own.items()} | {free: axis}
    for pair in sorted(pairs):
        sizes = {name: np.full(len(axis), v) for name, v in zip(schema.paired_axes, pair, strict=True)}
        found = other.at(points | sizes)
        inside = found.origin <= ORIGIN_EXTRAPOLATED
        columns = points | sizes | {LATENCY.name: found.latency_us}
        yield {name: values[inside] for name, values in columns.items()}


def _log2_sizes(columns: Columns) -> Floats:
    return np.log2(np.stack([values.astype(np.float64) for values in columns.values()], axis=1))


def mean_log_ratio(known: Floats, log_ratio: Floats, at: Floats) -> Floats:
    """Weighted mean of known log ratios at sizes; arrays of log2 sizes have the shape (points, sizes)."""
    cells, _, ratio = _cells(known, log_ratio)
    targets = np.round(at * CELLS)
    every = np.concatenate([cells, targets])
    first, extent = every.min(axis=0), np.ptp(every, axis=0).astype(np.int64) + 1
    # the density is a product over the axes: a sum along one after another takes 3 % of the time of all pairs
    sums = np.zeros((2, *extent))
    sums[(slice(None), *(cells - first).astype(np.int64).T)] = ratio, np.ones(len(ratio))
    for axis, size in enumerate(extent, 1):
        place = np.arange(size)
        density = np.exp((place[:, None] - place) ** 2 / (-2.0 * (OCTAVES * CELLS) ** 2))
        sums = np.moveaxis(np.einsum("ij,j...->i...", density, np.moveaxis(sums, axis, 0)), 0, axis)
    weighted, weight = sums[(slice(None), *(targets - first).astype(np.int64).T)]
    far = weight < np.finfo(np.float64).tiny
    return np.asarray(np.where(far, ratio.mean(), weighted / np.where(far, 1.0, weight)))


def _cells(known: Floats, log_ratio: Floats) -> tuple[Floats, Longs, Floats]:
    """Cells with known ratios, the cell of each point, and the mean log ratio of each cell."""
    cells, place = np.unique(np.round(known * CELLS), axis=0, return_inverse=True)
    place = place.ravel()
    return cells, place, np.bincount(place, log_ratio) / np.bincount(place)


def _weighted(cells: Floats, ratio: Floats, at: Floats, kept: Bools | None = None) -> Floats:
    """Weighted mean of the cells' log ratios at other cells; ``kept``, shape (at, cells), leaves some out."""
    square = (at**2).sum(axis=1)[:, None] + (cells**2).sum(axis=1) - 2.0 * at @ cells.T
    square = square if kept is None else np.where(kept, square, np.inf)
    # relative to the nearest cell, so that far from all of them no sum of weights is 0
    weight = np.exp((square.min(axis=1, keepdims=True) - square) / (2.0 * (OCTAVES * CELLS) ** 2))
    return np.asarray((weight * ratio).sum(axis=1) / weight.sum(axis=1))


def _error(known: Floats, log_ratio: Floats, is_fixed: list[bool]) -> float:
    """Relative standard error of ratios: each own point against those of kernels with other fixed sizes."""
    cells, place, ratio = _cells(known, log_ratio)
    if len(cells) == 1:
        return UNKNOWN
    _, group = np.unique(cells[:, is_fixed], axis=0, return_inverse=True)
    group = group.ravel() if group.any() else np.arange(len(cells))
    left_out = _weighted(cells, ratio, cells, group[:, None] != group)
    return float(np.quantile(np.abs(log_ratio - left_out[place]), LEVEL)) / NORMAL_80
