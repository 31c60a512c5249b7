"""Plans of quantised checkpoints: the format of each kernel, and what stands for kernels without rows."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof import MissingTableError, Tables
from fastroof.columns import ORIGIN_MODELLED
from fastroof.engines import load_engine
from fastroof.engines.kernel_choices import KernelChoices
from fastroof.models import load_model
from fastroof.models.execution import DTYPES
from fastroof.units import GB

QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def formats_of(plan: fastroof.StepPlan) -> dict[str, str]:
    return {part.role: part.dtype for part in plan.explain([(1, 1023)] * 8).operators}


@pytest.fixture(scope="module")
def b200() -> Tables:
    return fastroof.load_tables("b200")


def test_experts_in_blocks_of_fp8_leave_router_and_head_in_bf16(h100: Tables) -> None:
    gates = [f"model.layers.{layer}.mlp.gate" for layer in range(94)]
    quantisation = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *gates],
    }
    plan = fastroof.compile_plan(
        QWEN3_MOE | {"quantization_config": quantisation}, "h100", h100, tp=4, engine="kernels"
    )
    formats = formats_of(plan)
    assert plan.dtype == "fp8_block"
    assert {formats[role] for role in ("qkv", "o", "experts")} == {"fp8_block"}
    assert {formats[role] for role in ("router", "lm_head")} == {"bf16"}
    assert formats["rope"] == ""


def test_weights_of_gpt_oss_120b_are_those_of_its_files(h100: Tables) -> None:
    plan = fastroof.compile_plan("gpt-oss-120b", "h100", h100, engine="kernels")
    # its published files hold 65.25 GB
    assert plan.memory.weight_bytes / GB == pytest.approx(65.25, rel=0.005)
    formats = formats_of(plan)
    assert (formats["experts"], formats["qkv"], formats["lm_head"]) == ("w4a16_mxfp4", "bf16", "bf16")


@pytest.mark.parametrize(("engine", "kernel"), [("trtllm", "w4a8_mxfp4_mxfp8"), ("kernels", "w4a16_mxfp4")])
def test_4_bit_experts_run_as_the_engine_measured_them(b200: Tables, engine: str, kernel: str) -> None:
    plan = fastroof.compile_plan("gpt-oss-120b", "b200", b200, engine=engine)
    assert formats_of(plan)["experts"] == kernel


def test_a_profile_may_set_the_kernels_compute_format(b200: Tables) -> None:
    vllm = load_engine("vllm")
    (named,) = (kernel for kernel in vllm.kernels.operators if kernel.format == "mxfp4")
    flagged = fastroof.compile_plan("gpt-oss-120b", "b200", b200, engine=vllm)
    assert formats_of(flagged)["experts"] == named.dtype == "w4a8_mxfp4_mxfp8"
    plain = replace(vllm, kernels=replace(vllm.kernels, operators=()))
    own = fastroof.compile_plan("gpt-oss-120b", "b200", b200, engine=plain)
    assert formats_of(own)["experts"] == "w4a16_mxfp4"
    assert flagged.decode_us(64, 1024) < own.decode_us(64, 1024)
    wrong = replace(vllm, kernels=KernelChoices(operators=(replace(named, dtype="bf16"),)))
    unread = fastroof.compile_plan("gpt-oss-120b", "b200", b200, engine=wrong)
    assert formats_of(unread)["experts"] != "bf16"


def test_4_bit_weights_compute_in_bf16_without_units_for_them(h100: Tables) -> None:
    plan = fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, dtype="nvfp4", allow_modelled=True, engine="kernels"
    )
    assert formats_of(plan)["qkv"] == "nvfp4_wo"


@pytest.mark.parametrize(("dtype", "kernel"), [("int8", "int8"), ("w4afp8", "w4afp8")])
def test_a_format_without_rows_names_valid_formats(h100: Tables, dtype: str, kernel: str) -> None:
    found = f"h100 has no gemm table of dtype {kernel}; measured: bf16, fp8, fp8_block.*; allow_modelled=True"
    with pytest.raises(MissingTableError, match=found):
        fastroof.compile_plan("llama-3.1-8b", "h100", h100, dtype=dtype, engine="kernels")
    modelled = fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, dtype=dtype, allow_modelled=True, engine="kernels"
    )
    parts = {part.role: part for part in modelled.explain([(1, 1023)] * 8).operators}
    assert (parts["qkv"].origin, parts["qkv"].source) == (ORIGIN_MODELLED, "datasheet")
    assert parts["decode_attention"].source != "datasheet"


def test_weights_alone_in_4_bits_read_inputs_in_bf16(h100: Tables) -> None:
    plan = fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, dtype="int4_wo", allow_modelled=True, engine="kernels"
    )
    down = next(part for part in plan.explain([(1, 1023)] * 8).operators if part.role == "down")
    n, k = 4096, 14336
    assert down.moved_bytes == pytest.approx(32 * (n * k / 2 + 8 * k * 2 + 8 * n * 2))


def test_attention_without_measurements_is_modelled_and_marked(h100: Tables) -> None:
    spec = load_model("llama-3.1-8b")
    group = spec.layers[0]
    odd = replace(group.kind, attention=replace(group.kind.attention, head_dim=24))  # type: ignore[type-var]
    model = replace(spec, layers=(replace(group, kind=odd),))
    with pytest.raises(
        MissingTableError, match=r"head_dim 24 .*allow_modelled=True \(--allow-modelled\) models it"
    ):
        fastroof.compile_plan(model, "h100", h100, engine="kernels")
    plan = fastroof.compile_plan(model, "h100", h100, allow_modelled=True, engine="kernels")
    explanation = plan.explain([(1, 1023)] * 8 + [(512, 512)])
    parts = {part.role: part for part in explanation.operators}
    for role in ("decode_attention", "prefill_attention"):
        assert (parts[role].origin, parts[role].source) == (ORIGIN_MODELLED, "datasheet")
    assert parts["qkv"].source != "datasheet"
    assert sum(part.total_us for part in explanation.operators) == pytest.approx(explanation.total_us)
    full = fastroof.compile_plan(spec, "h100", h100, engine="kernels")
    assert 0.3 < plan.decode_us(64, 4096) / full.decode_us(64, 4096) < 2.0


@pytest.mark.parametrize("dtype", ["int4_wo", "bf16"])
def test_modelled_kernels_err_as_the_datasheet_model_does(h100: Tables, dtype: str) -> None:
    modelled = fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, dtype=dtype, allow_modelled=True, engine="kernels"
    )
    measured = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="kernels")
    errors = [
        np.asarray(plan.decode_error(np.array([1, 64]), np.array([1024, 1024])))
        for plan in (modelled, measured)
    ]
    if dtype == "bf16":
        assert errors[0].tolist() == errors[1].tolist()
    else:
        assert (errors[0] > errors[1]).all()
        assert (errors[0] < 0.5).all()


@pytest.mark.parametrize(
    ("model", "formats"),
    [("Qwen/Qwen3-32B-FP8", ("fp8_block", "bf16")), ("Qwen/Qwen3-32B-FP8-Static-PerTensor", ("fp8", "fp8"))],
)
def test_the_two_kinds_of_fp8_of_one_model_are_two_plans(
    h100: Tables, model: str, formats: tuple[str, str]
) -> None:
    plan = fastroof.compile_plan(model, "h100", h100, tp=2, engine="kernels")
    assert (plan.dtype, plan.kv_dtype) == formats
    assert (plan.describe()["dtype"], plan.describe()["kv_dtype"]) == formats
    parts = formats_of(plan)
    assert {parts[role] for role in ("qkv", "o", "gate_up", "down")} == {formats[0]}
    assert parts["decode_attention"] == formats[1]


@pytest.mark.filterwarnings("ignore:no measured tables of")
@pytest.mark.parametrize(
    ("dtype", "kernel"), [("int8", "int8"), ("w4afp8", "int4_wo"), ("nvfp4", "nvfp4_wo")]
)
def test_a_gpu_without_units_for_a_format_computes_in_bf16(dtype: str, kernel: str) -> None:
    plan = fastroof.compile_plan("llama-3.1-8b", "a100", None, dtype=dtype, engine="kernels")
    assert formats_of(plan)["qkv"] == kernel
    own = fastroof.compile_plan("llama-3.1-8b", "h100", None, dtype=dtype, engine="kernels")
    assert plan.memory.weight_bytes == own.memory.weight_bytes


@pytest.mark.filterwarnings("ignore:no measured tables of")
def test_formats_change_bytes_and_never_the_work() -> None:
    """The datasheet model depends on work, bytes and peaks alone."""
    smaller = ("bf16", "fp8", "nvfp4")
    plans = {
        dtype: fastroof.compile_plan("qwen3-30b-a3b", "b200", None, dtype=dtype, engine="kernels")
        for dtype in DTYPES
    }
    parts = {
        dtype: {part.role: part for part in plan.explain([(1, 2047)] * 16).operators}
        for dtype, plan in plans.items()
    }
    for role in ("qkv", "o", "experts", "router", "lm_head", "decode_attention"):
        assert len({of[role].flops for of in parts.values()}) == 1
    for role in ("qkv", "o", "experts"):
        assert all(
            parts[wide][role].moved_bytes > parts[narrow][role].moved_bytes
            for wide, narrow in itertools.pairwise(smaller)
        )
    for role in ("router", "lm_head"):
        assert len({of[role].moved_bytes for of in parts.values()}) == 1
    weights = [plans[dtype].memory.weight_bytes for dtype in smaller]
    assert weights == sorted(weights, reverse=True)
    room = [plans[dtype].memory.max_kv_tokens for dtype in smaller]
    assert room == sorted(room)
