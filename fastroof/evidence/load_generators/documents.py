"""JSON files of load generators: documents and numbers, with errors that name the file and the key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fastroof.checks import is_number, shown
from fastroof.documents import parse_json, read_text
from fastroof.errors import FastroofError, TableError

Document = Mapping[str, Any]

MOST_BYTES: Final = 4 * 2**30


class _NotJson(TableError):
    """The content is not JSON, or not complete."""


def documents_of(path: Path) -> list[Document]:
    """Read the JSON objects of a file: one, or one per line (JSON Lines, appended results)."""
    content = read_text(path, TableError, MOST_BYTES)
    if not content.strip():
        raise TableError(f"{path}: empty; expected results of a load generator")
    try:
        return [_document(path, str(path), content)]
    except _NotJson:
        lines = [line for line in content.splitlines() if line.strip()]
        if len(lines) < 2 or not _is_object(path, lines[0]):
            raise
    return [_document(path, f"{path}, line {number_}", line) for number_, line in enumerate(lines, start=1)]


def _is_object(path: Path, line: str) -> bool:
    try:
        _document(path, "", line)
    except FastroofError:
        return False
    return True


def _document(path: Path, where: str, content: str) -> Document:
    try:
        value = parse_json(content, where, _NotJson, most_bytes=MOST_BYTES)
    except _NotJson as error:
        raise _NotJson(f"{error}; was the run cut off?") from None
    if not isinstance(value, dict):
        raise TableError(f"{path}: a run must be a JSON object, found a {type(value).__name__}")
    return value


def part(document: Any, *keys: str) -> Document:
    """Return a nested object, empty if missing."""
    for key in keys:
        document = document.get(key) if isinstance(document, Mapping) else None
    return document if isinstance(document, Mapping) else {}


def number(where: str, document: Document, key: str) -> float:
    """Return a number, nan if missing or null, inf if written as such."""
    value = document.get(key)
    if value is None:
        return math.nan
    if isinstance(value, str) and value.strip().lower() in ("inf", "infinity"):
        return math.inf
    if isinstance(value, float) and not math.isfinite(value):
        return value
    if not is_number(value):
        raise TableError(f"{where}: {key} must be a number, got {shown(value)}")
    return float(value)


def numbers(where: str, document: Document, key: str) -> list[float]:
    """Return a list of numbers, empty if missing."""
    values = document.get(key)
    if values is None:
        return []
    if not isinstance(values, list) or not all(is_number(value) for value in values):
        raise TableError(f"{where}: {key} must be a list of finite numbers")
    return [float(value) for value in values]


def text(document: Document, *keys: str) -> str:
    """Return the first text value among keys, empty if there is none."""
    found = (document.get(key) for key in keys)
    return next((value for value in found if isinstance(value, str)), "")


def ratio(value: float, by: float) -> float:
    """Return a quotient; nan unless the divisor is above 0."""
    return value / by if by > 0.0 else math.nan


def spread_of(values: Sequence[float]) -> float:
    """Return the range of lengths over their mean; nan without lengths."""
    return ratio(max(values) - min(values), mean_of(values)) if values else math.nan


def spread_of_std(mean: float, std: float) -> float:
    """Return the range over the mean of a uniform distribution with this standard deviation."""
    return ratio(std * math.sqrt(12.0), mean)


def mean_of(values: Iterable[float]) -> float:
    """Return the mean; nan without values."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else math.nan
