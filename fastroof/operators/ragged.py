"""Operators whose tables are no grid: attention modules, and kernels of latent and sparse attention.

Their points are rows within rows (:mod:`fastroof.pack.ragged`). What a call costs follows from its parts:
FLOPs of several dtypes, and bytes; the roofline, MFU, errors and lookups all from these.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Flags, Floats
from fastroof.columns import ORIGIN, ORIGIN_BORROWED, ORIGIN_MEASURED
from fastroof.config.gpu import GpuSpec
from fastroof.errors import LookupInputError
from fastroof.operators.mixer_borrowing import Lent, lent
from fastroof.operators.operator import Answers, Columns, DatasheetClass, Key, Operator, dtype_peaks
from fastroof.operators.prefix_price import NO_PREFIX, PrefixUs
from fastroof.pack.ragged import RaggedTable, Segment, pack_ragged
from fastroof.uncertainty.leave_one_out import LocalErrors, MeasuredGrid, measured_grid
from fastroof.uncertainty.variance import calibrated_errors, calibration_factor, relative_variance
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.tables import Tables

__all__ = ["SEGMENT", "RaggedOperator", "RaggedPrefill", "WorkPart"]


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
