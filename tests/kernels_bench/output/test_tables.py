"""Journals become tables that fastroof loads, bit by bit, with their provenance."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.errors import MeasureError, TableError
from fastroof.load import load_measured
from fastroof.load.families import codes_of, group_medians
from kernels_bench.output.recorded import read_journals
from kernels_bench.output.table_sets import journals_of, load_table_set
from kernels_bench.output.tables import usable_tables, write_tables
from kernels_bench.protocol import Point
from kernels_bench.sentinels import repeatability
from tests.kernels_bench.fakes import command
from tests.reference.made_journals import (
    copy,
    decode,
    gemm,
    prefill,
    row,
    sentinel,
    skip,
    start,
    steady_sentinels,
    write_journal,
)  # fmt: skip

AWKWARD_US = [1 / 3 * 100, 77.00000000000001, 1e3 / 7, 123456.78901234567]
POINTS = [
    (gemm(64), AWKWARD_US[0]),
    (gemm(4096, dtype="fp8"), AWKWARD_US[1] * 3),
    (decode(16, 4096), AWKWARD_US[2]),
    (prefill(2048), AWKWARD_US[3]),
    (copy(8192), 120.0),
]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return write_journal(tmp_path / "out" / "journal-a.jsonl", POINTS)


def test_every_row_comes_back_to_the_last_bit(journal: Path, tmp_path: Path) -> None:
    written = write_tables([journal], tmp_path / "h100" / "kernels_bench")
    loaded = load_measured(written.folder)
    assert loaded.gpu == "h100"
    found = {}
    for operator, table in loaded.tables.items():
        names = [c.name for c in (*table.schema.keys, *table.schema.axes)]
        for i in range(table.num_rows):
            values = {n: v if isinstance(v := table.columns[n][i], str) else int(v) for n in names}
            found[Point(operator, values).key] = float(table.columns["latency_us"][i])
    assert found == {point.key: us for point, us in POINTS}
    assert written.rows == {op: t.num_rows for op, t in loaded.tables.items()}


def test_either_format_has_the_same_rows(journal: Path, tmp_path: Path) -> None:
    loaded = {}
    for name in ("csv", "parquet"):
        words = ["tables", str(journal), "-o", str(tmp_path / "h100" / name), "--format", name]
        assert command(*words).exit_code == 0
        loaded[name] = load_measured(tmp_path / "h100" / name)
        assert all(table.files[0].endswith(name) for table in loaded[name].tables.values())
    assert loaded["csv"].content_hash == loaded["parquet"].content_hash


def test_spread_provider_kernel_and_gpu_are_columns(journal: Path, tmp_path: Path) -> None:
    folder = write_tables([journal], tmp_path / "h100" / "kernels_bench").folder
    columns = load_measured(folder).tables["attention_decode"].columns
    us = POINTS[2][1]
    assert [float(columns[n][0]) for n in ("p25_us", "p75_us", "min_us")] == [us * 0.99, us * 1.01, us * 0.98]
    assert int(columns["num_replays"][0]) == 20
    assert [columns[n][0] for n in ("provider", "kernel", "gpu")] == ["torch", "F.linear", "h100"]


def test_rows_of_an_amd_card_name_their_provider(tmp_path: Path) -> None:
    first = start("mi300x", facts={"gpu_name": "AMD Instinct MI300X", "monitor": "amdsmi"})
    line = row(gemm(64, dtype="fp8"), 20.0, provider="aiter", kernel="aiter gemm_a8w8_CK, scales of rows")
    journal = write_journal(tmp_path / "journal-a.jsonl", [line], first=first)
    loaded = load_measured(write_tables([journal], tmp_path / "mi300x" / "kernels_bench").folder)
    table = loaded.tables["gemm"]
    columns = table.columns
    assert (loaded.gpu, *(columns[n][0] for n in ("provider", "gpu"))) == ("mi300x", "aiter", "mi300x")
    assert table.provenance["operators"]["gemm"]["kernels"] == [line["kernel"]]


def test_the_same_journal_gives_the_same_bytes(journal: Path, tmp_path: Path) -> None:
    folders = [write_tables([journal], tmp_path / name / "kernels_bench").folder for name in ("a", "b")]
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == sorted(path.name for path in folders[1].iterdir())
    assert all((folders[0] / n).read_bytes() == (folders[1] / n).read_bytes() for n in names)


def test_provenance_holds_what_the_start_line_holds(tmp_path: Path) -> None:
    lines = [
        row(gemm(m), 50.0 + m, throttle_reasons=4 if m > 2 else 1, sm_clock_mhz=1700.0 + m) for m in (1, 2, 3)
    ]
    lines += [skip(gemm(8), "oom", "needs 90 GB"), skip(decode(1, 2), "oom", "needs 90 GB")]
    lines[0]["remeasured"] = True
    journal = write_journal(tmp_path / "journal-a.jsonl", lines)
    folder = write_tables([journal], tmp_path / "h100" / "kernels_bench", rank=7).folder
    facts = tomllib.loads((folder / "provenance.toml").read_text())
    assert (facts["gpu"], facts["rank"], facts["rows"], facts["measured_again"]) == ("h100", 7, 3, 1)
    expected = {k: v for k, v in start().items() if k != "type"}
    del expected["facts"]["cap"], expected["request"]["grid"]  # TOML has no null
    run = facts["runs"]["run-a"]
    assert {name: run[name] for name in expected} == expected
    assert run["finished"]
    assert run["end"]["reason"] == "complete"
    assert facts["skips"] == {"oom": {"needs 90 GB": 2}}
    assert facts["operators"]["gemm"] == {
        "rows": 3,
        "skipped": 1,
        "providers": ["torch"],
        "kernels": ["F.linear"],
    }
    assert facts["device"]["sm_clock_mhz"] == {"min": 1701.0, "median": 1702.0, "max": 1703.0}
    assert facts["device"]["throttled_rows"] == {"gpu_idle": 2, "sw_power_cap": 1}
    [repeat] = facts["sentinels"]
    assert (repeat["run"], repeat["rounds"], repeat["key"]) == ("run-a", 6, gemm(4096).key)
    assert (repeat["min_us"], repeat["max_us"]) == (200.0, 200.2)


def test_an_engine_is_named_with_the_version_of_all_runs(tmp_path: Path) -> None:
    versions = {"versions": {"vllm": "0.26.0"}}
    journals = [
        write_journal(tmp_path / f"{i}.jsonl", [row(gemm(m), 50.0)], first=start(run_id=f"{i}", **versions))
        for i, m in enumerate((1, 2))
    ]
    folder = write_tables(journals, tmp_path / "h100" / "kernels_bench", engine="vllm").folder
    (table,) = load_measured(folder).tables.values()
    assert (table.engine, table.provenance["framework_version"]) == ("vllm", "0.26.0")
    with pytest.raises(
        MeasureError, match="--engine sglang: the runs must record one version of it, found none"
    ):
        write_tables(journals, tmp_path / "h100" / "other", engine="sglang")
    assert not (tmp_path / "h100" / "other").exists()
    folder = write_tables(journals, tmp_path / "h100" / "named", engine="sglang-0.5.14").folder
    (table,) = load_measured(folder).tables.values()
    assert (table.engine, table.provenance["framework_version"]) == ("sglang", "0.5.14")
    with pytest.raises(MeasureError, match=r"found 0\.26\.0"):
        write_tables(journals, tmp_path / "h100" / "other", engine="vllm-0.25.0")
    lines = [row(gemm(3), 50.0), start(run_id="new", versions={"vllm": "0.27.0"}), row(gemm(4), 50.0)]
    mixed = write_journal(tmp_path / "mixed.jsonl", lines, first=start(**versions), ended=False)
    with pytest.raises(MeasureError, match=r"found 0\.26\.0, 0\.27\.0"):
        write_tables([mixed], tmp_path / "h100" / "other", engine="vllm")


def test_a_resumed_run_is_listed_with_each_of_its_starts(tmp_path: Path) -> None:
    lines = [row(gemm(1), 50.0), start(driver="new"), row(gemm(2), 51.0)]
    folder = write_tables(
        [write_journal(tmp_path / "j.jsonl", lines, ended=False)], tmp_path / "h100" / "kernels_bench"
    ).folder
    runs = tomllib.loads((folder / "provenance.toml").read_text())["runs"]
    assert list(runs) == ["run-a", "run-a#2"]
    assert [run["rows"] for run in runs.values()] == [1, 1]
    assert [run["finished"] for run in runs.values()] == [False, False]
    assert runs["run-a#2"]["driver"] == "new"


def test_a_torn_last_line_is_ignored(journal: Path, tmp_path: Path) -> None:
    with journal.open("a") as file:
        file.write(json.dumps(row(gemm(2), 51.0))[:-5])
    assert write_tables([journal], tmp_path / "h100" / "k").rows["gemm"] == 2


def test_a_point_measured_again_replaces_its_row_and_its_skip(tmp_path: Path) -> None:
    lines = [skip(gemm(1), "error", "lost"), row(gemm(1), 50.0), row(gemm(1), 49.0, remeasured=True)]
    recorded = read_journals([write_journal(tmp_path / "j.jsonl", lines)])
    assert [line["latency_us"] for line in recorded.rows.values()] == [49.0]
    assert not recorded.skips
    assert recorded.runs[0].rows == 1


def test_two_journals_of_other_points_are_one_table(tmp_path: Path) -> None:
    one = write_journal(tmp_path / "a.jsonl", [(gemm(1), 50.0)])
    two = write_journal(
        tmp_path / "b.jsonl", [(gemm(2), 51.0), (decode(1, 64), 9.0)], first=start(run_id="run-b")
    )
    tables, _ = usable_tables(read_journals([one, two]), None)
    assert {op: len(t["latency_us"]) for op, t in tables.items()} == {"gemm": 2, "attention_decode": 1}
    assert [run.name for run in read_journals([one, two]).runs] == ["run-a", "run-b"]


def test_skips_of_many_reasons_are_counted_together(tmp_path: Path) -> None:
    lines = [skip(gemm(m), "error", f"no luck with {m}") for m in range(1, 31)] + [row(gemm(64), 50.0)]
    folder = write_tables([write_journal(tmp_path / "j.jsonl", lines)], tmp_path / "h100" / "k").folder
    reasons = tomllib.loads((folder / "provenance.toml").read_text())["skips"]["error"]
    assert len(reasons) == 21
    assert sum(reasons.values()) == 30
    assert reasons["other reasons"] == 10


# -- rows that cannot be true --------------------------------------------------------------------


def test_a_row_above_the_peak_is_left_out_and_listed(tmp_path: Path) -> None:
    points = [(gemm(m), 2.0 + m) for m in range(1, 200)] + [(gemm(8192, 8192, 8192), 1000.0)]
    written = write_tables([write_journal(tmp_path / "j.jsonl", points)], tmp_path / "h100" / "k")
    assert list(written.left_out) == [gemm(8192, 8192, 8192).key]
    assert written.rows == {"gemm": 199}
    assert load_measured(written.folder).tables["gemm"].num_rows == 199
    facts = tomllib.loads((written.folder / "provenance.toml").read_text())
    # 2 * 8192**3 FLOPs in 1 ms over 989.5 TFLOP/s.
    assert facts["left_out"][gemm(8192, 8192, 8192).key].startswith("MFU 1.111")


def test_many_rows_above_the_peak_are_refused(tmp_path: Path) -> None:
    points = [(gemm(m, 8192, 8192), 1.0) for m in (4096, 8192)] + [(gemm(1), 50.0)]
    with pytest.raises(MeasureError, match="2 of 3 rows of gemm are faster than the peak"):
        write_tables([write_journal(tmp_path / "j.jsonl", points)], tmp_path / "h100" / "k")
    assert not (tmp_path / "h100").exists()


# -- what is refused -----------------------------------------------------------------------------


def test_the_same_point_in_two_journals_is_for_merge(tmp_path: Path) -> None:
    paths = [write_journal(tmp_path / name, [(gemm(1), 50.0)]) for name in ("a.jsonl", "b.jsonl")]
    with pytest.raises(MeasureError, match="kernels-bench merge"):
        read_journals(paths)


def test_journals_of_two_gpus_are_refused(tmp_path: Path) -> None:
    one = write_journal(tmp_path / "a.jsonl", [(gemm(1), 50.0)])
    two = write_journal(tmp_path / "b.jsonl", [(gemm(2), 50.0)], first=start("h200"))
    with pytest.raises(MeasureError, match="several GPUs, h100, h200"):
        write_tables([one, two], tmp_path / "h100" / "k")


def test_a_folder_of_another_gpu_is_refused(journal: Path, tmp_path: Path) -> None:
    other = write_journal(tmp_path / "b.jsonl", [(gemm(1), 50.0)], first=start("h200"))
    folder = write_tables([other], tmp_path / "x" / "kernels_bench").folder
    with pytest.raises(MeasureError, match="holds tables of h200, but h100 was measured"):
        write_tables([journal], folder, overwrite=True)
    sibling = tmp_path / "y"
    sibling.mkdir()
    facts = (Path(__file__).parents[3] / "bench_data" / "h200" / "gpu.toml").read_text()
    (sibling / "gpu.toml").write_text(facts)
    with pytest.raises(MeasureError, match=r"gpu\.toml of h200, but h100"):
        write_tables([journal], sibling / "kernels_bench")


def test_tables_are_replaced_only_on_request(journal: Path, tmp_path: Path) -> None:
    folder = write_tables([journal], tmp_path / "h100" / "k").folder
    before = (folder / "gemm.csv").read_bytes()
    other = write_journal(tmp_path / "b.jsonl", [(gemm(3), 50.0)])
    with pytest.raises(TableError, match="overwrite"):
        write_tables([other], folder)
    assert (folder / "gemm.csv").read_bytes() == before
    write_tables([other], folder, overwrite=True)
    assert sorted(p.name for p in folder.iterdir()) == ["gemm.csv", "provenance.toml"]


def test_the_folder_of_the_journals_is_never_replaced(journal: Path) -> None:
    with pytest.raises(MeasureError, match="holds journals"):
        write_tables([journal], journal.parent, overwrite=True)
    assert journal.is_file()


def test_a_full_disk_is_reported_and_leaves_nothing(
    journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastroof.load.write._write_table", full)
    with pytest.raises(MeasureError, match=r"No space left on device; the journals keep every row"):
        write_tables([journal], tmp_path / "h100" / "k")
    assert not (tmp_path / "h100").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"latency_us": 0.0}, "latency_us is 0.0"),
        ({"latency_us": None}, "latency_us is None"),
        ({"p25_us": math.nan}, "p25_us is nan"),
        ({"num_replays": True}, "num_replays is True"),
        ({"provider": ""}, "names no provider"),
        ({"operator": "conv"}, "operator 'conv'"),
        ({"values": {"dtype": "bf16", "m": 1, "n": 1}}, "another version"),
        ({"values": {"dtype": "bf16", "m": 0, "n": 1, "k": 1}}, "m is 0"),
        ({"values": {"dtype": "bf16", "m": 1.5, "n": 1, "k": 1}}, "m is 1.5"),
    ],
)
def test_a_row_that_does_not_fit_is_named(change: dict[str, object], words: str, tmp_path: Path) -> None:
    journal = write_journal(tmp_path / "j.jsonl", [row(gemm(1), 50.0) | change])
    with pytest.raises(MeasureError, match=words):
        read_journals([journal])


def test_a_journal_without_rows_is_refused_with_the_reason(tmp_path: Path) -> None:
    empty = write_journal(tmp_path / "a.jsonl", [], ended=False)
    with pytest.raises(MeasureError, match="before its first point"):
        read_journals([empty])
    skipped = write_journal(tmp_path / "b.jsonl", [skip(gemm(1), "reference", "off by 0.3")])
    with pytest.raises(MeasureError, match=r"all 1 points were skipped.*off by 0\.3"):
        read_journals([skipped])
    with pytest.raises(MeasureError, match="no such journal"):
        read_journals([tmp_path / "c.jsonl"])
    with pytest.raises(MeasureError, match="no journal was given"):
        read_journals([])
    headless = tmp_path / "d.jsonl"
    headless.write_text(json.dumps(row(gemm(1), 5.0)) + "\n")
    with pytest.raises(MeasureError, match="not 'start'"):
        read_journals([headless])


# -- table sets ----------------------------------------------------------------------------------


def test_a_journal_its_folder_and_its_tables_are_the_same_set(journal: Path) -> None:
    folder = write_tables([journal], journal.parent / "kernels_bench").folder
    sets = [load_table_set(str(word)) for word in (journal, journal.parent, folder)]
    for operator in sets[2].tables:
        every = [sorted(s.tables[operator].columns["latency_us"].tolist()) for s in sets]
        assert every[0] == every[1] == every[2]
    assert journals_of(str(journal.parent)) == [journal]
    assert journals_of(str(folder)) == []


def test_a_source_is_picked_with_a_colon() -> None:
    picked = load_table_set("h100:aiconfigurator-vllm-0.25.0")
    assert set(picked.sources.values()) == {"aiconfigurator-vllm-0.25.0"}
    with pytest.raises(TableError, match="no source 'none'"):
        load_table_set("h100:none")
    with pytest.raises(MeasureError, match="names no table set"):
        load_table_set("h100:")


# -- arithmetic ----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2), st.floats(1e-3, 1e9)), min_size=1))
def test_group_medians_are_medians(rows: list[tuple[int, int, float]]) -> None:
    import statistics

    import numpy as np

    codes = codes_of([np.array([r[0] for r in rows]), np.array([r[1] for r in rows])])
    found = group_medians(codes, np.array([r[2] for r in rows]))
    keys = sorted({(a, b) for a, b, _ in rows})
    expected = [statistics.median([us for a, b, us in rows if (a, b) == key]) for key in keys]
    assert found.tolist() == pytest.approx(expected, rel=1e-15)


def test_drift_and_spread_of_sentinels() -> None:
    rising = [sentinel(gemm(1), i, 100.0 + i) for i in range(9)]
    [repeat] = repeatability("a", rising[::-1])
    assert repeat.drift == pytest.approx(107 / 101 - 1)
    assert repeat.spread == pytest.approx((107.2 - 100.8) / 104)
    one_bad = [sentinel(gemm(1), i, 300.0 if i == 7 else 100.0) for i in range(20)]
    [repeat] = repeatability("a", one_bad)
    assert (repeat.spread, repeat.drift, repeat.max_us) == (0.0, 0.0, 300.0)
    assert len(repeatability("a", [*steady_sentinels(), sentinel(copy(1), 0, 1.0)])) == 2


def test_the_command_writes_and_prints_what_it_wrote(journal: Path, tmp_path: Path) -> None:
    out = tmp_path / "h100" / "kernels_bench"
    result = command("tables", str(journal.parent), "-o", str(out), "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert document["rows"]["gemm"] == 2
    assert load_measured(out).tables["gemm"].num_rows == 2
