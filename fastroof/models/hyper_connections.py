"""Hyper-connections: a residual of several streams, of which a sublayer reads one mix and writes to all.

They stand in the place of adding a sublayer's output to the residual. DeepSeek-V4's are manifold-constrained:
the weights that mix the streams among each other are made doubly stochastic by Sinkhorn's iterations.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastroof.models.checked_fields import checked_fields
from fastroof.models.sizes import check_sizes
from fastroof.operators.calls import HyperConnection

__all__ = ["HyperConnections"]

SITES = 2
"""Sublayers of a layer: attention and the MLP."""


@dataclass(frozen=True)
@checked_fields
class HyperConnections:
    """The residual streams of a layer, and how they are mixed."""

    streams: int
    sinkhorn_iterations: int

    def __post_init__(self) -> None:
        """Refuse sizes no layer has."""
        check_sizes(self, "streams", "sinkhorn_iterations")

    @property
    def embedded_rows(self) -> int:
        """Rows that an embedding is written to: all of them begin with it."""
        return self.streams

    def calls(self, hidden: int) -> tuple[HyperConnection, HyperConnection]:
        """What runs before both sublayers of one layer, and after both."""

        def call(stage: str) -> HyperConnection:
            name = f"hyper-connections, {stage}"
            return HyperConnection(
                "hyper_connection", name, 1, stage, hidden, self.streams, self.sinkhorn_iterations, SITES
            )

        return call("pre"), call("post")

    def weights(self, hidden: int) -> int:
        """Weights of one layer: what projects all streams to their mixing weights, its biases and scales."""
        mixing = self.streams * (self.streams + 2)
        return SITES * (mixing * self.streams * hidden + mixing + 3)
