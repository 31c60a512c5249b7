"""What there is: sources by folder, whose they are, and which of them serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastroof.errors import TableError
from fastroof.load.by_name import ensure_imported, table_folders
from fastroof.load.listing import list_tables
from fastroof.load.sources import load_sources
from fastroof.load.write import write_source
from tests.reference.packages import install


def test_kinds_and_what_serves_are_those_of_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = install(tmp_path, monkeypatch)
    ensure_imported("b300")
    tables = load_sources(root / "b300")
    mine = {"gemm": tables.tables["gemm"].columns}
    write_source(root / "b300" / "mine", mine, {"gpu": "b300", "rank": 1, "licence": "MIT"})
    listed = {source.source: source for source in list_tables(table_folders("b300"))}
    assert {name: source.kind for name, source in listed.items()} == {
        "aiconfigurator-vllm-0.24.0": "imported",
        "aiconfigurator-sglang-0.5.14": "imported",
        "aiconfigurator-sglang-0.5.10": "imported",
        "aiconfigurator-nccl-2.27.3": "imported",
        "mine": "own",
    }
    assert (listed["mine"].gpu, listed["mine"].licence) == ("b300", "MIT")
    serving = {
        one.operator: name for name, source in listed.items() for one in source.operators if one.serves
    }
    again = load_sources(root / "b300")
    assert serving == again.sources
    assert serving["gemm"] == "mine"
    rows = {(name, one.operator): one.rows for name, source in listed.items() for one in source.operators}
    for operator in again.tables:
        for table in again.candidates(operator):
            assert rows[table.source, operator] == table.num_rows


def test_of_one_name_in_two_folders_the_first_serves(tmp_path: Path) -> None:
    shipped = table_folders("h100")
    name = "aiconfigurator-vllm-0.25.0"
    columns = load_sources(shipped[0] / name).tables["collective"].columns
    write_source(tmp_path / "h100" / name, {"collective": columns}, {"gpu": "h100"}, format="csv")
    listed = list_tables([*shipped, tmp_path / "h100"])
    found = [
        (source.kind, one.rows, one.serves)
        for source in listed
        for one in source.operators
        if one.operator == "collective" and source.source == name
    ]
    assert found == [("shipped", 756, True), ("own", 756, False)]


def test_a_file_that_is_not_a_table(tmp_path: Path) -> None:
    columns = (
        load_sources(table_folders("h100")[0] / "aiconfigurator-vllm-0.25.0").tables["collective"].columns
    )
    folder = write_source(tmp_path / "h100" / "mine", {"collective": columns}, {"gpu": "h100"})
    (folder / "collective.parquet").write_bytes(b"PAR1")
    with pytest.raises(TableError, match=r"collective\.parquet cannot be read"):
        list_tables([tmp_path / "h100"])
