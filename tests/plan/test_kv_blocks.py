"""Blocks of KV cache as engines print them: logs give their numbers, and reading the sources the rule."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.config import GpuSpec, load_gpu
from fastroof.errors import FastroofError
from fastroof.memory.kv_room import VISIBLE_SHARE
from fastroof.memory.plan_memory import PlanMemory
from fastroof.models import load_model
from fastroof.plan import StepPlan, compile_plan
from fastroof.plan.speculation import SpeculativeDecoding, speculated
from fastroof.plan.start import StartQuestion, cache_line_tokens, refusals, seqs_that_start
from fastroof.simulation import EngineSettings
from fastroof.units import GIB


def plan_of(model: Any, gpu: str | GpuSpec, engine: str, **options: Any) -> StepPlan:
    """A plan without kernels: only its memory is read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile_plan(model, gpu, None, engine=engine, allow_modelled=True, **options)


def test_gemma_3_on_an_mi300x_of_vllm_011() -> None:
    plan = plan_of("gemma-3-27b", "mi300x", "vllm-0.11.0", max_num_batched_tokens=2048)
    memory = plan.memory._replace(parts=89_997)
    assert (memory.block_tokens, memory.full_parts, memory.window_parts) == (16, 1, 6)
    assert memory.reserved_parts(10_240) == 640 + 6 * (math.ceil((1023 + 2048) / 16) + 1) == 1798
    assert round(memory.max_concurrency(10_240), 2) == 50.05
    assert cache_line_tokens(plan.profile.memory, memory, 10_240) == 205_696
    # a running request frees the blocks of a step's tokens before the next: only the window is kept
    assert memory.parts_per_request(10_240) == 640 + 6 * (1024 // 16 + 1)


def test_qwen_27b_on_a_gh200_of_vllm_030() -> None:
    plan = plan_of("qwen3.5-27b", "h100", "vllm-0.30.0", kv_dtype="fp8")
    memory = plan.memory_of(max_num_seqs=64, prefix_caching=True)
    assert (memory.block_tokens, memory.state_parts, memory.groups) == (1568, 6, 4)
    assert int(26.84 * GIB / memory.part_bytes) in (560, 561)
    memory = memory._replace(parts=561)
    assert memory.reserved_parts(131_072) == 90
    assert cache_line_tokens(plan.profile.memory, memory, 131_072) == 817_015


def test_qwen_27b_with_two_draft_tokens_of_vllm_024() -> None:
    plan = plan_of("qwen3.5-27b", "h200", "vllm-0.24.0", tp=2, dtype="fp8_block")
    memory = speculated(plan, SpeculativeDecoding(2, 2.0, "mtp")).memory(max_num_seqs=64)
    assert int(110.59 * GIB / memory.part_bytes) == 4350
    memory = memory._replace(parts=4350)
    assert memory.reserved_parts(184_320) == 236 + 3 * 4
    assert round(memory.max_concurrency(184_320), 2) == 17.54


@pytest.mark.parametrize(
    ("blocks", "context", "caching", "printed"), [(304, 65_536, True, 8.0), (95, 131_072, False, 1.44)]
)
def test_qwen_35b_with_a_cache_in_fp8(blocks: int, context: int, caching: bool, printed: float) -> None:
    plan = plan_of("qwen3.5-35b-a3b", "h100", "vllm-0.17.0", kv_dtype="fp8", dtype="fp8")
    memory = plan.memory_of(max_num_seqs=8, prefix_caching=caching)._replace(parts=blocks)
    assert memory.block_tokens == 2096
    assert round(memory.max_concurrency(context), 2) == printed
    assert cache_line_tokens(plan.profile.memory, memory, context) == blocks // 4 * 2096


def test_qwen_27b_prints_blocks_of_one_group_in_vllm_019() -> None:
    plan = plan_of("qwen3.5-27b", "h200", "vllm-0.19.0")
    lines = {
        cache_line_tokens(plan.profile.memory, plan.memory._replace(parts=blocks), 262_144)
        for blocks in (1484, 1487)
    }
    assert lines == {290_864}


def test_qwen_27b_on_two_small_cards_of_vllm_023() -> None:
    plan = plan_of("qwen3.5-27b", "h100", "vllm-0.23.1", tp=2)
    memory = plan.memory_of(max_num_seqs=256)
    assert int(3.86 * GIB / memory.part_bytes) == 161
    memory = memory._replace(parts=161)
    assert memory.largest_context() == (161 - 3) * 784 == 123_872
    assert memory.reserved_parts(122_633) == 160
    assert cache_line_tokens(plan.profile.memory, memory, 122_633) == 123_399


@pytest.mark.parametrize(
    ("model", "gpu_gib", "engine", "options", "blocks", "off"),
    [
        # kaito#2319, which names neither card nor fraction, and vllm#49064; and a report without a format
        ("qwen3.5-27b", 93.1, "vllm-0.25.1", {"memory_fraction": 0.9}, 614, 0.07),
        ("qwen3.6-27b-nvfp4", 79.2, "vllm-0.28.0", {"memory_fraction": 0.9}, 969, 0.05),
        ("nemotron-3-super-120b-a12b-fp8", 79.2, "vllm-0.24.0", {"tp": 2}, 524, 0.5),
    ],
)
def test_more_requests_than_blocks_of_states_do_not_start(
    model: str, gpu_gib: float, engine: str, options: dict[str, Any], blocks: int, off: float
) -> None:
    """Three public reports, of engines that do not start with their default of 1,024 requests."""
    gpu = replace(load_gpu("h100"), hbm_bytes=round(gpu_gib / VISIBLE_SHARE * GIB))
    plan = plan_of(model, gpu, engine, **options)
    found = {one.code: one for one in refusals(plan, StartQuestion(max_model_len=8192, max_num_seqs=1024))}
    assert found["D"].available == pytest.approx(blocks, rel=off)
    most = seqs_that_start(plan, StartQuestion(max_model_len=8192))
    assert found["D"].remedy == f"max_num_seqs={most}"
    for seqs, starts in ((most, True), (most + 1, False)):
        codes = {one.code for one in refusals(plan, StartQuestion(8192, seqs)) if not one.is_warning}
        assert (codes == set()) is starts
    # every other answer is of the most that start
    memory = plan.memory_of(max_num_seqs=1024)
    assert memory.max_running == memory.most_running(1024) == most <= memory.parts
    assert memory.max_sequences(1) <= most


def test_the_most_requests_leave_room_for_the_longest() -> None:
    """Sampling for fewer requests leaves more memory for KV cache, and so for a longer request."""
    plan = plan_of("llama-3.1-70b", "h100", "vllm", tp=2)
    all_fit, some, none = (
        seqs_that_start(plan, StartQuestion(max_model_len=length)) for length in (16_384, 32_768, 65_536)
    )
    assert all_fit == plan.profile.scheduling.max_num_seqs > some > none == 0
    for seqs, starts in ((some, True), (some + 1, False)):
        assert (not refusals(plan, StartQuestion(32_768, seqs))) is starts


def test_an_engine_starts_if_all_memory_that_it_requests_is_free() -> None:
    plan = plan_of("llama-3.1-8b", "h100", "vllm")
    requested = plan.memory.requested_bytes
    for free, codes in ((requested, []), (requested - 1, ["A"])):
        assert [one.code for one in refusals(plan, StartQuestion(free_bytes=free))] == codes


def test_an_old_version_has_no_such_limit() -> None:
    plan = plan_of("qwen3.5-27b", "h200", "vllm-0.13.0", tp=1)
    assert plan.memory.max_running == 0
    assert not refusals(plan, StartQuestion(max_model_len=8192, max_num_seqs=1024))


def test_graphs_are_a_range_that_a_variable_removes() -> None:
    plan = plan_of("minimax-m2.5-nvfp4", "b200", "vllm-0.22.0", dp=2, ep=2)
    memory, rule = (
        plan.memory,
        plan.profile.memory.of_model(plan.model.architecture, is_dense=plan.model.is_dense),
    )
    assert rule.graphs is not None
    assert rule.graphs.variable == "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0"
    # 29.07 GiB of KV cache with the estimate, 91.04 without it
    assert memory.graphs_low_bytes <= memory.graphs_bytes < memory.graphs_high_bytes == 62 * GIB
    assert refusals(plan, StartQuestion(max_model_len=2304)) == ()
    dense = plan_of("llama-3.1-8b", "b200", "vllm-0.22.0").memory
    assert 0 < dense.graphs_low_bytes <= dense.graphs_bytes <= dense.graphs_high_bytes < GIB
    assert plan_of("llama-3.1-8b", "b200", "vllm-0.19.0").memory.graphs_bytes == 0


def test_vllm_prints_the_tokens_of_the_smallest_blocks() -> None:
    plan = plan_of("gemma-4-26b-a4b", "b300", "vllm-0.12.0", tp=8)
    memory = plan.memory
    assert (memory.block_tokens, memory.window_block_tokens, memory.groups) == (16, 32, 6)
    assert cache_line_tokens(plan.profile.memory, memory, 262_144) == memory.blocks // 6 * 16


def test_a_cache_that_does_not_fit_names_one_that_does() -> None:
    def refused(cache_gib: float) -> list[str]:
        plan = plan_of("llama-3.1-8b", "h100", "vllm", kv_cache_gib=cache_gib)
        return [one.remedy for one in refusals(plan) if one.code == "E" and not one.is_warning]

    (remedy,) = refused(70.0)
    most_gib = float(remedy.split()[2])
    assert 50.0 < most_gib < 70.0
    assert refused(most_gib) == []


def test_fractions_and_sampling_by_version() -> None:
    sampled = {}
    for version in ("0.16.0", "0.19.0", "0.22.0", "0.28.0", "0.33.0"):
        plan = plan_of("llama-3.1-8b", "h100", f"vllm-{version}")
        memory = plan.memory
        sampled[version] = memory.sampler_bytes / (1024 * plan.model.padded_vocab(1))
        assert memory.fraction == pytest.approx(0.9 if version < "0.21" else 0.92, abs=1e-6)
    assert [round(size, 1) for size in sampled.values()] == [38.6, 14.0, 14.0, 6.5, 13.6]
    newest, own = (plan_of("llama-3.1-8b", "h100", name).memory for name in ("vllm-0.33.0", "vllm"))
    assert newest == own


def test_deepseek_v4_takes_what_sglang_logs_a_token() -> None:
    plan = plan_of("deepseek-v4-flash", "b200", "sglang", tp=8)
    assert plan.memory.token_bytes == pytest.approx(28_900, rel=0.01)


@pytest.mark.parametrize(
    ("engine", "model", "gpu", "slots", "padding"),
    [
        ("sglang-0.5.10", "qwen3.5-27b", "h200", 3, 0),
        ("sglang-0.5.14", "qwen3.5-27b", "h200", 5, 0),
        ("sglang-0.5.18", "qwen3.5-27b", "h200", 5, 1),
        ("sglang", "qwen3.5-27b", "h200", 5, 1),
        ("sglang", "qwen3.5-27b", "mi355x", 3, 1),
        ("sglang-0.5.10", "kimi-linear-48b-a3b", "h200", 1, 0),
        ("sglang-0.5.14", "kimi-linear-48b-a3b", "h200", 3, 0),
        ("sglang-0.5.16", "kimi-linear-48b-a3b", "h200", 5, 0),
    ],
)
def test_sglang_sets_states_aside_for_running_requests(
    engine: str, model: str, gpu: str, slots: int, padding: int
) -> None:
    plan = plan_of(model, gpu, engine)
    memory, state = plan.memory, plan.memory.state_bytes_per_sequence
    assert memory.state_pool_bytes == pytest.approx(0.9 * memory.kv_cache_bytes, rel=1e-6)
    assert memory.state_slots == memory.state_pool_bytes // state - padding
    assert memory.max_running == memory.state_slots // slots
    assert memory.request_parts == 0
    assert memory.max_sequences([1, 100]).tolist() == [memory.max_running] * 2


def test_a_pipeline_runs_what_its_tightest_stage_has_states_for() -> None:
    plan = plan_of("qwen3.5-27b", "h200", "sglang", pp=3)
    each = [stage.memory.max_running for stage in plan.stages]
    assert plan.memory.max_running == min(each) < max(each)


@pytest.mark.parametrize(("model", "pp"), [("bamba-9b", 2), ("bamba-9b", 5), ("nemotron-3-nano-30b-a3b", 5)])
def test_no_stage_of_a_pipeline_has_states_for_fewer_requests(model: str, pp: int) -> None:
    plan = plan_of(model, "h200", "vllm", pp=pp)
    memory = plan.memory
    for stage in (one.memory for one in plan.stages):
        room, own = (one.parts * one.part_bytes for one in (stage, memory))
        assert room // max(stage.state_bytes_per_sequence, 1) >= own // memory.state_bytes_per_sequence
        assert stage.parts // max(stage.state_parts, 1) >= memory.parts // memory.state_parts


def test_sglang_runs_48_requests_with_draft_tokens() -> None:
    options = {"tp": 2, "dtype": "fp8"}
    for ranks in (1, 2):
        plan = plan_of("qwen3-30b-a3b", "h200", "sglang", **options | {"dp": ranks, "ep": 2 * ranks})
        drafted = speculated(plan, SpeculativeDecoding(3, 2.0))
        assert drafted.memory().max_running == 48 // ranks
        assert drafted.memory(max_num_seqs=100).most_running(100) == 100


def test_the_cache_of_an_engine_may_be_given_in_bytes() -> None:
    plan = plan_of("llama-3.1-8b", "h100", "vllm")
    given = plan_of("llama-3.1-8b", "h100", "vllm", kv_cache_gib=8.0).memory
    assert given.parts == 8 * GIB // given.part_bytes < plan.memory.parts
    assert sum(given.explain().values()) == pytest.approx(plan.gpu.hbm_bytes, abs=given.part_bytes)
    assert plan_of("llama-3.1-8b", "h100", "sglang", kv_cache_gib=8).memory.kv_cache_bytes == 8 * GIB
    for wrong in (0, -1, math.nan, True, "8", 1e9):
        with pytest.raises(FastroofError, match="kv_cache_gib must be GiB"):
            plan_of("llama-3.1-8b", "h100", "vllm", kv_cache_gib=wrong)
    with pytest.raises(FastroofError, match="needs a serving engine"):
        plan_of("llama-3.1-8b", "h100", "kernels", kv_cache_gib=8)


MODELS = (
    "llama-3.1-8b", "gemma-3-27b", "gpt-oss-20b", "qwen3.5-27b", "deepseek-v3", "llama-4-scout", "bamba-9b",
    "mimo-v2-flash", "nemotron-3-nano-30b-a3b", "deepseek-v4-flash", "kimi-k3", "mistral-7b",
)  # fmt: skip
ENGINES = ("kernels", "vllm", "vllm-0.12", "sglang", "trtllm")
_PLANS: dict[tuple[str, str], StepPlan | None] = {}


def cached_plan(model: str, engine: str) -> StepPlan | None:
    if (model, engine) not in _PLANS:
        try:
            _PLANS[model, engine] = plan_of(
                load_model(model), "b300", engine, tp=8, max_num_batched_tokens=4096
            )
        except FastroofError:
            _PLANS[model, engine] = None
    return _PLANS[model, engine]


@pytest.mark.parametrize("engine", ["vllm", "trtllm-1.1", "sglang"])
@pytest.mark.parametrize("model", ["deepseek-v4-flash", "gemma-3-12b", "bamba-9b", "llama-3.1-8b"])
def test_simulated_blocks_are_of_tokens_that_fit(model: str, engine: str) -> None:
    plan = cached_plan(model, engine)
    if plan is None:
        pytest.skip("the engine does not run the model")
    memory, settings = plan.memory, EngineSettings.of_plan(plan, max_num_batched_tokens=4096)
    tokens = settings.num_gpu_blocks * settings.block_size
    assert 0 < tokens / memory.block_tokens * memory.full_parts * memory.part_bytes <= memory.kv_cache_bytes
    if model == "llama-3.1-8b":
        assert settings.num_gpu_blocks == memory.blocks
        assert settings.block_size == memory.block_tokens


def naive_blocks(memory: PlanMemory, length: int) -> int:
    """Blocks of one running request, one token after the other."""
    full = within = 0
    for token in range(length):
        full += token % memory.block_tokens == 0
        within += token % memory.window_block_tokens == 0 and token < memory.window_tokens
    return full * memory.full_parts + within * memory.window_parts + memory.state_parts + memory.spare_parts


@given(
    model=st.sampled_from(MODELS), engine=st.sampled_from(ENGINES), length=st.integers(1, 10_000),
    more=st.integers(1, 3000),
)  # fmt: skip
def test_blocks_of_a_request_grow_and_fit(model: str, engine: str, length: int, more: int) -> None:
    plan = cached_plan(model, engine)
    if plan is None:
        return
    memory = plan.memory
    one, longer = memory.parts_per_request(length), memory.parts_per_request(length + more)
    assert one == naive_blocks(memory, length) <= longer
    assert one <= memory.reserved_parts(length) <= memory.reserved_parts(length + more)
    fit = memory.max_sequences(length)
    assert fit * one <= memory.parts
    if not memory.max_running:
        assert (fit + 1) * one > memory.parts
    assert memory.parts * memory.part_bytes <= memory.kv_cache_bytes
    longest = memory.largest_length(max(fit, 1))
    if fit and longest < 2**28:
        assert longest >= length
        assert memory.parts_per_request(longest) * fit <= memory.parts
