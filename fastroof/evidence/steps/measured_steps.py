"""Whole steps measured on a GPU, and the reader of those of kernels-bench (steps.csv)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal

from fastroof.columns import MEASURED_STEP_COLUMNS
from fastroof.engines import EngineProfile, engine_of_version
from fastroof.errors import TableError
from fastroof.evidence.engine_arguments import EngineArguments
from fastroof.load.steps_file import PHASES, parse_runs, read_step_rows
from fastroof.models import load_model
from fastroof.models.execution import AUTO
from fastroof.models.layout import Layout
from fastroof.parquet import PARQUET_ERRORS, fault_of, open_parquet

STEPS_DATASET: Final = "steps"
ENGINE_STEPS_DATASET: Final = "engine steps"
"""Steps of a steps.csv that ran as one CUDA graph, and those that an engine ran."""

Timed = Literal["kernels", "forward", "engine"]
"""What was timed of a step: all kernels; those of the model without its LM head; the engine's whole step."""

TIMED_WORDS: Final[dict[Timed, str]] = {
    "kernels": "all kernels of a step; compared with the plan's kernels",
    "forward": "the model's forward as a CUDA graph, without LM head, sampler and host, with its drafter's "
    "if it has one; compared with the plan's kernels without its LM head",
    "engine": "an engine's step from schedule to output; compared with the plan and the profile's costs",
}
VERIFY: Final = "verify"
"""Phase of decodes that verify draft tokens."""

NEEDED: Final = (
    "model", "gpu", "tp", "dtype", "kv_dtype", "phase", "new_tokens", "context_len", "latency_us",
)  # fmt: skip
PROVIDER: Final = "provider"
ENGINE_STEP: Final = re.compile(r"(vllm) (\S+) engine\b")
"""Provider of an engine's whole step, as ``kernels-bench steps --engine`` names it; others time kernels."""

MOST_RUNS: Final = 4

Requests = tuple[tuple[int, int], ...]
"""New tokens and context of each request of a step."""


@dataclass(frozen=True)
class MeasuredStep:
    """One whole step; on each of ``dp`` ranks, if there are several."""

    model: str
    gpu: str
    tp: int
    dtype: str
    kv_dtype: str
    phase: str
    new_tokens: tuple[int, ...]
    context_len: tuple[int, ...]
    latency_us: float
    pp: int = 1
    dp: int = 1
    ep: int = 1
    num_draft_tokens: int = 0
    timed: Timed = "kernels"
    dataset: str = STEPS_DATASET
    engine: str = ""
    engine_version: str = ""
    profile: EngineProfile | None = None
    plan_dtype: str = ""
    left_out: str = ""
    drafted: int = 0
    """Draft tokens whose drafting by a layer like the model's was timed too."""
    timed_together: tuple[Requests, ...] = ()
    """Further steps, if ``latency_us`` is the mean of several."""

    @property
    def layout(self) -> Layout:
        """Layout of its GPUs."""
        return Layout(self.tp, self.pp, self.dp, self.ep)

    @property
    def mean_kv(self) -> int:
        """Mean tokens that the last query of a request attends to."""
        return round((sum(self.context_len) + sum(self.new_tokens)) / len(self.new_tokens))

    @property
    def is_decode(self) -> bool:
        """Whether no request prefills."""
        return all(
            new == 1 + self.num_draft_tokens and context > 0
            for new, context in zip(self.new_tokens, self.context_len, strict=True)
        )

    @property
    def requests(self) -> list[tuple[int, int]]:
        """Return the step as :meth:`fastroof.StepBatch.from_requests` takes it."""
        return list(zip(self.new_tokens, self.context_len, strict=True))

    @property
    def name(self) -> str:
        """Return the step as commands take it: ``3x1@1023 512@0``, shortened if there are many kinds."""
        runs = [(request, len(list(same))) for request, same in groupby(self.requests)]
        parts = [f"{f'{count}x' if count > 1 else ''}{new}@{ctx}" for (new, ctx), count in runs[:MOST_RUNS]]
        more = [f"and {len(self.timed_together)} more"] * bool(self.timed_together)
        return " ".join(parts + ["..."] * (len(runs) > MOST_RUNS) + more)


def read_steps(path: str | Path) -> tuple[MeasuredStep, ...]:
    """Read a steps.csv."""
    path = Path(path)
    needed, provider = (
        [column for column in MEASURED_STEP_COLUMNS if column.name in names]
        for names in (NEEDED, (PROVIDER,))
    )
    rows = read_step_rows(path, needed, provider)
    return tuple(_step(f"{path}, line {line}", row) for line, row in enumerate(rows, start=2))


def phase_of(new_tokens: tuple[int, ...], context_len: tuple[int, ...], num_draft_tokens: int = 0) -> str:
    """Return the phase of a step by its requests."""
    decodes = [
        new == 1 + num_draft_tokens and context > 0
        for new, context in zip(new_tokens, context_len, strict=True)
    ]
    if all(decodes):
        if num_draft_tokens:
            return VERIFY
        return "decode" if len(set(context_len)) == 1 else "unequal"
    if any(decodes):
        return "mixed"
    return "prefill" if len(set(zip(new_tokens, context_len, strict=True))) == 1 else "unequal"


def plan_dtype_of(model: str, dtype: str) -> str:
    """Return the ``dtype`` option of a plan: ``auto`` if the checkpoint defines each layer's format."""
    return AUTO if load_model(model).checkpoint.formats[0] == dtype else dtype


def step_of_engine(
    engine: EngineArguments, new_tokens: tuple[int, ...], context_len: tuple[int, ...], **more: Any
) -> MeasuredStep:
    """Return a step of a file that does not name its engine, by the engine's arguments."""
    layout = engine.layout
    return MeasuredStep(
        engine.model, engine.gpu, layout.tp, engine.dtype, engine.kv_dtype,
        new_tokens=new_tokens, context_len=context_len, pp=layout.pp, dp=layout.dp, ep=layout.ep,
        engine=engine.engine, engine_version=engine.version, profile=engine.profile,
        plan_dtype=plan_dtype_of(engine.model, engine.dtype), **more,
    )  # fmt: skip


def read_step_columns(
    path: Path, what: str, needed: Sequence[str], optional: Sequence[str], most_rows: int
) -> dict[str, list[Any]]:
    """Read the values of columns of a Parquet file, after a check of its columns and its number of rows."""
    try:
        with open_parquet(path) as file:
            names = file.schema_arrow.names
            missing = [name for name in needed if name not in names]
            if missing:
                raise TableError(f"{path} is not {what}: it has no column {', '.join(missing)}")
            if not 1 <= file.metadata.num_rows <= most_rows:
                raise TableError(f"{path} has {file.metadata.num_rows:,} rows, need 1 to {most_rows:,}")
            table = file.read([name for name in (*needed, *optional) if name in names])
            # texts are decoded here, which fails in a damaged file
            return table.to_pydict()  # type: ignore[no-any-return]
    except TableError:
        raise
    except PARQUET_ERRORS as error:
        raise TableError(f"{path}: {fault_of(error)}") from None


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
    cells = {name: row[name] for name in NEEDED} | {"new_tokens": new_tokens, "context_len": context_len}
    found = ENGINE_STEP.match(row.get(PROVIDER, ""))
    if found is None:
        return MeasuredStep(**cells)
    engine, version = found.groups()
    return MeasuredStep(
        **cells,
        timed="engine",
        dataset=ENGINE_STEPS_DATASET,
        engine=engine,
        engine_version=version,
        profile=engine_of_version(engine, version),
        plan_dtype=plan_dtype_of(row["model"], row["dtype"]),
    )
