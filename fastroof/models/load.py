"""Loading models: the sizes of a transformer, from a preset or a Hugging Face config.json."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

from fastroof.errors import ModelError, UnsupportedModelError
from fastroof.models import hf
from fastroof.models.dense import DenseModel
from fastroof.models.quantisation import quantisation_of, quantised, read_hf_quant
from fastroof.models.spec import ModelSpec

__all__ = ["PRESETS", "load_model", "model_names"]

PRESETS: Final[dict[str, tuple[str, ...]]] = {
    "codellama-34b": ("codellama/CodeLlama-34b-hf", "codellama/CodeLlama-34b-Instruct-hf"),
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-chat-hf"),
    "llama-2-13b": ("meta-llama/Llama-2-13b-hf", "meta-llama/Llama-2-13b-chat-hf"),
    "llama-2-70b": ("meta-llama/Llama-2-70b-hf", "meta-llama/Llama-2-70b-chat-hf"),
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Meta-Llama-3.1-8B",
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
    ),
    "llama-3.1-70b": (
        "meta-llama/Llama-3.1-70B",
        "meta-llama/Llama-3.1-70B-Instruct",
        "meta-llama/Meta-Llama-3.1-70B",
        "meta-llama/Meta-Llama-3.1-70B-Instruct",
    ),
    "mistral-7b": ("mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3"),
    "mistral-nemo": ("mistralai/Mistral-Nemo-Instruct-2407",),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct"),
    "qwen2.5-32b": ("Qwen/Qwen2.5-32B", "Qwen/Qwen2.5-32B-Instruct"),
    "qwen2.5-72b": ("Qwen/Qwen2.5-72B", "Qwen/Qwen2.5-72B-Instruct"),
    "qwen3-8b": ("Qwen/Qwen3-8B",),
    "qwen3-14b": ("Qwen/Qwen3-14B",),
    "qwen3-32b": ("Qwen/Qwen3-32B",),
    "yi-34b": ("01-ai/Yi-34B",),
}
"""Preset names, and the Hugging Face models that have exactly these layers.

Where base and instruct models differ in ``max_position_embeddings`` the preset has the instruct model's.
"""


def model_names() -> list[str]:
    """Return the presets that :func:`load_model` knows, sorted.

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


def load_model(name_or_path: str | Path | Mapping[str, Any], *, name: str | None = None) -> ModelSpec:
    """Load the sizes of a model.

    Parameters
    ----------
    name_or_path : str, Path or mapping
        A preset out of :func:`model_names` or the Hugging Face id of one, in any case; the path of
        a config.json or of the folder that holds it; or the contents of a config.json. A preset
        wins over a path of the same spelling.
    name : str, optional
        What to call the model instead of the preset's, folder's or architecture's name.

    Returns
    -------
    ModelSpec
        The model as a whole, in the formats of its checkpoint; a ``Layout`` splits it over GPUs. Beside a
        config.json a hf_quant_config.json is read too.

    Raises
    ------
    UnsupportedModelError
        If the architecture needs an operator that a plan does not have; every one is named.
    ModelError
        If the model is unknown, the file is not a config.json, or a field is missing or malformed.

    Examples
    --------
    >>> load_model("meta-llama/Llama-3.1-8B-Instruct").num_layers
    32
    """
    if isinstance(name_or_path, Mapping):
        return _parse(name_or_path, "model config", name)
    if not isinstance(name_or_path, str | Path):
        raise ModelError(f"a model is a name, a path or a mapping, got {type(name_or_path).__name__}")
    if isinstance(name_or_path, str) and (preset := _spellings().get(name_or_path.casefold())) is not None:
        # The folder is package data; as_file also serves a package imported from a zip.
        with resources.as_file(resources.files("fastroof.models") / "presets" / f"{preset}.json") as path:
            return _parse(hf.read_config(path), f"preset {preset}", name or preset)
    path = Path(name_or_path)
    # os.path answers False where Path.is_dir raises: a name longer than a file name may be.
    if name_or_path != "" and os.path.isdir(path):
        path = path / hf.CONFIG_FILE
    if os.path.isfile(path):
        own = path.resolve()
        called = own.parent.name if own.name == hf.CONFIG_FILE else own.stem
        return _parse(hf.read_config(path), str(path), name or called, read_hf_quant(path))
    raise ModelError(_unknown(name_or_path, path))


def _spellings() -> dict[str, str]:
    spellings = {name: name for name in PRESETS}
    for preset, ids in PRESETS.items():
        for hf_id in ids:
            spellings[hf_id.casefold()] = preset
            spellings[hf_id.rpartition("/")[2].casefold()] = preset
    return spellings


def _unknown(given: str | Path, path: Path) -> str:
    presets = ", ".join(model_names())
    if isinstance(given, Path) or path.suffix == ".json":
        return f"{path} does not exist; give a config.json, the folder that holds one, or a preset: {presets}"
    spellings = _spellings()
    close = difflib.get_close_matches(given.casefold(), spellings, n=1)
    hint = f"; the closest is {spellings[close[0]]}" if close else ""
    return f"unknown model {given!r}: neither a file nor a preset{hint}; presets are {presets}"


def _parse(
    config: Mapping[str, Any], where: str, name: str | None, hf_quant: Mapping[str, Any] | None = None
) -> ModelSpec:
    fields = hf.Fields(config, where)
    missing = hf.missing_operators(fields)
    if missing:
        raise UnsupportedModelError(f"{where} has no plan yet: {'; '.join(missing)}")
    model_type = fields.text("model_type")
    if model_type is None:
        model_type = next(t for t, a in hf.ARCHITECTURES.items() if a in config["architectures"])
    hidden = fields.size("hidden_size")
    num_layers = fields.size("num_hidden_layers")
    num_q_heads = fields.size("num_attention_heads")
    num_kv_heads = _num_kv_heads(fields, model_type, num_q_heads)
    max_position = fields.size("max_position_embeddings")
    attention_bias = fields.flag("attention_bias", default=model_type == "qwen2")
    architecture = hf.ARCHITECTURES[model_type]
    unquantised = DenseModel(
        name=name or fields.text("_name_or_path") or architecture,
        architecture=architecture,
        num_layers=num_layers,
        hidden=hidden,
        intermediate=fields.size("intermediate_size"),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(fields, model_type, hidden, num_q_heads),
        vocab=fields.size("vocab_size"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        qkv_bias=attention_bias,
        o_bias=attention_bias and model_type != "qwen2",
        mlp_bias=fields.flag("mlp_bias", default=False),
        qk_norm=model_type == "qwen3",
        sliding_window=hf.sliding_window(fields, model_type, num_layers, max_position),
        max_position=max_position,
        torch_dtype=_torch_dtype(fields),
    ).spec()
    return quantised(unquantised, quantisation_of(config, where), hf_quant, where=where)


def _num_kv_heads(fields: hf.Fields, model_type: str, num_q_heads: int) -> int:
    # Null means one KV head a query head for all families, a missing field only for llama; the
    # others then fall back on a number that fits one size of the family.
    if "num_key_value_heads" not in fields.config and model_type != "llama":
        raise fields.error("field num_key_value_heads is missing")
    num_kv_heads = fields.optional_size("num_key_value_heads") or num_q_heads
    if num_q_heads % num_kv_heads:
        raise fields.error(
            f"num_attention_heads {num_q_heads} does not divide by num_key_value_heads {num_kv_heads}"
        )
    return num_kv_heads


def _head_dim(fields: hf.Fields, model_type: str, hidden: int, num_q_heads: int) -> int:
    given = fields.optional_size("head_dim")
    if given is not None:
        return given
    if model_type == "qwen3" and "head_dim" not in fields.config:
        return 128
    if hidden % num_q_heads:
        raise fields.error(
            f"no head_dim, and hidden_size {hidden} does not divide by num_attention_heads {num_q_heads}"
        )
    return hidden // num_q_heads


def _torch_dtype(fields: hf.Fields) -> str | None:
    # transformers 5 writes dtype where 4 wrote torch_dtype.
    dtype = fields.text("torch_dtype") or fields.text("dtype")
    return None if dtype is None else dtype.removeprefix("torch.")
