"""Every preset against what is published of it: weights, active weights, KV bytes a token, file and ids."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from fastroof.errors import UnsupportedModelError
from fastroof.models import Layout, ModelSpec, load_model, model_names
from fastroof.models.attention import Attention
from fastroof.models.mlp import Mlp
from fastroof.models.named import DYNAMIC, PRESETS
from tests.reference import families
from tests.reference.checkpoints import CARD, INDEX, Published, kv


def compressed(index: int, heavy: int, windowed: int) -> int:
    """Bytes in bf16 of a token of DeepSeek-V4: entries of 512 of 4 or 128 tokens, or of one within a window.

    Entries of 4 tokens have an indexer's key of 128 too.
    """
    return 2 * (index * (512 + 128) // 4 + heavy * 512 // 128 + windowed * 512)


def dsa(indexed: int, shared: int = 0) -> int:
    """Bytes of a token: latent vectors of 512 + 64 in bf16, and in some layers an indexer's key in fp8."""
    return (indexed + shared) * 576 * 2 + indexed * (128 + 4)


QWEN3 = "the model card's table; the text model is that of Qwen3 of this size"

PUBLISHED = {
    **families.published(),
    "codellama-34b": Published("33.744", None, kv((48, 8, 256)), INDEX),
    "deepseek-v3": Published("671", "37", kv((61, 1, 576)), "arXiv 2412.19437, abstract"),
    "deepseek-r1": Published("671", "37", kv((61, 1, 576)), CARD),
    "deepseek-r1-0528-qwen3-8b": Published("8.19", None, kv((36, 8, 256)), INDEX),
    "deepseek-r1-distill-llama-70b": Published("70.554", None, kv((80, 8, 256)), INDEX),
    "deepseek-r1-distill-llama-8b": Published("8.030", None, kv((32, 8, 256)), INDEX),
    "deepseek-r1-distill-qwen-1.5b": Published("1.78", None, kv((28, 2, 256)), INDEX),
    "deepseek-r1-distill-qwen-14b": Published("14.8", None, kv((48, 8, 256)), INDEX),
    "deepseek-r1-distill-qwen-32b": Published("32.8", None, kv((64, 8, 256)), INDEX),
    "deepseek-r1-distill-qwen-7b": Published("7.62", None, kv((28, 4, 256)), INDEX),
    "deepseek-v3.1": Published("671", "37", kv((61, 1, 576)), CARD),
    "deepseek-v4-flash": Published("284", "13", compressed(21, 20, 2), CARD),
    "deepseek-v4-pro": Published("1.6e3", "49", compressed(30, 31, 0), CARD),
    # 552 B and 197 B of n-grams, 16 B active in decodes; every layer but four keeps a window alone
    "deepseek-v4.1-flash": Published(
        "749", "16", 36 * 1024 + (1024 + 68) * 5 // 2, "headers of the checkpoint, sqliteai/warp docs/DS41.md"
    ),
    "deepseek-v3.2": Published(
        "671", "37", dsa(61), "the model card of V3, whose layers it has beside indexers"
    ),
    "gemma-2-9b": Published("9.24", None, kv((42, 8, 512)), INDEX),
    "gemma-2-27b": Published("27.23", None, kv((46, 16, 256)), INDEX),
    "gemma-3-12b": Published("12.19", None, kv((48, 8, 512)), INDEX, extra=0.42),
    "gemma-3-27b": Published("27.43", None, kv((62, 16, 256)), INDEX, extra=0.42),
    "gemma-4-26b-a4b": Published("25.2", "3.8", kv((25, 8, 512), (5, 2, 1024)), CARD),
    "gemma-4-31b": Published("30.7", None, kv((50, 16, 512), (10, 4, 1024)), CARD),
    "glm-5": Published("744", "40", dsa(78), CARD),
    "glm-5.2": Published("744", "40", dsa(21, 57), "the model card of GLM-5"),
    # the index counts the layer that predicts a further token and the encoder too
    "glm-5.3-flash-bf16": Published("321.3", "18", 11 * (512 * 2 + 132 // 4), INDEX, extra=7.98),
    "glm-5.3-flash": Published("321.3", "18", 11 * (512 * 2 + 132 // 4), INDEX, extra=7.98),
    "gpt-oss-20b": Published("20.91", "3.61", kv((24, 8, 128)), "model card, arXiv 2508.10925, table 1"),
    "gpt-oss-120b": Published("116.83", "5.13", kv((36, 8, 128)), "model card, arXiv 2508.10925, table 1"),
    "kimi-k2": Published("1000", "32", kv((61, 1, 576)), CARD, rounded=50.0),
    "kimi-k2-0905": Published("1000", "32", kv((61, 1, 576)), CARD, rounded=50.0),
    "kimi-k2.6": Published("1000", "32", kv((61, 1, 576)), CARD, rounded=50.0),
    "kimi-k2.7-code": Published("1000", "32", kv((61, 1, 576)), CARD, rounded=50.0),
    "kimi-linear-48b-a3b": Published("49.1", "3", kv((7, 1, 576)), f"{INDEX}; active: {CARD}"),
    "kimi-k2.5": Published("1000", "32", kv((61, 1, 576)), CARD, rounded=50.0),
    "kimi-k3": Published("2.78e3", "104", kv((24, 1, 576)), "arXiv 2607.24653"),
    "llama-2-7b": Published("6.738", None, kv((32, 32, 256)), INDEX),
    "llama-2-13b": Published("13.016", None, kv((40, 40, 256)), INDEX),
    "llama-2-70b": Published("68.977", None, kv((80, 8, 256)), INDEX),
    "llama-3-8b": Published("8.030", None, kv((32, 8, 256)), INDEX),
    "llama-3-70b": Published("70.554", None, kv((80, 8, 256)), INDEX),
    "llama-3.2-1b": Published("1.24", None, kv((16, 8, 128)), INDEX),
    "llama-3.2-3b": Published("3.21", None, kv((28, 8, 256)), INDEX),
    "llama-3.1-8b": Published("8.030", None, kv((32, 8, 256)), INDEX),
    "llama-3.1-70b": Published("70.554", None, kv((80, 8, 256)), INDEX),
    "llama-3.1-405b": Published("405.853", None, kv((126, 8, 256)), INDEX),
    "llama-4-scout": Published("109", "17", kv((48, 8, 256)), CARD, extra=0.87),
    "llama-4-maverick": Published("400", "17", kv((48, 8, 256)), CARD, extra=0.87),
    # the card has 7 B; the page's 7.83 B holds a layer for multi-token prediction, 0.21 B of weights
    "mimo-7b": Published("7.83", None, kv((36, 8, 256)), INDEX, extra=0.21),
    "mimo-v2-flash": Published("309", "15", kv((9, 4, 320), (39, 8, 320)), "arXiv 2601.02780, abstract"),
    "minimax-m2.5": Published("229", "9.8", kv((62, 8, 256)), INDEX + "; active: the series' report"),
    "minimax-m2.7": Published("229", "9.8", kv((62, 8, 256)), INDEX + "; active: the series' report"),
    # the card counts the encoder: 32 layers of 1280 are 0.63 B
    "minimax-m3": Published("428", "23", kv((60, 4, 256)) + 57 * 128 * 2, CARD, extra=0.63),
    "mistral-small-3.1-24b": Published("24", None, kv((40, 8, 256)), CARD, extra=0.44),
    "mistral-7b": Published("7.248", None, kv((32, 8, 256)), INDEX),
    "mistral-7b-v0.1": Published("7.24", None, kv((32, 8, 256)), INDEX),
    "mistral-nemo": Published("12.248", None, kv((40, 8, 256)), INDEX),
    "mixtral-8x7b": Published("46.7", "12.9", kv((32, 8, 256)), "mistral.ai/news/mixtral-of-experts"),
    "mixtral-8x22b": Published("140.6", "39", kv((56, 8, 256)), INDEX + "; active: mistral.ai/news"),
    "nemotron-3-nano-30b-a3b": Published("31.6", "3.6", kv((6, 2, 256)), CARD + ", with embeddings"),
    "nemotron-3-super-120b-a12b": Published("120.6", "12.7", kv((8, 2, 256)), "arXiv 2604.12374"),
    "nemotron-3-ultra-550b-a55b": Published("550", "55", kv((12, 2, 256)), CARD),
    "nemotron-h-56b": Published("56", None, kv((10, 8, 256)), "arXiv 2504.03624"),
    "nemotron-super-49b": Published("49.9", None, kv((49, 8, 256)), INDEX),
    "phi-3-mini": Published("3.82", None, kv((32, 32, 192)), INDEX),
    "phi-4": Published("14.66", None, kv((40, 10, 256)), INDEX),
    "qwen2.5-0.5b": Published("0.49", None, kv((24, 2, 128)), CARD),
    "qwen2.5-1.5b": Published("1.54", None, kv((28, 2, 256)), CARD),
    "qwen2.5-3b": Published("3.09", None, kv((36, 2, 256)), CARD),
    "qwen2.5-7b": Published("7.61", None, kv((28, 4, 256)), CARD),
    "qwen2.5-32b": Published("32.76", None, kv((64, 8, 256)), INDEX),
    "qwen2.5-72b": Published("72.7", None, kv((80, 8, 256)), CARD),
    "qwen3-0.6b": Published("0.6", None, kv((28, 8, 256)), CARD),
    "qwen3-1.7b": Published("1.7", None, kv((28, 8, 256)), CARD),
    "qwen2.5-14b": Published("14.7", None, kv((48, 8, 256)), CARD),
    "qwen3-4b": Published("4.0", None, kv((36, 8, 256)), CARD),
    "qwen3-4b-2507": Published("4.0", None, kv((36, 8, 256)), CARD),
    "qwen3-8b": Published("8.2", None, kv((36, 8, 256)), CARD),
    "qwen3-14b": Published("14.8", None, kv((40, 8, 256)), CARD),
    "qwen3-32b": Published("32.8", None, kv((64, 8, 256)), CARD),
    "qwen3-30b-a3b": Published("30.5", "3.3", kv((48, 4, 256)), CARD),
    "qwen3-235b-a22b": Published("235", "22", kv((94, 4, 256)), CARD),
    "qwen3-30b-a3b-2507": Published("30.5", "3.3", kv((48, 4, 256)), CARD),
    "qwen3-235b-a22b-2507": Published("235", "22", kv((94, 4, 256)), CARD),
    "qwen3-coder-30b-a3b": Published("30.5", "3.3", kv((48, 4, 256)), CARD),
    "qwen3-coder-480b-a35b": Published("480", "35", kv((62, 8, 256)), CARD),
    "qwen3-next-80b-a3b": Published("80", "3", kv((12, 2, 512)), CARD),
    "qwen3.5-9b": Published("9", None, kv((8, 4, 512)), "the model's name"),
    "qwen3.5-27b": Published("27", None, kv((16, 4, 512)), CARD),
    "qwen3.5-35b-a3b": Published("35", "3", kv((10, 2, 512)), CARD),
    "qwen3.5-122b-a10b": Published("122", "10", kv((12, 2, 512)), CARD),
    "qwen3.5-397b-a17b": Published("397", "17", kv((15, 2, 512)), CARD),
    "qwen3.6-27b": Published("27", None, kv((16, 4, 512)), CARD),
    "qwen3.6-35b-a3b": Published("35", "3", kv((10, 2, 512)), CARD),
    "qwen3.8-27b": Published("27", None, kv((16, 4, 512)), "the model's name"),
    "qwen3.8-2.4t-a95b": Published("2.4e3", "95", kv((23, 4, 512)), "the model's name"),
    "qwen3-vl-2b": Published("1.7", None, kv((28, 8, 256)), QWEN3),
    "qwen3-vl-4b": Published("4.0", None, kv((36, 8, 256)), QWEN3),
    "qwen3-vl-8b": Published("8.2", None, kv((36, 8, 256)), QWEN3),
    "qwen3-vl-32b": Published("32.8", None, kv((64, 8, 256)), QWEN3),
    "qwen3-vl-30b-a3b": Published("30.5", "3.3", kv((48, 4, 256)), QWEN3),
    "qwen3-vl-235b-a22b": Published("235", "22", kv((94, 4, 256)), QWEN3),
    "step-3.7-flash": Published("196", "11", kv((45, 8, 256)), "of its language backbone: arXiv 2602.10604"),
    "yi-34b": Published("34.389", None, kv((60, 8, 256)), INDEX),
}

# Matrices as large as the embedding that their publishers leave out of active weights: gpt-oss the
# embedding, the others the LM head too.
NOT_COUNTED_AS_ACTIVE = {
    "deepseek-v4-flash": 1,
    "deepseek-v4-pro": 1,
    "deepseek-v4.1-flash": 1,
    "deepseek-v3.2": 1,
    "glm-4.5": 1,
    "glm-4.5-air": 1,
    "glm-4.6": 1,
    "glm-4.7": 1,
    "glm-5": 1,
    "glm-5.2": 1,
    "gpt-oss-20b": 1,
    "gpt-oss-120b": 1,
    "kimi-k3": 1,
    "minimax-m2.5": 2,
    "minimax-m2.7": 2,
    "nemotron-3-ultra-550b-a55b": 1,
    "minimax-m3": 2,
    "step-3.7-flash": 2,
}

# Bytes of a token's indexer keys, whatever the rest of the cache is in.
INDEX_BYTES = {
    "deepseek-v3.2": 61 * 132,
    "glm-5": 78 * 132,
    "glm-5.2": 21 * 132,
    "glm-5.3-flash": 11 * 132 // 4,
    "glm-5.3-flash-bf16": 11 * 132 // 4,
    "minimax-m3": 57 * 256,
}

# Presets that store another one's layers in a format of their own: that one, the format, and the cache's.
QUANTISED = {
    "deepseek-v4-flash-fp8": ("deepseek-v4-flash", "fp8_block", "fp8"),
    "devstral-small-2-24b": ("mistral-small-3.1-24b", "fp8", None),
    "deepseek-v4-flash-nvfp4": ("deepseek-v4-flash", "nvfp4", "fp8"),
    "deepseek-v4-pro-fp8": ("deepseek-v4-pro", "fp8_block", "fp8"),
    "deepseek-v4-pro-nvfp4": ("deepseek-v4-pro", "nvfp4", "fp8"),
    "deepseek-v3.2-nvfp4": ("deepseek-v3.2", "nvfp4", "fp8"),
    "glm-4.5-air-fp8": ("glm-4.5-air", "fp8", None),
    "glm-4.5-fp8": ("glm-4.5", "fp8", None),
    "glm-4.6-fp8": ("glm-4.6", "fp8", None),
    "glm-4.7-fp8": ("glm-4.7", "fp8", None),
    "glm-5-fp8": ("glm-5", "fp8_block", None),
    "glm-5-nvfp4": ("glm-5", "nvfp4", "fp8"),
    "glm-5.1-nvfp4": ("glm-5", "nvfp4", "fp8"),
    "glm-5.2-fp8": ("glm-5.2", "fp8_block", None),
    "glm-5.2-nvfp4": ("glm-5.2", "nvfp4", "fp8"),
    "glm-5.3-flash-nvfp4": ("glm-5.3-flash", "nvfp4", "fp8"),
    "minimax-m3-nvfp4": ("minimax-m3", "nvfp4", None),
    "gemma-4-26b-a4b-nvfp4": ("gemma-4-26b-a4b", "nvfp4", "fp8"),
    "gemma-4-31b-nvfp4": ("gemma-4-31b", "nvfp4", "fp8"),
    "deepseek-v3.1-nvfp4": ("deepseek-v3", "nvfp4", "fp8"),
    "kimi-k2-thinking": ("kimi-k2-0905", "int4_wo", None),
    "kimi-k2.5-nvfp4": ("kimi-k2.5", "nvfp4", "fp8"),
    "kimi-k2.6-nvfp4": ("kimi-k2.5", "nvfp4", "fp8"),
    "kimi-k2.7-code-nvfp4": ("kimi-k2.5", "nvfp4", "fp8"),
    "llama-3.1-8b-fp8": ("llama-3.1-8b", "fp8", "fp8"),
    "llama-3.1-70b-fp8": ("llama-3.1-70b", "fp8", "fp8"),
    "llama-3.1-405b-fp8": ("llama-3.1-405b", "fp8", "fp8"),
    "llama-4-scout-fp8": ("llama-4-scout", "fp8", None),
    "minimax-m2.5-nvfp4": ("minimax-m2.5", "nvfp4", "fp8"),
    "minimax-m2.7-nvfp4": ("minimax-m2.7", "nvfp4", "fp8"),
    "nemotron-3-nano-30b-a3b-nvfp4": ("nemotron-3-nano-30b-a3b", "nvfp4", "fp8"),
    "nemotron-3-super-120b-a12b-fp8": ("nemotron-3-super-120b-a12b", "fp8", "fp8"),
    "nemotron-3-super-120b-a12b-nvfp4": ("nemotron-3-super-120b-a12b", "nvfp4", "fp8"),
    "nemotron-3-ultra-550b-a55b-fp8": ("nemotron-3-ultra-550b-a55b", "fp8", "fp8"),
    "nemotron-3-ultra-550b-a55b-nvfp4": ("nemotron-3-ultra-550b-a55b", "nvfp4", "fp8"),
    "nemotron-3.5-lightning-30b-a3b-nvfp4": ("nemotron-3-nano-30b-a3b", "nvfp4_wo", "fp8"),
    **{f"ministral-3-{size}-fp8": (f"ministral-3-{size}", "fp8", None) for size in ("3b", "8b", "14b")},
    **{name: (name.removesuffix(DYNAMIC), "fp8", None) for name in model_names() if name.endswith(DYNAMIC)},
    "qwen3-0.6b-fp8": ("qwen3-0.6b", "fp8_block", None),
    "qwen3-1.7b-fp8": ("qwen3-1.7b", "fp8_block", None),
    "qwen3-4b-fp8": ("qwen3-4b", "fp8_block", None),
    "qwen3-4b-2507-fp8": ("qwen3-4b-2507", "fp8_block", None),
    "qwen3-30b-a3b-2507-fp8": ("qwen3-30b-a3b-2507", "fp8_block", None),
    "qwen3-235b-a22b-2507-fp8": ("qwen3-235b-a22b-2507", "fp8_block", None),
    "qwen3-8b-fp8": ("qwen3-8b", "fp8_block", None),
    "qwen3-14b-fp8": ("qwen3-14b", "fp8_block", None),
    "qwen3-32b-fp8": ("qwen3-32b", "fp8_block", None),
    "qwen3-32b-fp8-static": ("qwen3-32b", "fp8", "fp8"),
    "qwen3-30b-a3b-fp8": ("qwen3-30b-a3b", "fp8_block", None),
    "qwen3-235b-a22b-fp8": ("qwen3-235b-a22b", "fp8_block", None),
    "qwen3-235b-a22b-nvfp4": ("qwen3-235b-a22b", "nvfp4", "fp8"),
    "qwen3-coder-30b-a3b-fp8": ("qwen3-coder-30b-a3b", "fp8_block", None),
    "qwen3-coder-480b-a35b-fp8": ("qwen3-coder-480b-a35b", "fp8_block", None),
    "qwen3.5-122b-a10b-fp8": ("qwen3.5-122b-a10b", "fp8_block", None),
    "qwen3.5-122b-a10b-nvfp4": ("qwen3.5-122b-a10b", "nvfp4", "fp8"),
    "qwen3.5-27b-fp8": ("qwen3.5-27b", "fp8_block", None),
    "qwen3.5-35b-a3b-fp8": ("qwen3.5-35b-a3b", "fp8_block", None),
    "qwen3.5-397b-a17b-fp8": ("qwen3.5-397b-a17b", "fp8_block", None),
    "qwen3.6-27b-fp8": ("qwen3.6-27b", "fp8_block", None),
    "qwen3.6-35b-a3b-fp8": ("qwen3.6-35b-a3b", "fp8_block", None),
    "qwen3.8-27b-fp8": ("qwen3.8-27b", "fp8_block", None),
    "qwen3.8-2.4t-a95b-fp8": ("qwen3.8-2.4t-a95b", "fp8_block", None),
    "qwen3.5-397b-a17b-nvfp4": ("qwen3.5-397b-a17b", "nvfp4", "fp8"),
    "qwen3.6-27b-nvfp4": ("qwen3.5-27b", "nvfp4_wo", "fp8"),
    "qwen3.6-35b-a3b-nvfp4": ("qwen3.5-35b-a3b", "nvfp4_wo", "fp8"),
    "step-3.7-flash-fp8": ("step-3.7-flash", "fp8_block", None),
}

# Formats of other modules than most of a preset's weights are in.
ALSO_STORED = {
    "deepseek-v4-flash-nvfp4": {"fp8_block"},
    "deepseek-v4-pro-nvfp4": {"fp8_block"},
    "minimax-m3-nvfp4": {"mxfp8"},
    "nemotron-3.5-lightning-30b-a3b-nvfp4": {"fp8"},
    "qwen3.6-27b-nvfp4": {"fp8"},
    "qwen3.6-35b-a3b-nvfp4": {"fp8"},
}

# Their fp8 caches are no half of bf16's: what is rotated stays in bf16, and there are scales.
MIXED_CACHES = ("deepseek-v4-flash", "deepseek-v4-pro", "deepseek-v4.1-flash")


def digit(figure: str) -> float:
    """One unit of the last digit of a figure: 0.1 of "25.2", 100 of "1.6e3"."""
    digits, _, exponent = figure.partition("e")
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))


def test_every_preset_is_held_to_what_is_published() -> None:
    assert model_names() == sorted([*PUBLISHED, *QUANTISED])


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_weights_are_those_published(name: str) -> None:
    model, published = load_model(name), PUBLISHED[name]
    found, figure = model.num_parameters / 1e9 + published.extra, float(published.billions)
    least = max(0.5 * digit(published.billions), published.rounded)
    assert abs(found - figure) <= max(0.005 * figure, least)
    assert (model.active_parameters == model.num_parameters) == (published.active is None)
    if published.active is not None:
        left_out = model.vocab * model.hidden * NOT_COUNTED_AS_ACTIVE.get(name, 0)
        active = (model.active_parameters - left_out) / 1e9
        # cards round and cut alike
        assert abs(active - float(published.active)) <= digit(published.active)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_kv_bytes_are_those_of_heads_and_layers(name: str) -> None:
    model, kv_bytes = load_model(name), PUBLISHED[name].kv_bytes
    assert model.kv_bytes_per_token(Layout(), "bf16") == kv_bytes
    if name not in MIXED_CACHES:
        # the indexer's keys are as large in any cache
        index = INDEX_BYTES.get(name, 0)
        assert (model.kv_bytes_per_token(Layout(), "fp8") - index) * 2 == kv_bytes - index


@pytest.mark.parametrize("name", sorted(QUANTISED))
def test_a_quantised_preset_has_the_layers_of_its_own(name: str) -> None:
    base, dtype, kv_dtype = QUANTISED[name]
    model, plain = load_model(name), load_model(base)
    assert (model.checkpoint.dtype, model.checkpoint.kv_dtype) == (dtype, kv_dtype)
    assert model.num_parameters == plain.num_parameters

    # layers that differ in formats alone are kinds of their own
    def parts(spec: ModelSpec) -> dict[tuple[Attention, Mlp], int]:
        counts: Counter[tuple[Attention, Mlp]] = Counter()
        for group in spec.layers:
            counts[group.kind.attention, group.kind.mlp] += group.count
        return counts

    assert parts(model) == parts(plain)
    for kind in model.kinds:
        assert {stored for _, stored in kind.formats} <= {dtype} | ALSO_STORED.get(name, set())
        assert kind.formats or not kind.mlp.has_experts


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_ids_are_names_too(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    for hf_id in PRESETS[name]:
        assert load_model(hf_id) == load_model(hf_id.rpartition("/")[2].upper()) == model


FILES = {"aisimulate_core": 95, "aiconfigurator_core": 89}
"""config.json files of the newest release of either package."""


def configs(package: str) -> dict[str, Path]:
    """config.json files that a package ships, by Hugging Face id."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    folder = Path(found.submodule_search_locations[0]) / "model_configs"
    paths = (path for path in folder.glob("*_config.json") if not path.name.endswith("_hf_quant_config.json"))
    return {path.name.removesuffix("_config.json").replace("--", "/", 1): path for path in paths}


# What the package leaves out of a published file: the encoder's sizes; heads and gate of windowed layers,
# and which modules are quantised.
SHORTENED = {
    "llama-4-scout": ("vision",),
    "llama-4-maverick": ("vision",),
    "step-3.7-flash": ("architecture", "max_position", "layers"),
    "step-3.7-flash-fp8": ("architecture", "max_position", "layers"),
}


REFUSED: set[str] = set()

# Copies of GLM-5.2's files. GLM-5.3 is published in fp8 (sgl-project/sglang#36827, and tensor by tensor
# NVIDIA-NeMo/Megatron-Bridge#6117), GLM-5.3-BF16 in bf16; no other file names GLM-5.3-FP8.
EXTRAPOLATED = {"zai-org/GLM-5.3", "zai-org/GLM-5.3-FP8"}


@pytest.mark.parametrize("package", FILES)
def test_presets_are_the_published_files(package: str) -> None:
    files, compared = configs(package), 0
    for preset, ids in PRESETS.items():
        for hf_id in set(ids) & set(files) - EXTRAPOLATED:
            ours, theirs = load_model(preset), load_model(files[hf_id], name=preset)
            # some files lack the format of unquantised weights
            differ = {"torch_dtype"} | set(SHORTENED.get(preset, ()))
            found = {f.name for f in fields(ours) if getattr(ours, f.name) != getattr(theirs, f.name)}
            assert found <= differ, hf_id
            compared += 1
    assert compared == FILES[package] - len((REFUSED | EXTRAPOLATED) & set(files))


@pytest.mark.slow
@pytest.mark.parametrize("package", FILES)
def test_every_published_file_loads_or_is_refused(package: str) -> None:
    refused = set()
    for hf_id, path in configs(package).items():
        try:
            load_model(path, name=hf_id)
        except UnsupportedModelError:
            refused.add(hf_id)
    assert refused <= REFUSED
