"""Reading Hugging Face config.json files: fields checked by hand, and the text model within a wrapper.

What a missing field means is what the model class in transformers takes it to mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastroof.checks import is_whole_number, whole_number
from fastroof.documents import MOST_JSON_BYTES, parse_json, read_text
from fastroof.errors import ModelError

__all__ = ["CONFIG_FILE", "TEXT_CONFIG", "Fields", "read_config"]

CONFIG_FILE: Final = "config.json"
TEXT_CONFIG: Final = "text_config"
"""Where a model that also takes images or sound keeps its text model."""

# What a wrapper may say of its text model, where that says nothing itself.
_SHARED: Final = ("tie_word_embeddings", "torch_dtype", "dtype", "_name_or_path")
_MAX_SIZE = 2**31 - 1
_MOST_LAYERS = 4096


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
    """Checked access to the fields of one config.json; every error names the file and the field."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def error(self, message: str) -> ModelError:
        """Error about this file."""
        return ModelError(f"{self.where}: {message}")

    def has(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self.config.get(key) is not None

    def text_model(self) -> Fields:
        """Fields of the text model: of ``text_config`` in a wrapper, these themselves elsewhere."""
        inner = self.config.get(TEXT_CONFIG)
        if inner is None:
            return self
        if not isinstance(inner, Mapping):
            raise self.error(f"field {TEXT_CONFIG} must be an object, got {type(inner).__name__}")
        shared = {key: self.config[key] for key in _SHARED if self.has(key)}
        return Fields({**shared, **inner}, f"{self.where}, {TEXT_CONFIG}")

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """The same fields, and what missing ones mean."""
        return Fields({**defaults, **self.config}, self.where)

    def size(self, key: str, *others: str) -> int:
        """Value of a required field that counts something: a whole number of at least 1."""
        named = next((name for name in (key, *others) if name in self.config), None)
        if named is None:
            raise self.error(f"field {key} is missing")
        value = self.config[named]
        return whole_number(f"{self.where}: field {named}", value, most=_MAX_SIZE, error=ModelError)

    @property
    def num_layers(self) -> int:
        """Layers of the model; no list of more than a few thousand is made."""
        named = f"{self.where}: field num_hidden_layers"
        if "num_hidden_layers" not in self.config:
            raise self.error("field num_hidden_layers is missing")
        return whole_number(named, self.config["num_hidden_layers"], most=_MOST_LAYERS, error=ModelError)

    def optional_size(self, key: str, default: int | None = None) -> int | None:
        """As :meth:`size`, or the default where the field is null or missing."""
        return self.size(key) if self.has(key) else default

    def size_or(self, key: str, default: int) -> int:
        """As :meth:`size`, or the default where the field is null or missing."""
        return self.size(key) if self.has(key) else default

    def count(self, key: str, default: int = 0) -> int:
        """Value of a field that counts something of which there may be none."""
        value = self.config.get(key)
        if value is None:
            return default
        return whole_number(f"{self.where}: field {key}", value, least=0, most=_MAX_SIZE, error=ModelError)

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

    def numbers(self, key: str) -> list[int] | None:
        """Value of a field that lists whole numbers from 0, or None where it is null or missing."""
        value = self.config.get(key)
        if value is not None and not (isinstance(value, list) and all(is_whole_number(v, 0) for v in value)):
            raise self.error(f"field {key} must be a list of whole numbers, got {value!r}")
        return value

    def parts(self, key: str) -> list[Fields] | None:
        """Value of a field that lists objects, or None where it is null or missing."""
        value = self.config.get(key)
        if value is None:
            return None
        if not (isinstance(value, list) and all(isinstance(v, Mapping) for v in value)):
            raise self.error(f"field {key} must be a list of objects, got {type(value).__name__}")
        return [Fields(part, f"{self.where}, {key}[{i}]") for i, part in enumerate(value)]

    def part(self, key: str) -> Fields | None:
        """Value of a field that is an object, or None where it is null or missing."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"field {key} must be an object, got {type(value).__name__}")
        return Fields(value, f"{self.where}, {key}")

    def of_layers(self, key: str, values: list[Any] | None, num_layers: int) -> list[Any] | None:
        """A list with a value a layer; of another length it is an error."""
        if values is not None and len(values) != num_layers:
            raise self.error(f"{key} has {len(values)} layers, num_hidden_layers is {num_layers}")
        return values
