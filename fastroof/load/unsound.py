"""Families of rows that a test found unsound, as provenance.toml and known_unsound.toml list them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array, Bools, Floats
from fastroof.checks import true_or_false
from fastroof.documents import Table, parse_toml
from fastroof.errors import TableError
from fastroof.operators.registry import OPERATORS

KNOWN_FILE: Final = "known_unsound.toml"

FIELDS: Final = ("keys", "test", "reason", "ratio", "excess_us", "serves", "rows")


@dataclass(frozen=True)
class UnsoundFamily:
    """A family of rows that a test found unsound; ``serves`` if lookups still use it, with its error."""

    keys: Mapping[str, tuple[Any, ...]]
    test: str
    reason: str
    ratio: float | None = None
    excess_us: float | None = None
    serves: bool = False
    rows: int = 0

    def holds_key(self, key: Mapping[str, Any]) -> bool:
        """Whether rows of a kernel may be in the family; columns that are no keys do not count."""
        return all(_has(cells, key[name]) for name, cells in self.keys.items() if name in key)

    def holds(self, columns: Mapping[str, Array]) -> Bools:
        """Rows in the family."""
        inside = np.full(len(columns["latency_us"]), True)
        for name, cells in self.keys.items():
            values = np.asarray(columns[name])
            if isinstance(cells[0], str):
                inside &= np.isin(values, np.array(cells, object))
            else:
                inside &= (values >= cells[0]) & (values <= cells[1])
        return inside

    def error(self, latency_us: Floats) -> Floats:
        """Relative error of latencies in the family."""
        off = np.zeros(len(latency_us))
        if self.ratio is not None:
            off = np.full(len(latency_us), abs(1.0 / self.ratio - 1.0))
        if self.excess_us is not None:
            off = np.maximum(off, np.minimum(self.excess_us / latency_us, 1.0))
        return off

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of provenance.toml."""
        entry: dict[str, Any] = {
            "keys": {name: list(cells) for name, cells in self.keys.items()},
            "test": self.test,
            "reason": self.reason,
        }
        for name in ("ratio", "excess_us"):
            if (value := getattr(self, name)) is not None:
                entry[name] = value
        return entry | {"serves": self.serves, "rows": self.rows}


def families_error(
    families: Iterable[UnsoundFamily], sizes: Mapping[str, Floats], latency_us: Floats
) -> Floats:
    """Relative error of lookups from some families."""
    worst = np.zeros(len(latency_us))
    for family in families:
        keys = {name: cells for name, cells in family.keys.items() if name in sizes}
        inside = UnsoundFamily(keys, "", "").holds({**sizes, "latency_us": latency_us})
        worst = np.maximum(worst, np.where(inside, family.error(latency_us), 0.0))
    return worst


def unsound_families(provenance: Mapping[str, Any], operator: str) -> tuple[UnsoundFamily, ...]:
    """Unsound families of an operator in a source's provenance."""
    entries = provenance.get("operators", {}).get(operator, {}).get("unsound", ())
    if not isinstance(entries, list | tuple):
        raise TableError(f"operators.{operator}.unsound must be a list of tables, got {entries!r}")
    return tuple(_family(operator, number, entry) for number, entry in enumerate(entries, 1))


def known_unsound(gpu: str, source: str, operator: str) -> tuple[UnsoundFamily, ...]:
    """Shipped unsound families, whose tests need lookups in several tables."""
    return _known().get((gpu, source, operator), ())


@functools.cache
def _known() -> dict[tuple[str, str, str], tuple[UnsoundFamily, ...]]:
    text = (resources.files("fastroof.load") / KNOWN_FILE).read_text("utf-8")
    known: dict[tuple[str, str, str], tuple[UnsoundFamily, ...]] = {}
    for number, entry in enumerate(parse_toml(text, KNOWN_FILE)["families"], 1):
        place = (entry.pop("gpu"), entry.pop("source"), entry.pop("operator"))
        known[place] = (*known.get(place, ()), _family(place[2], number, entry))
    return known


def _family(operator: str, number: int, entry: Any) -> UnsoundFamily:
    where = f"operators.{operator}.unsound, entry {number}"
    table = Table(entry, where, TableError)
    table.allow(FIELDS)
    keys, test, reason = table.table("keys").data, table.text("test"), table.text("reason")
    amounts = {name: _amount(where, name, entry.get(name)) for name in ("ratio", "excess_us")}
    if set(amounts.values()) == {None}:
        raise TableError(f"{where} needs ratio or excess_us")
    serves, rows = entry.get("serves", False), entry.get("rows", 0)
    true_or_false(f"{where}: serves", serves, TableError)
    if type(rows) is not int or rows < 0:
        raise TableError(f"{where}: rows must be an integer of at least 0, got {rows!r}")
    cells = {name: _cells(operator, where, name, value) for name, value in keys.items()}
    return UnsoundFamily(cells, test, reason, **amounts, serves=serves, rows=rows)


def _amount(where: str, name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < math.inf:
        raise TableError(f"{where}: {name} must be a number above 0, got {value!r}")
    return float(value)


def _cells(operator: str, where: str, name: Any, value: Any) -> tuple[Any, ...]:
    columns = {c.name: c for c in (*OPERATORS[operator].keys, *OPERATORS[operator].axes)}
    if name not in columns:
        raise TableError(f"{where}: {operator} has no column {name!r}; use one of {', '.join(columns)}")
    is_text = columns[name].kind == "text"
    cells = tuple(value) if isinstance(value, list | tuple) else ()
    if is_text and cells and all(isinstance(cell, str) for cell in cells):
        return cells
    if not is_text and len(cells) == 2 and all(type(cell) is int for cell in cells) and cells[0] <= cells[1]:
        return cells
    need = "a list of names" if is_text else "[minimum, maximum]"
    raise TableError(f"{where}: {name} must be {need}, got {value!r}")


def _has(cells: Iterable[Any], value: Any) -> bool:
    first, *others = cells
    if isinstance(first, str):
        return value in (first, *others)
    return bool(first <= value <= others[0])
