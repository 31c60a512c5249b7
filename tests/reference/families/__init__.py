"""What is known of a family: ``CASES`` of small files, and ``PUBLISHED`` sizes of its presets; a module each.

A new module needs no registration: tests/models reads them all.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from tests.reference.checkpoints import Case, Published


def _every(name: str) -> dict[str, Any]:
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return {key: value for module in modules for key, value in getattr(module, name, {}).items()}


def cases() -> dict[str, Case]:
    """Small files of families, by what they are called."""
    return _every("CASES")


def published() -> dict[str, Published]:
    """Publishers' figures of presets, by their names."""
    return _every("PUBLISHED")
