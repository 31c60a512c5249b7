"""The lookups behind ``Tables.lookup``: check the sizes, hand each kernel's points to its operator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Flags, Floats, Longs
from fastroof.arrow import ORIGIN, RELATIVE_ERROR, ArrowResult
from fastroof.checks import check_flag, shown
from fastroof.columns import ORIGIN_BORROWED, Column
from fastroof.compiled.points import copied_sizes
from fastroof.errors import LookupInputError
from fastroof.given_arrays import number_array, refused
from fastroof.load import MeasuredTable
from fastroof.operators.operator import METHODS, Answers, Operator
from fastroof.operators.registry import OPERATORS
from fastroof.tables.errors import source_error

if TYPE_CHECKING:
    from fastroof.tables.table_set import Tables


LARGEST: Final[dict[str, int]] = {
    "n": 2**24,
    "k": 2**24,
    "batch_size": 2**24,
    "num_gpus": 2**16,
    "num_q_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**16,
    "message_bytes": 2**40 - 1,
}
"""Largest size each argument may have; 2**28 where it is not listed."""

LARGEST_OTHER: Final = 2**28

LEAST: Final = {"sms": 0, "window": 0}
"""Smallest size an argument may have; 1 where it is not listed."""

NATIVE: Final = (np.dtype(np.int64), np.dtype(np.int32))

CHUNK: Final = 32_768
"""Points at a time: a copied argument is 256 KiB of a second-level cache, and the 10 us that a chunk costs
are 0.3 ns a point."""


def _checked_size(name: str, value: Any) -> int:
    """One size in its range, or an error that names the argument."""
    if type(value) is not int and (not math.isfinite(value) or value != math.floor(value)):
        raise LookupInputError(f"{name} must be a whole number, got {shown(value)}")
    least = LEAST.get(name, 1)
    if value < least:
        raise LookupInputError(f"{name} must be at least {least}, got {shown(value)}")
    largest = LARGEST.get(name, LARGEST_OTHER)
    if value > largest:
        raise LookupInputError(f"{name} must be at most {largest}, got {shown(value)}")
    return int(value)


def _number_array(name: str, value: Any) -> Array:
    """The argument as an array of integers or floats, which need not be copied nor checked for that."""
    array = number_array(value)
    if array is None:
        raise LookupInputError(f"{name} must be an integer or an array of integers, {refused(value)}")
    return array


@dataclass(frozen=True, eq=False)
class Points:
    """The sizes of a lookup's points."""

    whole: dict[str, int]
    arrays: dict[str, Array]
    shape: tuple[int, ...]

    def chunks(self, names: Sequence[str]) -> Iterator[tuple[slice, list[Floats], dict[str, Floats]]]:
        """Yield the points in order, at most CHUNK at a time; arrays are good until the next ones."""
        rows = [*names, *(name for name in self.arrays if name not in names)]
        scratch = np.empty((len(rows), min(math.prod(self.shape), CHUNK)))
        buffers = dict(zip(rows, scratch, strict=True))
        for name in names:
            if name in self.whole:
                buffers[name][:] = self.whole[name]
        for part, sources in self._flat_chunks():
            sizes = {name: buffer[: part.stop - part.start] for name, buffer in buffers.items()}
            for name, source in zip(self.arrays, sources, strict=True):
                row, largest = sizes[name], float(LARGEST.get(name, LARGEST_OTHER))
                if not _is_native(source):
                    np.copyto(row, source, casting="unsafe")
                    source = row
                least = float(LEAST.get(name, 1))
                if not copied_sizes(source, least, largest, row):
                    with np.errstate(invalid="ignore"):
                        good = (row >= least) & (row <= largest) & (row == np.floor(row))
                    _checked_size(name, row[~good][0].item())
            yield part, [sizes.pop(name) for name in names], sizes

    def _flat_chunks(self) -> Iterator[tuple[slice, Sequence[Array]]]:
        arrays = list(self.arrays.values())
        count = math.prod(self.shape)
        if not count:
            return
        if all(a.shape == self.shape and (a.ndim == 1 or a.flags.c_contiguous) for a in arrays):
            flat = [a.reshape(-1) for a in arrays]
            for start in range(0, count, CHUNK):
                part = slice(start, min(start + CHUNK, count))
                yield part, [a[part] for a in flat]
            return
        # np.nditer broadcasts and walks any strides in the flattened order, through buffers of its own
        wide = [np.broadcast_to(a, self.shape) for a in arrays]
        with np.nditer(
            wide, ["external_loop", "buffered"], [["readonly"]] * len(wide),
            op_dtypes=[np.float64] * len(wide), order="C", casting="unsafe", buffersize=CHUNK,
        ) as walk:  # fmt: skip
            start = 0
            while not walk.finished:
                sources: Any = walk.value if len(wide) > 1 else (walk.value,)
                yield slice(start, start + len(sources[0])), sources
                start += len(sources[0])
                walk.iternext()


def _is_native(array: Array) -> bool:
    """Whether the loop that copies sizes is compiled for this array; others are copied twice."""
    flags = array.flags
    return array.dtype in NATIVE and flags.c_contiguous and flags.aligned and flags.writeable


def checked_points(given: Mapping[str, Any]) -> Points:
    """Sort the arguments of a lookup into single sizes and arrays, and broadcast them."""
    whole: dict[str, int] = {}
    arrays: dict[str, Array] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in given.items():
        if type(value) is int:
            whole[name] = _checked_size(name, value)
            continue
        array = _number_array(name, value)
        if array.ndim:
            shapes[name] = array.shape
        if array.size == 1:
            whole[name] = _checked_size(name, array.item())
        else:
            arrays[name] = array
    try:
        shape = np.broadcast_shapes(*shapes.values()) if shapes else ()
    except ValueError:
        said = ", ".join(f"{name} {s}" for name, s in shapes.items())
        raise LookupInputError(f"shapes do not broadcast: {said}") from None
    return Points(whole, arrays, shape)


def checked_text(name: str, value: Any) -> str:
    """One name, such as a dtype; arrays of names are not broadcast."""
    if not isinstance(value, str):
        raise LookupInputError(f"{name} must be one name such as 'bf16', got {shown(value)}")
    return value


class KernelOrder(NamedTuple):
    """The order in which the sources of an operator are asked."""

    engines: tuple[str, ...] = ()
    operators: tuple[tuple[str, str], ...] = ()

    def wanted(self, operator: str) -> str:
        """The engine or source that is asked first for an operator; empty where the ranks decide."""
        named = dict(self.operators).get(operator)
        return named or (self.engines[0] if self.engines else "")

    def sorted(self, tables: tuple[MeasuredTable, ...], operator: str) -> tuple[MeasuredTable, ...]:
        """Tables of an operator in this order; those of no engine stay among those of the first."""
        if not self.wanted(operator):
            return tables
        first = dict(self.operators).get(operator)
        engines = (first, *self.engines) if first else self.engines

        def place(table: MeasuredTable) -> int:
            if table.source == first or table.engine == "":
                return 0
            return engines.index(table.engine) if table.engine in engines else len(engines)

        return tuple(sorted(tables, key=place))

    def is_foreign(self, table: MeasuredTable) -> bool:
        """Whether a table's kernels are another engine's than the one that is meant to run them."""
        wanted = self.wanted(table.operator)
        return wanted != "" and table.engine not in ("", wanted) and table.source != wanted


BY_RANK: Final = KernelOrder()
"""The order of the sources' ranks."""


@dataclass(frozen=True, eq=False)
class Lookup(ArrowResult):
    """Answer of a lookup, arrays of the broadcast shape of its arguments.

    Attributes
    ----------
    latency_us : ndarray of float64
        Latency, us.
    mfu : ndarray of float64
        FLOPs / (latency x peak of the dtype the kernel computes in); NaN for communication.
    origin : ndarray of uint8
        0 measured, 1 interpolated, 2 extrapolated, 3 borrowed, 4 modelled.
    relative_error : ndarray of float64, or None
        One standard error over the latency; None where it was not asked for.
    made_from : mapping of str to str
        fastroof's version, the tables' hash and the GPU: metadata of its Arrow table.
    """

    latency_us: Floats
    mfu: Floats
    origin: Flags
    relative_error: Floats | None = None
    made_from: Mapping[str, str] = field(default_factory=dict, repr=False)

    arrow_columns = (
        Column("latency_us", "float", "us", "time of one call"),
        Column("mfu", "float", "", "FLOPs over latency and peak; empty for communication", 0),
        ORIGIN,
        RELATIVE_ERROR,
    )

    def columns(self) -> dict[str, Any]:
        """latency_us, mfu, origin (codes) and relative_error."""
        return {column.name: getattr(self, column.name) for column in self.arrow_columns}


Key = tuple[Any, ...]


def lookup_operator(name: Any) -> Operator:
    """Return the operator of that name, or raise LookupInputError if there is none to look up."""
    operator = OPERATORS.get(name) if isinstance(name, str) else None
    if operator is None or not operator.answers_lookups:
        have = ", ".join(o.name for o in OPERATORS.values() if o.answers_lookups)
        raise LookupInputError(f"unknown operator {shown(name)}: use one of {have}")
    return operator


def run_lookup(
    tables: Tables,
    name: str,
    method: str,
    with_error: bool,
    given: Mapping[str, Any],
    *,
    of_source: bool = True,
) -> Lookup:
    """Answer ``tables.lookup(name, method=method, with_error=with_error, **given)``."""
    operator = lookup_operator(name)
    if not isinstance(method, str) or method not in METHODS:
        raise LookupInputError(f"unknown method {shown(method)}: use one of {', '.join(METHODS)}")
    check_flag("with_error", with_error, LookupInputError)
    if with_error and method != "roofline":
        raise LookupInputError(f"with_error goes with method='roofline', got {shown(method)}")
    arguments = _arguments(operator, given)
    text = {c.name: checked_text(c.name, arguments.pop(c.name)) for c in operator.keys if c.kind == "text"}
    asked = checked_points(arguments)
    count = math.prod(asked.shape)
    latency_us, mfu, origin = np.empty(count), np.empty(count), np.empty(count, np.uint8)
    relative_error = np.empty(count if with_error else 0)
    fixed = {**operator.constants, **text}
    sized_keys = [c.name for c in operator.keys if c.name not in fixed]

    def key_of(sizes: Mapping[str, int]) -> Key:
        return tuple(fixed[c.name] if c.name in fixed else sizes[c.name] for c in operator.keys)

    for part, sizes, columns in asked.chunks(operator.axis_names):
        answers = (latency_us[part], mfu[part], origin[part])
        if not columns:
            key = key_of(asked.whole)
            operator.check_key(key)
            _look_up(operator, tables, method, key, sizes, answers)
            if with_error:
                relative_error[part] = _error(operator, tables, key, sizes, answers[0], of_source)
            continue
        wide = [columns.get(n, asked.whole.get(n)) for n in sized_keys]
        for key_sizes, rows in _kernels(wide, len(sizes[0])):
            key = key_of(dict(zip(sized_keys, key_sizes, strict=True)))
            operator.check_key(key)
            some = (np.empty(len(rows)), np.empty(len(rows)), np.empty(len(rows), np.uint8))
            few = [size[rows] for size in sizes]
            _look_up(operator, tables, method, key, few, some)
            for i in range(len(answers)):
                answers[i][rows] = some[i]
            if with_error:
                relative_error[part][rows] = _error(operator, tables, key, few, some[0], of_source)
    shape = asked.shape
    return Lookup(
        latency_us.reshape(shape),
        mfu.reshape(shape),
        origin.reshape(shape),
        relative_error.reshape(shape) if with_error else None,
        tables.made_from,
    )


def _look_up(
    operator: Operator, tables: Tables, method: str, key: Key, sizes: list[Floats], answers: Answers
) -> None:
    operator.look_up(tables, method, key, sizes, answers)
    # by the sources' ranks nothing is foreign, and asking who serves would read every source
    if (
        tables.order != BY_RANK
        and tables.serves(operator.name, key)
        and tables.is_foreign(operator.name, key)
    ):
        np.maximum(answers[2], ORIGIN_BORROWED, out=answers[2])


def _error(
    operator: Operator, tables: Tables, key: Key, sizes: list[Floats], latency_us: Floats, of_source: bool
) -> Floats:
    local = operator.relative_error(tables, key, sizes, latency_us)
    if not of_source:
        return local
    named = dict(zip(operator.axis_names, sizes, strict=True))
    variance = source_error(tables, operator.name, key).variance(named, latency_us)
    return np.asarray(np.sqrt(local**2 + variance))


def _arguments(operator: Operator, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with their defaults, or an error that says which do not fit."""
    known = operator.arguments
    unknown = sorted(set(given) - set(known))
    missing = [n for n in known if n not in given and n not in operator.defaults]
    if unknown or missing:
        wrong = f"does not take {', '.join(unknown)}" if unknown else f"needs {', '.join(missing)}"
        raise LookupInputError(f"lookup of {operator.name} {wrong}: it takes {', '.join(sorted(known))}")
    return {**operator.defaults, **given}


def _kernels(columns: list[Any], count: int) -> Iterator[tuple[tuple[int, ...], Longs]]:
    """Every distinct combination of some sizes, with the points that have it."""
    wide = np.stack([np.broadcast_to(column, count) for column in columns])
    order = np.lexsort(wide)
    wide = wide[:, order]
    starts = np.flatnonzero(np.r_[True, (wide[:, 1:] != wide[:, :-1]).any(axis=0)])
    for rows, start in zip(np.split(order, starts[1:]), starts, strict=True):
        yield tuple(int(v) for v in wide[:, start]), rows
