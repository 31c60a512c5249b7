"""Stand-ins for packages that vLLM imports and no measured step calls, so that a bundle need not carry them.

Call ``install()`` before ``import vllm``. An installed package wins over its stand-in. Every attribute of a
stand-in is a class that can be named in annotations, subclassed, subscripted and called.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Final

NAMES: Final = (
    "anthropic", "blake3", "cbor2", "compressed_tensors", "depyf", "fastapi", "fastsafetensors", "gguf",
    "ijson", "llguidance", "lmformatenforcer", "mcp", "mistral_common",
    "model_hosting_container_standards", "openai", "openai_harmony", "outlines_core",
    "partial_json_parser", "prometheus_fastapi_instrumentator", "pybase64", "pythonjsonlogger",
    "setproctitle", "starlette", "uvicorn", "uvloop", "watchfiles", "xgrammar", "zmq",
)  # fmt: skip


class _AnyMeta(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _any(f"{cls.__name__}.{name}")

    def __or__(cls, other: object) -> type:  # type: ignore[override]
        return cls

    __ror__ = __or__  # type: ignore[assignment]


def _any(name: str) -> type:
    return _AnyMeta(
        name,
        (),
        {
            "__init__": lambda self, *a, **k: None,
            "__call__": lambda self, *a, **k: self,
            "__class_getitem__": classmethod(lambda cls, item: cls),
            "__getattr__": lambda self, attr: _missing(attr),
            "__hash__": lambda self: id(self),
        },
    )


def _missing(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    return _any(name)()


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _any(name)
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []  # a package, so that its submodules are looked up here too
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def install() -> list[str]:
    """Install a stand-in for each package that is missing; return their names."""
    missing = [name for name in NAMES if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Finder(frozenset(missing)))
    return missing
