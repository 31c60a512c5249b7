"""Which measured kernel stands for one of latent, sparse or linear attention.

The kernel itself where it was measured and is sound for the engine that is asked for; else the nearest of the
same operator lends its latency / B. Widths of a model, phases and parts are never borrowed across: they name
other work. Formats and numbers of heads are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastroof.errors import MissingTableError
from fastroof.uncertainty.variance import MAPE_TO_ERROR

if TYPE_CHECKING:
    from fastroof.operators.operator import Key
    from fastroof.operators.ragged import RaggedOperator
    from fastroof.tables import Tables

__all__ = ["FORMATS", "OCTAVE", "Lent", "lent"]

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
