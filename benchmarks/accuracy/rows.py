"""Measured rows as CSV files: those in bench_data, and a user's own."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from fastroof.atomic_files import whole_file
from fastroof.columns import Column, guarded, unguarded
from fastroof.config.paths import bench_data_root
from fastroof.documents import read_toml
from fastroof.engines import serving_engines
from fastroof.errors import TableError
from fastroof.evidence.engine_arguments import read_engine_arguments
from fastroof.evidence.rows import CLIENT, CLOCKS, ServedModel, ServingRow
from fastroof.evidence.steps.measured_steps import MeasuredStep, read_steps
from fastroof.evidence.steps.step_logs import read_step_log
from fastroof.load.sources import SERVING_FOLDER
from fastroof.load.steps_file import STEPS_FILE

STEP_LOGS_FOLDER: Final = "step_logs"

_MODEL: Final = (
    Column("dataset", "text", "", "rows that are judged together"),
    Column("row", "text", "", "name of the row in its source"),
    Column("gpu", "text", "", "GPU that it was measured on"),
    Column("engine", "text", "", f"serving engine: {', '.join(serving_engines())}"),
    Column("engine_version", "text", "", "its version; empty if the source has none"),
    Column("checkpoint", "text", "", "Hugging Face model that was served, as the source names it"),
    Column("model", "text", "", "fastroof's preset of it, or a config.json"),
    Column("dtype", "text", "", "dtype of the linear layers: bf16, fp8, fp8_block, nvfp4 .."),
    Column("kv_dtype", "text", "", "dtype of the KV cache"),
    Column("kv_dtype_from", "text", "", "how kv_dtype is known"),
    Column("tp", "int", "GPUs", "tensor-parallel size", 1),
)
_LAYOUT: Final = (
    Column("left_out", "text", "", "why the row is not judged; empty if it is"),
    Column("pp", "int", "", "pipeline stages", 1),
    Column("dp", "int", "", "ranks of attention data parallelism; replicas of a dense model", 1),
    Column("ep", "int", "", "groups of experts", 1),
)
SERVED_COLUMNS: Final = (*_MODEL, *_LAYOUT)
"""Columns of every file of measured models: the fields of :class:`ServedModel`."""

ROW_COLUMNS: Final = (
    *_MODEL,
    Column("isl", "float", "tokens", "nominal length of a prompt, including a cached prefix", 1),
    Column("osl", "float", "tokens", "nominal length of an output", 1),
    Column("concurrency", "float", "", "clients, each with one request in flight", 1),
    Column("length_factor", "float", "", "mean length over the nominal one", 0),
    Column("prefix_tokens", "float", "tokens", "tokens of a prompt in the prefix cache", 0),
    Column("requests_per_client", "float", "", "requests after a start of all at once; empty: steady", 1),
    Column("frontend", "text", "", "test bench whose front end adds to TTFT; empty: none does"),
    Column("ttft_ms", "float", "ms", "measured mean time to first token", 0),
    Column("tpot_ms", "float", "ms", "measured mean time per output token after the first", 0),
    Column("aic_ttft_ms", "float", "ms", "prediction of aiconfigurator-core for the row", 0),
    Column("aic_tpot_ms", "float", "ms", "prediction of aiconfigurator-core for the row", 0),
    *_LAYOUT,
    Column("architecture", "text", "", "models that are left out together; empty: the model only"),
    Column("bench", "text", "", "benchmark whose protocol the run followed; empty: unknown"),
    Column("length_spread", "float", "", "range of the lengths over the nominal one; 0: all equal", 0),
    Column("measured_on", "text", "", "date of the run"),
    Column("also_as", "text", "", "other labels of the same run in its source"),
    Column("decode_workers", "int", "", "engines that only decode; empty: aggregated", 1),
    Column("prefill_workers", "int", "", "engines that only prefill", 1),
    Column("prefill_tp", "int", "GPUs", "tensor-parallel size of each", 1),
    Column("prefill_dp", "int", "", "their ranks of attention data parallelism", 1),
    Column("prefill_ep", "int", "", "their groups of experts", 1),
    Column("exchange", "text", "", "how tokens reach experts in decodes; empty: the engine's default"),
    Column("max_num_batched_tokens", "int", "tokens", "max tokens per step; empty: the engine's default", 1),
    Column("max_num_seqs", "int", "", "max requests per step; empty: the engine's default", 1),
    Column("order", "text", "", "mixed or prefill_first; empty: the engine's default"),
    Column("settings_from", "text", "", "where the limits of a step and the order are known from"),
    Column("clock", "text", "", "who took the times: client (empty) or engine"),
)
"""The columns of a file of serving rows, in order; other columns are not read."""

_MAY_BE_ZERO: Final = ("prefix_tokens", "length_spread", "cached_tokens")
"""Columns that may hold 0; others with a minimum of 0 must be above it."""

SERVED_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {"checkpoint": "", "kv_dtype_from": "", "pp": 1, "dp": 1, "ep": 1, "left_out": ""}
)
"""Values of missing columns and empty cells."""

_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **SERVED_DEFAULTS,
        **dict.fromkeys(("row", "engine_version", "frontend", "architecture", "bench"), ""),
        **dict.fromkeys(("measured_on", "also_as", "exchange", "order", "settings_from"), ""),
        **dict.fromkeys(("requests_per_client", "ttft_ms", "aic_ttft_ms", "aic_tpot_ms"), math.nan),
        **dict.fromkeys(("decode_workers", "prefill_workers", "prefill_tp", "prefill_dp", "prefill_ep"), 0),
        **dict.fromkeys(("max_num_batched_tokens", "max_num_seqs"), 0),
        "clock": CLIENT,
        "length_factor": 1.0,
        "prefix_tokens": 0.0,
        "length_spread": 0.0,
    }
)


def read_rows(path: str | Path) -> tuple[ServingRow, ...]:
    """Read a CSV of serving rows."""
    records = read_records(path, ROW_COLUMNS, _DEFAULTS, "serving rows", one="measured run")
    return tuple(_row(where, values) for where, values in records)


def check_served(where: str, row: ServedModel) -> None:
    """Raise a TableError if its engine is unknown."""
    if row.engine not in serving_engines():
        known = ", ".join(serving_engines())
        raise TableError(f"{where}: engine {row.engine!r} is unknown; known are {known}")
    if row.clock not in CLOCKS:
        raise TableError(f"{where}: clock {row.clock!r} is unknown; known are {', '.join(CLOCKS)}")


def _row(where: str, values: Mapping[str, Any]) -> ServingRow:
    row = ServingRow(**values)
    check_served(where, row)
    if row.prefix_tokens >= row.isl:
        raise TableError(
            f"{where}: a prompt of {row.isl:g} tokens has fewer than that in the prefix cache, "
            f"got prefix_tokens {row.prefix_tokens:g}"
        )
    return row


def write_rows(path: str | Path, rows: Sequence[ServingRow]) -> Path:
    """Write serving rows as a CSV that :func:`read_rows` reads back."""
    path = Path(path)
    with whole_file(path) as unfinished, unfinished.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = [column.name for column in ROW_COLUMNS]
        writer.writerow(names)
        # most times are the client's
        usual = {"clock": CLIENT}
        writer.writerows(
            [_text("" if usual.get(name) == getattr(row, name) else getattr(row, name)) for name in names]
            for row in rows
        )
    return path


def _text(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else repr(int(value) if value.is_integer() else value)
    return "" if value == 0 else guarded(str(value))


def shipped_rows(gpu: str, root: Path | None = None) -> tuple[ServingRow, ...]:
    """Read the serving rows of a GPU in bench_data."""
    folder = (bench_data_root() if root is None else root) / gpu / SERVING_FOLDER
    files = sorted(path for path in folder.glob("*.csv") if path.name != STEPS_FILE)
    return tuple(row for path in files for row in read_rows(path))


def dataset_names(rows: Iterable[ServingRow]) -> tuple[str, ...]:
    """Return the data sets of rows, in order of first appearance."""
    return tuple(dict.fromkeys(row.dataset for row in rows))


def read_records(
    path: str | Path, columns: Sequence[Column], defaults: Mapping[str, Any], what: str, one: str = ""
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
                values[column.name] = _value(f"{where}, column {column.name}", column, text)
            elif column.name in defaults:
                values[column.name] = defaults[column.name]
            else:
                raise TableError(f"{where}, column {column.name}: empty; need {column.meaning}")
        yield where, values


def _value(where: str, column: Column, text: str) -> Any:
    if column.kind == "text":
        return unguarded(text)
    try:
        value = int(text) if column.kind == "int" else float(text)
    except ValueError:
        raise TableError(f"{where}: found {text!r}, need a number") from None
    may_be_zero = column.name in _MAY_BE_ZERO
    if not (math.isfinite(value) and value >= column.minimum and (value > 0 or may_be_zero)):
        need = f"of at least {column.minimum}" if column.minimum or may_be_zero else "above 0"
        raise TableError(f"{where}: found {text}, need a number {need}")
    return value


def shipped_steps(gpu: str, root: Path | None = None) -> tuple[MeasuredStep, ...]:
    """Read the measured steps of a GPU in bench_data: every steps.csv, and logs of engines."""
    folder = (bench_data_root() if root is None else root) / gpu / SERVING_FOLDER
    steps = [step for path in sorted(folder.rglob(STEPS_FILE)) for step in read_steps(path)]
    for path in sorted((folder / STEP_LOGS_FOLDER).glob("*.parquet")):
        about = read_toml(path.with_suffix(".toml"), TableError)
        try:
            engine, dataset = dict(about["engine"]), str(about["dataset"])
        except (KeyError, TypeError, ValueError) as error:
            raise TableError(f"{path.with_suffix('.toml')}: need dataset and [engine]: {error!r}") from None
        steps += read_step_log(path, read_engine_arguments(given=engine), dataset)
    return tuple(steps)
