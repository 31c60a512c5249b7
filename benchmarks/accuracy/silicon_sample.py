"""Serving rows from aiconfigurator-core's sample of measured runs.

The package (Apache-2.0, https://github.com/ai-dynamo/aiconfigurator) contains
``systems/silicon_sample.csv``. Only that file is read; the package is not imported.

    python -m benchmarks.accuracy silicon-sample bench_data [GPU ...]

writes the rows of the named GPUs (default: all) with the package's predictions. Predictions of the same
version in an existing file are reused.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks.accuracy.aiconfigurator_estimates import (
    AICONFIGURATOR,
    aiconfigurator_version,
    with_aiconfigurator_estimates,
)
from benchmarks.accuracy.rows import read_rows, write_rows
from benchmarks.accuracy.sample_cleaning import KV_DTYPE_FROM, RULES, clean_sample
from fastroof.atomic_files import write_whole
from fastroof.documents import read_toml
from fastroof.errors import TableError
from fastroof.evidence.rows import LeftOut, ServingRow
from fastroof.load.aiconfigurator import SYSTEMS, installed_root
from fastroof.load.sources import SERVING_FOLDER
from fastroof.load.write import toml_text

SAMPLE_FILE: Final = "systems/silicon_sample.csv"
SOURCE: Final = "silicon_sample"
SAMPLE_GPUS: Final = ("h100", "h200", "b200", "b300", "gb200", "gb300")
"""GPUs of the sample, by its names."""

_CASE_COLUMNS: Final = (
    "gpu", "engine", "model", "dtype", "kv_dtype", "tp", "pp", "dp", "ep", "isl", "osl", "concurrency",
    "prefix_tokens", "decode_workers",
)  # fmt: skip
"""Fields of a row that the package's prediction depends on."""


def read_silicon_sample(
    gpu: str, path: str | Path | None = None
) -> tuple[tuple[ServingRow, ...], tuple[LeftOut, ...], Mapping[str, int]]:
    """Read the cleaned, distinct runs of one GPU, and count the other rows."""
    path = installed_root() / SAMPLE_FILE if path is None else Path(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            cells = [cell for cell in csv.DictReader(file) if SYSTEMS.get(cell.get("system", "")) == gpu]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path}: cannot be read as the sample of aiconfigurator-core: {error}") from None
    if not cells:
        raise TableError(f"{path} has no rows of {gpu}; it has {', '.join(SYSTEMS.values())} at most")
    cleaned = clean_sample(cells, SYSTEMS)
    left_out = [LeftOut(SOURCE, reason, count) for reason, count in cleaned.refused.items()]
    if cleaned.duplicates:
        left_out.append(LeftOut(SOURCE, "a run that another row has", cleaned.duplicates))
    rows = sorted(cleaned.rows, key=lambda row: row.dataset)
    return tuple(rows), tuple(left_out), cleaned.changed


def convert_silicon_sample(gpu: str, bench_data: str | Path) -> Path:
    """Write a GPU's rows with the package's predictions, and their provenance."""
    rows, left_out, changed = read_silicon_sample(gpu)
    folder = Path(bench_data) / gpu / SERVING_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    version = aiconfigurator_version()
    rows, refused = _with_estimates(rows, folder, version)
    provenance = {
        "gpu": gpu,
        "package": AICONFIGURATOR,
        "package_version": version,
        "url": "https://github.com/ai-dynamo/aiconfigurator",
        "licence": "Apache-2.0",
        "copyright": "Copyright (c) NVIDIA CORPORATION & AFFILIATES. All rights reserved.",
        "file": SAMPLE_FILE,
        "sha256": hashlib.sha256((installed_root() / SAMPLE_FILE).read_bytes()).hexdigest(),
        "changes": "rows cleaned by named rules and sorted by data set, columns renamed and added; "
        "no time was changed",
        "rows": len(rows),
        "predictions": (
            f"aic_ttft_ms and aic_tpot_ms are predictions of {AICONFIGURATOR} {version}, at kv_dtype"
        ),
        "predictions_refused": refused,
        "kv_dtype_from": {row.kv_dtype_from: KV_DTYPE_FROM[row.kv_dtype_from] for row in rows},
        "cleaning": {rule.name: f"{rule.sample}: {rule.cleaned}" for rule in RULES},
        "cleaned_rows": dict(changed),
        "left_out": {entry.reason: entry.rows for entry in left_out},
    }
    write_whole(folder / f"{SOURCE}.toml", toml_text(provenance))
    return write_rows(folder / f"{SOURCE}.csv", rows)


def _with_estimates(
    rows: Sequence[ServingRow], folder: Path, version: str
) -> tuple[tuple[ServingRow, ...], dict[str, int]]:
    """Query the package for predictions that the existing file lacks."""
    facts_file, known = folder / f"{SOURCE}.toml", dict[tuple[object, ...], ServingRow]()
    if facts_file.is_file() and read_toml(facts_file, TableError).get("package_version") == version:
        answered = read_rows(folder / f"{SOURCE}.csv")
        known = {_case(row): row for row in answered if not math.isnan(row.aic_tpot_ms)}
    unknown = [row for row in rows if _case(row) not in known]
    fresh, refused = with_aiconfigurator_estimates(unknown)
    known |= {_case(row): row for row in fresh}
    answers = [known[_case(row)] for row in rows]
    return tuple(
        replace(row, aic_ttft_ms=answer.aic_ttft_ms, aic_tpot_ms=answer.aic_tpot_ms)
        for row, answer in zip(rows, answers, strict=True)
    ), refused


def _case(row: ServingRow) -> tuple[object, ...]:
    return tuple(getattr(row, name) for name in _CASE_COLUMNS)


def main(
    bench_data: Annotated[Path, typer.Argument(help="Folder of bench_data.")],
    gpus: Annotated[list[str] | None, typer.Argument(help="GPUs.  [default: all of the sample]")] = None,
) -> None:
    """Write the rows of aiconfigurator-core's public sample into bench_data."""
    for gpu in gpus or SAMPLE_GPUS:
        print(convert_silicon_sample(gpu, bench_data), flush=True)
