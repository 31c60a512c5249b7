"""Validation finds what was planted, and nothing in a clean set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastroof.config.gpu import load_gpu
from fastroof.judging.grid_checks import Finding
from kernels_bench.output.table_sets import load_table_set
from kernels_bench.output.tables import write_tables
from kernels_bench.output.validate import Validation, validate_tables
from kernels_bench.protocol import Point
from tests.kernels_bench.fakes import command
from tests.reference.made_journals import (
    copy,
    decode,
    gemm,
    row,
    sentinel,
    skip,
    start,
    steady_sentinels,
    write_journal,
)

H100 = load_gpu("h100")
CLEAN = [row(gemm(m), 20.0 + m / 50) for m in (1, 16, 256, 1024)]


def checked(folder: Path, lines: list[Any], **options: Any) -> Validation:
    journal = write_journal(folder / "journal.jsonl", lines, **options)
    return validate_tables(load_table_set(str(journal)), H100)


def found(validation: Validation, kind: str) -> Finding | None:
    every = [f for report in validation.reports for f in report.findings] + list(validation.findings)
    return next((f for f in every if f.kind == kind), None)


def test_a_clean_run_has_no_findings(tmp_path: Path) -> None:
    validation = checked(tmp_path, CLEAN)
    assert [f for r in validation.reports for f in r.findings] == []
    assert validation.findings == ()
    assert validation.severity == "note"


def test_fastroofs_own_checks_run_too(tmp_path: Path) -> None:
    journal = write_journal(tmp_path / "j.jsonl", [row(gemm(1), 2.0)])
    validation = validate_tables(load_table_set(str(journal)), H100)
    # 4096 x 4096 bf16 weights in 2 us are 17 TB/s; they fit the L2, twice.
    assert found(validation, "cached") is not None


def test_sentinels_that_vary_or_drift(tmp_path: Path) -> None:
    drifting = [sentinel(gemm(4096), i, 200.0 * (1 + 0.006 * i)) for i in range(10)]
    validation = checked(tmp_path, CLEAN, sentinels=drifting)
    finding = found(validation, "sentinel_drift")
    assert finding is not None
    assert finding.worst["drift"] == pytest.approx((1 + 0.006 * 8) / (1 + 0.006 * 1) - 1)
    assert found(validation, "sentinel_spread") is None
    wild = [sentinel(gemm(4096), i, 200.0 if i % 2 else 300.0) for i in range(10)]
    grave = checked(tmp_path, CLEAN, sentinels=wild)
    assert found(grave, "sentinel_spread").severity == "error"  # type: ignore[union-attr]
    assert grave.severity == "error"
    none = found(checked(tmp_path, CLEAN, sentinels=[]), "no_sentinels")
    assert none is not None
    assert none.severity == "warning"


def test_quartiles_that_cannot_be(tmp_path: Path) -> None:
    finding = found(checked(tmp_path, [row(gemm(1), 50.0, p25_us=51.0)]), "quartiles")
    assert finding is not None
    assert finding.severity == "error"
    wide = found(checked(tmp_path, [*CLEAN, row(gemm(2), 50.0, p75_us=55.0)]), "wide_quartiles")
    assert wide is not None
    assert wide.count == 1
    assert wide.worst["m"] == 2


def test_skips_throttling_and_rows_left_out(tmp_path: Path) -> None:
    lines = [
        *(row(gemm(m), 50.0 + m, throttle_reasons=0x4) for m in range(1, 300)),
        row(gemm(8192, 8192, 8192), 1000.0),
        skip(gemm(512), "reference", "error 0.3 is above 0.01"),
        skip(gemm(513), "oom", "needs 90 GB"),
    ]
    validation = checked(tmp_path, lines)
    kinds = {(f.kind, f.severity, f.count) for f in validation.findings}
    assert kinds == {
        ("throttled", "note", 299),
        ("left_out", "warning", 1),
        ("skips", "warning", 1),
        ("skips", "note", 1),
    }
    hot = checked(tmp_path, [row(gemm(1), 50.0, throttle_reasons=0x44)])
    assert found(hot, "throttled").severity == "warning"  # type: ignore[union-attr]


def test_coverage_counts_by_group(tmp_path: Path) -> None:
    grid = [gemm(m) for m in (1, 16, 32, 64)] + [
        decode(1, 64),
        Point("elementwise", copy(4).values, group="copy"),
    ]
    journal = write_journal(tmp_path / "j.jsonl", [*CLEAN, skip(gemm(32), "oom", "no room")])
    validation = validate_tables(
        load_table_set(str(journal)),
        H100,
        grid,
        skipped=[gemm(32).key, gemm(16).key],
        sentinels=[copy(4).key],
    )
    groups = {g.group: (g.points, g.measured, g.skipped, g.missing) for g in validation.coverage}
    assert groups == {"gemm": (4, 2, 1, 1), "decode": (1, 0, 0, 1), "copy": (1, 1, 0, 0)}
    finding = found(validation, "coverage")
    assert finding is not None
    assert finding.count == 2


def test_every_json_value_is_plain(tmp_path: Path) -> None:
    lines = [row(decode(64, 1024), 90.0), row(decode(128, 2048), 50.0), row(copy(8192), 100.0)]
    document = checked(tmp_path, lines).as_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == json.loads(json.dumps(document))


@pytest.mark.slow
def test_shipped_tables_have_no_errors() -> None:
    tables = load_table_set("h100")
    validation = validate_tables(tables, H100)
    assert validation.severity != "error"
    assert {r.operator for r in validation.reports} == set(tables.tables)
    # Nothing is known of its sentinels, which is no finding.
    assert found(validation, "no_sentinels") is None


# -- the command ---------------------------------------------------------------------------------


def test_exit_code_1_on_errors_only(tmp_path: Path) -> None:
    clean = write_journal(tmp_path / "a.jsonl", CLEAN)
    broken = write_journal(tmp_path / "b.jsonl", [row(gemm(1), 50.0, p25_us=51.0)])
    assert command("validate", str(clean)).exit_code == 0
    result = command("validate", str(broken), "--json")
    assert result.exit_code == 1
    assert json.loads(result.output)["severity"] == "error"


def test_tables_keep_what_the_journal_knew(tmp_path: Path) -> None:
    drifting = [sentinel(gemm(4096), i, 200.0 + 4 * i) for i in range(10)]
    lines = [*CLEAN, skip(gemm(512), "error", "lost")]
    journal = write_journal(tmp_path / "a.jsonl", lines, sentinels=drifting)
    folder = write_tables([journal], tmp_path / "h100" / "kernels_bench").folder
    of_tables, of_journal = (validate_tables(load_table_set(str(w)), H100) for w in (folder, journal))
    assert of_tables.findings == of_journal.findings
    assert found(of_tables, "sentinel_drift") is not None


def test_sentinels_are_printed(tmp_path: Path) -> None:
    journal = write_journal(tmp_path / "a.jsonl", CLEAN, sentinels=steady_sentinels())
    printed = command("validate", str(journal)).output.splitlines()
    (line,) = (line for line in printed if line.endswith("+0.0%"))
    assert line.split()[:3] == ["gemm", "run-a", "6"]
    document = json.loads(command("validate", str(journal), "--json").output)
    assert [(one["run"], one["rounds"]) for one in document["sentinels"]] == [("run-a", 6)]


def test_a_merged_set_has_the_findings_of_all_its_runs(tmp_path: Path) -> None:
    from kernels_bench.output.merge import merge_runs, write_merged

    drifting = [sentinel(gemm(4096), i, 200.0 + 4 * i) for i in range(10)]
    runs = [
        write_journal(tmp_path / "a.jsonl", CLEAN, sentinels=steady_sentinels()),
        write_journal(
            tmp_path / "b.jsonl",
            [*CLEAN, skip(gemm(9), "error", "lost")],
            sentinels=drifting,
            first=start(run_id="run-b"),
        ),
    ]
    folder = write_merged(merge_runs(runs), tmp_path / "h100" / "k")
    validation = validate_tables(load_table_set(str(folder)), H100)
    assert found(validation, "sentinel_drift").worst["run"] == "run-b"  # type: ignore[union-attr]
    assert found(validation, "skips") is not None


def test_coverage_of_a_grid_file(tmp_path: Path) -> None:
    from kernels_bench.grid.grid import load_grid

    grid = load_grid("smoke").points()
    measured = [row(point, 1e6) for point in grid[:-1]]
    journal = write_journal(tmp_path / "j.jsonl", measured)
    result = command("validate", str(journal), "--grid", "smoke", "--json")
    document = json.loads(result.output)
    assert sum(g["points"] for g in document["coverage"]) == len(grid)
    assert sum(g["missing"] for g in document["coverage"]) == 1
