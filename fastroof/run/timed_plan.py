"""What running batches needs of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fastroof.arrays import Floats

__all__ = ["TimedPlan"]


class TimedPlan(Protocol):
    """A plan, or what was kept of one."""

    @property
    def arena(self) -> Floats:
        """The plan as loops read it."""

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest step."""

    @property
    def max_seqs(self) -> int:
        """Sequences of the largest step."""

    @property
    def made_from(self) -> Mapping[str, str]:
        """What its answers carry."""
