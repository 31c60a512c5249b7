"""Loading models from a preset or a Hugging Face config.json."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastroof.documents import read_text
from fastroof.errors import ModelError, UnsupportedModelError
from fastroof.file_access import FilesRead, is_file, is_folder, recorded, resolved
from fastroof.models.draft_heads import HeadFields, method_of
from fastroof.models.families.family import Family
from fastroof.models.families.registry import FLAT_WRAPPERS, family_of
from fastroof.models.hf import (
    CONFIG_FILE,
    Fields,
    longest_context,
    missing_operators,
    read_config,
    unread_parts,
)
from fastroof.models.layers import LayerGroup, LayerKind
from fastroof.models.named import HF_ID, PRESETS, preset_config, preset_named, unknown_name, unsupported_id
from fastroof.models.quantisation import quantisation_of, quantised, read_hf_quant
from fastroof.models.spec import ModelSpec
from fastroof.models.vision import vision_encoder

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_MOST_REVISION_BYTES: Final = 4096


def load_model(name_or_path: str | Path | Mapping[str, Any], *, name: str | None = None) -> ModelSpec:
    """Load the sizes of a model.

    Parameters
    ----------
    name_or_path : str, Path or mapping
        A preset from :func:`model_names` or its Hugging Face id, case-insensitive; the path of
        a config.json or of its folder; a Hugging Face id whose config.json is in the hub's local cache;
        or the contents of a config.json. A preset takes precedence over a path of the same spelling, and
        a path over the cache.
    name : str, optional
        Name of the model (default: that of the preset, folder or architecture).

    Returns
    -------
    ModelSpec
        The model as a whole, in the formats of its checkpoint; a ``Layout`` splits it over GPUs. A
        hf_quant_config.json next to the config.json is read too.

    Raises
    ------
    UnsupportedModelError
        If the architecture needs operators that plans do not support; all are named.
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
        raise ModelError(f"a model must be a name, a path or a mapping, got {type(name_or_path).__name__}")
    if isinstance(name_or_path, str) and (preset := preset_named(name_or_path)) is not None:
        model, read = _preset(preset)
        read.repeat()
        return replace(model, name=name) if name else model
    path = Path(name_or_path)
    if name_or_path != "" and is_folder(path):
        path = path / CONFIG_FILE
    if is_file(path):
        base = resolved(path)
        called = base.parent.name if base.name == CONFIG_FILE else base.stem
        return _parse(read_config(path), str(path), name or called, read_hf_quant(path))
    if isinstance(name_or_path, Path) or path.suffix == ".json":
        raise ModelError(
            f"{path} does not exist; give a config.json, the folder that holds one, or a preset "
            "(`fastroof models` lists them)"
        )
    downloaded = _downloaded(name_or_path)
    if downloaded is not None:
        called = name_or_path.rpartition("/")[2]
        return _parse(read_config(downloaded), str(downloaded), name or called, read_hf_quant(downloaded))
    if reason := unsupported_id(name_or_path):
        raise UnsupportedModelError(reason)
    raise ModelError(unknown_name(name_or_path))


def hub_cache() -> Path:
    """Return the folder of files that Hugging Face's client downloaded, by its environment variables."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = os.environ.get("HF_HOME") or os.path.join(home, "huggingface")
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))


def _downloaded(hf_id: str) -> Path | None:
    """Return the config.json of the main revision of an id in the hub's cache, if it is there."""
    if not HF_ID.fullmatch(hf_id):
        return None
    folder = hub_cache() / f"models--{hf_id.replace('/', '--')}"
    revision = folder / "refs" / "main"
    if not is_file(revision):
        return None
    commit = read_text(revision, ModelError, _MOST_REVISION_BYTES).strip()
    config = folder / "snapshots" / commit / CONFIG_FILE
    return config if _COMMIT.fullmatch(commit) and is_file(config) else None


@cache
def _preset(preset: str) -> tuple[ModelSpec, FilesRead]:
    """Return a preset, and what was read for it: a sweep loads each of its models hundreds of times."""
    with recorded() as read:
        return _parse(preset_config(preset), f"preset {preset}", preset), read


def _parse(
    config: Mapping[str, Any], where: str, name: str | None, hf_quant: Mapping[str, Any] | None = None
) -> ModelSpec:
    wrapper = Fields(config, where)
    head = HeadFields.of(wrapper)
    wrapper = wrapper if head is None else head.layers
    missing = missing_operators(wrapper, FLAT_WRAPPERS)
    if missing:
        raise UnsupportedModelError(f"{where} has no plan yet: {'; '.join(missing)}")
    family, architecture = family_of(wrapper)
    if family.refusal:
        raise UnsupportedModelError(f"{where} has no plan yet: {family.refusal}")
    fields = wrapper.text_model().with_defaults(family.defaults)
    unread = unread_parts(fields, family.reads, family.name)
    if unread:
        raise UnsupportedModelError(f"{where} has no plan yet: {'; '.join(unread)}")
    kinds = _layer_kinds(fields, family)
    kinds = kinds if head is None else head.kinds(kinds)
    unquantised = ModelSpec(
        name=name or fields.text("_name_or_path") or architecture,
        architecture=architecture,
        hidden=fields.size("hidden_size"),
        vocab=fields.size("vocab_size") if head is None else head.vocab,
        tie_embeddings=fields.flag("tie_word_embeddings", default=family.tie_embeddings),
        max_position=longest_context(fields, family.name),
        torch_dtype=_torch_dtype(fields),
        layers=tuple(LayerGroup(kind, count) for kind, count in Counter(kinds).items()),
        vision=vision_encoder(wrapper),
    )
    stored = quantised(
        unquantised,
        quantisation_of(config, where),
        hf_quant,
        layer_kinds=kinds,
        module_names=family.module_names,
        where=where,
    )
    if family.kv_dtype is None or stored.checkpoint.kv_dtype is not None:
        return stored
    return replace(stored, checkpoint=replace(stored.checkpoint, kv_dtype=family.kv_dtype))


def _layer_kinds(fields: Fields, family: Family) -> list[LayerKind]:
    try:
        return family.layers(fields)
    except ModelError as error:
        # errors of a layer do not name the file; errors of its fields do
        message = str(error)
        if message.startswith(fields.where):
            raise
        raise ModelError(f"{fields.where}: {message}") from None


def _torch_dtype(fields: Fields) -> str | None:
    # transformers 5 writes dtype instead of torch_dtype
    dtype = fields.text("torch_dtype") or fields.text("dtype")
    return None if dtype is None else dtype.removeprefix("torch.")


_FORMATS: Final = ("fp8", "nvfp4", "static", "dynamic", "mxfp4", "int4", "awq", "gptq")
"""Suffixes of presets that are another format of the same model."""


class Published(NamedTuple):
    """A checkpoint that an engine can load."""

    name: str
    dtype: str
    kv_dtype: str
    is_given: bool


def published_checkpoint(source: str | Path, dtype: str) -> Published:
    """Return the checkpoint to serve a model from in a format."""
    model = load_model(source)
    published = Published(_name(source), *model.checkpoint.formats, True)
    preset = preset_named(str(source))
    if published.dtype == dtype or preset is None:
        return published
    for other in sorted(PRESETS):
        if _weights(other) == _weights(preset) and load_model(other).checkpoint.dtype == dtype:
            return Published(PRESETS[other][0], *load_model(other).checkpoint.formats, False)
    return published


def draft_to_serve(draft: str) -> tuple[str, str]:
    """Return the name of a draft for an engine, and its method if it is a head whose config.json is here."""
    try:
        method = method_of(load_model(draft))
    except ModelError:
        return draft, ""
    return (_name(draft) if method else draft), method


def _weights(preset: str) -> str:
    """Return a preset's name without its format; a preset with equal sizes may have other weights."""
    return re.sub(rf"(-({'|'.join(_FORMATS)}))+$", "", preset)


def _name(source: str | Path) -> str:
    """Return the name to pass to an engine for a model with this name."""
    preset = preset_named(str(source))
    if preset is None:
        path = Path(source)
        return str(path.parent if path.name == CONFIG_FILE or path.suffix == ".json" else path)
    folded = str(source).casefold()
    ids = PRESETS[preset]
    return next((one for one in ids if folded in (one.casefold(), one.rpartition("/")[2].casefold())), ids[0])
