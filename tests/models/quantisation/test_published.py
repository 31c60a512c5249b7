"""Configurations of published checkpoints, as the package aiconfigurator-core ships them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fastroof.models import LayerGroup, LayerKind, ModelSpec
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.mlp import GatedMlp
from fastroof.models.quantisation import quantisation_of, quantised

PACKAGE = find_spec("aiconfigurator_core")
CONFIGS = Path(PACKAGE.origin).parent / "model_configs" if PACKAGE and PACKAGE.origin else Path("/nowhere")

ATTENTION = GroupedQueryAttention(32, 8, 128)
DENSE = LayerKind(ATTENTION, GatedMlp(8192))
EXPERTS = LayerKind(ATTENTION, RoutedExperts(64, 8, 1024, 2048), "experts")

# dtype, dtype of the cache, modules in each format in the last layer, layers that are quantised
PUBLISHED = {
    "MiniMaxAI--MiniMax-M2.5": ("fp8_block", None, 5, 62),
    "MiniMaxAI--MiniMax-M2.7": ("fp8_block", None, 5, 62),
    "Qwen--Qwen3-235B-A22B-FP8": ("fp8_block", None, 5, 94),
    "Qwen--Qwen3-30B-A3B-FP8": ("fp8_block", None, 5, 48),
    "Qwen--Qwen3-32B-FP8": ("fp8_block", None, 4, 64),
    "Qwen--Qwen3-32B-FP8-Static-PerTensor": ("fp8", "fp8", 4, 64),
    "XiaomiMiMo--MiMo-V2-Flash": ("fp8_block", None, 5, 48),
    "deepseek-ai--DeepSeek-R1": ("fp8_block", None, 5, 61),
    "deepseek-ai--DeepSeek-V3": ("fp8_block", None, 5, 61),
    "deepseek-ai--DeepSeek-V3.2": ("fp8_block", None, 5, 61),
    "deepseek-ai--DeepSeek-V4-Flash": ("mxfp4", None, 5, 43),
    "deepseek-ai--DeepSeek-V4-Pro": ("mxfp4", None, 5, 61),
    "moonshotai--Kimi-K2-Instruct": ("fp8_block", None, 5, 61),
    "moonshotai--Kimi-K2.5": ("int4_wo", None, 1, 60),
    "moonshotai--Kimi-K3": ("mxfp4", None, 1, 92),
    "nvidia--DeepSeek-V3.1-NVFP4": ("nvfp4", "fp8", 5, 61),
    "nvidia--DeepSeek-V3.2-NVFP4": ("nvfp4", "fp8", 5, 61),
    "nvidia--DeepSeek-V4-Flash-NVFP4": ("nvfp4", None, 5, 43),
    "nvidia--DeepSeek-V4-Pro-NVFP4": ("nvfp4", None, 5, 61),
    "nvidia--GLM-5-NVFP4": ("nvfp4", "fp8", 4, 78),
    "nvidia--GLM-5.1-NVFP4": ("nvfp4", "fp8", 1, 75),
    "nvidia--GLM-5.2-NVFP4": ("nvfp4", "fp8", 1, 75),
    "nvidia--GLM-5.3-NVFP4": ("nvfp4", "fp8", 1, 75),
    "nvidia--Gemma-4-26B-A4B-NVFP4": ("nvfp4", "fp8", 1, 30),
    "nvidia--Gemma-4-31B-IT-NVFP4": ("nvfp4", "fp8", 2, 60),
    "nvidia--Kimi-K2.5-NVFP4": ("nvfp4", "fp8", 3, 61),
    "nvidia--Kimi-K2.6-NVFP4": ("nvfp4", "fp8", 1, 60),
    "nvidia--Kimi-K2.7-Code-NVFP4": ("nvfp4", "fp8", 1, 60),
    "nvidia--Llama-3.1-70B-Instruct-FP8": ("fp8", "fp8", 4, 80),
    "nvidia--MiniMax-M2.5-NVFP4": ("nvfp4", "fp8", 3, 62),
    "nvidia--MiniMax-M2.7-NVFP4": ("nvfp4", "fp8", 3, 62),
    "nvidia--MiniMax-M3-NVFP4": ("nvfp4", None, 5, 60),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": ("nvfp4", "fp8", 5, 52),
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": ("fp8", "fp8", 5, 88),
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": ("nvfp4", "fp8", 5, 88),
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8": ("fp8", "fp8", 5, None),
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4": ("nvfp4", "fp8", 5, None),
    "nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": ("nvfp4_wo", "fp8", 3, 23),
    "nvidia--Qwen3-235B-A22B-NVFP4": ("nvfp4", "fp8", 5, 94),
    "nvidia--Qwen3.5-122B-A10B-NVFP4": ("nvfp4", "fp8", 3, 48),
    "nvidia--Qwen3.5-397B-A17B-NVFP4": ("nvfp4", "fp8", 3, 60),
    "nvidia--Qwen3.6-27B-NVFP4": ("nvfp4_wo", "fp8", 4, 64),
    "nvidia--Qwen3.6-35B-A3B-NVFP4": ("nvfp4_wo", "fp8", 5, 40),
    "openai--gpt-oss-120b": ("mxfp4", None, 1, 36),
    "openai--gpt-oss-20b": ("mxfp4", None, 1, 24),
    "sgl-project--DeepSeek-V4-Flash-FP8": ("fp8_block", None, 5, 43),
    "sgl-project--DeepSeek-V4-Pro-FP8": ("fp8_block", None, 5, 61),
    "stepfun-ai--Step-3.7-Flash-FP8": ("fp8_block", None, 5, 45),
    "zai-org--GLM-5-FP8": ("fp8_block", None, 5, 78),
    "zai-org--GLM-5.1-FP8": ("fp8_block", None, 5, 78),
    "zai-org--GLM-5.2-FP8": ("fp8_block", None, 5, 78),
    "zai-org--GLM-5.3-FP8": ("fp8_block", None, 5, 78),
}
OWN_NAMES = {
    # its experts stand beside its dense MLP, and all of that one is excluded
    "nvidia--Gemma-4-26B-A4B-NVFP4": {"experts": ("experts",)}
}

pytestmark = pytest.mark.skipif(not CONFIGS.is_dir(), reason="aiconfigurator-core is not installed")


def read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None


def load(name: str) -> ModelSpec:
    """A model of as many layers, each with experts where the model has any: what is read is its formats."""
    config = read(CONFIGS / f"{name}_config.json") or {}
    sizes = config.get("text_config") or config
    has_experts = any(sizes.get(key) for key in ("num_experts", "n_routed_experts", "num_local_experts"))
    num_dense = sizes.get("first_k_dense_replace") or 0
    num_layers = sizes.get("num_hidden_layers") or 40
    kinds = [EXPERTS if has_experts and number >= num_dense else DENSE for number in range(num_layers)]
    groups = tuple(LayerGroup(kind, kinds.count(kind)) for kind in dict.fromkeys(kinds))
    spec = ModelSpec(name, "", 4096, 32000, False, 8192, None, groups)
    hf_quant = read(CONFIGS / f"{name}_hf_quant_config.json")
    names = OWN_NAMES.get(name)
    return quantised(spec, quantisation_of(config), hf_quant, layer_kinds=kinds, module_names=names)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_checkpoint_has_its_formats(name):
    dtype, kv_dtype, modules, layers = PUBLISHED[name]
    made = load(name)
    assert (made.checkpoint.dtype, made.checkpoint.kv_dtype) == (dtype, kv_dtype)
    assert max(len(kind.formats) for kind in made.kinds) == modules or layers is None
    quantised_layers = sum(group.count for group in made.layers if group.kind.formats)
    assert quantised_layers == layers or layers is None


def test_every_quantised_file_of_the_package_is_tried():
    configs = {path.name.removesuffix("_config.json"): path for path in CONFIGS.glob("*--*_config.json")}
    names = {name for name in configs if not name.endswith("_hf_quant")}
    tried = {
        name for name in names if quantisation_of(read(configs[name]) or {}) or f"{name}_hf_quant" in configs
    }
    assert tried == PUBLISHED.keys()


def test_modules_in_several_formats_keep_each():
    formats = dict(load("nvidia--Qwen3.6-27B-NVFP4").kinds[-1].formats)
    assert formats == {"qkv": "fp8", "o": "fp8", "gate_up": "nvfp4_wo", "down": "nvfp4_wo"}
    formats = dict(load("nvidia--DeepSeek-V4-Flash-NVFP4").kinds[0].formats)
    assert (formats["qkv"], formats["experts"]) == ("fp8_block", "nvfp4")
