"""Shards: disjoint, complete, even, and joined to what the whole sweep gives row for row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof import SweepError
from fastroof.sweep import Shard, WorkUnit, load_spec, merge_shards, run_sweep, work_units
from fastroof.sweep.identity import differences
from fastroof.sweep.shard_files import ShardFile, rows_by_unit, tagged_rows
from fastroof.sweep.shards import shard_units
from fastroof.sweep.units import PlanKey

DEPLOYMENTS: dict[str, Any] = {
    "models": ["llama-3.1-8b", "qwen3-8b"],
    "tp": [1, 2],
    "total_gpus": [2, 3],
    "isl": [500, 2000],
    "osl": [100, 500],
    "concurrency": [1, 8, 64, 256],
    "constraints": {"tpot_ms": 20.0},
    "histogram": True,
}
STEPS: dict[str, Any] = {
    "models": ["llama-3.1-8b", "llama-2-70b"],
    "tp": [1, 2],
    "batch_size": [1, 8, 64],
    "kv_len": [1024, 8192, 100_000],
    "tpot_ms": 20.0,
}
SPECS = {
    **{keep: {**DEPLOYMENTS, "keep": keep} for keep in ("best", "pareto", "all")},
    **{f"steps {keep}": {**STEPS, "keep": keep} for keep in ("best", "all")},
}
KEY = PlanKey("llama-3.1-8b", "h100", 1, "bf16", "bf16", "kernels")


@pytest.fixture(autouse=True)
def _small_units(cut_units: Callable[[int], None]) -> None:
    """Have units so small that a group's rows are of many of them."""
    cut_units(5)


def sharded(spec: Any, folder: Path, total: int) -> list[Path]:
    files = [folder / f"{number}.parquet" for number in range(1, total + 1)]
    for number, file in enumerate(files, 1):
        run_sweep(spec, file, shard=(number, total))
    return files


def fastroof_metadata(path: Path) -> dict[bytes, bytes]:
    found = pq.read_metadata(path).metadata
    return {key: value for key, value in found.items() if key.startswith(b"fastroof.")}


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 12))
def test_units_are_dealt_disjoint_complete_and_even(sizes: list[int], total: int) -> None:
    listed = [WorkUnit(i, KEY, "steps", 0, size, size, True) for i, size in enumerate(sizes)]
    dealt = [shard_units(listed, Shard(number, total)) for number in range(1, total + 1)]
    assert sorted(unit.number for mine in dealt for unit in mine) == list(range(len(listed)))
    assert all(mine == sorted(mine, key=lambda unit: unit.number) for mine in dealt)
    loads = [sum(max(unit.size, 1) for unit in mine) for mine in dealt]
    # greedy dealing: no shard is ahead by more than its last unit
    assert max(loads) - min(loads) <= max([1, *sizes])


@pytest.mark.parametrize(
    "name",
    [
        "best",
        "steps best",
        pytest.param("all", marks=pytest.mark.slow),
        # which differ in what is kept of a unit, as test_sweep and test_deployments test it
        pytest.param("pareto", marks=pytest.mark.release),
        pytest.param("steps all", marks=pytest.mark.release),
    ],
)
def test_merged_shards_equal_the_whole(tmp_path: Path, name: str) -> None:
    whole = run_sweep(SPECS[name], tmp_path / "whole.parquet")
    assert len(work_units(load_spec(SPECS[name]))) >= 8
    files = sharded(SPECS[name], tmp_path, 3)
    merged = merge_shards(reversed(files), tmp_path / "merged.parquet")
    expected = pq.read_table(tmp_path / "whole.parquet")
    assert pq.read_table(tmp_path / "merged.parquet").equals(expected)
    assert fastroof_metadata(tmp_path / "merged.parquet") == fastroof_metadata(tmp_path / "whole.parquet")
    ignored = {"evaluate_s", "total_s", "output"}
    for key in set(vars(whole)) - ignored:
        assert getattr(merged, key) == getattr(whole, key), key
    assert whole.infeasible


def test_more_shards_than_units_and_shards_of_nothing_possible(tmp_path: Path) -> None:
    spec = {**STEPS, "models": ["llama-2-70b", "llama-3.1-8b"], "tp": 1, "kv_len": [1024]}
    assert len(work_units(load_spec(spec))) == 2
    files = sharded(spec, tmp_path, 5)
    run_sweep(spec, tmp_path / "whole.parquet")
    assert merge_shards(files, tmp_path / "merged.parquet").rows == 1
    assert pq.read_table(tmp_path / "merged.parquet").equals(pq.read_table(tmp_path / "whole.parquet"))


@pytest.mark.slow
def test_what_is_no_whole_set_of_shards_is_refused(tmp_path: Path) -> None:
    spec = {**STEPS, "models": ["llama-3.1-8b"]}
    one, two = sharded(spec, tmp_path, 2)
    output = tmp_path / "merged.parquet"
    other = tmp_path / "other.parquet"
    run_sweep({**spec, "tpot_ms": 30.0}, other, shard=(2, 2))
    third = tmp_path / "third.parquet"
    run_sweep(spec, third, shard=(2, 3))
    whole = tmp_path / "whole.parquet"
    run_sweep(spec, whole)
    text = tmp_path / "text.parquet"
    text.write_text("no Parquet")
    before = sorted(tmp_path.iterdir())
    cases = [
        ([], "nothing to merge"),
        ([one], "missing: shard 2/2"),
        ([one, two, two], "shard 2/2 is given twice"),
        ([one, other], "of different sweeps: tpot_ms: 20.0 there, 30.0 here"),
        ([one, third], "shards: of 2 there, of 3 here"),
        ([one, whole], "whole.parquet is not a shard of a sweep"),
        ([one, text], "text.parquet cannot be read"),
        ([one, tmp_path / "none.parquet"], "file does not exist"),
    ]
    for files, said in cases:
        with pytest.raises(SweepError, match=said):
            merge_shards(files, output)
    with pytest.raises(SweepError, match="is one of the shards"):
        merge_shards([one, two], one)
    assert sorted(tmp_path.iterdir()) == before


def test_no_flipped_bit_of_a_shard_changes_a_merged_row(tmp_path: Path) -> None:
    one, two = sharded({**STEPS, "models": ["llama-3.1-8b"]}, tmp_path, 2)
    summary = merge_shards([one, two], tmp_path / "whole.parquet")
    whole = pq.read_table(tmp_path / "whole.parquet")
    content, random, refused = two.read_bytes(), Random(21), 0
    for _ in range(60):
        flipped = bytearray(content)
        flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
        two.write_bytes(flipped)
        try:
            again = merge_shards([one, two], tmp_path / "merged.parquet")
        except SweepError:
            refused += 1
        else:
            assert pq.read_table(tmp_path / "merged.parquet").equals(whole)
            assert (again.evaluations, again.rows) == (summary.evaluations, summary.rows)
            (tmp_path / "merged.parquet").unlink()
    assert refused > 20  # the footer, which has no checksum, is most of so short a file


def test_a_shard_with_units_of_another_is_refused(tmp_path: Path) -> None:
    one, two = sharded({**STEPS, "models": ["llama-3.1-8b"]}, tmp_path, 2)
    table = pq.read_table(two)
    metadata = {**pq.read_metadata(two).metadata, b"fastroof.shard": b"1/2"}
    renamed = tmp_path / "renamed.parquet"
    pq.write_table(table.replace_schema_metadata(metadata), renamed)
    assert ShardFile(renamed).shard == Shard(1, 2)
    with pytest.raises(SweepError, match="does not hold the units of shard 1/2"):
        merge_shards([renamed, two], tmp_path / "merged.parquet")
    assert ShardFile(one).shard == Shard(1, 2)


def test_tables_and_versions_must_be_the_same() -> None:
    here = {"fastroof.version": "1", "fastroof.tables_hash": "a", "fastroof.spec": '{"tp": [1]}'}
    there = {"fastroof.version": "2", "fastroof.tables_hash": "b", "fastroof.spec": '{"tp": [2]}'}
    assert differences(here, here) == []
    assert differences(there, here) == [
        "fastroof's version: 2 there, 1 here",
        "tp: [2] there, [1] here",
        "the tables' hash: b there, a here",
    ]


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "-1/2", "1/2/3", "1/100001"])
def test_numbers_of_shards_are_checked(text: str) -> None:
    with pytest.raises(SweepError, match="shard must be i/n"):
        Shard.from_text(text)


def test_shards_are_parquet(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"must end in \.parquet"):
        run_sweep(STEPS, tmp_path / "1.csv", shard=(1, 2))
    with pytest.raises(SweepError, match="shard must be i/n"):
        run_sweep(STEPS, tmp_path / "1.parquet", shard=(0, 2))
    assert list(tmp_path.iterdir()) == []


def test_rows_are_taken_apart_by_unit() -> None:
    batch = pa.RecordBatch.from_pydict({"a": [1, 2, 3]})
    table = pa.Table.from_batches([tagged_rows(batch.slice(0, 1), 4), tagged_rows(batch.slice(1), 7)])
    assert [rows.to_pydict() for rows in rows_by_unit(table, [4, 5, 7])] == [
        {"a": [1]},
        {"a": []},
        {"a": [2, 3]},
    ]


def test_a_shard_knows_its_columns(tmp_path: Path) -> None:
    run_sweep(STEPS, tmp_path / "1.parquet", shard=(1, 2))
    run_sweep(STEPS, tmp_path / "whole.parquet")
    whole = pq.read_schema(tmp_path / "whole.parquet")
    shard = pq.read_schema(tmp_path / "1.parquet")
    assert shard.names == [*whole.names, "unit"]
    assert fastroof_metadata(tmp_path / "1.parquet")[b"fastroof.shard"] == b"1/2"
    assert b"fastroof.shard" not in fastroof_metadata(tmp_path / "whole.parquet")
