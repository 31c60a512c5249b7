"""Plan files with wrong bytes through the C library: what the loop returns in Python, bit by bit."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from fastroof.backends.c import export_c, read_plan_file
from fastroof.compiled import plan_files as loops
from fastroof.compiled.callers import equal_chunks_us, equal_decodes_us, requests_step_us
from fastroof.compiled.steps import CODE_SIZES
from fastroof.errors import BackendError, FastroofError
from tests.fuzz.made_plans import plan_of
from tests.fuzz.target import Target, Wrong
from tests.fuzz.targets.plan_files import SIZES, PlanFiles
from tests.reference.compilers import links_a_library

PLACES = ("pipe", "folder", "empty", "nowhere", "link to nowhere", "a" * 300, "/dev/null", "/dev/zero")
I64, POINTER = ctypes.c_int64, ctypes.c_void_p
TAKES = {
    "fastroof_open": (ctypes.c_char_p, POINTER),
    "fastroof_decode_us": (POINTER, I64, I64, POINTER),
    "fastroof_prefill_us": (POINTER, I64, I64, I64, POINTER),
    "fastroof_step_us": (POINTER, POINTER, POINTER, I64, POINTER),
    "fastroof_verify_us": (POINTER, I64, I64, I64, POINTER),
    "fastroof_memory": (POINTER, POINTER),
    "fastroof_layout": (POINTER, POINTER),
    "fastroof_kv_bytes": (POINTER, I64, POINTER, POINTER),
    "fastroof_kv_transfer_us": (POINTER, POINTER, I64, ctypes.c_double, ctypes.c_double, POINTER),
    "fastroof_pipeline_us": (POINTER, POINTER, POINTER, I64, POINTER, I64, POINTER, POINTER),
    "fastroof_num_stages": (POINTER,),
    "fastroof_stage": (POINTER, I64),
}
CHUNKS = ((1, 0, 1), (16, 0, 1), (4, 100, 3), (17, 0, 1), (5, 2**28, 1))
STEPS = (([1, 5], [100, 0]), ([1] * 4, [9, 99, 999, 7]), ([16], [0]), ([1, 2], [-1, 5]), ([], []))


class PlanFilesInC(PlanFiles):
    """The cases of ``plan.file``, and paths of what is no file at all.

    The library opens what the loop takes; ``read_plan_file`` looks at descriptions and times besides, and
    refuses some of these.
    """

    name = "plan.file.c"
    ci_cases = 400

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        plans = {"one": plan_of(max_num_batched_tokens=16, max_num_seqs=4)}
        exported = export_c(plans, folder / "c", shared=None if links_a_library() else False)
        path = next((path for path in exported.files if path.suffix in (".so", ".dylib")), None)
        # without a C compiler there is no library, and these are the cases of plan.file
        self.library = None if path is None else ctypes.CDLL(str(path))
        if self.library is not None:
            for name, takes in TAKES.items():
                getattr(self.library, name).argtypes = takes
            self.library.fastroof_num_stages.restype = I64
            self.library.fastroof_stage.restype = POINTER
            self.library.fastroof_close.argtypes = (POINTER,)
            self.library.fastroof_close.restype = None
        os.mkfifo(folder / "pipe")
        (folder / "folder").mkdir()
        (folder / "empty").touch()
        (folder / "link to nowhere").symlink_to("nowhere")

    def close(self) -> None:
        shutil.rmtree(self.folder / "c", ignore_errors=True)

    def case(self, random: Random) -> bytes:
        if random.random() < 0.02:
            return f"path {random.choice(PLACES)}".encode()
        return super().case(random)

    def check(self, case: bytes) -> None:
        if self.library is None:
            super().check(case)
            return
        word, _, name = case.decode().partition(" ")
        if word == "path":
            self.refused(self.folder / name)
        self.path.unlink(missing_ok=True)  # what was mapped keeps its bytes
        content = self.content(case)
        self.path.write_bytes(content)
        expected, arena = _loop(content)
        plan = POINTER()
        code = self.library.fastroof_open(os.fsencode(self.path), ctypes.byref(plan))
        if code != expected or (plan.value is None) != (code != 0):
            raise Wrong(f"fastroof_open returns {code}, the loop in Python {expected}")
        try:
            if code == 0:
                self.timed(plan, arena)
                self.facts(plan)
            read_plan_file(self.path)
        finally:
            self.library.fastroof_close(plan)
        if code:
            raise Wrong(f"read_plan_file takes what fastroof_open refuses with {code}")

    def refused(self, path: Path) -> None:
        """Refuse what is no file, in both."""
        plan = POINTER()
        code = self.library.fastroof_open(os.fsencode(path), ctypes.byref(plan))  # type: ignore[union-attr]
        if code not in (loops.CODE_IO, loops.CODE_FOREIGN) or plan.value is not None:
            raise Wrong(f"fastroof_open of {path} returns {code}")
        try:
            read_plan_file(path)
        except (BackendError, OSError) as error:
            raise FastroofError(str(error)) from None
        raise Wrong(f"{path} is read")

    def timed(self, plan: Any, arena: Any) -> None:
        sizes = [(*size,) for size in SIZES]
        for batch_size, kv_len in (*sizes, (0, 1), (5, 1), (1, 2**63 - 1), (-(2**63), 5)):
            self.one("decode_us", equal_decodes_us(arena, batch_size, kv_len), plan, batch_size, kv_len)
        for chunk in CHUNKS:
            self.one("prefill_us", equal_chunks_us(arena, *chunk), plan, *chunk)
        for requests in STEPS:
            new, context = (np.array(each, np.int64) for each in requests)
            found = requests_step_us(arena, new, context)
            self.one("step_us", found, plan, new.ctypes.data, context.ctypes.data, len(new))

    def one(self, name: str, expected: float, *given: Any) -> None:
        us = ctypes.c_double(-1.0)
        code = getattr(self.library, f"fastroof_{name}")(*given, ctypes.byref(us))
        if math.isnan(expected):
            if code != CODE_SIZES:
                raise Wrong(f"fastroof_{name} returns {code} for what cannot be timed")
        elif code or us.value != expected:
            raise Wrong(f"fastroof_{name} returns {code}, {us.value!r}, the loop in Python {expected!r}")

    def facts(self, plan: Any) -> None:
        """Read all other facts of a file; stages are plans, within the file."""
        library: Any = self.library
        held = np.full(32, 7, np.int64)
        for function in (library.fastroof_memory, library.fastroof_layout):
            function(plan, held.ctypes.data)
        if not (held[16:] == 7).all():
            raise Wrong("facts are written beyond their place")
        out, steps = np.zeros(256), [np.array(one, np.int64) for one in ([1, 1, 5], [9, 99, 0], [0, 2, 3])]
        to, (new, context, offsets) = out.ctypes.data, (one.ctypes.data for one in steps)
        library.fastroof_kv_bytes(plan, 2**28, to, to)
        library.fastroof_kv_transfer_us(plan, plan, 2**28, 0.0, 0.0, to)
        library.fastroof_pipeline_us(plan, new, context, 3, offsets, 2, to, to)
        us = ctypes.c_double(-1.0)
        for tokens in (1, 2, 5):
            if library.fastroof_verify_us(plan, 2, 100, tokens, ctypes.byref(us)) == 0 and math.isnan(
                us.value
            ):
                raise Wrong("a verification takes NaN")
        for stage in range(min(library.fastroof_num_stages(plan), 8)):
            one = library.fastroof_stage(plan, stage)
            if (
                one
                and library.fastroof_decode_us(one, 1, 100, ctypes.byref(us)) == 0
                and math.isnan(us.value)
            ):
                raise Wrong("a stage takes NaN")


def _loop(content: bytes) -> tuple[int, Any]:
    """Return the code that the loop gives to bytes in Python, and the arena."""
    octets = np.frombuffer(content, np.uint8)
    eights = octets[: len(octets) // 8 * 8]
    words, floats = eights.view("<i8"), eights.view("<f8")
    code = int(loops.plan_bytes_code(octets, words, floats))
    start = loops.FILE_HEADER // 8
    return code, None if code else floats[start : start + int(words[loops.ARENA_FLOATS])]


TARGETS: list[type[Target]] = [PlanFilesInC]
