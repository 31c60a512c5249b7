"""Operators whose tables are no grid: attention modules, and kernels of latent and sparse attention.

Their points are rows within rows (:mod:`fastroof.pack.ragged`). What a call costs follows from its parts:
FLOPs of several dtypes, and bytes; the roofline, MFU, errors and lookups all from these.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, cast

import numpy as np

from fastroof.arrays import Array, Flags, Floats
from fastroof.columns import ORIGIN, ORIGIN_BORROWED, ORIGIN_EXTRAPOLATED, ORIGIN_MEASURED
from fastroof.config.gpu import GpuSpec
from fastroof.errors import LookupInputError, MissingTableError
from fastroof.operators.attention_work import NO_PREFIX, PrefixUs
from fastroof.operators.operator import Answers, Columns, DatasheetClass, Key, Operator, dtype_peaks
from fastroof.pack import SIZE_LIMIT, PackedGrid
from fastroof.pack.ragged import RaggedTable, Segment, pack_ragged
from fastroof.roofline import BatchBound
from fastroof.uncertainty.leave_one_out import (
    MAPE_TO_ERROR,
    LocalErrors,
    MeasuredGrid,
    calibrated_errors,
    calibration_factor,
    measured_grid,
    relative_variance,
)
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.tables import Tables


OCTAVE: Final = MAPE_TO_ERROR * 0.10
"""Relative standard error of lending over an octave of heads: 0.07 of decodes and 0.10 of prompts, mean of
|ln| over the H100 tables of each operator and engine, twice that over two octaves. On H200 and B200, by which
nothing was chosen, 77 to 95 % of them lie within 80 % intervals (fastroof/operators/README.md)."""

FORMATS: Final = {"dtype": 3.0, "kv_dtype": 2.0, "attn_dtype": 2.0}
"""How many octaves of heads another word of a key is worth, on H100: 0.29 of prompts, 0.10 of decodes for the
projections' format, 0.20 for the cache's; what attention computes in by B200 alone, which has both.
Kernels that differ in other words lend nothing."""

FOREIGN: Final = 6.0
"""Another engine's kernel of the same key, in octaves: 0.44 of decodes and 0.69 of prompts on H100."""

UNSOUND: Final = 4.0
"""A kernel whose rows failed a check, in octaves: they are a third too slow, or more."""


class Lent(NamedTuple):
    """A measured kernel that stands for another, or for itself."""

    key: Key
    is_borrowed: bool
    error: float = 0.0
    bounded_by: str = ""


def lent(tables: Tables, operator: RaggedOperator, key: Key) -> Lent:
    """Find the kernel that stands for one."""
    return tables.kept(("mixer lender", operator.name, key), lambda: _lent(tables, operator, key))


def _lent(tables: Tables, operator: RaggedOperator, key: Key) -> Lent:
    operator.check_key(key)
    best: tuple[float, float, Key] | None = None
    for one in tables.every_key(operator.name):
        apart = _apart(operator, key, one)
        if apart is None:
            continue
        table = tables.serving(operator.name, one)
        far = apart + FOREIGN * tables.order.is_foreign(table) + UNSOUND * (not tables.is_sound(table, one))
        if best is None or far < best[0]:
            best = far, apart, one
    if best is None:
        # says what there is
        tables.serving(operator.name, key)
        raise MissingTableError(f"no {operator.name} kernel is like {key}")
    _, apart, lender = best
    is_borrowed = lender != key or tables.is_foreign(operator.name, lender)
    bound = "" if lender == key and not is_borrowed else _too_slow(tables, operator, key)
    return Lent(lender, is_borrowed, OCTAVE * apart, bound)


def _too_slow(tables: Tables, operator: RaggedOperator, key: Key) -> str:
    """Source of an engine's own rows of a kernel that serve nothing; every check finds what is too slow."""
    for table in tables.candidates(operator.name):
        if not tables.order.is_foreign(table) and tables.has(table, key) and not tables.is_sound(table, key):
            return table.source
    return ""


def _apart(operator: RaggedOperator, wanted: Key, have: Key) -> float | None:
    """Octaves between two kernels; None where one stands for nothing of the other."""
    total = 0.0
    for column, a, b in zip(operator.keys, wanted, have, strict=True):
        if a == b:
            continue
        if column.kind == "text":
            if column.name not in FORMATS:
                return None
            total += FORMATS[column.name]
        elif column.name in operator.lent_sizes:
            total += abs(math.log2(_size(a) / _size(b)))
        else:
            return None
    return total


def _size(value: Any) -> float:
    return max(float(value), 1.0)


SEGMENT: Final = "segment"
"""A column that rows at coordinates have beside those of the table, where several kernels serve one key."""


class WorkPart(NamedTuple):
    """Some of a call's FLOPs."""

    flops: Floats
    dtype: Array | str


class RaggedOperator(Operator):
    """An operator that is looked up along rows within rows."""

    # -- work ----------------------------------------------------------------------------------------

    @abstractmethod
    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """FLOPs of every row, by what they compute in."""

    def fastest_dtype(self, columns: Columns) -> Array | None:
        """What some kernels of the rows compute in, faster than said; None where none do."""
        return None

    def flops(self, columns: Columns) -> Floats:
        """FLOPs of every row."""
        return np.asarray(sum(part.flops for part in self.parts(columns)))

    def peaks(self, columns: Columns, gpu: GpuSpec) -> tuple[Floats, Floats]:
        """What the parts' peaks make together, and what they would if all computed in the fastest dtype."""
        parts = self.parts(columns)
        total, seconds = self.flops(columns), _seconds(parts, gpu)
        fastest = self.fastest_dtype(columns)
        peak = total / seconds
        if fastest is None:
            return peak, peak
        dtypes = [np.broadcast_to(p.dtype, p.flops.shape) for p in parts]
        peaks = dtype_peaks(fastest, gpu)
        least = sum(p.flops / np.fmax(dtype_peaks(d, gpu), peaks) for p, d in zip(parts, dtypes, strict=True))
        return peak, total / np.asarray(least)

    def work_us(self, key: Key, gpu: GpuSpec, segment: Segment | None = None) -> Any:
        """B less its launch floor against the coordinates of one kernel."""

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
        """What is interpolated along, from the axes by name; the axes themselves."""
        return tuple(sizes[name] for name in self.axis_names)

    def sizes_at(self, *coordinates: Any) -> dict[str, Any]:
        """Axes by name at coordinates."""
        return dict(zip(self.axis_names, coordinates, strict=True))

    def segment(self, key: Key, rows: Columns) -> Segment | None:
        """Which kernel runs at coordinates of one key, as its rows tell; None where there is but one."""
        return None

    # -- lookups -------------------------------------------------------------------------------------

    def pack(self, key: Key, rows: Columns, gpu: GpuSpec, variant: str = "") -> RaggedTable:
        """One kernel's rows within rows."""
        points = tuple(np.asarray(c, np.float64) for c in self.coordinates(rows))
        segment = self.segment(key, rows)
        work_us = self.work_us(key, gpu, segment)
        return pack_ragged(points, rows["latency_us"], work_us, segment, rows.get(ORIGIN))

    def look_up(self, tables: Tables, method: str, key: Key, sizes: list[Floats], answers: Answers) -> None:
        """Look points of one kernel up."""
        out, mfu, origin = answers
        named = dict(zip(self.axis_names, sizes, strict=True))
        self.check_sizes(named)
        packed: RaggedTable = tables.packed(self, key)
        at = self.coordinates(named)
        packed.latency(at, out, origin, method)
        columns = self.columns_at(key, at, packed.segment)
        np.divide(_seconds(self.parts(columns), tables.gpu) * US_PER_S, out, out=mfu)

    def check_sizes(self, sizes: Mapping[str, Floats]) -> None:
        """Raise LookupInputError for sizes that no call can have."""

    # -- in steps ------------------------------------------------------------------------------------

    lent_sizes: ClassVar[frozenset[str]] = frozenset({"num_heads", "num_q_heads"})
    """Sizes of a key in which one kernel may stand for another, see :mod:`.mixer_borrowing`."""

    @property
    def datasheet_class(self) -> DatasheetClass:
        """What the datasheet model assumes of a call."""
        return self.datasheets[self.name]

    def datasheet_of(self, key: Key) -> DatasheetClass:
        """What the datasheet model assumes of one kernel."""
        return self.datasheet_class

    def is_modelled_unasked(self, key: Key) -> bool:
        """Whether the datasheet model may stand for a kernel without ``allow_modelled``."""
        return False

    def step_sizes(self, is_decode: bool, batch: Any, length: Any, prefix: Any) -> dict[str, Any]:
        """Axes by name at a grid's point of decodes (batch, kv_len) or prompts (batch, new tokens)."""
        return {"batch_size": batch, "kv_len": length}

    def step_lengths(self, is_decode: bool, rows: Columns) -> Array:
        """Lengths of the grid's nodes: those of the rows."""
        return np.asarray(rows["kv_len"])

    def step_kernels(self, tables: Tables, key: Key) -> list[Lent]:
        """Measured kernels whose times add up to those of a key, or stand for them."""
        return [lent(tables, self, key)]

    def step_latency(self, tables: Tables, key: Key, sizes: Mapping[str, Floats]) -> tuple[Floats, Flags]:
        """Latency of what a step runs for a key, and how it was made; lenders give their latency / B."""
        total, origin = np.zeros(len(sizes["batch_size"])), np.zeros(len(sizes["batch_size"]), np.uint8)
        at = [np.asarray(sizes[name], np.float64) for name in self.axis_names]
        for one in self.step_kernels(tables, key):
            answers = (np.empty_like(total), np.empty_like(total), np.zeros_like(origin))
            with np.errstate(divide="ignore", invalid="ignore"):
                # mfu at sizes of 0
                self.step_look_up(tables, one.key, at, answers)
            latency_us = answers[0]
            wanted = self.kernel_of(key, one.key)
            if wanted != one.key:
                latency_us = latency_us * self.lent_share(tables, wanted, one.key, sizes)
            if one.bounded_by:
                most_us = np.empty_like(total)
                own: RaggedTable = tables.packed_of(self, wanted, one.bounded_by)
                own.latency(self.coordinates(sizes), most_us, np.zeros_like(origin))
                latency_us = np.minimum(latency_us, most_us)
            if one.is_borrowed:
                np.maximum(answers[2], ORIGIN_BORROWED, out=answers[2])
            total += latency_us
            np.maximum(origin, answers[2], out=origin)
        return total, origin

    def step_look_up(self, tables: Tables, key: Key, sizes: list[Floats], answers: Answers) -> None:
        """Look a measured kernel up as steps run it: as it was measured."""
        self.look_up(tables, "roofline", key, sizes, answers)

    def kernel_of(self, key: Key, lender: Key) -> Key:
        """Which of the kernels of a key a lender stands for: the only one there is."""
        return key

    def lent_share(self, tables: Tables, wanted: Key, lender: Key, sizes: Mapping[str, Floats]) -> Floats:
        """What a kernel takes over what its lender does at the same sizes: B over B."""
        at_point, launch_us = self.coordinates(sizes), tables.packed(self, lender).launch_us
        own, theirs = (launch_us + self.work_us(key, tables.gpu)(*at_point) for key in (wanted, lender))
        return np.asarray(own / theirs)

    def verifying(self, key: Key) -> Key | None:
        """Key of what runs in a decode's place where it verifies several tokens; None: the decode itself."""
        return None

    def prefix_prices(self, key: Key, gpu: GpuSpec, window: int) -> PrefixUs:
        """What B says of a prefix; decodes have it in their length."""
        return NO_PREFIX

    def prefix_ratio(self, tables: Tables, key: Key) -> float:
        """Latency / B of the longest measured prompt, at the smallest batch that has it; at least 1."""
        return 1.0

    def prefix_us(self, tables: Tables, key: Key, window: int) -> PrefixUs:
        """Price of a prefix: what B says of it, times how many times B prompts take."""
        prices = self.prefix_prices(key, tables.gpu, window)
        return prices if prices == NO_PREFIX else prices.times(self.prefix_ratio(tables, key))

    # -- errors --------------------------------------------------------------------------------------

    def _measured_grid(self, tables: Tables, key: Key) -> MeasuredGrid:
        rows = tables.rows(self, key)
        packed: RaggedTable = tables.packed(self, key)
        # a prefix of 0 has no octave
        points = tuple(np.asarray(c, np.float64) + 1.0 for c in self.coordinates(rows))

        def bound_us(*nodes: Any) -> Floats:
            return np.asarray(packed.launch_us + packed.work_us(*(n - 1.0 for n in nodes)))

        return measured_grid(points, rows["latency_us"], bound_us, is_spike=rows[ORIGIN] != ORIGIN_MEASURED)

    def alike(self, key: Key) -> Key:
        """What kernels have in common whose errors are calibrated together: their words."""
        return tuple(v for c, v in self._named(key) if c.kind == "text")

    def local_errors(self, tables: Tables, key: Key) -> LocalErrors:
        """Local errors of one kernel, calibrated over those that are alike."""
        words = self.alike(key)

        def factor() -> float:
            alike = [k for k in tables.groups(self.name) if self.alike(k) == words] or [key]
            return calibration_factor(self._measured_grid(tables, k) for k in alike)

        def errors() -> LocalErrors:
            shared = tables.kept(("calibration", self.name, words), factor)
            return calibrated_errors(self._measured_grid(tables, key), shared)

        return tables.kept(("local errors", self.name, key), errors)

    def relative_error(self, tables: Tables, key: Key, sizes: list[Floats], latency_us: Floats) -> Floats:
        """One standard error over the latency."""
        named = dict(zip(self.axis_names, sizes, strict=True))
        at = [np.asarray(c, np.float64) + 1.0 for c in self.coordinates(named)]
        return np.sqrt(relative_variance(self.local_errors(tables, key), at))


class RaggedPrefill(RaggedOperator):
    """One that takes new tokens after a prefix: looked up along batch, new tokens and prefix."""

    def coordinates(self, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        """Batch, new tokens, prefix."""
        return sizes["batch_size"], sizes["q_len"], sizes["kv_len"] - sizes["q_len"]

    def sizes_at(self, *coordinates: Any) -> dict[str, Any]:
        """Axes by name at coordinates."""
        batch, q_len, prefix = coordinates
        return {"batch_size": batch, "q_len": q_len, "kv_len": q_len + prefix}

    def independent_axes(self, columns: Columns) -> dict[str, Array]:
        """The context instead of the tokens attended to."""
        context_len = columns["kv_len"] - columns["q_len"]
        return {"batch_size": columns["batch_size"], "q_len": columns["q_len"], "context_len": context_len}

    def thinned_values(self, columns: Columns, axis: str) -> Array:
        """Of kv_len the prefix."""
        return columns["kv_len"] - columns["q_len"] if axis == "kv_len" else columns[axis]

    def step_sizes(self, is_decode: bool, batch: Any, length: Any, prefix: Any) -> dict[str, Any]:
        """Axes by name at a grid's point of prompts (batch, new tokens)."""
        return {"batch_size": batch, "q_len": length, "kv_len": length + prefix}

    def step_lengths(self, is_decode: bool, rows: Columns) -> Array:
        """New tokens of rows without a prefix, if there are any."""
        fresh = rows["kv_len"] == rows["q_len"]
        return np.asarray(rows["q_len"][fresh] if fresh.any() else rows["q_len"])

    def prefix_prices(self, key: Key, gpu: GpuSpec, window: int) -> PrefixUs:
        """What B grows by with a prefix: a pair and a token, without end and within the window."""
        work_us = self.work_us(key, gpu)

        def prices(prefix: float) -> tuple[float, float]:
            """A pair and a token more of one sequence, of one and of two new tokens."""
            q_len, before = np.array([1.0, 1.0, 2.0, 2.0]), np.array([0.0, 1.0, 0.0, 1.0]) + prefix
            us = work_us(np.ones(4), q_len, before)
            one, two = float(us[1] - us[0]), float(us[3] - us[2])
            return max(two - one, 0.0), max(2.0 * one - two, 0.0)

        pair_us, token_us = prices(0.0)
        if not window:
            return PrefixUs(pair_us, token_us)
        far = prices(4.0 * window)
        return PrefixUs(*far, max(pair_us - far[0], 0.0), max(token_us - far[1], 0.0))

    def prefix_ratio(self, tables: Tables, key: Key) -> float:
        """Latency / B of the longest measured prompt without a prefix, at the smallest batch that has it."""
        one = self.step_kernels(tables, key)[0].key
        packed: RaggedTable = tables.packed(self, one)
        batch, q_len, prefix = packed.points()
        fresh = np.flatnonzero(prefix == prefix.min())
        at = fresh[np.lexsort((batch[fresh], -q_len[fresh]))[0]]
        bound_us = packed.launch_us + packed.work_us(*(c[at : at + 1] for c in (batch, q_len, prefix)))
        return max(1.0, float(packed.latency_us[at] / bound_us[0]))

    def check_sizes(self, sizes: Mapping[str, Floats]) -> None:
        """Refuse a kv_len that does not count the new tokens."""
        q_len, kv_len = sizes["q_len"], sizes["kv_len"]
        if (kv_len < q_len).any():
            at = int(np.flatnonzero(kv_len < q_len)[0])
            raise LookupInputError(
                f"kv_len {int(kv_len[at])} is less than q_len {int(q_len[at])}: "
                "kv_len counts the prefix and the new tokens"
            )


def _seconds(parts: Sequence[WorkPart], gpu: GpuSpec) -> Floats:
    """What some parts take at the peaks of their dtypes, s; NaN where the GPU has none."""
    return np.asarray(
        sum(p.flops / dtype_peaks(np.atleast_1d(np.asarray(p.dtype, object)), gpu) for p in parts)
    )


LENGTHS: Final = tuple(2.0**i for i in range(21))
"""Lengths of a grid's nodes where tables name none."""

Latency = Callable[[Floats, Floats], tuple[Floats, Flags]]
"""(batch, length) to latency, us, and its origin."""

WorkUs = Callable[[Floats, Floats], Floats]
"""(batch, length) to B less its launch floor, us."""

_NO_BOUND: Final = BatchBound(math.nan, math.nan, math.nan, math.nan)


def constant_block(latency_us: float) -> Floats:
    """Grid block of a kernel that takes the same whatever runs, such as none at all."""
    axis = np.array([0.0, SIZE_LIMIT])
    cells = np.zeros((2, 2, 6))
    cells[..., 0] = latency_us
    return PackedGrid(axis, axis, cells, np.zeros((2, 2), np.uint8), _NO_BOUND).arena


def sampled_block(latency: Latency, work_us: WorkUs, batch: Floats, length: Floats) -> Floats:
    """Grid block of a law, from its values at nodes."""
    y_axis, x_axis = np.r_[0.0, batch, SIZE_LIMIT], np.r_[0.0, length, SIZE_LIMIT]
    yy, xx = (a.ravel() for a in np.meshgrid(y_axis, x_axis, indexing="ij"))
    shape = len(y_axis), len(x_axis)
    latency_us, origin = latency(yy, xx)
    table, flags = latency_us.reshape(shape), origin.reshape(shape).copy()
    # the outer nodes are no sizes that anything was measured at
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
    """Terms of the weight along each cell, by which it rises from 0 to 1 with B; plainly where B does not."""
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


FLAT: Final = "flat"
PEAKED: Final = "top_last"
"""Scores of which only the last ones are worth picking, so that few bits tell them apart, as a model's."""

_PARTS: Final = "sparse_part"


def peaked_table(
    tables: Tables, block: RaggedOperator, key: Key, part: str, model: str, ratio: int, topk: float
) -> RaggedTable:
    """Rows of a block over a model's scores; as they are where its source has no top-k by itself."""

    def made() -> RaggedTable:
        packed: RaggedTable = tables.packed(block, key)
        over = [_kernel(tables, block, key, (part, model, scores, ratio)) for scores in (FLAT, PEAKED)]
        flat, peaked = over
        if flat is None or peaked is None:
            return packed
        rows = tables.rows(block, key)
        batch, kv_len = (np.asarray(rows[name], np.float64) for name in ("batch_size", "kv_len"))
        q_len = np.asarray(rows.get("q_len", np.ones_like(batch)), np.float64)
        at = (batch, q_len, kv_len - q_len)
        picks = kv_len // ratio > topk
        less_us = np.where(picks, _latency_us(flat, at) - _latency_us(peaked, at), 0.0)
        points = tuple(np.asarray(c, np.float64) for c in block.coordinates(rows))
        latency_us = rows["latency_us"] - less_us
        return pack_ragged(points, latency_us, packed.work_us, packed.segment, rows[ORIGIN])

    return tables.kept(("peaked scores", block.name, key), made)


def _kernel(
    tables: Tables, block: RaggedOperator, key: Key, wanted: tuple[str, str, str, int]
) -> RaggedTable | None:
    """A top-k that the source of a block measured by itself; None without."""
    from fastroof.operators.registry import OPERATORS

    if _PARTS not in tables.sources:
        return None
    parts = cast("RaggedOperator", OPERATORS[_PARTS])
    source = tables.source_of(block.name, key)
    for one in tables.every_key(_PARTS):
        if one[:4] == wanted and tables.source_of(_PARTS, one) == source:
            return tables.packed(parts, one)
    return None


def _latency_us(kernel: RaggedTable, at: tuple[Floats, ...]) -> Floats:
    latency_us, origin = np.empty(len(at[0])), np.zeros(len(at[0]), np.uint8)
    kernel.latency(at, latency_us, origin)
    return latency_us
