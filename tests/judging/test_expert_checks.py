"""Layers of experts whose splits or engines differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fastroof
from fastroof.judging.expert_checks import unlike_experts
from tests.reference.handmade import handmade_tables

LAYER = ("bf16", 4096, 1536, 8, 128)
TOKENS = (1, 16, 256, 1024, 4096, 16384)


def tables_of(ep_us: float, other_us: float = 1.0) -> fastroof.Tables:
    """Experts whose ep 4 takes so many times its tp 4, of an engine that takes so many times another's."""
    rows = [
        (*LAYER, tp, ep, spread, tokens, other_us * factor * (10.0 + tokens))
        for tokens in TOKENS
        for spread in ("balanced", "power_law_1.2")
        for tp, ep, factor in ((1, 1, 4.0), (4, 1, 1.0), (1, 4, ep_us))
    ]
    return handmade_tables(moe=rows)


@pytest.mark.parametrize(
    ("ratio", "listed", "refused"), [(0.7, 0, 0), (1.5, 0, 0), (0.5, 1, 0), (2.0, 1, 0), (3.6, 1, 1)]
)
def test_splits_of_a_layer_are_compared_at_equal_work(ratio: float, listed: int, refused: int) -> None:
    tables = tables_of(ratio)
    found = unlike_experts(tables, "moe", tables.table("moe"))
    assert (len(found), sum(one.is_refused for one in found)) == (listed, refused)
    for one in found:
        assert (one.shape.moe_tp, one.shape.moe_ep, one.against, one.ratio) == (
            1,
            4,
            "tp 4",
            pytest.approx(ratio),
        )
        assert ("refused" in one.text) == bool(refused)


@pytest.mark.parametrize(("ratio", "listed"), [(1.9, 0), (2.5, 3)])
def test_an_engine_is_compared_with_another_on_the_same_layer(ratio: float, listed: int) -> None:
    slow, quick = tables_of(1.0, ratio).table("moe"), tables_of(1.0).table("moe")
    slow, quick = (
        replace(one, source=name, provenance={**one.provenance, "framework": name})
        for one, name in ((slow, "vllm"), (quick, "sglang"))
    )
    of_both = tables_of(1.0)
    measured = replace(of_both.measured, tables={"moe": slow}, others={"moe": (quick,)})
    tables = fastroof.Tables(measured, of_both.gpu)
    found = unlike_experts(tables, "moe", slow)
    assert [one.against for one in found] == ["sglang"] * listed
    assert all(one.ratio == pytest.approx(ratio) and not one.is_refused for one in found)
    assert unlike_experts(tables, "moe", quick) == ()


def test_half_a_table_that_is_quick_is_not_listed() -> None:
    tables = tables_of(1.0)
    table = tables.table("moe")
    few = table.some(table.columns["num_tokens"] < 4096)
    assert unlike_experts(tables, "moe", few) == ()


def test_shipped_rows_with_ep_count_the_tokens_of_all_gpus(h100: fastroof.Tables) -> None:
    """A table of one GPU's tokens has most of its splits refused, a sound one a few odd layers."""
    for table in h100.candidates("moe"):
        keys = [key for key in table.groups() if key[-1] == "balanced" and key[-3] == 1 < key[-2]]
        refused = [one for one in unlike_experts(h100, "moe", table) if one.is_refused]
        assert len(refused) < 0.2 * len(keys), table.source
