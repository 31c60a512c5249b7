"""Read the options of engines' commands out of their wheels, from the source alone: nothing is imported.

What is read of an option: its other spellings, default and choices as far as the source states them as
literals, and whether it is deprecated, with its replacement. No text of the wheels is kept.
"""

from __future__ import annotations

import ast
import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from email.parser import HeaderParser
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from tests.engines.arguments import Option, Recorded
from tests.engines.arguments.source import Field, Source, called, flat, keywords_of


class Command(NamedTuple):
    """Where a command's options are: files whose calls add options, classes whose fields are options.

    ``files`` begin with the command's own. ``annotated`` marks fields that are options (SGLang's ``A``), and
    ``takes_also`` is a package whose server's options the command takes too.
    """

    name: str
    files: tuple[str, ...]
    fields_of: tuple[str, ...] = ()
    annotated: str = ""
    takes_also: str = ""


class Package(NamedTuple):
    """A package on PyPI: its engine and program, commands, and files that define defaults and choices."""

    engine: str
    program: str
    commands: tuple[Command, ...]
    definitions: tuple[str, ...] = ()


_VLLM = "vllm/engine/arg_utils.py", "vllm/entrypoints/*/cli_args.py", "vllm/entrypoints/cli/serve.py"
_VLLM_DATASETS = "vllm/benchmarks/datasets.py", "vllm/benchmarks/datasets/datasets.py"
_SGLANG = "sglang/srt/server_args.py", "sglang/srt/arg_groups/fields/*.py"
_SGLANG_BENCHMARK = (
    "sglang/benchmark/serving.py",
    "sglang/benchmark/datasets/common.py",
    "sglang/benchmark/datasets/__init__.py",
)
_DYNAMO = "dynamo/common/configuration/groups/runtime_args.py"
PACKAGES = {
    "vllm": Package(
        "vllm",
        "vLLM",
        (
            Command("vllm serve", _VLLM, ("FrontendArgs", "BaseFrontendArgs")),
            Command("vllm bench serve", ("vllm/benchmarks/serve.py", *_VLLM_DATASETS)),
            Command("vllm bench forward", ("vllm/benchmarks/forward/*.py",), takes_also="vllm"),
        ),
        ("vllm/config/*.py", "vllm/model_executor/layers/quantization/__init__.py"),
    ),
    "sglang": Package(
        "sglang",
        "SGLang",
        (
            Command("sglang serve", ("sglang/cli/serve.py", *_SGLANG), annotated="A"),
            Command("python3 -m sglang.launch_server", ("sglang/launch_server.py", *_SGLANG), annotated="A"),
            Command("python3 -m sglang.benchmark.serving", _SGLANG_BENCHMARK),
            Command("python3 -m sglang.bench_serving", ("sglang/bench_serving.py", *_SGLANG_BENCHMARK)),
        ),
        ("sglang/srt/arg_groups/choices.py", "sglang/srt/configs/*.py"),
    ),
    "ai-dynamo": Package(
        "dynamo",
        "Dynamo",
        (
            Command("python3 -m dynamo.vllm", ("dynamo/vllm/backend_args.py", _DYNAMO), takes_also="vllm"),
            Command(
                "python3 -m dynamo.sglang", ("dynamo/sglang/backend_args.py", _DYNAMO), takes_also="sglang"
            ),
            # which passes a YAML on, and no options
            Command("python3 -m dynamo.trtllm", ("dynamo/trtllm/backend_args.py", _DYNAMO)),
        ),
        ("dynamo/common/constants.py", "dynamo/*/constants.py"),
    ),
    "vllm-router": Package(
        "vllm_router", "vllm-router", (Command("vllm-router", ("vllm_router/router_args.py",)),)
    ),
    "sglang-router": Package(
        "sglang_router",
        "sglang-router",
        (Command("python3 -m sglang_router.launch_router", ("sglang_router/router_args.py",)),),
    ),
}
"""By name."""

_OF_HELP = re.compile(r"^\W*deprecated\b|\bthis (?:flag|option|argument) is deprecated", re.IGNORECASE)
_ADDERS = ("add_argument", "add_negatable_bool_argument")


def package_of(path: Path) -> Package:
    """Return what is known of a wheel's package, by the wheel's name."""
    name = path.name.partition("-")[0].replace("_", "-").lower()
    if name not in PACKAGES:
        raise ValueError(f"{path.name} is not a wheel of {', '.join(PACKAGES)}")
    return PACKAGES[name]


def read_wheel(path: Path) -> list[Recorded]:
    package = package_of(path)
    patterns = [*package.definitions, *(one for command in package.commands for one in command.files)]
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(wheel.read(metadata).decode())
        texts = {
            name: wheel.read(name).decode()
            for name in names
            if any(fnmatch(name, pattern) for pattern in patterns)
        }
    modules = {name: ast.parse(text) for name, text in texts.items()}
    source = Source(modules.values())
    release, requires = headers["Version"], headers.get_all("Requires-Dist", [])
    records: list[Recorded] = []
    for command in package.commands:
        files = [name for name in sorted(modules) if any(fnmatch(name, one) for one in command.files)]
        own = next((name for name in files if fnmatch(name, command.files[0])), None)
        if own is None:
            continue
        options = _options(source, [modules[name] for name in files], command)
        takes_also = command.takes_also and _pinned(requires, command.takes_also, default=release)
        is_deprecated = _is_discouraged(command.name.rpartition(" ")[2], texts[own])
        records.append(
            Recorded(command.name, release, tuple(files), options, frozenset(), takes_also, is_deprecated)
        )
    return records


def _pinned(requirements: Iterable[str], package: str, default: str) -> str:
    """Return a package with the version that a wheel requires of it."""
    found = (re.match(rf"{package}(?:\[[^]]*\])?==([^\s;]+)", text) for text in requirements)
    return next((f"{package}-{one[1]}" for one in found if one), f"{package}-{default}")


def _is_discouraged(module: str, text: str) -> bool:
    """Return whether a module warns that another command should be used."""
    return re.search(rf"{re.escape(module)}\W+is (?:deprecated|still supported)", text) is not None


def _options(source: Source, modules: list[ast.Module], command: Command) -> dict[str, Option]:
    options: dict[str, Option] = {}
    for module in modules:
        added = list(_added(source, module))
        for node in module.body:
            if isinstance(node, ast.ClassDef) and node.name in command.fields_of:
                fields = source.classes[node.name].fields.items()
                added += [
                    ([_spelled(key)], _of_field(source, one, key)) for key, one in fields if one.annotation
                ]
            elif isinstance(node, ast.ClassDef) and command.annotated:
                added += _annotated(source, node, command.annotated)
        for spellings, option in added:
            first = next((one for one in spellings if one.startswith("--")), spellings[0])
            also = tuple(one for one in spellings if one != first)
            options.setdefault(first, option._replace(also=(*also, *option.also)))
    for spelling in source.deprecated & options.keys():
        options[spelling] = options[spelling]._replace(is_deprecated=True)
    return options


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def _negated(option: str) -> str:
    return f"--no-{option.removeprefix('--')}"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        return ()
    return tuple(dict.fromkeys(str(one) for one in flat(values) if one is not None))


def _of_field(source: Source, given: Field, name: str) -> Option:
    """Return the option that vLLM makes of a field, without its own name."""
    nodes = ast.walk(given.annotation) if given.annotation is not None else ()
    kinds = {one.id for one in nodes if isinstance(one, ast.Name)}
    is_switch = "bool" in kinds and "str" not in kinds
    return Option(
        (_negated(_spelled(name)),) if is_switch else (),
        _shown(source.known(given.default)),
        _texts(source.choices(given.annotation)),
        _OF_HELP.search(given.text) is not None,
    )


def _added(source: Source, module: ast.Module) -> Iterator[tuple[list[str], Option]]:
    """Yield what calls of add_argument add."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Call) or called(node) not in _ADDERS:
            continue
        keywords = keywords_of(node)
        given = [*node.args, *(keywords[name] for name in ("flag_name", "obsolete_flag") if name in keywords)]
        # of f"--{prefix}port" what follows the prefix, which is empty for the command itself
        texts = ["".join(_constants(one)) for one in given]
        spellings = [one for one in texts if one.startswith("-")]
        if not spellings:
            continue
        name = spellings[0].removeprefix("--")
        fields = (_unpacked(source, one.value) for one in node.keywords if one.arg is None)
        option = next((_of_field(source, one, name) for one in fields if one), Option())
        action = ast.unparse(keywords["action"]) if "action" in keywords else ""
        if called(node) == "add_negatable_bool_argument" or "BooleanOptionalAction" in action:
            option = option._replace(also=(_negated(name),))
        if "default" in keywords:
            option = option._replace(default=_shown(source.known(keywords["default"])))
        elif action == "'store_true'":
            option = option._replace(default="false")
        if choices := _texts(source.known(keywords.get("choices"))):
            option = option._replace(choices=choices)
        text = ast.unparse(keywords["help"]).lstrip("f(") if "help" in keywords else ""
        if action.startswith("Deprecated") or "deprecated" in keywords or _OF_HELP.search(text):
            use = source.known(keywords.get("new_flag")) or ""
            option = option._replace(is_deprecated=True, use=use)
        yield spellings, option


def _constants(node: ast.expr) -> Iterator[str]:
    for one in node.values if isinstance(node, ast.JoinedStr) else [node]:
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value


def _unpacked(source: Source, node: ast.expr) -> Field | None:
    """Return the field of ``**model_kwargs["dtype"]``, where ``model_kwargs = get_kwargs(ModelConfig)``."""
    match node:
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))):
            match source.constants.get(name):
                case ast.Call(args=[ast.Name(id=owner), *_]):
                    return source.field_of(owner, key)
    return None


def _annotated(source: Source, node: ast.ClassDef, marker: str) -> list[tuple[list[str], Option]]:
    """Return the options of SGLang's fields: ``tp_size: A[int, Arg(help=.., aliases=[..])] = 1``."""
    found = []
    for key, given in source.classes[node.name].fields.items():
        annotation = given.annotation
        if not (isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == marker):
            continue
        kind, *others = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation]
        calls = [one for one in others if isinstance(one, ast.Call) and called(one) == "Arg"]
        texts = [one.value for one in others if isinstance(one, ast.Constant)]
        keywords = keywords_of(calls[0]) if calls else {}
        if not (calls or texts) or "no_cli" in keywords:
            continue
        text = texts[0] if texts else source.known(keywords.get("help"))
        action = ast.unparse(keywords["action"]) if "action" in keywords else ""
        choices = source.known(keywords.get("choices")) or source.choices(kind)
        option = Option(
            (), _shown(source.known(given.default)), _texts(choices),
            action.startswith("Deprecated") or _OF_HELP.search(str(text or "")) is not None,
        )  # fmt: skip
        name = source.known(keywords.get("cli_name")) or _spelled(key)
        found.append(([name, *(source.known(keywords.get("aliases")) or [])], option))
    return found
