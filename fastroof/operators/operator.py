"""Base class of operators, and the measured rows they read.

An operator is a family of GPU kernels that do one thing: GEMMs, decode attention, all-reduces. Its file holds
everything fastroof knows about it; all stages (load, tables, plan, report, command line) are generic over
:class:`Operator`, and tables implement :class:`RowSource`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, TypeVar

import numpy as np

from fastroof.arrays import Array, Bools, Flags, Floats, Longs
from fastroof.columns import DTYPE, LATENCY, Column
from fastroof.config.gpu import GpuSpec
from fastroof.errors import GpuError, LookupInputError
from fastroof.operators.external_rows import PackageFile, TreeFile
from fastroof.uncertainty.leave_one_out import (
    LocalErrors,
    MeasuredGrid,
    calibrated_errors,
    calibration_factor,
)
from fastroof.units import DTYPE_BYTES, INPUT_BYTES, PEAK_DTYPE, US_PER_S

Columns = Mapping[str, Array]
Key = tuple[Any, ...]
Answers = tuple[Floats, Floats, Flags]
"""Output arrays of a lookup: latency_us, mfu and origin."""

METHODS: Final = ("roofline", "linear_mfu", "nearest", "floor")
"""Lookup methods, see :meth:`fastroof.Tables.lookup`."""

MEMORY_BANDWIDTH_SLACK: Final = 1.3
"""A row that exceeds the datasheet's bandwidth by more than this factor is wrong."""


@dataclass(frozen=True)
class RowWork:
    """Work and limits of every row of a table, arrays of shape (rows,).

    ``least_bytes`` is a lower bound (MoE: as few experts as any routing reaches), ``moved_bytes`` the
    expected bytes; ``limit_flops_per_s`` is the peak that no kernel of the row can exceed.
    """

    flops: Floats
    moved_bytes: Floats
    least_bytes: Floats
    peak_flops_per_s: Floats
    limit_flops_per_s: Floats
    bandwidth_bytes_per_s: float
    over_link: bool


@dataclass(frozen=True)
class HoldoutGrid:
    """Hold-out of one operator: rows that stay, by axis value or by whole kernels; the others are predicted.

    An axis without an entry in ``kept`` keeps every second value. ``only`` selects the rows that take part.
    ``first`` names the one axis that loses the lower half of each kernel's values, instead of every second.
    """

    operator: str
    name: str
    kept: Mapping[str, tuple[int, ...]]
    only: Mapping[str, Any]
    kernels: tuple[str, ...] = ()
    first: str = ""


def every_second(operator: str, column: str, *words: str) -> tuple[HoldoutGrid, ...]:
    """Hold-outs of every second value, one for each word of a key column."""
    return tuple(HoldoutGrid(operator, f"every second ({word})", {}, {column: word}) for word in words)


@dataclass(frozen=True)
class DatasheetClass:
    """Launch floor and efficiency that the datasheet model assumes for a class of kernels."""

    launch_us: float
    efficiency: float


T = TypeVar("T")
Packed = TypeVar("Packed", covariant=True)


class Packer(Protocol[Packed]):
    """An operator, typed by its packed form."""

    @property
    def name(self) -> str:
        """Name of the operator."""

    def pack(self, key: Key, rows: Columns, gpu: GpuSpec, variant: str = "") -> Packed:
        """Pack the rows of one key."""


class SourceTable(Protocol):
    """Measured rows of one operator from one source."""

    @property
    def operator(self) -> str:
        """Name of the operator."""

    @property
    def source(self) -> str:
        """Name of the source."""

    @property
    def engine(self) -> str:
        """Engine whose kernels were measured; empty if the source names none."""

    @property
    def columns(self) -> Columns:
        """Columns of all rows, as measured."""

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Provenance of the source."""

    @property
    def about(self) -> Mapping[str, Any]:
        """Part of the provenance that is about this operator."""

    def groups(self) -> Mapping[Key, Longs]:
        """Row indices by key."""

    def renamed(self, source: str) -> SourceTable:
        """Return the table under another source name."""


class RowSource(Protocol):
    """What operators need of a GPU's measured rows; :class:`fastroof.Tables` implements it."""

    @property
    def gpu(self) -> GpuSpec:
        """The GPU that was measured."""

    def has(self, operator: str) -> bool:
        """Whether any source measured an operator."""

    def candidates(self, operator: str) -> Sequence[SourceTable]:
        """Tables of an operator in order of preference; MissingTableError if there is none."""

    def serving(self, operator: str, key: Key) -> SourceTable:
        """Table that serves a kernel; MissingTableError if no source measured it."""

    def is_foreign(self, table: SourceTable) -> bool:
        """Whether a table has the kernels of another engine than the requested one."""

    def is_sound(self, table: SourceTable, key: Key) -> bool:
        """Whether no check found a kernel's rows of a table wrong."""

    def rows(self, operator: Packer[Any], key: Key, source: str = "") -> Columns:
        """Columns of a kernel's rows without spikes, and their origin; by default of the serving source."""

    def packed(self, operator: Packer[T], key: Key, variant: str = "", source: str = "") -> T:
        """Packed rows of a kernel, cached; by default of the serving source."""

    def cached(self, key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
        """Value cached under a key, made on first use."""

    def of_like_links(self) -> RowSource | None:
        """Tables of the GPU whose links stand for this one's, if there is one."""


def shared_errors(
    tables: RowSource,
    operator: str,
    key: Key,
    alike: Key,
    kernels: Callable[[], Iterable[Key]],
    grid_of: Callable[[Key], MeasuredGrid],
) -> LocalErrors:
    """Local errors of one kernel, calibrated over kernels that are alike."""

    def factor() -> float:
        return calibration_factor(map(grid_of, kernels()))

    def errors() -> LocalErrors:
        return calibrated_errors(grid_of(key), tables.cached(("calibration", operator, *alike), factor))

    return tables.cached(("local errors", operator, key), errors)


def is_measured(tables: RowSource, operator: str, key: Key) -> bool:
    """Whether any source measured a kernel; reads no further source once one has it."""
    return any(key in table.groups() for table in tables.candidates(operator))


def measured_keys(tables: RowSource, operator: str) -> list[Key]:
    """Keys that any source measured, those of preferred sources first."""
    return list(dict.fromkeys(key for table in tables.candidates(operator) for key in table.groups()))


class Operator(ABC):
    """One family of kernels and everything known about it (README.md lists the attributes)."""

    name: ClassVar[str]
    rank: ClassVar[int]
    summary: ClassVar[str] = ""
    about: ClassVar[str] = ""
    note: ClassVar[str] = ""
    keys: ClassVar[tuple[Column, ...]]
    axes: ClassVar[tuple[Column, ...]]
    defaults: ClassVar[Mapping[str, Any]] = {}
    constants: ClassVar[Mapping[str, Any]] = {}
    equal_axes: ClassVar[Mapping[str, str]] = {}
    over_link: ClassVar[bool] = False
    bandwidth_slack: ClassVar[float] = MEMORY_BANDWIDTH_SLACK
    faster_than_ring: ClassVar[bool] = False
    paired_axes: ClassVar[tuple[str, ...]] = ()
    completed_within: ClassVar[tuple[str, ...]] = ()
    packed_words: ClassVar[tuple[str, ...]] = ()
    holdouts: ClassVar[tuple[HoldoutGrid, ...]] = ()
    coverages: ClassVar[tuple[HoldoutGrid, ...]] = ()
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {}
    package_files: ClassVar[tuple[PackageFile, ...]] = ()
    tree_files: ClassVar[tuple[TreeFile, ...]] = ()

    def __init_subclass__(cls) -> None:
        """Judge an operator with lookups on every second value of all rows, if it names no other grids."""
        super().__init_subclass__()
        if cls.__dict__.get("summary"):
            for attribute, grid in (("holdouts", "every second"), ("coverages", "all")):
                if attribute not in cls.__dict__:
                    setattr(cls, attribute, (HoldoutGrid(cls.name, grid, {}, {}),))

    def __repr__(self) -> str:
        return f"<operator {self.name}>"

    # -- columns and arguments ---------------------------------------------------------------------

    @property
    def required(self) -> tuple[Column, ...]:
        """Columns a table must have: keys, axes and the latency."""
        return (*self.keys, *self.axes, LATENCY)

    @property
    def answers_lookups(self) -> bool:
        """Whether lookups are supported."""
        return bool(self.summary)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of a lookup's arguments, required ones first."""
        names = [c.name for c in (*self.keys, *self.axes) if c.name not in self.constants]
        return (*(n for n in names if n not in self.defaults), *(n for n in names if n in self.defaults))

    @property
    def datasheet(self) -> DatasheetClass:
        """Launch floor and efficiency of the datasheet model, for the class of the operator's name."""
        return self.datasheets[self.name]

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the sizes that lookups interpolate along."""
        return tuple(c.name for c in self.axes)

    # -- rows of a table ---------------------------------------------------------------------------

    def as_keyed(self, columns: Columns) -> Columns:
        """Columns as read from a file, with keys that say which kernel ran."""
        return columns

    def flops(self, columns: Columns) -> Floats:
        """FLOPs of every row; NaN for operators that only move bytes."""
        return np.full(len(columns["latency_us"]), np.nan)

    @abstractmethod
    def moved_bytes(self, columns: Columns) -> Floats:
        """Compulsory bytes of every row, see :class:`RowWork`."""

    def least_bytes(self, columns: Columns, moved_bytes: Floats) -> Floats:
        """Lower bound of a call's bytes, see :class:`RowWork`."""
        return moved_bytes

    def peaks(self, columns: Columns, gpu: GpuSpec) -> tuple[Floats, Floats]:
        """Peak of every row's dtype, and the peak that no kernel of the row can exceed, FLOP/s."""
        if self.over_link or DTYPE not in self.keys:
            peak: Floats = np.full(len(columns["latency_us"]), np.nan)
        else:
            peak = dtype_peaks(columns["dtype"], gpu)
        return peak, peak

    def flops_and_peaks(self, columns: Columns, gpu: GpuSpec) -> tuple[Floats, Floats, Floats]:
        """FLOPs and both peaks of every row."""
        return self.flops(columns), *self.peaks(columns, gpu)

    def work(self, columns: Columns, gpu: GpuSpec) -> RowWork:
        """Work of every row of a table."""
        flops, peak, limit = self.flops_and_peaks(columns, gpu)
        moved_bytes = self.moved_bytes(columns)
        return RowWork(
            flops=flops,
            moved_bytes=moved_bytes,
            least_bytes=self.least_bytes(columns, moved_bytes),
            peak_flops_per_s=peak,
            limit_flops_per_s=limit,
            bandwidth_bytes_per_s=gpu.nvlink_bytes_per_s if self.over_link else gpu.hbm_bytes_per_s,
            over_link=self.over_link,
        )

    def flops_conventions(self, columns: Columns) -> dict[str, Floats]:
        """FLOPs of every row by each convention of published files; "" if there is only one."""
        return {"": self.flops(columns)}

    def plain_rows(self, columns: Columns) -> Bools:
        """Rows of plain calls: no prefix, no window."""
        keep = np.full(len(columns["latency_us"]), True)
        for name, value in self.constants.items():
            keep &= columns[name] == value
        for name, other in self.equal_axes.items():
            keep &= columns[name] == columns[other]
        return keep

    def independent_axes(self, columns: Columns) -> dict[str, Array]:
        """Sizes that vary independently: a context length instead of a sum, no derived bytes."""
        return {axis.name: columns[axis.name] for axis in self.axes}

    def thinned_values(self, columns: Columns, axis: str) -> Array:
        """Values by which a hold-out thins an axis: its independent part if the axis is a sum."""
        return columns[axis]

    def free_axes(self) -> tuple[str, ...]:
        """Independent axes of plain rows, which a hold-out thins."""
        return tuple(name for name in self.axis_names if name not in self.equal_axes)

    def package_notes(self, columns: Mapping[str, Columns], gpu: GpuSpec) -> dict[str, Any]:
        """Notes for the provenance of rows imported from aiconfigurator-core."""
        return {"note": self.note} if self.note else {}

    # -- lookups -----------------------------------------------------------------------------------

    def check_key(self, key: Key) -> None:  # noqa: B027 - most operators accept every key
        """Raise LookupInputError for an invalid key."""

    def pack(self, key: Key, rows: Columns, gpu: GpuSpec, variant: str = "") -> Any:
        """Pack the rows of one key for the compiled loops; ``variant`` names another way of packing."""
        raise self._no_lookups()

    def look_up(
        self, tables: RowSource, method: str, key: Key, sizes: list[Floats], answers: Answers
    ) -> None:
        """Fill ``answers`` with latency, MFU and origin of points of one kernel."""
        raise self._no_lookups()

    def relative_error(self, tables: RowSource, key: Key, sizes: list[Floats], latency_us: Floats) -> Floats:
        """Relative standard error of roofline lookups of one kernel."""
        raise self._no_lookups()

    def source_key(self, tables: RowSource, key: Key) -> Key:
        """Measured kernel that determines the source of a kernel: itself, or its nearest donor."""
        return key

    def _no_lookups(self) -> LookupInputError:
        return LookupInputError(f"{self.name} does not support lookups, it only has measured rows")


def unit_us(gpu: GpuSpec, dtype: str, work: float) -> float:
    """Time of some FLOPs at the peak of ``dtype``, us; NaN if it has no peak."""
    return work / (gpu.peak(dtype) / US_PER_S) if dtype in PEAK_DTYPE else float("nan")


def by_word(words: Array, value: Callable[[str], float]) -> Floats:
    """``value(word)`` of each word, computed once per distinct word."""
    # np.unique sorts the words, which takes a tenth of the time of loading all tables
    listed = words.tolist()
    known = {word: value(str(word)) for word in set(listed)}
    return np.fromiter(map(known.__getitem__, listed), np.float64, len(listed))


def element_bytes(words: Array) -> Any:
    """Bytes per element of each row's dtype; NaN if unknown."""
    return by_word(words, lambda dtype: DTYPE_BYTES.get(dtype, np.nan))


def input_bytes(words: Array) -> Any:
    """Bytes per element of the inputs of each row's dtype (weight-only formats differ); NaN if unknown."""
    return by_word(words, lambda dtype: INPUT_BYTES.get(dtype, np.nan))


def dtype_peaks(words: Array, gpu: GpuSpec) -> Floats:
    """Peak of each row's dtype, FLOP/s; NaN if the GPU has none."""

    def peak(dtype: str) -> float:
        try:
            return gpu.peak(dtype)
        except GpuError:
            return np.nan

    return by_word(words, peak)


Real = Any
"""A number or an array of numbers."""


def as_floats(x: Real) -> Floats:
    """One size or an array of sizes as float64."""
    # packing evaluates a thousand rooflines at scalar n and k: a scalar takes a fifth of an array's time
    return np.float64(x) if isinstance(x, float) else np.asarray(x, np.float64)  # type: ignore[return-value]


def sizes_as_floats(columns: Mapping[str, Array]) -> dict[str, Array]:
    """Columns with their sizes as float64; text is unchanged."""
    return {
        name: values if np.asarray(values).dtype.kind == "O" else as_floats(values)
        for name, values in columns.items()
    }
