"""The lookups behind ``Tables.lookup``: check the sizes, hand each kernel's points to its operator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.checks import check_flag, shown
from fastroof.columns import ORIGIN_BORROWED
from fastroof.errors import LookupInputError
from fastroof.operators.operator import METHODS, Answers, Operator
from fastroof.operators.registry import OPERATORS
from fastroof.tables.answers import Lookup
from fastroof.tables.kernel_order import BY_RANK
from fastroof.tables.sizes import checked_points, checked_text
from fastroof.tables.source_errors import source_error

if TYPE_CHECKING:
    from fastroof.tables.table_set import Tables

__all__ = ["lookup_operator", "run_lookup"]

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
