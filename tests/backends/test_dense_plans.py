"""Files of programs that know dense models alone are not written for others."""

from __future__ import annotations

import pytest

from fastroof import compile_plan, load_tables
from fastroof.backends.dynamo import dynamo_profile
from fastroof.backends.llmservingsim import export_llmservingsim
from fastroof.backends.plan_facts import check_dense
from fastroof.errors import BackendError

LIMITS = {"max_tokens": 512, "max_seqs": 32}


def plan(model, **options):
    return compile_plan(model, "h100", load_tables("h100"), **{"engine": "kernels", **LIMITS, **options})


@pytest.mark.parametrize(
    ("model", "options", "lacks"),
    [
        ("mixtral-8x7b", {"tp": 2}, "experts of mixtral-8x7b"),
        ("gpt-oss-20b", {}, r"experts and layers of several kinds \(12 moe windowed, 12 moe full\)"),
        ("llama-3.1-8b", {"dp": 2}, r"ranks and stages \(tp 1, dp 2\)"),
    ],
)
def test_a_profile_of_layers_refuses_what_it_would_lose(tmp_path, model, options, lacks):
    with pytest.raises(BackendError, match=lacks):
        export_llmservingsim(plan(model, **options), tmp_path / "profile")
    assert not (tmp_path / "profile").exists()


def test_dense_plans_pass():
    check_dense(plan("llama-3.1-8b", tp=2), "a program")
    check_dense(plan("qwen3-8b", dtype="fp8"), "a program")


def test_tables_of_whole_steps_have_room_for_any_plan():
    of_experts = plan("qwen3-30b-a3b", tp=2, ep=2)
    arrays = dynamo_profile(of_experts, max_batch_size=32)
    assert arrays
