"""Several runs become one table: medians of medians, the spread kept, nothing mixed that must not be."""

from __future__ import annotations

import json
import statistics
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.columns import OPTIONAL_COLUMNS
from fastroof.config.gpu import load_gpu
from fastroof.errors import MeasureError, TableError
from fastroof.load import load_measured
from kernels_bench.output.merge import merge_runs, write_merged
from kernels_bench.output.table_sets import load_table_set
from kernels_bench.output.tables import write_tables
from kernels_bench.output.validate import validate_tables
from kernels_bench.protocol import Point
from tests.kernels_bench.fakes import command
from tests.reference.made_journals import decode, gemm, row, start, write_journal


def runs_of(folder: Path, *latencies: dict[int, float], **changes: Any) -> list[Path]:
    """One journal a run, each with a GEMM of every m."""
    return [
        write_journal(
            folder / f"journal-{i}.jsonl",
            [row(gemm(m), us, **changes) for m, us in run.items()],
            first=start(run_id=f"run-{i}"),
        )
        for i, run in enumerate(latencies)
    ]


def test_the_median_of_medians_with_its_spread(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, {1: 50.0, 2: 60.0}, {1: 53.0, 2: 60.0}, {1: 51.0, 4: 70.0})
    columns = merge_runs(runs).tables["gemm"]
    assert columns["m"].tolist() == [1, 2, 4]
    assert columns["latency_us"].tolist() == [51.0, 60.0, 70.0]
    assert columns["num_runs"].tolist() == [3, 2, 1]
    assert columns["run_spread"].tolist() == [3.0 / 51.0, 0.0, 0.0]
    assert columns["p25_us"].tolist() == [51.0 * 0.99, 60.0 * 0.99, 70.0 * 0.99]
    assert columns["min_us"].tolist() == [50.0 * 0.98, 60.0 * 0.98, 70.0 * 0.98]
    assert columns["num_replays"].tolist() == [60, 40, 20]


def test_merged_runs_name_their_engine(tmp_path: Path) -> None:
    runs = [
        write_journal(
            tmp_path / f"{i}.jsonl",
            [row(gemm(1), us)],
            first=start(run_id=f"{i}", versions={"vllm": "0.26.0"}),
        )
        for i, us in enumerate((50.0, 51.0))
    ]
    folder = write_merged(merge_runs(runs), tmp_path / "h100" / "merged", engine="vllm")
    (table,) = load_measured(folder).tables.values()
    assert (table.engine, table.provenance["framework_version"]) == ("vllm", "0.26.0")


def test_one_run_alone_keeps_every_bit(tmp_path: Path) -> None:
    awkward = 100 / 3
    columns = merge_runs(runs_of(tmp_path, {1: awkward}, {2: 50.0})).tables["gemm"]
    assert columns["latency_us"][0] == awkward


@pytest.mark.slow
@given(
    st.lists(
        st.lists(st.floats(1.0, 1e6), min_size=4, max_size=4).map(sorted),
        min_size=2, max_size=6,
    )
)  # fmt: skip
def test_quartiles_stay_around_the_median(
    tmp_path_factory: pytest.TempPathFactory, figures: list[list[float]]
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    names = ("min_us", "p25_us", "latency_us", "p75_us")
    # A decode of one token: no time is too short for it.
    runs = [
        write_journal(folder / f"j{i}.jsonl", [row(decode(1, 2), 1.0) | dict(zip(names, run, strict=True))])
        for i, run in enumerate(figures)
    ]
    columns = merge_runs(runs).tables["attention_decode"]
    low, first, median, third = (float(columns[name][0]) for name in names)
    assert low <= first <= median <= third
    assert median == pytest.approx(statistics.median(run[2] for run in figures), rel=1e-15)
    assert low == min(run[0] for run in figures)


def test_the_order_of_runs_does_not_matter(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, {1: 50.0, 2: 61.0}, {1: 53.0, 2: 60.0}, {1: 51.0})
    forward, backward = (merge_runs(order).tables["gemm"] for order in (runs, runs[::-1]))
    assert all(forward[name].tolist() == backward[name].tolist() for name in forward)


def test_table_folders_merge_like_the_journals_they_came_from(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, {1: 50.0, 2: 61.0}, {1: 53.0, 2: 60.0})
    folders = [write_tables([run], tmp_path / f"t{i}" / "kernels_bench").folder for i, run in enumerate(runs)]
    of_journals, of_folders = merge_runs(runs).tables["gemm"], merge_runs(folders).tables["gemm"]
    assert {n: v.tolist() for n, v in of_journals.items()} == {n: v.tolist() for n, v in of_folders.items()}


def test_what_was_written_loads_again(tmp_path: Path) -> None:
    merged = merge_runs(runs_of(tmp_path, {1: 50.0, 2: 61.0}, {1: 53.0, 2: 60.0}))
    folder = write_merged(merged, tmp_path / "h100" / "kernels_bench", rank=5)
    columns = load_measured(folder).tables["gemm"].columns
    assert columns["latency_us"].tolist() == [51.5, 60.5]
    facts = tomllib.loads((folder / "provenance.toml").read_text())
    assert (facts["gpu"], facts["rank"], facts["rows"]) == ("h100", 5, 2)
    spread = facts["operators"]["gemm"]["run_spread"]
    assert spread["max"] == 3.0 / 51.5
    assert spread["worst"] == gemm(1).key
    assert [run["runs"][f"run-{i}"]["seed"] for i, run in enumerate(facts["merged_from"])] == [0, 0]
    assert {s["run"] for s in facts["sentinels"]} == {"run-0", "run-1"}
    with pytest.raises(TableError, match="overwrite"):
        write_merged(merged, folder)


@pytest.mark.skipif(
    "num_runs" not in {c.name for c in OPTIONAL_COLUMNS}, reason="fastroof.columns has no num_runs yet"
)
def test_runs_and_spread_are_columns_of_the_file(tmp_path: Path) -> None:
    merged = merge_runs(runs_of(tmp_path, {1: 50.0}, {1: 53.0}))
    columns = load_measured(write_merged(merged, tmp_path / "h100" / "k")).tables["gemm"].columns
    assert columns["num_runs"].tolist() == [2]
    assert columns["run_spread"].tolist() == [3.0 / 51.5]
    validation = validate_tables(load_table_set(str(tmp_path / "h100" / "k")), load_gpu("h100"))
    apart = [f for report in validation.reports for f in report.findings if f.kind == "runs_apart"]
    assert [(f.count, f.worst["m"]) for f in apart] == [(1, 1)]


@pytest.mark.slow
def test_a_run_counts_once_however_often_it_timed_a_point(tmp_path: Path) -> None:
    # The shipped all-reduce has points with several rows.
    source = load_measured("h100")
    table = source.tables["allreduce"]
    slower = replace(table, columns={**table.columns, "latency_us": table.columns["latency_us"] * 2.0})
    from fastroof.load.write import write_source

    folder = write_source(tmp_path / "s", {"allreduce": known(slower.columns)}, {"gpu": "h100"}, "csv")
    columns = merge_runs(["h100", folder]).tables["allreduce"]
    assert set(columns["num_runs"].tolist()) == {2}
    ratio = columns["run_spread"] * columns["latency_us"]
    assert np.allclose(ratio, columns["latency_us"] / 1.5)


def known(columns: Any) -> dict[str, Any]:
    from kernels_bench.output.tables import known_columns

    return known_columns("allreduce", columns)


# -- what is not mixed ---------------------------------------------------------------------------


def providers(folder: Path) -> list[Path]:
    return [
        write_journal(
            folder / f"{name}.jsonl",
            [row(decode(1, 64), us, provider=name, kernel=f"{name} kernel"), row(decode(2, 64), 9.0)],
        )
        for name, us in (("vllm", 7.0), ("flashinfer", 8.0))
    ]


def test_two_providers_at_a_point_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match=r"1 points.*flashinfer and vllm.*--prefer 'flashinfer,vllm'"):
        merge_runs(providers(tmp_path))


def test_the_preferred_provider_is_taken_alone(tmp_path: Path) -> None:
    for first, us in (("vllm", 7.0), ("flashinfer", 8.0)):
        columns = merge_runs(providers(tmp_path), prefer=[first]).tables["attention_decode"]
        assert columns["latency_us"].tolist() == [us, 9.0]
        assert columns["provider"].tolist() == [first, "torch"]
        assert columns["num_runs"].tolist() == [1, 2]
    with pytest.raises(MeasureError, match="different kernels"):
        merge_runs(providers(tmp_path), prefer=["cpu"])


def test_kernels_of_one_provider_are_all_named(tmp_path: Path) -> None:
    runs = [
        write_journal(tmp_path / f"{name}.jsonl", [row(gemm(1), 50.0, kernel=name)])
        for name in ("nvjet", "cutlass")
    ]
    assert merge_runs(runs).tables["gemm"]["kernel"].tolist() == ["cutlass | nvjet"]


def test_custom_ops_and_inductors_kernels_have_no_median(tmp_path: Path) -> None:
    norm = Point("elementwise", {"kind": "rmsnorm_residual", "m": 1, "width": 64, "io_bytes": 512})
    kernels = {"vllm fused_add_rms_norm": 3.0, "vllm RMSNorm, inductor of torch 2.11.0": 2.0}
    runs = [
        write_journal(tmp_path / f"{us}.jsonl", [row(norm, us, provider="vllm", kernel=kernel)])
        for kernel, us in kernels.items()
    ]
    for preferred in ([], ["vllm"]):
        with pytest.raises(MeasureError, match="by vllm and vllm by Inductor; their median"):
            merge_runs(runs, prefer=preferred)
    for preferred, us in ((["vllm by Inductor"], 2.0), (["vllm", "vllm by Inductor"], 3.0)):
        columns = merge_runs(runs, prefer=preferred).tables["elementwise"]
        assert (columns["latency_us"].tolist(), columns["provider"].tolist()) == ([us], ["vllm"])


@pytest.mark.slow
def test_columns_that_one_run_lacks_are_left_out_and_reported(tmp_path: Path) -> None:
    [run] = runs_of(tmp_path, {64: 50.0})
    merged = merge_runs([run, "h100:aiconfigurator-vllm-0.25.0"])
    assert "p25_us" not in merged.tables["gemm"]
    assert any(note.startswith("gemm: p25_us is in 1 of 2 runs") for note in merged.notes)


def test_two_gpus_one_run_and_the_same_run_are_refused(tmp_path: Path) -> None:
    [run] = runs_of(tmp_path, {1: 50.0})
    other = write_journal(tmp_path / "o.jsonl", [(gemm(1), 50.0)], first=start("h200"))
    with pytest.raises(MeasureError, match="is of h200"):
        merge_runs([run, other])
    with pytest.raises(MeasureError, match="at least two runs, got 1"):
        merge_runs([run])
    with pytest.raises(MeasureError, match="named twice"):
        merge_runs([run, run])


def test_a_run_of_another_schema_is_refused(tmp_path: Path) -> None:
    [run] = runs_of(tmp_path, {1: 50.0})
    old = row(decode(1, 64), 9.0)
    del old["values"]["window"]
    with pytest.raises(MeasureError, match="measured by another version"):
        merge_runs([run, write_journal(tmp_path / "old.jsonl", [old])])


def test_the_command(tmp_path: Path) -> None:
    runs = [str(run) for run in runs_of(tmp_path, {1: 50.0}, {1: 53.0})]
    out = tmp_path / "h100" / "kernels_bench"
    result = command("merge", *runs, "-o", str(out), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["operators"]["gemm"]["rows_of_several_runs"] == 1
    shown = command("merge", *runs, "-o", str(out), "--overwrite")
    assert "5.8%" in shown.output


def test_a_gpu_that_fastroof_does_not_know_takes_its_facts_along(tmp_path: Path) -> None:
    facts = (Path(__file__).parents[3] / "bench_data" / "h100" / "gpu.toml").read_text(encoding="utf-8")
    own = facts.replace('"h100"', '"lab-card"', 1)
    runs = []
    for i, us in enumerate((50.0, 53.0)):
        first = start("lab-card", run_id=f"run-{i}")
        runs.append(write_journal(tmp_path / f"out-{i}" / "journal-a.jsonl", [(gemm(1), us)], first=first))
        (tmp_path / f"out-{i}" / "gpu.toml").write_text(own, encoding="utf-8")
    folder = write_merged(merge_runs(runs), tmp_path / "merged" / "kernels_bench")
    assert load_measured(folder).gpu == "lab-card"
    folder = write_tables([runs[0]], tmp_path / "tables" / "kernels_bench").folder
    assert load_measured(folder).gpu == "lab-card"
