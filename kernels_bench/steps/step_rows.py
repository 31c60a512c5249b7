"""The steps.csv that a run writes: one row a measured step, on the disk before the next one begins."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastroof.columns import MEASURED_STEP_COLUMNS
from fastroof.errors import MeasureError, TableError
from fastroof.load.steps_file import read_step_rows, whole_lines

KEY_COLUMNS: Final = ("model", "gpu", "tp", "dtype", "kv_dtype", "new_tokens", "context_len")
"""What names a step: a file has each once."""

_NAMES: Final = [column.name for column in MEASURED_STEP_COLUMNS]


def step_key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what names a row."""
    return tuple(str(row[name]) for name in KEY_COLUMNS)


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Read the whole rows of a steps.csv."""
    whole = whole_lines(path.read_bytes()) if path.exists() else b""
    if not whole:
        return []
    header = whole.split(b"\n", 1)[0].decode("utf-8", "replace").rstrip("\r")
    if header != ",".join(_NAMES):
        columns = header.replace(",", ", ")
        raise MeasureError(f"{path} has columns {columns:.200}; need {', '.join(_NAMES)}")
    try:
        return read_step_rows(path)
    except TableError as error:
        raise MeasureError(str(error)) from None


def append_step(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row, on the disk when this returns; a torn last line is cut off first."""
    if set(row) != set(_NAMES):
        odd = sorted(set(row) ^ set(_NAMES))
        raise MeasureError(f"a step's row needs exactly the columns of steps.csv; {', '.join(odd)} differ")
    line = io.StringIO()
    writer = csv.writer(line, lineterminator="\n")
    whole = whole_lines(path.read_bytes()) if path.exists() else b""
    if not whole:
        writer.writerow(_NAMES)
    writer.writerow([repr(row[name]) if isinstance(row[name], float) else row[name] for name in _NAMES])
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(len(whole))
        file.seek(len(whole))
        file.write(line.getvalue().encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())
