"""Every operator that is measured, by name: the modules of this package that name ``OPERATORS`` add them.

A new file needs no other change.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import kernels_bench.operators
from kernels_bench.operators.operator import MeasuredOperator


def _every_operator() -> Mapping[str, MeasuredOperator]:
    package = kernels_bench.operators
    names = (m.name for m in pkgutil.iter_modules(package.__path__) if not __name__.endswith(f".{m.name}"))
    modules = (importlib.import_module(f"{package.__name__}.{name}") for name in names)
    operators = [operator for module in modules for operator in getattr(module, "OPERATORS", ())]
    by_rank = sorted(operators, key=lambda operator: operator.schema.rank)
    return MappingProxyType({operator.name: operator for operator in by_rank})


MEASURED: Final = _every_operator()
"""In fastroof's order of them."""
