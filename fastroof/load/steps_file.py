"""steps.csv: steps measured as one CUDA graph, one per row, written by ``kernels-bench steps``.

Columns: :data:`fastroof.columns.MEASURED_STEP_COLUMNS`. A batch is text: runs of equal numbers in the order
of the requests, ``value`` or ``valuexcount``, joined by ``;``. ``4095x32;0`` is 32 requests at 4095 and one
at 0. ``new_tokens`` and ``context_len`` have one number per request; their runs need not match.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from fastroof.checks import shown
from fastroof.columns import MEASURED_STEP_COLUMNS, MEASURED_US, Column
from fastroof.errors import TableError

STEPS_FILE: Final = "steps.csv"
PHASES: Final = ("decode", "prefill", "mixed", "unequal")
"""Equal decodes; one prefill chunk; decodes with a chunk; sequences of different lengths."""

MAX_REQUESTS: Final = 2**20
"""Maximum number of requests in one step; more is a typing error and would fill the memory."""

_RUN: Final = re.compile(r"(0|[1-9][0-9]{0,8})(?:x([1-9][0-9]{0,6}))?")
_FROM_TEXT: Final = {"int": int, "float": float, "text": str}


def format_runs(values: Iterable[int]) -> str:
    """Format one number per request as runs."""
    runs = [(int(value), len(list(same))) for value, same in groupby(values)]
    if not runs or min(value for value, _ in runs) < 0:
        raise TableError(f"a batch needs at least one request and no negative sizes, got {runs}")
    return ";".join(f"{value}x{count}" if count > 1 else f"{value}" for value, count in runs)


def parse_runs(text: str) -> list[int]:
    """Parse the output of :func:`format_runs`."""
    values: list[int] = []
    for run in text.split(";"):
        match = _RUN.fullmatch(run)
        count = int(match[2] or 1) if match else 0
        if match is None or len(values) + count > MAX_REQUESTS:
            raise TableError(
                f"{shown(run)} of {shown(text)} is not a run of a batch such as 4095x32, "
                f"or exceeds {MAX_REQUESTS:,} requests"
            )
        values += [int(match[1])] * count
    return values


def read_step_rows(
    path: Path, columns: Sequence[Column] = MEASURED_STEP_COLUMNS, optional: Sequence[Column] = ()
) -> list[dict[str, Any]]:
    """Read columns of a steps.csv, and those of the optional ones that it has."""
    try:
        content = path.read_bytes()
        # a killed process may have left a last line without a newline
        text = content[: content.rfind(b"\n") + 1].decode("utf-8")
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path}: cannot be read as measured steps: {error}") from None
    header = lines[0] if lines else []
    missing = [column.name for column in columns if column.name not in header]
    if missing:
        raise TableError(
            f"{path} has columns {', '.join(header) or '(none)'}: "
            f"measured steps need column {', '.join(missing)}; see kernels-bench steps"
        )
    columns = [*columns, *(column for column in optional if column.name in header)]
    rows = []
    for number, cells in enumerate(lines[1:], start=2):
        where = f"{path}, line {number}"
        if len(cells) != len(header):
            raise TableError(f"{where}: has {len(cells)} cells, the header {len(header)}")
        cell_of = dict(zip(header, cells, strict=True))
        empty = [column.name for column in columns if not cell_of[column.name]]
        if empty:
            raise TableError(f"{where}: column {', '.join(empty)} is empty")
        try:
            row = {c.name: _FROM_TEXT[c.kind](cell_of[c.name]) for c in columns}
        except ValueError as error:
            raise TableError(f"{where}: {error}") from None
        least, most = MEASURED_US
        for name, value in row.items():
            if isinstance(value, float) and not least <= value <= most:
                raise TableError(f"{where}: {name} is {value:g}, need {least:g} to {most:g} us")
        rows.append(row)
    return rows
