"""Rooms of the newest models: every printed digit of a logged start comes out of the rule."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import fastroof
from fastroof.config import load_gpu
from fastroof.evidence.engine_arguments import read_engine_arguments
from fastroof.memory.plan_memory import PlanMemory
from fastroof.memory.workspaces import workspace
from fastroof.models import load_model
from fastroof.plan import StepPlan, compile_plan
from fastroof.plan.start import StartQuestion, cache_line_tokens, refusals
from fastroof.sweep import load_spec
from fastroof.units import GIB, MIB


def plan_of(model: Any, gpu: Any, engine: str, **options: Any) -> StepPlan:
    """A plan without kernels: only its memory is read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile_plan(model, gpu, None, engine=engine, allow_modelled=True, **options)


def memory_of(plan: StepPlan, tokens: int, length: int | None = None, **options: Any) -> PlanMemory:
    return plan.memory_of(
        max_num_batched_tokens=tokens, max_num_seqs=256, lowers=False, max_model_len=length, **options
    )


@pytest.mark.parametrize(
    ("model", "gpu", "engine", "kv_dtype", "token_bytes"),
    [
        ("glm-5.2-fp8", "h200", "vllm-0.28", "fp8", 53_940),
        ("glm-5.2-fp8", "rtx_pro_6000", "vllm-0.28", "fp8", 53_940),
        ("glm-5.2-fp8", "rtx_pro_6000", "vllm-0.28", "bf16", 53_940),
        ("glm-5.2-fp8", "b200", "vllm-0.28", "fp8", 47_700),
        ("glm-5.2-fp8", "mi355x", "vllm-0.28", "fp8", 47_700),
        ("glm-5.2-fp8", "h200", "vllm-0.28", "bf16", 92_628),
        ("deepseek-v3.2", "h200", "vllm-0.28", "fp8", 48_068),
        ("deepseek-v3.2", "b200", "vllm-0.28", "fp8", 43_188),
        ("deepseek-v3.2", "b200", "vllm-0.28", "bf16", 78_324),
        # an indexer's key of every layer up to 0.5.16; 55,238 B logged
        ("glm-5.2-fp8", "rtx_pro_6000", "sglang-0.5.14", "fp8", 55_224),
    ],
)
def test_bytes_of_a_token_follow_the_kernel_of_the_card(model, gpu, engine, kv_dtype, token_bytes):
    plan = plan_of(model, gpu, engine, tp=8, kv_dtype=kv_dtype)
    assert plan.memory.kv_bytes_per_token == token_bytes


@pytest.mark.parametrize(
    ("model", "gpu", "formats"),
    [
        (
            "glm-5.2-fp8",
            "b200",
            {"vllm-0.31": "bf16", "vllm-0.32": "fp8", "vllm": "fp8", "sglang-0.5.10": "fp8"},
        ),
        ("glm-5.2-fp8", "h200", {"vllm": "bf16", "sglang": "bf16", "trtllm": "bf16"}),
        ("glm-5.3-flash", "b200", {"vllm-0.32": "bf16", "vllm": "fp8", "sglang": "fp8"}),
        ("deepseek-v3.2", "h200", {"vllm-0.11.0": "fp8", "vllm-0.11.1": "bf16", "vllm": "bf16"}),
        ("deepseek-v3.2", "b200", {"vllm": "bf16", "sglang-0.5.6": "fp8", "sglang": "fp8"}),
        ("deepseek-v3.2", "rtx_pro_6000", {"vllm-0.23": "bf16", "vllm-0.24": "fp8", "sglang": "fp8"}),
        ("deepseek-v3.2", "mi355x", {"vllm": "bf16", "sglang": "bf16"}),
        # SGLang's rule is not the checkpoint's
        ("deepseek-v3.2-nvfp4", "h200", {"vllm": "fp8", "sglang": "bf16", "trtllm": "fp8"}),
        ("deepseek-v4-flash", "h200", {"vllm": "fp8", "sglang": "fp8"}),
        ("llama-3.1-8b", "b200", {"vllm": "bf16", "sglang": "bf16", "trtllm": "bf16"}),
    ],
)
def test_auto_is_the_engines_own_format_of_the_kv_cache(model, gpu, formats):
    assert {engine: plan_of(model, gpu, engine, tp=8).kv_dtype for engine in formats} == formats


@pytest.mark.parametrize("kv_dtype", ["auto", "bf16"])
def test_every_answer_takes_the_same_format_for_auto(kv_dtype):
    options = {"engine": "vllm", "tp": 8, "kv_dtype": kv_dtype}
    answer = fastroof.fit("glm-5.2-fp8", "b200", **options)
    (plan,) = fastroof.compile_plans([{"model": "glm-5.2-fp8", "allow_modelled": True, **options}], "b200")
    keys = {"models": ["glm-5.2-fp8"], "gpus": ["b200"], "isl": 1000, "osl": 100, "clients": [8]}
    spec = load_spec(
        {**keys, "kv_dtype": [kv_dtype], "engine": ["vllm", "trtllm"], "max_num_batched_tokens": 8192}
    )
    swept = {engine: found for _, found, engine in spec.formats("glm-5.2-fp8", "b200")}
    started = read_engine_arguments(given={"gpu": "b200", "model": "glm-5.2-fp8", **options})
    own = "fp8" if kv_dtype == "auto" else kv_dtype
    assert {answer.kv_dtype, plan.kv_dtype, swept["vllm"], started.kv_dtype} == {own}
    assert swept["trtllm"] == "bf16"
    assert ("--kv-cache-dtype", "auto" if own == "fp8" else "bfloat16") in answer.command.arguments


def test_a_card_without_a_kernel_refuses():
    answer = fastroof.fit("glm-5.3-flash", "l40s", tp=8, engine="vllm-0.30")
    assert answer.refusals[0].code == "K"
    assert (answer.starts, answer.confidence, answer.deciding_check) == (False, "no", "K")


def test_an_indexers_gather_has_the_logged_digits():
    """0.00 MB -> 5036.40 MB at a million tokens (vllm-project/vllm#55221, #53906)."""
    plan = plan_of("glm-5.3-flash", "rtx_pro_6000", "vllm-0.30", tp=4, kv_dtype="fp8")

    def buffer_bytes(plan: StepPlan, length: int) -> int:
        return workspace(
            plan.profile.memory,
            plan.gpu,
            plan.model,
            plan.layout,
            plan.cache_format,
            tokens=8192,
            requests=128,
            length=length,
        ).buffer_bytes

    assert round(buffer_bytes(plan, 1_000_000) / MIB, 2) == 5036.40
    later = plan_of("glm-5.3-flash", "rtx_pro_6000", "vllm-0.32", tp=4, kv_dtype="fp8")
    # divided by the pool of 4, and 16 contexts of keys instead of 40 beyond 262,144 tokens
    assert buffer_bytes(later, 262_144) - MIB == pytest.approx((buffer_bytes(plan, 262_144) - MIB) / 4)
    assert buffer_bytes(later, 1_000_000) - MIB == 16 * 250_000 * 132
    glm = plan_of("glm-5.2-fp8", "h200", "vllm-0.28", tp=8, kv_dtype="fp8")
    assert buffer_bytes(glm, 1_048_576) / GIB == pytest.approx(5.625 + 0.07, abs=0.01)
    bf16 = plan_of("glm-5.2-fp8", "h200", "vllm-0.28", tp=8, kv_dtype="bf16")
    assert buffer_bytes(bf16, 1_048_576) / GIB == pytest.approx(5.16, abs=0.01)
    amd = [plan_of("glm-5.2-fp8", "mi355x", f"vllm-0.{minor}", tp=8) for minor in (28, 30)]
    assert [buffer_bytes(plan, 1_048_576) // GIB for plan in amd] == [32, 5]


def test_a_smaller_length_gives_room_back_and_remedies_know_it():
    options: dict[str, Any] = {"tp": 8, "kv_dtype": "fp8", "engine": "vllm-0.28"}
    refused = fastroof.fit("glm-5.2-fp8", "h200", **options)
    change = next(one for one in refused.changes if "max_model_len" in one.settings)
    length = change.settings["max_model_len"]
    # 5,760 B a token of length, and more than the refused start's room would hold
    assert length > refused.memory.largest_context()
    shorter = fastroof.fit("glm-5.2-fp8", "h200", max_model_len=length, **options)
    assert shorter.starts
    given_back = shorter.memory.kv_cache_bytes - refused.memory.kv_cache_bytes
    assert given_back == pytest.approx(5760 * (1_048_576 - length), rel=1e-6)
    assert not fastroof.fit("glm-5.2-fp8", "h200", max_model_len=length + 64, **options).starts


def test_deepseek_v4_needs_what_vllm_022_logged():
    """6.66 GiB needed, 5.44 available, 13,528 the estimated largest length (vllm-project/vllm#44376)."""
    plan = plan_of("deepseek-v4-flash", "gh200", "vllm-0.22.0", tp=2, kv_cache_gib=5.442)
    memory = memory_of(plan, 16_384, 30_000)
    assert round(memory.needed_bytes(30_000) / GIB, 2) == 6.66
    assert memory.largest_context() == 13_528
    assert (memory.block_tokens, memory.block_bytes, memory.groups) == (256, 1_051_776, 5)
    [refusal] = refusals(plan, StartQuestion(30_000, 256, 16_384))
    assert (refusal.code, refusal.remedy) == ("C", "max_model_len=13528")


@pytest.mark.parametrize(
    ("engine", "gib", "length", "tokens", "blocks", "printed"),
    [
        ("vllm-0.22.0", 37.933, 256_000, 8192, 38_724, 2_497_693),
        ("vllm-0.26.0", 7.7, 121_344, 8192, 7_952, 150_982),
    ],
)
def test_deepseek_v4_prints_the_logged_tokens(engine, gib, length, tokens, blocks, printed):
    plan = plan_of("deepseek-v4-flash", "h20", engine, tp=2, kv_cache_gib=gib)
    memory = memory_of(plan, tokens, length)
    assert memory.blocks in (blocks, blocks + 1, blocks + 2)
    memory = memory._replace(parts=blocks)
    assert cache_line_tokens(plan.profile.memory, memory, length) == printed


@pytest.mark.parametrize(
    ("engine", "block_bytes"),
    [("vllm-0.21", 1_051_776), ("vllm-0.23", 1_039_680), ("vllm-0.27", 1_039_680), ("vllm-0.28", 1_002_240)],
)
def test_blocks_of_deepseek_v4_by_version(engine, block_bytes):
    plan = plan_of("deepseek-v4-flash", "b200", engine, tp=8, ep=8)
    memory = plan.memory
    assert memory.block_bytes == block_bytes
    if engine == "vllm-0.28":  # all five logged (vllm-project/vllm#54703)
        widths = [round(one.share * block_bytes) for one in memory.windows]
        assert widths == [823_680, 786_240, 870_912, 656_640]


@pytest.mark.parametrize(
    ("in_flight", "fixed"), [(2048, 858), (4096, 1690), (8192, 3354), (16_384, 6682), (32_768, 13_338)]
)
def test_blocks_of_deepseek_v4_that_do_not_depend_on_the_length(in_flight, fixed):
    plan = plan_of("deepseek-v4-flash", "b200", "vllm-0.25", tp=8, ep=8)
    memory = memory_of(plan, in_flight)
    assert memory.reserved_parts(1_048_576) - 4096 == fixed


def test_tokens_of_a_step_are_the_lever_of_deepseek_v4():
    """8,224 to 2,048 tokens took a pool from 290,632 to 1,262,567 tokens, on one card and 0.28's blocks."""
    plan = plan_of("deepseek-v4-flash", "b200", "vllm-0.25", tp=8, ep=8)
    blocks = {}
    for tokens, printed in ((8224, 290_632), (2048, 1_262_567)):
        memory = memory_of(plan, tokens, 262_144)
        blocks[tokens] = printed / 262_144 * memory.reserved_parts(262_144)
    # what the smaller steps leave is what their forward pass takes less: 5.30 and 1.39 GiB
    freed_gib = (blocks[2048] - blocks[8224]) * 1_002_240 / GIB
    assert freed_gib == pytest.approx(5.30 - 1.39, abs=0.02)
    answer = fastroof.fit("deepseek-v4-flash", "b200", tp=8, ep=8, engine="vllm-0.28", max_model_len=262_144)
    assert answer.fewer_tokens is not None
    assert answer.fewer_tokens[1] > 2 * answer.cache_line_tokens
    assert "5 groups" in dict(answer.facts())["KV cache"]


@pytest.mark.parametrize(
    ("gpu", "kv_dtype", "tp", "block_tokens", "block_bytes"),
    [
        ("h200", "bf16", 4, 1152, 13_394_304),
        ("rtx_pro_6000", "fp8", 4, 2304, 17_462_016),
        ("mi355x", "fp8", 1, 8704, None),
    ],
)
def test_blocks_of_a_latent_hybrid_are_aligned(gpu, kv_dtype, tp, block_tokens, block_bytes):
    memory = plan_of("glm-5.3-flash", gpu, "vllm-0.30", tp=tp, kv_dtype=kv_dtype).memory
    assert memory.block_tokens == block_tokens
    assert block_bytes is None or memory.block_bytes == block_bytes


@pytest.mark.parametrize(
    ("gpu", "kv_dtype", "gib", "blocks", "of_request", "printed"),
    [
        ("h200", "bf16", 38.434, 3081, 920, 3_511_589),
        ("h200", "bf16", 40.05, 3210, 920, None),
        ("rtx_pro_6000", "fp8", 7.68, 472, 465, 1_064_361),
    ],
)
def test_a_latent_hybrid_prints_the_logged_tokens(gpu, kv_dtype, gib, blocks, of_request, printed):
    plan = plan_of("glm-5.3-flash", gpu, "vllm-0.30", tp=4, kv_dtype=kv_dtype, kv_cache_gib=gib)
    memory = memory_of(plan, 8192, 1_048_576)
    assert (memory.blocks, memory.reserved_parts(1_048_576)) == (blocks, of_request)
    if printed is not None:
        assert cache_line_tokens(plan.profile.memory, memory, 1_048_576) == printed


@pytest.mark.parametrize(
    ("dtype", "blocks", "printed"), [("fp8_block", 491, 377_456), ("nvfp4", 580, 445_875)]
)
def test_a_hybrid_with_prefix_caching_prints_the_logged_tokens(dtype, blocks, printed):
    """Qwen3.8-27B on two RTX 5090, vLLM 0.26.1rc1 (vllm-project/recipes#810): two states a request."""
    plan = plan_of("qwen3.5-27b", "rtx_5090", "vllm-0.26.1rc1", tp=2, dtype=dtype)
    memory = memory_of(plan, 2048, 262_144)._replace(parts=blocks)
    assert memory.reserved_parts(262_144) == 341
    assert cache_line_tokens(plan.profile.memory, memory, 262_144) == printed
    older = plan_of("qwen3.5-27b", "rtx_5090", "vllm-0.26.0", tp=2, dtype=dtype)
    assert memory_of(older, 2048).reserved_parts(262_144) == 338


def test_sglang_runs_as_many_as_it_logged():
    """124 states of 0.14452 GiB in 18.11 GiB, capped to 24 running (0.5.18, Qwen3.8-27B on an H100)."""
    plan = plan_of("qwen3.8-27b-fp8", "h100", "sglang-0.5.18", memory_fraction=0.85)
    memory = plan.memory
    state_gib = memory.state_bytes_per_sequence / GIB
    assert state_gib == pytest.approx(0.14452, rel=0.01)
    assert memory.max_running == memory.state_slots // 5
    assert memory.max_running in (24, 25)
    for answer in (
        fastroof.fit(
            "qwen3.8-27b-fp8",
            "h100",
            engine="sglang-0.5.18",
            memory_fraction=0.85,
            max_model_len=1024,
        ).running,
        int(plan.memory.max_sequences(1024)),
    ):
        assert answer == memory.max_running


def test_a_pool_without_states_for_a_request_refuses():
    refused = fastroof.fit("qwen3.5-27b-fp8", "l40s", engine="sglang-0.5.18", memory_fraction=0.68)
    assert refused.memory.state_slots == 4
    assert not refused.starts
    assert "pool of states holds 4" in refused.refusals[0].reason
    assert refused.margin_gib < 0
    options: dict[str, Any] = {"engine": "sglang-0.5.18", "memory_fraction": 0.7, "max_model_len": 1024}
    assert fastroof.fit("qwen3.5-27b-fp8", "l40s", **options).running == 1


@pytest.mark.parametrize(
    ("dp", "model", "tokens"), [(1, "deepseek-v3", 8192), (8, "deepseek-v3", 1024), (8, "qwen3-8b", 8192)]
)
def test_sglangs_ranks_divide_the_default_chunk(dp, model, tokens):
    plan = plan_of(model, "h200", "sglang", dp=dp, ep=dp if model == "deepseek-v3" else 1)
    assert plan.profile.scheduling.max_num_batched_tokens == plan.memory_tokens == tokens


@pytest.mark.parametrize(
    ("model", "gpu", "alternative", "gib", "other_gib"),
    [
        # logged: 64.38 with Triton, 65.97 with Marlin; and 13.47
        ("gpt-oss-120b", "h100", "without triton_kernels", 64.33, 65.90),
        ("gpt-oss-20b", "h100", "without triton_kernels", 13.41, 13.67),
        ("gpt-oss-120b", "b200", "", 65.90, None),
    ],
)
def test_experts_are_padded_by_the_kernel(model, gpu, alternative, gib, other_gib):
    answer = fastroof.fit(model, gpu, engine="vllm-0.20", memory_fraction=0.95)
    assert answer.memory.weight_bytes / GIB == pytest.approx(gib, abs=0.02)
    if other_gib is None:
        assert "without triton_kernels" not in answer.other_rooms
    else:
        less = answer.memory.kv_cache_bytes - answer.other_rooms[alternative]
        assert less / GIB == pytest.approx(other_gib - gib, abs=0.02)
        assert alternative in dict(answer.facts())


@pytest.mark.parametrize(
    ("model", "gpu", "options", "confidence"),
    [
        # refused in its log, vllm-project/vllm#44376: the margin is within the error
        (
            "deepseek-v4-flash",
            "gh200",
            {"tp": 2, "engine": "vllm-0.22.0", "max_model_len": 30_000, "max_num_batched_tokens": 16_384},
            "unlikely",
        ),
        ("deepseek-v4-flash", "gh200", {"tp": 2, "engine": "vllm-0.22.0", "max_model_len": 8192}, "likely"),
        # 62 GiB may go to graphs, vllm-project/vllm#45178
        ("minimax-m2.5-nvfp4", "b200", {"engine": "vllm-0.21.0", "max_model_len": 2304}, "likely"),
        ("glm-5.3-flash", "h200", {"tp": 4, "engine": "vllm-0.30"}, "yes"),
        ("kimi-k3", "h200", {"tp": 8, "pp": 2, "engine": "vllm-0.28"}, "no"),
        ("llama-3.1-8b", "h100", {"engine": "vllm"}, "yes"),
        ("llama-3.1-405b", "h100", {"engine": "vllm"}, "no"),
        ("llama-3.1-8b", "h100", {"free_gib": 40}, "no"),
        ("llama-3.1-8b", "h100", {"max_num_seqs": 64, "max_num_batched_tokens": 32}, "no"),
    ],
)
def test_an_answer_is_as_sure_as_its_margin(model, gpu, options, confidence):
    answer = fastroof.fit(model, gpu, **options)
    assert answer.confidence == confidence
    assert answer.starts is (confidence in ("yes", "likely"))
    document = answer.document()
    assert document["confidence"] == confidence
    assert document["error_gib"] == answer.room_errors.most_gib
    assert document["graph_range_gib"][0] <= document["graph_range_gib"][1]
    if answer.refusals and not answer.refusals[0].is_warning:
        assert answer.deciding_check == answer.refusals[0].code


def test_requests_beyond_the_largest_graph_are_refused_where_graphs_are_profiled_with_few_states():
    options: dict[str, Any] = {"tp": 8, "pp": 2, "engine": "vllm-0.28"}
    refused = fastroof.fit("kimi-k3", "h200", **options)
    assert refused.refusals[0].code == "D"
    assert refused.refusals[0].remedy == "max_num_seqs=512"
    assert refused.largest_max_num_seqs == 512
    assert fastroof.fit("kimi-k3", "h200", max_num_seqs=512, **options).starts
    # later versions profile with all blocks
    assert fastroof.fit("kimi-k3", "h200", **{**options, "engine": "vllm-0.29"}).starts


@pytest.mark.parametrize(
    ("model", "gpu", "options"),
    [
        ("qwen3.5-27b", "h100", {"engine": "vllm"}),
        ("glm-5.2-fp8", "h200", {"tp": 8, "kv_dtype": "fp8", "engine": "vllm-0.28"}),
        ("deepseek-v4-flash", "h20", {"tp": 2, "engine": "vllm-0.26"}),
        ("kimi-k3", "h200", {"tp": 8, "pp": 2, "engine": "vllm-0.28"}),
        ("llama-3.1-70b", "h100", {"tp": 2, "engine": "vllm"}),
    ],
)
def test_every_remedy_passes_all_checks(model, gpu, options):
    answer = fastroof.fit(model, gpu, **options)
    codes = [one.code for one in answer.refusals]
    assert codes == sorted(codes, key="FKAWPDBCE".index) or codes[:2] == ["C", "D"]
    for refusal in answer.refusals:
        settings = dict(
            part.split("=") for part in refusal.remedy.split(" or ")[0].split(" and ") if "=" in part
        )
        named = {name: float(value) if "." in value else int(value) for name, value in settings.items()}
        if named and not refusal.is_warning:
            assert fastroof.fit(model, gpu, **{**options, **named}).starts
    for change in answer.changes:
        assert fastroof.fit(model, gpu, **{**options, **change.settings}).starts


def test_graphs_are_taken_off_the_room_and_never_added():
    answer = fastroof.fit("minimax-m2.5-nvfp4", "b200", engine="vllm-0.21.0", max_model_len=2304)
    rows = {name: note for name, _, note in answer.memory_rows()}
    assert rows["KV cache"] == "0.00 to 34.80 by the estimate of graphs"
    assert not [one for one in answer.refusals if "graphs" in one.reason.lower()]
    assert "which leaves 0.0 and it may not start" in answer.confidence_words


def test_an_estimate_that_counts_workspaces_is_not_to_be_switched_off():
    assert fastroof.fit("glm-5.3-flash", "h200", tp=4, engine="vllm-0.30").graphs_variable == ""
    assert fastroof.fit("qwen3-32b", "h200", engine="vllm-0.30").graphs_variable


def test_fit_takes_models_that_need_modelled_kernels():
    spec = load_model("glm-5.3-flash")
    assert fastroof.fit(spec, load_gpu("h200"), tp=4, engine="vllm-0.30", allow_modelled=True).starts
