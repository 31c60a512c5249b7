"""Operators with ragged tables: attention blocks, and kernels of latent, sparse and linear attention.

Their points form a tree, each axis with separate sizes below each node of the axis before it
(:mod:`fastroof.pack.ragged`). Rooflines, MFU, errors and lookups all follow from an operator's work parts
(FLOPs of several dtypes) and bytes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Flags, Floats
from fastroof.columns import KV_DTYPE, ORIGIN, ORIGIN_BORROWED, ORIGIN_EXTRAPOLATED, ORIGIN_MEASURED
from fastroof.config.gpu import GpuSpec
from fastroof.errors import MissingTableError
from fastroof.operators.attention_work import NO_PREFIX, PREFILL_ABOUT, PREFILL_AXES, PrefixUs, check_kv_len
from fastroof.operators.operator import (
    Answers,
    Columns,
    DatasheetClass,
    Key,
    Operator,
    RowSource,
    dtype_peaks,
    measured_keys,
    shared_errors,
)
from fastroof.pack import SIZE_LIMIT, PackedGrid
from fastroof.pack.grids import BatchBound
from fastroof.pack.ragged import RaggedTable, Segment, pack_ragged
from fastroof.uncertainty.leave_one_out import (
    MAPE_TO_ERROR,
    LocalErrors,
    MeasuredGrid,
    measured_grid,
    relative_variance,
)
from fastroof.units import US_PER_S

OCTAVE: Final = MAPE_TO_ERROR * 0.10
"""Relative standard error of borrowing over an octave of heads: 0.07 in decode and 0.10 in prefill (mean |ln|
over the H100 tables of each operator and engine), twice that over two octaves. On H200 and B200, which were
not used to choose it, 80 % intervals cover 77 to 95 % (README.md)."""

FORMATS: Final = {"dtype": 3.0, "kv_dtype": 2.0, "attn_dtype": 2.0}
"""Distance of another format, in octaves of heads: on H100 0.29 in prefill and 0.10 in decode for the
projections, 0.20 for the cache; the attention dtype from B200 only, which has both. Kernels that differ in
other text keys are no donors."""

FOREIGN: Final = 6.0
"""Distance of another engine's kernel, in octaves: 0.44 in decode and 0.69 in prefill on H100."""

UNSOUND: Final = 4.0
"""Distance of a kernel whose rows failed a check, in octaves: they are at least a third too slow."""


class KernelDonor(NamedTuple):
    """A measured kernel that serves a key: the kernel itself or a donor.

    ``bounded_by`` is a source of the engine's own rows that a check found too slow: they are an upper bound.
    """

    key: Key
    is_borrowed: bool
    error: float = 0.0
    bounded_by: str = ""


def kernel_donor(tables: RowSource, operator: RaggedOperator, key: Key) -> KernelDonor:
    """Find the measured kernel that serves a key."""
    return tables.cached(("kernel donor", operator.name, key), lambda: _nearest_donor(tables, operator, key))


def _nearest_donor(tables: RowSource, operator: RaggedOperator, key: Key) -> KernelDonor:
    operator.check_key(key)
    best: tuple[float, float, Key] | None = None
    for one in measured_keys(tables, operator.name):
        apart = _apart(operator, key, one)
        if apart is None:
            continue
        table = tables.serving(operator.name, one)
        far = apart + FOREIGN * tables.is_foreign(table) + UNSOUND * (not tables.is_sound(table, one))
        if best is None or far < best[0]:
            best = far, apart, one
    if best is None:
        # raises, naming the closest kernels
        tables.serving(operator.name, key)
        raise MissingTableError(f"no {operator.name} row can serve {key}")
    _, apart, donor = best
    is_borrowed = donor != key or tables.is_foreign(tables.serving(operator.name, donor))
    bound = "" if donor == key and not is_borrowed else _too_slow(tables, operator, key)
    return KernelDonor(donor, is_borrowed, OCTAVE * apart, bound)


def _too_slow(tables: RowSource, operator: RaggedOperator, key: Key) -> str:
    """Source of the engine's own unsound rows of a kernel; every check finds rows that are too slow."""
    for table in tables.candidates(operator.name):
        if not tables.is_foreign(table) and key in table.groups() and not tables.is_sound(table, key):
            return table.source
    return ""


def _apart(operator: RaggedOperator, target: Key, have: Key) -> float | None:
    """Distance of two kernels in octaves; None if one cannot serve the other."""
    total = 0.0
    for column, a, b in zip(operator.keys, target, have, strict=True):
        if a == b:
            continue
        if column.kind == "text":
            if column.name not in FORMATS:
                return None
            total += FORMATS[column.name]
        elif column.name in operator.borrowable_sizes:
            total += abs(math.log2(_size(a) / _size(b)))
        else:
            return None
    return total


def _size(value: Any) -> float:
    return max(float(value), 1.0)


SEGMENT: Final = "segment"
"""Extra column of rows at coordinates if several kernels serve one key."""


class WorkPart(NamedTuple):
    """FLOPs of a call that compute in one dtype."""

    flops: Floats
    dtype: Array | str


class RaggedOperator(Operator):
    """An operator with ragged tables."""

    # -- work ----------------------------------------------------------------------------------------

    @abstractmethod
    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """FLOPs of every row, by dtype."""

    def flops(self, columns: Columns) -> Floats:
        """FLOPs of every row."""
        return np.asarray(sum(part.flops for part in self.parts(columns)))

    def peaks(self, columns: Columns, gpu: GpuSpec) -> tuple[Floats, Floats]:
        """Combined peak of the parts, and of the parts in the fastest dtype."""
        return self.flops_and_peaks(columns, gpu)[1:]

    def flops_and_peaks(self, columns: Columns, gpu: GpuSpec) -> tuple[Floats, Floats, Floats]:
        """FLOPs and both peaks of every row, from parts that are counted once."""
        parts = self.parts(columns)
        total, seconds = np.asarray(sum(part.flops for part in parts)), _seconds(parts, gpu)
        peak = total / seconds
        if KV_DTYPE not in self.keys:
            return total, peak, peak
        dtypes = [np.broadcast_to(p.dtype, p.flops.shape) for p in parts]
        # some kernels compute in the KV cache's dtype
        peaks = dtype_peaks(columns["kv_dtype"], gpu)
        least = sum(p.flops / np.fmax(dtype_peaks(d, gpu), peaks) for p, d in zip(parts, dtypes, strict=True))
        return total, peak, total / np.asarray(least)

    def work_us(self, key: Key, gpu: GpuSpec, segment: Segment | None = None) -> Any:
        """B without launch floor against the coordinates of one kernel."""

        def work_us(*coordinates: Any) -> Floats:
            at = tuple(np.asarray(c, np.float64) for c in coordinates)
            columns = self.columns_at(key, at, segment)
            moved_us = self.moved_bytes(columns) * (US_PER_S / gpu.hbm_bytes_per_s)
            return np.asarray(_seconds(self.parts(columns), gpu) * US_PER_S + moved_us)

        return work_us

    def columns_at(self, key: Key, at: tuple[Floats, ...], segment: Segment | None) -> dict[str, Any]:
        """Columns of rows at coordinates of one kernel."""
        named = {c.name: np.array([v], object if c.kind == "text" else None) for c, v in self._named(key)}
        segments = {} if segment is None else {SEGMENT: segment(*at)}
        return {**named, **self.sizes_at(*at), **segments}

    def _named(self, key: Key) -> Any:
        return zip(self.keys, key, strict=True)

    # -- coordinates ---------------------------------------------------------------------------------

    def coordinates(self, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        """Coordinates of interpolation from the axes by name."""
        return tuple(sizes[name] for name in self.axis_names)

    def sizes_at(self, *coordinates: Any) -> dict[str, Any]:
        """Axes by name at coordinates."""
        return dict(zip(self.axis_names, coordinates, strict=True))

    def segment(self, key: Key, rows: Columns) -> Segment | None:
        """Which kernel runs at coordinates of one key, from its rows; None if there is only one."""
        return None

    # -- lookups -------------------------------------------------------------------------------------

    def pack(self, key: Key, rows: Columns, gpu: GpuSpec, variant: str = "") -> RaggedTable:
        """Pack one kernel's ragged table."""
        points = tuple(np.asarray(c, np.float64) for c in self.coordinates(rows))
        segment = self.segment(key, rows)
        work_us = self.work_us(key, gpu, segment)
        return pack_ragged(points, rows["latency_us"], work_us, segment, rows.get(ORIGIN))

    def look_up(
        self, tables: RowSource, method: str, key: Key, sizes: list[Floats], answers: Answers
    ) -> None:
        """Look up points of one kernel."""
        out, mfu, origin = answers
        named = dict(zip(self.axis_names, sizes, strict=True))
        self.check_sizes(named)
        packed: RaggedTable = tables.packed(self, key)
        at = self.coordinates(named)
        packed.latency(at, out, origin, method)
        columns = self.columns_at(key, at, packed.segment)
        np.divide(_seconds(self.parts(columns), tables.gpu) * US_PER_S, out, out=mfu)

    def check_sizes(self, sizes: Mapping[str, Floats]) -> None:
        """Raise LookupInputError for invalid sizes."""

    # -- in steps ------------------------------------------------------------------------------------

    borrowable_sizes: ClassVar[frozenset[str]] = frozenset({"num_heads", "num_q_heads"})
    """Sizes of a key in which a donor may differ."""

    def datasheet_of(self, key: Key) -> DatasheetClass:
        """Launch floor and efficiency of one kernel: least latency, median B / latency above 200 us.

        From H100 rows of the engine with the least latency (TensorRT-LLM for latent attention, SGLang for
        sparse attention with an indexer, vLLM otherwise).
        """
        return self.datasheet

    def is_modelled_unasked(self, key: Key) -> bool:
        """Whether the datasheet model serves a kernel even without ``allow_modelled``, as no table has it."""
        return False

    def step_sizes(self, is_decode: bool, batch: Any, length: Any, prefix: Any) -> dict[str, Any]:
        """Axes by name at a grid point: (batch, kv_len) in decode, (batch, new tokens) in prefill."""
        return {"batch_size": batch, "kv_len": length}

    def step_lengths(self, is_decode: bool, rows: Columns) -> Array:
        """Lengths of the grid's nodes."""
        return np.asarray(rows["kv_len"])

    def step_kernels(self, tables: RowSource, key: Key) -> list[KernelDonor]:
        """Measured kernels whose times add up to that of a key, donors included."""
        return [kernel_donor(tables, self, key)]

    def step_latency(self, tables: RowSource, key: Key, sizes: Mapping[str, Floats]) -> tuple[Floats, Flags]:
        """Latency and origin of what a step runs for a key; donors supply latency / B."""
        total, origin = np.zeros(len(sizes["batch_size"])), np.zeros(len(sizes["batch_size"]), np.uint8)
        at = [np.asarray(sizes[name], np.float64) for name in self.axis_names]
        for one in self.step_kernels(tables, key):
            answers = (np.empty_like(total), np.empty_like(total), np.zeros_like(origin))
            with np.errstate(divide="ignore", invalid="ignore"):
                # the MFU at sizes of 0
                self.step_look_up(tables, one.key, at, answers)
            latency_us = answers[0]
            target = self.kernel_of(key, one.key)
            if target != one.key:
                latency_us = latency_us * self.donor_ratio(tables, target, one.key, sizes)
            if one.bounded_by:
                most_us = np.empty_like(total)
                own: RaggedTable = tables.packed(self, target, source=one.bounded_by)
                own.latency(self.coordinates(sizes), most_us, np.zeros_like(origin))
                latency_us = np.minimum(latency_us, most_us)
            if one.is_borrowed:
                np.maximum(answers[2], ORIGIN_BORROWED, out=answers[2])
            total += latency_us
            np.maximum(origin, answers[2], out=origin)
        return total, origin

    def step_look_up(self, tables: RowSource, key: Key, sizes: list[Floats], answers: Answers) -> None:
        """Look up a measured kernel as steps run it."""
        self.look_up(tables, "roofline", key, sizes, answers)

    def kernel_of(self, key: Key, donor: Key) -> Key:
        """Kernel of a key that a donor serves."""
        return key

    def donor_ratio(self, tables: RowSource, target: Key, donor: Key, sizes: Mapping[str, Floats]) -> Floats:
        """Ratio of a kernel's to its donor's latency at the same sizes: B over B."""
        at_point, launch_us = self.coordinates(sizes), tables.packed(self, donor).launch_us
        own, theirs = (launch_us + self.work_us(key, tables.gpu)(*at_point) for key in (target, donor))
        return np.asarray(own / theirs)

    def verifying(self, key: Key) -> Key | None:
        """Key of the kernel that verifies several tokens; None if decode does."""
        return None

    def prefix_prices(self, key: Key, gpu: GpuSpec, window: int) -> PrefixUs:
        """Roofline of a prefix; decode has it in its length."""
        return NO_PREFIX

    def prefix_ratio(self, tables: RowSource, key: Key) -> float:
        """Latency / B of the longest measured prompt at its smallest batch, at least 1."""
        return 1.0

    def prefix_us(self, tables: RowSource, key: Key, window: int) -> PrefixUs:
        """Price of a prefix: its roofline times latency / B of prompts."""
        prices = self.prefix_prices(key, tables.gpu, window)
        return prices if prices == NO_PREFIX else prices.times(self.prefix_ratio(tables, key))

    # -- errors --------------------------------------------------------------------------------------

    def _measured_grid(self, tables: RowSource, key: Key) -> MeasuredGrid:
        rows = tables.rows(self, key)
        packed: RaggedTable = tables.packed(self, key)
        # + 1: a prefix of 0 has no logarithm
        points = tuple(np.asarray(c, np.float64) + 1.0 for c in self.coordinates(rows))

        def bound_us(*nodes: Any) -> Floats:
            return np.asarray(packed.launch_us + packed.work_us(*(n - 1.0 for n in nodes)))

        return measured_grid(points, rows["latency_us"], bound_us, is_spike=rows[ORIGIN] != ORIGIN_MEASURED)

    def alike(self, key: Key) -> Key:
        """Text keys of a kernel; kernels with equal ones are calibrated together."""
        return tuple(v for c, v in self._named(key) if c.kind == "text")

    def local_errors(self, tables: RowSource, key: Key) -> LocalErrors:
        """Local errors of one kernel, calibrated over kernels with the same text keys."""
        words = self.alike(key)

        def kernels() -> list[Key]:
            return [k for k in tables.candidates(self.name)[0].groups() if self.alike(k) == words] or [key]

        return shared_errors(tables, self.name, key, words, kernels, partial(self._measured_grid, tables))

    def relative_error(self, tables: RowSource, key: Key, sizes: list[Floats], latency_us: Floats) -> Floats:
        """Relative standard error of lookups of one kernel."""
        named = dict(zip(self.axis_names, sizes, strict=True))
        at = [np.asarray(c, np.float64) + 1.0 for c in self.coordinates(named)]
        return np.sqrt(relative_variance(self.local_errors(tables, key), at))


class RaggedPrefill(RaggedOperator):
    """An operator over new tokens after a prefix, looked up along batch, new tokens and prefix."""

    axes = PREFILL_AXES
    about: ClassVar[str] = PREFILL_ABOUT
    priced_at: ClassVar[tuple[float, float]] = (1.0, 0.0)
    """New tokens of the shorter prompt that prices a prefix, and the shortest prefix."""

    def coordinates(self, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        """Batch, new tokens, prefix."""
        return sizes["batch_size"], sizes["q_len"], sizes["kv_len"] - sizes["q_len"]

    def sizes_at(self, *coordinates: Any) -> dict[str, Any]:
        """Axes by name at coordinates."""
        batch, q_len, prefix = coordinates
        return {"batch_size": batch, "q_len": q_len, "kv_len": q_len + prefix}

    def independent_axes(self, columns: Columns) -> dict[str, Array]:
        """Context length instead of kv_len."""
        context_len = columns["kv_len"] - columns["q_len"]
        return {"batch_size": columns["batch_size"], "q_len": columns["q_len"], "context_len": context_len}

    def thinned_values(self, columns: Columns, axis: str) -> Array:
        """The prefix for kv_len."""
        return columns["kv_len"] - columns["q_len"] if axis == "kv_len" else columns[axis]

    def step_sizes(self, is_decode: bool, batch: Any, length: Any, prefix: Any) -> dict[str, Any]:
        """Axes by name at a grid's point of prompts (batch, new tokens)."""
        return {"batch_size": batch, "q_len": length, "kv_len": length + prefix}

    def step_lengths(self, is_decode: bool, rows: Columns) -> Array:
        """New tokens of rows without a prefix, or of all rows."""
        fresh = rows["kv_len"] == rows["q_len"]
        return np.asarray(rows["q_len"][fresh] if fresh.any() else rows["q_len"])

    def prefix_prices(self, key: Key, gpu: GpuSpec, window: int) -> PrefixUs:
        """Growth of B with a prefix, per pair and per token: without bound, and within the window."""
        work_us, (tokens, shortest) = self.work_us(key, gpu), self.priced_at

        def prices(prefix: float) -> tuple[float, float]:
            """Growth of B per pair and per token at a prefix, from prompts of two lengths."""
            q_len, before = tokens * np.array([1.0, 1.0, 2.0, 2.0]), np.array([0.0, 1.0, 0.0, 1.0]) + prefix
            us = work_us(np.ones(4), q_len, before)
            one, two = float(us[1] - us[0]), float(us[3] - us[2])
            return max(two - one, 0.0) / tokens, max(2.0 * one - two, 0.0)

        near = prices(shortest)
        if not window:
            return PrefixUs(*near)
        far = prices(4.0 * window)
        return PrefixUs(*far, max(near[0] - far[0], 0.0), max(near[1] - far[1], 0.0))

    def prefix_ratio(self, tables: RowSource, key: Key) -> float:
        """Latency / B of the longest measured prompt without a prefix, at its smallest batch."""
        one = self.step_kernels(tables, key)[0].key
        packed: RaggedTable = tables.packed(self, one)
        batch, q_len, prefix = packed.points()
        fresh = np.flatnonzero(prefix == prefix.min())
        at = fresh[np.lexsort((batch[fresh], -q_len[fresh]))[0]]
        bound_us = packed.launch_us + packed.work_us(*(c[at : at + 1] for c in (batch, q_len, prefix)))
        return max(1.0, float(packed.latency_us[at] / bound_us[0]))

    def check_sizes(self, sizes: Mapping[str, Floats]) -> None:
        """Reject a kv_len below q_len."""
        check_kv_len(sizes["q_len"], sizes["kv_len"])


def _seconds(parts: Sequence[WorkPart], gpu: GpuSpec) -> Floats:
    """Time of work parts at the peaks of their dtypes, s; NaN if the GPU has none."""
    return np.asarray(
        sum(p.flops / dtype_peaks(np.atleast_1d(np.asarray(p.dtype, object)), gpu) for p in parts)
    )


LENGTHS: Final = tuple(2.0**i for i in range(21))
"""Lengths of a grid's nodes if tables have none."""

Latency = Callable[[Floats, Floats], tuple[Floats, Flags]]
"""(batch, length) to latency, us, and its origin."""

WorkUs = Callable[[Floats, Floats], Floats]
"""(batch, length) to B without launch floor, us."""

_NO_BOUND: Final = BatchBound(math.nan, math.nan, math.nan, math.nan)


def constant_block(latency_us: float) -> Floats:
    """Grid block of constant latency, such as 0."""
    axis = np.array([0.0, SIZE_LIMIT])
    cells = np.zeros((2, 2, 6))
    cells[..., 0] = latency_us
    return PackedGrid(axis, axis, cells, np.zeros((2, 2), np.uint8), _NO_BOUND).arena


def sampled_block(latency: Latency, work_us: WorkUs, batch: Floats, length: Floats) -> Floats:
    """Grid block of a latency function sampled at nodes, interpolated by the work in between."""
    y_axis, x_axis = np.r_[0.0, batch, SIZE_LIMIT], np.r_[0.0, length, SIZE_LIMIT]
    yy, xx = (a.ravel() for a in np.meshgrid(y_axis, x_axis, indexing="ij"))
    shape = len(y_axis), len(x_axis)
    latency_us, origin = latency(yy, xx)
    table, flags = latency_us.reshape(shape), origin.reshape(shape).copy()
    # the outer nodes are beyond every measured size
    for edge in (flags[0], flags[-1], flags[:, 0], flags[:, -1]):
        np.maximum(edge, ORIGIN_EXTRAPOLATED, out=edge)
    cells = np.zeros((*shape, 6))
    cells[..., 0] = table
    linear, square = _rises(work_us, y_axis, x_axis)
    rise = np.diff(table, axis=1)
    cells[:, :-1, 1], cells[:, :-1, 2] = rise * linear, rise * square
    cells[:-1, :, 3:] = np.diff(cells[..., :3], axis=0) / np.diff(y_axis)[:, None, None]
    return PackedGrid(y_axis, x_axis, cells, flags, _NO_BOUND).arena


def _rises(work_us: WorkUs, y_axis: Floats, x_axis: Floats) -> tuple[Any, Any]:
    """Linear and square terms of the weight along each cell, which rises from 0 to 1 with B."""
    x0, dx = x_axis[:-1], np.diff(x_axis)

    def at(x: Floats) -> Floats:
        yy, xx = np.meshgrid(y_axis, x, indexing="ij")
        return work_us(yy.ravel(), xx.ravel()).reshape(yy.shape)

    first, middle, last = at(x0), at(x0 + dx / 2.0), at(x0 + dx)
    whole = last - first
    with np.errstate(divide="ignore", invalid="ignore"):
        # share of the rise that lies in the first half: 1/2 of a line, 1/4 of a square
        half = (middle - first) / whole
    # a parabola that never falls, else there is a kink
    bends = np.isfinite(half) & (whole > 0.0) & (half >= 0.25) & (half <= 0.75)
    curve = np.where(bends, 2.0 - 4.0 * np.where(bends, half, 0.5), 0.0)
    return (1.0 - curve) / dx, curve / (dx * dx)
