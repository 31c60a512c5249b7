"""Models that kernels are measured for: the sizes that the shapes of their kernels follow from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fastroof.models.dense import DenseShard, split


class Experts(NamedTuple):
    """The experts of a MoE layer: how many, how many a token takes, and the width of one."""

    num_experts: int
    topk: int
    intermediate: int


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a transformer that its kernels' shapes follow from."""

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    # Rows of the LM head, without padding.
    vocab: int
    # Width of the dense MLP; of one expert, without being given, where the layers have experts.
    intermediate: int = 0
    experts: Experts | None = None
    tp: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        """Refuse sizes that no GPU of a group could have a share of."""
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads {self.num_q_heads} is not divisible by num_kv_heads {self.num_kv_heads}"
            )
        if (self.experts is None) == (self.intermediate == 0):
            raise ValueError("need either intermediate (a dense MLP) or experts (a MoE layer)")
        if self.experts is not None and self.experts.topk > self.experts.num_experts:
            raise ValueError(f"topk {self.experts.topk} is above num_experts {self.experts.num_experts}")
        if self.experts is not None:
            object.__setattr__(self, "intermediate", self.experts.intermediate)
        for tp in self.tp:
            for what, size in (("num_q_heads", self.num_q_heads), ("MLP width", self.intermediate)):
                if size % tp:
                    raise ValueError(f"tp {tp} does not divide {what} {size}")
            if self.num_kv_heads % tp and tp % self.num_kv_heads:
                raise ValueError(
                    f"tp {tp} neither divides num_kv_heads {self.num_kv_heads} nor is a multiple of it"
                )

    def share(self, tp: int) -> DenseShard:
        """Sizes of one GPU's share."""
        return split(self, tp)

    def heads(self, tp: int) -> tuple[int, int, int]:
        """Query heads, KV heads (replicated if fewer than GPUs) and head width on one GPU."""
        share = self.share(tp)
        return share.num_q_heads, share.num_kv_heads, self.head_dim

    def rope_width(self, tp: int) -> int:
        """Elements a token that are rotated on one GPU: queries and keys."""
        share = self.share(tp)
        return (share.num_q_heads + share.num_kv_heads) * self.head_dim

    def kv_width(self, tp: int) -> int:
        """Elements a token that are written into the cache of one GPU: keys and values."""
        return 2 * self.share(tp).num_kv_heads * self.head_dim

    def linear(self, tp: int) -> list[tuple[int, int]]:
        """Outputs and inputs (n, k) of a layer's GEMMs on one GPU; of a MoE layer, the router's too.

        >>> ModelShape("m", 32, 8, 128, 4096, 128256, intermediate=14336).linear(1)
        [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
        """
        share = self.share(tp)
        attention = [(share.qkv_out, self.hidden), (self.hidden, share.o_in)]
        if self.experts is not None:
            return [*attention, (self.experts.num_experts, self.hidden)]
        return [*attention, (2 * share.intermediate, self.hidden), (self.hidden, share.intermediate)]

    def lm_head(self, tp: int) -> tuple[int, int]:
        """Outputs and inputs (n, k) of the LM head on one GPU, padding included."""
        return self.share(tp).vocab_rows, self.hidden

    def expert_layer(self) -> tuple[int, int, int, int]:
        """Hidden size, width of an expert, topk and num_experts of a MoE layer, before any split."""
        if self.experts is None:
            raise ValueError(f"{self.name} has no experts")
        num_experts, topk, intermediate = self.experts
        return self.hidden, intermediate, topk, num_experts
