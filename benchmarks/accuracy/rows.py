"""Measured rows as CSV files: those that ship with tables, and a user's own."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from fastroof.atomic_files import whole_file
from fastroof.columns import Column, guarded, unguarded
from fastroof.config.paths import bench_data_root
from fastroof.engines import serving_engines
from fastroof.errors import TableError
from fastroof.load.sources import SERVING_FOLDER
from fastroof.load.steps_file import STEPS_FILE
from fastroof.serving.evidence.measured_steps import MeasuredStep, read_steps
from fastroof.serving.evidence.rows import ServedAs, ServingRow


def _column(name: str, kind: Any, unit: str, meaning: str, minimum: int = 0) -> Column:
    return Column(name, kind, unit, meaning, minimum)


ROW_COLUMNS: Final = (
    _column("dataset", "text", "", "rows that are judged together"),
    _column("row", "text", "", "name of the row in its source"),
    _column("gpu", "text", "", "GPU that it was measured on"),
    _column("engine", "text", "", f"serving engine: {', '.join(serving_engines())}"),
    _column("engine_version", "text", "", "its version; empty where the source has none"),
    _column("checkpoint", "text", "", "Hugging Face model that was served"),
    _column("model", "text", "", "fastroof's preset of it, or a config.json"),
    _column("dtype", "text", "", "dtype of the linear layers: bf16, fp8, fp8_block, nvfp4 .."),
    _column("kv_dtype", "text", "", "dtype of the KV cache"),
    _column("kv_dtype_from", "text", "", "how kv_dtype is known"),
    _column("tp", "int", "GPUs", "tensor-parallel size", 1),
    _column("isl", "float", "tokens", "nominal length of a prompt, a cached prefix included", 1),
    _column("osl", "float", "tokens", "nominal length of an output", 1),
    _column("concurrency", "float", "", "clients, each with one request in flight", 1),
    _column("length_factor", "float", "", "mean length over the nominal one"),
    _column("prefix_tokens", "float", "tokens", "tokens of a prompt that were in the prefix cache"),
    _column("requests_per_client", "float", "", "requests after a start of all at once; empty: steady", 1),
    _column("frontend", "text", "", "test bench whose front end adds to TTFT; empty: none does"),
    _column("ttft_ms", "float", "ms", "measured mean time to first token"),
    _column("tpot_ms", "float", "ms", "measured mean time per output token after the first"),
    _column("aic_ttft_ms", "float", "ms", "prediction of aiconfigurator-core for the row"),
    _column("aic_tpot_ms", "float", "ms", "prediction of aiconfigurator-core for the row"),
    _column("left_out", "text", "", "why the row is not judged; empty where it is"),
    _column("pp", "int", "", "pipeline stages", 1),
    _column("dp", "int", "", "ranks of attention data parallelism; of a dense model replicas", 1),
    _column("ep", "int", "", "groups of experts", 1),
    _column("architecture", "text", "", "what is left out with its model; empty: the model itself"),
    _column("bench", "text", "", "whose protocol the run followed; empty: not known"),
    _column("length_spread", "float", "", "range of the lengths over the nominal one; 0: all equal"),
    _column("measured_on", "text", "", "date of the run"),
    _column("also_as", "text", "", "other labels of the same run in its source"),
    _column("decode_workers", "int", "", "engines that decode alone; empty: one engine does all", 1),
    _column("prefill_workers", "int", "", "engines that prefill alone", 1),
    _column("prefill_tp", "int", "GPUs", "tensor-parallel size of each", 1),
    _column("prefill_dp", "int", "", "their ranks of attention data parallelism", 1),
    _column("prefill_ep", "int", "", "their groups of experts", 1),
    _column("max_num_batched_tokens", "int", "tokens", "of a step at most; empty: the engine's default", 1),
    _column("max_num_seqs", "int", "", "requests of a step at most; empty: the engine's default", 1),
    _column("exchange", "text", "", "how tokens reach experts in decodes; empty: the engine's own choice"),
)
"""The columns of a file of serving rows; other columns are not read."""

_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "row": "",
        "engine_version": "",
        "checkpoint": "",
        "kv_dtype_from": "",
        "length_factor": 1.0,
        "prefix_tokens": 0.0,
        "requests_per_client": math.nan,
        "frontend": "",
        "ttft_ms": math.nan,
        "aic_ttft_ms": math.nan,
        "aic_tpot_ms": math.nan,
        "left_out": "",
        "pp": 1,
        "dp": 1,
        "ep": 1,
        "architecture": "",
        "bench": "",
        "length_spread": 0.0,
        "measured_on": "",
        "also_as": "",
        "decode_workers": 0,
        "prefill_workers": 0,
        "prefill_tp": 0,
        "prefill_dp": 0,
        "prefill_ep": 0,
        "exchange": "",
        "max_num_batched_tokens": 0,
        "max_num_seqs": 0,
    }
)
"""What a column that a file lacks, or an empty cell of it, stands for."""


def read_rows(path: str | Path) -> tuple[ServingRow, ...]:
    """Read a CSV of serving rows."""
    records = read_records(path, ROW_COLUMNS, _DEFAULTS, "serving rows", value=_value, one="measured run")
    return tuple(_row(where, values) for where, values in records)


def check_served(where: str, row: ServedAs) -> None:
    """Raise a TableError if its engine is unknown."""
    if row.engine not in serving_engines():
        known = ", ".join(serving_engines())
        raise TableError(f"{where}: engine {row.engine!r} is unknown; known are {known}")


def _row(where: str, values: Mapping[str, Any]) -> ServingRow:
    row = ServingRow(**values)
    check_served(where, row)
    if row.prefix_tokens >= row.isl:
        raise TableError(
            f"{where}: a prompt of {row.isl:g} tokens has fewer than that in the prefix cache, "
            f"got prefix_tokens {row.prefix_tokens:g}"
        )
    return row


def _value(where: str, column: Column, text: str) -> Any:
    if column.kind == "text":
        return unguarded(text)
    value = read_number(where, column, text)
    optional_zero = column.name in ("prefix_tokens", "length_spread")
    good = math.isfinite(value) and value >= column.minimum and (value > 0 or optional_zero)
    if not good:
        least = column.minimum or (0 if optional_zero else None)
        need = "above 0" if least is None else f"of at least {least}"
        raise TableError(f"{where}: found {text}, need a number {need}")
    return value


def write_rows(path: str | Path, rows: Sequence[ServingRow]) -> Path:
    """Write serving rows as a CSV that :func:`read_rows` reads back."""
    path = Path(path)
    with whole_file(path) as unfinished, unfinished.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([f.name for f in fields(ServingRow)])
        writer.writerows([_text(value) for value in asdict(row).values()] for row in rows)
    return path


def _text(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else repr(int(value) if value.is_integer() else value)
    return "" if value == 0 else guarded(str(value))


def shipped_rows(gpu: str, root: Path | None = None) -> tuple[ServingRow, ...]:
    """Read the serving rows that ship with a GPU's tables."""
    folder = (bench_data_root() if root is None else root) / gpu / SERVING_FOLDER
    files = sorted(path for path in folder.glob("*.csv") if path.name != STEPS_FILE)
    return tuple(row for path in files for row in read_rows(path))


def dataset_names(rows: Iterable[ServingRow]) -> tuple[str, ...]:
    """Return the data sets of rows, in the order in which they first come."""
    return tuple(dict.fromkeys(row.dataset for row in rows))


def read_records(
    path: str | Path,
    columns: Sequence[Column],
    defaults: Mapping[str, Any],
    what: str,
    *,
    value: Callable[[str, Column, str], Any] | None = None,
    one: str = "",
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read a CSV row by row, each cell by its column's kind."""
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
                values[column.name] = (value or _default_value)(
                    f"{where}, column {column.name}", column, text
                )
            elif column.name in defaults:
                values[column.name] = defaults[column.name]
            else:
                raise TableError(f"{where}, column {column.name}: empty; need {column.meaning}")
        yield where, values


def read_number(where: str, column: Column, text: str) -> float:
    """Read a number of a column, int or float, whatever it is."""
    try:
        return int(text) if column.kind == "int" else float(text)
    except ValueError:
        raise TableError(f"{where}: found {text!r}, need a number") from None


def _default_value(where: str, column: Column, text: str) -> Any:
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


def shipped_steps(gpu: str, root: Path | None = None) -> tuple[MeasuredStep, ...]:
    """Read the measured steps that ship with a GPU's tables; empty without a steps.csv."""
    folder = (bench_data_root() if root is None else root) / gpu / SERVING_FOLDER
    return tuple(step for path in sorted(folder.rglob(STEPS_FILE)) for step in read_steps(path))
