"""Architecture names of vLLM: the record, those of a wheel, and which of them families read."""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof.errors import ModelError
from fastroof.models import load_model, model_names
from fastroof.models.architectures import (
    MISSING,
    POOLING,
    SAME,
    STATUSES,
    SUPPORTED,
    Registry,
    read_registry,
    record,
    shipped_registry,
)
from fastroof.models.families.registry import FAMILIES

REGISTRY = '''
"""Models."""
import torch

_TEXT_GENERATION_MODELS = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "LLaMAForCausalLM": ("llama", "LlamaForCausalLM"),
    "MambaForCausalLM": ("mamba", "MambaForCausalLM"),
    "NewForCausalLM": ("vllm.models.new", "NewForCausalLM"),
    "PlainForCausalLM": ("plain", "PlainForCausalLM"),
}
_EMBEDDING_MODELS = {
    "LlamaModel": ("llama", "LlamaForCausalLM"),
    **{name: at for name, at in _TEXT_GENERATION_MODELS.items()},
}
_LATE_INTERACTION_MODELS = {}
_REWARD_MODELS = {}
_TOKEN_CLASSIFICATION_MODELS = {}
_SEQUENCE_CLASSIFICATION_MODELS = {"GPT2ForSequenceClassification": ("gpt2", "GPT2ForSequenceClassification")}
_MULTIMODAL_MODELS = {"LlavaForConditionalGeneration": ("llava", "LlavaForConditionalGeneration")}
_SPECULATIVE_DECODING_MODELS = {"MiMoMTPModel": ("mimo_mtp", "MiMoMTP")}
_TRANSFORMERS_SUPPORTED_MODELS = {
    "SeedOssForCausalLM": ("transformers", "TransformersForCausalLM"),
    "GlmForCausalLM": ("transformers", "TransformersForCausalLM"),
}
_TRANSFORMERS_BACKEND_MODELS = {
    "TransformersForCausalLM": ("transformers", "TransformersForCausalLM"),
    "TransformersEmbeddingModel": ("transformers", "TransformersEmbeddingModel"),
}
_PREVIOUSLY_SUPPORTED_MODELS = {"BambaForCausalLM": "0.23.0"}
'''
LAYERS = "from vllm.model_executor.layers"
FILES = {
    "vllm/model_executor/models/registry.py": REGISTRY,
    "vllm/model_executor/models/mamba.py": f"{LAYERS}.mamba.mamba_mixer import MambaMixer",
    "vllm/model_executor/models/plain.py": "from .llama import LlamaModel\nfrom .utils import helper\n",
    "vllm/model_executor/models/llama.py": f"{LAYERS}.attention import Attention\n",
    "vllm/model_executor/models/utils.py": f"{LAYERS}.mamba.mamba_mixer2 import MambaMixer2",
    "vllm/models/new/__init__.py": "from .nvidia.model import NewForCausalLM",
    "vllm/models/new/nvidia/model.py": "from ..common.block import NewBlock\n",
    "vllm/models/new/common/block.py": f"{LAYERS}.fused_moe import FusedMoEFactory\n",
}


def wheel(folder: Path, **changed: str) -> Path:
    """A wheel of a small registry, with some of its files changed."""
    path = folder / "vllm-0.99.1-cp38-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as made:
        for name, text in {**FILES, **changed}.items():
            made.writestr(name, text)
    return path


def by_name(registry: Registry) -> dict[str, tuple[str, str]]:
    return {one.name: (one.status, one.why) for one in registry.architectures()}


def test_a_wheel_lists_what_it_registers(tmp_path: Path) -> None:
    registry = read_registry(wheel(tmp_path))
    assert registry.release == "0.99.1"
    assert registry.removed == {"BambaForCausalLM": "0.23.0"}
    found = by_name(registry)
    assert found["LlamaForCausalLM"] == ("supported", "model_type llama")
    assert found["LLaMAForCausalLM"] == ("same", "served as LlamaForCausalLM")
    assert found["MambaForCausalLM"] == ("missing", "no operator for Mamba-1")
    # layers of the modules that it imports classes of, not of those with functions
    assert found["PlainForCausalLM"][1].endswith("it is made of attention")
    assert found["NewForCausalLM"][1].endswith("it is made of experts")
    assert found["LlamaModel"][0] == found["GPT2ForSequenceClassification"][0] == "pooling"
    assert found["TransformersEmbeddingModel"][0] == "pooling"
    assert (
        found["TransformersForCausalLM"][0]
        == found["LlavaForConditionalGeneration"][0]
        == "by its text model"
    )
    assert found["MiMoMTPModel"][0] == "draft"
    assert found["SeedOssForCausalLM"][0] == "supported"
    assert found["GlmForCausalLM"] == ("missing", "no family reads its config.json (by Transformers)")


def test_a_folder_lists_what_its_wheel_registers(tmp_path: Path) -> None:
    path = wheel(tmp_path)
    with zipfile.ZipFile(path) as made:
        made.extractall(tmp_path / "unpacked")
    (tmp_path / "unpacked" / "vllm-0.99.1.dist-info").mkdir()
    for folder in (tmp_path / "unpacked", tmp_path / "unpacked" / "vllm"):
        assert read_registry(folder) == read_registry(path)
    # a record is read as it was written
    document = json.loads(record(read_registry(path)))
    assert document["release"] == "0.99.1"
    assert document["tasks"]["text generation"]["NewForCausalLM"] == ["vllm.models.new", "NewForCausalLM"]
    assert document["layers"]["vllm.models.new"] == ["experts"]


def test_the_record_is_of_a_release() -> None:
    registry = shipped_registry()
    assert registry.release == "0.33.0"
    assert json.loads(record(registry))["tasks"].keys() == registry.tasks.keys()
    found = registry.architectures()
    assert len(found) == len({one.name for one in found}) == sum(map(len, registry.tasks.values())) == 415
    counts = Counter(one.status for one in found)
    assert counts.keys() == set(STATUSES)
    assert all(one.why and bool(one.family) == (one.status in (SUPPORTED, SAME)) for one in found)


def test_names_of_families_are_supported_and_no_others() -> None:
    read = [family for family in FAMILIES if not family.refusal]
    served = {name for family in read for names in family.classes.values() for name in names}
    for one in shipped_registry().architectures():
        assert (one.name in served) == (one.status in (SUPPORTED, SAME)), one.name
    statuses = {one.name: one.status for one in shipped_registry().architectures()}
    # what presets are served as
    for name in model_names():
        architecture = load_model(name).architecture
        assert statuses.get(architecture, "removed") not in (MISSING, POOLING), architecture


BROKEN: dict[str, Any] = {
    "no Python": ("_TEXT_GENERATION_MODELS = {", "is not Python"),
    "no tables": ("x = 1", "has no _TEXT_GENERATION_MODELS"),
    "a table less": (REGISTRY.replace("_REWARD_MODELS", "_OTHER_MODELS"), "has no _REWARD_MODELS"),
    "an odd entry": (REGISTRY.replace('"MiMoMTP")', "1)").replace("_REWARD_MODELS", "_X"), "has no _REWARD"),
    "an odd table": (REGISTRY.replace("_REWARD_MODELS = {}", "_REWARD_MODELS = []"), "has no _REWARD_MODELS"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_invalid_registries_are_named(what: str, tmp_path: Path) -> None:
    text, complaint = BROKEN[what]
    with pytest.raises(ModelError, match=complaint):
        read_registry(wheel(tmp_path, **{"vllm/model_executor/models/registry.py": text}))


def test_invalid_wheels_are_named(tmp_path: Path) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(b"PK\x03\x04 not a wheel")
    with pytest.raises(ModelError, match="cannot be read as a wheel"):
        read_registry(other)
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ModelError, match=r"has no vllm/model_executor/models/registry\.py"):
            read_registry(path)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(REGISTRY)), st.integers(0, 40), st.text(max_size=20))
def test_a_damaged_registry_is_read_or_named(at: int, length: int, other: str) -> None:
    text = REGISTRY[:at] + other + REGISTRY[at + length :]
    path = Path("vllm-1.0.whl")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "fastroof.models.architectures._opened",
            lambda _: ("1.0", {"model_executor/models/registry.py": text}.get),
        )
        try:
            registry = read_registry(path)
        except ModelError:
            return
    assert all(one.status in STATUSES for one in registry.architectures())
