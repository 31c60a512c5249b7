"""CSV files whose columns are declared: one reader for kinds of measured rows with a file of their own."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastroof.columns import Column
from fastroof.errors import TableError

__all__ = ["read_number", "read_records"]


def read_records(
    path: str | Path,
    columns: Sequence[Column],
    defaults: Mapping[str, Any],
    what: str,
    *,
    value: Callable[[str, Column, str], Any] | None = None,
    one: str = "",
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read a CSV row by row, each cell as its column says.

    Parameters
    ----------
    path : str or Path
        The file; columns that are not declared are not read.
    columns : sequence of Column
        text, int or float, with the least value that :class:`fastroof.columns.Column` says.
    defaults : mapping of str to object
        What an empty cell, or a column that the file lacks, stands for; columns without one are required.
    what : str
        What its rows are, in words.
    value : callable, optional
        Reads a cell, of where it is, its column and text, or raises a TableError; by default an int is at
        least its column's minimum, a float above 0, or 0 where that is its minimum.
    one : str
        What one row is, in words; by default one of ``what``.

    Yields
    ------
    tuple of str and dict
        Where the row is, in words, and its values by column.

    Raises
    ------
    TableError
        If it is no such file, or a cell is not what its column holds; names line and column.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            rows = list(reader)
            names = reader.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path}: cannot be read as {what}: {error}") from None
    missing = [column.name for column in columns if column.name not in names and column.name not in defaults]
    if missing:
        raise TableError(
            f"{path}: {what} need column {', '.join(missing)}; the file has {', '.join(names) or 'none'}"
        )
    if not rows:
        raise TableError(f"{path}: no rows; need at least one {one or f'of {what}'}")
    for line, cells in enumerate(rows, start=2):
        where = f"{path}, line {line}"
        values = {}
        for column in columns:
            text = cells.get(column.name)
            if text:
                values[column.name] = (value or _value)(f"{where}, column {column.name}", column, text)
            elif column.name in defaults:
                values[column.name] = defaults[column.name]
            else:
                raise TableError(f"{where}, column {column.name}: empty; need {column.meaning}")
        yield where, values


def read_number(where: str, column: Column, text: str) -> float:
    """Read a number of a column, int or float, whatever it is.

    Raises
    ------
    TableError
        If it is none.
    """
    try:
        return int(text) if column.kind == "int" else float(text)
    except ValueError:
        raise TableError(f"{where}: found {text!r}, need a number") from None


def _value(where: str, column: Column, text: str) -> Any:
    if column.kind == "text":
        return text
    value = read_number(where, column, text)
    # as everywhere: an int of at least its minimum, a float above 0 unless 0 is its minimum
    if column.kind == "int":
        good = value >= column.minimum
    else:
        good = math.isfinite(value) and (value > 0.0 or value == column.minimum == 0)
    if not good:
        need = "above 0" if column.minimum else "of at least 0"
        raise TableError(f"{where}: found {text}, need a number {need}")
    return value
