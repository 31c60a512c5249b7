"""A bit that flipped in a table's file: the same latencies or a TableError, never others."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pyarrow.parquet as pq
import pytest

from fastroof.arrays import Array
from fastroof.config.paths import bench_data_root
from fastroof.errors import TableError
from fastroof.file_access import file_sha256
from fastroof.load.sources import list_sources, load_sources
from fastroof.load.write import Format, write_source

SMALL = ("allreduce", "collective", "elementwise", "expert_dispatch", "hyper_connections", "kda", "mla_bmm")
LARGE = ("gemm", "attention_decode", "moe")


def source_of(folder: Path, operators: tuple[str, ...], *, with_digests: bool) -> Path:
    """A folder with some of the H100 tables that ship."""
    shipped = bench_data_root() / "h100" / "aiconfigurator-vllm-0.25.0"
    folder.mkdir()
    for operator in operators:
        shutil.copy(shipped / f"{operator}.parquet", folder)
    text = (shipped / "provenance.toml").read_text()
    digests = text[text.index("[files.") :] if with_digests else ""
    (folder / "provenance.toml").write_text(f'gpu = "h100"\n{digests}')
    return folder


def flips(folder: Path, operator: str, count: int, seed: int) -> Iterator[dict[str, Array] | TableError]:
    """What a table reads as, with one bit of its file flipped after another."""
    path = folder / f"{operator}.parquet"
    whole = path.read_bytes()
    random = Random(seed)
    for _ in range(count):
        content = bytearray(whole)
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        path.write_bytes(content)
        try:
            yield dict(load_sources(folder).tables[operator].columns)
        except TableError as error:
            yield error
    path.write_bytes(whole)


def silent_flips(folder: Path, operator: str, count: int, seed: int) -> tuple[int, int]:
    """How many flipped bits read as other values, and how many were refused."""
    truth = load_sources(folder).tables[operator].columns
    silent = refused = 0
    for found in flips(folder, operator, count, seed):
        if isinstance(found, TableError):
            assert f"{operator}.parquet" in str(found)
            refused += 1
        else:
            # an unneeded label may be lost with its column's name
            is_whole = truth.keys() - found.keys() <= {"kernel"}
            silent += not is_whole or any(
                not np.array_equal(values, truth[name]) for name, values in found.items()
            )
    return silent, refused


@pytest.mark.slow
@pytest.mark.parametrize("operator", [*SMALL, *LARGE])
def test_every_flipped_bit_of_a_table_that_ships_is_refused(tmp_path: Path, operator: str) -> None:
    folder = source_of(tmp_path / "source", (operator,), with_digests=True)
    assert silent_flips(folder, operator, 60, seed=len(operator)) == (0, 60)


@pytest.mark.parametrize("operator", SMALL)
def test_without_digests_the_pages_checksums_find_it(tmp_path: Path, operator: str) -> None:
    folder = source_of(tmp_path / "source", (operator,), with_digests=False)
    silent, refused = silent_flips(folder, operator, 60, seed=len(operator))
    assert silent == 0
    assert refused > 30  # what is left is the writer's name, statistics, sizes that are not read


def test_a_table_changed_on_purpose_names_the_fix(tmp_path: Path) -> None:
    folder = source_of(tmp_path / "source", ("kda",), with_digests=True)
    path = folder / "kda.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)
    with pytest.raises(TableError, match=r'provenance\.toml.* remove \[files\."kda\.parquet"\]'):
        load_sources(folder)
    provenance = folder / "provenance.toml"
    provenance.write_text(provenance.read_text().replace('[files."kda.parquet"]', '[files."gone.parquet"]'))
    assert load_sources(folder).tables["kda"].num_rows == table.num_rows - 1


def test_a_table_is_checked_when_it_is_first_read(tmp_path: Path) -> None:
    folder = source_of(tmp_path / "source", ("kda", "allreduce"), with_digests=True)
    tables = load_sources(folder, when_needed=True).tables
    path = folder / "kda.parquet"
    path.write_bytes(path.read_bytes()[:-9] + b"x" + path.read_bytes()[-8:])
    assert tables["allreduce"].num_rows == 390
    for _ in range(2):
        with pytest.raises(TableError, match=r"kda\.parquet: SHA-256"):
            tables["kda"].num_rows  # noqa: B018


def test_a_source_that_was_written_again_with_the_same_rows_is_read(tmp_path: Path) -> None:
    rows = load_sources(source_of(tmp_path / "shipped", ("kda",), with_digests=True)).tables["kda"].columns
    folder = write_source(tmp_path / "mine", {"kda": rows}, {"gpu": "h100"}, compression_level=1)
    same, fewer = (load_sources(folder, when_needed=True).tables["kda"] for _ in range(2))
    write_source(folder, {"kda": rows}, {"gpu": "h100"}, overwrite=True)
    assert same.num_rows == len(rows["latency_us"])
    write_source(folder, {"kda": {k: v[1:] for k, v in rows.items()}}, {"gpu": "h100"}, overwrite=True)
    with pytest.raises(TableError, match="SHA-256"):
        fewer.num_rows  # noqa: B018


@pytest.mark.parametrize("format", ["parquet", "csv"])
def test_what_is_written_is_checked_when_it_is_read(tmp_path: Path, format: Format) -> None:
    rows = load_sources(source_of(tmp_path / "shipped", ("kda",), with_digests=True)).tables["kda"].columns
    folder = write_source(tmp_path / "mine", {"kda": rows}, {"gpu": "h100"}, format)
    path = folder / f"kda.{format}"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(TableError, match="SHA-256"):
        load_sources(folder)


@pytest.mark.parametrize(
    "files",
    [
        'files = "all"',
        '[files]\n"gemm.parquet" = "ab"',
        '[files."gemm.parquet"]\nsha256 = "ab"\nrows_sha256 = "cd"',
    ],
)
def test_invalid_digests_are_refused(tmp_path: Path, files: str) -> None:
    folder = source_of(tmp_path / "source", ("kda",), with_digests=False)
    (folder / "provenance.toml").write_text(f'gpu = "h100"\n{files}\n')
    with pytest.raises(TableError, match=r"provenance\.toml: .* need sha256 and rows_sha256"):
        load_sources(folder)


def test_every_table_that_ships_has_a_digest_and_checked_pages() -> None:
    paths = sorted(bench_data_root().glob("*/*/*.parquet"))
    sources = {path.parent for path in paths if path.parent.name != "serving"}
    assert len(sources) == 10
    for source in (one for folder in sorted(sources) for one in list_sources(folder)):
        assert {path.name for path in source.files.values()} == source.hashes.keys()
        for path in source.files.values():
            assert file_sha256(path) == source.hashes[path.name]["sha256"]
