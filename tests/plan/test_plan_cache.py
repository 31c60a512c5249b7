"""Cached plans: the same bits as a compiled plan, found by all it is compiled from, always verified."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import os
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
from fastroof.file_access import read_bytes
from fastroof.plan import plan_cache
from fastroof.plan.plan_cache import CachedPlan

KINDS: dict[str, dict[str, Any]] = {
    "dense": {"model": "llama-3.1-8b"},
    "fp8 by an engine": {"model": "llama-3.1-70b", "tp": 4, "dtype": "fp8", "engine": "vllm"},
    "windows": {"model": "gemma-3-12b"},
    "experts": {"model": "qwen3-235b-a22b", "dp": 8, "ep": 8, "dp_imbalance": 1.5, "engine": "trtllm"},
    "latent": {"model": "deepseek-v3", "tp": 8, "ep": 8, "engine": "sglang"},
    "stages": {"model": "llama-3.1-70b", "tp": 2, "pp": 4},
    "uneven stages": {"model": "llama-3.1-8b", "pp": 5},
    "shared prompts": {"model": "llama-3.1-8b", "cp": 4},
    "another method": {"model": "llama-3.1-8b", "method": "nearest"},
    "adapters": {"model": "qwen3-30b-a3b", "tp": 2, "engine": "vllm", "lora": "16:4"},
}


@pytest.fixture(scope="module", params=KINDS)
def plan(request: pytest.FixtureRequest) -> fastroof.StepPlan:
    options = dict(KINDS[request.param])
    return fastroof.compile_plan(
        options.pop("model"), "h100", fastroof.load_tables("h100"), **{"engine": "kernels", **options}
    )


@pytest.fixture(scope="module")
def cached(plan: fastroof.StepPlan) -> CachedPlan:
    return CachedPlan.from_bytes(CachedPlan.of(plan).to_bytes())


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
def test_a_cached_plan_times_steps_to_the_last_bit(
    plan: fastroof.StepPlan, cached: CachedPlan, steps: list[list[tuple[int, int]]]
) -> None:
    batch = fastroof.StepBatch.from_requests(steps)
    ours, theirs = cached.run(batch), plan.run(batch)
    assert ours.latency_us.tobytes() == theirs.latency_us.tobytes()
    assert ours.origin.tobytes() == theirs.origin.tobytes()
    for one, other in zip(ours.components, theirs.components, strict=True):
        assert one.tobytes() == other.tobytes()
    assert cached.cycle_us(batch) == plan.cycle_us(batch)
    assert ours.made_from == theirs.made_from


def test_a_cached_plan_has_the_facts_of_the_plan(plan: fastroof.StepPlan, cached: CachedPlan) -> None:
    first = CachedPlan.of(plan)
    for field in dataclasses.fields(CachedPlan):
        if field.name not in ("arena", "stage_arenas"):
            assert getattr(cached, field.name) == getattr(first, field.name), field.name
    assert cached.memory == plan.memory
    assert (cached.model, cached.gpu, cached.kernels) == (plan.model.name, "h100", plan.kernels)
    assert not cached.arena.flags.writeable
    assert cached.arena.tobytes() == plan.arena.tobytes()
    # stages that are alike are one array, in memory and on disk
    assert len({id(arena) for arena in cached.stage_arenas}) == len({id(one) for one in plan.stage_plans})
    with pytest.raises(fastroof.PlanRangeError, match="the plan times up to"):
        cached.run(fastroof.StepBatch.from_requests([[(plan.max_num_batched_tokens + 1, 0)]]))


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
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"), engine="kernels")
    data = CachedPlan.of(plan).to_bytes()
    assert damage(data) != data
    with pytest.raises(ValueError, match="not a cached plan"):
        CachedPlan.from_bytes(damage(data))


# -- on disk -------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of the cache."""
    monkeypatch.setenv("FASTROOF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: f"~/{name}")
    monkeypatch.setenv("FASTROOF_KEEP_PLANS", "auto")
    return tmp_path / "cache" / plan_cache.FOLDER


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def with_digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest() + payload


def test_a_plan_is_stored_and_found(cache: Path) -> None:
    assert plan_cache.find_plan("one") is None
    assert not cache.parent.exists()
    assert plan_cache.store_plan("one", b"a plan")
    assert plan_cache.find_plan("one") == b"a plan"
    assert plan_cache.find_plan("other") is None
    assert only_file(cache).stat().st_mode & 0o777 == 0o644
    assert plan_cache.store_plan("one", b"again")
    assert plan_cache.find_plan("one") == b"again"


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
    assert plan_cache.store_plan("one", b"a plan")
    attack(only_file(cache))
    assert plan_cache.find_plan("one") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_another_users_file_is_not_taken(cache: Path) -> None:
    plan_cache.store_plan("one", b"a plan")
    os.chown(only_file(cache), 65_534, 65_534)
    assert plan_cache.find_plan("one") is None


def test_a_file_that_is_not_taken_is_replaced(cache: Path) -> None:
    plan_cache.store_plan("one", b"a plan")
    file = only_file(cache)
    victim = cache.parent / "victim"
    victim.write_bytes(b"mine")
    file.unlink()
    file.symlink_to(victim)
    assert plan_cache.store_plan("one", b"anew")
    assert plan_cache.find_plan("one") == b"anew"
    assert victim.read_bytes() == b"mine"
    assert only_file(cache) == file


def test_the_plans_used_last_stay_and_foreign_files_too(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MAX_BYTES", 4 * 100 * 10)
    names = [str(number) for number in range(4)]
    for number, name in enumerate(names):
        assert plan_cache.store_plan(name, bytes(900))
        newest = max(cache.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (number, number))
    foreign = cache / "notes.plan"
    foreign.write_bytes(bytes(5000))
    assert plan_cache.find_plan("0") is not None  # used now
    assert plan_cache.store_plan("4", bytes(900))
    assert [plan_cache.find_plan(name) is not None for name in (*names, "4")] == [
        True,
        False,
        True,
        True,
        True,
    ]
    assert foreign.exists()
    assert not plan_cache.store_plan("5", bytes(1001)), "a quarter of the room is the most"


def test_a_plan_may_have_a_quarter_of_32_mib(cache: Path) -> None:
    assert plan_cache.store_plan("fits", bytes(8 * 2**20))
    assert not plan_cache.store_plan("is too large", bytes(8 * 2**20 + 1))
    assert only_file(cache).stat().st_size > 8 * 2**20


def test_without_a_folder_plans_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FASTROOF_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert not plan_cache.store_plan("one", b"a plan")
    assert plan_cache.find_plan("one") is None


@pytest.fixture(scope="module")
def dense() -> fastroof.StepPlan:
    return fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"), engine="kernels")


def test_a_plan_is_made_once(cache: Path, dense: fastroof.StepPlan) -> None:
    made = []

    def make() -> fastroof.StepPlan:
        made.append(1)
        return dense

    answers = [plan_cache.cached_plan("one", make)[0] for _ in range(2)]
    assert len(made) == 1
    assert answers[0].arena.tobytes() == answers[1].arena.tobytes()
    # a file with the right digest and other contents: of a version that forgot its own number
    plan_cache.store_plan("one", b"what is this")
    plan_cache.cached_plan("one", make)
    plan_cache.cached_plan("one", make)
    assert len(made) == 2
    plan_cache.cached_plan(None, make)
    assert len(made) == 3


def test_the_error_of_a_step_is_made_once_for_a_plan(cache: Path, dense: fastroof.StepPlan) -> None:
    made = []

    def error(stored: str | None, requests: str) -> float:
        return plan_cache.cached_error(stored, requests, lambda: made.append(requests) or 1 / 3)

    assert error(None, "no plan") == error(None, "no plan") == 1 / 3
    for requests in ("one", "one", "two"):
        _, stored = plan_cache.cached_plan("a", lambda: dense)
        assert error(stored, requests) == 1 / 3
    assert made == ["no plan", "no plan", "one", "two"]
    # the same plan of other files
    (cache.parent / "more").write_text("")
    plan_cache.store_plan("a", b"damaged")
    _, other = plan_cache.cached_plan("a", lambda: (read_bytes(cache.parent / "more"), dense)[1])
    assert error(other, "one") == 1 / 3
    assert made[4:] == ["one"]


def test_a_plan_is_made_again_once_a_file_of_it_has_changed(
    cache: Path, tmp_path: Path, dense: fastroof.StepPlan
) -> None:
    made, file = [], tmp_path / "file"
    file.write_text("one")

    def make() -> fastroof.StepPlan:
        made.append(read_bytes(file))
        return dense

    for content in ("one", "one", "two", "two", "one"):
        file.write_text(content)
        plan_cache.cached_plan("one", make)
    assert made == [b"one", b"two", b"one"]


def test_a_plan_whose_files_change_while_it_is_made_is_not_cached(
    cache: Path, tmp_path: Path, dense: fastroof.StepPlan
) -> None:
    file = tmp_path / "file"

    def make() -> fastroof.StepPlan:
        for content in ("one", "two"):
            file.write_text(content)
            read_bytes(file)
        return dense

    plan_cache.cached_plan("one", make)
    assert not cache.exists()


def test_a_plan_that_warns_is_made_and_warns_every_time(cache: Path, dense: fastroof.StepPlan) -> None:
    def make() -> fastroof.StepPlan:
        warnings.warn("modelled", stacklevel=1)
        return dense

    for _ in range(2):
        with pytest.warns(UserWarning, match="modelled"):
            plan_cache.cached_plan("one", make)
    assert not cache.exists()


# -- what a plan is asked for --------------------------------------------------------------------


OPTIONS = {"tp": 1, "engine": "kernels", "dtype": "auto"}


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run just after their code was written, too."""
    monkeypatch.setattr(plan_cache, "SETTLED_NS", 0)
    monkeypatch.setenv("FASTROOF_KEEP_PLANS", "auto")


def identity(model: str = "llama-3.1-8b", gpu: str = "h100", **changed: Any) -> str | None:
    options = {**OPTIONS, **changed}
    return plan_cache.plan_identity(
        model, gpu, options.pop("tables", None), options.pop("source", None), options
    )


def test_the_same_plan_has_the_same_identity() -> None:
    assert identity() is not None
    assert identity() == identity()


def option_names() -> list[str]:
    """All that `fastroof step` may ask of a plan."""
    known = inspect.signature(fastroof.compile_plan).parameters
    return [name for name in known if name not in ("model", "gpu", "tables", "curves")]


@pytest.mark.parametrize(
    "other",
    [
        {"model": "llama-3.1-70b"},
        {"gpu": "h200"},
        {"source": "aiconfigurator-sglang-0.5.14"},
        {"tables": "h200"},
        *({name: "other"} for name in option_names()),
    ],
    ids=str,
)
def test_another_plan_has_another_identity(other: dict[str, Any]) -> None:
    assert identity(**other) not in (None, identity())


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "other tables": lambda folder, patch: patch.setenv("FASTROOF_TABLES", str(folder)),
    "another home": lambda folder, patch: patch.setattr(
        "platformdirs.user_data_dir", lambda name: str(folder)
    ),
    "no home": lambda folder, patch: patch.setattr("platformdirs.user_data_dir", lambda name: f"~/{name}"),
    "shipped tables": lambda folder, patch: patch.setattr(plan_cache, "bench_data_root", lambda: folder),
    "an import": lambda folder, patch: patch.setenv("FASTROOF_TABLES_IMPORT", "auto"),
    **{
        f"a {name}": lambda folder, patch, name=name: patch.setenv(name, str(folder))
        for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
    },
    "a version": lambda folder, patch: patch.setattr(plan_cache, "__version__", "0"),
    "a processor": lambda folder, patch: patch.setattr(plan_cache, "_processor", lambda: ["flags: none"]),
    "a package": lambda folder, patch: patch.setattr(plan_cache, "_package", lambda: ["elsewhere"]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_changes_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, pytest.MonkeyPatch], Any]
) -> None:
    monkeypatch.delenv("FASTROOF_TABLES", raising=False)
    monkeypatch.setenv("FASTROOF_TABLES_IMPORT", "never")
    before = identity()
    change(tmp_path, monkeypatch)
    assert identity() not in (None, before)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The code, as if it were this file alone."""
    source = tmp_path / "fastroof" / "plan" / "plan_identity.py"
    source.parent.mkdir(parents=True)
    source.write_text("x = 1\n")
    (source.parent / "__pycache__").mkdir()
    monkeypatch.setattr(plan_cache, "__file__", str(source))
    return source


def test_a_change_of_the_code_is_seen(package: Path) -> None:
    before = identity()
    (package.parent / "__pycache__" / "x.pyc").write_text("compiled")
    assert identity() == before
    status = package.stat()
    package.write_text("x = 2\n")
    os.utime(package, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert identity() not in (None, before)


def test_code_that_has_just_changed_may_not_be_what_runs(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert identity() is not None
    monkeypatch.setattr(plan_cache, "SETTLED_NS", 2 * 10**9)
    assert identity() is None


def test_plans_without_cheap_keys_are_not_cached(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert identity() is not None
    assert identity(routing=b"bytes") is None
    with monkeypatch.context() as few:
        few.setattr(plan_cache, "MAX_FILES", 2)
        assert identity() is None
    monkeypatch.setenv("FASTROOF_KEEP_PLANS", "never")
    assert identity() is None
    monkeypatch.setenv("FASTROOF_KEEP_PLANS", "no")
    with pytest.raises(PlanError, match="must be auto or never"):
        identity()
