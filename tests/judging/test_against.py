"""Tables judged by the rows of another campaign: its errors and intervals, at and between measured points."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof.arrays import Bools
from fastroof.judging.coverage import judged_by, run_coverage_against
from fastroof.load import MeasuredTables
from fastroof.load.write import write_source
from fastroof.tables.holdout import run_against
from fastroof.uncertainty.leave_one_out import NORMAL_80
from tests.command_line import good

FACTOR = 1.1


def columns_of(h100: fastroof.Tables, rows: Bools, factor: float = 1.0) -> dict[str, Any]:
    columns = h100.table("gemm").columns
    some = {name: columns[name][rows] for name in ("dtype", "m", "n", "k", "latency_us")}
    return some | {"latency_us": some["latency_us"] * factor}


def some_rows(h100: fastroof.Tables) -> tuple[Bools, Bools]:
    """Some bf16 GEMMs, and half of their sizes m."""
    c = h100.table("gemm").columns
    sizes = np.unique(c["m"])
    rows = (c["dtype"] == "bf16") & (c["m"] >= 64) & (c["m"] <= 512) & (c["n"] == 4096) & (c["k"] >= 4096)
    return rows, rows & np.isin(c["m"], sizes[::2])


@pytest.fixture
def judged(h100: fastroof.Tables) -> tuple[fastroof.Tables, MeasuredTables]:
    """Half of the sizes m, and a campaign of all of them that takes longer by a factor."""
    rows, half = some_rows(h100)
    gemm = h100.table("gemm")
    own = replace(gemm, columns=columns_of(h100, half), written=None)
    other = replace(gemm, columns=columns_of(h100, rows, FACTOR), written=None, source="other", provenance={})
    tables = fastroof.Tables(replace(h100.measured, tables={"gemm": own}, others={}), h100.gpu)
    return tables, MeasuredTables("h100", {"gemm": other}, h100.measured.root)


def by_hand(tables: fastroof.Tables, campaign: MeasuredTables) -> Any:
    c = campaign.tables["gemm"].columns
    found = tables.lookup("gemm", m=c["m"], n=c["n"], k=c["k"], with_error=True)
    return found, c["latency_us"]


def test_errors_are_those_of_lookups(judged: tuple[fastroof.Tables, MeasuredTables]) -> None:
    found, measured_us = by_hand(*judged)
    off = found.latency_us / measured_us - 1.0
    rows = run_against(*judged, methods=["roofline", "nearest"])
    by_place = {(row.method, row.region): row for row in rows}
    assert {(row.operator, row.grid) for row in rows} == {("gemm", "bf16")}
    for region, where in (("inside", found.origin <= 1), ("outside", found.origin > 1)):
        if where.any():
            row = by_place["roofline", region]
            assert (row.points, row.mape) == (where.sum(), pytest.approx(np.abs(off[where]).mean()))
            assert row.bias == pytest.approx(off[where].mean())
    at_points = off[found.origin == 0]
    assert len(at_points)
    assert at_points == pytest.approx(1.0 / FACTOR - 1.0)


def test_intervals_hold_what_lies_in_them(judged: tuple[fastroof.Tables, MeasuredTables]) -> None:
    found, measured_us = by_hand(*judged)
    held = np.abs(np.log(measured_us / found.latency_us)) <= NORMAL_80 * found.relative_error
    rows = run_coverage_against(*judged)
    assert sum(row.points for row in rows) == len(held)
    assert sum(row.level_80 * row.points for row in rows) == pytest.approx(held.sum())


def test_kernels_that_tables_lack_are_reported(judged: tuple[fastroof.Tables, MeasuredTables]) -> None:
    tables, campaign = judged
    table = campaign.tables["gemm"]
    columns = {name: np.concatenate([values, values[:3]]) for name, values in table.columns.items()}
    columns["dtype"][-3:] = "int8"
    more = replace(campaign, tables={"gemm": replace(table, columns=columns)})
    lines: list[str] = []
    assert run_against(tables, more, progress=lines.append) == run_against(tables, campaign)
    assert [words for words in lines if "left out" in words] == [
        "gemm, int8: 3 points left out: the tables have no such kernel"
    ]


def test_a_campaigns_own_rows_do_not_judge_it(
    h100: fastroof.Tables, judged: tuple[fastroof.Tables, MeasuredTables]
) -> None:
    tables, campaign = judged
    (other,) = campaign.tables.values()
    first = replace(tables.measured, tables={"gemm": other}, others={"gemm": (tables.table("gemm"),)})
    left = judged_by(fastroof.Tables(first, h100.gpu), campaign)
    assert [table.source for table in left.candidates("gemm")] == [tables.table("gemm").source]
    of_engine = replace(campaign, tables={"gemm": replace(other, provenance={"framework": "sglang"})})
    assert judged_by(tables, of_engine).order.engines == ("sglang",)


def run(words: Sequence[str]) -> Any:
    done = good("tables", "holdout", *words, "--json")
    return json.loads(done)


def test_the_command(h100: fastroof.Tables, tmp_path: Path) -> None:
    rows, half = some_rows(h100)
    for name, part, factor in (("a", half, 1.0), ("b", rows, FACTOR)):
        provenance = {"gpu": "h100", "name": name}
        write_source(tmp_path / name, {"gemm": columns_of(h100, part, factor)}, provenance)
    words = [str(tmp_path / "a"), "--against", str(tmp_path / "b")]
    errors, intervals = run([*words, "--method", "roofline"]), run([*words, "--coverage"])
    assert {row["grid"] for row in (*errors, *intervals)} == {"bf16"}
    assert sum(row["points"] for row in errors) == sum(row["points"] for row in intervals) == rows.sum()
