"""The table of releases as the README shows it, what is recorded of each, the warning of another one."""

from __future__ import annotations

import re
import shutil
import warnings
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path

import pytest

import fastroof.backends
from benchmarks.upstream.steps import record
from fastroof.backends import releases
from fastroof.backends.releases import ReleaseWarning, programs, releases_markdown, warn_of_release
from fastroof.errors import BackendError
from tests.backends.interfaces import Interface, every_program, python_differences, recorded, text_differences

BACKENDS = Path(fastroof.backends.__file__).parent


def test_the_readme_shows_the_table() -> None:
    shown = (BACKENDS / "README.md").read_text("utf-8")
    assert releases_markdown() in shown, "python -m fastroof.backends.releases prints the table to put there"


def test_rows_of_scripts_renew_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        "| Frontier, co-location | 1234567 (2027-01-02) | 5 of 5 batches equal to the bit | 0 |",
        "| LLMServingSim, `v1.1` | 1.2.0 | 300 equal decodes | 0.18% mean, 1.27% max |",
        "| LLMServingSim, `v1.1` | 1.2.0 | 300 mixed | 0.34% mean, 1.75% max |",
    )
    for name in ("releases.toml", "README.md"):
        shutil.copy(BACKENDS / name, tmp_path)
    before = {one.name: one for one in programs()}
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    try:
        record(rows)
        after = {one.name: one for one in programs()}
        assert releases_markdown() in (tmp_path / "README.md").read_text("utf-8")
        with pytest.raises(SystemExit, match="not a row of a program"):
            record(["| Frontier | 1234567 |"])
    finally:
        programs.cache_clear()
    changed = [name for name in before if after[name] != before[name]]
    assert changed == ["Frontier", "LLMServingSim"]
    assert (after["Frontier"].ran, after["LLMServingSim"].ran) == (("1234567",), ("1.2.0",))
    assert after["Frontier"].result == "co-location: 5 of 5 batches equal to the bit"
    assert after["LLMServingSim"].result == "`v1.1`: equal decodes ±0.18 %, mixed ±0.34 %"
    assert after["Frontier"].licence == before["Frontier"].licence


@pytest.mark.parametrize("program", programs(), ids=lambda one: one.adapter)
def test_a_program_is_listed_with_what_proves_it(program: releases.Program) -> None:
    assert (BACKENDS / program.adapter).is_file()
    assert program.ran or program.signatures or program.followed, "neither run nor read"
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", program.repository)
    assert not set(program.ran) & {*program.signatures, *program.followed}
    records = [one for name in every_program() for one in recorded(name)]
    of_this = {one.of for one in records if one.repository == program.repository}
    assert of_this >= set(program.signatures), "held to unrecorded signatures"


@pytest.mark.parametrize("program", every_program())
def test_recorded_signatures_name_their_source(program: str) -> None:
    for one in recorded(program):
        assert re.fullmatch(r"[0-9a-f]{40}", one.commit) or (one.release and not one.commit), one.of
        assert one.path, one.of
        assert one.licence, one.of
        assert one.signatures, one.of


def test_an_installed_release_that_was_not_run_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "99.0" if name == "vidur" else "0")
    with pytest.warns(
        ReleaseWarning, match=r"vidur 99.0 is installed: .*vidur/native.py was run with 0.0.26"
    ):
        warn_of_release("vidur/native.py")
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.26")
    with warnings.catch_warnings(action="error"):
        warn_of_release("vidur/native.py")


def test_an_adapter_that_is_not_listed_is_an_error() -> None:
    with pytest.raises(BackendError, match=r"no adapter 'vidur.py' is listed .*vidur/native.py"):
        warn_of_release("vidur.py")


@dataclass
class Request:
    tokens: int

    def run(self, batch: list[int], *, scale: float = 1.0) -> None: ...


def test_a_stand_in_is_held_to_recorded_signatures() -> None:
    def differences(*lines: str) -> list[str]:
        return python_differences(Interface("p", "o/n", "MIT", "1", "", "f.py", lines), {"Request": Request})

    assert differences("Request(tokens)", "Request.tokens", "Request.run(self, batch, *, scale=0)") == []
    assert len(differences("Request.run(self, batch, scale)")) == 1
    assert len(differences("Request.size", "Request.stop(self)", "Batch(requests)")) == 3
    go = Interface("p", "o/n", "MIT", "1", "", "f.go", ("StepTime(batch []*Request) int64", "Other() int"))
    assert text_differences(go, "type M interface {\n\tStepTime(batch  []*Request) int64\n}") == [
        "Other() int"
    ]
