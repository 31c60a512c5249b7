"""Compiling ahead by `fastroof warm`, and the notice on a terminal while a command compiles."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.first_run import COMMANDS, PAGE
from fastroof.backends.c import objects
from fastroof.cli import app, compile_notice, warm
from fastroof.compiled.code_cache import cache_folders
from tests.cli.test_start import environment

BRACKET = """
import numpy as np
from fastroof.compiled import guides
guides.bracket(np.array([0.0, 1.0, 2.0]), 0, 3, 1.5)
"""


def warmed(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["warm", *words], prog_name="fastroof")
    return done.exit_code, done.stdout, done.stderr


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


NOTICED = """
import sys
from fastroof.cli import compile_notice, main
compile_notice.DELAY_S = -1.0
sys.argv[1:] = ["gpus"]
try:
    main()
except SystemExit:
    pass
"""


def shown(tmp_path: Path, *, terminal: bool, **changed: str) -> str:
    """What a program that compiles one loop writes to its standard error."""
    at, stderr = os.openpty() if terminal else os.pipe()
    subprocess.run(
        [sys.executable, "-c", NOTICED + BRACKET],
        env={
            **environment(), "FASTROOF_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "home"),
            "TERM": "xterm", **changed,
        },
        stdout=subprocess.DEVNULL, stderr=stderr, check=True,
    )  # fmt: skip
    # an end for a reader of a pipe; a terminal without writers is an error instead
    os.close(stderr)
    text = b""
    try:
        while more := os.read(at, 65_536):
            text += more
    except OSError:
        pass
    os.close(at)
    return text.decode()


@pytest.mark.slow
def test_a_terminal_shows_what_takes_long(tmp_path: Path) -> None:
    out = shown(tmp_path, terminal=True, CI="")
    assert "compiling loops for this machine once" in out
    assert shown(tmp_path, terminal=True, CI="") == ""


@pytest.mark.slow
@pytest.mark.parametrize(("terminal", "ci"), [(False, ""), (True, "1")])
def test_a_pipe_and_ci_are_not(tmp_path: Path, terminal: bool, ci: str) -> None:
    assert shown(tmp_path, terminal=terminal, CI=ci) == ""


def test_nested_compilations_are_one_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[list[int]] = []

    class Shown:
        task_ids = (0,)

        def __init__(self, notice: str) -> None:
            begun.append([])
            assert notice == compile_notice.NOTICE

        def update(self, task: int, loops: int) -> None:
            begun[-1].append(loops)

        def stop(self) -> None:
            begun[-1].append(-1)

    monkeypatch.setattr(compile_notice, "_shown", Shown)
    clock = iter(range(100))
    monkeypatch.setattr(compile_notice.time, "monotonic", lambda: float(next(clock)))
    notice = compile_notice.CompileNotice()
    for message in (
        "compiling %s",
        "compiling %s",
        "compiling %s",
        "compiled %s",
        "compiled %s",
        "compiled %s",
    ):
        notice.emit(logging.LogRecord("", logging.DEBUG, "", 0, message, ("loop",), None))
    assert begun == [[0, 1, 2, 3, -1]]


def test_the_object_file_for_c_has_its_own_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(compile_notice, "_shown", lambda notice: begun.append(notice))
    clock = iter(range(100))
    monkeypatch.setattr(compile_notice.time, "monotonic", lambda: float(next(clock)))
    notice = compile_notice.CompileNotice()
    for what in (objects._NOTICE, "fastroof_open", "a_loop"):
        notice.emit(logging.LogRecord("", logging.DEBUG, "", 0, "compiling %s", (what,), None))
    assert begun[-1] == "compiling the object file for C once, about a minute"
