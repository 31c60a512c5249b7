"""Plans on disk: the bits of one made anew, found by all that they are made from, never believed blindly."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastroof
from fastroof.errors import PlanError
from fastroof.plan import kept_plans, plan_identity
from fastroof.plan.kept_plan import KeptPlan, kept_bytes, kept_of, read_kept_plan

KINDS: dict[str, dict[str, Any]] = {
    "dense": {"model": "llama-3.1-8b"},
    "fp8 by an engine": {"model": "llama-3.1-70b", "tp": 4, "dtype": "fp8", "runtime": "vllm"},
    "windows": {"model": "gemma-3-12b"},
    "experts": {"model": "qwen3-235b-a22b", "dp": 8, "ep": 8, "dp_imbalance": 1.5, "runtime": "trtllm"},
    "latent": {"model": "deepseek-v3", "tp": 8, "ep": 8, "runtime": "sglang"},
    "stages": {"model": "llama-3.1-70b", "tp": 2, "pp": 4},
    "uneven stages": {"model": "llama-3.1-8b", "pp": 5},
    "shared prompts": {"model": "llama-3.1-8b", "cp": 4},
    "another method": {"model": "llama-3.1-8b", "method": "nearest"},
}


@pytest.fixture(scope="module", params=KINDS)
def plan(request: pytest.FixtureRequest) -> fastroof.StepPlan:
    options = dict(KINDS[request.param])
    return fastroof.compile_plan(options.pop("model"), "h100", fastroof.load_tables("h100"), **options)


@pytest.fixture(scope="module")
def kept(plan: fastroof.StepPlan) -> KeptPlan:
    return read_kept_plan(kept_bytes(kept_of(plan)))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 1), st.integers(0, 100_000)),
        st.tuples(st.integers(1, 1500), st.integers(0, 30_000)),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=15)
@given(steps=st.lists(STEPS, min_size=1, max_size=4))
def test_a_kept_plan_times_steps_to_the_last_bit(
    plan: fastroof.StepPlan, kept: KeptPlan, steps: list[list[tuple[int, int]]]
) -> None:
    batch = fastroof.StepBatch.from_requests(steps)
    ours, theirs = kept.run(batch), plan.run(batch)
    assert ours.latency_us.tobytes() == theirs.latency_us.tobytes()
    assert ours.origin.tobytes() == theirs.origin.tobytes()
    for one, other in zip(ours.components, theirs.components, strict=True):
        assert one.tobytes() == other.tobytes()
    assert kept.cycle_us(batch) == plan.cycle_us(batch)
    assert ours.made_from == theirs.made_from


def test_a_kept_plan_says_what_the_plan_says(plan: fastroof.StepPlan, kept: KeptPlan) -> None:
    first = kept_of(plan)
    for field in dataclasses.fields(KeptPlan):
        if field.name not in ("arena", "stage_arenas"):
            assert getattr(kept, field.name) == getattr(first, field.name), field.name
    assert kept.memory == plan.memory
    assert (kept.model, kept.gpu, kept.kernels) == (plan.model.name, "h100", plan.kernels)
    assert not kept.arena.flags.writeable
    assert kept.arena.tobytes() == plan.arena.tobytes()
    # stages that are alike are one array, in memory and on disk
    assert len({id(arena) for arena in kept.stage_arenas}) == len({id(one) for one in plan.stage_plans})
    with pytest.raises(fastroof.PlanRangeError, match="the plan times up to"):
        kept.run(fastroof.StepBatch.from_requests([[(plan.max_tokens + 1, 0)]]))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "no sizes": lambda data: data[:15],
    "truncated": lambda data: data[:-8],
    "longer": lambda data: data + bytes(8),
    "no JSON": lambda data: data.replace(b'{"model"', b'["model"', 1),
    "deep JSON": lambda data: (10**6).to_bytes(8, "little") + bytes(8) + b"[" * 10**6,
    "an unknown fact": lambda data: data.replace(b'"gpu_title"', b'"gpu_words"', 1),
    "huge arenas": lambda data: data[:8] + b"\xff" * 8 + data[16:],
    "another arena": lambda data: data.replace(np.float64(1718776436.0).tobytes(), bytes(8), 1),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_bytes_of_another_kind_are_refused(damage: Callable[[bytes], bytes]) -> None:
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"))
    data = kept_bytes(kept_of(plan))
    assert damage(data) != data
    with pytest.raises(ValueError, match="no kept plan"):
        read_kept_plan(damage(data))


# -- on disk -------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of the cache."""
    monkeypatch.setenv("FASTROOF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: f"~/{name}")
    monkeypatch.setenv("FASTROOF_KEEP_PLANS", "auto")
    return tmp_path / "cache" / kept_plans.FOLDER


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def with_digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest() + payload


def test_a_plan_is_kept_and_found(cache: Path) -> None:
    assert kept_plans.find_plan("one") is None
    assert not cache.parent.exists()
    assert kept_plans.keep_plan("one", b"a plan")
    assert kept_plans.find_plan("one") == b"a plan"
    assert kept_plans.find_plan("other") is None
    assert only_file(cache).stat().st_mode & 0o777 == 0o644
    assert kept_plans.keep_plan("one", b"again")
    assert kept_plans.find_plan("one") == b"again"


def swap_for_a_link(file: Path) -> None:
    target = file.parent.parent / "mine"
    file.rename(target)
    file.symlink_to(target)


def swap_for_a_second_name(file: Path) -> None:
    (file.parent.parent / "mine").hardlink_to(file)


def swap_for_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def let_all_write_above(file: Path) -> None:
    file.parent.parent.chmod(0o777)


def swap_the_folder(file: Path) -> None:
    folder = file.parent
    folder.rename(folder.parent / "others")
    folder.symlink_to(folder.parent / "others")
    folder.parent.chmod(0o777)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "one bit": lambda file: file.write_bytes(
        (data := file.read_bytes())[:40] + bytes([data[40] ^ 1]) + data[41:]
    ),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "empty": lambda file: file.write_bytes(b""),
    "another plan's": lambda file: file.write_bytes(with_digest(hashlib.sha256(b"other").digest() + b"x")),
    "all may write it": lambda file: file.chmod(0o666),
    "all may write the folder": lambda file: file.parent.chmod(0o777),
    "all may write above": let_all_write_above,
    "a link": swap_for_a_link,
    "two names": swap_for_a_second_name,
    "a pipe": swap_for_a_pipe,
    "a folder by a link": swap_the_folder,
}


@pytest.mark.parametrize("attack", HOSTILE.values(), ids=HOSTILE)
def test_what_others_may_have_written_or_is_damaged_is_not_taken(
    cache: Path, attack: Callable[[Path], Any]
) -> None:
    assert kept_plans.keep_plan("one", b"a plan")
    attack(only_file(cache))
    assert kept_plans.find_plan("one") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_another_users_file_is_not_taken(cache: Path) -> None:
    kept_plans.keep_plan("one", b"a plan")
    os.chown(only_file(cache), 65_534, 65_534)
    assert kept_plans.find_plan("one") is None


def test_a_file_that_is_not_taken_is_replaced(cache: Path) -> None:
    kept_plans.keep_plan("one", b"a plan")
    file = only_file(cache)
    victim = cache.parent / "victim"
    victim.write_bytes(b"mine")
    file.unlink()
    file.symlink_to(victim)
    assert kept_plans.keep_plan("one", b"anew")
    assert kept_plans.find_plan("one") == b"anew"
    assert victim.read_bytes() == b"mine"
    assert only_file(cache) == file


def test_the_plans_used_last_stay_and_foreign_files_too(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_plans, "MOST_BYTES", 4 * 100 * 10)
    names = [str(number) for number in range(4)]
    for number, name in enumerate(names):
        assert kept_plans.keep_plan(name, bytes(900))
        newest = max(cache.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (number, number))
    foreign = cache / "notes.plan"
    foreign.write_bytes(bytes(5000))
    assert kept_plans.find_plan("0") is not None  # used now
    assert kept_plans.keep_plan("4", bytes(900))
    assert [kept_plans.find_plan(name) is not None for name in (*names, "4")] == [
        True,
        False,
        True,
        True,
        True,
    ]
    assert foreign.exists()
    assert not kept_plans.keep_plan("5", bytes(1001)), "a quarter of the room is the most"


def test_a_plan_may_have_a_quarter_of_32_mib(cache: Path) -> None:
    assert kept_plans.keep_plan("fits", bytes(8 * 2**20))
    assert not kept_plans.keep_plan("is too large", bytes(8 * 2**20 + 1))
    assert only_file(cache).stat().st_size > 8 * 2**20


def test_without_a_folder_plans_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FASTROOF_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert not kept_plans.keep_plan("one", b"a plan")
    assert kept_plans.find_plan("one") is None


@pytest.fixture(scope="module")
def dense() -> fastroof.StepPlan:
    return fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"))


def test_a_plan_is_made_once(cache: Path, dense: fastroof.StepPlan) -> None:
    made = []

    def make() -> fastroof.StepPlan:
        made.append(1)
        return dense

    answers = [kept_plans.kept_plan("one", make) for _ in range(2)]
    assert len(made) == 1
    assert answers[0].arena.tobytes() == answers[1].arena.tobytes()
    # a file with the right digest and other contents: of a version that forgot to say so
    kept_plans.keep_plan("one", b"what is this")
    kept_plans.kept_plan("one", make)
    kept_plans.kept_plan("one", make)
    assert len(made) == 2
    kept_plans.kept_plan(None, make)
    assert len(made) == 3


def test_a_plan_that_warns_is_made_and_warns_every_time(cache: Path, dense: fastroof.StepPlan) -> None:
    def make() -> fastroof.StepPlan:
        warnings.warn("modelled", stacklevel=1)
        return dense

    for _ in range(2):
        with pytest.warns(UserWarning, match="modelled"):
            kept_plans.kept_plan("one", make)
    assert not cache.exists()


# -- what a plan is made from --------------------------------------------------------------------


OPTIONS = {"tp": 1, "runtime": "kernels", "dtype": "auto"}


@pytest.fixture
def tables(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's tables of a GPU, as a copy of what ships."""
    monkeypatch.setenv("FASTROOF_TABLES", str(tmp_path / "tables"))
    folder = tmp_path / "tables" / "h100"
    shipped = fastroof.config.paths.bench_data_root() / "h100"
    source = next(path.parent for path in sorted(shipped.glob("*/provenance.toml")))
    shutil.copytree(source, folder / source.name)
    return folder / source.name


def identity(model: str = "llama-3.1-8b", gpu: str = "h100", **changed: Any) -> str | None:
    options = {**OPTIONS, **changed}
    return plan_identity.plan_identity(
        model, gpu, options.pop("tables", None), options.pop("source", None), options
    )


def test_the_same_plan_has_the_same_identity(tables: Path) -> None:
    assert identity() is not None
    assert identity() == identity()


@pytest.mark.parametrize(
    "other",
    [
        {"model": "llama-3.1-70b"},
        {"gpu": "h200"},
        {"tp": 2},
        {"dtype": "fp8"},
        {"runtime": "vllm"},
        {"source": "aiconfigurator-sglang-0.5.14"},
        {"tables": "h200"},
    ],
    ids=str,
)
def test_another_plan_has_another_identity(tables: Path, other: dict[str, Any]) -> None:
    assert identity(**other) not in (None, identity())


def rewrite(file: Path) -> None:
    """Change a byte, and give the file the size and time that it had."""
    status = file.stat()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_mtime_ns == status.st_mtime_ns


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "a byte of a table": lambda tables, _: rewrite(tables / "gemm.parquet"),
    "a byte of a description": lambda tables, _: rewrite(tables / "provenance.toml"),
    "a table less": lambda tables, _: (tables / "gemm.parquet").unlink(),
    "a source more": lambda tables, _: shutil.copytree(tables, tables.parent / "another"),
    "a note": lambda tables, _: (tables.parent / ".imported.json").write_text("{}"),
    "other tables": lambda tables, patch: patch.setenv("FASTROOF_TABLES", str(tables.parent)),
    "an import": lambda tables, patch: patch.setenv("FASTROOF_TABLES_IMPORT", "auto"),
    "a version": lambda tables, patch: patch.setattr(plan_identity, "__version__", "0"),
    "a processor": lambda tables, patch: patch.setattr(plan_identity, "_processor", lambda: ["flags: none"]),
    "a package": lambda tables, patch: patch.setattr(plan_identity, "_package", lambda: ["elsewhere"]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_changes_is_seen(
    tables: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, pytest.MonkeyPatch], Any]
) -> None:
    before = identity()
    change(tables, monkeypatch)
    assert identity() not in (None, before)


def test_a_change_of_the_code_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: Path) -> None:
    package = tmp_path / "fastroof"
    (package / "plan").mkdir(parents=True)
    source = package / "plan" / "plan_identity.py"
    source.write_text("x = 1\n")
    (package / "plan" / "__pycache__").mkdir()
    monkeypatch.setattr(plan_identity, "__file__", str(source))
    before = identity()
    (package / "plan" / "__pycache__" / "x.pyc").write_text("compiled")
    assert identity() == before
    source.write_text("x = 2\n")
    assert identity() not in (None, before)


def test_files_that_are_named_are_read(tmp_path: Path, tables: Path) -> None:
    config = tmp_path / "own" / "config.json"
    config.parent.mkdir()
    config.write_text('{"hidden_size": 1}')
    seen = {identity(str(config)), identity(str(config.parent))}
    rewrite(config)
    seen |= {identity(str(config)), identity(str(config.parent))}
    (config.parent / "hf_quant_config.json").write_text("{}")
    seen |= {identity(str(config)), identity(str(config.parent))}
    profile = tmp_path / "mine.toml"
    profile.write_text("a = 1")
    seen.add(identity(runtime=str(profile)))
    rewrite(profile)
    seen.add(identity(runtime=str(profile)))
    gpu = tmp_path / "gpu" / "gpu.toml"
    gpu.parent.mkdir()
    gpu.write_text("a = 1")
    seen.add(identity(gpu=str(gpu)))
    rewrite(gpu)
    seen |= {identity(gpu=str(gpu)), identity(gpu=str(gpu.parent))}
    assert None not in seen
    assert len(seen) == 11


def test_a_pipe_is_not_waited_for(tables: Path) -> None:
    before = identity()
    (tables / "provenance.toml").unlink()
    os.mkfifo(tables / "provenance.toml")
    assert identity() not in (None, before)
    os.mkfifo(tables.parent / "config.json")
    assert identity(str(tables.parent / "config.json")) is not None


def test_what_cannot_be_said_cheaply_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: Path
) -> None:
    with monkeypatch.context() as few:
        few.setattr(plan_identity, "MOST_FILES", 10)
        assert identity() is None
    assert identity() is not None
    assert identity("x" * 5000) is None
    monkeypatch.setattr(plan_identity, "LARGEST_DOCUMENT", 3)
    assert identity() is None
    monkeypatch.setenv("FASTROOF_KEEP_PLANS", "never")
    assert identity() is None
    monkeypatch.setenv("FASTROOF_KEEP_PLANS", "no")
    with pytest.raises(PlanError, match="may be auto or never"):
        identity()
