"""JSON files of load generators: documents and numbers, with errors that name the file and the key."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fastroof.checks import is_number, shown
from fastroof.documents import parse_json, parse_yaml, read_text
from fastroof.errors import FastroofError, TableError
from fastroof.units import MIB

Document = Mapping[str, Any]

MOST_BYTES: Final = 4 * 2**30
MOST_PRINTED: Final = 16 * MIB
"""Maximum size of text that has printed tables, such as a log, and of standard input."""

REQUESTS: Final = "aiperf's requests"
"""Key of the single requests of a run of aiperf, one a line of its file."""

GUIDELLM_METRICS: Final = {
    "prompt_token_count": ("Token Metrics", "Input Tokens"),
    "output_token_count": ("Token Metrics", "Output Tokens"),
    "time_to_first_token_ms": ("Time to First Token", "ms"),
    "inter_token_latency_ms": ("Inter Token Latency", "ms"),
    "request_latency": ("Request Latency", "Sec"),
}
"""Metrics of guidellm's JSON, and the group and unit of their columns in its CSV (0.8.1)."""

STDIN: Final = "-"
TABLE_TITLE: Final = "Serving Benchmark Result"
"""Title of the table that the benchmarks of vLLM, SGLang and TensorRT-LLM print."""

PRINTED: Final = {
    "Successful requests": "completed", "Failed requests": "failed", "Total requests": "num_prompts",
    "Maximum request concurrency": "max_concurrency", "Max request concurrency": "max_concurrency",
    "Max request concurrency (inflight)": "max_concurrency", "Traffic request rate": "request_rate",
    "Request rate configured (RPS)": "request_rate", "Burstiness factor": "burstiness",
    "Benchmark duration (s)": "duration", "Total input tokens": "total_input_tokens",
    "Total generated tokens": "total_output_tokens", "Mean TTFT (ms)": "mean_ttft_ms",
    "Mean TPOT (ms)": "mean_tpot_ms", "Mean E2EL (ms)": "mean_e2el_ms",
    "Mean E2E Latency (ms)": "mean_e2el_ms", "Acceptance length": "spec_decode_acceptance_length",
    "Accept length": "spec_decode_acceptance_length",
}  # fmt: skip
"""Keys of a benchmark's JSON, by the lines that it prints."""


class _NotJson(TableError):
    """The content is not JSON, or not complete."""


def documents_of(path: Path) -> list[Document]:
    """Read the documents of a file: JSON, JSON Lines (appended results), YAML, CSV, or printed tables."""
    content = _standard_input() if str(path) == STDIN else read_text(path, TableError, MOST_BYTES)
    if not content.strip():
        raise TableError(f"{path}: empty; expected results of a load generator")
    if TABLE_TITLE in content and not content.lstrip().startswith("{"):
        return _printed_tables(str(path), content)
    if path.suffix.lower() in (".yaml", ".yml"):
        return [_checked(path, one) for one in parse_yaml(content, str(path), TableError) or [None]]
    if path.suffix.lower() == ".csv":
        return _csv_documents(str(path), content)
    try:
        return [_document(path, str(path), content)]
    except _NotJson:
        lines = [line for line in content.splitlines() if line.strip()]
        if len(lines) < 2 or not _is_object(path, lines[0]):
            raise
    found = [_document(path, f"{path}, line {number_}", line) for number_, line in enumerate(lines, start=1)]
    return [{REQUESTS: found}] if found[0].keys() >= {"metadata", "metrics"} else found


def _csv_documents(where: str, content: str) -> list[Document]:
    """Return the figures of a CSV as guidellm and aiperf have them in JSON."""
    _check_size(where, content)
    try:
        rows = [row for row in csv.reader(content.splitlines(), strict=True) if row]
    except csv.Error as error:
        raise TableError(f"{where} is not CSV: {error}") from None
    if rows and rows[0][0] == "Run Info" and len(rows) > 3:
        heads = list(zip(*rows[:3], strict=False))
        return [{"benchmarks": [_guidellm_row(dict(zip(heads, row, strict=False))) for row in rows[3:]]}]
    if rows and rows[0][:2] in (["Metric", "avg"], ["Metric", "Value"]):
        return [_aiperf_rows(rows)]
    raise TableError(f"{where} is a CSV neither of guidellm nor of aiperf: it begins with {shown(rows[:1])}")


def _guidellm_row(cells: Mapping[tuple[str, ...], str]) -> Document:
    kind, _, value = cells.get(("Benchmark", "Strategy", ""), "").partition("@")
    limit = parsed_number(value)
    strategy = {"kind": kind, "streams": limit, "max_concurrency": limit, "rate": limit}
    metrics: dict[str, Any] = {
        name: {
            "successful": {
                key: parsed_number(cells.get((group, f"Successful {unit}", head), ""))
                for key, head in (("mean", "Mean"), ("std_dev", "Std Dev"))
            }
        }
        for name, (group, unit) in GUIDELLM_METRICS.items()
    }
    metrics["request_totals"] = {
        name: parsed_number(cells.get(("Request Counts", name.capitalize(), ""), ""))
        for name in ("successful", "errored")
    }
    backend = cells.get(("Run Info", "Backend", ""), "") or "{}"
    config = {"strategy": strategy, "backend": parse_json(backend, "guidellm's backend", TableError)}
    duration = parsed_number(cells.get(("Timings", "Duration", "Sec"), ""))
    return {"config": config, "duration": duration, "metrics": metrics}


def _aiperf_rows(rows: Sequence[Sequence[str]]) -> Document:
    found: dict[str, Any] = {"input_config": {}, "aiperf_version": ""}
    heads: Sequence[str] = ()
    for row in rows:
        if row[0] == "Metric":
            heads = ["avg" if head == "Value" else head for head in row]
        elif heads and len(row) == len(heads):
            name, _, unit = row[0].partition(" (")
            figures = dict(zip(heads[1:], map(parsed_number, row[1:]), strict=True))
            found[name.strip().lower().replace(" ", "_")] = {"unit": unit.rstrip(")") or "ms", **figures}
    return found


def _standard_input() -> str:
    content = sys.stdin.buffer.read(MOST_PRINTED + 1)
    _check_size("standard input", content)
    return content.decode(errors="replace")


def _printed_tables(where: str, content: str) -> list[Document]:
    """Return the figures of each table that a benchmark printed, by the keys of its JSON.

    Lines before a table belong to it: older releases print clients and rate there alone.
    """
    _check_size(where, content)
    found: list[Document] = []
    figures: dict[str, Any] = {}
    is_table = False
    for line in content.splitlines():
        label, _, value = line.strip().partition(":")
        if TABLE_TITLE in line:
            is_table = True
        elif is_table and label.startswith("=" * 10):
            found.append({TABLE_TITLE: True, **figures})
            figures, is_table = {}, False
        elif label in PRINTED:
            words = value.split()
            figures[PRINTED[label]] = parsed_number(words[0]) if words else None
    if is_table:
        found.append({TABLE_TITLE: True, **figures})
    return found


def _check_size(where: str, content: str | bytes) -> None:
    if len(content) > MOST_PRINTED:
        raise TableError(f"{where}: more than {MOST_PRINTED / MIB:g} MiB of text; cut the tables out of it")


def parsed_number(word: str) -> float | str | None:
    """Parse a number; None for an empty or unset value, other words unchanged."""
    if word in ("", "None", "not", "unlimited"):
        return None
    try:
        return float(word.replace(",", ""))
    except ValueError:
        return word


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
    return _checked(path, value)


def _checked(path: Path, value: Any) -> Document:
    if not isinstance(value, dict):
        raise TableError(f"{path}: a run must be an object, found a {type(value).__name__}")
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
