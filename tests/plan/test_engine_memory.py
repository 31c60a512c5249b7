"""Room for KV cache as each engine's profile leaves it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof import compile_plan, load_gpu, load_model
from fastroof.config import GpuSpec
from fastroof.engines import EngineProfile, KvMemory, load_engine
from fastroof.engines.memory import StaticReserve
from fastroof.errors import PlanError
from fastroof.memory.gpu_memory import MemoryUse, plan_memory
from fastroof.memory.kv_room import VISIBLE_SHARE
from fastroof.memory.workspaces import padded_bytes
from fastroof.models import Layout
from fastroof.models.execution import Execution
from fastroof.serving import estimate, estimate_disaggregated
from fastroof.units import GIB, MIB

ENGINES = ("vllm", "sglang", "trtllm-1.0", "trtllm-1.1")


def naive_room_bytes(
    rule: KvMemory, gpu: GpuSpec, gpus: int, weights: int, run: float, kept_mib: float, has_experts: bool
):
    """What an engine leaves, written for reading: of memory in bytes, in the order in which it takes it."""
    visible = int(gpu.hbm_bytes * VISIBLE_SHARE)
    is_fast = gpu.nvlink_bytes_per_s >= 400e9
    # neither NVFP4 nor sparse attention
    graphs_gib = rule.graphs.kinds[-1].gib if rule.graphs and rule.graphs.kinds else 0.0
    context = rule.context_gib + graphs_gib
    if gpus > 1:
        fast_gib = rule.group_gib
        if has_experts and rule.expert_group_gib is not None:
            fast_gib = rule.expert_group_gib
        context += fast_gib if is_fast else rule.slow_group_gib
    context = round(context * GIB)
    if rule.room == "all":
        room = int(visible * rule.fraction) - weights - context - round(run)
    elif rule.room == "free":
        room = int(max(visible - weights - context - round(run), 0) * rule.fraction)
    else:
        fraction = rule.fraction or 1 - round(kept_mib * MIB) / gpu.hbm_bytes
        room = int((visible - context) * fraction) - weights
    return max(room, 0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama-3.1-8b", {}),
        ("llama-3.1-70b", {"tp": 4, "dtype": "fp8"}),
        ("qwen3-32b", {"tp": 2, "kv_dtype": "fp8"}),
        ("qwen3-30b-a3b", {"dp": 2, "ep": 2}),
        ("gpt-oss-20b", {}),
        ("deepseek-v3", {"tp": 8, "pp": 2}),
    ],
)
def test_the_rule_of_every_engine_is_the_naive_one(engine, model, options):
    gpu = load_gpu("h200")
    with pytest.warns(UserWarning, match="datasheet"):
        plan = compile_plan(model, gpu, None, engine=engine, **options)
    plain = replace(plan, profile=EngineProfile("plain"))
    rule, layout = (
        plan.profile.memory.of_model(plan.model.architecture, is_dense=plan.model.is_dense),
        plan.layout,
    )
    found, working = plan.memory, plain.memory.activation_bytes
    vocab = plan.model.padded_vocab(1)
    # of two stages the fullest is the plan's: its sampling is where the LM head is
    stages = [1024 * vocab] if layout.pp == 1 else [0, 1024 * vocab]
    graphs = 512 if plan.tp >= 4 else 256
    kept = 512 + 1.5 * plan.max_num_batched_tokens + 2 * graphs + 128 * plan.tp * layout.pp
    if layout.dp > 1:
        kept += (4.5 if graphs > 300 else 3) * graphs * layout.dp
    else:  # a prefill graph of each of 58 sizes up to 8,192 tokens, or those of latent attention
        kept += 1536 if model == "deepseek-v3" else 8 * 58
    kept = max(kept, 10 * 1024)
    runs = [max(rule.activation * working, rule.sample_bytes * logits) for logits in stages]
    gpus, weights, has_experts = layout.world_size, found.weight_bytes, plan.model.has_experts
    rooms = [naive_room_bytes(rule, gpu, gpus, weights, run, kept, has_experts) for run in runs]
    unit = found.full_parts + found.window_parts if rule.kv_cache != "groups" else 1
    assert found.parts in [room // found.part_bytes // unit * unit for room in rooms]
    if layout.pp == 1:  # of several stages another may be the fullest
        padded = padded_bytes(rule, gpu, plan.model, layout, plan.execution)
        assert found.weight_bytes == plain.memory.weight_bytes + padded
        assert found.kv_bytes_per_token == plain.memory.kv_bytes_per_token
    # every byte of the datasheet's memory is of one part, but for a block
    parts = found.explain()
    left = gpu.hbm_bytes - sum(parts.values())
    assert 0 <= left < found.part_bytes * unit + 1


def test_kernels_alone_and_a_bare_profile_use_the_datasheets_rule(h100):
    kernels = compile_plan("llama-3.1-8b", "h100", h100, engine="kernels")
    own = compile_plan("llama-3.1-8b", "h100", h100, engine={"name": "mine", "costs": {"step_us": 1}})
    assert kernels.memory == own.memory
    assert kernels.memory.context_bytes == 0
    assert kernels.memory.reserve_bytes == kernels.gpu.hbm_bytes - int(kernels.gpu.hbm_bytes * 0.9)
    assert (
        kernels.memory_of(max_num_seqs=8, max_num_batched_tokens=64)
        == compile_plan("llama-3.1-8b", "h100", h100, max_num_batched_tokens=64, engine="kernels").memory
    )


def test_70b_in_fp8_on_one_h100_has_the_room_that_its_published_throughput_needs(h100):
    """TensorRT-LLM served it with about 54 thousand tokens; the datasheet's rule leaves 18 thousand."""
    options = {"dtype": "fp8", "kv_dtype": "fp8"}
    rooms = {
        engine: compile_plan("llama-3.1-70b", "h100", h100, engine=engine, **options).memory.max_kv_tokens
        for engine in ("kernels", "trtllm-1.0", "vllm", "vllm-0.16.0")
    }
    assert rooms["kernels"] < 20_000
    assert 45_000 < rooms["trtllm-1.0"] < 60_000
    # 0.9 of all memory are its weights, and what sorting the logits of 1,024 requests takes
    assert rooms["vllm-0.16.0"] == 0 < rooms["vllm"]
    more = compile_plan("llama-3.1-70b", "h100", h100, engine="vllm-0.16.0", memory_fraction=0.97, **options)
    assert more.memory.max_kv_tokens > 20_000


def test_fewer_requests_sample_with_less_memory_and_estimates_know_it(h100):
    plan = compile_plan("llama-3.1-8b", "h100", h100, engine="vllm")
    own, few = plan.memory, plan.memory_of(max_num_seqs=64)
    rule = plan.profile.memory
    assert own.activation_bytes == round(rule.sample_bytes * 1024 * plan.model.padded_vocab(1))
    assert few.max_kv_tokens > own.max_kv_tokens
    assert plan.memory_of(max_num_seqs=math.inf) == plan.memory_of(max_num_seqs=4096) == own
    # as many clients as run: what fits is the room
    held = own.held_tokens(8000 + 0.5 * 400)
    many = estimate(plan, 8000, 400, 1024)
    assert many.effective_concurrency == pytest.approx(own.max_kv_tokens / held)
    at_most = estimate(plan, 8000, 400, 60, max_num_seqs=60)
    with_more = estimate(plan, 8000, 400, 60, max_num_seqs=60, max_kv_tokens=few.max_kv_tokens)
    assert at_most.effective_concurrency == pytest.approx(with_more.effective_concurrency, rel=1e-3)


@given(fraction=st.floats(0.3, 1.0), engine=st.sampled_from(("kernels", *ENGINES)))
def test_more_of_memory_is_more_room(h100, fraction, engine):
    plan = compile_plan("llama-3.1-8b", "h100", h100, engine=engine, memory_fraction=fraction)
    most = compile_plan("llama-3.1-8b", "h100", h100, engine=engine, memory_fraction=1.0)
    assert plan.profile.memory.fraction == fraction
    assert plan.memory.max_kv_tokens <= most.memory.max_kv_tokens
    assert plan.memory.weight_bytes == most.memory.weight_bytes
    assert plan.memory.max_kv_tokens % plan.profile.memory.block_tokens == 0


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01, math.nan, math.inf, "0.9", True, [0.9]])
def test_an_invalid_fraction_is_refused(h100, fraction):
    with pytest.raises(PlanError, match="memory_fraction must be a number above 0 and at most 1"):
        compile_plan("llama-3.1-8b", "h100", h100, engine="vllm", memory_fraction=fraction)


def test_small_gpus_run_fewer_requests():
    rule = load_engine("vllm").memory
    assert rule.seqs("h100", 80 * GIB, 1024) == 1024
    assert rule.seqs("l40s", 45 * GIB, 1024) == 256
    assert rule.seqs("a100", 80 * GIB, 1024) == 256
    assert rule.seqs("a100", 80 * GIB, 8) == 8


def test_sglangs_formula_is_its_default_fraction():
    """0.911 of an MI355X and a tp of 1 is in a log (sgl-project/sglang#18263), at 16,384 tokens a step."""
    reserve = load_engine("sglang-0.5.12").memory.reserve
    total = round(287.98 * GIB)
    assert round(1 - reserve.bytes(total, 16384, 1, 1, 1) / total, 3) == 0.911
    newest = load_engine("sglang").memory.reserve
    assert newest.bytes(80 * GIB, 8192, 1, 1, 1) - reserve.bytes(80 * GIB, 8192, 1, 1, 1) == 464 * MIB
    assert newest.bytes(80 * GIB, 8192, 8, 1, 1, latent=True) == (512 + 12288 + 1024 + 1024 + 1536) * MIB
    assert newest.bytes(80 * GIB, 8192, 8, 1, 2) == (512 + 12288 + 1024 + 1024 + 4.5 * 512 * 2) * MIB
    sending = newest.bytes(80 * GIB, 8192, 1, 1, 1, alltoall=True)
    assert sending - newest.bytes(80 * GIB, 8192, 1, 1, 1) == 2 * GIB
    # 80 GiB: 512 + 1.5 x 8192 + 2 x 256 + 128 MiB at tp 1; tp 8 has larger graphs and more GPUs
    assert reserve.bytes(80 * GIB, 8192, 1, 1, 1) == 13440 * MIB
    assert reserve.bytes(80 * GIB, 8192, 8, 1, 1) == (512 + 12288 + 1024 + 1024) * MIB
    assert reserve.bytes(80 * GIB, 8192, 2, 1, 4) == (512 + 12288 + 512 + 256 + 3 * 256 * 4) * MIB
    # small steps count as 2,048 tokens, and large GPUs keep 10 GiB at least
    assert reserve.bytes(80 * GIB, 1, 1, 1, 1) == 10 * GIB
    assert reserve.bytes(24 * GIB, 1, 1, 1, 1) == (512 + 3072 + 48 + 128) * MIB
    assert StaticReserve().bytes(80 * GIB, 8192, 8, 1, 1) == 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_estimates_and_sweeps_take_the_engines_room(h100, engine):
    plan = compile_plan(
        "qwen3-32b", "h100", h100, tp=2, engine=engine, max_num_batched_tokens=16384, max_num_seqs=1024
    )
    plain = compile_plan(
        "qwen3-32b", "h100", h100, tp=2, max_num_batched_tokens=16384, max_num_seqs=1024, engine="kernels"
    )
    assert plan.memory.max_kv_tokens != plain.memory.max_kv_tokens
    got = estimate(plan, 16000, 400, 1000, max_num_batched_tokens=16384)
    length = 16000 + plan.profile.memory.osl_reserved * 400
    memory = plan.memory_of(max_num_batched_tokens=16384)
    assert got.effective_concurrency == pytest.approx(memory.max_kv_tokens / memory.held_tokens(length))
    # sweeps are held to estimates in tests/sweep/deployments/test_agreement.py, with these engines
    few = estimate_disaggregated(plan, plan, 16000, 400, 4, max_num_batched_tokens=16384, max_num_seqs=16)
    room = plan.memory_of(max_num_batched_tokens=16384, max_num_seqs=16).max_kv_tokens
    assert few.kv_load == pytest.approx(few.decodes * length / room, rel=0.35)


def test_vllm_samples_for_fewer_requests_on_small_gpus() -> None:
    """Its default of 256 on GPUs below 70 GiB: more of them are never profiled there."""
    model, rule = load_model("qwen3-0.6b"), load_engine("vllm").memory
    held = {
        (gpu, seqs): plan_memory(
            model, Layout(), load_gpu(gpu), Execution(), MemoryUse(64, seqs), rule=rule
        ).activation_bytes
        for gpu in ("l40s", "h100")
        for seqs in (256, 1024)
    }
    assert held["l40s", 1024] == held["l40s", 256] == held["h100", 256]
    assert held["h100", 1024] == pytest.approx(4 * held["h100", 256], rel=0.01)
