"""Tables of the package that are converted when they are first read, with the same answers."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastroof
from fastroof.arrays import Array
from fastroof.errors import TableError
from fastroof.load import package_import
from fastroof.load.aiconfigurator import SYSTEMS, installed_root
from fastroof.load.by_name import ensure_imported, planned_import, table_folders
from fastroof.load.listing import list_tables
from fastroof.load.package_import import LISTED
from fastroof.load.package_rows import package_version
from fastroof.load.shipped import list_package
from fastroof.load.sources import Source
from tests.reference.packages import GEMM, install, package

VLLM, SGLANG = "aiconfigurator-vllm-0.24.0", "aiconfigurator-sglang-0.5.14"
PINNED = "0.13.0.dev202610270000000085"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of tables, with a small package installed whose sources of a B300 are listed."""
    root = install(tmp_path, monkeypatch)
    (tmp_path / "listed").mkdir()
    monkeypatch.setattr(package_import, "LISTED", tmp_path / "listed")
    list_package(tmp_path / "listed", ["b300"])
    return root


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's empty folder of tables, with the pinned package."""
    try:
        version = package_version(installed_root())
    except TableError as error:
        pytest.skip(str(error))
    if version != PINNED:
        pytest.skip(f"{version} is installed")
    monkeypatch.setenv("FASTROOF_TABLES", str(tmp_path / "tables"))
    monkeypatch.delenv("FASTROOF_TABLES_IMPORT", raising=False)
    return tmp_path / "tables"


def converted(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*.parquet"))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def every_table(tables: fastroof.Tables) -> Iterator[tuple[str, str, Any, dict[str, list[Any]]]]:
    for operator in tables.measured.tables:
        for table in tables.measured.candidates(operator):
            columns = {name: values.tolist() for name, values in sorted(table.columns.items())}
            yield operator, table.source, table.provenance, columns


def assert_agrees(gpu: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole conversion and tables read one by one: the same hashes, rows, provenance and files."""
    whole, lazy = folder / "whole", folder / "lazy"
    ensure_imported(gpu, always=True, root=whole)
    monkeypatch.setenv("FASTROOF_TABLES", str(whole))
    expected = fastroof.load_tables(gpu)
    monkeypatch.setenv("FASTROOF_TABLES", str(lazy))
    found = fastroof.load_tables(gpu)
    hashes = (expected.content_hash, expected.sources_hash)
    assert (found.content_hash, found.sources_hash) == hashes
    assert converted(lazy) == []
    assert found.sources == expected.sources
    assert list(every_table(found)) == list(every_table(expected))
    assert contents(lazy / gpu) == contents(whole / gpu)
    read = fastroof.load_tables(gpu)
    assert (read.content_hash, read.sources_hash) == hashes
    assert list(every_table(read)) == list(every_table(expected))


def test_listed_tables_are_those_of_the_whole_conversion(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_agrees("b300", tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.release
def test_listed_tables_of_the_pinned_package_are_those_of_the_whole_conversion(
    pinned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_agrees("h100", tmp_path, monkeypatch)


@pytest.mark.parametrize("gpu", SYSTEMS.values())
def test_the_list_is_of_these_sources(pinned: Path, gpu: str) -> None:
    """A change of what is converted needs ``python -m fastroof.load.shipped list``."""
    planned = planned_import(gpu)
    assert planned is not None
    assert json.loads((LISTED / f"{gpu}.json").read_text())["made_from"] == planned.inputs


def test_what_ships_answers_without_a_conversion(pinned: Path) -> None:
    tables = fastroof.load_tables("h100")
    tables.lookup("gemm", m=64, n=4096, k=4096)
    fastroof.compile_plan("llama-3.1-8b", "h100", tables, engine="vllm").decode_us(64, 4096)
    assert len(table_folders("h100")) == 2
    assert converted(pinned) == []


def test_only_what_is_read_is_converted(root: Path) -> None:
    tables = fastroof.load_tables("b300")
    assert {t.source for t in tables.candidates("gemm")} == {VLLM, SGLANG}
    assert converted(root) == []
    assert tables.lookup("gemm", m=1, n=8, k=16).latency_us == 2.5
    assert converted(root) == [f"b300/{VLLM}/gemm.parquet"]
    one = fastroof.load_tables(root / "b300", source=SGLANG)
    assert one.lookup("gemm", m=1, n=8, k=16).latency_us == 2.5
    assert converted(root) == [f"b300/{SGLANG}/gemm.parquet", f"b300/{VLLM}/gemm.parquet"]


def test_an_import_converts_all(root: Path) -> None:
    fastroof.load_tables("b300")
    ensure_imported("b300", always=True)
    assert len(converted(root)) == 6


def test_another_release_of_the_package_is_converted_at_once(root: Path, tmp_path: Path) -> None:
    fastroof.load_tables("b300")
    (tmp_path / "site" / "aisimulate-0.9.1.dist-info").rename(
        tmp_path / "site" / "aisimulate-0.9.2.dist-info"
    )
    fastroof.load_tables("b300")
    assert len(converted(root)) == 6


def test_listing_converts_nothing(root: Path) -> None:
    tables = fastroof.load_tables("b300")
    listed = {(s.source, t.operator): t.rows for s in list_tables(table_folders("b300")) for t in s.operators}
    assert converted(root) == []
    assert listed == {
        (table.source, operator): table.num_rows
        for operator in tables.measured.tables
        for table in tables.measured.candidates(operator)
    }


# -- damage --------------------------------------------------------------------------------------


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def flipped(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]


def replaced(content: bytes, draw: random.Random) -> bytes:
    return draw.randbytes(draw.randrange(len(content) * 2))


@pytest.mark.slow
@pytest.mark.parametrize("mutate", [cut, flipped, replaced])
@pytest.mark.parametrize("is_whole", [False, True], ids=["listed", "whole"])
def test_a_damaged_file_is_converted_again(
    root: Path, mutate: Callable[[bytes, random.Random], bytes], is_whole: bool
) -> None:
    ensure_imported("b300", always=is_whole)
    expected = list(every_table(fastroof.load_tables("b300")))
    before = contents(root)
    draw = random.Random(36)
    for name in converted(root) * 5:
        (root / name).write_bytes(mutate(before[name], draw))
        assert list(every_table(fastroof.load_tables("b300"))) == expected
        assert contents(root) == before
    (root / name).unlink()
    assert list(every_table(fastroof.load_tables("b300"))) == expected
    assert contents(root) == before


def test_bytes_of_another_pyarrow_are_recorded_and_change_no_hash(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "listed" / "b300.json"
    listed = json.loads(file.read_text())
    for source in listed["sources"].values():
        for one in source["files"].values():
            one["sha256"] = "0" * 64
    file.write_text(json.dumps(listed))
    tables = fastroof.load_tables("b300")
    hashes = (tables.content_hash, tables.sources_hash)
    expected = list(every_table(tables))
    monkeypatch.setattr(package_import, "import_table", None)
    again = fastroof.load_tables("b300")
    assert list(every_table(again)) == expected
    assert (again.content_hash, again.sources_hash) == hashes


def test_a_changed_package_is_refused(root: Path, tmp_path: Path) -> None:
    tables = fastroof.load_tables("b300")
    package(tmp_path / "site", "b300_sxm", gemm=[GEMM | {"latency": 0.003}])
    with pytest.raises(TableError, match=r"gemm_perf\.parquet: not the gemm rows of aisimulate 0\.9\.1"):
        tables.lookup("gemm", m=1, n=8, k=16)
    assert converted(root) == []
    ensure_imported("b300", always=True)
    assert fastroof.load_tables("b300").lookup("gemm", m=1, n=8, k=16).latency_us == 3.0


@pytest.mark.parametrize("part", ["operators", "files"])
def test_a_provenance_without_its_files_is_refused(root: Path, part: str) -> None:
    fastroof.load_tables("b300")
    file = root / "b300" / VLLM / "provenance.toml"
    text = file.read_text()
    at = text.index("[operators.gemm") if part == "operators" else text.index("[operators.gemm.files")
    file.write_text(text[:at] + text[text.index("[files.") :])
    with pytest.raises(TableError, match=r"not the gemm rows of"):
        fastroof.load_tables("b300", source=VLLM).lookup("gemm", m=1, n=8, k=16)


@pytest.mark.parametrize("is_never", [False, True], ids=["not installed", "never"])
def test_a_table_that_cannot_be_converted(
    root: Path, monkeypatch: pytest.MonkeyPatch, is_never: bool
) -> None:
    fastroof.load_tables("b300").lookup("gemm", m=1, n=8, k=16)
    if is_never:
        monkeypatch.setenv("FASTROOF_TABLES_IMPORT", "never")
    else:
        monkeypatch.setattr("fastroof.load.aiconfigurator.MODULES", ("no_such_package_as_this",))
    tables = fastroof.load_tables("b300")
    assert tables.lookup("gemm", m=1, n=8, k=16).latency_us == 2.5
    remedy = "fastroof tables import aiconfigurator b300" if is_never else "pip install"
    with pytest.raises(TableError, match=rf"moe\.parquet is damaged, or not converted yet: run {remedy}"):
        tables.table("moe").num_rows  # noqa: B018


def test_a_folder_that_cannot_be_written_serves(root: Path) -> None:
    fastroof.load_tables("b300")
    (root / ".b300.lock").unlink()
    (root / ".b300.lock").mkdir()
    assert fastroof.load_tables("b300").lookup("gemm", m=1, n=8, k=16).latency_us == 2.5
    assert converted(root) == []


# -- many processes ------------------------------------------------------------------------------


def _read_and_count(listed: Path, conversions: Path) -> str:
    """Read every table in a process of its own; write down each conversion."""
    made = package_import.import_table

    def counted(data: Path, system: str, source: Source, operator: str) -> dict[str, Array]:
        with open(conversions, "a") as file:
            file.write("x")
        return made(data, system, source, operator)

    package_import.LISTED = listed  # type: ignore[misc]
    package_import.import_table = counted
    return repr(list(every_table(fastroof.load_tables("b300"))))


@pytest.mark.slow
def test_many_processes_convert_each_table_once(root: Path, tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        arguments = [(tmp_path / "listed", tmp_path / "conversions")] * 8
        answers = pool.starmap(_read_and_count, arguments, chunksize=1)
    assert set(answers) == {repr(list(every_table(fastroof.load_tables("b300"))))}
    assert (tmp_path / "conversions").read_text() == "x" * 6
    assert len(converted(root)) == 6


KILLED = """
import os, pathlib, signal, sys
from fastroof.load import package_import, write
write_parquet = write._write_parquet

def killed(path, *arguments):
    write_parquet(path, *arguments)
    os.kill(os.getpid(), signal.SIGKILL)

write._write_parquet = killed
package_import.LISTED = pathlib.Path(sys.argv[1])
import fastroof
fastroof.load_tables("b300").lookup("gemm", m=1, n=8, k=16)
"""


@pytest.mark.slow
def test_a_killed_conversion_leaves_nothing_after_the_next(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "listed")]
    assert subprocess.run(command, check=False, env={**os.environ}).returncode == -signal.SIGKILL
    assert converted(root) == []
    assert fastroof.load_tables("b300").lookup("gemm", m=1, n=8, k=16).latency_us == 2.5
    names = sorted(path.name for path in (root / "b300" / VLLM).iterdir())
    assert names == ["gemm.parquet", "provenance.toml"]
