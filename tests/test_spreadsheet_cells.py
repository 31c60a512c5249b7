"""No text of a CSV is a formula to the spreadsheet that opens it, and what was guarded is read back."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.accuracy.rows import read_rows, shipped_rows, write_rows
from fastroof.columns import guarded, guarded_columns, unguarded
from fastroof.sweep.results import ResultFile

FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", '=HYPERLINK("http://x","y")', "'=1"]
TEXTS = st.one_of(st.text("=+-@'\t\r\nab", max_size=5), st.text(max_size=5))


@given(TEXTS)
def test_what_is_guarded_comes_back_and_begins_no_formula(text: str) -> None:
    assert not guarded(text).startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
    assert unguarded(guarded(text)) == text
    assert guarded_columns(pa.table({"a": [text]}))["a"].to_pylist() == [guarded(text)]


def test_a_sweeps_csv_has_no_formulas_and_its_numbers_are_as_they_are(tmp_path: Path) -> None:
    schema = pa.schema([("model", pa.string()), ("change", pa.float64()), ("count", pa.int64())])
    rows = {"model": FORMULAS, "change": [-1.5] * len(FORMULAS), "count": [-2] * len(FORMULAS)}
    for suffix in (".csv", ".jsonl"):
        with ResultFile(tmp_path / f"r{suffix}", schema) as results:
            results.write([pa.RecordBatch.from_pydict(rows, schema)])
    with (tmp_path / "r.csv").open(newline="", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    assert header == ["model", "change", "count"]
    assert lines == [[f"'{text}", "-1.5", "-2"] for text in FORMULAS]
    assert r'"model": "=1+1"' in (tmp_path / "r.jsonl").read_text()


@pytest.mark.parametrize("text", FORMULAS[:4])
def test_measured_rows_are_written_guarded_and_read_back(tmp_path: Path, text: str) -> None:
    rows = tuple(replace(row, dataset=text) for row in shipped_rows("h100")[:3])
    write_rows(tmp_path / "rows.csv", rows)
    assert f"\n'{text[:1]}" in (tmp_path / "rows.csv").read_text().replace('"', "")
    assert read_rows(tmp_path / "rows.csv") == rows
