"""All fuzz targets: each module here lists its own in ``TARGETS``."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from tests.fuzz.target import Target


def target_classes() -> dict[str, type[Target]]:
    """Return the classes of all targets by name, in the order of the modules' names."""
    found: dict[str, type[Target]] = {}
    for module in pkgutil.iter_modules(__path__):
        for one in import_module(f"{__name__}.{module.name}").TARGETS:
            assert one.name not in found, f"two targets are named {one.name}"
            found[one.name] = one
    return found
