"""Files that start an engine -> its flags: command lines, container files, flag files, a log line."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fastroof.checks import one_line
from fastroof.documents import parse_json, parse_toml, read_text
from fastroof.errors import TableError
from fastroof.evidence.engine_flags import ENGINE_FLAGS, spelled

MOST_BYTES: Final = 2**20
Pairs = list[tuple[str, str | None]]

_ENTRIES: Final = (
    (
        "vllm",
        re.compile(
            r"(^|/)vllm$|^vllm\.entrypoints\.(.*api_server|cli\.main)$|(^|/)vllm-openai[:@]|^dynamo\.vllm$"
        ),
    ),
    ("sglang", re.compile(r"^sglang\.launch_server$|(^|/)sglang$|^dynamo\.sglang$")),
    ("trtllm", re.compile(r"(^|/)trtllm-serve$|^dynamo\.trtllm$")),
)
"""Start of an engine's arguments in a command line."""

_IMAGE: Final = re.compile(r"(?:vllm-openai|sglang|tensorrt-llm/release)[:@]v?(\d[\w.]*)")
_WORDS_OF_COMMANDS: Final = ("serve",)
_MEASURES: Final = ["bench", "forward"]
"""Words of the command that times forwards of an engine with the same arguments."""


_LOGGED_ARGS: Final = re.compile(r"non-default args: (\{.*\})")
_LOGGED_VERSION: Final = re.compile(r"vLLM (?:API server )?version v?(\d[\w.]*)")
_FURTHER_FILES: Final = ("config", "extra_llm_api_options", "extra_engine_args")
"""Flags whose file has more flags."""

_MOST_NESTED: Final = 12


def settings_of_file(path: Path) -> tuple[str, Pairs]:
    """Read the engine name (empty if the file has none) and the flags with their values."""
    content = read_text(path, TableError, MOST_BYTES)
    suffix = path.suffix.lower()
    if suffix in (".json", ".toml", ".yaml", ".yml"):
        engine, pairs = _structured(path, _parsed(path, suffix, content))
    elif logged := _LOGGED_ARGS.search(content):
        engine, pairs = "vllm", _logged(path, logged[1])
        if version := _LOGGED_VERSION.search(content):
            pairs.append(("version", version[1]))
    else:
        engine, pairs = _command_line(str(path), content)
    return engine, [*pairs, *_further(path, pairs)]


def engine_by_flags(pairs: Pairs) -> str:
    """Return the only engine that knows all of the flags; empty if there are several or none."""
    known = [
        engine
        for engine, flags in ENGINE_FLAGS.items()
        if all(flags.knows(flag) or spelled(flag) in ("version", "gpu") for flag, _ in pairs)
    ]
    return known[0] if len(known) == 1 else ""


def _further(path: Path, pairs: Pairs) -> Iterator[tuple[str, str | None]]:
    """Read the flags of files that flags name, which may lie next to the given file."""
    for flag, value in pairs:
        if spelled(flag) not in _FURTHER_FILES or value is None:
            continue
        places = (path.parent / value, path.parent / Path(value).name)
        further = next((one for one in places if one != path and one.is_file()), None)
        if further is None:
            raise TableError(
                f"{path}: {flag} {value[:80]} has more flags and was not found; put it next to {path.name}"
            )
        content = read_text(further, TableError, MOST_BYTES)
        suffix = further.suffix.lower() if further.suffix.lower() in (".json", ".toml") else ".yaml"
        yield from _structured(further, _parsed(further, suffix, content))[1]


def _logged(path: Path, text: str) -> Pairs:
    """Read the arguments that vLLM logs at its start, as Python writes them."""
    try:
        arguments = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise TableError(f"{path}: its non-default args are not a whole dictionary: {text[:60]!r}") from None
    if not isinstance(arguments, dict):
        raise TableError(f"{path}: its non-default args are not a dictionary: {text[:60]!r}")
    return list(_flattened(arguments))


def _parsed(path: Path, suffix: str, content: str) -> Any:
    try:
        if suffix == ".json":
            return parse_json(content, str(path), TableError)
        if suffix == ".toml":
            return parse_toml(content, str(path), TableError)
        return _yaml(content)
    except TableError:
        raise
    except (ValueError, RecursionError) as error:
        raise TableError(f"{path}: invalid {suffix[1:].upper()}: {error}") from None


def _yaml(content: str) -> Any:
    import yaml

    try:
        documents = list(yaml.safe_load_all(content))
        return documents if len(documents) > 1 else (documents or [None])[0]
    except yaml.YAMLError as error:
        raise ValueError(one_line(error)) from None


def _structured(path: Path, content: Any) -> tuple[str, Pairs]:
    commands = [command for command in _container_commands(content) if _starts(command)]
    if len(commands) > 1:
        raise TableError(f"{path}: starts {len(commands)} engines; give the command line of one in a .txt")
    if commands:
        return _command_line(str(path), shlex.join(commands[0]))
    if not isinstance(content, Mapping) or not content:
        raise TableError(f"{path}: expected an engine's flags and values, found a {type(content).__name__}")
    content = dict(content)
    command = content.pop("command", None)
    engine, pairs = "", Pairs()
    if command is not None:
        if isinstance(command, list):
            command = shlex.join(map(str, command))
        if not isinstance(command, str):
            raise TableError(f"{path}: command must be text or a list of strings")
        engine, pairs = _command_line(str(path), command)
    engine_name = content.get("engine")
    if isinstance(engine_name, str) and engine_name.lower() in ENGINE_FLAGS:
        if engine and engine_name.lower() != engine:
            raise TableError(f"{path}: engine is {engine_name}, the command starts {engine}; give one")
        engine = engine_name.lower()
        del content["engine"]
    return engine, pairs + list(_flattened(content))


def _container_commands(content: Any, depth: int = 0) -> Iterator[list[str]]:
    """Return the image and the words of each container of a Compose or Kubernetes file."""
    if depth == _MOST_NESTED:
        return
    if isinstance(content, Mapping) and isinstance(content.get("image"), str):
        words = [content["image"]]
        for key in ("entrypoint", "command", "args"):
            listed = content.get(key) or []
            try:
                words += map(str, listed) if isinstance(listed, list) else shlex.split(str(listed))
            except ValueError:
                return
        yield words
    inner = content.values() if isinstance(content, Mapping) else content if isinstance(content, list) else ()
    for one in inner:
        yield from _container_commands(one, depth + 1)


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
        raise TableError(f"{where}: not a command line: {error}") from None
    words = [inner for i, word in enumerate(words) for inner in _of_shell(word, words[i - 1] if i else "")]
    starts = _starts(words)
    if not starts:
        raise TableError(
            f"{where}: no engine command; expected `vllm serve ..`, `sglang serve ..`, `trtllm-serve ..` or "
            "`python -m dynamo.vllm ..`, or its flags in a .json, .toml or .yaml"
        )
    engines = {engine for _, engine in starts}
    if len(engines) > 1:
        raise TableError(f"{where}: starts {' and '.join(sorted(engines))}; use one file per engine")
    start, engine = starts[-1] if _IMAGE.search(words[starts[0][0]]) else starts[0]
    pairs = _pairs(where, engine, words[start + 1 :])
    image = next((found for word in words[: start + 1] if (found := _IMAGE.search(word))), None)
    return engine, pairs if image is None else [*pairs, ("version", image[1])]


def _of_shell(word: str, before: str) -> list[str]:
    """Return the words of a command that a shell is given as one word."""
    if before not in ("-c", "-lc", "-ec"):
        return [word]
    try:
        return shlex.split(word)
    except ValueError:
        return [word]


def _starts(words: list[str]) -> list[tuple[int, str]]:
    """Return where the arguments of engines may start, and their engines."""
    return [
        (i, engine)
        for i, word in enumerate(words)
        for engine, entry in _ENTRIES
        if entry.search(word) and not word.startswith("-")
    ]


def _pairs(where: str, engine: str, words: list[str]) -> Pairs:
    pairs: Pairs = []
    switches = ENGINE_FLAGS[engine].switches
    # words before the first flag are the model; later ones are values of flags with several values
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
    if leading[:2] == _MEASURES:
        del leading[:2]
    if leading:
        models = [value for flag, value in pairs if spelled(flag) in ("model", "model_path")]
        if models and models[0] != leading[0]:
            raise TableError(f"{where}: model is {leading[0]} and {models[0]}; give one")
        pairs.append(("model", leading[0]))
    return pairs


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", word) is not None
