"""``fastroof doctor``: what it finds is what is there, and its exit code is 1 where something is broken."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy
import pytest
from typer.testing import CliRunner

import fastroof
from fastroof.cli import app


def doctor(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["doctor", *words], prog_name="fastroof")
    assert done.stderr == ""
    return done.exit_code, done.stdout


def answered() -> tuple[int, Any]:
    code, out = doctor("--json")
    return code, json.loads(out)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    monkeypatch.setenv("FASTROOF_CACHE_DIR", str(folder))
    return folder


def test_it_prints_what_is_installed(cache: Path) -> None:
    (cache / "plans").mkdir()
    (cache / "plans" / f"{'0' * 32}.plan").write_bytes(b"x" * 1000)
    code, answer = answered()
    assert (code, answer["problems"]) == (0, [])
    assert answer["versions"]["fastroof"] == fastroof.__version__
    assert answer["versions"]["numpy"] == numpy.__version__
    kept = next(one for one in answer["caches"] if one["folder"] == str(cache))
    assert (kept["bytes"], kept["plans"], kept["loops"], kept["trusted"]) == (1000, 1, 0, True)
    assert answer["environment"]["FASTROOF_CACHE_DIR"] == str(cache)
    assert "h100" in answer["tables"]
    code, out = doctor()
    assert code == 0
    assert out.endswith("nothing is broken\n")


def test_a_cache_that_others_write_is_broken(cache: Path) -> None:
    os.chmod(cache, 0o777)
    code, answer = answered()
    assert code == 1
    assert any(str(cache) in problem and "FASTROOF_CACHE_DIR" in problem for problem in answer["problems"])


@pytest.mark.parametrize("name", ["gemm.csv", "gemm.parquet"])
def test_a_source_has_tables_in_either_format(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "h100" / "mine"
    folder.mkdir(parents=True)
    (folder / "provenance.toml").write_text('gpu = "h100"\n')
    monkeypatch.setenv("FASTROOF_TABLES", str(tmp_path))
    assert any(str(folder) in problem for problem in answered()[1]["problems"])
    (folder / name).touch()
    code, answer = answered()
    assert (code, answer["problems"]) == (0, [])
    assert "mine" in answer["tables"]["h100"]


def test_a_source_without_tables_is_broken(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "tables" / "h100" / "mine"
    source.mkdir(parents=True)
    (source / "provenance.toml").write_text("", encoding="utf-8")
    monkeypatch.setenv("FASTROOF_TABLES", str(tmp_path / "tables"))
    code, answer = answered()
    assert code == 1
    assert any(str(source) in problem for problem in answer["problems"])
