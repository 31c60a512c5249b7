"""Plan files, from Python: written from a plan, and read back as C would."""

from __future__ import annotations

import json
import os
import stat
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Flags, Floats, Longs
from fastroof.atomic_files import write_output
from fastroof.backends.plan_facts import plan_facts
from fastroof.checks import shown, whole_number
from fastroof.compiled import plan_files, steps, verification
from fastroof.documents import parse_json
from fastroof.errors import BackendError
from fastroof.file_access import open_nonblocking
from fastroof.models.named import PRESETS
from fastroof.plan.arena import validate_arena
from fastroof.simulation.pools import whole_kv_bytes
from fastroof.units import NS_PER_US

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

_WRONG: Final = {
    plan_files.CODE_FOREIGN: "is not a plan file",
    plan_files.CODE_VERSION: "is a plan file of another version",
    plan_files.CODE_TRUNCATED: "is shorter or longer than it says",
    plan_files.CODE_CORRUPT: "is damaged",
}


class PlanFile(NamedTuple):
    """A plan file, mapped.

    Attributes
    ----------
    arena : ndarray of float64
        The plan as the loops read it, read-only; the ``data`` of :func:`fastroof.numba_step`.
    description : dict
        The plan's name and its ``plan.describe()``.
    """

    arena: Floats
    description: dict[str, Any]


def description(plan: StepPlan, name: str) -> dict[str, Any]:
    """What a plan file holds: its name, ``plan.describe()``, the model's ids, host times, and plan_facts."""
    times_us = zip(("request", "token", "server"), plan.profile.front_end.times_us, strict=True)
    return {
        "name": name,
        **plan.describe(),
        "ids": ", ".join(PRESETS.get(plan.model.name, ())),
        "front_end": {f"{part}_ns": round(us * NS_PER_US) for part, us in times_us},
        **plan_facts(plan),
    }


def plan_bytes(plan: StepPlan, name: str) -> bytes:
    """Lay a plan out as a file, see :mod:`fastroof.compiled.plan_files` and ``plan_parts``."""
    return _file_bytes(plan, name, len(plan.stage_plans) > 1)


def _file_bytes(plan: StepPlan, name: str, has_stages: bool) -> bytes:
    arena = np.ascontiguousarray(plan.arena, "<f8").tobytes()
    text = json.dumps(description(plan, name)).encode() + b"\0"
    body = _Body(arena, text)
    facts_at = body.add(bytes(8 * plan_files.FACTS_WORDS))
    facts = _facts_of(plan)
    size = len(plan.verification_arena) - len(plan.arena)
    facts[[plan_files.VERIFICATION_AT, plan_files.VERIFICATION_SIZE]] = body.words, size
    body.add(_verification_part(plan, body.words).tobytes())
    if has_stages:
        # stages that are alike are one plan
        known = {id(stage): stage for stage in plan.stages}
        places = {
            one: body.add(_file_bytes(stage, f"{name} stage {stage.stage}", has_stages=False))
            for one, stage in known.items()
        }
        facts[[plan_files.STAGES_AT, plan_files.STAGES]] = body.words, len(plan.stages)
        body.add(np.array([places[id(stage)] for stage in plan.stages], "<i8").tobytes())
    body.replace(facts_at, facts.astype("<i8").tobytes())
    content = bytes(body.content)
    size = plan_files.FILE_HEADER + len(content)
    checked = struct.pack("<QQQQ16x", size, len(arena) // 8, len(text), facts_at) + content
    return struct.pack("<8sII", b"FASTROOF", plan_files.FILE_VERSION, zlib.crc32(checked)) + checked


def write_plan_file(plan: StepPlan, path: str | Path, name: str | None = None) -> None:
    """Write a plan file, whole or not at all.

    Parameters
    ----------
    plan : StepPlan
        The plan.
    path : str or Path
        Where to.
    name : str, optional
        What its description calls it; the file's name without its suffix by default.

    Raises
    ------
    BackendError
        If there is no such folder, or the disk does not take it.
    """
    write_output(path, plan_bytes(plan, name or Path(path).stem), error=BackendError)


def read_plan_file(path: str | Path) -> PlanFile:
    """Map a plan file and check it as ``fastroof_open`` does.

    Raises
    ------
    BackendError
        If it is not a plan file, is one of another version, is incomplete, or holds invalid times or
        another description than plans have.
    OSError
        If it cannot be read.
    """
    path = Path(path)
    octets: Flags = np.zeros(0, np.uint8)
    with open(path, "rb", opener=open_nonblocking) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise BackendError(f"{path} is no plain file; fastroof export c writes plan files")
        if status.st_size:
            octets = np.memmap(file, np.uint8, "r").view(np.ndarray)
    eights = octets[: len(octets) // 8 * 8]
    words, floats = eights.view("<i8"), eights.view("<f8")
    code = plan_files.plan_bytes_code(octets, words, floats)
    if code:
        raise BackendError(f"{path} {_WRONG[code]}; fastroof export c writes plan files")
    start = plan_files.FILE_HEADER // 8
    count = int(words[plan_files.ARENA_FLOATS])
    text = octets[plan_files.FILE_HEADER + 8 * count :][: int(words[plan_files.TEXT_BYTES]) - 1]
    arena = floats[start : start + count]
    validate_arena(arena, str(path), BackendError)
    return PlanFile(arena, _description(text.tobytes(), arena, f"the description of {path}"))


_TEXTS: Final = ("name", "model", "gpu", "dtype", "kv_dtype", "engine", "method", "tables_hash", "version")
_OTHER_TEXTS: Final = (
    "ids", "kernels", "routing", "exchange", "experts", "two_batch_overlap", "dp_imbalance",
)  # fmt: skip
_LIMITS: Final = {"max_num_batched_tokens": steps.MAX_TOKENS, "max_num_seqs": steps.MAX_SEQS}
_MOST: Final = 2**63 - 1


def _description(text: bytes, arena: Floats, what: str) -> dict[str, Any]:
    """Read a description, and hold it to what :func:`description` writes: the CRC says nothing of that."""
    head = parse_json(text, what, BackendError, is_strict=True)
    if not isinstance(head, dict):
        raise BackendError(f"{what} must be a JSON object, got {shown(head)}")
    for name in (*_TEXTS, *(name for name in _OTHER_TEXTS if name in head)):
        if not isinstance(head.get(name), str):
            raise BackendError(f"{what}: {name} must be a text, got {shown(head.get(name))}")
    whole_number(f"{what}: tp", head.get("tp"), error=BackendError)
    for name, slot in _LIMITS.items():
        if type(head.get(name)) is not int or head[name] != arena[slot]:
            raise BackendError(f"{what}: {name} is {shown(head.get(name))}, the plan's is {arena[slot]:.0f}")
    for name, value in head.items():
        if name in ("layout", "memory", "front_end"):
            _check_sizes(f"{what}: {name}", value)
        elif name == "stages":
            _check_stages(f"{what}: stages", value)
        elif not isinstance(value, str):
            whole_number(f"{what}: {name}", value, 0, _MOST, error=BackendError)
    return head


def _check_sizes(what: str, sizes: Any) -> None:
    if not isinstance(sizes, dict):
        raise BackendError(f"{what} must be an object of whole numbers, got {shown(sizes)}")
    for name, size in sizes.items():
        whole_number(f"{what}, {name}", size, 0, _MOST, error=BackendError)


def _check_stages(what: str, stages: Any) -> None:
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise BackendError(f"{what} must be a list of objects, got {shown(stages)}")
    for stage in stages:
        _check_sizes(what, {name: value for name, value in stage.items() if name != "memory"})
        _check_sizes(f"{what}, memory", stage.get("memory"))


# What the file holds besides the arena, as fastroof.compiled.plan_files reads it


class _Body:
    """The bytes of a file after its header; parts are added on multiples of 8."""

    def __init__(self, arena: bytes, text: bytes) -> None:
        self.content = bytearray(arena)
        self.add(text)

    @property
    def words(self) -> int:
        """Where the next part starts: eights of bytes from the arena's start on."""
        return len(self.content) // 8

    def add(self, part: bytes) -> int:
        """Append a part and NULs up to a multiple of 8, and return where it starts."""
        at = self.words
        self.content += part + bytes(-len(part) % 8)
        return at

    def replace(self, at: int, part: bytes) -> None:
        """Replace a part by another of the same length."""
        self.content[8 * at : 8 * at + len(part)] = part


def _facts_of(plan: StepPlan) -> Longs:
    """Memory, KV cache, layout and link of a plan; no other part is there."""
    memory, whole, layout = plan.memory, whole_kv_bytes(plan), plan.layout
    facts = np.zeros(plan_files.FACTS_WORDS, np.int64)
    facts[0] = plan_files.FACTS_WORDS
    of_slot = {
        plan_files.WEIGHT_BYTES: memory.weight_bytes,
        plan_files.KV_BYTES: memory.kv_bytes_per_token,
        plan_files.ACTIVATION_BYTES: memory.activation_bytes + memory.workspace_bytes,
        plan_files.RESERVE_BYTES: memory.reserve_bytes,
        plan_files.CONTEXT_BYTES: memory.context_bytes,
        plan_files.MAX_KV_TOKENS: memory.max_kv_tokens,
        plan_files.KV_WINDOW: memory.window,
        plan_files.WINDOW_KV_BYTES: memory.window_kv_bytes_per_token,
        plan_files.STATE_BYTES: memory.state_bytes_per_sequence,
        plan_files.MODEL_KV_BYTES: whole.kv_bytes_per_token,
        plan_files.MODEL_WINDOW_KV_BYTES: whole.window_kv_bytes_per_token,
        plan_files.MODEL_STATE_BYTES: whole.state_bytes_per_sequence,
    }
    facts[list(of_slot)] = list(of_slot.values())
    layouts = slice(plan_files.TP, plan_files.CP + 1)
    facts[layouts] = layout.tp, layout.pp, layout.dp, layout.ep, layout.moe_tp, layout.cp
    facts.view(np.float64)[plan_files.NVLINK_BYTES_PER_S] = plan.gpu.nvlink_bytes_per_s
    return facts


def _verification_part(plan: StepPlan, at: int) -> Floats:
    """Return what verification reads besides the arena, to be placed ``at`` instead of after it."""
    arena, after = plan.verification_arena, len(plan.arena)
    part = np.array(arena[after:], "<f8")
    part[[verification.HEAD_AT, verification.BOUNDS_AT]] += at - after
    return part
