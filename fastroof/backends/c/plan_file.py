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

from fastroof.arrays import Flags, Floats
from fastroof.backends.c.plan_parts import Body, facts_of, verification_part
from fastroof.backends.plan_facts import plan_facts
from fastroof.compiled import plan_files as loops
from fastroof.compiled import plan_parts as parts
from fastroof.documents import parse_json
from fastroof.errors import BackendError
from fastroof.whole_files import write_output

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = ["PlanFile", "description", "plan_bytes", "read_plan_file", "write_plan_file"]

_WRONG: Final = {
    loops.CODE_FOREIGN: "is not a plan file",
    loops.CODE_VERSION: "is a plan file of another version",
    loops.CODE_TRUNCATED: "is shorter or longer than it says",
    loops.CODE_CORRUPT: "is damaged",
}


class PlanFile(NamedTuple):
    """A plan file, mapped.

    Attributes
    ----------
    arena : ndarray of float64
        The plan as the loops read it, read-only; the ``data`` of :func:`fastroof.numba_step`.
    description : dict
        The plan's name, and what ``plan.describe()`` said of it.
    """

    arena: Floats
    description: dict[str, Any]


def description(plan: StepPlan, name: str) -> dict[str, Any]:
    """What a plan file says of its plan: its name, ``plan.describe()``, layout, memory and stages."""
    return {"name": name, **plan.describe(), **plan_facts(plan)}


def plan_bytes(plan: StepPlan, name: str) -> bytes:
    """Lay a plan out as a file, see :mod:`fastroof.compiled.plan_files` and ``plan_parts`` beside it."""
    return _file_bytes(plan, name, len(plan.stage_plans) > 1)


def _file_bytes(plan: StepPlan, name: str, has_stages: bool) -> bytes:
    arena = np.ascontiguousarray(plan.arena, "<f8").tobytes()
    text = json.dumps(description(plan, name)).encode() + b"\0"
    body = Body(arena, text)
    facts_at = body.add(bytes(8 * parts.FACTS_WORDS))
    facts = facts_of(plan)
    size = len(plan.verification_arena) - len(plan.arena)
    facts[[parts.VERIFICATION_AT, parts.VERIFICATION_SIZE]] = body.words, size
    body.add(verification_part(plan, body.words).tobytes())
    if has_stages:
        # stages that are alike are one plan
        known = {id(stage): stage for stage in plan.stages}
        places = {
            one: body.add(_file_bytes(stage, f"{name} stage {stage.stage}", has_stages=False))
            for one, stage in known.items()
        }
        facts[[parts.STAGES_AT, parts.STAGES]] = body.words, len(plan.stages)
        body.add(np.array([places[id(stage)] for stage in plan.stages], "<i8").tobytes())
    body.replace(facts_at, facts.astype("<i8").tobytes())
    content = body.content
    size = loops.FILE_HEADER + len(content)
    checked = struct.pack("<QQQQ16x", size, len(arena) // 8, len(text), facts_at) + content
    return struct.pack("<8sII", b"FASTROOF", loops.FILE_VERSION, zlib.crc32(checked)) + checked


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
        If it is not a plan file, is one of another version, or is not whole.
    OSError
        If it cannot be read.
    """
    path = Path(path)
    octets: Flags = np.zeros(0, np.uint8)
    with open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise BackendError(f"{path} is no plain file; fastroof export c writes plan files")
        if status.st_size:
            octets = np.memmap(file, np.uint8, "r").view(np.ndarray)
    eights = octets[: len(octets) // 8 * 8]
    words, floats = eights.view("<i8"), eights.view("<f8")
    code = loops.plan_bytes_code(octets, words, floats)
    if code:
        raise BackendError(f"{path} {_WRONG[code]}; fastroof export c writes plan files")
    start = loops.FILE_HEADER // 8
    count = int(words[loops.ARENA_FLOATS])
    text = octets[loops.FILE_HEADER + 8 * count :][: int(words[loops.TEXT_BYTES]) - 1]
    return PlanFile(
        floats[start : start + count], parse_json(text.tobytes(), f"the description of {path}", BackendError)
    )


def _open_at_once(path: str, flags: int) -> int:
    """Open a file, and do not wait for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)
