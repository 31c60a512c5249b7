"""The columns of steps.csv, named once: whole measured steps, and what each was made of."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastroof.columns import SPREAD_COLUMNS, Column
from fastroof.errors import MeasureError

__all__ = ["KEY_COLUMNS", "PHASES", "STEP_COLUMNS", "append_step", "read_steps", "step_key"]

PHASES: Final = ("decode", "prefill", "mixed", "unequal")
"""Equal decodes; one prefill chunk; decodes beside a chunk; sequences whose lengths differ."""

STEP_COLUMNS: Final = (
    Column("model", "text", "", "preset or config.json that was run, with random weights"),
    Column("gpu", "text", "", "GPU that it ran on"),
    Column("tp", "int", "GPUs", "tensor-parallel size"),
    Column("dtype", "text", "", "dtype of weights and activations"),
    Column("kv_dtype", "text", "", "dtype of the KV cache"),
    Column("phase", "text", "", "decode, prefill, mixed or unequal"),
    Column("new_tokens", "text", "tokens", "new tokens of each request, as runs: 1x32;2048"),
    Column("context_len", "text", "tokens", "tokens of each request in the cache before the step, as runs"),
    Column("num_requests", "int", "", "requests of the step"),
    Column("num_tokens", "int", "tokens", "new tokens of all requests"),
    Column("latency_us", "float", "us", "median time of the step, replayed as one CUDA graph"),
    *SPREAD_COLUMNS,
    Column("provider", "text", "", "attention and small kernels; GEMMs are torch's"),
)
"""One row a measured step. ``new_tokens`` and ``context_len`` are read by
:func:`kernels_bench.steps.composition.parse_runs`."""

KEY_COLUMNS: Final = ("model", "gpu", "tp", "dtype", "kv_dtype", "new_tokens", "context_len")
"""What names a step: a file has each once."""

_NAMES: Final = [column.name for column in STEP_COLUMNS]


def step_key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what names a row.

    Parameters
    ----------
    row : mapping
        A row of the file, or one to be written.

    Returns
    -------
    tuple of str
        The values of :data:`KEY_COLUMNS`.
    """
    return tuple(str(row[name]) for name in KEY_COLUMNS)


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Read the whole rows of a steps.csv.

    Parameters
    ----------
    path : Path
        The file; need not exist.

    Returns
    -------
    list of dict
        With ints, floats and text as the columns say. A last line without its newline, which a kill
        leaves behind, is no row.

    Raises
    ------
    MeasureError
        If the file has other columns, or a row does not fit them.
    """
    if not path.exists():
        return []
    text = _whole_lines(path.read_bytes()).decode("utf-8")
    rows = list(csv.reader(io.StringIO(text)))
    if not rows:
        return []
    if rows[0] != _NAMES:
        raise MeasureError(f"{path} has columns {', '.join(rows[0])}; need {', '.join(_NAMES)}")
    kinds = {"int": int, "float": float, "text": str}
    found = []
    for number, cells in enumerate(rows[1:], start=2):
        try:
            pairs = zip(STEP_COLUMNS, cells, strict=True)
            found.append({column.name: kinds[column.kind](cell) for column, cell in pairs})
        except ValueError as error:
            raise MeasureError(f"{path}, line {number}: {error}") from None
    return found


def append_step(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row, on the disk when this returns; a torn last line is cut off first.

    Parameters
    ----------
    path : Path
        The file; made with its header where there is none.
    row : mapping
        A value for each of :data:`STEP_COLUMNS`.

    Raises
    ------
    MeasureError
        If the row has other columns.
    """
    if set(row) != set(_NAMES):
        odd = sorted(set(row) ^ set(_NAMES))
        raise MeasureError(f"a step's row needs exactly the columns of steps.csv; {', '.join(odd)} differ")
    line = io.StringIO()
    writer = csv.writer(line, lineterminator="\n")
    whole = _whole_lines(path.read_bytes()) if path.exists() else b""
    if not whole:
        writer.writerow(_NAMES)
    writer.writerow([repr(row[name]) if isinstance(row[name], float) else row[name] for name in _NAMES])
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(len(whole))
        file.seek(len(whole))
        file.write(line.getvalue().encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]
