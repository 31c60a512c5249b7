"""The folder of a model as vLLM reads it: a config.json, complete enough to run with dummy weights."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fastroof.atomic_files import write_whole
from fastroof.errors import MeasureError
from fastroof.models import ModelSpec, load_model
from fastroof.models.hf import CONFIG_FILE, read_config
from fastroof.models.named import preset_config, preset_named

_LLAMA3: Final = {
    "rope_theta": 500000.0, "rms_norm_eps": 1e-05, "hidden_act": "silu", "bos_token_id": 128000,
    "eos_token_id": 128009,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
}  # fmt: skip
_QWEN3: Final = {
    "rope_theta": 1000000, "rms_norm_eps": 1e-06, "hidden_act": "silu", "bos_token_id": 151643,
    "eos_token_id": 151645,
}  # fmt: skip
_GPT_OSS: Final = {
    "rope_theta": 150000, "rms_norm_eps": 1e-05, "hidden_act": "silu", "swiglu_limit": 7.0,
    "eos_token_id": 200002, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "initial_context_length": 4096,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
_ADDED: Final[dict[str, dict[str, Any]]] = {
    "llama": _LLAMA3,
    "qwen2": _QWEN3,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3 | {"norm_topk_prob": True, "router_aux_loss_coef": 0.001},
    "gpt_oss": _GPT_OSS,
}
"""Fields by model type that presets leave out, since no time depends on them."""


@dataclass(frozen=True)
class EngineModel:
    """A model to measure."""

    # What steps.csv calls it: the preset, or the path that was given.
    name: str
    folder_name: str
    spec: ModelSpec
    config: dict[str, Any]

    def write(self, parent: Path) -> Path:
        """Write its config.json to a folder below ``parent``; return that folder."""
        folder = parent / self.folder_name
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / CONFIG_FILE, json.dumps(self.config, indent=1))
        return folder


def engine_model(given: str) -> EngineModel:
    """Return the model of a preset, a config.json or its folder, or raise a ModelError or MeasureError."""
    spec = load_model(given)
    preset = preset_named(given)
    if preset is None:
        path = Path(given)
        config = dict(read_config(path / CONFIG_FILE if path.is_dir() else path))
        folder_name = re.sub(r"[^\w.-]", "_", spec.name)
        return EngineModel(str(path.resolve()), folder_name, spec, config)
    config = preset_config(preset)
    kind = config.get("model_type")
    if kind not in _ADDED:
        raise MeasureError(
            f"the preset {preset} lacks what vLLM reads of a {kind} model: give the path of its config.json; "
            f"complete are presets of {', '.join(sorted(_ADDED))}"
        )
    return EngineModel(preset, preset, spec, {**_ADDED[kind], **config})
