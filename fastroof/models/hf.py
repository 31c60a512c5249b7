"""Reading Hugging Face config.json files: fields checked by hand, and what a plan has no operator for.

What a missing field means is what the model class in transformers takes it to mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastroof.checks import is_whole_number, whole_number
from fastroof.errors import ModelError

__all__ = [
    "ARCHITECTURES",
    "CONFIG_FILE",
    "Fields",
    "missing_operators",
    "read_config",
    "sliding_window",
]

CONFIG_FILE: Final = "config.json"

ARCHITECTURES: Final[dict[str, str]] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Supported model_type values, and the class each is served as."""

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts")
_WRAPPER_KEYS = ("text_config", "vision_config", "audio_config")
# What transformers takes for mistral and qwen where sliding_window or max_window_layers is absent.
_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28
_PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})
_MAX_SIZE = 2**31 - 1


def read_config(path: Path) -> Mapping[str, Any]:
    """Return the contents of a config.json.

    Raises
    ------
    ModelError
        If the file cannot be read, is empty or is not a JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if not text.strip():
        raise ModelError(f"{path} is empty; it should hold a Hugging Face config.json")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


class Fields:
    """Checked access to the fields of one config.json; every error names the file and the field."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def error(self, message: str) -> ModelError:
        """Error about this file."""
        return ModelError(f"{self.where}: {message}")

    def size(self, key: str) -> int:
        """Value of a required field that counts something: a whole number of at least 1."""
        if key not in self.config:
            raise self.error(f"field {key} is missing")
        return whole_number(f"{self.where}: field {key}", self.config[key], most=_MAX_SIZE, error=ModelError)

    def optional_size(self, key: str) -> int | None:
        """As :meth:`size`, or None where the field is null or missing."""
        return None if self.config.get(key) is None else self.size(key)

    def flag(self, key: str, default: bool) -> bool:
        """Value of a true/false field; null counts as missing."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"field {key} must be true or false, got {value!r}")
        return value

    def text(self, key: str) -> str | None:
        """Value of a text field, or None where it is null or missing."""
        value = self.config.get(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise self.error(f"field {key} must be text, got {value!r}")
        return value

    def texts(self, key: str) -> list[str] | None:
        """Value of a field that lists names, or None where it is null or missing."""
        value = self.config.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            raise self.error(f"field {key} must be a list of names, got {value!r}")
        return value


def missing_operators(fields: Fields) -> list[str]:
    """Return what a plan would need to run this model and does not have, each with the field that says so.

    Parameters
    ----------
    fields : Fields
        The configuration, which need not be valid otherwise.

    Returns
    -------
    list of str
        Empty for a model that a plan can represent.
    """
    config = fields.config
    missing = []
    wrappers = [key for key in _WRAPPER_KEYS if config.get(key) is not None]
    if wrappers:
        missing.append(f"it is multimodal ({', '.join(wrappers)})")
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else config
    missing += _attention_and_experts(inner)
    model_type = fields.text("model_type")
    architectures = fields.texts("architectures")
    if model_type is not None and model_type not in ARCHITECTURES:
        missing.append(f"model_type {model_type!r} is not one of {', '.join(ARCHITECTURES)}")
    elif architectures:
        served = set(ARCHITECTURES.values()) if model_type is None else {ARCHITECTURES[model_type]}
        if not served.intersection(architectures):
            missing.append(f"architectures {', '.join(architectures)} is not {' or '.join(sorted(served))}")
    elif model_type is None:
        raise fields.error(f"field model_type is missing; supported are {', '.join(ARCHITECTURES)}")
    return missing


def _attention_and_experts(config: Mapping[str, Any]) -> list[str]:
    missing = []
    experts = [f"{key} {config[key]!r}" for key in _EXPERT_KEYS if config.get(key)]
    if experts:
        missing.append(f"it needs a MoE operator ({', '.join(experts)})")
    if config.get("kv_lora_rank") is not None:
        missing.append(f"it needs a MLA operator (kv_lora_rank {config['kv_lora_rank']!r})")
    if config.get("index_topk") is not None:
        missing.append(f"it needs a sparse attention operator (index_topk {config['index_topk']!r})")
    kinds = config.get("layer_types")
    other = sorted({str(k) for k in kinds} - _PLAIN_LAYERS) if isinstance(kinds, list) else []
    interval = config.get("full_attention_interval")
    if interval is not None or other:
        why = [] if interval is None else [f"full_attention_interval {interval!r}"]
        why += [f"layer_types {', '.join(other)}"] if other else []
        missing.append(f"it needs a linear or hybrid attention operator ({'; '.join(why)})")
    if config.get("attention_chunk_size") is not None:
        chunk = f"attention_chunk_size {config['attention_chunk_size']!r}"
        missing.append(f"it needs a chunked attention operator ({chunk})")
    if _is_mixed(config):
        missing.append("it needs interleaved sliding windows: its layers mix full and windowed attention")
    return missing


def _is_mixed(config: Mapping[str, Any]) -> bool:
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return _PLAIN_LAYERS.issubset(str(k) for k in kinds)
    if config.get("use_sliding_window") is not True:
        return False
    full, layers = config.get("max_window_layers", _DEFAULT_FULL_LAYERS), config.get("num_hidden_layers")
    return isinstance(full, int) and isinstance(layers, int) and 0 < full < layers


def sliding_window(fields: Fields, model_type: str, num_layers: int, max_position: int) -> int | None:
    """Return the sliding window that every layer attends within, or None for full attention.

    Parameters
    ----------
    fields : Fields
        The configuration; windows in some layers only were refused before.
    model_type : str
        A key of :data:`ARCHITECTURES`.
    num_layers : int
        Layers of the model.
    max_position : int
        Longest context, tokens: a window that covers it is none.

    Returns
    -------
    int or None
        Tokens.

    Raises
    ------
    ModelError
        If a field about windows is malformed.
    """
    window = fields.optional_size("sliding_window")
    if window is None and model_type != "llama" and "sliding_window" not in fields.config:
        window = _DEFAULT_WINDOW
    if model_type in ("qwen2", "qwen3"):
        full_layers = fields.config.get("max_window_layers", _DEFAULT_FULL_LAYERS)
        if not is_whole_number(full_layers, 0):
            raise fields.error(f"field max_window_layers must be a whole number, got {full_layers!r}")
        # The first max_window_layers layers attend to everything, so as many as there are means all.
        if not fields.flag("use_sliding_window", default=False) or full_layers >= num_layers:
            window = None
    kinds = fields.texts("layer_types")
    if kinds is not None:
        if len(kinds) != num_layers:
            raise fields.error(f"layer_types has {len(kinds)} layers, num_hidden_layers is {num_layers}")
        if "sliding_attention" not in kinds:
            window = None
        elif window is None:
            raise fields.error("field layer_types says sliding_attention, but no sliding_window is on")
    return None if window is None or window >= max_position else window
