"""Which models are served most, and what sets their steps apart from another estimator's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.accuracy.aiconfigurator_steps import PARTS, Joined, StepCase, SteppedCase
from benchmarks.accuracy.most_served import ServedModel, cause_of, most_served, served_steps
from fastroof.errors import TableError
from fastroof.models import Layout

HEADER = "model_path,system,mode,tp_size,pp_size,attention_dp_size,moe_ep_size"
ROWS = """\
deepseek-ai/DeepSeek-R1,h200_sxm,agg,8,1,1,1
deepseek-ai/DeepSeek-R1,h200_sxm,agg,8,1,1,8
deepseek-ai/DeepSeek-R1,h200_sxm,disagg,4,1,1,1
deepseek-ai/DeepSeek-V3,h200_sxm,agg,8,1,1,8
deepseek-ai/DeepSeek-V3,b200_sxm,agg,1,1,8,8
deepseek-ai/DeepSeek-V3,b200_sxm,agg,16,1,1,1
a/Small,h200_sxm,agg,1,1,,
a/Small,b200_sxm,agg,2,1,0,0
b/Rare,b200_sxm,agg,2,2,1,1
"""


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    path = tmp_path / "silicon_sample.csv"
    path.write_text(f"{HEADER}\n{ROWS}", "utf-8")
    return path


def test_runs_of_one_architecture_are_counted_together(sample: Path) -> None:
    assert [(found.model, found.rows) for found in most_served(10, sample)] == [
        ("deepseek-ai/DeepSeek-V3", 6), ("a/Small", 2), ("b/Rare", 1),
    ]  # fmt: skip
    assert len(most_served(2, sample)) == 2


def test_layouts_are_those_of_most_runs(sample: Path) -> None:
    """Twice with groups of experts, once without; ranks, stages and several nodes do not count."""
    deepseek, small, rare = most_served(10, sample)
    assert deepseek.layouts_on("h200") == [Layout(8, ep=8), Layout(8)]
    assert deepseek.layouts_on("b200") == deepseek.layouts_on("h200")
    assert small.layouts_on("b200") == [Layout(2), Layout(1)]
    assert rare.layouts_on("b200") == []


def test_invalid_samples_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    for text in ("a,b\n1,2\n", f"{HEADER}\nx,h200_sxm,agg,many,1,1,1\n"):
        path.write_text(text, "utf-8")
        with pytest.raises(TableError, match="cannot be read as the sample"):
            most_served(10, path)


def stepped(own: float, theirs: float) -> SteppedCase:
    """A step whose attention and linear layers differ."""
    rest = dict.fromkeys(PARTS, 0.0)
    case = StepCase("a/b", "h100", "vllm", Layout(1))
    own_ms = {**rest, "attention": own, "linear": 2.0}
    return SteppedCase(case, "a step", own_ms, {**rest, "attention": theirs, "linear": 2.1})


@pytest.mark.parametrize(
    ("own", "theirs", "cause"),
    [(5.0, 5.1, ""), (7.0, 5.0, "attention 7.00, 5.00"), (5.0, 8.0, "attention 5.00, 8.00")],
)
def test_the_part_that_differs_most_is_the_cause(own: float, theirs: float, cause: str) -> None:
    assert cause_of(stepped(own, theirs)) == cause


def test_a_cause_names_what_is_borrowed() -> None:
    borrowed = stepped(7.0, 5.0)._replace(donors={"attention": "aiconfigurator-trtllm-1.3.0rc20"})
    assert cause_of(borrowed) == "attention 7.00, 5.00 (from trtllm-1.3.0rc20)"
    assert cause_of(borrowed._replace(donors={"linear": "datasheet"})) == "attention 7.00, 5.00"


@pytest.mark.parametrize(
    ("names", "mixing", "mlp"),
    [
        (["generation_mla_block", "generation_moe_overlap", "generation_logits_gemm"], True, True),
        (["generation_attention", "generation_moe_overlap"], True, True),
        (["generation_attention", "generation_qkv_gemm", "generation_moe"], False, False),
        (["generation_gdn_recurrence", "generation_gdn_in_proj_gemm"], False, False),
    ],
)
def test_what_another_has_as_one_is_compared_as_one(names: list[str], mixing: bool, mlp: bool) -> None:
    whole = Joined.of(dict.fromkeys(names, 1.0))
    assert whole == (mixing, mlp)
    assert whole.part("linear", "q_down") == ("attention" if mixing else "linear")
    assert whole.part("communication") == ("experts" if mlp else "communication")
    # a dense layer's MLP is no projection of attention
    assert whole.part("linear", "gate_up") == ("experts" if mlp else "linear")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)
def test_steps_of_a_dense_model_are_near_where_both_answer() -> None:
    model = ServedModel("meta-llama/Meta-Llama-3.1-8B", 1, {"": [Layout(1)]})
    found = list(served_steps([model], ["h200"], ["vllm", "sglang"]))
    assert [(one.case.engine, one.why_not) for one in found] == [("vllm", ""), ("sglang", "")]
    assert all(abs(step.apart) < 0.1 and not cause_of(step) for one in found for step in one.steps)
    # SGLang's own kernels are all there; norms are vLLM's, as its profile has it
    assert set(found[1].steps[0].donors) <= {"elementwise"}
    (none,) = served_steps([model._replace(model="nobody/Nothing")], ["h200"], ["vllm"])
    assert not none.steps
    assert none.why_not
