"""Documents as YAML: every text in double quotes, so that none of it can be anything else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["yaml_documents"]

_NOT_TEXT: Final = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
"""Words that YAML takes for something else than text, in some version of it."""


def yaml_documents(*documents: Mapping[str, Any]) -> str:
    """Write documents of mappings, lists, texts, numbers and booleans, in block style."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        lines = []
        for key, item in value.items():
            lines += _entry(f"{_key(key)}:", item)
        return lines
    lines = []
    for item in value:
        if _is_nested(item):
            first, *others = _lines(item)
            lines += [f"- {first}", *(f"  {line}" for line in others)]
        else:
            lines.append(f"- {_scalar(item)}")
    return lines


def _entry(key: str, item: Any) -> list[str]:
    if _is_nested(item):
        return [key, *(f"  {line}" for line in _lines(item))]
    return [f"{key} {_scalar(item)}"]


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) and bool(value)


def _key(key: str) -> str:
    is_word = re.fullmatch(r"[A-Za-z][A-Za-z_./-]*", key) is not None
    return key if is_word and key.lower() not in _NOT_TEXT else _text(key)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _text(value: str) -> str:
    """A text in double quotes, in ASCII: JSON's, but that YAML knows no pairs of surrogates."""
    return re.sub(r"[^\x20-\x7e]", lambda found: _escaped(found[0]), json.dumps(value, ensure_ascii=False))


def _escaped(letter: str) -> str:
    code = ord(letter)
    return f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"
