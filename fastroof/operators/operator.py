"""What every operator answers for: its tables' columns, the work of a row, lookups, errors, hold-outs.

An operator is a family of GPU kernels that do one thing: GEMMs, decode attention, all-reduces. Its file
holds all that fastroof knows of it; the stages (load, tables, plan, report, the command line) are generic
over :class:`Operator`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Bools, Flags, Floats
from fastroof.columns import LATENCY, Column
from fastroof.config.gpu import GpuSpec
from fastroof.errors import GpuError, LookupInputError
from fastroof.units import DTYPE_BYTES, INPUT_BYTES, PEAK_DTYPE, US_PER_S

if TYPE_CHECKING:
    from fastroof.operators.foreign_rows import PackageFile, TreeFile
    from fastroof.tables import Tables


Columns = Mapping[str, Array]
Key = tuple[Any, ...]
Answers = tuple[Floats, Floats, Flags]
"""latency_us, mfu and origin of some points, to be filled."""

METHODS: Final = ("roofline", "linear_mfu", "nearest", "floor")
"""How a table can be looked up, see :meth:`fastroof.Tables.lookup`."""

MEMORY_BANDWIDTH_SLACK: Final = 1.3
"""Above the datasheet's bandwidth by this much, a figure is wrong rather than lucky."""


@dataclass(frozen=True)
class RowWork:
    """Work and limits of every row of a table, arrays of shape (rows,)."""

    flops: Floats
    moved_bytes: Floats
    least_bytes: Floats
    peak_flops_per_s: Floats
    limit_flops_per_s: Floats
    bandwidth_bytes_per_s: float
    over_link: bool


@dataclass(frozen=True)
class HoldoutGrid:
    """Which rows of one operator are kept when its lookups are judged on the others."""

    operator: str
    name: str
    kept: Mapping[str, tuple[int, ...]]
    only: Mapping[str, Any]
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class DatasheetClass:
    """What the datasheet model assumes of one class of kernels."""

    launch_us: float
    efficiency: float


class Operator(ABC):
    """One family of kernels, and everything that is known of it."""

    name: ClassVar[str]
    rank: ClassVar[int]
    summary: ClassVar[str] = ""
    about: ClassVar[str] = ""
    keys: ClassVar[tuple[Column, ...]]
    axes: ClassVar[tuple[Column, ...]]
    defaults: ClassVar[Mapping[str, Any]] = {}
    constants: ClassVar[Mapping[str, Any]] = {}
    equal_axes: ClassVar[Mapping[str, str]] = {}
    over_link: ClassVar[bool] = False
    bandwidth_slack: ClassVar[float] = MEMORY_BANDWIDTH_SLACK
    faster_than_ring: ClassVar[bool] = False
    paired_axes: ClassVar[tuple[str, ...]] = ()
    packed_words: ClassVar[tuple[str, ...]] = ()
    holdouts: ClassVar[tuple[HoldoutGrid, ...]] = ()
    coverages: ClassVar[tuple[HoldoutGrid, ...]] = ()
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {}
    package_files: ClassVar[tuple[PackageFile, ...]] = ()
    tree_files: ClassVar[tuple[TreeFile, ...]] = ()

    def __repr__(self) -> str:
        return f"<operator {self.name}>"

    # -- columns and arguments ---------------------------------------------------------------------

    @property
    def required(self) -> tuple[Column, ...]:
        """Every column a table must have: keys, axes and the latency."""
        return (*self.keys, *self.axes, LATENCY)

    @property
    def answers_lookups(self) -> bool:
        """Whether it can be looked up."""
        return bool(self.summary)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of a lookup's arguments, those that must be given first."""
        names = [c.name for c in (*self.keys, *self.axes) if c.name not in self.constants]
        return (*(n for n in names if n not in self.defaults), *(n for n in names if n in self.defaults))

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the sizes that a kernel is looked up at."""
        return tuple(c.name for c in self.axes)

    # -- rows of a table ---------------------------------------------------------------------------

    def flops(self, columns: Columns) -> Floats:
        """FLOPs of every row; NaN for operators that only move bytes."""
        return np.full(len(columns["latency_us"]), np.nan)

    @abstractmethod
    def moved_bytes(self, columns: Columns) -> Floats:
        """Compulsory bytes of every row, see :class:`RowWork`."""

    def least_bytes(self, columns: Columns, moved_bytes: Floats) -> Floats:
        """Bytes that no call of the row can do without, beside those of :meth:`moved_bytes`."""
        return moved_bytes

    def peaks(self, columns: Columns, gpu: GpuSpec) -> tuple[Floats, Floats]:
        """Peak of every row's own dtype and the one that no kernel of it can pass, FLOP/s."""
        none = np.full(len(columns["latency_us"]), np.nan)
        return none, none

    def work(self, columns: Columns, gpu: GpuSpec) -> RowWork:
        """Work of every row of a table."""
        peak, limit = self.peaks(columns, gpu)
        moved_bytes = self.moved_bytes(columns)
        return RowWork(
            flops=self.flops(columns),
            moved_bytes=moved_bytes,
            least_bytes=self.least_bytes(columns, moved_bytes),
            peak_flops_per_s=peak,
            limit_flops_per_s=limit,
            bandwidth_bytes_per_s=gpu.nvlink_bytes_per_s if self.over_link else gpu.hbm_bytes_per_s,
            over_link=self.over_link,
        )

    def flops_conventions(self, columns: Columns) -> dict[str, Floats]:
        """FLOPs of every row by each convention that published files use; "" where there is but one."""
        return {"": self.flops(columns)}

    def plain_rows(self, columns: Columns) -> Bools:
        """Rows of calls that have nothing special: no prefix, no window."""
        keep = np.full(len(columns["latency_us"]), True)
        for name, value in self.constants.items():
            keep &= columns[name] == value
        for name, other in self.equal_axes.items():
            keep &= columns[name] == columns[other]
        return keep

    def independent_axes(self, columns: Columns) -> dict[str, Array]:
        """Sizes that vary by themselves: no bytes beside sizes, a context instead of a sum."""
        return {axis.name: columns[axis.name] for axis in self.axes}

    def thinned_values(self, columns: Columns, axis: str) -> Array:
        """By which values a hold-out thins an axis: its own, or what varies by itself where it is a sum."""
        return columns[axis]

    def free_axes(self) -> tuple[str, ...]:
        """Axes of plain rows that do not follow from another: those that a hold-out thins."""
        return tuple(name for name in self.axis_names if name not in self.equal_axes)

    def package_notes(self, columns: Mapping[str, Columns], gpu: GpuSpec) -> dict[str, Any]:
        """What provenance says of rows of aiconfigurator-core, beside where they came from."""
        return {}

    # -- lookups -----------------------------------------------------------------------------------

    def check_key(self, key: Key) -> None:  # noqa: B027 - most operators have nothing to refuse
        """Raise LookupInputError for a key that no kernel can have."""

    def pack(self, key: Key, rows: Columns, gpu: GpuSpec, variant: str = "") -> Any:
        """Pack the rows of one key for the loops; ``variant`` names another way of packing them."""
        raise self._no_lookups()

    def look_up(self, tables: Tables, method: str, key: Key, sizes: list[Floats], answers: Answers) -> None:
        """Look points of one kernel up."""
        raise self._no_lookups()

    def relative_error(self, tables: Tables, key: Key, sizes: list[Floats], latency_us: Floats) -> Floats:
        """One standard error over the latency, of roofline lookups of one kernel."""
        raise self._no_lookups()

    def source_key(self, tables: Tables, key: Key) -> Key:
        """The measured kernel whose source answers for a kernel: itself, or the nearest that lends to it."""
        return key

    def _no_lookups(self) -> LookupInputError:
        return LookupInputError(f"{self.name} has measured rows, but no lookup yet")


def unit_us(gpu: GpuSpec, dtype: str, work: float) -> float:
    """What some FLOPs take at the peak that ``dtype`` computes at, us; NaN where it has none."""
    return work / (gpu.peak(dtype) / US_PER_S) if dtype in PEAK_DTYPE else float("nan")


def by_word(words: Array, value: Callable[[str], float]) -> Floats:
    """``value(word)`` for each word, computed once a distinct word."""
    # np.unique would sort the words, which takes a tenth of the time of loading everything
    listed = words.tolist()
    known = {word: value(str(word)) for word in set(listed)}
    return np.fromiter(map(known.__getitem__, listed), np.float64, len(listed))


def element_bytes(words: Array) -> Any:
    """Bytes of an element of each row's dtype; NaN for one that is not known."""
    return by_word(words, lambda dtype: DTYPE_BYTES.get(dtype, np.nan))


def input_bytes(words: Array) -> Any:
    """Bytes of what weights of each row's dtype are multiplied with; NaN for one that is not known."""
    return by_word(words, lambda dtype: INPUT_BYTES.get(dtype, np.nan))


def dtype_peaks(words: Array, gpu: GpuSpec) -> Floats:
    """Peak of each row's dtype, FLOP/s; NaN where the GPU has none."""

    def peak(dtype: str) -> float:
        try:
            return gpu.peak(dtype)
        except GpuError:
            return np.nan

    return by_word(words, peak)


Real = Any
"""A number or an array of numbers."""


def as_floats(x: Real) -> Floats:
    """A size or sizes in float64."""
    # packing takes the roofline of a thousand curves, at an n and a k each: a fifth of the time of an array
    return np.float64(x) if isinstance(x, float) else np.asarray(x, np.float64)  # type: ignore[return-value]


def sizes_as_floats(columns: Mapping[str, Array]) -> dict[str, Array]:
    """Columns of rows with their sizes in float64, words as they are."""
    return {
        name: values if np.asarray(values).dtype.kind == "O" else as_floats(values)
        for name, values in columns.items()
    }
