"""Every preset against what is published of it: weights, active weights, KV bytes a token, file and ids."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from fastroof.errors import UnsupportedModelError
from fastroof.models import Layout, ModelSpec, load_model, model_names
from fastroof.models.named import PRESETS


class Published(NamedTuple):
    """What a model's publisher says of it.

    ``billions`` of weights and, of models with experts, ``active`` ones; ``kv_bytes`` of a token in bf16,
    over all layers, from the heads and layers that the publisher names; ``source`` of the weights.
    """

    billions: float
    active: float | None
    kv_bytes: int
    source: str


SAFETENSORS = "weights in the checkpoint's index, as the model's page shows them"

PUBLISHED = {
    "codellama-34b": Published(33.744, None, 48 * 2 * 8 * 128 * 2, SAFETENSORS),
    "gpt-oss-20b": Published(20.91, 3.61, 24 * 2 * 8 * 64 * 2, "model card, arXiv 2508.10925, table 1"),
    "gpt-oss-120b": Published(116.83, 5.13, 36 * 2 * 8 * 64 * 2, "model card, arXiv 2508.10925, table 1"),
    "llama-2-7b": Published(6.738, None, 32 * 2 * 32 * 128 * 2, SAFETENSORS),
    "llama-2-13b": Published(13.016, None, 40 * 2 * 40 * 128 * 2, SAFETENSORS),
    "llama-2-70b": Published(68.977, None, 80 * 2 * 8 * 128 * 2, SAFETENSORS),
    "llama-3.1-8b": Published(8.030, None, 32 * 2 * 8 * 128 * 2, SAFETENSORS),
    "llama-3.1-70b": Published(70.554, None, 80 * 2 * 8 * 128 * 2, SAFETENSORS),
    "llama-3.1-405b": Published(405.853, None, 126 * 2 * 8 * 128 * 2, SAFETENSORS),
    # the card says 7 B; the page's 7.83 B holds a layer for multi-token prediction, 0.21 B of weights
    "mimo-7b": Published(7.833 - 0.21, None, 36 * 2 * 8 * 128 * 2, SAFETENSORS),
    "mistral-7b": Published(7.248, None, 32 * 2 * 8 * 128 * 2, SAFETENSORS),
    "mistral-nemo": Published(12.248, None, 40 * 2 * 8 * 128 * 2, SAFETENSORS),
    "mixtral-8x7b": Published(46.7, 12.9, 32 * 2 * 8 * 128 * 2, "mistral.ai/news/mixtral-of-experts"),
    "mixtral-8x22b": Published(140.6, 39.1, 56 * 2 * 8 * 128 * 2, SAFETENSORS + "; 39 B: the announcement"),
    "qwen2.5-7b": Published(7.616, None, 28 * 2 * 4 * 128 * 2, "model card: 7.61 B"),
    "qwen2.5-32b": Published(32.764, None, 64 * 2 * 8 * 128 * 2, "model card: 32.5 B; the index: 32.8 B"),
    "qwen2.5-72b": Published(72.7, None, 80 * 2 * 8 * 128 * 2, "model card"),
    "qwen3-0.6b": Published(0.596, None, 28 * 2 * 8 * 128 * 2, "model card: 0.6 B; tied, without the head"),
    "qwen3-1.7b": Published(1.721, None, 28 * 2 * 8 * 128 * 2, "model card: 1.7 B; tied, without the head"),
    "qwen3-8b": Published(8.19, None, 36 * 2 * 8 * 128 * 2, "model card: 8.2 B"),
    "qwen3-14b": Published(14.77, None, 40 * 2 * 8 * 128 * 2, "model card: 14.8 B"),
    "qwen3-32b": Published(32.76, None, 64 * 2 * 8 * 128 * 2, "model card: 32.8 B"),
    "qwen3-30b-a3b": Published(30.53, 3.35, 48 * 2 * 4 * 128 * 2, "model card: 30.5 B, 3.3 B activated"),
    "qwen3-235b-a22b": Published(235.1, 22.2, 94 * 2 * 4 * 128 * 2, "model card: 235 B, 22 B activated"),
    "qwen3-coder-480b-a35b": Published(480.2, 35.5, 62 * 2 * 8 * 128 * 2, "model card: 480 B, 35 B"),
    "yi-34b": Published(34.389, None, 60 * 2 * 8 * 128 * 2, SAFETENSORS),
}

# Their cards count the LM head among active weights and the embedding not.
ACTIVE_WITHOUT_EMBEDDING = ("gpt-oss-20b", "gpt-oss-120b")


def test_every_preset_is_held_to_what_is_published() -> None:
    assert model_names() == sorted(PUBLISHED)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_weights_are_those_published(name: str) -> None:
    model, published = load_model(name), PUBLISHED[name]
    assert model.num_parameters == pytest.approx(published.billions * 1e9, rel=0.005)
    embedding = model.vocab * model.hidden * (name in ACTIVE_WITHOUT_EMBEDDING)
    active = published.active or published.billions
    assert model.active_parameters - embedding == pytest.approx(active * 1e9, rel=0.005)
    assert (model.active_parameters == model.num_parameters) == (published.active is None)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_kv_bytes_are_those_of_heads_and_layers(name: str) -> None:
    model, kv_bytes = load_model(name), PUBLISHED[name].kv_bytes
    assert model.kv_bytes_per_token(Layout(), "bf16") == kv_bytes
    assert model.kv_bytes_per_token(Layout(), "fp8") * 2 == kv_bytes


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_ids_are_names_too(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    for hf_id in PRESETS[name]:
        assert load_model(hf_id) == load_model(hf_id.rpartition("/")[2].upper()) == model


def configs() -> dict[str, Path]:
    """config.json files that the package aiconfigurator-core ships, by Hugging Face id."""
    found = importlib.util.find_spec("aiconfigurator_core")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package aiconfigurator-core is not installed")
    folder = Path(found.submodule_search_locations[0]) / "model_configs"
    paths = (path for path in folder.glob("*_config.json") if not path.name.endswith("_hf_quant_config.json"))
    return {path.name.removesuffix("_config.json").replace("--", "/", 1): path for path in paths}


def as_loaded(model: ModelSpec) -> ModelSpec:
    """The model without what files of one model differ in: dtype is left out of some."""
    return replace(model, torch_dtype=None)


def test_presets_are_the_published_files() -> None:
    files, compared = configs(), 0
    for preset, ids in PRESETS.items():
        for hf_id in ids:
            if hf_id in files:
                found = load_model(files[hf_id], name=preset)
                assert as_loaded(found) == as_loaded(load_model(preset)), hf_id
                compared += 1
    assert compared >= 14


# What files of models that need attention of another kind are refused for.
NEEDS = {
    "MLA operator": ("DeepSeek-R1", "DeepSeek-V3", "DeepSeek-V3.1", "DeepSeek-V3.2", "GLM-5", "Kimi-K"),
    "sparse attention operator": ("DeepSeek-V3.2", "DeepSeek-V4", "GLM-5", "MiniMax-M3"),
    "linear or hybrid attention operator": ("Kimi-K3", "Nemotron-3", "Nemotron-H", "Qwen3.5", "Qwen3.6"),
}


def test_published_files_load_or_name_the_operator_that_is_missing() -> None:
    loaded = []
    for hf_id, path in configs().items():
        name = hf_id.rpartition("/")[2].removeprefix("NVIDIA-")
        needed = [operator for operator, names in NEEDS.items() if name.startswith(names)]
        if not needed:
            loaded.append(load_model(path, name=hf_id))
            continue
        with pytest.raises(UnsupportedModelError) as error:
            load_model(path)
        assert [operator for operator in needed if operator not in str(error.value)] == [], hf_id
    assert len(loaded) == 41
