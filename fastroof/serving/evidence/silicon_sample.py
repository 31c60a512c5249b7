"""Serving rows out of the package aiconfigurator-core: its sample of runs measured on GPUs.

The package (Apache-2.0, https://github.com/ai-dynamo/aiconfigurator) holds them as
``systems/silicon_sample.csv``. Only that file is read: the package is not imported.

    python -m fastroof.serving.evidence.silicon_sample bench_data [GPU ...]

writes the rows that ship, of all GPUs that have some unless named, with the package's own predictions beside
them; what it was asked before, at the same version, is not asked again.
"""

from __future__ import annotations

import csv
import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from fastroof.atomic_files import write_whole
from fastroof.documents import read_toml
from fastroof.errors import TableError
from fastroof.load.aiconfigurator import SYSTEMS, installed_root
from fastroof.load.own import SERVING_FOLDER
from fastroof.load.write import toml_text
from fastroof.serving.evidence.aiconfigurator_estimates import (
    AICONFIGURATOR,
    aiconfigurator_version,
    with_aiconfigurator_estimates,
)
from fastroof.serving.evidence.rows import LeftOut, ServingRow, read_rows, write_rows
from fastroof.serving.evidence.sample_cleaning import KV_DTYPE_FROM, RULES, clean_sample

__all__ = ["SAMPLE_FILE", "SAMPLE_GPUS", "convert_silicon_sample", "main", "read_silicon_sample"]

SAMPLE_FILE: Final = "systems/silicon_sample.csv"
SOURCE: Final = "silicon_sample"
SAMPLE_GPUS: Final = ("h100", "h200", "b200", "b300", "gb200", "gb300")
"""GPUs that the sample has runs of."""

_ASKED: Final = (
    "gpu", "engine", "model", "dtype", "kv_dtype", "tp", "pp", "dp", "ep", "isl", "osl", "concurrency",
    "prefix_tokens", "decode_workers",
)  # fmt: skip
"""What the package is told of a row."""


def read_silicon_sample(
    gpu: str, path: str | Path | None = None
) -> tuple[tuple[ServingRow, ...], tuple[LeftOut, ...], Mapping[str, int]]:
    """Read the distinct runs of one GPU, cleaned, and count the other rows.

    Parameters
    ----------
    gpu : str
        fastroof's name of it.
    path : str or Path, optional
        The file; that of the installed package if not given.

    Returns
    -------
    rows : tuple of ServingRow
        Aggregated serving, and disaggregated serving with worker counts, by data set.
    left_out : tuple of LeftOut
        Rows of the GPU that are none of these, by reason.
    changed : mapping of str to int
        Rows that each of :data:`fastroof.serving.evidence.sample_cleaning.RULES` changed.

    Raises
    ------
    TableError
        If the package is not installed, or the file is not the sample, or has nothing of the GPU.

    Notes
    -----
    The sample does not say how its runs were made. Rows of InferenceMAX (those of a dated file or a
    database) follow its public protocol: lengths uniform from 0.8 to 1.0 of nominal, 10 requests a client.
    The others ran behind NVIDIA Dynamo, with nominal lengths; 10 requests a client is an assumption there.
    No column has the KV cache's dtype: see ``kv_dtype_from`` of each row.
    """
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
    """Write a GPU's rows, with the package's own predictions beside them, and where they come from.

    Parameters
    ----------
    gpu : str
        fastroof's name of it.
    bench_data : str or Path
        Folder that holds one folder a GPU: silicon_sample.csv and .toml go to ``<gpu>/serving`` in it.

    Returns
    -------
    Path
        The CSV.

    Raises
    ------
    TableError
        As :func:`read_silicon_sample` does.
    FastroofError
        If the package is not installed.
    """
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
    """Ask the package for what the file that is there does not know of it."""
    told, known = folder / f"{SOURCE}.toml", dict[tuple[object, ...], ServingRow]()
    if told.is_file() and read_toml(told, TableError).get("package_version") == version:
        answered = read_rows(folder / f"{SOURCE}.csv")
        known = {_asked(row): row for row in answered if not math.isnan(row.aic_tpot_ms)}
    unknown = [row for row in rows if _asked(row) not in known]
    fresh, refused = with_aiconfigurator_estimates(unknown)
    known |= {_asked(row): row for row in fresh}
    answers = [known[_asked(row)] for row in rows]
    return tuple(
        replace(row, aic_ttft_ms=answer.aic_ttft_ms, aic_tpot_ms=answer.aic_tpot_ms)
        for row, answer in zip(rows, answers, strict=True)
    ), refused


def _asked(row: ServingRow) -> tuple[object, ...]:
    return tuple(getattr(row, name) for name in _ASKED)


def main(arguments: Sequence[str]) -> None:
    """Write the rows of some GPUs, or of all that the sample has."""
    if not arguments:
        raise SystemExit("usage: python -m fastroof.serving.evidence.silicon_sample BENCH_DATA [GPU ...]")
    for gpu in arguments[1:] or SAMPLE_GPUS:
        print(convert_silicon_sample(gpu, arguments[0]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
