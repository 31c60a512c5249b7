"""What a run of engine steps leaves: a journal, and the steps.csv and steps.toml that follow from it.

Both files are written anew from the journal after each step: a kill at any moment loses one step at most.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from fastroof.atomic_files import write_whole
from fastroof.columns import MEASURED_STEP_COLUMNS
from fastroof.errors import MeasureError
from fastroof.load.steps_file import STEPS_FILE
from fastroof.load.write import toml_text
from kernels_bench.journal import Journal, read_journal
from kernels_bench.protocol import Timing
from kernels_bench.vllm_steps.core import LEVEL_WORDS
from kernels_bench.vllm_steps.points import EnginePoint

JOURNAL_FILE: Final = "vllm_steps.jsonl"
PROVENANCE_FILE: Final = "steps.toml"
TYPES: Final = ("start", "engine", "step", "unfit", "closed_loop", "failed", "stopped", "end")

_NAMES: Final = [column.name for column in MEASURED_STEP_COLUMNS]
_DTYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

_TABLES: Final = {"engine": "engines", "closed_loop": "closed_loops", "unfit": "unfit"}

Record = Mapping[str, Any]


def open_journal(folder: Path) -> Journal:
    """Open the journal of a folder for appending."""
    return Journal(folder / JOURNAL_FILE, types=TYPES)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the journal's records; none if the folder has no journal."""
    path = folder / JOURNAL_FILE
    return read_journal(path, TYPES) if path.exists() else []


def done_points(records: Iterable[Record], model: str) -> set[EnginePoint]:
    """Return the points of a model that have a time, and those that its engine cannot run."""
    return {
        EnginePoint(record["phase"], tuple(record["sizes"]))
        for record in records
        if record["type"] in ("step", "unfit") and record["model"] == model
    }


def done_loops(records: Iterable[Record], model: str) -> set[int]:
    """Return the numbers of clients whose closed loop was run."""
    return {r["clients"] for r in records if r["type"] == "closed_loop" and r["model"] == model}


def check_folder(folder: Path, gpu: str) -> None:
    """Raise a MeasureError if a folder holds another GPU's steps, or steps without this journal."""
    records = read_records(folder)
    if others := {r["gpu"] for r in records if r["type"] == "start"} - {gpu}:
        raise MeasureError(
            f"{folder} holds steps of {', '.join(sorted(others))}, this GPU is {gpu}: give another -o"
        )
    if not records and (folder / STEPS_FILE).exists():
        raise MeasureError(f"{folder} has a {STEPS_FILE} without {JOURNAL_FILE}; give another -o")


def step_record(
    model: str, point: EnginePoint, timing: Timing, engine: Record, version: str, level: int, weights: str
) -> dict[str, Any]:
    """Return the journal's line of a measured step: the cells of its row in steps.csv but ``gpu``.

    ``weights`` is the format of the checkpoint; without quantization it is the engine's dtype.
    """
    dtype = _DTYPES.get(engine["dtype"], engine["dtype"])
    kv_dtype = engine["kv_cache_dtype"]
    return {
        "type": "step",
        "model": model,
        "phase": point.phase,
        "sizes": point.sizes,
        "row": {
            "tp": 1,
            "dtype": weights if engine["quantization"] else dtype,
            "kv_dtype": "fp8" if kv_dtype.startswith("fp8") else dtype,
            **point.batch.cells,
            **asdict(timing),
            "provider": f"vllm {version} engine{LEVEL_WORDS[level]}",
        },
    }


def write_files(folder: Path, records: Sequence[Record]) -> None:
    """Write steps.csv and steps.toml as the journal's records have them."""
    gpu = next(record["gpu"] for record in records if record["type"] == "start")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_NAMES)
    for record in records:
        if record["type"] == "step":
            row = {"model": record["model"], "gpu": gpu, "phase": record["phase"], **record["row"]}
            writer.writerow([repr(v) if isinstance(v := row[name], float) else v for name in _NAMES])
    write_whole(folder / STEPS_FILE, text.getvalue())
    write_whole(folder / PROVENANCE_FILE, toml_text({"gpu": gpu, "runs": _runs(records)}))


def _runs(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Return one table a run, with what each engine was configured to and what failed."""
    runs: list[dict[str, Any]] = []
    for record in records:
        kind = record["type"]
        facts = {k: v for k, v in record.items() if k not in ("type", "gpu", "requests") and v is not None}
        if kind == "start":
            empty: dict[str, Any] = {"engines": [], "closed_loops": [], "unfit": [], "failures": []}
            runs.append({"engine": "vllm", "weights": "dummy", **facts, "measured": 0, **empty})
        elif kind == "step":
            runs[-1]["measured"] += 1
        elif kind == "end":
            runs[-1] |= facts
        else:
            runs[-1][_TABLES.get(kind, "failures")].append(facts)
    return {f"run_{number}": run for number, run in enumerate(runs, 1)}
