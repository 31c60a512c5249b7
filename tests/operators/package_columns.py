"""Columns as a file of the package has them, for the conversions of operators."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastroof.arrays import Array
from fastroof.columns import Column
from fastroof.operators.external_rows import ExternalRows, PackageFile
from fastroof.operators.operator import Operator


def raw_columns(file: PackageFile, **given: Any) -> dict[str, Array]:
    """Every column of a file; what is not given is the same word, or the size 2, in every row."""
    rows = max((len(value) for value in given.values() if isinstance(value, list)), default=1)

    def cells(column: Column) -> Array:
        plain: Any = {"int": 2, "float": 0.5, "text": "x"}[column.kind]
        value = given.get(column.name, plain)
        listed = value if isinstance(value, list) else [value] * rows
        kinds: dict[str, Any] = {"int": np.int64, "float": np.float64, "text": object}
        return np.array(listed, kinds[column.kind])

    optional = [column for column in file.optional if column.name in given]
    columns = {column.name: cells(column) for column in (*file.columns, *optional)}
    unknown = set(given) - set(columns)
    assert not unknown, f"the file has no {unknown}"
    return columns


def file_of(operator: Operator, name: str) -> PackageFile:
    """The file of that name among those of an operator."""
    (file,) = (file for file in operator.package_files if file.file == name)
    return file


def converted(operator: Operator, name: str, **given: Any) -> ExternalRows:
    """Rows of a file as rows of an operator, whose columns are those that it must have."""
    file = file_of(operator, name)
    rows = file.convert(raw_columns(file, **given))
    assert set(rows.columns) == {*(column.name for column in operator.required), "kernel"}
    assert len({len(values) for values in rows.columns.values()}) == 1
    return rows


def lists(rows: ExternalRows, *names: str) -> list[list[Any]]:
    """Some columns of rows that are kept."""
    keep = np.ones(len(rows.columns["latency_us"]), bool)
    for mask in rows.left_out.values():
        keep &= ~mask
    return [rows.columns[name][keep].tolist() for name in names]
