"""Sampled step logs of vLLM: what the scheduler had in a step, and when the step started.

Columns are those of a fork of vLLM 0.15.1 that traces its steps (inference-sim/inference-sim, branch
stepml-experiments, 9293b22762f1). Its durations are the host's and not read. The time between two starts is
that of steps, but not of the ones that started:

* With asynchronous scheduling step i + 1 starts when step i - 1 ends, while step i runs. So the time from
  start i to start i + n is that of the steps i - 1 to i + n - 2.
* A request still counts as prefilling, with one token, in the step after its last chunk: its first token is
  not known yet. So a row with prompts of one token shows that prompts ended in the step before.
* A request whose last token is being computed is running, but in no batch.

A log has no lengths of single requests. They are taken as equal, by the used blocks less half a block each;
blocks that requests share count once. A chunk attends to as many cached tokens as a decode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastroof.checks import is_whole_number, shown
from fastroof.errors import TableError
from fastroof.evidence.engine_arguments import EngineArguments
from fastroof.evidence.steps.measured_steps import (
    MeasuredStep,
    Requests,
    phase_of,
    read_step_columns,
    step_of_engine,
)
from fastroof.parquet import PARQUET_ERRORS, open_parquet
from fastroof.units import NS_PER_US

LOG_DATASET: Final = "step log"
WINDOW_STEPS: Final = 60
WINDOW_PHASE: Final = f"{WINDOW_STEPS} steps"
FEWEST_SAMPLES: Final = 3
"""Logged steps from which a window has a mean."""

COLUMNS: Final = (
    "step.id", "step.ts_start_ns", "queue.running_depth", "batch.num_prefill_reqs", "batch.num_decode_reqs",
    "batch.prefill_tokens", "kv.blocks_total_gpu", "kv.blocks_free_gpu",
)  # fmt: skip
WORKLOAD: Final = "workload"
"""Optional column: every workload is a log of its own."""

BLOCK_TOKENS: Final = 16
MOST_ROWS: Final = 2**22
MOST_REQUESTS: Final = 2**16
LARGEST: Final = 2**30
MOST_NS: Final = 2**62


class LoggedStep(NamedTuple):
    """A row of a log, in the order of :data:`COLUMNS`."""

    step: int
    start_ns: int
    running: int
    prompts: int
    decodes: int
    prompt_tokens: int
    total_blocks: int
    free_blocks: int

    @property
    def context(self) -> int:
        """Mean cached tokens of a running request."""
        blocks = (self.total_blocks - self.free_blocks) / max(self.running, 1)
        return max(round((blocks - 0.5) * BLOCK_TOKENS) - 1, 1)

    @property
    def is_known_before(self) -> bool:
        """Whether the step before computed no prompt, as far as this row shows."""
        return self.prompts == 0 or (self.prompts == 1 and self.prompt_tokens > 1)

    def batch(self) -> Requests:
        """Requests of this step: if several prompts have a token or more each, one of them has a chunk."""
        chunk = self.prompt_tokens - max(self.prompts - 1, 0)
        is_chunk = chunk > 1
        decodes = self.decodes + self.prompts - is_chunk
        return ((chunk, self.context),) * is_chunk + ((1, self.context),) * decodes

    def batch_before(self) -> Requests:
        """Requests of the step before, which computed no prompt."""
        return ((1, self.context),) * (self.running - self.prompts)


def is_step_log(path: Path) -> bool:
    """Return whether a Parquet file has a step log's steps; False if it cannot be read."""
    try:
        with open_parquet(path) as file:
            return COLUMNS[0] in file.schema_arrow.names
    except PARQUET_ERRORS:
        return False


def read_step_log(path: Path, engine: EngineArguments, dataset: str = LOG_DATASET) -> list[MeasuredStep]:
    """Read single steps, pairs of a decode step and one with a prompt, and windows of :data:`WINDOW_STEPS`.

    Single steps and pairs are those whose batches a log determines.
    """
    if engine.engine != "vllm" or not engine.profile.scheduling.async_scheduling:
        raise TableError(
            f"{path}: its steps are read as those of vLLM with asynchronous scheduling, 0.14 or newer; the "
            f"engine is {engine.profile.title}"
        )
    found = []
    for workload, rows in _logs(path):
        timed = [*_single_steps(rows), *_pairs(rows), *_windows(rows)]
        if not timed:
            raise TableError(f"{path}: no two rows {workload} are of steps that follow each other")
        name = f"{dataset} {workload}".rstrip()
        for phase, (first, *further), us in timed:
            new, context = (tuple(sizes) for sizes in zip(*first, strict=True))
            step = step_of_engine(
                engine, new, context, phase=phase or phase_of(new, context), latency_us=us,
                timed="engine", dataset=name, timed_together=tuple(further),
            )  # fmt: skip
            found.append(step)
    return found


_Timed = tuple[str, tuple[Requests, ...], float]
"""A phase, empty if it is that of the batch; batches; and their mean time in us."""


def _single_steps(rows: Sequence[LoggedStep]) -> Iterator[_Timed]:
    """Return steps before rows whose next step is logged too, if they had no prompt."""
    for row, following in pairwise(rows):
        if following.step == row.step + 1 and row.is_known_before and row.running > row.prompts:
            yield "", (row.batch_before(),), _mean_us(row, following)


def _pairs(rows: Sequence[LoggedStep]) -> Iterator[_Timed]:
    """Return steps with one prompt and the decode step before, timed together."""
    starts = {row.step: row for row in rows}
    for row in rows:
        after = starts.get(row.step + 2)
        if after is not None and row.prompts == 1 and row.prompt_tokens > 1 and row.running > 1:
            yield "mixed", (row.batch(), row.batch_before()), _mean_us(row, after)


def _windows(rows: Sequence[LoggedStep]) -> Iterator[_Timed]:
    """Return the steps of each window that are logged, with the mean time of all of its steps."""
    members: list[LoggedStep] = []
    for row in rows:
        if members and row.step >= members[0].step + WINDOW_STEPS:
            if len(members) >= FEWEST_SAMPLES:
                batches = tuple(one.batch() for one in members if one.batch())
                if batches:
                    yield WINDOW_PHASE, batches, _mean_us(members[0], row)
            members = []
        members.append(row)


def _mean_us(first: LoggedStep, last: LoggedStep) -> float:
    return (last.start_ns - first.start_ns) / (last.step - first.step) / NS_PER_US


def _logs(path: Path) -> Iterator[tuple[str, list[LoggedStep]]]:
    """Return each workload and its rows, by step."""
    table = read_step_columns(path, "a step log", COLUMNS, (WORKLOAD,), MOST_ROWS)
    workloads = table.get(WORKLOAD) or [""] * len(table[COLUMNS[0]])
    logs: dict[str, list[LoggedStep]] = {}
    for number, (workload, *values) in enumerate(
        zip(workloads, *(table[name] for name in COLUMNS), strict=True)
    ):
        row = LoggedStep(*values)
        _check(f"{path}, row {number}", workload, row)
        logs.setdefault(workload, []).append(row)
    for workload, rows in logs.items():
        rows.sort()
        for row, following in pairwise(rows):
            if not (row.step < following.step and row.start_ns < following.start_ns):
                raise TableError(
                    f"{path}: steps {row.step} and {following.step} start at {row.start_ns} and "
                    f"{following.start_ns} ns: later steps must start later"
                )
        yield workload, rows


def _check(where: str, workload: Any, row: LoggedStep) -> None:
    if not isinstance(workload, str):
        raise TableError(f"{where}: {WORKLOAD} must be text, got {shown(workload)}")
    limits = (LARGEST, MOST_NS, *(MOST_REQUESTS,) * 3, LARGEST, LARGEST, LARGEST)
    for name, value, most in zip(COLUMNS, row, limits, strict=True):
        if not is_whole_number(value, 0, most):
            raise TableError(f"{where}: {name} must be a whole number up to {most:,}, got {shown(value)}")
    if row.prompts + row.decodes > row.running or row.prompt_tokens < row.prompts:
        raise TableError(
            f"{where}: {row.prompts} prompts of {row.prompt_tokens} tokens and {row.decodes} decodes are not "
            f"{row.running} running requests"
        )
    if bool(row.prompt_tokens) != bool(row.prompts) or row.free_blocks > row.total_blocks:
        raise TableError(
            f"{where}: {row.prompts} prompts of {row.prompt_tokens} tokens, {row.free_blocks} of "
            f"{row.total_blocks} blocks free"
        )
