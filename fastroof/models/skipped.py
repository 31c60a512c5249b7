"""Parts that a layer does without: what remains of it is a residual."""

from __future__ import annotations

from dataclasses import dataclass

from fastroof.models.checked_fields import checked_fields
from fastroof.models.execution import Execution
from fastroof.models.layout import Layout
from fastroof.operators.calls import Call

__all__ = ["NoAttention", "NoMlp"]


@dataclass(frozen=True)
@checked_fields
class _Skipped:
    """Nothing runs, weighs or is kept."""

    def obstacles(self, layout: Layout) -> list[str]:
        """What keeps it from being split so: nothing."""
        return []

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Calls of one layer on one GPU: none."""
        return ()

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Weights of the linear layers on one GPU: none."""
        return {}

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Weights that stay in bf16 on one GPU: none, the norm is skipped too."""
        return 0

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Elements a token that its widest kernel reads and writes on one GPU."""
        return 0


@dataclass(frozen=True)
@checked_fields
class NoAttention(_Skipped):
    """A layer without attention, which keeps nothing of a token."""

    window = None
    heads_text = ""

    def kv_bytes_per_token(self, layout: Layout, kv_dtype: str) -> float:
        """Bytes that one GPU keeps of a token, of one layer: none."""
        return 0.0

    def state_bytes(self, layout: Layout) -> float:
        """Bytes that one GPU keeps of a sequence whatever its length, of one layer: none."""
        return 0.0


@dataclass(frozen=True)
@checked_fields
class NoMlp(_Skipped):
    """A layer without an MLP."""

    has_experts = False
