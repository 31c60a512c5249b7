"""A plan as it is kept for a later process: its arenas, and what is said of it beside times.

It times the same steps to the same bits. What a plan is made of (curves, attention of each kind, errors)
stays behind, so that none of what makes plans is imported to ask one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.compiled.steps import ARENA_FORMAT, ARENA_MAGIC, ARENA_SIZE, FORMAT, HEADER_SIZE, MAGIC
from fastroof.documents import parse_json
from fastroof.errors import FastroofError
from fastroof.plan.gpu_memory import PlanMemory
from fastroof.run.evaluate import run_batch
from fastroof.run.rounds import round_us

if TYPE_CHECKING:
    from fastroof.plan.step_plan import StepPlan
    from fastroof.run.batch import StepBatch, StepTimes

__all__ = ["KeptPlan", "kept_bytes", "kept_of", "read_kept_plan"]

_SIZES: Final = struct.Struct("<QQ")
"""Bytes of the words, and floats of all arenas: arenas follow, each as long as the words say."""

LAYOUT_SIZES: Final = ("tp", "pp", "cp", "dp", "ep", "moe_tp")


@dataclass(frozen=True, eq=False)
class KeptPlan:
    """What was kept of a :class:`fastroof.StepPlan`."""

    model: str
    gpu: str
    gpu_title: str
    dtype: str
    kv_dtype: str
    routing: str | None
    runtime: str
    method: str
    tables_hash: str
    kernels: str
    version: str
    checkpoint_method: str
    checkpoint_dtype: str
    layout: Mapping[str, int]
    layout_words: str
    world_size: int
    max_position: int
    batches_in_flight: float
    max_tokens: int
    max_seqs: int
    memory: PlanMemory
    made_from: Mapping[str, str]
    arena: Floats = field(repr=False)
    stage_arenas: tuple[Floats, ...] = field(default=(), repr=False)

    def run(self, batch: StepBatch) -> StepTimes:
        """Time ragged steps, as :meth:`fastroof.StepPlan.run`."""
        return run_batch(self, batch, 1)

    def cycle_us(self, batch: StepBatch) -> float:
        """Time of a round of micro-batches, us, as :meth:`fastroof.StepPlan.cycle_us`."""
        alike: dict[int, Floats] = {}
        arenas = self.stage_arenas or (self.arena,)
        for arena in arenas:
            if id(arena) not in alike:
                alike[id(arena)] = replace(self, arena=arena).run(batch).latency_us
        return round_us(np.stack([alike[id(arena)] for arena in arenas], axis=1))


def kept_of(plan: StepPlan) -> KeptPlan:
    """Return what is kept of a plan."""
    return KeptPlan(
        model=plan.model.name,
        gpu=plan.gpu.name,
        gpu_title=plan.gpu.title,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        routing=plan.execution.routing if plan.model.has_experts else None,
        runtime=plan.runtime,
        method=plan.method,
        tables_hash=plan.tables_hash,
        kernels=plan.kernels,
        version=plan.version,
        checkpoint_method=plan.model.checkpoint.method,
        checkpoint_dtype=plan.model.checkpoint.dtype,
        layout={name: getattr(plan.layout, name) for name in LAYOUT_SIZES},
        layout_words=str(plan.layout),
        world_size=plan.layout.world_size,
        max_position=plan.model.max_position,
        batches_in_flight=plan.batches_in_flight,
        max_tokens=plan.max_tokens,
        max_seqs=plan.max_seqs,
        memory=plan.memory,
        made_from=plan.made_from,
        arena=plan.arena,
        stage_arenas=tuple(stage.arena for stage in plan.stage_plans),
    )


_ARRAYS: Final = ("arena", "stage_arenas")


def kept_bytes(kept: KeptPlan) -> bytes:
    """Return what is kept of a plan as bytes, which :func:`read_kept_plan` reads."""
    arenas = {id(arena): arena for arena in (kept.arena, *kept.stage_arenas)}
    places = {key: place for place, key in enumerate(arenas)}
    words: dict[str, Any] = {f.name: getattr(kept, f.name) for f in fields(kept) if f.name not in _ARRAYS}
    words["memory"] = kept.memory._asdict()
    words["floats"] = [len(arena) for arena in arenas.values()]
    words["stages"] = [places[id(arena)] for arena in kept.stage_arenas]
    text = json.dumps(words).encode()
    # what follows is read in place: in whole words of 8 bytes
    text += b" " * (-len(text) % 8)
    return b"".join(
        (
            _SIZES.pack(len(text), sum(words["floats"])),
            text,
            *(arena.astype("<f8", copy=False).tobytes() for arena in arenas.values()),
        )
    )


def read_kept_plan(data: bytes) -> KeptPlan:
    """Return the plan that :func:`kept_bytes` wrote."""
    try:
        text, floats = _SIZES.unpack_from(data)
        if _SIZES.size + text + 8 * floats != len(data):
            raise ValueError("another size")
        words = parse_json(data[_SIZES.size : _SIZES.size + text], "a kept plan")
        body = np.frombuffer(data, "<f8", floats, _SIZES.size + text).astype(np.float64)
        lengths, stages = words.pop("floats"), words.pop("stages")
        if sum(lengths) != floats:
            raise ValueError("arenas of other lengths")
        arenas = np.split(body, np.cumsum(lengths)[:-1])
        for arena in arenas:
            _check_arena(arena)
            arena.flags.writeable = False
        words["memory"] = PlanMemory(**words["memory"])
        return KeptPlan(**words, arena=arenas[0], stage_arenas=tuple(arenas[i] for i in stages))
    except (FastroofError, struct.error, KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"this is no kept plan: {error}") from None


def _check_arena(arena: Floats) -> None:
    """Refuse what is no arena of this version; a digest vouches for the rest."""
    if len(arena) < HEADER_SIZE or (arena[MAGIC], arena[FORMAT]) != (ARENA_MAGIC, ARENA_FORMAT):
        raise ValueError("no arena of this version")
    if arena[ARENA_SIZE] != len(arena):
        raise ValueError("an arena of another size")
