"""Stand-ins for packages that vLLM imports and no measured step calls, so that a bundle need not carry them.

Call ``install()`` before ``import vllm``. An installed package wins over its stand-in, unless
``replace_broken()`` finds that it cannot be imported. Every attribute of a stand-in is a class that can be
named in annotations, subclassed, subscripted and called.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
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
MAY_BREAK: Final = ("numba",)
"""The host's packages that may reject other packages' versions: numba rejects a NumPy newer than it knows."""
VARIABLE: Final = "KERNELS_BENCH_STAND_INS"
"""Environment variable: 1 on the host of a bundle."""


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


def replace_broken() -> list[str]:
    """Install stand-ins for packages whose import fails, on the host of a bundle; return their names."""
    broken = []
    for name in MAY_BREAK if os.environ.get(VARIABLE) == "1" else ():
        try:
            importlib.import_module(name)
        except Exception:
            broken.append(name)
            for module in [one for one in sys.modules if one.split(".")[0] == name]:
                del sys.modules[module]
    sys.meta_path.insert(0, _Finder(frozenset(broken)))
    return broken
