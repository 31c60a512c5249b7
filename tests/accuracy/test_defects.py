"""Runs known to be defective: each entry names some, with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.accuracy.rows import shipped_rows
from benchmarks.accuracy.run_kinds import Defect, defect_of, known_defects


@pytest.mark.parametrize("defect", known_defects(), ids=lambda defect: f"{defect.model}-{defect.gpu}")
def test_every_entry_names_runs_that_ship(defect: Defect) -> None:
    rows = [row for row in shipped_rows(defect.gpu) if defect.holds_for(row)]
    assert rows
    assert defect.reason
    assert defect.source
    assert {row.engine_version for row in rows} == set(defect.versions)
    assert all(defect_of(row) == defect.reason for row in rows)
    assert not any(defect_of(replace(row, engine_version="99.9")) for row in rows)


def test_a_number_of_clients_narrows_an_entry() -> None:
    (narrowed,) = (defect for defect in known_defects() if defect.concurrency is not None)
    row = next(row for row in shipped_rows(narrowed.gpu) if narrowed.holds_for(row))
    assert defect_of(replace(row, concurrency=row.concurrency + 1)) == ""
    assert defect_of(replace(row, gpu="h20")) == ""
