"""A survey's figures are those of the hold-out, and of intervals against the other sources' rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof.errors import LookupInputError
from fastroof.judging.coverage import run_survey
from fastroof.load import MeasuredTable
from fastroof.tables.holdout import GRIDS, run_holdout


def two_sources(h100: fastroof.Tables, noise: float, engine: str = "sglang") -> fastroof.Tables:
    """Some bf16 GEMMs of H100, and another campaign's whose values are off by so much."""
    gemm = h100.table("gemm")
    c = gemm.columns
    some = np.flatnonzero((c["dtype"] == "bf16") & (c["m"] <= 512) & (c["n"] >= 4096) & (c["k"] >= 4096))
    columns: dict[str, Any] = {name: values[some] for name, values in c.items()}
    off = np.exp(np.random.default_rng(0).normal(0.0, noise, len(some)))
    own = replace(gemm, columns=columns, written=None)
    other = MeasuredTable(
        "gemm", {**columns, "latency_us": columns["latency_us"] * off}, "other", (), {"framework": engine}
    )
    measured = replace(h100.measured, tables={"gemm": own}, others={"gemm": (other,)})
    return fastroof.Tables(measured, h100.gpu)


def test_a_row_a_source_and_operator(h100: fastroof.Tables) -> None:
    tables = two_sources(h100, 0.05)
    own, other = run_survey(tables, operators=["gemm"])
    assert [own.source, other.source] == ["aiconfigurator-vllm-0.25.0", "other"]
    assert (own.engine, other.engine) == ("vllm", "sglang")
    assert own.rows == other.rows == tables.table("gemm").num_rows
    grids = [g for g in GRIDS if g.operator == "gemm" and g.name != "coarse"]
    found = run_holdout(tables, operators=["gemm"], methods=["roofline"], grids=grids)
    inside = [row for row in found if row.region == "inside"]
    assert own.mape_inside == pytest.approx(
        np.average([r.mape for r in inside], weights=[r.points for r in inside])
    )
    assert own.hidden == sum(row.points for row in found)
    # 80 % of normal noise of 5 % lies well within intervals of 9 %
    assert own.same_80 is not None
    assert own.same_80 > 0.9
    assert own.same_points == own.any_points == min(own.rows, 4000)


def test_a_noisier_campaign_has_fewer_points_within_intervals(h100: fastroof.Tables) -> None:
    shares = [
        run_survey(two_sources(h100, noise), operators=["gemm"])[0].same_80 for noise in (0.05, 0.15, 0.4)
    ]
    assert shares[0] > shares[1] > shares[2]  # type: ignore[operator]


def test_a_copy_is_not_compared(h100: fastroof.Tables) -> None:
    for row in run_survey(two_sources(h100, 0.0), operators=["gemm"]):
        assert (row.same_80, row.any_80, row.any_points) == (None, None, 0)


def test_unknown_operators_are_refused(h100: fastroof.Tables) -> None:
    with pytest.raises(LookupInputError, match="unknown operator 'gem'"):
        run_survey(h100, operators=["gem"])
