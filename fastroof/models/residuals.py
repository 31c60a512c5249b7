"""Attention residuals: every sublayer reads a mix of what blocks of layers before it put out.

They stand in the place of adding to one residual: the outputs of a block of layers are summed up, and a
sublayer's input is the softmax-weighted mix of the sums of all earlier blocks, of the embedding, and of its
own block so far (arXiv:2603.15031, section on blocks).
"""

from __future__ import annotations

from dataclasses import dataclass

from fastroof.errors import ModelError
from fastroof.models.hf import checked_fields
from fastroof.models.layout import check_sizes
from fastroof.operators.calls import Elementwise, HyperConnection
from fastroof.units import ACTIVATION_BYTES

SITES = 2
"""Sublayers of a layer: attention and the MLP."""


@dataclass(frozen=True)
@checked_fields
class AttentionResiduals:
    """The sums that a layer's sublayers read, and how many are kept."""

    streams: int
    sealed: float

    def __post_init__(self) -> None:
        """Refuse what no layer has."""
        check_sizes(self, "streams")
        if not 1.0 <= self.sealed <= self.streams:
            raise ModelError(f"of {self.streams} rows of a token no layer reads {self.sealed}")

    @property
    def embedded_rows(self) -> int:
        """Rows that an embedding is written to: the others are sums of layers."""
        return 1

    def calls(self, hidden: int) -> tuple[Elementwise, ...]:
        """What runs before both sublayers of one layer."""
        row_bytes = (self.sealed + 2.0) * hidden * ACTIVATION_BYTES
        return (Elementwise("hyper_connection", "attention residuals", SITES, row_bytes),)

    def weights(self, hidden: int) -> int:
        """Weights of one layer: a query and the norm of the keys, of each sublayer."""
        return SITES * 2 * hidden


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
