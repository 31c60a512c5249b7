"""Models known by name: presets, their Hugging Face ids, and the error for other names."""

from __future__ import annotations

import difflib
import re
from functools import cache
from importlib import resources
from itertools import takewhile
from typing import Any, Final

from fastroof.checks import MOST_SUGGESTED, suggestion
from fastroof.models.families.registry import FAMILIES
from fastroof.models.hf import read_config

DYNAMIC: Final = "-fp8-dynamic"
_DYNAMIC_OF: Final[dict[str, tuple[str, ...]]] = {
    "llama-3.1-8b": ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic",),
    "llama-3.1-70b": (
        "RedHatAI/Meta-Llama-3.1-70B-Instruct-FP8-dynamic",
        "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic",
    ),
    "llama-3.1-405b": ("RedHatAI/Meta-Llama-3.1-405B-Instruct-FP8-dynamic",),
    "qwen2.5-7b": ("RedHatAI/Qwen2.5-7B-Instruct-FP8-dynamic",),
    "qwen2.5-32b": ("RedHatAI/Qwen2.5-32B-Instruct-FP8-dynamic",),
    "qwen2.5-72b": ("RedHatAI/Qwen2.5-72B-Instruct-FP8-dynamic",),
    "qwen3-0.6b": ("RedHatAI/Qwen3-0.6B-FP8-dynamic",),
    "qwen3-1.7b": ("RedHatAI/Qwen3-1.7B-FP8-dynamic",),
    "qwen3-4b": ("RedHatAI/Qwen3-4B-FP8-dynamic",),
    "qwen3-8b": ("RedHatAI/Qwen3-8B-FP8-dynamic",),
    "qwen3-14b": ("RedHatAI/Qwen3-14B-FP8-dynamic",),
    "qwen3-32b": ("RedHatAI/Qwen3-32B-FP8-dynamic",),
    "qwen3-30b-a3b": ("RedHatAI/Qwen3-30B-A3B-FP8-dynamic",),
    "deepseek-r1-distill-llama-8b": ("RedHatAI/DeepSeek-R1-Distill-Llama-8B-FP8-dynamic",),
    "deepseek-r1-distill-llama-70b": ("RedHatAI/DeepSeek-R1-Distill-Llama-70B-FP8-dynamic",),
    "deepseek-r1-distill-qwen-14b": ("RedHatAI/DeepSeek-R1-Distill-Qwen-14B-FP8-dynamic",),
    "deepseek-r1-distill-qwen-32b": ("RedHatAI/DeepSeek-R1-Distill-Qwen-32B-FP8-dynamic",),
    "deepseek-r1-distill-qwen-7b": ("RedHatAI/DeepSeek-R1-Distill-Qwen-7B-FP8-dynamic",),
}
"""Checkpoints that llm-compressor made by its FP8_DYNAMIC scheme, by the preset of their sizes."""

_FP8_DYNAMIC: Final[dict[str, Any]] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}
"""The ``quantization_config`` of all of them: scales per output channel and token, routers in bf16."""

PRESETS: Final[dict[str, tuple[str, ...]]] = {
    **{name: ids for family in FAMILIES for name, ids in family.presets.items()},
    **{f"{sizes}{DYNAMIC}": ids for sizes, ids in _DYNAMIC_OF.items()},
    "codellama-34b": (
        "codellama/CodeLlama-34b-hf",
        "codellama/CodeLlama-34b-Instruct-hf",
    ),
    "deepseek-r1": ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-R1-0528"),
    "deepseek-r1-0528-qwen3-8b": ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",),
    "deepseek-r1-distill-llama-70b": ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B",),
    "deepseek-r1-distill-llama-8b": ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B",),
    "deepseek-r1-distill-qwen-1.5b": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",),
    "deepseek-r1-distill-qwen-14b": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B",),
    "deepseek-r1-distill-qwen-32b": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",),
    "deepseek-r1-distill-qwen-7b": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",),
    "deepseek-v3": ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3-0324"),
    "deepseek-v3.1": (
        "deepseek-ai/DeepSeek-V3.1",
        "deepseek-ai/DeepSeek-V3.1-Base",
        "deepseek-ai/DeepSeek-V3.1-Terminus",
    ),
    "deepseek-v3.1-nvfp4": ("nvidia/DeepSeek-V3.1-NVFP4",),
    "deepseek-v4-flash": ("deepseek-ai/DeepSeek-V4-Flash",),
    "deepseek-v4-flash-fp8": ("sgl-project/DeepSeek-V4-Flash-FP8",),
    "deepseek-v4-flash-nvfp4": ("nvidia/DeepSeek-V4-Flash-NVFP4",),
    "deepseek-v4-pro": ("deepseek-ai/DeepSeek-V4-Pro",),
    "deepseek-v4-pro-fp8": ("sgl-project/DeepSeek-V4-Pro-FP8",),
    "deepseek-v4-pro-nvfp4": ("nvidia/DeepSeek-V4-Pro-NVFP4",),
    "deepseek-v3.2": (
        "deepseek-ai/DeepSeek-V3.2",
        "deepseek-ai/DeepSeek-V3.2-Exp",
        "deepseek-ai/DeepSeek-V3.2-Speciale",
    ),
    "deepseek-v3.2-nvfp4": ("nvidia/DeepSeek-V3.2-NVFP4",),
    "gemma-2-9b": (
        "google/gemma-2-9b",
        "google/gemma-2-9b-it",
    ),
    "gemma-2-27b": (
        "google/gemma-2-27b",
        "google/gemma-2-27b-it",
    ),
    "gemma-3-12b": (
        "google/gemma-3-12b-pt",
        "google/gemma-3-12b-it",
    ),
    "gemma-3-27b": (
        "google/gemma-3-27b-pt",
        "google/gemma-3-27b-it",
    ),
    "gemma-4-26b-a4b": (
        "google/gemma-4-26B-A4B",
        "google/gemma-4-26B-A4B-it",
    ),
    "gemma-4-26b-a4b-nvfp4": ("nvidia/Gemma-4-26B-A4B-NVFP4",),
    "gemma-4-31b": (
        "google/gemma-4-31B",
        "google/gemma-4-31B-it",
    ),
    "gemma-4-31b-nvfp4": ("nvidia/Gemma-4-31B-IT-NVFP4",),
    "glm-5": (
        "zai-org/GLM-5",
        "zai-org/GLM-5.1",
    ),
    "glm-5-fp8": (
        "zai-org/GLM-5-FP8",
        "zai-org/GLM-5.1-FP8",
    ),
    "glm-5-nvfp4": ("nvidia/GLM-5-NVFP4",),
    "glm-5.1-nvfp4": ("nvidia/GLM-5.1-NVFP4",),
    "glm-5.2": (
        "zai-org/GLM-5.2",
        "zai-org/GLM-5.3",
    ),
    "glm-5.2-fp8": (
        "zai-org/GLM-5.2-FP8",
        "zai-org/GLM-5.3-FP8",
    ),
    "glm-5.2-nvfp4": (
        "nvidia/GLM-5.2-NVFP4",
        "nvidia/GLM-5.3-NVFP4",
    ),
    "gpt-oss-20b": ("openai/gpt-oss-20b",),
    "gpt-oss-120b": ("openai/gpt-oss-120b",),
    "kimi-k2": ("moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2-Base"),
    "kimi-k2-0905": ("moonshotai/Kimi-K2-Instruct-0905",),
    "kimi-k2-thinking": ("moonshotai/Kimi-K2-Thinking",),
    "kimi-k2.5": ("moonshotai/Kimi-K2.5",),
    "kimi-k2.5-nvfp4": ("nvidia/Kimi-K2.5-NVFP4",),
    "kimi-k2.6": ("moonshotai/Kimi-K2.6",),
    "kimi-k2.6-nvfp4": ("nvidia/Kimi-K2.6-NVFP4",),
    "kimi-k2.7-code": ("moonshotai/Kimi-K2.7-Code",),
    "kimi-k2.7-code-nvfp4": ("nvidia/Kimi-K2.7-Code-NVFP4",),
    "kimi-k3": ("moonshotai/Kimi-K3",),
    "llama-2-7b": (
        "meta-llama/Llama-2-7b-hf",
        "meta-llama/Llama-2-7b-chat-hf",
    ),
    "llama-2-13b": (
        "meta-llama/Llama-2-13b-hf",
        "meta-llama/Llama-2-13b-chat-hf",
    ),
    "llama-2-70b": (
        "meta-llama/Llama-2-70b-hf",
        "meta-llama/Llama-2-70b-chat-hf",
    ),
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Meta-Llama-3.1-8B",
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
    ),
    "llama-3.1-8b-fp8": ("nvidia/Llama-3.1-8B-Instruct-FP8",),
    "llama-3.1-70b": (
        "meta-llama/Llama-3.1-70B",
        "meta-llama/Llama-3.1-70B-Instruct",
        "meta-llama/Meta-Llama-3.1-70B",
        "meta-llama/Meta-Llama-3.1-70B-Instruct",
        "meta-llama/Llama-3.3-70B-Instruct",
    ),
    "llama-3.1-70b-fp8": (
        "nvidia/Llama-3.1-70B-Instruct-FP8",
        "nvidia/Llama-3.3-70B-Instruct-FP8",
    ),
    "llama-3.1-405b": (
        "meta-llama/Llama-3.1-405B",
        "meta-llama/Llama-3.1-405B-Instruct",
        "meta-llama/Meta-Llama-3.1-405B",
        "meta-llama/Meta-Llama-3.1-405B-Instruct",
    ),
    "llama-3.1-405b-fp8": ("nvidia/Llama-3.1-405B-Instruct-FP8",),
    "llama-4-scout": ("meta-llama/Llama-4-Scout-17B-16E-Instruct",),
    "llama-4-scout-fp8": ("RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic",),
    "llama-4-maverick": ("meta-llama/Llama-4-Maverick-17B-128E-Instruct",),
    "mimo-7b": (
        "XiaomiMiMo/MiMo-7B-Base",
        "XiaomiMiMo/MiMo-7B-SFT",
        "XiaomiMiMo/MiMo-7B-RL",
    ),
    "mimo-v2-flash": ("XiaomiMiMo/MiMo-V2-Flash",),
    "minimax-m2.5": ("MiniMaxAI/MiniMax-M2.5", "MiniMaxAI/MiniMax-M2.1", "MiniMaxAI/MiniMax-M2"),
    "minimax-m2.5-nvfp4": ("nvidia/MiniMax-M2.5-NVFP4",),
    "minimax-m2.7": ("MiniMaxAI/MiniMax-M2.7",),
    "minimax-m2.7-nvfp4": ("nvidia/MiniMax-M2.7-NVFP4",),
    "minimax-m3": ("MiniMaxAI/MiniMax-M3",),
    "minimax-m3-nvfp4": ("nvidia/MiniMax-M3-NVFP4",),
    "mistral-7b": (
        "mistralai/Mistral-7B-v0.3",
        "mistralai/Mistral-7B-Instruct-v0.3",
    ),
    "mistral-7b-v0.1": (
        "mistralai/Mistral-7B-v0.1",
        "mistralai/Mistral-7B-Instruct-v0.1",
    ),
    "mistral-nemo": ("mistralai/Mistral-Nemo-Instruct-2407",),
    "mixtral-8x7b": (
        "mistralai/Mixtral-8x7B-v0.1",
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
    ),
    "mixtral-8x22b": ("mistralai/Mixtral-8x22B-v0.1",),
    "nemotron-3-nano-30b-a3b": ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",),
    "nemotron-3-nano-30b-a3b-nvfp4": ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4",),
    "nemotron-3-super-120b-a12b": ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",),
    "nemotron-3-super-120b-a12b-fp8": ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8",),
    "nemotron-3-super-120b-a12b-nvfp4": ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",),
    "nemotron-3-ultra-550b-a55b": ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",),
    "nemotron-3-ultra-550b-a55b-fp8": ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8",),
    "nemotron-3-ultra-550b-a55b-nvfp4": ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4",),
    "nemotron-3.5-lightning-30b-a3b-nvfp4": ("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4",),
    "nemotron-h-56b": ("nvidia/Nemotron-H-56B-Base-8K",),
    "nemotron-super-49b": ("nvidia/Llama-3_3-Nemotron-Super-49B-v1",),
    "phi-3-mini": ("microsoft/Phi-3-mini-4k-instruct",),
    "phi-4": ("microsoft/phi-4",),
    "qwen2.5-7b": (
        "Qwen/Qwen2.5-7B",
        "Qwen/Qwen2.5-7B-Instruct",
    ),
    "qwen2.5-14b": (
        "Qwen/Qwen2.5-14B",
        "Qwen/Qwen2.5-14B-Instruct",
    ),
    "qwen2.5-32b": (
        "Qwen/Qwen2.5-32B",
        "Qwen/Qwen2.5-32B-Instruct",
    ),
    "qwen2.5-72b": (
        "Qwen/Qwen2.5-72B",
        "Qwen/Qwen2.5-72B-Instruct",
    ),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B",),
    "qwen3-0.6b-fp8": ("Qwen/Qwen3-0.6B-FP8",),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B",),
    "qwen3-1.7b-fp8": ("Qwen/Qwen3-1.7B-FP8",),
    "qwen3-4b": ("Qwen/Qwen3-4B",),
    "qwen3-4b-2507": ("Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B-Thinking-2507"),
    "qwen3-4b-2507-fp8": ("Qwen/Qwen3-4B-Instruct-2507-FP8", "Qwen/Qwen3-4B-Thinking-2507-FP8"),
    "qwen3-4b-fp8": ("Qwen/Qwen3-4B-FP8",),
    "qwen3-8b": ("Qwen/Qwen3-8B",),
    "qwen3-8b-fp8": ("Qwen/Qwen3-8B-FP8",),
    "qwen3-14b": ("Qwen/Qwen3-14B",),
    "qwen3-14b-fp8": ("Qwen/Qwen3-14B-FP8",),
    "qwen3-32b": ("Qwen/Qwen3-32B",),
    "qwen3-32b-fp8": ("Qwen/Qwen3-32B-FP8",),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B",),
    "qwen3-30b-a3b-fp8": ("Qwen/Qwen3-30B-A3B-FP8",),
    "qwen3-30b-a3b-2507": ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B-Thinking-2507"),
    "qwen3-30b-a3b-2507-fp8": (
        "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8",
        "Qwen/Qwen3-30B-A3B-Thinking-2507-FP8",
    ),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B",),
    "qwen3-235b-a22b-fp8": ("Qwen/Qwen3-235B-A22B-FP8",),
    "qwen3-235b-a22b-2507": ("Qwen/Qwen3-235B-A22B-Instruct-2507", "Qwen/Qwen3-235B-A22B-Thinking-2507"),
    "qwen3-235b-a22b-2507-fp8": (
        "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8",
        "Qwen/Qwen3-235B-A22B-Thinking-2507-FP8",
    ),
    "qwen3-32b-fp8-static": ("Qwen/Qwen3-32B-FP8-Static-PerTensor",),
    "qwen3-235b-a22b-nvfp4": ("nvidia/Qwen3-235B-A22B-NVFP4",),
    "qwen3-coder-480b-a35b": ("Qwen/Qwen3-Coder-480B-A35B-Instruct",),
    "qwen3-coder-480b-a35b-fp8": ("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8",),
    "qwen3-next-80b-a3b": ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Next-80B-A3B-Thinking"),
    "qwen3-vl-2b": (
        "Qwen/Qwen3-VL-2B-Instruct",
        "Qwen/Qwen3-VL-2B-Thinking",
    ),
    "qwen3-vl-4b": (
        "Qwen/Qwen3-VL-4B-Instruct",
        "Qwen/Qwen3-VL-4B-Thinking",
    ),
    "qwen3-vl-8b": (
        "Qwen/Qwen3-VL-8B-Instruct",
        "Qwen/Qwen3-VL-8B-Thinking",
    ),
    "qwen3-vl-32b": (
        "Qwen/Qwen3-VL-32B-Instruct",
        "Qwen/Qwen3-VL-32B-Thinking",
    ),
    "qwen3-vl-30b-a3b": (
        "Qwen/Qwen3-VL-30B-A3B-Instruct",
        "Qwen/Qwen3-VL-30B-A3B-Thinking",
    ),
    "qwen3-vl-235b-a22b": (
        "Qwen/Qwen3-VL-235B-A22B-Instruct",
        "Qwen/Qwen3-VL-235B-A22B-Thinking",
    ),
    "qwen3.5-27b": ("Qwen/Qwen3.5-27B",),
    "qwen3.5-27b-fp8": ("Qwen/Qwen3.5-27B-FP8",),
    "qwen3.5-35b-a3b": ("Qwen/Qwen3.5-35B-A3B",),
    "qwen3.5-35b-a3b-fp8": ("Qwen/Qwen3.5-35B-A3B-FP8",),
    "qwen3.5-122b-a10b": ("Qwen/Qwen3.5-122B-A10B",),
    "qwen3.5-122b-a10b-fp8": ("Qwen/Qwen3.5-122B-A10B-FP8",),
    "qwen3.5-122b-a10b-nvfp4": ("nvidia/Qwen3.5-122B-A10B-NVFP4",),
    "qwen3.5-397b-a17b": ("Qwen/Qwen3.5-397B-A17B",),
    "qwen3.5-397b-a17b-fp8": ("Qwen/Qwen3.5-397B-A17B-FP8",),
    "qwen3.5-397b-a17b-nvfp4": ("nvidia/Qwen3.5-397B-A17B-NVFP4",),
    "qwen3.6-27b": ("Qwen/Qwen3.6-27B",),
    "qwen3.6-27b-fp8": ("Qwen/Qwen3.6-27B-FP8",),
    "qwen3.6-27b-nvfp4": ("nvidia/Qwen3.6-27B-NVFP4",),
    "qwen3.6-35b-a3b": ("Qwen/Qwen3.6-35B-A3B",),
    "qwen3.6-35b-a3b-fp8": ("Qwen/Qwen3.6-35B-A3B-FP8",),
    "qwen3.6-35b-a3b-nvfp4": ("nvidia/Qwen3.6-35B-A3B-NVFP4",),
    "qwen3.8-27b": ("Qwen/Qwen3.8-27B",),
    "qwen3.8-27b-fp8": ("Qwen/Qwen3.8-27B-FP8",),
    "qwen3.8-2.4t-a95b": ("Qwen/Qwen3.8-2.4T-A95B",),
    "qwen3.8-2.4t-a95b-fp8": ("Qwen/Qwen3.8-2.4T-A95B-FP8",),
    "step-3.7-flash": ("stepfun-ai/Step-3.7-Flash",),
    "step-3.7-flash-fp8": ("stepfun-ai/Step-3.7-Flash-FP8",),
    "yi-34b": ("01-ai/Yi-34B",),
}
"""Preset names and the Hugging Face models that have exactly these layers in the same formats.

Where base and instruct models differ in ``max_position_embeddings`` the preset uses the instruct model's.
"""

# parts of names of distilled models, which have another family's layers
_DISTILLED: Final = ("distill", "llama", "qwen3-8b")
_HUB: Final = "https://huggingface.co"

HF_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""A Hugging Face id: owner and name."""

# parts of a name that distinguish models of one family but not their layers
_SIZE: Final = re.compile(r"(\d+x)?\d+(\.\d+)?[bm]|a\d+(\.\d+)?b|\d+e")
_VARIANT: Final = re.compile(
    r"base|chat|hf|instruct|it|thinking|sft|rl|v\d+(\.\d+)?|\d{4}|awq|gptq|w?\d*a?\d*fp\d+|int\d|nvfp4|dynamic"
)


def model_names() -> list[str]:
    """Return the names of the packaged presets, sorted.

    Returns
    -------
    list of str
        Preset names.

    Examples
    --------
    >>> "llama-3.1-8b" in model_names()
    True
    """
    return sorted(PRESETS)


@cache
def _spellings() -> dict[str, str]:
    spellings = {name: name for name in PRESETS}
    for preset, ids in PRESETS.items():
        for hf_id in ids:
            spellings[hf_id.casefold()] = preset
            spellings[hf_id.rpartition("/")[2].casefold()] = preset
    return spellings


def preset_named(name: str) -> str | None:
    """Return the preset with this name or Hugging Face id, case-insensitive; None if unknown."""
    return _spellings().get(name.casefold())


def preset_config(preset: str) -> dict[str, Any]:
    """Return the contents of a preset: a config.json with the fields that fastroof reads."""
    if preset.endswith(DYNAMIC):
        return {**preset_config(preset.removesuffix(DYNAMIC)), "quantization_config": _FP8_DYNAMIC}
    # The folder is package data; as_file also serves a package imported from a zip.
    with resources.as_file(resources.files("fastroof.models") / "presets" / f"{preset}.json") as path:
        config = dict(read_config(path))
    sizes = config.pop("preset", None)
    return config if sizes is None else {**preset_config(sizes), **config}


def _family(name: str) -> tuple[str, ...]:
    """Return the part of a name that its family shares: llama, 3.1 for ``org/Llama-3.1-9B-Instruct``."""
    parts = name.rpartition("/")[2].casefold().split("-")
    return tuple(p for p in parts if p and not _SIZE.fullmatch(p) and not _VARIANT.fullmatch(p))


def _relatives(given: str) -> list[str]:
    """Return presets of the same family: equal in the first two parts, or in all parts of the family."""
    own, shared = _family(given), dict[str, int]()
    for name in PRESETS:
        family = _family(name)
        if not any(_VARIANT.fullmatch(part) for part in name.split("-")):
            common = sum(1 for _ in takewhile(bool, (a == b for a, b in zip(own, family, strict=False))))
            shared[name] = common if common >= min(2, len(family)) else 0
    most = max(shared.values())
    return sorted(name for name, common in shared.items() if common == most > 0)


def _is_distilled(given: str) -> bool:
    return any(word in given.rpartition("/")[2].casefold() for word in _DISTILLED)


def unknown_name(given: str) -> str:
    """Return one line for a name that is neither a file nor a preset."""
    relatives = _relatives(given)
    if _is_distilled(given):
        relatives = [name for name in relatives if _is_distilled(name)]
    spelled = difflib.get_close_matches(given.casefold(), _spellings(), n=MOST_SUGGESTED)
    start = f"{given.rpartition('/')[2].casefold()}-"
    longer = [name for name in PRESETS if name.startswith(start)]
    # within a family the closest name comes first
    close = sorted(
        dict.fromkeys([*longer, *relatives, *(_spellings()[name] for name in spelled)]),
        key=lambda name: (
            name not in longer,
            name not in relatives,
            -difflib.SequenceMatcher(None, given.rpartition("/")[2].casefold(), name).ratio(),
        ),
    )
    line = suggestion("model", given, close, model_names(), "fastroof models")
    if HF_ID.fullmatch(given):
        name = given.rpartition("/")[2]
        url = f"{_HUB}/{given}/resolve/main/config.json"
        return f"{line}, or save {url} as {name}/config.json and give {name} (--model {name})"
    return f"{line}, or give the path of a config.json"
