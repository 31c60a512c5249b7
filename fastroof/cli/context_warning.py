"""The warning that requests are longer than a model's context."""

from __future__ import annotations

from fastroof.command_group import warn

__all__ = ["warn_beyond_context"]


def warn_beyond_context(name: str, max_position: int, longest: float) -> None:
    """Warn in one line where a request has more tokens than the model's config takes."""
    if longest > max_position:
        warn(
            f"a request of {longest:,.0f} tokens is longer than the context of {name}, "
            f"{max_position:,} (max_position_embeddings, with rope scaling): engines refuse it"
        )
