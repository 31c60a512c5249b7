"""Quantised checkpoints as load_model and compile_plan take them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof import Tables
from fastroof.errors import ModelError
from fastroof.models import load_model

pytestmark = pytest.mark.filterwarnings("ignore:no measured tables of")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
QUANTISATIONS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int4_wo": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}


def llama(quantisation: dict[str, Any] | None) -> dict[str, Any]:
    return LLAMA if quantisation is None else LLAMA | {"quantization_config": quantisation}


@pytest.mark.parametrize("dtype", QUANTISATIONS)
def test_auto_is_the_format_of_the_checkpoint(dtype: str) -> None:
    plan = fastroof.compile_plan(llama(QUANTISATIONS[dtype]), "b200", None, engine="kernels")
    assert plan.dtype == dtype
    assert plan.model.checkpoint.method


@given(dtype=st.sampled_from(sorted(QUANTISATIONS)), batch=st.integers(1, 64), kv_len=st.integers(1, 4096))
def test_a_checkpoint_in_one_format_is_timed_as_its_format_by_name(
    dtype: str, batch: int, kv_len: int
) -> None:
    own = fastroof.compile_plan(llama(QUANTISATIONS[dtype]), "b200", None, engine="kernels")
    named = fastroof.compile_plan(LLAMA, "b200", None, dtype=dtype, engine="kernels")
    assert own.decode_us(batch, kv_len) == named.decode_us(batch, kv_len)
    steps = [[(kv_len, 0), (1, kv_len)]]
    batches = fastroof.StepBatch.from_requests(steps)
    assert own.run(batches).latency_us.tolist() == named.run(batches).latency_us.tolist()


def test_the_two_kinds_of_fp8_are_two_plans(h100: Tables) -> None:
    tensor = fastroof.compile_plan(llama(QUANTISATIONS["fp8"]), "h100", h100, engine="kernels")
    block = fastroof.compile_plan(llama(QUANTISATIONS["fp8_block"]), "h100", h100, engine="kernels")
    assert (tensor.dtype, block.dtype) == ("fp8", "fp8_block")
    assert tensor.decode_us(32, 1024) != block.decode_us(32, 1024)


def test_another_format_is_chosen_by_name() -> None:
    named = fastroof.compile_plan(llama(QUANTISATIONS["fp8"]), "b200", None, dtype="bf16", engine="kernels")
    assert named.decode_us(8, 512) == fastroof.compile_plan(LLAMA, "b200", None, engine="kernels").decode_us(
        8, 512
    )


def test_scales_of_a_group_are_weights_too() -> None:
    checkpoint = fastroof.compile_plan(llama(QUANTISATIONS["int4_wo"]), "b200", None, engine="kernels")
    named = fastroof.compile_plan(LLAMA, "b200", None, dtype="int4_wo", engine="kernels")
    linear = sum(
        group.count * sum(group.kind.linear_weights(1024, named.layout).values())
        for group in named.model.layers
    )
    scales = linear * 2.5 / 128
    assert checkpoint.memory.weight_bytes - named.memory.weight_bytes == pytest.approx(scales, abs=1)


def test_a_head_that_the_checkpoint_quantises_is_a_gemm_in_its_format() -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    plain = fastroof.compile_plan(llama(gptq), "b200", None, engine="kernels")
    quantised = fastroof.compile_plan(llama(gptq | {"lm_head": True}), "b200", None, engine="kernels")
    rows = quantised.model.vocab * quantised.model.hidden
    saved = plain.memory.weight_bytes - quantised.memory.weight_bytes
    assert saved == pytest.approx(rows * (2 - 0.5 - 2.5 / 128), abs=1)
    assert quantised.decode_us(1, 512) < plain.decode_us(1, 512)


def test_a_cache_in_fp8_is_the_plans() -> None:
    quantisation = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    plan = fastroof.compile_plan(llama(quantisation), "h100", None, engine="kernels")
    assert (plan.dtype, plan.kv_dtype) == ("fp8", "fp8")
    assert (
        fastroof.compile_plan(llama(quantisation), "h100", None, kv_dtype="bf16", engine="kernels").kv_dtype
        == "bf16"
    )


@pytest.mark.parametrize("prefix", ["", "nvidia--Llama_"])
def test_the_file_that_modelopt_writes_next_to_a_config_is_read(tmp_path: Path, prefix: str) -> None:
    (tmp_path / f"{prefix}config.json").write_text(json.dumps(LLAMA))
    quantisation = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / f"{prefix}hf_quant_config.json").write_text(json.dumps(quantisation))
    assert load_model(tmp_path / f"{prefix}config.json").checkpoint.dtype == "fp8"
    (tmp_path / f"{prefix}hf_quant_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"hf_quant_config.json: field quantization must be an object"):
        load_model(tmp_path / f"{prefix}config.json")


@pytest.mark.parametrize("held", [{}, [], "fp8", 4])
def test_empty_quantisation_configs_are_refused(held: Any) -> None:
    with pytest.raises(ModelError, match="quantization_config"):
        load_model(LLAMA | {"quantization_config": held})


def test_kernels_alone_look_for_no_scale_that_the_checkpoint_brings(h100: Tables) -> None:
    fp8 = QUANTISATIONS["fp8"]
    static = fastroof.compile_plan(
        llama(fp8 | {"activation_scheme": "static"}), "h100", h100, engine="kernels"
    )
    dynamic = fastroof.compile_plan(llama(fp8), "h100", h100, engine="kernels")
    assert static.prefill_us(2048, 0) < dynamic.prefill_us(2048, 0)
    # an engine's own figures are of the engine
    own, other = (
        fastroof.compile_plan(llama(fp8 | {"activation_scheme": scheme}), "h100", h100, engine="trtllm")
        for scheme in ("static", "dynamic")
    )
    assert own.prefill_us(2048, 0) == other.prefill_us(2048, 0)
