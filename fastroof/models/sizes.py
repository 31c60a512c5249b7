"""Sizes that any part of a model has."""

from __future__ import annotations

from typing import Any

from fastroof.checks import whole_number
from fastroof.errors import ModelError

__all__ = ["check_sizes"]


def check_sizes(part: Any, *names: str) -> None:
    """Raise ModelError unless those attributes are whole numbers of at least 1."""
    for name in names:
        whole_number(name, getattr(part, name), error=ModelError)
