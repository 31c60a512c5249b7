"""The cache of compiled loops: its place, its owner, its absence, and damaged files."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numba.core import config

from fastroof.compiled import code_cache, dispatcher, jit, loop_cache, shipped_loops
from fastroof.compiled import trusted_files as trusted_folders

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import numpy as np
from fastroof.compiled import guides as search
answer = search.bracket(np.array([0.0, 1.0, 2.0]), 0, 3, 1.5)
statistics = getattr(search.bracket, "stats", None)
print(answer, sum(statistics.cache_hits.values()) if statistics else 0, statistics and statistics.cache_path)
if statistics and statistics.cache_hits:
    from numba.core.runtime.nrt import rtsys
    assert "numba.np.arraymath" not in sys.modules, "loaded code needs nothing that compiles, and no SciPy"
    assert not rtsys._init, "loaded code has Numba's runtime linked in"
"""


def run(**environment: str) -> list[str]:
    """Run a loop in a process of its own, and return what it answered, its cache hits and folder."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NUMBA_", "COV_", "COVERAGE_"))
    }
    environment = {**kept, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env=environment, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return done.stdout.split()


def weighted(values, weight):
    """What is compiled here: a loop of its own, whatever the product's loops look like."""
    total = 0.0
    for value in values:
        total += value * weight
    return total


VALUES = np.array([1.0, 2.0, 4.0])


@pytest.fixture
def fresh(monkeypatch):
    """Returns ``weighted`` as a new process would have it, compiled even where the JIT is off."""
    monkeypatch.setattr(config, "DISABLE_JIT", 0)

    def compiled(*folders):
        loop = jit.jit(weighted)
        loop._cache = loop_cache.LoopCache(weighted, lambda: folders)
        return loop

    return compiled


def hits(loop, *arguments):
    """Call a loop, check what it answers, and return how often it was found on disk."""
    assert loop(*(arguments or (VALUES, 3.0))) == 21.0
    return sum(loop.stats.cache_hits.values())


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def nowhere(tmp_path):
    """A path that no folder can be made at, not even by root."""
    file = tmp_path / "file"
    file.write_text("")
    return file / "cache"


@pytest.mark.slow
def test_code_is_kept_by_cpu_and_found_again(tmp_path):
    cache = {"FASTROOF_CACHE_DIR": str(tmp_path / "cache"), "XDG_CACHE_HOME": str(tmp_path / "home")}
    answer, found, folder = run(**cache)
    assert (answer, found, Path(folder).parent) == ("1", "0", tmp_path / "cache")
    (first,) = files(tmp_path)
    written = first.stat().st_mtime_ns
    assert run(**cache) == ["1", "1", folder]
    # a home that another machine shares
    assert run(**cache, NUMBA_CPU_NAME="generic") == ["1", "0", folder]
    assert len(files(tmp_path)) == 2
    assert run(**cache, NUMBA_CPU_NAME="generic") == ["1", "1", folder]
    assert first.stat().st_mtime_ns == written


@pytest.mark.slow
def test_without_a_writable_folder_loops_still_run(nowhere, tmp_path):
    home = tmp_path / "home"
    places = {"FASTROOF_CACHE_DIR": str(nowhere), "XDG_CACHE_HOME": str(home), "HOME": str(home)}
    assert run(**places)[:2] == ["1", "0"]
    assert len(files(home)) == 1
    assert run(**places)[:2] == ["1", "1"]
    # a home that is read-only, too
    assert run(**dict.fromkeys(places, str(nowhere)))[:2] == ["1", "0"]


def test_without_the_jit_no_folder_is_touched(tmp_path):
    answer, _, folder = run(FASTROOF_CACHE_DIR=str(tmp_path / "cache"), NUMBA_DISABLE_JIT="1")
    assert (answer, folder) == ("1", "None")
    assert not (tmp_path / "cache").exists()


@pytest.mark.loops
def test_a_loop_of_the_package_is_kept_and_another_not(monkeypatch):
    assert jit.jit(weighted)(VALUES, 3.0) == 21.0
    monkeypatch.setattr(config, "DISABLE_JIT", 0)
    assert not isinstance(jit.jit(weighted)._cache, loop_cache.LoopCache)

    def inside(values):
        return values

    inside.__module__ = "fastroof.compiled.inside"
    assert isinstance(jit.jit(inside)._cache, loop_cache.LoopCache)
    monkeypatch.setattr(config, "DISABLE_JIT", 1)
    assert jit.jit(inside) is inside


def with_digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest() + payload


DAMAGE = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[:-1],
    "only the digest": lambda data: data[:32],
    "garbage": lambda data: bytes(range(256)) * 10,
    "one bit": lambda data: data[:2000] + bytes([data[2000] ^ 1]) + data[2001:],
    "no pickle": lambda data: with_digest(b"what is this"),
    "another pickle": lambda data: with_digest(pickle.dumps("loops")),
    "another loop's": lambda data: with_digest(pickle.dumps((("other",), ()))),
    "a class that is gone": lambda data: with_digest(b"cfastroof.gone\nGone\n."),
}


@pytest.mark.loops
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_compiled_again_and_replaced(fresh, tmp_path, damage):
    assert hits(fresh(tmp_path)) == 0
    (file,) = files(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    assert hits(fresh(tmp_path)) == 0
    assert files(tmp_path) == [file]
    assert hits(fresh(tmp_path)) == 1


@pytest.mark.loops
def test_what_others_may_have_written_is_not_loaded(fresh, tmp_path):
    hits(fresh(tmp_path))
    (file,) = files(tmp_path)
    file.chmod(0o664)
    assert hits(fresh(tmp_path)) == 0
    assert hits(fresh(tmp_path)) == 1
    mine = file.stat()
    assert trusted_folders.is_ours(mine)
    other_user, owner_at = 65_534, 4
    assert not trusted_folders.is_ours(os.stat_result([*mine[:owner_at], other_user, *mine[owner_at + 1 :]]))


@pytest.mark.loops
def test_a_folder_swapped_for_links_is_not_loaded_from(fresh, tmp_path):
    shared, mine = tmp_path / "shared" / "loops", tmp_path / "mine"
    shared.parent.mkdir()
    assert hits(fresh(shared)) == 0
    (file,) = files(shared)
    mine.mkdir()
    file.rename(mine / file.name)
    for link in (Path.symlink_to, Path.hardlink_to):
        link(file, mine / file.name)
        assert hits(fresh(shared)) == 0
        assert not file.is_symlink()
        assert (mine / file.name).stat().st_nlink == 1
        file.unlink()
    shared.rmdir()
    shared.symlink_to(mine)
    assert hits(fresh(shared)) == 1
    # whoever may write above it can have made the link
    shared.parent.chmod(0o777)
    assert hits(fresh(shared)) == 0
    os.mkfifo(tmp_path / file.name)
    assert hits(fresh(tmp_path)) == 0


@pytest.mark.loops
def test_code_is_cached_in_a_trusted_folder(fresh, tmp_path, caplog):
    shared, mine = tmp_path / "shared" / "loops", tmp_path / "mine"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    assert hits(fresh(shared, mine)) == 0
    assert (len(files(shared)), len(files(mine))) == (0, 1)
    assert hits(fresh(shared, mine)) == 1
    assert not caplog.records
    code_cache.say_once.cache_clear()
    for _ in range(2):
        assert hits(fresh(shared)) == 0
    assert [record.getMessage() for record in caplog.records] == [
        "fastroof: compiled code is not cached, so every start compiles it: others may write to "
        f"{shared}, or to a folder above it; set FASTROOF_CACHE_DIR to a folder that is yours alone"
    ]


@pytest.mark.loops
def test_folders_and_files_may_go_at_any_time(fresh, tmp_path):
    folder = tmp_path / "cache" / "loops"
    assert hits(fresh(folder)) == 0
    (file,) = files(folder)
    file.unlink()
    folder.rmdir()
    folder.parent.rmdir()
    assert hits(fresh(folder)) == 0
    assert hits(fresh(folder)) == 1
    assert fresh(folder).stats.cache_path == str(folder)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow past 1 KiB: writing more fails half-way, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.loops
def test_a_full_disk_keeps_nothing_and_breaks_nothing(fresh, tmp_path):
    with full_disk():
        assert hits(fresh(tmp_path)) == 0
    assert files(tmp_path) == []
    assert hits(fresh(tmp_path)) == 0
    assert hits(fresh(tmp_path)) == 1


@pytest.mark.loops
def test_without_a_folder_a_loop_still_compiles(fresh):
    loop = fresh()
    assert hits(loop) == 0
    assert loop.stats.cache_path is None


LARGE = np.zeros(200_000)


def of_a_large_global(value):
    """Numba refers to an array of over 1 MB by its address."""
    return LARGE[0] + value


@pytest.mark.loops
def test_code_with_addresses_of_this_process_is_not_kept(fresh, tmp_path):
    fresh()  # switches the JIT on
    loop = jit.jit(of_a_large_global)
    loop._cache = loop_cache.LoopCache(of_a_large_global, lambda: (tmp_path,))
    assert loop(2.0) == 2.0
    assert files(tmp_path) == []


ARGUMENTS = (
    (VALUES, 3.0),
    (VALUES.astype(np.int64), 3),
    (VALUES.astype(np.float32), 3),
    (VALUES.astype(np.int32), 3.0),
)


def compile_all(barrier, folder, start):
    """Compile every signature, each process in another order, all at once."""
    loop = jit.jit(weighted)
    loop._cache = loop_cache.LoopCache(weighted, lambda: (folder,))
    barrier.wait(60)
    for i in range(len(ARGUMENTS)):
        hits(loop, *ARGUMENTS[(start + i) % len(ARGUMENTS)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_eight_processes_compile_the_same_loops_at_once(fresh, tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(8)
    workers = [context.Process(target=compile_all, args=(barrier, tmp_path, i)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 8
    assert len(files(tmp_path)) == len(ARGUMENTS)
    loop = fresh(tmp_path)
    assert [hits(loop, *arguments) for arguments in ARGUMENTS] == [1, 2, 3, 4]


@pytest.mark.loops
def test_the_version_follows_sources_compiler_and_settings(monkeypatch, tmp_path):
    monkeypatch.setattr(code_cache, "__file__", str(tmp_path / "code_cache.py"))
    assert code_cache.code_version() is None
    (tmp_path / "search.py").write_text("x = 1\n")
    first = code_cache.code_version()
    assert code_cache.code_version() == first
    (tmp_path / "search.py").write_text("x = 2\n")
    second = code_cache.code_version()
    monkeypatch.setattr(config, "BOUNDSCHECK", 0 if config.BOUNDSCHECK else 1)
    checked = code_cache.code_version()
    monkeypatch.setattr(shipped_loops.numba, "__version__", "0")
    numba = code_cache.code_version()
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    assert len({first, second, checked, numba, code_cache.code_version()}) == 5
    monkeypatch.undo()
    assert code_cache.code_version() == code_cache.VERSION


@pytest.mark.loops
def test_the_folders_are_the_one_given_and_the_users(monkeypatch, tmp_path):
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    name = f"loops-{code_cache.VERSION}"
    users = tmp_path / "fastroof" / name
    monkeypatch.delenv("FASTROOF_CACHE_DIR", raising=False)
    assert code_cache.cache_folders() == (users,)
    monkeypatch.setenv("FASTROOF_CACHE_DIR", "")
    assert code_cache.cache_folders() == (users,)
    monkeypatch.setenv("FASTROOF_CACHE_DIR", "relative")
    assert code_cache.cache_folders() == (Path("relative") / name, users)
    # no home is no folder of the working directory
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: f"~/.cache/{name}")
    assert code_cache.cache_folders() == (Path("relative") / name,)
    monkeypatch.setattr(code_cache, "VERSION", None)
    assert code_cache.cache_folders() == ()
    assert not list(tmp_path.iterdir())


@pytest.mark.loops
def test_read_only_code_is_used_and_missing_code_is_cached_in_the_home(fresh, tmp_path):
    image, home = tmp_path / "image", tmp_path / "home"
    assert hits(fresh(image, home)) == 0
    assert (len(files(image)), len(files(home))) == (1, 0)
    with full_disk():
        assert hits(fresh(image, home)) == 1
        assert hits(fresh(image, home), *ARGUMENTS[1]) == 0
    read_only = tmp_path / "file"
    read_only.write_text("")
    assert hits(fresh(read_only, home), *ARGUMENTS[1]) == 0
    assert (len(files(image)), len(files(home))) == (1, 1)
    assert hits(fresh(image, home), *ARGUMENTS[1]) == 1


@pytest.mark.loops
def test_other_users_cannot_write_cached_files(fresh, tmp_path):
    umask = os.umask(0)
    try:
        hits(fresh(tmp_path / "shared" / "loops"))
    finally:
        os.umask(umask)
    (file,) = files(tmp_path)
    assert (file.parent.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o755, 0o644)
    # a pipe in its place must not hang
    file.unlink()
    os.mkfifo(file, 0o600)
    assert hits(fresh(file.parent)) == 0
    assert hits(fresh(file.parent)) == 1


@pytest.mark.loops
def test_only_versions_unused_for_a_month_are_removed(fresh, tmp_path):
    names = ("loops-0123456789abcdef", "loops-0123456789abcde0", "loops-fedcba9876543210", "loops-drums")
    old, noted, recent, music = (tmp_path / name for name in names)
    for folder in (old, noted, recent, music):
        folder.mkdir()
        (folder / "bracket-0.loop").write_text("")
        (folder / "bracket-0.loop.0123").write_text("")
    (noted / "notes.txt").write_text("")
    a_month_ago = time.time() - 31 * 86_400
    for folder in (old, noted, music):
        os.utime(folder, (a_month_ago, a_month_ago))
    made = tmp_path / "loops-00000000000000ff"
    hits(fresh(made))
    assert sorted(tmp_path.iterdir()) == sorted([noted, recent, music, made])
    assert files(noted) == [noted / "notes.txt"]
    assert len(files(recent)) == len(files(music)) == 2
    # loading from a folder keeps it
    os.utime(made, (a_month_ago, a_month_ago))
    assert hits(fresh(made)) == 1
    assert made.stat().st_mtime > a_month_ago + 86_400


def least(value):
    return value + 1.0


def middle(value):
    return least_loop(value) * 2.0  # noqa: F821


def largest(value, is_plain):
    return middle_loop(value) + least_loop(value)  # noqa: F821


@pytest.mark.loops
def test_the_total_of_compiling_is_at_least_what_compiles_without_the_cached(fresh, tmp_path, monkeypatch):
    fresh()  # switches the JIT on
    totals = []

    def compiled():
        for function in (least, middle, largest):
            loop = jit.jit(function)
            loop._cache = loop_cache.LoopCache(function, lambda: (tmp_path,))
            monkeypatch.setitem(globals(), f"{function.__name__}_loop", loop)
        totals.clear()
        assert loop(3.0, True) == 12.0
        return totals

    opened, closed = dispatcher.Compilation.__enter__, dispatcher.Compilation.__exit__

    def enter(phase):
        totals.append(phase.counted())
        return opened(phase)

    def leave(phase):
        totals.append(phase.counted())
        closed(phase)

    monkeypatch.setattr(dispatcher.Compilation, "__enter__", enter)
    monkeypatch.setattr(dispatcher.Compilation, "__exit__", leave)
    (_, before), (done, _) = compiled()
    assert before >= done == 3
    assert compiled() == []
    for file in tmp_path.glob("largest-*"):
        file.unlink()
    (_, before), (done, _) = compiled()
    assert (before, done) == (1, 1)
    for file in (*tmp_path.glob("largest-*"), *tmp_path.glob("middle-*")):
        file.unlink()
    (_, before), (done, _) = compiled()
    assert (before, done) == (2, 2)
