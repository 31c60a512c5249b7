"""Compiling ahead by `fastroof warm`, and the notice on a terminal while a command compiles."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks.first_run import COMMANDS, PAGE
from fastroof.cli import warm
from fastroof.compiled.code_cache import cache_folders
from tests.cli.test_start import environment
from tests.command_line import run

BRACKET = """
import numpy as np
from fastroof.compiled import guides
guides.bracket(np.array([0.0, 1.0, 2.0]), 0, 3, 1.5)
"""


warmed = partial(run, "warm")


@pytest.mark.slow
def test_it_compiles_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(warm, "GROUPS", ((BRACKET, BRACKET), ("pass",)))
    cache = tmp_path / "cache"
    monkeypatch.setenv("FASTROOF_CACHE_DIR", str(cache))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    code, out, err = warmed("--jobs", "2")
    (folder,) = cache.iterdir()
    assert (code, err) == (0, f"compiling loops for this machine, once: {warm.COST} on 2 processors\n")
    assert out.startswith("compiled 1 loops in ")
    assert out.endswith(f" s: {folder}\n")
    assert warmed() == (0, "nothing to compile\n", "")


def test_a_failure_names_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "GROUPS", (("fastroof gpus --nothing",),))
    code, out, err = warmed()
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(
        "fastroof: error: `fastroof gpus --nothing` failed: fastroof: error: "
    )


def loops(folder: Path) -> set[Path]:
    return set(folder.rglob("*.loop"))


# CI checks the same of its wheel: benchmarks/first_run.py --check
@pytest.mark.release
def test_after_it_commands_compile_nothing(tmp_path: Path) -> None:
    """In the folder of this run of tests, which has most loops already; other tests write there meanwhile."""
    code, _, err = warmed()
    assert code == 0, err
    cache = tmp_path / "cache"
    folder = cache / cache_folders()[0].name
    folder.mkdir(parents=True)
    for path in loops(cache_folders()[0]):
        shutil.copy(path, folder)
    compiled = loops(cache)
    for _, question in COMMANDS.values():
        program = ["-c", question] if question == PAGE else ["-m", "fastroof", *question.split()]
        subprocess.run(
            [sys.executable, *program], cwd=tmp_path,
            env={**environment(), "FASTROOF_CACHE_DIR": str(cache)}, check=True, capture_output=True,
        )  # fmt: skip
        assert loops(cache) == compiled, question


SOON = """
from fastroof import progress
progress.DELAY_S, progress.REDRAW_S = -1.0, 0.001
"""


def shown(tmp_path: Path, program: str, *, terminal: bool, **changed: str) -> str:
    """What a program writes to its standard error."""
    at, stderr = os.openpty() if terminal else os.pipe()
    running = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SOON + program],
        env={
            **environment(), "FASTROOF_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "home"),
            "TERM": "xterm", **changed,
        },
        stdout=subprocess.DEVNULL, stderr=stderr,
    )  # fmt: skip
    # an end for a reader of a pipe; a terminal without writers is an error instead
    os.close(stderr)
    text = b""
    try:
        while more := os.read(at, 65_536):
            text += more
    except OSError:
        pass
    assert running.wait() == 0
    os.close(at)
    return text.decode()


@pytest.mark.slow
def test_a_terminal_shows_what_takes_long(tmp_path: Path) -> None:
    out = shown(tmp_path, BRACKET, terminal=True, CI="")
    assert "compiling loops for this machine, once: 0 of at most 1, " in out
    assert out.endswith("\r\x1b[K")
    assert shown(tmp_path, BRACKET, terminal=True, CI="") == ""


@pytest.mark.slow
@pytest.mark.parametrize(("terminal", "ci"), [(False, ""), (True, "1")])
def test_a_pipe_and_ci_are_not(tmp_path: Path, terminal: bool, ci: str) -> None:
    assert shown(tmp_path, BRACKET, terminal=terminal, CI=ci) == ""


@pytest.mark.slow
def test_a_log_has_it_without_a_terminal(tmp_path: Path) -> None:
    program = "import logging; logging.basicConfig(level=logging.INFO, format='%(name)s: %(message)s')"
    first, last = shown(tmp_path, program + BRACKET, terminal=False).splitlines()
    assert first == "fastroof.compiled: compiling bracket: at most 1 loops, once"
    assert last.startswith("fastroof.compiled: compiled bracket: 1 loops in ")


COMMAND = """
import sys
from fastroof.cli import main
sys.argv[1:] = {words}
main()
"""


def test_a_command_is_shown_until_it_prints(tmp_path: Path) -> None:
    out = shown(tmp_path, COMMAND.format(words=["gpus"]), terminal=True, CI="")
    assert out.startswith("\r\x1b[Kfastroof gpus: 0 s\r\x1b[K")
    assert out.endswith("\r\x1b[K")
    assert shown(tmp_path, COMMAND.format(words=["gpus"]), terminal=False, CI="") == ""


@pytest.mark.slow
def test_phases_of_best_are_in_order() -> None:
    """The loops are those of this run of tests, compiled or not."""
    words = (
        "best --model llama-3.1-8b --gpus 2 --isl 1000 --osl 50 --tpot 20 --max-num-seqs 64 "
        "--mode aggregated --num-requests 500"
    )
    cache = cache_folders()[0].parent
    out = shown(cache, COMMAND.format(words=words.split()), terminal=True, CI="")
    parts = ("fastroof best: 0 s", "best: starting", " candidates, ", " deployments simulated, ")
    places = [out.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)
    assert out.endswith("\r\x1b[K")
