"""Reading Hugging Face config.json files: checked fields, and the text model within a wrapper.

Missing fields have the defaults of the model class in transformers.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from fastroof.checks import is_number, is_whole_number, shown, whole_number
from fastroof.documents import MOST_JSON_BYTES, parse_json, read_text
from fastroof.errors import ModelError

CONFIG_FILE: Final = "config.json"
TEXT_CONFIG: Final = "text_config"
"""Field that holds the text model in files of multimodal models."""

# Fields of a wrapper that apply to its text model if missing there.
_SHARED: Final = ("tie_word_embeddings", "torch_dtype", "dtype", "_name_or_path")
_MOST_LAYERS = 4096
MOST: Final = 2**31 - 1
"""Maximum of sizes in configurations and of a model."""


def read_config(path: Path) -> Mapping[str, Any]:
    """Return the contents of a config.json."""
    text = read_text(path, ModelError, MOST_JSON_BYTES)
    if not text.strip():
        raise ModelError(f"{path} is empty; it should hold a Hugging Face config.json")
    config = parse_json(text, str(path), ModelError)
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


class Fields:
    """Checked access to the fields of one config.json; each error names the file and the field."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def error(self, message: str) -> ModelError:
        """Return an error about this file."""
        return ModelError(f"{self.where}: {message}")

    def has(self, key: str) -> bool:
        """Return whether the field is present and not null."""
        return self.config.get(key) is not None

    def text_model(self) -> Fields:
        """Return the text model's fields: ``text_config`` in a wrapper, else these fields."""
        inner = self.config.get(TEXT_CONFIG)
        if inner is None:
            return self
        if not isinstance(inner, Mapping):
            raise self.error(f"field {TEXT_CONFIG} must be an object, got {type(inner).__name__}")
        shared = {key: self.config[key] for key in _SHARED if self.has(key)}
        return Fields({**shared, **inner}, f"{self.where}, {TEXT_CONFIG}")

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """Return the fields with defaults for missing ones."""
        return Fields({**defaults, **self.config}, self.where)

    def size(self, key: str, *others: str) -> int:
        """Return a required size: a whole number of at least 1."""
        key_present = next((name for name in (key, *others) if name in self.config), None)
        if key_present is None:
            raise self.error(f"field {key} is missing")
        value = self.config[key_present]
        return whole_number(f"{self.where}: field {key_present}", value, most=MOST, error=ModelError)

    @property
    def num_layers(self) -> int:
        """Number of layers of the model, limited to a few thousand so that lists of them stay small."""
        field_name = f"{self.where}: field num_hidden_layers"
        if "num_hidden_layers" not in self.config:
            raise self.error("field num_hidden_layers is missing")
        return whole_number(field_name, self.config["num_hidden_layers"], most=_MOST_LAYERS, error=ModelError)

    def optional_size(self, key: str, default: int | None = None) -> int | None:
        """Like :meth:`size`, or the default if the field is null or missing."""
        return self.size(key) if self.has(key) else default

    def size_or(self, key: str, default: int) -> int:
        """Like :meth:`size`, or the default if the field is null or missing."""
        return self.size(key) if self.has(key) else default

    def count(self, key: str, default: int = 0) -> int:
        """Return a count that may be 0."""
        value = self.config.get(key)
        if value is None:
            return default
        return whole_number(f"{self.where}: field {key}", value, least=0, most=MOST, error=ModelError)

    def flag(self, key: str, default: bool) -> bool:
        """Return a true/false field; null counts as missing."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"field {key} must be true or false, got {value!r}")
        return value

    def text(self, key: str) -> str | None:
        """Return a text field, or None if it is null or missing."""
        value = self.config.get(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise self.error(f"field {key} must be text, got {value!r}")
        return value

    def texts(self, key: str) -> list[str] | None:
        """Return a list of names, or None if the field is null or missing."""
        value = self.config.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            raise self.error(f"field {key} must be a list of names, got {value!r}")
        return value

    def numbers(self, key: str) -> list[int] | None:
        """Return a list of whole numbers from 0, or None if the field is null or missing."""
        value = self.config.get(key)
        if value is not None and not (isinstance(value, list) and all(is_whole_number(v, 0) for v in value)):
            raise self.error(f"field {key} must be a list of whole numbers, got {value!r}")
        return value

    def parts(self, key: str) -> list[Fields] | None:
        """Return a list of objects, or None if the field is null or missing."""
        value = self.config.get(key)
        if value is None:
            return None
        if not (isinstance(value, list) and all(isinstance(v, Mapping) for v in value)):
            raise self.error(f"field {key} must be a list of objects, got {type(value).__name__}")
        return [Fields(part, f"{self.where}, {key}[{i}]") for i, part in enumerate(value)]

    def part(self, key: str) -> Fields | None:
        """Return an object, or None if the field is null or missing."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"field {key} must be an object, got {type(value).__name__}")
        return Fields(value, f"{self.where}, {key}")

    def of_layers(self, key: str, values: list[Any] | None, num_layers: int) -> list[Any] | None:
        """Return a list with one value per layer; another length is an error."""
        if values is not None and len(values) != num_layers:
            raise self.error(f"{key} has {len(values)} layers, num_hidden_layers is {num_layers}")
        return values

    def layer_words(self, key: str, valid: tuple[str, str]) -> list[str] | None:
        """Return one of two words per layer, or None if the field is null or missing."""
        words = self.of_layers(key, self.texts(key), self.num_layers)
        if other := sorted(set(words or ()) - set(valid)):
            raise self.error(f"field {key} has {', '.join(other)}: {' and '.join(valid)} are valid")
        return words


Part = TypeVar("Part", bound=type)
_Check = Callable[[Any], bool]


def checked_fields(part: Part) -> Part:
    """Decorate a dataclass to reject fields not of their declared types; use below ``@dataclass``."""
    post_init: Any = getattr(part, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        """Check all fields against their declared types."""
        # run once for all fields, even if a subclass calls this method of its base class too
        if type(self).__post_init__ is __post_init__:
            _check_fields(self)
        if post_init is not None:
            post_init(self)

    part.__post_init__ = __post_init__  # type: ignore[attr-defined]
    return part


def _check_fields(part: Any) -> None:
    for name, check, needed, is_int in _checks(part.__class__):
        value = getattr(part, name)
        if not check(value):
            raise ModelError(f"{type(part).__name__}: {name} must be {needed}, got {shown(value)}")
        if is_int and type(value) is not int and is_whole_number(value, 0):
            object.__setattr__(part, name, int(value))


@functools.cache
def _checks(part: Any) -> tuple[tuple[str, _Check, str, bool], ...]:
    hints = get_type_hints(part)
    checks = []
    for field in fields(part):
        check, needed = _check_of(hints[field.name])
        hint = hints[field.name]
        checks.append((field.name, check, needed, hint is int or int in get_args(hint)))
    return tuple(checks)


def _check_of(hint: Any) -> tuple[_Check, str]:
    """Return the check for a type, and its description in messages."""
    if hint is Any or isinstance(hint, TypeVar):
        return lambda value: True, "anything"
    if hint is None or hint is type(None):
        return lambda value: value is None, "None"
    if hint is bool:
        return lambda value: value is True or value is False, "True or False"
    if hint is int:
        return lambda value: is_whole_number(value, 0, MOST), f"a whole number from 0 to {MOST:,}"
    if hint is float:
        return is_number, "a finite number"
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        several = [_check_of(one) for one in arguments]
        return lambda value: any(check(value) for check, _ in several), " or ".join(
            text for _, text in several
        )
    if origin is typing.Literal:
        listed = ", ".join(map(repr, arguments))
        return lambda value: isinstance(value, str | int) and value in arguments, f"one of {listed}"
    if origin is tuple:
        return _check_of_tuple(arguments)
    kind = origin if origin is not None else hint
    if getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False):
        # the bases of a protocol are protocols, and Python's own have no public functions
        names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"]
        return lambda value: all(
            hasattr(value, name) for name in names
        ), f"an object with the methods of {kind.__name__}"
    return lambda value: isinstance(value, kind), "text" if kind is str else f"a {kind.__name__}"


def _check_of_tuple(arguments: tuple[Any, ...]) -> tuple[_Check, str]:
    if len(arguments) == 2 and arguments[1] is ...:
        check, needed = _check_of(arguments[0])
        return lambda value: isinstance(value, tuple) and all(map(check, value)), f"a tuple, each {needed}"
    several = [_check_of(one)[0] for one in arguments]
    text = ", ".join(_check_of(one)[1] for one in arguments)

    def check_all(value: Any) -> bool:
        is_one = isinstance(value, tuple) and len(value) == len(several)
        return is_one and all(check(one) for check, one in zip(several, value, strict=True))

    return check_all, f"a tuple of {text}"


_POSITIONS: Final = "max_position_embeddings"
_ORIGINAL: Final = "original_max_position_embeddings"
_SCALED: Final = ("linear", "dynamic", "ntk", "yarn")
"""Scaling types whose factor counts; for others (llama3, longrope) the positions include it."""


def longest_context(fields: Fields, family: str) -> int:
    """Return the maximum number of tokens of a sequence, scaled as in vLLM's ``max_model_len``."""
    positions = fields.size(_POSITIONS)
    # transformers 5 writes rope_parameters instead of rope_scaling
    scaling = fields.part("rope_scaling") or fields.part("rope_parameters")
    if scaling is None or family.startswith("gemma3"):
        return positions
    kind = scaling.text("rope_type") or scaling.text("type")
    factor = scaling.config.get("factor")
    if kind not in _SCALED or factor is None:
        return positions
    if not is_number(factor) or not math.isfinite(factor) or factor <= 0.0:
        raise scaling.error(f"field factor must be a number above 0, got {shown(factor)}")
    original = scaling.size(_ORIGINAL) if kind == "yarn" and scaling.has(_ORIGINAL) else positions
    # limited before it becomes an integer: an overflowing product is inf
    return max(positions, int(min(original * factor, MOST)))


_WRAPPED: Final = ("vision_config", "audio_config")
_LINEAR: Final = "linear_attention"
_LINEAR_FIELDS: Final = ("full_attention_interval", "linear_attn_config")
_KNOWN_LAYERS: Final = frozenset(
    {
        "full_attention", "sliding_attention", "chunked_attention", "deepseek_sparse_attention",
        "attention", "mamba", "conv", _LINEAR,
    }
)  # fmt: skip
_OF_SOME_LAYERS: Final = {"mamba": "Mamba-2", "conv": "short convolutions"}
"""Kinds of layers that only families have which read ``layer_types``."""

_OF_SOME_FAMILIES: Final = {
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "num_routed_experts": "experts",
    "moe_num_experts": "experts",
    "attention_chunk_size": "chunked attention",
    "kv_lora_rank": "latent attention",
    "index_topk": "sparse attention",
    "sparse_attention_config": "sparse attention",
    "compress_ratios": "a compressed cache",
    **dict.fromkeys(_LINEAR_FIELDS, "linear attention"),
}


def missing_operators(fields: Fields, flat_wrappers: Collection[str] = ()) -> list[str]:
    """Return the operators that this model needs and plans do not support, each with its field.

    ``flat_wrappers`` are the model types whose files need no ``text_config``.
    """
    config = fields.config
    text = config.get(TEXT_CONFIG)
    inner = text if isinstance(text, Mapping) else config
    missing = []
    kinds = inner.get("layer_types")
    other = sorted({str(k) for k in kinds} - _KNOWN_LAYERS) if isinstance(kinds, list) else []
    if other:
        missing.append(f"it needs a hybrid attention operator (layer_types {', '.join(other)})")
    is_wrapped = text is None and config.get("model_type") not in tuple(flat_wrappers)
    if is_wrapped and (wrapped := [key for key in _WRAPPED if config.get(key) is not None]):
        missing.append(f"it is multimodal ({', '.join(wrapped)}) without a {TEXT_CONFIG}")
    return missing


def unread_parts(fields: Fields, reads: tuple[str, ...], family: str) -> list[str]:
    """Return parts in a text model's file that its family does not support, each with its field."""
    config = fields.config
    found = {key: what for key, what in _OF_SOME_FAMILIES.items() if config.get(key) and key not in reads}
    parts = [f"{key} {_shortened(config[key])} means {what}" for key, what in found.items()]
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and _LINEAR in kinds and not set(_LINEAR_FIELDS).intersection(reads):
        parts.append(f"layer_types {_LINEAR} means linear attention")
    if isinstance(kinds, list) and "layer_types" not in reads:
        parts += [
            f"layer_types {kind} means {what}" for kind, what in _OF_SOME_LAYERS.items() if kind in kinds
        ]
    return [f"{part}, which {family} models do not have" for part in parts]


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
