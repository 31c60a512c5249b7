"""Attention over a compressed cache: CSA and HCA of DeepSeek-V4, and its layers with a window alone.

Every 4 tokens (CSA) or 128 (HCA) make one cache entry, key and value of all heads together. Next to the
entries a query attends to the tokens of a short window, of which the cache has one each. CSA's indexer scores
all entries and picks some; HCA attends to all of them; a ratio of 0 leaves the window alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from fastroof.errors import ModelError, UnsupportedModelError
from fastroof.models.exchange import after_attention
from fastroof.models.execution import Execution
from fastroof.models.hf import checked_fields
from fastroof.models.layout import Layout, check_sizes
from fastroof.operators.calls import Call, Elementwise, MixerCall, MixerKernel
from fastroof.operators.widths import (
    COMPRESSED_SHAPES,
    CSA,
    ENTRY,
    HCA,
    HEADS_A_GROUP,
    INDEX_DIM,
    INDEX_HEADS,
    O_LORA_RANK,
    ROPE_DIM,
    WINDOW,
    WINDOW_ALONE,
    CompressedShape,
)
from fastroof.units import ACTIVATION_BYTES

_NO_ENTRIES: Final = 0
_NAMES: Final[Mapping[int, str]] = {CSA: "CSA", HCA: "HCA", _NO_ENTRIES: "window"}
_OPERATORS: Final[Mapping[int, str]] = {CSA: "csa", HCA: "hca", _NO_ENTRIES: "hca"}
"""Operators by the tokens that an entry of the cache is made of."""

STATE_BYTES: Final = 4
"""Compressors keep the tokens of an open entry in float32."""
SCALED: Final = 64
"""Elements of an entry that share a scale byte in fp8."""
FP8_ALIGNMENT: Final = 8
"""The scales of an entry are padded to so many bytes."""


class CompressedWidths(NamedTuple):
    """Widths of a model's compressed attention."""

    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    index_heads: int
    index_dim: int
    topk: int


def measured_as(hidden: int, widths: CompressedWidths) -> str:
    """Name of the model whose blocks have these widths."""
    for name, shape in COMPRESSED_SHAPES.items():
        if shape.has_entries and widths == _widths_of(shape) and hidden == shape.hidden:
            return name
    sizes = ", ".join(f"{name} {size}" for name, size in widths._asdict().items())
    raise UnsupportedModelError(
        f"compressed attention {hidden} wide ({sizes}) was not measured: blocks are those of "
        f"{' and '.join(name for name, shape in COMPRESSED_SHAPES.items() if shape.has_entries)}"
    )


def _widths_of(shape: CompressedShape) -> CompressedWidths:
    return CompressedWidths(
        shape.num_heads, ENTRY, ROPE_DIM, shape.q_lora_rank, shape.num_heads // HEADS_A_GROUP, O_LORA_RANK,
        WINDOW, INDEX_HEADS, INDEX_DIM, shape.topk,
    )  # fmt: skip


@dataclass(frozen=True)
@checked_fields
class CompressedAttention:
    """Attention of one layer of DeepSeek-V4: a block that was measured whole, projections and all."""

    widths: CompressedWidths
    ratio: int
    window: int | None = None
    is_recurrent = False

    def __post_init__(self) -> None:
        """Refuse sizes no layer has."""
        if self.ratio not in _OPERATORS:
            raise UnsupportedModelError(
                f"a compress_ratio of {self.ratio} has no operator: "
                f"{', '.join(map(str, sorted(_OPERATORS)))} are valid"
            )
        check_sizes(self.widths, *self.widths._fields)
        if (self.ratio == _NO_ENTRIES) != (self.window is not None):
            raise ModelError(
                "a layer of compress_ratio 0 has only a window; other layers attend to all tokens"
            )

    @property
    def attended(self) -> int:
        """Tokens beyond which a query costs no more, the indexer's scores apart; 0 where it always grows."""
        return CSA * self.widths.topk if self.ratio == CSA else 0

    @property
    def heads_text(self) -> str:
        """Heads, as lists of models show them."""
        return f"{self.widths.num_heads} {_NAMES[self.ratio]} {self.widths.head_dim}"

    def obstacles(self, layout: Layout) -> list[str]:
        """What keeps it from being split so."""
        groups = self.widths.o_groups
        if groups % layout.tp:
            return [f"{groups} groups of {self.widths.num_heads} query heads do not divide by {layout.tp}"]
        return []

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Calls of one layer on one GPU, in their order."""
        hidden_bytes = float(hidden * ACTIVATION_BYTES)
        heads = self.widths.num_heads // layout.tp
        # attention computes in bf16 whatever the cache is: the one dtype that was measured
        model = measured_as(hidden, self.widths) + ("" if self.ratio else WINDOW_ALONE)
        key = (execution.kernel("q_up"), execution.kv_dtype, "bf16", model, heads)
        operator = _OPERATORS[self.ratio]
        decode, prefill = (MixerKernel(f"{operator}_{phase}", key) for phase in ("decode", "prefill"))
        return (
            Elementwise("attention_norm", "attention rmsnorm", 1, 2.0 * hidden_bytes),
            MixerCall(1, decode, prefill, execution.kv_dtype, window=self.attended),
            *after_attention(hidden, layout, execution),
        )

    def entry_bytes(self, kv_dtype: str) -> int:
        """Bytes of an entry of the cache: in fp8 what is not rotated, with a scale for every 64 elements."""
        width, rotated = self.widths.head_dim, self.widths.rope_dim
        if kv_dtype == "bf16":
            return width * ACTIVATION_BYTES
        scales = -(-((width - rotated) // SCALED) // FP8_ALIGNMENT) * FP8_ALIGNMENT
        return width - rotated + rotated * ACTIVATION_BYTES + scales

    def index_bytes(self, kv_dtype: str) -> int:
        """Bytes of the indexer's key of an entry: in fp8 with one float32 scale."""
        width = self.widths.index_dim
        return width * ACTIVATION_BYTES if kv_dtype == "bf16" else width + STATE_BYTES

    def kv_bytes_per_token(self, layout: Layout, kv_dtype: str) -> float:
        """Bytes that one GPU keeps of a token, of one layer: its share of an entry, whatever tp is."""
        if self.ratio == _NO_ENTRIES:
            return float(self.entry_bytes(kv_dtype))
        index = self.index_bytes(kv_dtype) if self.ratio == CSA else 0
        return (self.entry_bytes(kv_dtype) + index) / self.ratio

    def state_bytes(self, layout: Layout) -> float:
        """Bytes that one GPU keeps of a sequence whatever its length, of one layer."""
        if self.ratio == _NO_ENTRIES:
            return 0.0
        w = self.widths
        overlap = 2 if self.ratio == CSA else 1
        open_tokens = overlap * self.ratio
        compressed = w.head_dim + (w.index_dim if self.ratio == CSA else 0)
        compressors = open_tokens * 2 * overlap * compressed * STATE_BYTES
        return float(w.window * self.entry_bytes("fp8") + compressors)

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Weights of the linear layers on one GPU, of one layer, by the role of their call."""
        w, tp = self.widths, layout.tp
        heads_width = w.num_heads * w.head_dim // tp
        weights = {
            "q_down": hidden * (w.q_lora_rank + w.head_dim),
            "q_up": w.q_lora_rank * heads_width,
            "o": heads_width * w.o_lora_rank + w.o_groups // tp * w.o_lora_rank * hidden,
        }
        if self.ratio == CSA:
            weights["index"] = w.q_lora_rank * w.index_heads * w.index_dim
        return weights

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Weights that stay in bf16 on one GPU, of one layer: norms, sinks, compressors."""
        w = self.widths
        norms = hidden + w.q_lora_rank + w.head_dim + w.num_heads // layout.tp
        if self.ratio == _NO_ENTRIES:
            return norms
        overlap = 2 if self.ratio == CSA else 1

        def compressor(width: int) -> int:
            return overlap * width * (2 * hidden + self.ratio) + width

        indexer = compressor(w.index_dim) + hidden * w.index_heads if self.ratio == CSA else 0
        return norms + compressor(w.head_dim) + indexer

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Elements a token that its widest kernel reads and writes on one GPU: queries and their outputs."""
        return 2 * self.widths.num_heads * self.widths.head_dim // layout.tp
