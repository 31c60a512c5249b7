"""Plans named on a command line, and the exports that take them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fastroof.cli.named_plans import named_plans
from fastroof.errors import PlanError


def fastroof(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "fastroof", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_plans_are_named_after_what_they_are():
    plans = named_plans(
        [
            "llama-3.1-8b,tp=2,kv_dtype=fp8",
            "qwen2.5-7b,engine=kernels,max_num_seqs=64",
            "llama-3.1-8b,name=x,gpu=h100",
        ]
    )
    assert list(plans) == ["llama-3.1-8b-tp2-bf16-kv-fp8", "qwen2.5-7b-kernels", "x"]
    assert plans["qwen2.5-7b-kernels"].max_num_seqs == 64
    assert [plan.engine for plan in plans.values()] == ["vllm", "kernels", "vllm"]
    (draft,) = named_plans(["llama-3.1-8b"], engine="sglang").items()
    assert (draft[0], draft[1].engine) == ("llama-3.1-8b-sglang", "sglang")
    assert plans["llama-3.1-8b-tp2-bf16-kv-fp8"].kv_dtype == "fp8"


def test_plans_of_large_expert_parallelism_are_marked():
    sent = "qwen3-235b-a22b,dp=16,ep=16,exchange=alltoall,dtype=fp8_block,max_num_batched_tokens=64"
    plans = named_plans(
        [sent, f"{sent},eplb=yes,num_slots=160", f"{sent},two_batch_overlap=yes,wide_experts=no"]
    )
    first, balanced, halves = plans
    assert balanced == first.replace("fp8_block", "wide-slots160-eplb-fp8_block")
    assert halves == first.replace("fp8_block", "two-batches-fp8_block")
    assert plans[balanced].execution.num_slots == 160


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "no plan given"),
        (["llama-3.1-8b,tp"], "'tp' is not KEY=VALUE"),
        (["llama-3.1-8b,size=3"], "unknown key 'size'"),
        (["llama-3.1-8b,tp="], "'tp=' is not KEY=VALUE"),
        (["llama-3.1-8b,tp=two"], "tp needs a whole number, got 'two'"),
        (["llama-3.1-8b,tp=2,tp=4"], "gives tp twice"),
        (["llama-3.1-8b,eplb=1"], "eplb is yes or no, got '1'"),
        (["tp=2"], "does not start with a model"),
        (["llama-3.1-8b", "llama-3.1-8b,tp=1"], "two plans are named 'llama-3.1-8b'"),
        (["llama-3.1-8b,tp=3"], "3"),
    ],
)
def test_malformed_plans_are_refused(texts, message):
    with pytest.raises(PlanError, match=message):
        named_plans(texts)


@pytest.mark.slow
def test_export_c_prints_what_it_wrote(tmp_path):
    done = fastroof("export", "c", "llama-3.1-8b", "-o", tmp_path / "step", "--no-shared")
    assert (done.returncode, done.stderr) == (0, "")
    for path in (tmp_path / "step").iterdir():
        assert path.name in done.stdout
    assert (tmp_path / "step" / "llama-3.1-8b.plan").stat().st_size > 100_000


@pytest.mark.slow
def test_export_errors_are_one_line(tmp_path):
    done = fastroof("export", "c", "llama-3.1-8b,tp=3", "-o", tmp_path / "step")
    assert done.returncode == 2
    assert done.stderr.startswith("fastroof: error: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "step").exists()
    assert "c " in fastroof("export").stdout
