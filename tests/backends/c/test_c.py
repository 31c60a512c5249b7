"""Plans in C: the same bits as in Python, and a code for every file that is not a plan's."""

from __future__ import annotations

import csv
import ctypes
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

import fastroof
from fastroof.backends.c import export_c, read_plan_file, write_plan_file
from fastroof.backends.c.objects import DEFAULT_CPU, object_code
from fastroof.compiled import plan_files, ragged_steps, steps
from fastroof.compiled.c_api import C_LIBRARY
from fastroof.errors import BackendError

SAMPLE = Path(__file__).parents[2] / "golden_sample" / "roofline_v2" / "step_times.csv"
I64, F64, PLAN = ctypes.c_int64, ctypes.POINTER(ctypes.c_double), ctypes.c_void_p
ARRAY = ctypes.c_void_p


@pytest.fixture(scope="module")
def plans(h100):
    return {
        "bf16": fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="kernels"),
        "fp8": fastroof.compile_plan(
            "llama-3.1-70b",
            "h100",
            h100,
            tp=4,
            dtype="fp8",
            kv_dtype="fp8",
            engine="vllm",
            max_num_batched_tokens=4096,
        ),
        "rate": fastroof.compile_plan(
            "qwen2.5-7b", "h100", h100, method="linear_mfu", max_num_seqs=256, engine="kernels"
        ),
        "windowed": fastroof.compile_plan("gemma-3-12b", "h100", h100, engine="kernels"),
    }


@pytest.fixture(scope="module")
def library(loaded):
    loaded.fastroof_open.argtypes = (ctypes.c_char_p, ctypes.POINTER(PLAN))
    loaded.fastroof_open_bytes.argtypes = (ctypes.c_void_p, I64, ctypes.POINTER(PLAN))
    loaded.fastroof_close.argtypes = (PLAN,)
    loaded.fastroof_close.restype = None
    loaded.fastroof_describe.argtypes = (PLAN,)
    loaded.fastroof_describe.restype = ctypes.c_char_p
    for name in ("fastroof_max_tokens", "fastroof_max_seqs"):
        getattr(loaded, name).argtypes = (PLAN,)
        getattr(loaded, name).restype = I64
    loaded.fastroof_decode_us.argtypes = (PLAN, I64, I64, F64)
    loaded.fastroof_prefill_us.argtypes = (PLAN, I64, I64, I64, F64)
    loaded.fastroof_step_us.argtypes = (PLAN, ARRAY, ARRAY, I64, F64)
    loaded.fastroof_decode_steps_us.argtypes = (PLAN, ARRAY, ARRAY, I64, ARRAY)
    loaded.fastroof_steps_us.argtypes = (PLAN, ARRAY, ARRAY, I64, ARRAY, I64, ARRAY)
    return loaded


class CPlan:
    """A plan through the shared library."""

    def __init__(self, library, path):
        self.library, self.plan = library, PLAN()
        assert library.fastroof_open(str(path).encode(), ctypes.byref(self.plan)) == 0

    def one(self, name, *sizes):
        us = ctypes.c_double(-1.0)
        code = getattr(self.library, name)(self.plan, *sizes, ctypes.byref(us))
        return us.value if code == 0 else code

    def step(self, new, context):
        new, context = np.array(new, np.int64), np.array(context, np.int64)
        return self.one("fastroof_step_us", new.ctypes.data, context.ctypes.data, len(new))


@pytest.fixture(params=["bf16", "fp8", "rate", "windowed"])
def both(request, plans, exported, library):
    c_plan = CPlan(library, exported.plans[request.param])
    yield plans[request.param], c_plan
    library.fastroof_close(c_plan.plan)


def golden_steps(path):
    """The steps of the published golden set, as (new_tokens, context_len)."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            prefills = [
                tuple(map(int, re.findall(r"\d+", pair))) for pair in row["prefill_requests"].split(";")
            ]
            prefills = [pair for pair in prefills if len(pair) == 2]
            decodes = [int(text) for text in row["decode_progress"].split(";") if text]
            yield (
                [new for _, new in prefills] + [1] * len(decodes),
                [progress for progress, _ in prefills] + decodes,
            )


def same_as_python(plan, c_plan, path):
    timed = 0
    for new, context in golden_steps(path):
        try:
            expected = plan.step_scalar(new, context)
        except fastroof.FastroofError:
            expected = 1
        else:
            timed += 1
        assert c_plan.step(new, context) == expected
    return timed


@pytest.mark.slow
def test_golden_steps_have_the_bits_of_python(both):
    assert same_as_python(*both, SAMPLE) > 10


@pytest.mark.slow
def test_every_golden_step_has_the_bits_of_python(both, shared):
    assert same_as_python(*both, shared / "golden" / "roofline_v2" / "step_times.csv") > 300


def test_any_steps_have_the_bits_of_python(both):
    plan, c_plan = both
    random = np.random.default_rng(8)
    for _ in range(3000):
        batch, kv_len = int(random.integers(1, plan.max_num_seqs + 1)), int(2 ** random.uniform(0, 20))
        assert c_plan.one("fastroof_decode_us", batch, kv_len) == plan.decode_us(batch, kv_len)
        chunks = int(random.integers(1, 5))
        new, context = (
            int(random.integers(1, plan.max_num_batched_tokens // chunks)),
            int(random.integers(0, 9999)),
        )
        expected = plan.prefill_us(new, context, chunks)
        assert c_plan.one("fastroof_prefill_us", new, context, chunks) == expected
        requests = int(random.integers(0, 33))
        news = random.choice([1, 1, 1, 64, 100], requests)
        contexts = random.integers(0, 5000, requests)
        assert c_plan.step(news, contexts) == plan.step_scalar(news, contexts)


def test_many_steps_a_call(both):
    plan, c_plan = both
    random = np.random.default_rng(9)
    batch, kv_len = random.integers(1, plan.max_num_seqs + 1, 5000), random.integers(1, 99_999, 5000)
    out = np.empty(5000)
    data = [array.ctypes.data for array in (batch, kv_len, out)]
    assert c_plan.library.fastroof_decode_steps_us(c_plan.plan, *data[:2], 5000, data[2]) == 0
    assert out.tolist() == plan.decode_us(batch, kv_len).tolist()
    counts = random.integers(0, 20, 1000)
    offsets = np.r_[0, np.cumsum(counts)]
    new, context = random.choice([1, 1, 50], counts.sum()), random.integers(0, 5000, counts.sum())
    ragged = (new.ctypes.data, context.ctypes.data, len(new), offsets.ctypes.data)
    out = np.empty(1000)
    assert c_plan.library.fastroof_steps_us(c_plan.plan, *ragged, 1000, out.ctypes.data) == 0
    assert out.tolist() == plan.step_us(fastroof.StepBatch(new, context, offsets)).tolist()
    offsets[3] = -1
    assert (
        c_plan.library.fastroof_steps_us(c_plan.plan, *ragged, 1000, out.ctypes.data)
        == ragged_steps.CODE_OFFSETS
    )


def test_sizes_that_cannot_be_timed_have_a_code(both):
    plan, c_plan = both
    for batch, kv_len in (
        (0, 5),
        (-1, 5),
        (plan.max_num_seqs + 1, 5),
        (1, 0),
        (1, 2**28 + 1),
        (2**63 - 1, 2**62),
    ):
        assert c_plan.one("fastroof_decode_us", batch, kv_len) == steps.CODE_SIZES
    for sizes in (
        (0, 0, 1),
        (plan.max_num_batched_tokens, 0, 2),
        (1, -1, 1),
        (2**40, 0, 2**40),
        (5, 2**28, 1),
    ):
        assert c_plan.one("fastroof_prefill_us", *sizes) == steps.CODE_SIZES
    assert c_plan.step([0], [5]) == steps.CODE_SIZES
    assert c_plan.step([1], [-5]) == steps.CODE_SIZES
    assert c_plan.one("fastroof_step_us", None, None, -1) == steps.CODE_SIZES
    assert c_plan.one("fastroof_step_us", None, None, 0) == 0.0


def test_a_plan_describes_itself(both):
    plan, c_plan = both
    facts = json.loads(c_plan.library.fastroof_describe(c_plan.plan))
    assert (facts["model"], facts["tp"], facts["engine"]) == (plan.model.name, plan.tp, plan.engine)
    assert facts["tables_hash"] == plan.tables_hash
    assert c_plan.library.fastroof_max_tokens(c_plan.plan) == plan.max_num_batched_tokens
    assert c_plan.library.fastroof_max_seqs(c_plan.plan) == plan.max_num_seqs


@pytest.mark.slow
def test_invalid_plan_files_return_a_code(library, exported, tmp_path):
    whole = exported.plans["bf16"].read_bytes()
    flipped = whole[:1000] + bytes([whole[1000] ^ 16]) + whole[1001:]
    newer = whole[:8] + b"\x09" + whole[9:]
    made = {
        "empty": (b"", plan_files.CODE_FOREIGN),
        "text": (b"batch_size,kv_len\n" * 99, plan_files.CODE_FOREIGN),
        "truncated": (whole[:5000], plan_files.CODE_TRUNCATED),
        "longer": (whole + bytes(8), plan_files.CODE_TRUNCATED),
        "header": (whole[:20], plan_files.CODE_TRUNCATED),
        "newer": (newer, plan_files.CODE_VERSION),
        "flipped": (flipped, plan_files.CODE_CORRUPT),
    }
    plan = PLAN()
    for name, (content, code) in made.items():
        path = tmp_path / name
        path.write_bytes(content)
        assert library.fastroof_open(str(path).encode(), ctypes.byref(plan)) == code, name
        assert plan.value is None
        with pytest.raises(BackendError, match=name):
            read_plan_file(path)
    for missing in (tmp_path / "nowhere", tmp_path):
        assert library.fastroof_open(str(missing).encode(), ctypes.byref(plan)) == plan_files.CODE_IO
    assert library.fastroof_open(None, ctypes.byref(plan)) == plan_files.CODE_IO
    library.fastroof_close(None)


def test_bytes_mapped_by_the_caller(library, exported, plans):
    content = np.fromfile(exported.plans["fp8"], np.uint8)
    plan, us = PLAN(), ctypes.c_double()
    assert library.fastroof_open_bytes(content.ctypes.data, len(content), ctypes.byref(plan)) == 0
    assert library.fastroof_decode_us(plan, 8, 1000, ctypes.byref(us)) == 0
    assert us.value == plans["fp8"].decode_us(8, 1000)
    odd = plan_files.CODE_IO
    assert library.fastroof_open_bytes(content.ctypes.data + 4, len(content) - 4, ctypes.byref(plan)) == odd
    assert library.fastroof_open_bytes(None, 0, ctypes.byref(plan)) == odd
    short = plan_files.CODE_FOREIGN
    assert library.fastroof_open_bytes(content.ctypes.data, -5, ctypes.byref(plan)) == short


OPENED = """
import ctypes, sys
plan = ctypes.c_void_p()
library = ctypes.CDLL(sys.argv[1])
print(*(library.fastroof_open(path.encode(), ctypes.byref(plan)) for path in sys.argv[2:]))
"""


def test_irregular_files_are_refused_without_waiting(loaded, tmp_path):
    pipe, socket_file = tmp_path / "pipe", tmp_path / "socket"
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(socket_file))
        paths = [*map(str, (pipe, tmp_path, socket_file)), "/dev/zero", "/dev/tty", "/dev/null"]
        done = subprocess.run(
            [sys.executable, "-c", OPENED, loaded._name, *paths],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert {int(code) for code in done.stdout.split()} <= {plan_files.CODE_IO, plan_files.CODE_FOREIGN}
        for path in paths:
            with pytest.raises(
                (BackendError, OSError), match=r"is no plain file|o such device|s a directory"
            ):
                read_plan_file(path)


def test_the_object_calls_the_c_library_alone(exported):
    """Numba's helpers and Python are gone from it: a program links without them."""
    path = next(path for path in exported.files if path.suffix == ".o")
    names = subprocess.run(["nm", "-u", path], capture_output=True, text=True, check=True).stdout.split()[
        1::2
    ]
    # what any compiler may make of a loop is of libc too
    assert set(names) <= {*C_LIBRARY, "memset", "_GLOBAL_OFFSET_TABLE_"}


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.skipif(DEFAULT_CPU != "x86-64-v3", reason="registers of x86-64")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_the_object_is_for_the_cpu_that_was_named(exported, tmp_path):
    def registers(path):
        listing = subprocess.run(["objdump", "-d", path], capture_output=True, text=True, check=True).stdout
        return {name for name in ("xmm", "ymm", "zmm", "%k1") if name in listing}

    path = next(path for path in exported.files if path.suffix == ".o")
    assert registers(path) == {"xmm", "ymm"}
    old = tmp_path / "old.o"
    old.write_bytes(object_code("x86-64-v2"))
    assert registers(old) == {"xmm"}


def test_python_reads_plan_files(plans, tmp_path):
    path = tmp_path / "some.plan"
    write_plan_file(plans["fp8"], path)
    arena, description = read_plan_file(path)
    assert description["name"] == "some"
    assert arena.tobytes() == plans["fp8"].arena.tobytes()
    step_us, _ = fastroof.numba_step(plans["fp8"])
    new, context = np.array([1, 1, 512]), np.array([99, 1500, 0])
    assert step_us(arena, new, context) == plans["fp8"].step_scalar([1, 1, 512], [99, 1500, 0])
    assert zlib.crc32(path.read_bytes()[16:]) == int.from_bytes(path.read_bytes()[12:16], "little")


@pytest.mark.slow
def test_exports_that_cannot_be(plans, tmp_path, monkeypatch):
    with pytest.raises(BackendError, match="no plan"):
        export_c({}, tmp_path)
    for name in ("../x", "", ".hidden", "a/b"):
        with pytest.raises(BackendError, match="name of a plan file"):
            export_c({name: plans["bf16"]}, tmp_path)
    with pytest.raises(BackendError, match="LLVM knows no CPU 'pentium9' of "):
        export_c({"a": plans["bf16"]}, tmp_path, cpu="pentium9")
    a_file = tmp_path / "file"
    a_file.write_text("kept")
    with pytest.raises(BackendError, match="is a file"):
        export_c({"a": plans["bf16"]}, a_file, shared=False)
    assert a_file.read_text() == "kept"
    monkeypatch.setenv("CC", "no-such-compiler")
    done = export_c({"a": plans["bf16"]}, tmp_path / "new")
    assert "no C compiler" in done.without
    assert not any(path.suffix == ".so" for path in done.files)
    with pytest.raises(BackendError, match="does not exist; create it"):
        write_plan_file(plans["bf16"], tmp_path / "nowhere" / "a.plan")
    with pytest.raises(BackendError, match="is a folder"):
        write_plan_file(plans["bf16"], tmp_path)
