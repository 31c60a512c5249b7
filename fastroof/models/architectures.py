"""Architecture names that vLLM registers, and which of them a family reads.

``python -m fastroof.models.architectures WHEEL`` renews the record: a wheel of vLLM or its folder.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastroof.documents import parse_json
from fastroof.errors import ModelError
from fastroof.models.families.registry import FAMILIES, MODEL_TYPES, REFUSALS

RECORD: Final = "vllm_architectures.json"
SUPPORTED, SAME, WRAPPER, MISSING, DRAFT, POOLING = (
    "supported", "same", "by its text model", "missing", "draft", "pooling",
)  # fmt: skip
STATUSES: Final = (SUPPORTED, SAME, WRAPPER, MISSING, DRAFT, POOLING)

_REGISTRY: Final = "model_executor/models/registry.py"
_MODELS: Final = "model_executor/models"
_ANY_MODEL: Final = "transformers backend"
_TASKS: Final[Mapping[str, str]] = {
    "_TEXT_GENERATION_MODELS": "text generation",
    "_MULTIMODAL_MODELS": "multimodal",
    "_TRANSFORMERS_SUPPORTED_MODELS": "transformers",
    "_SPECULATIVE_DECODING_MODELS": "drafts",
    "_EMBEDDING_MODELS": "embedding",
    "_LATE_INTERACTION_MODELS": "late interaction",
    "_REWARD_MODELS": "reward",
    "_TOKEN_CLASSIFICATION_MODELS": "token classification",
    "_SEQUENCE_CLASSIFICATION_MODELS": "sequence classification",
    "_TRANSFORMERS_BACKEND_MODELS": _ANY_MODEL,
}
"""Tasks by their table in the registry; a name of several tables has the first one here."""
_GENERATES: Final = ("text generation", "multimodal", "transformers")
_TRANSFORMERS: Final = "transformers"
_LAYERS: Final[Mapping[str, str]] = {
    "Attention": "attention",
    "ChunkedLocalAttention": "chunked attention",
    "CrossAttention": "cross attention",
    "MLAAttention": "latent attention",
    "MultiHeadLatentAttentionWrapper": "latent attention",
    "SparseAttnIndexer": "a sparse indexer",
    "SparseMQAIndexer": "a sparse indexer",
    "FusedMoEFactory": "experts",
    "MambaMixer": "Mamba-1",
    "MambaMixer2": "Mamba-2",
    "MambaBase": "a custom recurrence",
    "ShortConv": "short convolutions",
    "GatedDeltaNetAttention": "gated delta nets",
    "QwenGatedDeltaNetAttention": "gated delta nets",
    "KimiGatedDeltaNetAttention": "Kimi delta attention",
    "MHCPreOp": "hyper-connections",
}
"""vLLM's layers, by the names of their classes."""
_NO_OPERATOR: Final = ("cross attention", "Mamba-1", "a custom recurrence", "attention in both directions")


class Architecture(NamedTuple):
    """One name of the registry."""

    name: str
    task: str
    status: str
    family: str
    why: str


@dataclass(frozen=True)
class Registry:
    """What a release registers: class and module of each name by task, and the layers of each module."""

    release: str
    tasks: Mapping[str, Mapping[str, tuple[str, str]]]
    layers: Mapping[str, tuple[str, ...]]
    removed: Mapping[str, str]

    def architectures(self) -> list[Architecture]:
        """Return every name with its status, the generating tasks first."""
        return [
            self._architecture(name, task, *where)
            for task, names in self.tasks.items()
            for name, where in names.items()
        ]

    def _architecture(self, name: str, task: str, module: str, served_as: str) -> Architecture:
        family = _family_of(name)
        if family in REFUSALS:
            return Architecture(name, task, MISSING, "", REFUSALS[family])
        if family:
            if twin := self._twin(name, module, served_as):
                return Architecture(name, task, SAME, family, f"served as {twin}")
            model_types = [kind for kind, one in MODEL_TYPES.items() if name in one.classes[kind]]
            return Architecture(name, task, SUPPORTED, family, f"model_type {', '.join(model_types)}")
        if task == _ANY_MODEL and name.endswith("ForCausalLM"):
            return Architecture(name, task, WRAPPER, "", "stands for any model: its model_type decides")
        if task == "drafts" or name.endswith("ForMTP"):
            why = "drafts for another model: --draft takes a model, or mtp for a layer of the target's own"
            return Architecture(name, task, DRAFT, "", why)
        if task not in _GENERATES:
            return Architecture(name, task, POOLING, "", "pools or scores prompts: it has no decode steps")
        layers = self.layers.get(module, ())
        lacking = [what for what in layers if what in _NO_OPERATOR]
        if lacking:
            return Architecture(name, task, MISSING, "", f"no operator for {' and '.join(lacking)}")
        if task == "multimodal":
            why = "loads as the text model of its text_config if a family reads that"
            return Architecture(name, task, WRAPPER, "", why)
        if module == _TRANSFORMERS:
            return Architecture(name, task, MISSING, "", "no family reads its config.json (by Transformers)")
        made_of_text = f"; it is made of {', '.join(layers)}" if layers else ""
        return Architecture(name, task, MISSING, "", f"no family reads its config.json{made_of_text}")

    def _twin(self, name: str, module: str, served_as: str) -> str:
        """Return the name of the same class that a family reads, if that is another one."""
        if name == served_as or module == _TRANSFORMERS:
            return ""
        own_family = _family_of(name)
        return served_as if own_family == _family_of(served_as) else ""


def _family_of(name: str) -> str:
    names = (family.name for family in FAMILIES if any(name in known for known in family.classes.values()))
    return next(names, "")


def shipped_registry() -> Registry:
    """Return the recorded registry."""
    text = resources.files("fastroof.models").joinpath(RECORD).read_text("utf-8")
    document = parse_json(text, RECORD, ModelError)
    return Registry(
        document["release"],
        {task: {name: (at[0], at[1]) for name, at in of.items()} for task, of in document["tasks"].items()},
        {module: tuple(layers) for module, layers in document["layers"].items()},
        document["removed"],
    )


def read_registry(source: str | Path) -> Registry:
    """Read the registry of a release from its wheel, its package's folder, or a folder that holds that.

    Raises
    ------
    ModelError
        If there is no registry, or it is not of the known form.
    """
    path = Path(source)
    release, read = _opened(path)
    text = read(_REGISTRY)
    if text is None:
        raise ModelError(f"{path} has no vllm/{_REGISTRY}: give a wheel of vLLM or its unpacked folder")
    tables = _tables(text, str(path))
    missing = [table for table in _TASKS if table not in tables]
    if missing:
        raise ModelError(f"{path}: vllm/{_REGISTRY} has no {', '.join(missing)}")
    tasks: dict[str, dict[str, tuple[str, str]]] = {}
    seen: set[str] = set()
    for table, task in _TASKS.items():
        names = {name: at for name, at in tables[table].items() if name not in seen and _is_class(at)}
        seen |= names.keys()
        tasks[task] = dict(sorted(names.items(), key=lambda item: item[0].casefold()))
    modules = {module for task in _GENERATES for module, _ in tasks[task].values()} - {_TRANSFORMERS}
    layers = {module: _layers_of(module, read) for module in sorted(modules)}
    removed = sorted(tables.get("_PREVIOUSLY_SUPPORTED_MODELS", {}).items())
    return Registry(release, tasks, layers, {name: str(at) for name, at in removed})


def _is_class(at: Any) -> bool:
    """Return whether an entry is a module and a class."""
    return isinstance(at, tuple) and len(at) == 2 and all(isinstance(part, str) and part for part in at)


def _opened(path: Path) -> tuple[str, Callable[[str], str | None]]:
    """Return the release of a wheel or folder, and a reader of the package's files by their names."""
    if path.is_file():
        try:
            wheel = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise ModelError(f"{path} cannot be read as a wheel: {error}") from None
        names = set(wheel.namelist())

        def read_member(name: str) -> str | None:
            member = f"vllm/{name}"
            return wheel.read(member).decode("utf-8", "replace") if member in names else None

        return _release(path.name), read_member
    root = path / "vllm" if (path / "vllm").is_dir() else path
    installed = [entry.name for entry in root.parent.glob("vllm-*.dist-info")] if root.parent.is_dir() else []

    def read_file(name: str) -> str | None:
        file = root / name
        return file.read_text("utf-8", "replace") if file.is_file() else None

    return _release(installed[0] if installed else ""), read_file


def _release(name: str) -> str:
    found = re.match(r"vllm-(\d+(?:\.\d+)+)", name)
    return found[1] if found else "of unknown number"


def _tables(text: str, where: str) -> dict[str, dict[str, Any]]:
    """Return the registry's tables of constants; computed entries repeat names of other tables."""
    try:
        parsed = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ModelError(f"{where}: vllm/{_REGISTRY} is not Python: {error}") from None
    tables: dict[str, dict[str, Any]] = {}
    for node in parsed.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                tables[target.id] = dict(_constants(node.value))
    return tables


def _constants(table: ast.Dict) -> Iterator[tuple[str, Any]]:
    for key, value in zip(table.keys, table.values, strict=True):
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            # a table within another: its names are listed there
            continue
        try:
            yield key.value, ast.literal_eval(value)
        except ValueError:
            continue


def _layers_of(module: str, read: Callable[[str], str | None]) -> tuple[str, ...]:
    """Return the layers that a model's module uses, also by way of other models' modules."""
    found: set[str] = set()
    left, seen = [_file_of(module)], set[str]()
    while left:
        stem = left.pop()
        if stem in seen:
            continue
        seen.add(stem)
        # imports within a package are relative to its own folder
        for name, folder in ((f"{stem}.py", stem.rpartition("/")[0]), (f"{stem}/__init__.py", stem)):
            text = read(name)
            if text is None:
                continue
            uses, imports = _imports(text, folder)
            found |= uses
            left += imports
    return tuple(what for what in dict.fromkeys(_LAYERS.values()) if what in found)


def _file_of(module: str) -> str:
    if module.startswith("vllm."):
        return module.removeprefix("vllm.").replace(".", "/")
    return f"{_MODELS}/{module}"


_PARTS: Final = re.compile(r"(Attention|DecoderLayer|Model|ForCausalLM|MoE|Mixer|Block|Hybrid)\w*$")
"""Ends of the names of classes whose layers a module uses by importing them."""


def _imports(text: str, folder: str) -> tuple[set[str], list[str]]:
    """Return the known layers that a module imports, and the modules of models that it imports classes of."""
    uses: set[str] = set()
    imports: list[str] = []
    try:
        parsed = ast.parse(text)
    except (SyntaxError, ValueError):
        return uses, imports
    for node in ast.walk(parsed):
        if not isinstance(node, ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names]
        absolute = _absolute(node, folder)
        if absolute.startswith("model_executor/layers"):
            uses |= {_LAYERS[name] for name in names if name in _LAYERS}
        elif absolute.startswith((_MODELS, "models/")) and any(map(_PARTS.search, names)):
            imports.append(absolute)
    return uses, imports


def _absolute(node: ast.ImportFrom, folder: str) -> str:
    """Return the path within the package of an import's module."""
    module = (node.module or "").replace(".", "/")
    if node.level == 0:
        return module.removeprefix("vllm/")
    parts = folder.split("/")
    return "/".join([*parts[: len(parts) - node.level + 1], *([module] if module else [])])


def record(registry: Registry) -> str:
    """Return the record of a registry, as :func:`shipped_registry` reads it."""
    document = {
        "release": registry.release,
        "tasks": {task: dict(names) for task, names in registry.tasks.items()},
        "layers": dict(registry.layers),
        "removed": dict(registry.removed),
    }
    # one name per line
    text = json.dumps(document, indent=1)
    return re.sub(r"\[\s+((?:\"[^\"]*\",?\s*)+)\]", lambda m: f"[{' '.join(m[1].split())}]", text) + "\n"


if __name__ == "__main__":
    (given,) = sys.argv[1:]
    with resources.as_file(resources.files("fastroof.models") / RECORD) as file:
        file.write_text(record(read_registry(given)), "utf-8")
