"""Hugging Face ids: the preset of each, its format, the public file that names it, and ids without a plan."""

from __future__ import annotations

import re

import pytest

from fastroof.errors import ModelError, UnsupportedModelError
from fastroof.models import load_model
from fastroof.models.named import KNOWN_IDS, PRESETS

SUFFIXES = {
    "bf16": ("bf16",),
    "fp8": ("fp8", "fp8_block"),
    "fp8-dynamic": ("fp8",),
    "fp8-static-pertensor": ("fp8",),
    "nvfp4": ("nvfp4", "nvfp4_wo"),
}
"""Ends of checkpoints' names, and the formats that they may mean."""

SOURCE = re.compile(
    r"[\w.-]+/[\w.-]+(@[0-9a-f]{8}:\S+|#\d+)"  # a file of a repository at a commit, or a thread
    r"|(aisimulate|aiconfigurator-core) [\w.]+:model_configs/\S+|huggingface\.co/[\w.-]+/[\w.-]+",
    re.ASCII,
)


def test_every_id_is_named_by_a_public_file_in_the_format_of_its_preset() -> None:
    for known in KNOWN_IDS:
        assert SOURCE.fullmatch(known.source), known
        if known.preset not in PRESETS:
            continue
        assert load_model(known.preset).checkpoint.dtype == known.dtype, known
        ends = [end for end in SUFFIXES if known.hf_id.lower().endswith(f"-{end}")]
        assert all(known.dtype in SUFFIXES[end] for end in ends), known
        for package in ("aisimulate", "aiconfigurator-core"):
            file = f"{known.hf_id.replace('/', '--')}_config.json"
            assert not known.source.startswith(f"{package} ") or known.source.endswith(f"/{file}"), known


def test_no_two_presets_share_a_name() -> None:
    presets: dict[str, set[str]] = {name: {name} for name in PRESETS}
    for known in KNOWN_IDS:
        for name in (known.hf_id.casefold(), known.hf_id.rpartition("/")[2].casefold()):
            presets.setdefault(name, set()).add(known.preset)
    assert {name: sorted(found) for name, found in presets.items() if len(found) > 1} == {}
    assert len(KNOWN_IDS) == len({known.hf_id.casefold() for known in KNOWN_IDS})


@pytest.mark.parametrize(
    ("hf_id", "preset", "dtype"),
    [
        ("zai-org/GLM-5.3", "glm-5.2-fp8", "fp8_block"),
        ("zai-org/GLM-5.3-BF16", "glm-5.2", "bf16"),
        ("zai-org/GLM-5.3-Flash", "glm-5.3-flash", "fp8_block"),
        ("zai-org/GLM-5.3-Flash-BF16", "glm-5.3-flash-bf16", "bf16"),
        # the experts are in fp4, all else in fp8: radixark/miles#2717
        ("deepseek-ai/DeepSeek-V4-Flash-0731", "deepseek-v4-flash", "mxfp4"),
        ("deepseek-ai/DeepSeek-V4-Flash-Base", "deepseek-v4-flash-fp8", "fp8_block"),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama-3.2-1b", "bf16"),
        ("meta-llama/Llama-3.2-3B-Instruct", "llama-3.2-3b", "bf16"),
        ("Qwen/Qwen2.5-3B-Instruct", "qwen2.5-3b", "bf16"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-coder-30b-a3b", "bf16"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral-small-3.1-24b", "bf16"),
    ],
)
def test_names_of_public_threads(hf_id: str, preset: str, dtype: str) -> None:
    model = load_model(hf_id)
    assert (model.name, model.checkpoint.dtype) == (preset, dtype)


@pytest.mark.parametrize(
    ("hf_id", "why", "supported"),
    [
        ("Qwen/Qwen3.8-Flash-Next", r"blocks of keys that an indexer picks \(QSA\)", "qwen3.8-27b"),
    ],
)
def test_an_unsupported_known_model_names_the_reason_and_alternatives(
    hf_id: str, why: str, supported: str
) -> None:
    for name in (hf_id, hf_id.rpartition("/")[2].upper()):
        with pytest.raises(
            UnsupportedModelError, match=rf"^{hf_id} has no plan yet: .*{why}.*; supported: {supported}"
        ):
            load_model(name)


def test_an_id_that_no_public_file_names_is_unknown() -> None:
    with pytest.raises(ModelError, match=r"^unknown model 'zai-org/GLM-5.3-FP8'; did you mean .*glm-5.2-fp8"):
        load_model("zai-org/GLM-5.3-FP8")
