"""All surfaces: every module of ``rooms`` is one, and has a list of them."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from tests.fuzz import rooms
from tests.fuzz.surface import Surface

__all__ = ["surface_classes"]


def surface_classes() -> dict[str, type[Surface]]:
    """Return the classes of all surfaces by name, in the order of the rooms' names."""
    found = {}
    for module in pkgutil.iter_modules(rooms.__path__):
        for one in import_module(f"tests.fuzz.rooms.{module.name}").SURFACES:
            assert one.name not in found, f"two surfaces are called {one.name}"
            found[one.name] = one
    return found
