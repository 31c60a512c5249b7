"""Every operator, by name: the modules of this package that name ``OPERATORS`` add them.

Nothing else has to be told of a new file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import fastroof.operators
from fastroof.operators.operator import Operator


def _every_operator() -> Mapping[str, Operator]:
    package = fastroof.operators
    names = (m.name for m in pkgutil.iter_modules(package.__path__) if not __name__.endswith(f".{m.name}"))
    modules = (importlib.import_module(f"{package.__name__}.{name}") for name in names)
    operators = [operator for module in modules for operator in getattr(module, "OPERATORS", ())]
    return MappingProxyType({o.name: o for o in sorted(operators, key=lambda o: o.rank)})


OPERATORS: Final = _every_operator()
"""In the order of listings."""
