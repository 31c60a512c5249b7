"""A draft layer of the model's own is compiled like the plan that it drafts for."""

from __future__ import annotations

from typing import Any

import pytest

from fastroof import compile_plan, load_tables
from fastroof.plan.speculation import speculated
from fastroof.serving import SpeculativeDecoding, mtp_draft


@pytest.mark.parametrize(
    "options",
    [
        {"kv_dtype": "fp8"},
        {"dtype": "fp8"},
        {"tp": 2, "kv_dtype": "fp8"},
        {"max_num_batched_tokens": 512, "max_num_seqs": 256, "engine": "sglang"},
    ],
    ids=str,
)
def test_a_draft_is_of_one_layer_with_the_formats_of_its_plan(options: dict[str, Any]) -> None:
    plan = compile_plan("llama-3.1-8b", "h100", load_tables("h100"), **{"engine": "kernels", **options})
    draft = mtp_draft(plan)
    assert draft.memory.kv_bytes_per_token * 32 == plan.memory.kv_bytes_per_token
    for name in ("gpu", "tp", "dtype", "kv_dtype", "max_num_batched_tokens", "max_num_seqs"):
        assert getattr(draft, name) == getattr(plan, name), name


def test_a_draft_is_split_over_the_gpus_of_its_plan() -> None:
    plan = compile_plan("qwen3-30b-a3b", "h100", load_tables("h100"), dp=4, ep=4, engine="kernels")
    assert mtp_draft(plan).layout == plan.layout


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b", "qwen3-next-80b-a3b"])
def test_a_model_that_drafts_for_itself_keeps_everything_twice(model: str) -> None:
    """Weights, tokens, those within a window and states; the room is that of the weights of one more."""
    tp = 8 if model.startswith("qwen3") else 1
    plan = compile_plan(model, "h100", load_tables("h100"), tp=tp, allow_modelled=True, engine="kernels")
    alone, both = plan.memory, speculated(plan, SpeculativeDecoding(2, 1.5, plan)).memory()
    for name in (
        "weight_bytes", "kv_bytes_per_token", "window_kv_bytes_per_token", "state_bytes_per_sequence",
    ):  # fmt: skip
        assert getattr(both, name) == 2 * getattr(alone, name), name
    assert (alone.window_kv_bytes_per_token > 0) == (model == "gpt-oss-20b")
    assert (alone.state_bytes_per_sequence > 0) == (model == "qwen3-next-80b-a3b")
    left = alone.max_kv_tokens * alone.token_bytes - alone.weight_bytes
    assert 0 <= left - both.max_kv_tokens * both.token_bytes < both.token_bytes
