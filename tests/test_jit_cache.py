"""Where compiled loops are cached: honoured, shared by nobody, and never needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastroof.compiled import jit

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import numpy as np
from fastroof.compiled import jit, search
answer = search.bracket(np.array([0.0, 1.0, 2.0]), 0, 3, 1.5)
hits = sum(search.bracket.stats.cache_hits.values()) if hasattr(search.bracket, "stats") else 0
print(answer, hits, jit._FOLDER)
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


@pytest.fixture
def nowhere(tmp_path):
    """A path that no folder can be made at, not even by root."""
    file = tmp_path / "file"
    file.write_text("")
    return file / "cache"


def test_the_cache_folder_is_honoured_and_used_again(tmp_path):
    answer, hits, folder = run(FASTROOF_CACHE_DIR=str(tmp_path))
    assert (answer, hits) == ("1", "0")
    assert Path(folder).parent == tmp_path
    compiled = {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*.nb?")}
    assert compiled
    assert run(FASTROOF_CACHE_DIR=str(tmp_path)) == ["1", "1", folder]
    assert {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*.nb?")} == compiled


def test_a_cache_that_cannot_be_written_is_gone_without(nowhere, tmp_path):
    answer, _, folder = run(FASTROOF_CACHE_DIR=str(nowhere), XDG_CACHE_HOME=str(tmp_path / "home"))
    assert (answer, Path(folder).is_relative_to(tmp_path / "home")) == ("1", sys.platform == "linux")
    nothing = str(nowhere)
    answer, hits, folder = run(
        FASTROOF_CACHE_DIR=nothing, XDG_CACHE_HOME=nothing, HOME=nothing, LOCALAPPDATA=nothing
    )
    assert (answer, hits, folder) == ("1", "0", "None")


@pytest.mark.loops
def test_the_folder_follows_the_sources(monkeypatch, tmp_path):
    monkeypatch.delenv("NUMBA_BOUNDSCHECK", raising=False)
    monkeypatch.setenv("FASTROOF_CACHE_DIR", str(tmp_path / "cache"))
    sources = tmp_path / "compiled"
    sources.mkdir()
    (sources / "search.py").write_text("x = 1\n")
    monkeypatch.setattr(jit, "__file__", str(sources / "jit.py"))
    first = jit.cache_folder()
    assert first is not None
    assert first.is_dir()
    assert jit.cache_folder() == first
    (sources / "search.py").write_text("x = 2\n")
    second = jit.cache_folder()
    (sources / "search.py").write_text("x = 1\n")
    assert jit.cache_folder() == first
    monkeypatch.setenv("NUMBA_BOUNDSCHECK", "1")
    checked = jit.cache_folder()
    monkeypatch.setattr(jit.numba, "__version__", "0")
    assert len({first, second, checked, jit.cache_folder()}) == 4
    assert not any(path.is_file() for path in (tmp_path / "cache").rglob("*"))


@pytest.mark.loops
def test_without_a_folder_a_loop_still_compiles(monkeypatch, nowhere):
    monkeypatch.setenv("FASTROOF_CACHE_DIR", str(nowhere))
    monkeypatch.setattr(jit.platformdirs, "user_cache_dir", lambda name: str(nowhere))
    assert jit.cache_folder() is None
    monkeypatch.setattr(jit, "_FOLDER", None)

    def twice(x):
        return 2 * x

    assert jit.jit(twice)(21) == 42


@pytest.mark.loops
def test_an_empty_setting_is_no_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FASTROOF_CACHE_DIR", "")
    monkeypatch.setattr(jit.platformdirs, "user_cache_dir", lambda name: str(tmp_path / name))
    folder = jit.cache_folder()
    assert folder is not None
    assert folder.parent == tmp_path / "fastroof"
