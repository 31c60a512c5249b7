"""Rows of the package as a reader hands them to an operator: columns of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastroof.arrays import Array
from fastroof.operators.external_rows import ExternalRows
from fastroof.operators.registry import OPERATORS


def raw_columns(rows: list[dict[str, Any]]) -> dict[str, Array]:
    """Columns of some rows: int64, float64 and str objects."""
    kinds = {int: np.int64, float: np.float64, str: object}
    return {name: np.array([r[name] for r in rows], kinds[type(rows[0][name])]) for name in rows[0]}


def converted(operator: str, file: str, rows: list[dict[str, Any]]) -> ExternalRows:
    """What an operator makes of rows of one of its files."""
    (wanted,) = (f for f in OPERATORS[operator].package_files if f.file == file)
    raw = raw_columns(rows)
    known = {c.name for c in (*wanted.columns, *wanted.optional)}
    assert set(raw) <= known, "a row of the test has a column that is not read"
    return wanted.convert(raw)


def left_out(rows: ExternalRows) -> dict[str, int]:
    """How many rows are left out, by reason."""
    return {reason: int(mask.sum()) for reason, mask in rows.left_out.items() if mask.any()}
