"""Steps beside those of aiconfigurator-core, which reads the same tables."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.accuracy.aiconfigurator_steps import (
    CASES,
    PARTS,
    STEPS,
    WIDE_CASES,
    StepCase,
    same_tables,
    stepped_cases,
)
from fastroof.models import Layout
from fastroof.tables import load_tables

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)


@pytest.mark.slow
def test_steps_of_a_mixture_of_experts_are_near():
    stepped = list(stepped_cases([StepCase("mistralai/Mixtral-8x7B-v0.1", "h100", "vllm", Layout(2))]))
    assert [one.step for one in stepped] == list(STEPS)
    for one in stepped:
        assert not one.why_not
        assert set(one.own_ms) == set(one.their_ms) == set(PARTS)
        # the same tables at measured points: what is left is what each counts
        assert one.own_ms["experts"] == pytest.approx(one.their_ms["experts"], rel=0.02)
        assert abs(one.apart) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h100", "h200", "b200"])
def test_tables_of_an_engine_are_of_the_same_version(gpu):
    shipped, same = load_tables(gpu), same_tables(gpu, "vllm")
    of_vllm = {
        (table.source, table.provenance["framework_version"])
        for name in same.sources
        for table in same.candidates(name)
        if table.engine == "vllm"
    }
    assert of_vllm == {("aiconfigurator-vllm-0.24.0", "0.24.0")}
    # the donors stay
    for name in same.sources.keys() & shipped.sources.keys():
        donors = [
            [table.source for table in tables.candidates(name) if table.engine != "vllm"]
            for tables in (same, shipped)
        ]
        assert donors[0] == donors[1]
    # TensorRT-LLM ships in the version that is current there
    assert same_tables(gpu, "trtllm").sources_hash == shipped.sources_hash


def test_a_refused_case_has_a_reason():
    (one, _) = stepped_cases([StepCase("mistralai/Mixtral-8x7B-v0.1", "h100", "vllm", Layout(8, dp=3))])
    assert one.why_not
    assert not one.own_ms


def test_cases_are_of_several_models_gpus_and_engines():
    assert len(CASES) >= 10
    assert len({case.model for case in CASES}) >= 8
    assert {case.gpu for case in CASES} == {"h100", "h200", "b200"}
    assert {case.engine for case in CASES} == {"vllm", "sglang", "trtllm-1.1"}


@pytest.mark.slow
def test_large_expert_parallelism_sends_and_computes_alike():
    """The package sends in all 61 layers, though the first three have no experts: 58 send."""
    case = StepCase("deepseek-ai/DeepSeek-V3", "h200", "sglang", Layout(1, dp=8, ep=8), "fp8", True)
    for one in stepped_cases([case]):
        assert not one.why_not
        assert one.own_ms["communication"] == pytest.approx(one.their_ms["communication"] * 58 / 61, rel=1e-3)
        # it has shared experts apart
        assert 0.9 < one.own_ms["experts"] / one.their_ms["experts"] < 1.1


def test_wide_cases_cross_nodes():
    assert all(case.sends and case.layout.ep > 8 for case in WIDE_CASES)
