"""Lookups behind ``Tables.lookup``: check the sizes and pass each kernel's points to its operator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array, Flags, Floats, Longs
from fastroof.arrow import ORIGIN, RELATIVE_ERROR, ArrowResult
from fastroof.checks import check_flag, shown
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_MODELLED, Column
from fastroof.compiled.points import copied_sizes
from fastroof.errors import LookupInputError
from fastroof.given_arrays import common_shape, number_array, refused
from fastroof.operators.operator import METHODS, Answers, Key, Operator, is_measured
from fastroof.operators.registry import OPERATORS, unknown_operator
from fastroof.tables.kernel_order import BY_RANK, OrderedTables
from fastroof.tables.source_errors import source_error

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
"""Largest valid size of each argument; 2**28 if not listed."""

LARGEST_OTHER: Final = 2**28

LEAST: Final = {"sms": 0, "window": 0}
"""Smallest valid size of each argument; 1 if not listed."""

NATIVE: Final = (np.dtype(np.int64), np.dtype(np.int32))

CHUNK: Final = 32_768
"""Points per chunk: an argument takes 256 KiB of the L2 cache; 10 us per chunk are 0.3 ns per point."""


def _checked_size(name: str, value: Any) -> int:
    """Return a valid size, or raise an error that names the argument."""
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
    """Return the argument as an array of integers or floats, uncopied and unchecked."""
    array = number_array(value)
    if array is None:
        raise LookupInputError(f"{name} must be an integer or an array of integers, {refused(value)}")
    return array


@dataclass(frozen=True, eq=False)
class Points:
    """Sizes of a lookup's points: single checked sizes, arrays as given, and the broadcast shape."""

    whole: dict[str, int]
    arrays: dict[str, Array]
    shape: tuple[int, ...]

    def chunks(self, names: Sequence[str]) -> Iterator[tuple[slice, list[Floats], dict[str, Floats]]]:
        """Yield slices of flat points with ``names`` and other arrays as float64; buffers are reused."""
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
        arrays, count = list(self.arrays.values()), math.prod(self.shape)
        if not count:
            return
        if all(a.shape == self.shape and (a.ndim == 1 or a.flags.c_contiguous) for a in arrays):
            flat = [a.reshape(-1) for a in arrays]
            for start in range(0, count, CHUNK):
                part = slice(start, min(start + CHUNK, count))
                yield part, [a[part] for a in flat]
            return
        # np.nditer broadcasts and walks any strides in flat order, with its own buffers
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
    """Whether the copying loop is compiled for this array; others are copied twice."""
    flags = array.flags
    return array.dtype in NATIVE and flags.c_contiguous and flags.aligned and flags.writeable


def checked_points(arguments: Mapping[str, Any]) -> Points:
    """Split the arguments of a lookup into single sizes and arrays, and broadcast them."""
    integers: dict[str, int] = {}
    arrays: dict[str, Array] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in arguments.items():
        if type(value) is int:
            integers[name] = _checked_size(name, value)
            continue
        array = _number_array(name, value)
        if array.ndim:
            shapes[name] = array.shape
        if array.size == 1:
            integers[name] = _checked_size(name, array.item())
        else:
            arrays[name] = array
    return Points(integers, arrays, common_shape(shapes, LookupInputError) if shapes else ())


def checked_text(name: str, value: Any) -> str:
    """Return a name, such as a dtype; arrays of names are not supported."""
    if not isinstance(value, str):
        raise LookupInputError(f"{name} must be one name such as 'bf16', got {shown(value)}")
    return value


@dataclass(frozen=True, eq=False)
class Lookup(ArrowResult):
    """Result of a lookup, arrays of the broadcast shape of its arguments.

    Attributes
    ----------
    latency_us : ndarray of float64
        Latency, us.
    mfu : ndarray of float64
        FLOPs / (latency x peak of the dtype the kernel computes in); NaN for communication.
    origin : ndarray of uint8
        0 measured, 1 interpolated, 2 extrapolated, 3 borrowed, 4 modelled.
    relative_error : ndarray of float64, or None
        Relative standard error; None without ``with_error``.
    made_from : mapping of str to str
        fastroof's version, the tables' hash and the GPU; metadata of the Arrow table.
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
        """Return latency_us, mfu, origin (codes) and relative_error."""
        return {column.name: getattr(self, column.name) for column in self.arrow_columns}


def lookup_operator(name: Any) -> Operator:
    """Return the operator of a name, or raise LookupInputError if it has no lookups."""
    operator = OPERATORS.get(name) if isinstance(name, str) else None
    if operator is None or not operator.answers_lookups:
        known = (o.name for o in OPERATORS.values() if o.answers_lookups)
        raise LookupInputError(unknown_operator(name, known))
    return operator


def check_method(method: object) -> None:
    """Raise LookupInputError for an unknown lookup method."""
    if not isinstance(method, str) or method not in METHODS:
        raise LookupInputError(f"unknown method {shown(method)}: use one of {', '.join(METHODS)}")


def run_lookup(
    tables: OrderedTables,
    name: str,
    method: str,
    with_error: bool,
    given: Mapping[str, Any],
    *,
    of_source: bool = True,
) -> Lookup:
    """Look up ``given`` sizes; without ``of_source``, errors are those of interpolation only."""
    operator = lookup_operator(name)
    check_method(method)
    check_flag("with_error", with_error, LookupInputError)
    if with_error and method != "roofline":
        raise LookupInputError(f"with_error goes with method='roofline', got {shown(method)}")
    arguments = _arguments(operator, given)
    text = {c.name: checked_text(c.name, arguments.pop(c.name)) for c in operator.keys if c.kind == "text"}
    points = checked_points(arguments)
    count = math.prod(points.shape)
    latency_us, mfu, origin = np.empty(count), np.empty(count), np.empty(count, np.uint8)
    relative_error = np.empty(count if with_error else 0)
    fixed = {**operator.constants, **text}
    sized_keys = [c.name for c in operator.keys if c.name not in fixed]

    def key_of(sizes: Mapping[str, int]) -> Key:
        return tuple(fixed[c.name] if c.name in fixed else sizes[c.name] for c in operator.keys)

    for part, sizes, columns in points.chunks(operator.axis_names):
        answers = (latency_us[part], mfu[part], origin[part])
        if not columns:
            key = key_of(points.whole)
            operator.check_key(key)
            _look_up(operator, tables, method, key, sizes, answers)
            if with_error:
                relative_error[part] = _error(operator, tables, key, sizes, answers[0], of_source)
            continue
        wide = [columns.get(n, points.whole.get(n)) for n in sized_keys]
        for key_sizes, rows in _kernels(wide, len(sizes[0])):
            key = key_of(dict(zip(sized_keys, key_sizes, strict=True)))
            operator.check_key(key)
            result = (np.empty(len(rows)), np.empty(len(rows)), np.empty(len(rows), np.uint8))
            few = [size[rows] for size in sizes]
            _look_up(operator, tables, method, key, few, result)
            for i in range(len(answers)):
                answers[i][rows] = result[i]
            if with_error:
                relative_error[part][rows] = _error(operator, tables, key, few, result[0], of_source)
    shape = points.shape
    return Lookup(
        latency_us.reshape(shape),
        mfu.reshape(shape),
        origin.reshape(shape),
        relative_error.reshape(shape) if with_error else None,
        tables.made_from,
    )


def _look_up(
    operator: Operator, tables: OrderedTables, method: str, key: Key, sizes: list[Floats], answers: Answers
) -> None:
    operator.look_up(tables, method, key, sizes, answers)
    if tables.scaled_sources:
        served = operator.source_key(tables, key)
        if is_measured(tables, operator.name, served):
            raised = tables.serving(operator.name, served).source in tables.scaled_sources
            np.maximum(answers[2], ORIGIN_MODELLED if raised else 0, out=answers[2])
    # by rank nothing is foreign, and finding the serving table would read every source
    if tables.order == BY_RANK or not is_measured(tables, operator.name, key):
        return
    if tables.is_foreign(tables.serving(operator.name, key)):
        np.maximum(answers[2], ORIGIN_BORROWED, out=answers[2])


def _error(
    operator: Operator,
    tables: OrderedTables,
    key: Key,
    sizes: list[Floats],
    latency_us: Floats,
    of_source: bool,
) -> Floats:
    local = operator.relative_error(tables, key, sizes, latency_us)
    if not of_source:
        return local
    size_columns = dict(zip(operator.axis_names, sizes, strict=True))
    variance = source_error(tables, operator.name, key).variance(size_columns, latency_us)
    return np.asarray(np.sqrt(local**2 + variance))


def _arguments(operator: Operator, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with their defaults, or raise an error that names unknown or missing ones."""
    known = operator.arguments
    unknown = sorted(set(given) - set(known))
    missing = [n for n in known if n not in given and n not in operator.defaults]
    if unknown or missing:
        wrong = f"does not take {', '.join(unknown)}" if unknown else f"needs {', '.join(missing)}"
        raise LookupInputError(f"lookup of {operator.name} {wrong}: it takes {', '.join(sorted(known))}")
    return {**operator.defaults, **given}


def _kernels(columns: list[Any], count: int) -> Iterator[tuple[tuple[int, ...], Longs]]:
    """Yield every distinct combination of sizes with its points."""
    wide = np.stack([np.broadcast_to(column, count) for column in columns])
    order = np.lexsort(wide)
    wide = wide[:, order]
    starts = np.flatnonzero(np.r_[True, (wide[:, 1:] != wide[:, :-1]).any(axis=0)])
    for rows, start in zip(np.split(order, starts[1:]), starts, strict=True):
        yield tuple(int(v) for v in wide[:, start]), rows
