"""Files that say how an engine was started: its command line, or its flags as JSON, TOML or YAML."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fastroof.documents import parse_json, parse_toml, read_text
from fastroof.errors import TableError
from fastroof.serving.evidence.engine_flags import ENGINE_FLAGS, spelled

__all__ = ["settings_of_file"]

MOST_BYTES: Final = 2**20
Pairs = list[tuple[str, str | None]]

_ENTRIES: Final = (
    ("vllm", re.compile(r"(^|/)vllm$|^vllm\.entrypoints\..*api_server$|(^|/)vllm-openai[:@]")),
    ("sglang", re.compile(r"^sglang\.launch_server$|(^|/)sglang$")),
    ("trtllm", re.compile(r"(^|/)trtllm-serve$")),
)
"""What begins the arguments of an engine in a command line."""

_IMAGE: Final = re.compile(r"(?:vllm-openai|sglang|tensorrt-llm/release)[:@]v?(\d[\w.]*)")
_WORDS_OF_COMMANDS: Final = ("serve",)


def settings_of_file(path: Path) -> tuple[str, Pairs]:
    """Read an engine's name, empty where the file does not say it, and flags with their values.

    Raises
    ------
    TableError
        If it cannot be read, or is not what its name says.
    """
    content = read_text(path, TableError, MOST_BYTES)
    suffix = path.suffix.lower()
    if suffix in (".json", ".toml", ".yaml", ".yml"):
        return _structured(path, _parsed(path, suffix, content))
    return _command_line(str(path), content)


def _parsed(path: Path, suffix: str, content: str) -> Any:
    try:
        if suffix == ".json":
            return parse_json(content, str(path), TableError)
        if suffix == ".toml":
            return parse_toml(content, str(path), TableError)
        return _yaml(path, content)
    except TableError:
        raise
    except (ValueError, RecursionError) as error:
        raise TableError(f"{path}: not whole {suffix[1:].upper()}: {error}") from None


def _yaml(path: Path, content: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise TableError(
            f"{path}: YAML needs PyYAML (pip install pyyaml); or give the command line in a .txt, or JSON, "
            "or TOML"
        ) from None
    try:
        return yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ValueError(error) from None


def _structured(path: Path, content: Any) -> tuple[str, Pairs]:
    if not isinstance(content, Mapping) or not content:
        raise TableError(f"{path}: need an engine's flags and values, found a {type(content).__name__}")
    content = dict(content)
    command = content.pop("command", None)
    engine, pairs = "", Pairs()
    if command is not None:
        if isinstance(command, list):
            command = shlex.join(map(str, command))
        if not isinstance(command, str):
            raise TableError(f"{path}: command must be a text or a list of words")
        engine, pairs = _command_line(str(path), command)
    named = content.get("engine")
    if isinstance(named, str) and named.lower() in ENGINE_FLAGS:
        if engine and named.lower() != engine:
            raise TableError(f"{path}: engine is {named}, the command starts {engine}; give one")
        engine = named.lower()
        del content["engine"]
    return engine, pairs + list(_flattened(content))


def _flattened(
    content: Mapping[Any, Any], before: str = "", depth: int = 0
) -> Iterator[tuple[str, str | None]]:
    for key, value in content.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping) and depth < 3:
            yield from _flattened(value, f"{name}.", depth + 1)
        elif value is None:
            continue
        elif isinstance(value, bool):
            yield name, "true" if value else "false"
        elif isinstance(value, str | int | float):
            yield name, str(value) if not isinstance(value, int) or abs(value) < 10**18 else "too large"
        else:
            yield name, json.dumps(value, default=str)[:200]


def _command_line(where: str, content: str) -> tuple[str, Pairs]:
    content = re.sub(r"\\\r?\n", " ", content)
    lines = [line for line in content.splitlines() if not line.lstrip().startswith("#")]
    try:
        words = shlex.split("\n".join(lines), comments=True)
    except ValueError as error:
        raise TableError(f"{where}: no command line: {error}") from None
    starts = [
        (i, engine)
        for i, word in enumerate(words)
        for engine, entry in _ENTRIES
        if entry.search(word) and not word.startswith("-")
    ]
    if not starts:
        raise TableError(
            f"{where}: no command of an engine; need `vllm serve ..`, `python -m sglang.launch_server ..` or "
            "`trtllm-serve ..`, or its flags in a .json, .toml or .yaml"
        )
    engines = {engine for _, engine in starts}
    if len(engines) > 1:
        raise TableError(f"{where}: starts {' and '.join(sorted(engines))}; give each engine a file")
    start, engine = starts[-1] if _is_image(words[starts[0][0]]) else starts[0]
    pairs = _pairs(where, engine, words[start + 1 :])
    image = next((found for word in words[: start + 1] if (found := _IMAGE.search(word))), None)
    return engine, pairs if image is None else [*pairs, ("version", image[1])]


def _is_image(word: str) -> bool:
    return _IMAGE.search(word) is not None


def _pairs(where: str, engine: str, words: list[str]) -> Pairs:
    pairs: Pairs = []
    switches = ENGINE_FLAGS[engine].switches
    # words before the first flag: the model; later ones are values of flags that take several
    leading: list[str] = []
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if word in ("&&", ";", "|", "&", "||") or word.startswith((">", "2>")):
            break
        if not word.startswith("-") or _is_number(word):
            if not pairs and word not in _WORDS_OF_COMMANDS:
                leading.append(word)
            continue
        flag, equals, value = word.partition("=")
        if equals:
            pairs.append((flag, value))
            continue
        takes_one = i < len(words) and (not words[i].startswith("-") or _is_number(words[i]))
        if takes_one and (spelled(flag) not in switches or words[i].lower() in ("true", "false")):
            pairs.append((flag, words[i]))
            i += 1
        else:
            pairs.append((flag, None))
    if leading:
        named = [value for flag, value in pairs if spelled(flag) in ("model", "model_path")]
        if named and named[0] != leading[0]:
            raise TableError(f"{where}: model is {leading[0]} and {named[0]}; give one")
        pairs.append(("model", leading[0]))
    return pairs


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", word) is not None
