"""A draft layer of the model's own is compiled like the plan that it drafts for."""

from __future__ import annotations

from typing import Any

import pytest

from fastroof import compile_plan, load_tables
from fastroof.serving import mtp_draft


@pytest.mark.parametrize(
    "options",
    [
        {"kv_dtype": "fp8"},
        {"dtype": "fp8"},
        {"tp": 2, "kv_dtype": "fp8"},
        {"max_tokens": 512, "max_seqs": 256, "runtime": "sglang"},
    ],
    ids=str,
)
def test_a_draft_is_of_one_layer_with_the_formats_of_its_plan(options: dict[str, Any]) -> None:
    plan = compile_plan("llama-3.1-8b", "h100", load_tables("h100"), **options)
    draft = mtp_draft(plan)
    assert draft.memory.kv_bytes_per_token * 32 == plan.memory.kv_bytes_per_token
    for name in ("gpu", "tp", "dtype", "kv_dtype", "max_tokens", "max_seqs"):
        assert getattr(draft, name) == getattr(plan, name), name


def test_a_draft_is_split_over_the_gpus_of_its_plan() -> None:
    plan = compile_plan("qwen3-30b-a3b", "h100", load_tables("h100"), dp=4, ep=4)
    assert mtp_draft(plan).layout == plan.layout
