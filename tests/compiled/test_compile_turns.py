"""Turns of processes that need one loop: one compiles, the others wait for its code, but not for ever."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core import config
from numba.core.errors import TypingError

from fastroof.compiled import compile_turns, jit
from fastroof.compiled.compile_turns import SUFFIX, Turn
from fastroof.compiled.loop_cache import LoopCache

FORK = multiprocessing.get_context("fork")
forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def locks(folder: Path) -> list[Path]:
    return list(folder.rglob(f"*{SUFFIX}"))


def hold(folder: Path, held: Event, may_end: Event) -> None:
    """Take a turn, and stay in it."""
    turn = Turn((folder,), "loop")
    held.set()
    may_end.wait(60)
    turn.end()


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """A process that has the turn, and the event that lets it end."""
    held, may_end = FORK.Event(), FORK.Event()
    process = FORK.Process(target=hold, args=(tmp_path, held, may_end))
    process.start()
    assert held.wait(60)
    yield process, may_end
    process.kill()
    process.join(60)


@forks
@pytest.mark.loops
def test_the_next_process_waits_for_the_end_of_a_turn(holder: Any, tmp_path: Path) -> None:
    process, may_end = holder
    turns: list[Turn] = []
    waiting = threading.Thread(target=lambda: turns.append(Turn((tmp_path,), "loop")))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    # another loop's turn is its own
    other = Turn((tmp_path,), "other")
    assert not other.waited
    other.end()
    may_end.set()
    waiting.join(60)
    assert turns[0].waited
    turns[0].end()
    process.join(60)
    assert locks(tmp_path) == []


@forks
def test_the_turn_of_a_killed_process_ends_with_it(holder: Any, tmp_path: Path) -> None:
    process, _ = holder
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert len(locks(tmp_path)) == 1
    turn = Turn((tmp_path,), "loop")
    assert not turn.waited
    turn.end()
    assert locks(tmp_path) == []


@forks
@pytest.mark.loops
def test_waiting_ends(holder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_turns, "LONGEST_S", 0.1)
    turn = Turn((tmp_path,), "loop")
    assert turn.waited
    turn.end()
    # the other process keeps its own
    assert len(locks(tmp_path)) == 1


def test_without_a_folder_to_write_to_no_process_waits(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folders in ((), (file,), (file / "below", tmp_path / "none")):
        turn = Turn(folders, "loop")
        assert not turn.waited
        turn.end()
    # as where the first folder is an image's
    turn = Turn((file, tmp_path), "loop")
    assert len(locks(tmp_path)) == 1
    turn.end()
    assert sorted(tmp_path.iterdir()) == [file]


@pytest.mark.loops
def test_a_system_without_locks_has_no_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    turn = Turn((tmp_path,), "loop")
    assert not turn.waited
    turn.end()
    assert locks(tmp_path) == []


def summed(values: Any, weight: Any) -> Any:
    total = 0.0
    for value in values:
        total += value * weight
    return total


def unknown(values: Any) -> Any:
    return values.no_such_name


def a_loop(function: Any, folder: Path) -> Any:
    loop = jit.jit(function)
    loop._cache = LoopCache(function, lambda: (folder,))
    return loop


def compile_one(folder: Path, barrier: Any, hits: SimpleQueue[int]) -> None:
    loop = a_loop(summed, folder)
    barrier.wait(60)
    assert loop(np.array([1.0, 2.0]), 3.0) == 9.0
    hits.put(sum(loop.stats.cache_hits.values()))


@forks
def test_one_of_several_processes_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "DISABLE_JIT", 0)
    processes, hits = 4, FORK.SimpleQueue()
    barrier = FORK.Barrier(processes)
    workers = [
        FORK.Process(target=compile_one, args=(tmp_path / "new", barrier, hits)) for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * processes
    assert sorted(hits.get() for _ in workers) == [0, 1, 1, 1]
    assert len(list((tmp_path / "new").iterdir())) == 1


def test_a_loop_that_does_not_compile_ends_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "DISABLE_JIT", 0)
    loop = a_loop(unknown, tmp_path)
    for _ in range(2):
        with pytest.raises(TypingError):
            loop(np.array([1.0]))
        assert locks(tmp_path) == []
