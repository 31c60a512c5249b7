"""Which measured kernel stands for one of latent, sparse or linear attention.

The kernel itself where it was measured and is sound for the engine that is asked for; else the nearest of the
same operator lends its latency / B. Widths of a model, phases and parts are never borrowed across: they name
other work. Formats and numbers of heads are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastroof.errors import MissingTableError

if TYPE_CHECKING:
    from fastroof.operators.operator import Key
    from fastroof.operators.ragged import RaggedOperator
    from fastroof.tables import Tables

__all__ = ["FORMATS", "Lent", "lent"]

FORMATS: Final = {"dtype": 2.0, "kv_dtype": 1.0, "attn_dtype": 0.5}
"""How many octaves of a size another word of a key is worth; kernels that differ in others lend nothing."""

FOREIGN: Final = 3.0
"""Another engine's kernel: engines differ more than neighbours of one engine within as many octaves, as
their experts do (fastroof/operators/README.md)."""

UNSOUND: Final = 1.5
"""A kernel whose rows failed a check."""


class Lent(NamedTuple):
    """A measured kernel that stands for another, or for itself.

    Attributes
    ----------
    key : tuple
        Of the measured one.
    is_borrowed : bool
        Whether it is another, or another engine's.
    """

    key: Key
    is_borrowed: bool


def lent(tables: Tables, operator: RaggedOperator, key: Key) -> Lent:
    """Find the kernel that stands for one.

    Parameters
    ----------
    tables : Tables
        In the order of an engine.
    operator : RaggedOperator
        Whose.
    key : tuple
        What is wanted.

    Raises
    ------
    MissingTableError
        If none of the operator's kernels is alike; the message names what was asked for.
    """
    return tables.kept(("mixer lender", operator.name, key), lambda: _lent(tables, operator, key))


def _lent(tables: Tables, operator: RaggedOperator, key: Key) -> Lent:
    operator.check_key(key)
    best: tuple[float, Key] | None = None
    for one in tables.every_key(operator.name):
        apart = _apart(operator, key, one)
        if apart is None:
            continue
        table = tables.serving(operator.name, one)
        far = apart + FOREIGN * tables.order.is_foreign(table) + UNSOUND * (not tables.is_sound(table, one))
        if best is None or far < best[0]:
            best = far, one
    if best is None:
        # says what there is
        tables.serving(operator.name, key)
        raise MissingTableError(f"no {operator.name} kernel is like {key}")
    return Lent(best[1], best[1] != key or tables.is_foreign(operator.name, best[1]))


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
