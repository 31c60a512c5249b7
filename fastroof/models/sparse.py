"""Sparse attention with an indexer: DeepSeek's over latent vectors (DSA), MiniMax's over blocks (MSA).

An indexer scores every token for every query, and attention covers only the best ones: the indexer's cost
keeps growing with kv_len, attention's stops there. Both blocks were measured from the input of their first
projection to the output of the last, so a layer calls one kernel between its norm and its all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fastroof.errors import ModelError
from fastroof.models.attention import Attention, check_kv_heads, head_obstacles
from fastroof.models.exchange import after_attention
from fastroof.models.execution import Execution
from fastroof.models.hf import checked_fields
from fastroof.models.layout import Layout, check_sizes
from fastroof.operators.calls import Call, Elementwise, MixerCall, MixerKernel
from fastroof.operators.widths import LATENT_SHAPES, LatentShape, shape_name
from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES

ATTENTION_DTYPE: Final = "bf16"
"""Compute dtype of attention in all tables of these blocks."""

INDEX_DTYPE: Final = "fp8"
INDEX_GROUP: Final = 128
INDEX_SCALE_BYTES: Final = 4
"""DSA indexer keys in every engine: fp8, with one float32 scale per ``INDEX_GROUP`` elements."""

MSA_MODEL: Final = "minimax-m3"
MSA_HEAD_DIM: Final = 128
"""Model and head width (attention and indexer) of the measured MSA blocks."""


def _block_calls(
    operator: str,
    key: tuple[str, str, str, str, int],
    window: int,
    hidden: int,
    layout: Layout,
    execution: Execution,
) -> tuple[Call, ...]:
    """Return the norm, a block measured as a whole, and the communication after it."""
    norm_bytes = 4.0 * hidden * ACTIVATION_BYTES
    decode, prefill = (MixerKernel(f"{operator}_{phase}", key) for phase in ("decode", "prefill"))
    return (
        Elementwise("attention_norm", "attention rmsnorm", 1, norm_bytes),
        MixerCall(1, decode, prefill, execution.kv_dtype, window=window),
        *after_attention(hidden, layout, execution),
    )


def _block_dtype(weights: Mapping[str, int], execution: Execution) -> str:
    """Return the format of most of a block's weights; on a tie, that of the output projection."""
    totals: dict[str, int] = {}
    for role, count in weights.items():
        dtype = execution.kernel(role)
        totals[dtype] = totals.get(dtype, 0) + count
    most = max(totals.values())
    of_output = execution.kernel("o")
    return of_output if totals[of_output] == most else max(totals, key=lambda dtype: totals[dtype])


@dataclass(frozen=True)
@checked_fields
class SparseLatentAttention(Attention):
    """Latent attention to the tokens that an indexer picks (DSA), by one key per ``index_pool`` tokens."""

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    index_heads: int
    index_dim: int
    topk: int
    shares_index: bool = False
    index_pool: int = 1
    window = None
    """No window: every token stays cached, since the indexer may pick any."""

    def __post_init__(self) -> None:
        """Reject invalid sizes, also in layers built or modified by hand."""
        names = ("num_heads", "q_lora_rank", "kv_lora_rank", "nope_dim", "v_dim")
        check_sizes(self, *names, "index_heads", "index_dim", "topk", "index_pool")

    def module(self, hidden: int) -> str:
        """Return the name under which blocks of these widths were measured."""
        index = (0, 0) if self.shares_index else (self.index_heads, self.index_dim)
        shape = LatentShape(
            hidden,
            self.q_lora_rank,
            self.kv_lora_rank,
            self.nope_dim,
            self.rope_dim,
            self.v_dim,
            *index,
            self.topk,
            self.index_pool,
        )
        name = shape_name(shape)
        if name is None:
            known = ", ".join(name for name, one in LATENT_SHAPES.items() if one.topk)
            raise ModelError(
                f"no block of sparse attention was measured with these widths ({shape}); known are those of "
                f"{known}"
            )
        return name

    @property
    def heads_text(self) -> str:
        """Return the heads as model lists show them."""
        return f"{self.num_heads} DSA {self.kv_lora_rank}+{self.rope_dim}"

    def obstacles(self, layout: Layout) -> list[str]:
        """Return why this layout cannot split it; empty if it can."""
        if self.num_heads % layout.tp:
            return [f"{self.num_heads} query heads do not divide by {layout.tp}"]
        return []

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Return the calls of one layer on one GPU, in execution order."""
        dtype = _block_dtype(self.linear_weights(hidden, layout), execution)
        heads = self.num_heads // layout.tp
        key = (dtype, execution.kv_dtype, ATTENTION_DTYPE, self.module(hidden), heads)
        return _block_calls("dsa", key, self.topk, hidden, layout, execution)

    def kv_bytes_per_token(self, layout: Layout, kv_dtype: str) -> float:
        """Return the KV-cache bytes per token of one layer on every GPU: latent vector and indexer key."""
        latent = (self.kv_lora_rank + self.rope_dim) * DTYPE_BYTES[kv_dtype]
        return latent + (0 if self.shares_index else self.index_bytes / self.index_pool)

    @property
    def index_bytes(self) -> float:
        """Return the bytes of an indexer key, in every KV format."""
        scales = INDEX_SCALE_BYTES * -(-self.index_dim // INDEX_GROUP)
        return self.index_dim * DTYPE_BYTES[INDEX_DTYPE] + scales

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Return the linear weights of one layer on one GPU, by the role of their call."""
        heads, latent = self.num_heads // layout.tp, self.kv_lora_rank
        weights = {
            "q_down": hidden * (self.q_lora_rank + latent + self.rope_dim),
            "q_up": self.q_lora_rank * heads * (self.nope_dim + self.rope_dim),
            "kv_up": latent * heads * (self.nope_dim + self.v_dim),
            "o": heads * self.v_dim * hidden,
        }
        if not self.shares_index:
            weights["index"] = (self.q_lora_rank * self.index_heads + hidden) * self.index_dim
        return weights

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Weights that stay in bf16 on one GPU, of one layer: norms, and what weighs the indexer's heads."""
        index = 0 if self.shares_index else hidden * self.index_heads + 2 * self.index_dim
        if self.index_pool > 1:
            # keys are pooled by learnt weights: a projection, and one row per token of a pool
            index += (hidden + self.index_pool) * self.index_dim
        return hidden + self.q_lora_rank + self.kv_lora_rank + index

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Return the elements per token that the widest kernel reads and writes on one GPU."""
        heads = self.num_heads // layout.tp
        return heads * (self.nope_dim + self.rope_dim + self.kv_lora_rank + self.rope_dim)


@dataclass(frozen=True)
@checked_fields
class BlockSparseAttention(Attention):
    """Grouped-query attention to the blocks of tokens that an indexer picks (MSA), of MiniMax-M3."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    topk_blocks: int
    block_size: int
    window = None
    """It keeps every token, since it may pick any."""

    def __post_init__(self) -> None:
        """Reject invalid sizes, also in layers built or modified by hand."""
        names = ("num_q_heads", "num_kv_heads", "head_dim", "index_heads", "index_dim")
        check_sizes(self, *names, "topk_blocks", "block_size")
        check_kv_heads(self.num_q_heads, self.num_kv_heads)

    @property
    def topk(self) -> int:
        """Maximum number of tokens that a query attends to."""
        return self.topk_blocks * self.block_size

    @property
    def heads_text(self) -> str:
        """Return the heads as model lists show them."""
        return f"{self.num_q_heads}-{self.num_kv_heads}-{self.head_dim} MSA"

    def obstacles(self, layout: Layout) -> list[str]:
        """Return why this layout cannot split it; empty if it can."""
        return head_obstacles(self.num_q_heads, self.num_kv_heads, layout.tp)

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Return the calls of one layer on one GPU in execution order; projections and attention are one."""
        dtype = _block_dtype(self.linear_weights(hidden, layout), execution)
        key = (dtype, execution.kv_dtype, ATTENTION_DTYPE, MSA_MODEL, self.num_q_heads // layout.tp)
        return _block_calls("msa", key, self.topk, hidden, layout, execution)

    def _kv_heads(self, layout: Layout) -> int:
        return max(1, self.num_kv_heads // layout.tp)

    def kv_bytes_per_token(self, layout: Layout, kv_dtype: str) -> float:
        """Return the KV-cache bytes per token of one layer on one GPU: keys, values and the indexer key."""
        keys_and_values = 2 * self._kv_heads(layout) * self.head_dim * DTYPE_BYTES[kv_dtype]
        return keys_and_values + self.index_dim * ACTIVATION_BYTES

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Return the linear weights of one layer on one GPU, by the role of their call."""
        q_width = self.num_q_heads // layout.tp * self.head_dim
        index_heads = max(1, self.index_heads // layout.tp)
        return {
            "qkv": hidden * (q_width + 2 * self._kv_heads(layout) * self.head_dim),
            "o": hidden * q_width,
            "index": hidden * (index_heads + 1) * self.index_dim,
        }

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Return the weights of one layer on one GPU that stay in bf16: norms, including those of q and k."""
        return hidden + 2 * self.head_dim + 2 * self.index_dim

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Return the elements per token that the widest kernel reads and writes on one GPU."""
        return 2 * (self.num_q_heads // layout.tp + self._kv_heads(layout)) * self.head_dim
