"""Files that start an engine -> its flags: command lines, container files, flag files, a log line."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from fastroof.checks import shown
from fastroof.documents import parse_json, parse_toml, parse_yaml, read_text
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

MOST_NODES: Final = 100_000
"""Maximum number of values of a file that are looked at for engines."""

_VARIABLE: Final = re.compile(r"\$[({]?([A-Za-z_]\w*)[)}]?")


class EngineFile(NamedTuple):
    """The engine of a file (empty if it has none), flags and values, and where its kind has settings."""

    engine: str
    pairs: Pairs
    places: Mapping[str, str] = MappingProxyType({})


def settings_of_file(path: Path) -> EngineFile:
    """Read the engine that a file starts."""
    content = read_text(path, TableError, MOST_BYTES)
    suffix = path.suffix.lower()
    if suffix in (".json", ".toml", ".yaml", ".yml"):
        found = _structured(path, _parsed(path, suffix, content))
    elif logged := _LOGGED_ARGS.search(content):
        found = EngineFile("vllm", _logged(path, logged[1]))
        if version := _LOGGED_VERSION.search(content):
            found.pairs.append(("version", version[1]))
    else:
        found = _command_line(str(path), content)
    return found._replace(pairs=[*found.pairs, *_further(path, found.pairs)])


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
        yield from _structured(further, _parsed(further, suffix, content)).pairs


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
    if suffix == ".json":
        return parse_json(content, str(path), TableError)
    if suffix == ".toml":
        return parse_toml(content, str(path), TableError)
    documents = parse_yaml(content, str(path), TableError)
    return documents if len(documents) > 1 else (documents or [None])[0]


def _structured(path: Path, content: Any) -> EngineFile:
    found = list(_launches(path, content))
    parts = [one for one in found if one.kind.is_part]
    if parts:
        # an engine in several documents
        flags = {name: value for one in parts for name, value in one.flags.items()}
        named = {name: value for one in reversed(parts) for name, value in one.named.items()}
        found = [one for one in found if one not in parts] + [parts[0]._replace(flags=flags, named=named)]
    if len(found) > 1:
        raise TableError(f"{path}: starts {len(found)} engines; give the command line of one in a .txt")
    if found:
        return _of_launch(path, found[0])
    if not isinstance(content, Mapping) or not content:
        raise TableError(f"{path}: expected an engine's flags and values, found a {type(content).__name__}")
    if not content.keys().isdisjoint(_MANIFEST):
        kind = content.get("kind", "a manifest")
        raise TableError(
            f"{path}: {shown(kind)} without an engine: expected a container that starts one, or "
            f"{', '.join(one.name for one in KINDS)}"
        )
    content = dict(content)
    command = content.pop("command", None)
    engine, pairs = "", Pairs()
    if command is not None:
        if isinstance(command, list):
            command = shlex.join(map(str, command))
        if not isinstance(command, str):
            raise TableError(f"{path}: command must be text or a list of strings")
        engine, pairs, _ = _command_line(str(path), command)
    engine_name = content.get("engine")
    if isinstance(engine_name, str) and engine_name.lower() in ENGINE_FLAGS:
        if engine and engine_name.lower() != engine:
            raise TableError(f"{path}: engine is {engine_name}, the command starts {engine}; give one")
        engine = engine_name.lower()
        del content["engine"]
    return EngineFile(engine, pairs + list(_flattened(content)))


Place = tuple[str | int, ...]
"""Keys of nested tables, and places in lists."""


class Kind(NamedTuple):
    """Where a kind of document states an engine: ``marks`` tell it from others, ``named`` has settings."""

    name: str
    marks: tuple[Place, ...] = ()
    container: Place = ()
    flags: Place = ()
    named: Mapping[str, tuple[Place, ...]] = MappingProxyType({})
    is_part: bool = False


_CONTAINER: Final = Kind("a container")

KINDS: Final = (
    Kind(
        "Ray Serve LLM", (("model_loading_config",),), flags=("engine_kwargs",),
        named={
            "model": (("model_loading_config", "model_source"), ("model_loading_config", "model_id")),
            "gpu": (("accelerator_type",),),
        },
    ),
    Kind(
        "kaito", (("inference", "preset"),), is_part=True,
        named={"model": (("inference", "preset", "name"),), "gpu": (("resource", "instanceType"),)},
    ),
    Kind(
        "kaito", (("inference_config.yaml",),), flags=("inference_config.yaml", "vllm"), is_part=True
    ),
    Kind(
        "KServe", (("predictor", "model"),), ("predictor", "model"),
        named={"model": (("predictor", "model", "storageUri"),)},
    ),
    Kind(
        "KServe's LLMInferenceService", (("model", "uri"),), ("template", "containers", 0),
        named={
            "model": (("model", "uri"),), "tp": (("parallelism", "tensor"),),
            "dp": (("parallelism", "data"),), "enable_expert_parallel": (("parallelism", "expert"),),
        },
    ),
    Kind(
        "llm-d values", (("modelArtifacts",), ("decode",)), ("decode", "containers", 0),
        named={
            "model": (("modelArtifacts", "uri"), ("modelArtifacts", "name")),
            "tp": (("decode", "parallelism", "tensor"),), "dp": (("decode", "parallelism", "data"),),
        },
    ),
)  # fmt: skip
"""Documents other than containers, all of vLLM: Ray 2.58 (serve/llm), kaito v1beta1 with its ConfigMap,
KServe v1beta1 and v1alpha1, and the values of llm-d-modelservice 0.4. Dynamo's components have containers."""

_MANIFEST: Final = frozenset(("apiVersion", "kind", "services", "applications", "containers", "spec"))
_EMBEDDED: Final = ("serveConfigV2",)
"""Keys whose text is YAML with a document."""

INSTANCES: Final[Mapping[str, tuple[str, int]]] = {
    "nc24ads_a100_v4": ("a100_pcie", 1), "nc48ads_a100_v4": ("a100_pcie", 2),
    "nc96ads_a100_v4": ("a100_pcie", 4), "nd96asr_v4": ("a100_40gb", 8), "nd96amsr_a100_v4": ("a100", 8),
    "nc40ads_h100_v5": ("h100_nvl", 1), "nc80adis_h100_v5": ("h100_nvl", 2), "nd96isr_h100_v5": ("h100", 8),
    "nd96isr_h200_v5": ("h200", 8), "nd96isr_mi300x_v5": ("mi300x", 8),
}  # fmt: skip
"""GPUs of Azure's machines, whose number is kaito's tensor parallelism."""


class _Launch(NamedTuple):
    """An engine of a document: the words of its container, its flags, and settings that others name."""

    kind: Kind
    words: tuple[str, ...] = ()
    flags: Mapping[str, Any] = MappingProxyType({})
    named: Mapping[str, str] = MappingProxyType({})


def _launches(path: Path, content: Any) -> Iterator[_Launch]:
    """Yield the engines of documents, of any kind and depth."""
    nodes, visited = [content], 0
    while nodes:
        node = nodes.pop()
        visited += 1
        if visited > MOST_NODES:
            raise TableError(f"{path}: more than {MOST_NODES:,} values; give the engine's part alone")
        if isinstance(node, list):
            nodes += reversed(node)
        if not isinstance(node, Mapping):
            continue
        kind = next((one for one in KINDS if all(_at(node, mark) is not None for mark in one.marks)), None)
        if kind is not None:
            yield _of_kind(path, kind, node)
            continue
        is_named = isinstance(node.get("name"), str) and not node.keys().isdisjoint(("command", "args"))
        if isinstance(node.get("image"), str) or is_named:
            words = _words_of(node)
            if _starts(list(words)):
                yield _Launch(_CONTAINER, words)
        nodes += [one for key, one in node.items() if key not in _EMBEDDED]
        nodes += [
            parse_yaml(one, f"{path}: {key}", TableError)
            for key, one in node.items()
            if key in _EMBEDDED and isinstance(one, str)
        ]


def _of_kind(path: Path, kind: Kind, node: Mapping[Any, Any]) -> _Launch:
    container, flags = _at(node, kind.container), _at(node, kind.flags)
    prefill = node.get("prefill")
    if isinstance(prefill, Mapping) and prefill.get("create", True) and prefill.get("replicas", 1):
        raise TableError(f"{path}: {kind.name}: prompts and outputs are computed by separate engines")
    named = {}
    for setting, places in kind.named.items():
        value = next((found for place in places if (found := _at(node, place)) is not None), None)
        if isinstance(value, str | int | float):
            named[setting] = re.sub("^(hf|oci|s3|gs|pvc)://", "", str(value))
    if kind.is_part and (known := INSTANCES.get(named.pop("gpu", "").lower().removeprefix("standard_"))):
        named |= {"gpu": known[0], "tp": str(known[1])}
    return _Launch(
        kind,
        _words_of(container) if kind.container and isinstance(container, Mapping) else (),
        flags if kind.flags and isinstance(flags, Mapping) else {},
        named,
    )


def _of_launch(path: Path, launch: _Launch) -> EngineFile:
    words, kind = list(launch.words), launch.kind
    if kind is _CONTAINER or _starts(words):
        engine, pairs, _ = _command_line(str(path), shlex.join(words))
    else:
        engine = "vllm"
        # without a command, all words are arguments
        at = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
        pairs = _pairs(str(path), engine, words[at:])
    pairs += _flattened(launch.flags)
    given = {ENGINE_FLAGS[engine].settings.get(spelled(flag), spelled(flag)) for flag, _ in pairs}
    pairs += [(name, value) for name, value in launch.named.items() if name not in given]
    places = {name: ".".join(map(str, found[0])) for name, found in kind.named.items()}
    return EngineFile(engine, pairs, {name: f"{place} of {kind.name}" for name, place in places.items()})


def _at(node: Any, place: Place) -> Any:
    """Return the value at a place, None if missing; text under a key that ends in .yaml is parsed."""
    for before, key in zip(("", *place), place, strict=False):
        if isinstance(node, str) and str(before).endswith(".yaml"):
            node = parse_yaml(node, f"a ConfigMap's {before}", TableError)[:1]
            node = node[0] if node else None
        if isinstance(node, Mapping):
            node = node.get(key)
        elif isinstance(node, list) and isinstance(key, int) and key < len(node):
            node = node[key]
        else:
            return None
    return node


def _words_of(container: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return the image and all words of a container, those of a shell's command too, with its variables."""
    image, words = container.get("image"), list[str]()
    values = _variables(container.get("env", container.get("environment")))
    try:
        for key in ("entrypoint", "command", "args"):
            listed = container.get(key) or []
            words += map(str, listed) if isinstance(listed, list) else shlex.split(str(listed))
        words += shlex.split(values.get("VLLM_ADDITIONAL_ARGS", ""))
    except ValueError:
        return ()
    inner = [one for i, word in enumerate(words) for one in _of_shell(word, words[i - 1] if i else "")]
    filled = (_VARIABLE.sub(lambda found: values.get(found[1], found[0]), word) for word in inner)
    return (*([image] if isinstance(image, str) else []), *filled)


def _variables(env: Any) -> dict[str, str]:
    """Return the environment of a container: a list of names and values, of texts, or a table."""
    if isinstance(env, Mapping):
        return {str(name): str(value) for name, value in env.items()}
    found = {}
    for one in env if isinstance(env, list) else ():
        if isinstance(one, Mapping) and "value" in one:
            found[str(one.get("name"))] = str(one["value"])
        elif isinstance(one, str):
            name, _, found[name] = one.partition("=")
    return found


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


def _command_line(where: str, content: str) -> EngineFile:
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
    return EngineFile(engine, pairs if image is None else [*pairs, ("version", image[1])])


def _of_shell(word: str, before: str) -> list[str]:
    """Return the words of a command that a shell is given as one word."""
    if before not in ("-c", "-lc", "-ec"):
        return [word]
    try:
        return shlex.split(re.sub(r"\\\r?\n", " ", word), comments=True)
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
