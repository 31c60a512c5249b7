"""The checkpoint that an engine is given for a model: the one that was named, in the format that is meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastroof import ModelError, load_model, model_names
from fastroof.models.load import published_checkpoint
from fastroof.models.named import PRESETS


@pytest.mark.parametrize("preset", model_names())
def test_every_id_is_its_own_checkpoint(preset: str) -> None:
    dtype, kv_dtype = load_model(preset).checkpoint.formats
    for hf_id in PRESETS[preset]:
        assert published_checkpoint(hf_id.upper(), dtype) == (hf_id, dtype, kv_dtype, True)
    assert published_checkpoint(preset, dtype).name == PRESETS[preset][0]


def test_another_format_is_another_checkpoint_of_the_same_sizes() -> None:
    for given, dtype, name in (
        ("llama-3.1-70b", "fp8", "nvidia/Llama-3.1-70B-Instruct-FP8"),
        ("Qwen/Qwen3-32B", "fp8_block", "Qwen/Qwen3-32B-FP8"),
        ("Qwen/Qwen3-32B-FP8", "bf16", "Qwen/Qwen3-32B"),
        ("deepseek-v3.1", "nvfp4", "nvidia/DeepSeek-V3.1-NVFP4"),
    ):
        found = published_checkpoint(given, dtype)
        assert (found.name, found.dtype, found.is_given) == (name, dtype, False)
        assert load_model(found.name).checkpoint.dtype == dtype


def test_without_a_published_checkpoint_the_named_one_stays() -> None:
    found = published_checkpoint("meta-llama/Llama-3.1-8B-Instruct", "nvfp4")
    assert found == ("meta-llama/Llama-3.1-8B-Instruct", "bf16", "bf16", True)
    # DeepSeek-V3.1 has its sizes, and other weights
    assert published_checkpoint("deepseek-v3", "nvfp4").name == "deepseek-ai/DeepSeek-V3"
    assert published_checkpoint("deepseek-r1", "nvfp4").name == "deepseek-ai/DeepSeek-R1"


def test_a_custom_model_is_its_folder(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "head_dim": 64,
        "max_position_embeddings": 131072, "tie_word_embeddings": True,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert published_checkpoint(path, "bf16").name == str(tmp_path)
    assert published_checkpoint(tmp_path, "fp8").name == str(tmp_path)
    with pytest.raises(ModelError, match="unknown model"):
        published_checkpoint("nobody/nothing-1b", "bf16")
