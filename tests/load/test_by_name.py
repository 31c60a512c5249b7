"""Tables by the name of a GPU: written once, atomically, by one of many processes, and errors."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fastroof
from fastroof.config.paths import bench_data_root
from fastroof.errors import TableError
from fastroof.load import by_name, package_import
from fastroof.load.aiconfigurator import SYSTEMS, installed_root
from fastroof.load.by_name import ensure_imported, missing_tables, table_folders
from fastroof.load.package_import import PCIE_LINKED
from fastroof.load.sources import list_sources, load_sources
from fastroof.load.write import write_source
from tests.reference.packages import ALLREDUCE, GEMM, install, package

B300, L40S = "b300_sxm", "l40s"
SHIPPED = "aiconfigurator-vllm-0.25.0"
VLLM, SGLANG, NCCL_SOURCE = (
    f"aiconfigurator-{name}" for name in ("vllm-0.24.0", "sglang-0.5.14", "nccl-2.27.3")
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of tables, with a small package installed that measured a B300 and an H100."""
    return install(tmp_path, monkeypatch)


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes of every file, and the one it is: a file that is written again is another one."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_ino)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_loading_a_gpu_converts_its_tables_once(root: Path) -> None:
    tables = fastroof.load_tables("B300-SXM")
    assert tables.gpu.name == "b300"
    assert tables.sources["gemm"] == VLLM
    assert {t.source for t in tables.candidates("gemm")} == {VLLM, SGLANG}
    assert tables.lookup("gemm", m=1, n=8, k=16).latency_us == 2.5
    assert table_folders("b300") == (root / "b300",)
    before = files(root)
    assert fastroof.load_tables("b300").content_hash == tables.content_hash
    assert ensure_imported("b300") == root / "b300"
    assert files(root) == before


def test_each_engine_has_its_tables_and_other_versions_add_what_it_lacks(root: Path) -> None:
    ensure_imported("b300")
    found = {source.name: source for source in list_sources(root / "b300")}
    assert {name: sorted(source.files) for name, source in found.items()} == {
        VLLM: ["attention_decode", "gemm"],
        SGLANG: ["gemm", "moe"],
        NCCL_SOURCE: ["allreduce"],
        "aiconfigurator-sglang-0.5.10": ["moe"],  # its GEMM adds no kernel
    }
    assert "framework" not in found[NCCL_SOURCE].provenance
    assert found[SGLANG].provenance["framework"] == "sglang"
    ranks = [found[name].rank("moe") for name in (VLLM, SGLANG, NCCL_SOURCE, "aiconfigurator-sglang-0.5.10")]
    assert ranks == sorted(ranks)
    tables = load_sources(root / "b300")
    assert [(t.source, t.num_rows) for t in tables.candidates("moe")] == [
        (SGLANG, 1),
        ("aiconfigurator-sglang-0.5.10", 2),
    ]


def test_a_folder_with_other_files_is_not_replaced(root: Path, tmp_path: Path) -> None:
    ensure_imported("b300")
    (root / "b300" / VLLM / "notes.txt").write_text("the user's")
    before = files(root)
    with pytest.raises(TableError, match=r"has 'notes\.txt', which is not a table: move it away"):
        ensure_imported("b300", always=True)
    assert files(root) == before
    (root / "b300" / VLLM / "notes.txt").rename(tmp_path / "notes.txt")
    ensure_imported("b300", always=True)


def test_the_lock_follows_no_link(root: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("content")
    root.mkdir(parents=True, exist_ok=True)
    (root / ".b300.lock").symlink_to(precious)
    with pytest.raises(TableError, match="cannot be written below"):
        ensure_imported("b300")
    assert precious.read_text() == "content"
    assert sorted(path.name for path in root.iterdir()) == [".b300.lock"]


def test_all_reduces_over_pcie_are_there_of_every_version(root: Path, tmp_path: Path) -> None:
    rows = [ALLREDUCE, ALLREDUCE | {"latency": 4.0 * ALLREDUCE["latency"]}]
    for system, gpu, kept in ((L40S, "l40s", True), (B300, "b300", False)):
        for version, row in zip(("0.24.0", "0.19.0"), rows, strict=True):
            package(tmp_path / "site", system, **{f"comm/vllm/{version}/custom_allreduce_perf": [row]})
        ensure_imported(gpu)
        tables = load_sources(root / gpu).candidates("allreduce")
        of_vllm = [table.source for table in tables if "vllm" in table.source]
        # the version in use serves
        assert of_vllm == [VLLM, "aiconfigurator-vllm-0.19.0"][: 2 if kept else 1]


def test_gpus_over_pcie_are_those_of_their_files() -> None:
    over_pcie = {
        gpu
        for gpu in SYSTEMS.values()
        if "pcie_gb_per_s" in (bench_data_root() / gpu / "gpu.toml").read_text()
    }
    assert over_pcie == set(PCIE_LINKED)


def test_impossibly_fast_families_are_flagged_against_the_other_engines(root: Path, tmp_path: Path) -> None:
    grid = [
        GEMM | {"m": m, "n": n, "latency": 0.01 * m} for m in range(1, 11) for n in (8, 16, 24, 32, 40, 48)
    ]
    slow = [row | {"latency": 4.0 * row["latency"]} for row in grid]
    package(tmp_path / "site", B300, gemm=grid, **{"gemm/sglang/0.5.14/gemm_perf": slow})
    ensure_imported("b300")
    flags = {
        s.name: s.provenance["operators"].get("gemm", {}).get("unsound", [])
        for s in list_sources(root / "b300")
    }
    (flag,) = flags[SGLANG]
    assert VLLM in flag["reason"]
    assert flags[VLLM] == []


@pytest.mark.slow
def test_what_ships_serves_before_what_is_imported(root: Path) -> None:
    alone = fastroof.load_tables("h100")
    # this package's GEMMs are of an older version than ships; its all-reduces ship in 0.25.0's source
    assert ensure_imported("h100") == root / "h100"
    assert table_folders("h100")[0].name == "h100"
    assert sorted(path.name for path in (root / "h100").iterdir()) == [".imported.json", VLLM]
    tables = fastroof.load_tables("h100")
    assert {operator: tables.sources[operator] for operator in alone.sources} == dict(alone.sources)
    assert tables.sources["gemm"] == tables.sources["allreduce"] == SHIPPED


def test_the_rest_of_a_gpu_that_ships_is_brought_once(root: Path, tmp_path: Path) -> None:
    package(tmp_path / "site", "gb200", **{"gemm/sglang/0.5.14/gemm_perf": [GEMM | {"latency": 0.009}]})
    tables = fastroof.load_tables("gb200")
    shipped = "aiconfigurator-trtllm-1.3.0rc20"
    assert [t.source for t in tables.candidates("gemm")] == [shipped, VLLM, SGLANG]
    assert tables.sources["gemm"] == shipped
    assert len(table_folders("gb200")) == 2
    of_sglang = fastroof.load_tables("gb200", source=SGLANG)
    assert of_sglang.lookup("gemm", m=1, n=8, k=16).latency_us == 9.0


@pytest.mark.parametrize("change", ["package", "format", "source", "note", "ships"])
def test_what_is_out_of_date_or_incomplete_is_made_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    ensure_imported("b300")
    before = files(root)
    if change == "package":
        (tmp_path / "site" / "aisimulate-0.9.1.dist-info").rename(
            tmp_path / "site" / "aisimulate-0.9.2.dist-info"
        )
    elif change == "format":
        monkeypatch.setattr(by_name, "IMPORT_FORMAT", 0)
    elif change == "source":
        (root / "b300" / SGLANG / "provenance.toml").unlink()
    elif change == "note":
        (root / "b300" / ".imported.json").write_text('{"sources": 3')
    else:
        shipped = tmp_path / "bench_data"
        write_source(
            shipped / "b300" / "mine",
            {"gemm": load_sources(root / "b300").tables["gemm"].columns},
            {"gpu": "b300"},
        )
        monkeypatch.setattr(by_name, "bench_data_root", lambda: shipped)
    ensure_imported("b300")
    after = files(root)
    assert set(after) == set(before)
    assert all(after[name][1] != before[name][1] for name in before if name.endswith(".parquet"))
    assert {s.name for s in list_sources(root / "b300")} >= {VLLM, SGLANG}


def test_a_source_that_the_package_no_longer_has_goes_and_the_users_own_stay(
    root: Path, tmp_path: Path
) -> None:
    ensure_imported("b300")
    columns = load_sources(root / "b300").tables["gemm"].columns
    write_source(root / "b300" / "mine", {"gemm": columns}, {"gpu": "b300"})
    write_source(root / "b300" / VLLM, {"gemm": columns}, {"gpu": "b300", "rank": 7}, overwrite=True)
    own = files(root / "b300" / VLLM)
    below = tmp_path / "site" / "aisimulate_core" / "systems" / "data" / B300
    (below / "moe" / "sglang" / "0.5.10" / "moe_perf.parquet").unlink()
    ensure_imported("b300", always=True)
    assert {s.name for s in list_sources(root / "b300")} == {VLLM, SGLANG, NCCL_SOURCE, "mine"}
    assert files(root / "b300" / VLLM) == own
    ensure_imported("b300")
    assert files(root / "b300" / VLLM) == own


def test_progress_counts_every_file(root: Path) -> None:
    found: list[tuple[int, int, str]] = []
    ensure_imported("b300", progress=lambda *step: found.append(step))
    done, total, names = zip(*found, strict=True)
    assert sorted(done) == list(range(total[0] + 1))
    assert set(total) == {len(found) - 1}
    assert found[-1] == (total[0], total[0], "")
    assert "b300_sxm/moe/sglang/0.5.10/moe_perf.parquet" in names
    found.clear()
    ensure_imported("b300", progress=lambda *step: found.append(step))
    assert found == []


def test_nothing_is_written_to_a_stderr_without_a_terminal(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_imported("b300")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    ensure_imported("b300", always=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "converting the tables of b300 from aisimulate 0.9.1, once" in err


# -- what is not there ---------------------------------------------------------------------------


def test_never_converts_nothing_and_prints_the_command(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTROOF_TABLES_IMPORT", "never")
    assert ensure_imported("b300") is None
    with pytest.raises(TableError, match="run fastroof tables import aiconfigurator b300 to get them"):
        fastroof.load_tables("b300")
    assert not root.exists()
    assert ensure_imported("b300", always=True) == root / "b300"
    assert fastroof.load_tables("b300").sources["gemm"] == VLLM
    monkeypatch.setenv("FASTROOF_TABLES_IMPORT", "sometimes")
    with pytest.raises(TableError, match="FASTROOF_TABLES_IMPORT must be auto or never, got 'sometimes'"):
        ensure_imported("b300")


def test_without_the_package_one_line_names_what_to_install(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastroof.load.aiconfigurator.MODULES", ("no_such_package_as_this",))
    for gpu in SYSTEMS.values():
        if not table_folders(gpu):
            with pytest.raises(TableError) as error:
                fastroof.load_tables(gpu)
            assert str(error.value) == (
                f"{gpu} has no measured tables yet: run pip install 'fastroof[tables]' to get them"
            )
    assert fastroof.load_tables("h100").sources["gemm"] == SHIPPED
    assert not root.exists()


def test_an_unmeasured_card(root: Path) -> None:
    assert ensure_imported("mi300x") is None
    assert "no public package has any" in missing_tables("mi300x")
    with pytest.raises(
        TableError, match=r"mi300x has no measured tables.*use the datasheet model \(--tables"
    ):
        fastroof.load_tables("mi300x")


def test_a_folder_that_cannot_be_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.write_text("a file where the folder would be")
    with pytest.raises(TableError, match=r"cannot be written below .*set FASTROOF_TABLES to another folder"):
        fastroof.load_tables("b300")
    with pytest.warns(UserWarning, match=r"h100 is served by the tables that are there: .*cannot be written"):
        assert fastroof.load_tables("h100").sources["gemm"] == SHIPPED


def test_no_home(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTROOF_TABLES")
    monkeypatch.setattr("platformdirs.user_data_dir", lambda _: "~/.local/share/fastroof")
    with pytest.raises(fastroof.FastroofError, match="no home folder for tables; set FASTROOF_TABLES"):
        fastroof.load_tables("b300")
    with pytest.warns(UserWarning, match="h100 is served by the tables that are there"):
        assert fastroof.load_tables("h100").sources["gemm"] == SHIPPED


def test_a_damaged_file_of_the_package_is_named_and_the_others_serve(root: Path, tmp_path: Path) -> None:
    broken = (
        tmp_path / "site" / "aisimulate_core/systems/data" / B300 / "gemm/sglang/0.5.14/gemm_perf.parquet"
    )
    broken.write_bytes(b"PAR1")
    lacks = "tables of b300 lack a file of the package: not read: b300_sxm/gemm/sglang/0.5.14/gemm_perf"
    with pytest.warns(UserWarning, match=lacks):
        tables = fastroof.load_tables("b300")
    assert SGLANG not in {t.source for t in tables.candidates("gemm")}
    (sglang,) = (source for source in list_sources(root / "b300") if source.name == SGLANG)
    assert sglang.provenance["absent"]["b300_sxm/gemm/sglang/0.5.14/gemm_perf.parquet (gemm)"]


# -- many processes ------------------------------------------------------------------------------


def _load_and_count(conversions: str) -> tuple[str, int]:
    """Load in a process of its own; write down that it converted, if it did."""
    made = package_import.import_system

    def counted(*arguments: Any, **options: Any) -> list[str]:
        with open(conversions, "a") as file:
            file.write("x")
        time.sleep(0.3)
        return made(*arguments, **options)

    package_import.import_system = counted
    tables = fastroof.load_tables("b300")
    return tables.content_hash, len(list_sources(table_folders("b300")[0]))


@pytest.mark.slow
def test_of_many_processes_one_converts_and_all_see_everything(root: Path, tmp_path: Path) -> None:
    conversions = tmp_path / "conversions"
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        answers = pool.map(_load_and_count, [str(conversions)] * 8, chunksize=1)
    assert len(set(answers)) == 1
    assert answers[0][1] == 4
    assert conversions.read_text() == "x"
    assert sorted(path.name for path in root.iterdir()) == [".b300.lock", "b300"]


KILLED = """
import os, signal
from fastroof.load import package_import
from fastroof.load.write import write_source

def killed(*arguments, **options):
    write_source(*arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)

package_import.write_source = killed
import fastroof
fastroof.load_tables("b300")
"""


@pytest.mark.slow
def test_leftovers_of_a_killed_process_block_no_other(root: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED], check=False, env={**os.environ}, cwd=Path.cwd())
    assert ended.returncode == -signal.SIGKILL
    left = [path.name for path in root.iterdir()]
    assert "b300" not in left
    assert any(name.startswith(".b300.") and len(name) == len(".b300.") + 32 for name in left)
    assert table_folders("b300") == ()
    fastroof.load_tables("b300")
    assert sorted(path.name for path in root.iterdir()) == [".b300.lock", "b300"]
    assert len(list_sources(root / "b300")) == 4


# -- the package itself --------------------------------------------------------------------------


@pytest.mark.slow
def test_the_package_that_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        installed_root()
    except TableError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("FASTROOF_TABLES", str(tmp_path))
    monkeypatch.setenv("FASTROOF_TABLES_IMPORT", "auto")
    tables = fastroof.load_tables("a100")
    engines = {t.engine: t.source for t in tables.candidates("gemm")}
    assert engines == {
        "vllm": "aiconfigurator-vllm-0.14.0",
        "trtllm": "aiconfigurator-trtllm-1.0.0",
        "sglang": "aiconfigurator-sglang-0.5.10",
    }
    rows = {t.engine: t.num_rows for t in tables.candidates("gemm")}
    assert rows == {"vllm": 9_240, "trtllm": 27_384, "sglang": 35_742}
    dtypes = {key[0] for t in tables.candidates("gemm") for key in t.groups()}
    assert dtypes == {"bf16", "int8_wo", "int4_wo", "sq"}
