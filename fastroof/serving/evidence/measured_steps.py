"""Reading whole steps measured by kernels-bench (steps.csv), as far as a prediction needs them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from fastroof.columns import MEASURED_STEP_COLUMNS
from fastroof.errors import TableError
from fastroof.load.steps_file import PHASES, parse_runs, read_step_rows

STEPS_DATASET: Final = "steps"
NEEDED: Final = (
    "model", "gpu", "tp", "dtype", "kv_dtype", "phase", "new_tokens", "context_len", "latency_us",
)  # fmt: skip
MOST_RUNS: Final = 4


@dataclass(frozen=True)
class MeasuredStep:
    """One whole step, measured as one CUDA graph: its kernels, without an engine around them."""

    model: str
    gpu: str
    tp: int
    dtype: str
    kv_dtype: str
    phase: str
    new_tokens: tuple[int, ...]
    context_len: tuple[int, ...]
    latency_us: float

    @property
    def requests(self) -> list[tuple[int, int]]:
        """Return the step as :meth:`fastroof.StepBatch.from_requests` takes it."""
        return list(zip(self.new_tokens, self.context_len, strict=True))

    @property
    def name(self) -> str:
        """Return the step as commands take it: ``3x1@1023 512@0``, shortened if there are many kinds."""
        runs = [(request, len(list(same))) for request, same in groupby(self.requests)]
        parts = [f"{f'{count}x' if count > 1 else ''}{new}@{ctx}" for (new, ctx), count in runs[:MOST_RUNS]]
        return " ".join(parts + ["..."] * (len(runs) > MOST_RUNS))


def read_steps(path: str | Path) -> tuple[MeasuredStep, ...]:
    """Read a steps.csv."""
    path = Path(path)
    rows = read_step_rows(path, [column for column in MEASURED_STEP_COLUMNS if column.name in NEEDED])
    return tuple(_step(f"{path}, line {line}", row) for line, row in enumerate(rows, start=2))


def _step(where: str, row: Mapping[str, Any]) -> MeasuredStep:
    if row["phase"] not in PHASES:
        raise TableError(f"{where}: phase must be one of {', '.join(PHASES)}, found {row['phase']!r}")
    tp, latency_us = row["tp"], row["latency_us"]
    if not (math.isfinite(latency_us) and latency_us > 0 and tp > 0):
        raise TableError(f"{where}: tp and latency_us must be above 0, found {tp} and {latency_us:g}")
    try:
        new_tokens, context_len = (tuple(parse_runs(row[name])) for name in ("new_tokens", "context_len"))
    except TableError as error:
        raise TableError(f"{where}: {error}") from None
    if len(new_tokens) != len(context_len) or min(new_tokens) < 1:
        raise TableError(
            f"{where}: new_tokens (each at least 1) and context_len must have equal length, "
            f"found {row['new_tokens']!r} and {row['context_len']!r}"
        )
    return MeasuredStep(**{**row, "new_tokens": new_tokens, "context_len": context_len})
