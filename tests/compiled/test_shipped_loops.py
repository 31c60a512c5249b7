"""Loops of a wheel: used where they are for this compiler, Python and processor, refused where damaged."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import llvmlite.binding as llvm
import pytest
from numba.core import config

from fastroof.backends.c import objects
from fastroof.compiled import code_cache, jit, loop_cache, shipped_loops
from tests.compiled.test_code_cache import DAMAGE, ROOT, VALUES, weighted, with_digest

OURS = f"loops-{code_cache.VERSION}"


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Returns ``weighted`` as a new process would have it, with a cache of its own, and a wheel's folder."""
    monkeypatch.setattr(config, "DISABLE_JIT", 0)
    monkeypatch.setattr(shipped_loops, "FOLDER", tmp_path / "loops")
    monkeypatch.setattr(shipped_loops, "host_levels", lambda: ("x86-64-v3",))

    def compiled(folder="home"):
        loop = jit.jit(weighted)
        loop._cache = loop_cache.LoopCache(weighted, lambda: (tmp_path / folder,))
        return loop

    return compiled


@pytest.fixture
def shipped(fresh, tmp_path):
    """Returns the file of ``weighted`` in the wheel's folder, for the level x86-64-v3."""
    loop = fresh("build")
    assert loop(VALUES, 3.0) == 21.0
    (file,) = (tmp_path / "build").iterdir()
    key, parts = pickle.loads(file.read_bytes()[32:])
    key = (*key[:-1], (key[-1][0], "x86-64-v3", ""))
    (tmp_path / "loops" / OURS).mkdir(parents=True)
    shipped = tmp_path / "loops" / OURS / loop._cache._file_name(key)
    shipped.write_bytes(with_digest(pickle.dumps((key, parts))))
    return shipped


def hits(loop):
    assert loop(VALUES, 3.0) == 21.0
    return sum(loop.stats.cache_hits.values())


@pytest.mark.loops
def test_a_shipped_loop_is_not_compiled_and_not_cached(fresh, shipped, tmp_path):
    assert hits(fresh()) == 1
    assert not (tmp_path / "home").exists()


@pytest.mark.loops
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_or_foreign_one_is_refused_and_compiled(fresh, shipped, tmp_path, damage):
    shipped.write_bytes(damage(shipped.read_bytes()))
    assert hits(fresh()) == 0
    assert len(list((tmp_path / "home").iterdir())) == 1
    assert hits(fresh()) == 1


@pytest.mark.loops
def test_it_may_belong_to_anyone_who_may_write_the_sources(fresh, shipped):
    """uv links files of its cache into every environment, and an administrator may install for a group."""
    os.link(shipped, shipped.with_suffix(".linked"))
    shipped.chmod(0o664)
    assert hits(fresh()) == 1


@pytest.mark.loops
def test_another_processor_compiles_for_itself(fresh, shipped, monkeypatch):
    monkeypatch.setattr(shipped_loops, "host_levels", lambda: ())
    assert hits(fresh()) == 0


@pytest.mark.loops
def test_a_processor_chosen_by_the_user_counts(fresh, shipped, monkeypatch):
    monkeypatch.setattr(config, "CPU_NAME", llvm.get_host_cpu_name())
    assert hits(fresh()) == 0
    own = ("x86_64-unknown-linux-gnu", "x86-64-v3", "")
    assert shipped_loops.shipped_cpus(own) == (own,)


@pytest.mark.loops
@pytest.mark.parametrize(
    ("best", "lacking", "levels"),
    [
        ("x86-64-v4", "", ("x86-64-v4", "x86-64-v3")),
        ("x86-64-v4", "avx512vl", ("x86-64-v3",)),
        ("x86-64-v4", "fma", ()),
        ("neoverse-n1", "", ("neoverse-n1",)),
        ("neoverse-n1", "lse", ()),
    ],
)
def test_levels_that_a_processor_runs(monkeypatch, best, lacking, levels):
    every = {feature: feature != lacking for feature in shipped_loops.LEVELS[best]}
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: every)
    shipped_loops.host_levels.cache_clear()
    assert shipped_loops.host_levels() == levels
    shipped_loops.host_levels.cache_clear()


@pytest.mark.loops
def test_why_they_are_not_used(fresh, tmp_path, monkeypatch):
    folder = tmp_path / "loops"
    assert shipped_loops.shipped_loops("0").why_not == "this installation has none"
    folder.mkdir()

    def built(**changed):
        built = {**shipped_loops.compiler_versions(), "levels": ["x86-64-v3"], "loops": 9, **changed}
        (folder / "built_with.json").write_text(json.dumps(built))
        return shipped_loops.shipped_loops("0")

    assert built().why_not == "they are for other sources, or other NUMBA_ settings"
    (folder / "loops-0").mkdir()
    assert built() == (9, "x86-64-v3", "")
    assert built(levels=["x86-64-v4"]).why_not == "they are for x86-64-v4, which this processor does not run"
    here = shipped_loops.compiler_versions()["numba"]
    assert built(numba="0.1").why_not == f"they are for numba 0.1 (here {here})"
    monkeypatch.setattr(config, "CPU_NAME", "haswell")
    assert built().why_not == "NUMBA_CPU_NAME or NUMBA_CPU_FEATURES is set"


ANSWERS = """
import hashlib
import numpy as np
import fastroof

plan = fastroof.compile_plan("llama-3.1-8b", "h100")
random = np.random.default_rng(1)
batch, kv_len = random.integers(1, 257, 999), random.integers(1, 30_000, 999)
requests = [[(1, int(kv)) for kv in random.integers(1, 9000, size)] for size in range(1, 70)]
mixed = [[(int(new), 512) for new in random.integers(1, 300, 3)] + step[1:] for step in requests[3:]]
answers = [
    plan.decode_us(batch, kv_len),
    plan.decode_us(batch.astype(np.int32), kv_len.astype(np.int32)),
    plan.prefill_us(batch * 9, kv_len),
    plan.step_us(fastroof.StepBatch.from_requests(requests)),
    plan.step_us(fastroof.StepBatch.from_requests(mixed)),
    np.array([plan.scalar(64, 4096), plan.step_scalar([1, 512], [4096, 0])]),
]
sim = fastroof.simulate(plan, fastroof.load_trace("example"))
answers += [column.to_numpy() for column in sim.requests.columns]
answers = [answer for answer in answers if answer.dtype != object]  # text is kept by address
print(*(hashlib.sha256(answer.tobytes()).hexdigest() for answer in answers))
"""


@pytest.mark.slow
def test_every_level_answers_with_the_same_bits():
    """Compiled for this processor, and for each level that it runs."""
    answers = []
    for level in ("", *shipped_loops.host_levels()):
        cpu = {"NUMBA_CPU_NAME": level, "NUMBA_CPU_FEATURES": ""} if level else {}
        done = subprocess.run(
            [sys.executable, "-c", ANSWERS],
            env={**os.environ, "PYTHONPATH": str(ROOT), **cpu},
            capture_output=True, text=True, check=True, timeout=600,
        )  # fmt: skip
        answers.append(done.stdout.split())
    assert len(answers[0]) > 6
    assert all(answer == answers[0] for answer in answers)


def test_the_object_file_for_c_comes_with_a_wheel(fresh, monkeypatch, tmp_path):
    """One that is for this system, processor and target; damaged, it is compiled."""
    monkeypatch.setattr(objects, "cache_folders", lambda: (tmp_path / "cache",))
    monkeypatch.setattr(objects, "_compiled", lambda cpu, target: b"compiled")
    triple = objects.cpu_target.target_context.codegen().magic_tuple()[0]
    name = objects._file_name("x86-64-v3", None, (triple, "x86-64-v3", ""))
    (tmp_path / "loops" / OURS).mkdir(parents=True)
    file = tmp_path / "loops" / OURS / name
    file.write_bytes(with_digest(b"shipped"))
    made = objects._object_code.__wrapped__
    assert made("x86-64-v3", None) == b"shipped"
    assert not (tmp_path / "cache").exists()
    file.write_bytes(with_digest(b"shipped")[:-1])
    assert made("x86-64-v3", None) == b"compiled"
    assert made("x86-64-v2", None) == b"compiled"
