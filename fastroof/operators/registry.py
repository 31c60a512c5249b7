"""All operators by name, collected from the ``OPERATORS`` of this package's modules."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import fastroof.operators
from fastroof.checks import suggestion
from fastroof.operators.operator import Operator


def _every_operator() -> Mapping[str, Operator]:
    package = fastroof.operators
    names = (m.name for m in pkgutil.iter_modules(package.__path__) if not __name__.endswith(f".{m.name}"))
    modules = (importlib.import_module(f"{package.__name__}.{name}") for name in names)
    operators = [operator for module in modules for operator in getattr(module, "OPERATORS", ())]
    return MappingProxyType({o.name: o for o in sorted(operators, key=lambda o: o.rank)})


OPERATORS: Final = _every_operator()
"""Operators by name, in listing order."""


def unknown_operator(name: object, known: Iterable[str] = OPERATORS) -> str:
    """Error message for an unknown operator, with the closest names."""
    close = difflib.get_close_matches(name, list(known)) if isinstance(name, str) else []
    return suggestion("operator", name, close, list(known), "fastroof lookup --help")
