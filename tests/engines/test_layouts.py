"""Which layouts of experts engines accept, and how they refuse others."""

from __future__ import annotations

import pytest

from fastroof.engines import engine_names, load_engine
from fastroof.engines.layout_rules import LayoutRules
from fastroof.errors import PlanError


def refused(engine: str, **sizes: int) -> str:
    return "; ".join(load_engine(engine).layout.obstacles(engine, {"tp": 1, "dp": 1, "ep": 1, **sizes}))


def test_engines_accept_what_they_run():
    for engine in engine_names():
        for sizes in ({}, {"tp": 8}, {"tp": 8, "ep": 8}, {"dp": 8, "ep": 8}, {"dp": 8}):
            assert refused(engine, **sizes) == ""
    for engine in ("kernels", "sglang", "trtllm-1.0", "trtllm-1.1"):
        assert refused(engine, tp=8, ep=4) == ""
    for engine in ("kernels", "sglang", "vllm"):
        assert refused(engine, tp=2, dp=4, ep=8) == ""


def test_refusals_name_valid_layouts():
    assert "ep must be 1 or 8 with tp 8 x dp 1, got 4" in refused("vllm", tp=8, ep=4)
    for engine in ("trtllm-1.0", "trtllm-1.1"):
        assert "tp 8 with dp 1, or tp 1 with dp 8" in refused(engine, tp=2, dp=4, ep=8)


def test_every_serving_engine_names_the_source_of_its_rules():
    for engine in engine_names():
        profile = load_engine(engine)
        assert bool(profile.layout.source) == bool(profile.engine)


@pytest.mark.parametrize(
    ("rules", "complaint"),
    [
        ({"ep": "some"}, "ep must be one of any, one_or_all, got 'some'"),
        ({"alltoall_gpus": "gb200"}, "alltoall_gpus must be a list of names"),
        ({"alltoall_needs_dp": 1}, "alltoall_needs_dp must be true or false, got 1"),
        ({"context_parallel": "no"}, "context_parallel must be true or false, got 'no'"),
        ({"wide_experts_over": 0}, "wide_experts_over must be a whole number of at least 1, got 0"),
        ({"two_batches_from": [1, 2]}, "tokens of decodes and of prefill, at least 2, or empty"),
        ({"two_batches_from": 32}, "or empty: .*got 32"),
        ({"decode_library": 3}, "decode_library must be text"),
        ({"gathered_bytes": {"nvfp4": 3}}, "gathered_bytes must be a table of formats and bytes"),
        ({"gathered_bytes": ["nvfp4"]}, "gathered_bytes must be a table"),
        ({"token_share": "never"}, "layout: unknown key 'token_share'; did you mean token_shares"),
    ],
)
def test_rules_are_checked(rules, complaint):
    with pytest.raises(PlanError, match=complaint):
        load_engine({"name": "mine", "layout": rules})


def test_a_table_of_gathered_bytes_is_kept():
    rules = load_engine({"name": "mine", "layout": {"gathered_bytes": {"nvfp4": 0.5625}}}).layout
    assert rules == LayoutRules(gathered_bytes=(("nvfp4", 0.5625),))
    assert hash(rules) == hash(LayoutRules(gathered_bytes=(("nvfp4", 0.5625),)))
