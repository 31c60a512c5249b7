"""Residual alternatives: attention residuals (Kimi K3) and hyper-connections (DeepSeek-V4).

Attention residuals replace the single residual: the outputs of each block of layers are summed, and the
input of a sublayer is the softmax-weighted mix of the sums of all earlier blocks, the embedding, and the
current block so far (arXiv:2603.15031, section on blocks).
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
    """The block sums that a layer's sublayers read, and how many rows are stored."""

    streams: int
    sealed: float

    def __post_init__(self) -> None:
        """Reject invalid values."""
        check_sizes(self, "streams")
        if not 1.0 <= self.sealed <= self.streams:
            raise ModelError(f"sealed must be from 1 to streams {self.streams}, got {self.sealed}")

    @property
    def embedded_rows(self) -> int:
        """Rows that an embedding is written to; the other rows are layer sums."""
        return 1

    def calls(self, hidden: int) -> tuple[Elementwise, ...]:
        """Return the calls before both sublayers of one layer."""
        row_bytes = (self.sealed + 2.0) * hidden * ACTIVATION_BYTES
        return (Elementwise("hyper_connection", "attention residuals", SITES, row_bytes),)

    def weights(self, hidden: int) -> int:
        """Return the weights of one layer: a query and a key norm per sublayer."""
        return SITES * 2 * hidden


"""Sublayers of a layer: attention and the MLP."""


@dataclass(frozen=True)
@checked_fields
class HyperConnections:
    """The residual streams of a layer, and how they are mixed."""

    streams: int
    sinkhorn_iterations: int

    def __post_init__(self) -> None:
        """Reject invalid sizes."""
        check_sizes(self, "streams", "sinkhorn_iterations")

    @property
    def embedded_rows(self) -> int:
        """Rows that an embedding is written to: every stream starts with it."""
        return self.streams

    def calls(self, hidden: int) -> tuple[HyperConnection, HyperConnection]:
        """Return the calls before and after both sublayers of one layer."""

        def call(stage: str) -> HyperConnection:
            name = f"hyper-connections, {stage}"
            return HyperConnection(
                "hyper_connection", name, 1, stage, hidden, self.streams, self.sinkhorn_iterations, SITES
            )

        return call("pre"), call("post")

    def weights(self, hidden: int) -> int:
        """Return the weights of one layer: the projection to mixing weights, biases, scales."""
        mixing = self.streams * (self.streams + 2)
        return SITES * (mixing * self.streams * hidden + mixing + 3)
