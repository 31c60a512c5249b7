"""Compare logged KV cache room of engines with plans of the same runs."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from fastroof.config import load_gpu
from fastroof.config.paths import bench_data_root
from fastroof.engines import KvMemory, engine_of_version
from fastroof.errors import FastroofError
from fastroof.models import load_model
from fastroof.plan import compile_plan
from fastroof.plan.memory import VISIBLE_SHARE, MemoryUse, PlanMemory, plan_memory
from fastroof.units import GIB

FILE: Final = "kv_room.csv"
STEP_TOKENS: Final = 8192
"""Default of runs without a value, noted in ``assumed``."""

_NUMBERS: Final = {
    "gpu_gib": float, "tp": int, "ep": int, "fraction": float, "max_num_batched_tokens": int,
    "max_num_seqs": int, "kv_gib": float, "kv_tokens": int, "weights_gib": float, "activation_gib": float,
    "other_gib": float,
}  # fmt: skip


@dataclass(frozen=True)
class LoggedRoom:
    """One logged engine start; None if the log has no value."""

    id: str
    engine: str
    version: str
    model: str
    gpu: str
    gpu_gib: float
    tp: int
    ep: int
    dtype: str
    kv_dtype: str
    fraction: float | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    kv_gib: float | None
    kv_tokens: int | None
    weights_gib: float | None
    activation_gib: float | None
    other_gib: float | None
    half: str
    assumed: str
    source: str

    def room_gib(self, memory: PlanMemory) -> float:
        """Return the logged room, GiB; tokens are converted by the plan's bytes per token."""
        if self.kv_gib is not None:
            return self.kv_gib
        return (self.kv_tokens or 0) * memory.kv_bytes_per_token / GIB


def kv_room_rows(path: str | Path | None = None) -> tuple[LoggedRoom, ...]:
    """Read the logged rows."""
    file = bench_data_root() / FILE if path is None else Path(path)
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            found = list(csv.DictReader(lines))
        return tuple(LoggedRoom(**_cells(row)) for row in found)
    except (OSError, UnicodeDecodeError, csv.Error, TypeError, ValueError) as error:
        raise FastroofError(f"cannot read the rooms of {file}: {error}") from None


def _cells(row: dict[str, str]) -> dict[str, Any]:
    return {
        name: (_NUMBERS[name](cell) if cell else None) if name in _NUMBERS else cell
        for name, cell in row.items()
    }


def memory_of_row(row: LoggedRoom, rule: KvMemory | None = None) -> PlanMemory:
    """Return the memory of a logged run's plan."""
    if rule is None:
        rule = engine_of_version(row.engine, row.version).memory
        # the log's limit of requests, on any GPU
        rule = replace(rule, small_gib=0.0, small_gpus=())
        if row.fraction is not None:
            rule = replace(rule, fraction=row.fraction)
    gpu = replace(load_gpu("h100"), hbm_bytes=round(row.gpu_gib / VISIBLE_SHARE * GIB))
    if row.gpu in _SLOW_LINKS:
        gpu = replace(gpu, nvlink_bytes_per_s=load_gpu("l40s").nvlink_bytes_per_s)
    plan = compile_plan(
        load_model(row.model),
        gpu,
        None,
        tp=row.tp,
        ep=row.ep,
        dtype=row.dtype,
        kv_dtype=row.kv_dtype,
        engine="kernels",
    )
    seqs = engine_of_version(row.engine, row.version).scheduling.max_num_seqs
    return plan_memory(
        plan.model, plan.layout, gpu, plan.execution,
        MemoryUse(row.max_num_batched_tokens or STEP_TOKENS, row.max_num_seqs or seqs), rule=rule,
    )  # fmt: skip


_SLOW_LINKS: Final = ("l40s", "rtx_4090", "rtx_3090", "a100", "rtx_a6000")


def main() -> None:
    """Compare logged KV cache room with the profile's rule and the datasheet's."""
    columns = ("log", "rule", "off", "datasheet", "off")
    print(f"{'run':10} {'half':5} {'model on gpu':38} " + " ".join(f"{name:>9}" for name in columns))
    for row in kv_room_rows():
        memory, plain = memory_of_row(row), memory_of_row(row, KvMemory())
        log = row.room_gib(memory)
        rooms = [one.max_kv_tokens * one.token_bytes / GIB for one in (memory, plain)]
        off = [f"{(room - log) / row.gpu_gib:+.1%}" for room in rooms]
        where = f"{row.model} tp {row.tp} on {row.gpu}"
        cells = (f"{log:.2f}", f"{rooms[0]:.2f}", off[0], f"{rooms[1]:.2f}", off[1])
        print(f"{row.id:10} {row.half:5} {where:38} " + " ".join(f"{cell:>9}" for cell in cells))
