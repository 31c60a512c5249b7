"""Whole steps that kernels-bench measured: steps.csv, as far as a prediction needs it.

The file has the columns that ``kernels-bench steps`` writes, one row a step: ``new_tokens`` and
``context_len`` are runs of equal numbers, ``4095x32;0`` for 32 requests at 4095 and one at 0.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from fastroof.config.paths import bench_data_root
from fastroof.errors import TableError
from fastroof.serving.rows import SERVING_FOLDER, STEPS_FILE

__all__ = ["STEPS_DATASET", "MeasuredStep", "read_steps", "shipped_steps"]

STEPS_DATASET: Final = "steps"
PHASES: Final = ("decode", "prefill", "mixed", "unequal")
NEEDED: Final = (
    "model", "gpu", "tp", "dtype", "kv_dtype", "phase", "new_tokens", "context_len", "latency_us",
)  # fmt: skip
MOST_REQUESTS: Final = 2**20
MOST_RUNS: Final = 4

_RUN: Final = re.compile(r"(0|[1-9][0-9]{0,8})(?:x([1-9][0-9]{0,6}))?")


@dataclass(frozen=True)
class MeasuredStep:
    """One whole step, measured as one CUDA graph: its kernels, without an engine around them.

    Attributes
    ----------
    model, gpu, dtype, kv_dtype : str
        What ran where.
    tp : int
        GPUs.
    phase : str
        decode, prefill, mixed, or unequal lengths.
    new_tokens, context_len : tuple of int
        Of each request.
    latency_us : float
        Median time, us.
    """

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
        """The step as :meth:`fastroof.StepBatch.from_requests` takes it."""
        return list(zip(self.new_tokens, self.context_len, strict=True))

    @property
    def name(self) -> str:
        """The step in words, as commands take them: ``3x1@1023 512@0``; a few requests of many kinds."""
        runs = [(request, len(list(same))) for request, same in groupby(self.requests)]
        words = [f"{f'{count}x' if count > 1 else ''}{new}@{ctx}" for (new, ctx), count in runs[:MOST_RUNS]]
        return " ".join(words + ["..."] * (len(runs) > MOST_RUNS))


def read_steps(path: str | Path) -> tuple[MeasuredStep, ...]:
    """Read a steps.csv.

    Parameters
    ----------
    path : str or Path
        As ``kernels-bench steps`` writes it; columns that a prediction does not need are not read.

    Returns
    -------
    tuple of MeasuredStep
        In the order of the file. A last line without its newline, which a kill leaves behind, is no row.

    Raises
    ------
    TableError
        If it is no such file, or a cell is not what its column holds; names line and column.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8")
        whole = text[: text.rfind("\n") + 1]
        reader = csv.DictReader(whole.splitlines(), strict=True)
        cells = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path}: cannot be read as measured steps: {error}") from None
    missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
    if missing:
        raise TableError(f"{path}: measured steps need column {', '.join(missing)}; see kernels-bench steps")
    return tuple(_step(f"{path}, line {line}", values) for line, values in enumerate(cells, start=2))


def _step(where: str, values: Mapping[str, str | None]) -> MeasuredStep:
    empty = [name for name in NEEDED if not values[name]]
    if empty:
        raise TableError(f"{where}: column {', '.join(empty)} is empty")
    found = {name: str(values[name]) for name in NEEDED}
    if found["phase"] not in PHASES:
        raise TableError(f"{where}: phase is one of {', '.join(PHASES)}, found {found['phase']!r}")
    try:
        tp, latency_us = int(found["tp"]), float(found["latency_us"])
    except ValueError as error:
        raise TableError(f"{where}: {error}") from None
    if not (math.isfinite(latency_us) and latency_us > 0 and tp > 0):
        raise TableError(f"{where}: tp and latency_us must be above 0, found {tp} and {latency_us:g}")
    new_tokens, context_len = (_runs(where, found[name]) for name in ("new_tokens", "context_len"))
    if len(new_tokens) != len(context_len) or min(new_tokens) < 1:
        raise TableError(
            f"{where}: a step has as many new_tokens, each at least 1, as context_len: "
            f"found {found['new_tokens']!r} and {found['context_len']!r}"
        )
    names = ("model", "gpu", "dtype", "kv_dtype", "phase")
    return MeasuredStep(
        **{name: found[name] for name in names},
        tp=tp,
        new_tokens=new_tokens,
        context_len=context_len,
        latency_us=latency_us,
    )


def _runs(where: str, text: str) -> tuple[int, ...]:
    values: list[int] = []
    for run in text.split(";"):
        match = _RUN.fullmatch(run)
        count = int(match[2] or 1) if match else 0
        if match is None or len(values) + count > MOST_REQUESTS:
            raise TableError(f"{where}: {run!r} of {text!r:.60} is no run such as 4095x32")
        values += [int(match[1])] * count
    return tuple(values)


def shipped_steps(gpu: str, root: Path | None = None) -> tuple[MeasuredStep, ...]:
    """Read the measured steps that ship with a GPU's tables; none where there is no steps.csv.

    Parameters
    ----------
    gpu : str
        Name of the GPU.
    root : Path, optional
        Folder that holds one folder a GPU, instead of the shipped one.

    Returns
    -------
    tuple of MeasuredStep
        Of ``<gpu>/serving/steps.csv``, and of each steps.csv in a folder of it.
    """
    folder = (bench_data_root() if root is None else root) / gpu / SERVING_FOLDER
    return tuple(step for path in sorted(folder.rglob(STEPS_FILE)) for step in read_steps(path))
