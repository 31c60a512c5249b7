"""Answers are as unsure as their source: another campaign, another engine's kernels, an unsound family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof.errors import TableError
from fastroof.tables.kernel_order import KernelOrder
from fastroof.tables.lookup import run_lookup
from fastroof.tables.source_errors import source_error
from fastroof.uncertainty.campaign import campaign_error
from fastroof.uncertainty.leave_one_out import NORMAL_80

GEMM = {"m": [1, 64, 4096], "n": 4096, "k": 4096}


def with_about(tables: fastroof.Tables, operator: str, **about: Any) -> fastroof.Tables:
    """The same rows under another provenance."""
    table = tables.table(operator)
    provenance = {**table.provenance, "operators": {operator: about}}
    measured = replace(tables.measured, tables={operator: replace(table, provenance=provenance)}, others={})
    return fastroof.Tables(measured, tables.gpu)


def test_an_answer_has_the_error_of_its_neighbours_and_of_its_campaign(h100: fastroof.Tables) -> None:
    found = h100.lookup("gemm", **GEMM, with_error=True)
    local = run_lookup(h100, "gemm", "roofline", True, GEMM, of_source=False).relative_error
    source = source_error(h100, "gemm", ("bf16",))
    variance = source.variance({}, found.latency_us)
    np.testing.assert_allclose(found.relative_error, np.hypot(local, np.sqrt(variance)))
    assert (np.sqrt(variance) > 0.05).all()
    rows = h100.table("gemm").columns
    assert source.floor_us == rows["latency_us"][rows["dtype"] == "bf16"].min()


def test_a_tables_own_word_on_its_campaign_counts(h100: fastroof.Tables) -> None:
    here = with_about(h100, "gemm", campaign={"scale": 0.0, "common": 0.0})
    local = run_lookup(h100, "gemm", "roofline", True, GEMM, of_source=False).relative_error
    np.testing.assert_allclose(here.lookup("gemm", **GEMM, with_error=True).relative_error, local)
    fields = with_about(h100, "gemm", campaign={"scale": 0.5, "common": 0.3})
    assert source_error(fields, "gemm", ("bf16",)).campaign.long == (pytest.approx(0.4), 0.3)


@pytest.mark.parametrize(
    "about",
    [
        0.1, {"scale": 0.1}, {"scale": -0.1, "common": 0.0}, {"scale": 0.1, "common": 0.2}, {"scale": "a"},
        {"scale": float("inf"), "common": 0.0}, {"scale": float("nan"), "common": 0.0},
    ],
)  # fmt: skip
def test_a_wrong_word_on_it_is_refused(h100: fastroof.Tables, about: Any) -> None:
    wrong = with_about(h100, "gemm", campaign=about)
    with pytest.raises(TableError, match="must have scale and common"):
        wrong.lookup("gemm", **GEMM, with_error=True)


def test_kernels_of_another_engine_are_less_sure(h100: fastroof.Tables) -> None:
    heads = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    sizes = {"batch_size": 64, "kv_len": 4096, **heads}
    own = h100.in_order(KernelOrder(("vllm",))).lookup("attention_decode", **sizes, with_error=True)
    foreign = h100.in_order(KernelOrder(("trtllm", "vllm"))).lookup(
        "attention_decode", **sizes, with_error=True
    )
    assert foreign.origin == 3
    assert foreign.latency_us == own.latency_us
    assert float(foreign.relative_error) > 1.5 * float(own.relative_error)
    expected = campaign_error("attention_decode", "bf16", "h100", ("trtllm", "vllm"))
    key = ("bf16", 32, 8, 128, 0)
    order = KernelOrder(("trtllm", "vllm"))
    assert source_error(h100.in_order(order), "attention_decode", key).campaign == expected


def test_rows_of_an_unsound_family_never_claim_two_percent(h100: fastroof.Tables) -> None:
    family = {
        "keys": {"dtype": ["fp8_block"]}, "test": "launched", "reason": "3 us", "excess_us": 3.0,
    }  # fmt: skip
    flagged = with_about(h100, "gemm", unsound=[family])
    found = flagged.lookup("gemm", **GEMM, dtype="fp8_block", with_error=True)
    assert (found.relative_error >= 3.0 / found.latency_us).all()
    assert found.relative_error[0] > 0.2
    plain = h100.lookup("gemm", **GEMM, with_error=True).relative_error
    np.testing.assert_array_equal(flagged.lookup("gemm", **GEMM, with_error=True).relative_error, plain)


@pytest.mark.slow
def test_a_step_of_unsound_kernels_is_as_unsure_as_they_are() -> None:
    h100 = fastroof.load_tables("h100", source="aiconfigurator-trtllm-1.3.0rc20")
    gemm = h100.table("gemm")
    family = {
        "keys": {"dtype": ["fp8_block"]}, "test": "launched", "reason": "55 us", "excess_us": 50.0,
    }  # fmt: skip
    about = {**gemm.provenance["operators"], "gemm": {"unsound": [family]}}
    tables = {
        **h100.measured.tables,
        "gemm": replace(gemm, provenance={**gemm.provenance, "operators": about}),
    }
    flagged = fastroof.Tables(replace(h100.measured, tables=tables), h100.gpu)
    sure, unsure = (
        fastroof.compile_plan("llama-3.1-8b", "h100", t, dtype="fp8_block", engine="kernels").decode_error(
            1, 1024
        )
        for t in (h100, flagged)
    )
    # nearly all of such a step is launches, and all of them are off the same way
    assert sure < 0.15
    assert unsure > 0.4


def test_what_all_calls_share_does_not_average_out(h100: fastroof.Tables) -> None:
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="kernels")
    gemm = campaign_error("gemm", "bf16", "h100").long
    # four GEMMs a layer, the LM head and attention: less than one GEMM's error, more than what they share
    assert gemm.common < plan.decode_error(1, 128) < np.sqrt(gemm.variance) + 0.02


def test_intervals_hold_other_campaigns_values() -> None:
    """The figures of H100 bf16 GEMMs against sources that ship with fastroof, where there are several."""
    tables = fastroof.load_tables("h100")
    sources = tables.candidates("gemm")
    if len(sources) < 2:
        pytest.skip("one campaign of GEMMs ships for h100")
    own, other = (fastroof.load_tables("h100", source={"gemm": one.source}) for one in sources[:2])
    rows = other.table("gemm").columns
    some = np.flatnonzero((rows["dtype"] == "bf16") & (rows["m"] <= 4096))[::7]
    sizes = {name: rows[name][some] for name in ("m", "n", "k")}
    found = own.lookup("gemm", **sizes, with_error=True)
    off = np.abs(np.log(rows["latency_us"][some] / found.latency_us))
    assert 0.6 < np.mean(off <= NORMAL_80 * found.relative_error) < 0.97
