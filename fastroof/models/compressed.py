"""Attention over a compressed KV cache: CSA and HCA of DeepSeek-V4, and its window-only layers.

Every 4 tokens (CSA) or 128 tokens (HCA) form one cache entry, which holds the key and value of all heads. A
query also attends to the tokens of a short window, which are cached individually. CSA's indexer scores all
entries and picks some; HCA attends to all of them; layers with a ratio of 0 have only the window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from fastroof.errors import ModelError, UnsupportedModelError
from fastroof.models.exchange import after_attention
from fastroof.models.execution import Execution
from fastroof.models.hf import checked_fields
from fastroof.models.layout import Layout, check_sizes, linear_calls
from fastroof.operators import widths as W
from fastroof.operators.calls import AllReduce, Call, Elementwise, MixerCall, MixerKernel
from fastroof.operators.widths import CompressedShape
from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES

_NO_ENTRIES: Final = 0
_NAMES: Final[Mapping[int, str]] = {W.CSA: "CSA", W.HCA: "HCA", _NO_ENTRIES: "window"}
_OPERATORS: Final[Mapping[int, str]] = {W.CSA: "csa", W.HCA: "hca", _NO_ENTRIES: "hca"}
"""Operators by the number of tokens per cache entry."""

STATE_BYTES: Final = 4
"""Compressors hold the tokens of an incomplete entry in float32."""
SCALED: Final = 64
"""Number of elements of an entry that share one scale byte in fp8."""
FP8_ALIGNMENT: Final = 8
"""The scales of an entry are padded to this many bytes."""
ENGRAM_COLUMNS: Final = 24
"""N-grams of a token: 8 tables of each of 2, 3 and 4 tokens."""
ENGRAM_DIM: Final = 256
ENGRAM_OUTPUTS: Final = 5
"""Rows of the residual that n-grams make: a key for each of four streams, and a value."""


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
    """Return the name of the measured model whose blocks have these widths."""
    measured = {name: one for name, one in W.COMPRESSED_SHAPES.items() if one.has_entries and not one.ratio}
    for name, shape in measured.items():
        if widths == _widths_of(shape) and hidden == shape.hidden:
            return name
    sizes = ", ".join(f"{name} {size}" for name, size in widths._asdict().items())
    raise UnsupportedModelError(
        f"compressed attention {hidden} wide ({sizes}) was not measured: blocks are those of "
        f"{' and '.join(measured)}"
    )


def _widths_of(shape: CompressedShape) -> CompressedWidths:
    return CompressedWidths(
        shape.num_heads, W.ENTRY, W.ROPE_DIM, shape.q_lora_rank, shape.num_heads // W.HEADS_A_GROUP,
        W.O_LORA_RANK, W.WINDOW, shape.index_heads, W.INDEX_DIM, shape.topk,
    )  # fmt: skip


def projections(hidden: int, widths: CompressedWidths, tp: int) -> dict[str, int]:
    """Return the weights of a layer's projections on one GPU, by the role of their call."""
    heads_width = widths.num_heads * widths.head_dim // tp
    return {
        "q_down": hidden * (widths.q_lora_rank + widths.head_dim),
        "q_up": widths.q_lora_rank * heads_width,
        "o": heads_width * widths.o_lora_rank + widths.o_groups // tp * widths.o_lora_rank * hidden,
    }


def group_obstacles(widths: CompressedWidths, tp: int) -> list[str]:
    """Return why tensor parallelism cannot split the groups of heads; empty if it can."""
    groups = widths.o_groups
    return [f"{groups} groups of {widths.num_heads} query heads do not divide by {tp}"] if groups % tp else []


@dataclass(frozen=True)
@checked_fields
class SharedEntries:
    """DeepSeek-V4.1 attention of one layer: whole entries of 1 or 2 tokens, which several layers read.

    ``role`` is a key of :data:`fastroof.operators.widths.SHARED_SHAPES`; ``engram`` the rows of a table of
    n-grams before attention, each of ``ENGRAM_DIM`` elements in fp8 with a scale per 32.
    """

    role: str
    engram: int = 0
    is_recurrent = False

    def __post_init__(self) -> None:
        """Reject unknown layers."""
        if self.role not in W.SHARED_SHAPES:
            raise UnsupportedModelError(
                f"a layer of shared entries that is {self.role} has no law: {', '.join(W.SHARED_SHAPES)} do"
            )

    @property
    def idle_weights(self) -> int:
        """Return the weights of its table of n-grams, of which a token reads a few rows."""
        return self.engram * ENGRAM_DIM

    @property
    def shape(self) -> CompressedShape:
        """Return its widths."""
        return W.SHARED_SHAPES[self.role]

    @property
    def most_new(self) -> int:
        """Return the tokens of a prompt that the layer runs on at most; 0 for all."""
        return int(self.shape.most_new) if math.isfinite(self.shape.most_new) else 0

    @property
    def window(self) -> int | None:
        """Return its window if it stores nothing else."""
        return None if self.shape.writes else W.WINDOW

    @property
    def heads_text(self) -> str:
        """Return the heads as model lists show them."""
        return f"{self.shape.num_heads} {self.role} {W.ENTRY}"

    def obstacles(self, layout: Layout) -> list[str]:
        """Return why this layout cannot split it; empty if it can."""
        if layout.world_size != layout.tp:
            return ["layers that share entries and n-grams are timed with tp and ep alone"]
        return group_obstacles(_widths_of(self.shape), layout.tp)

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Return the calls of one layer on one GPU, in execution order."""
        hidden_bytes = float(hidden * ACTIVATION_BYTES)
        heads = self.shape.num_heads // layout.tp
        key = (
            execution.kernel("q_up"),
            execution.kv_dtype,
            "bf16",
            f"deepseek-v4.1-flash-{self.role}",
            heads,
        )
        operator = "csa" if self.shape.scored else "hca"
        decode, prefill = (MixerKernel(f"{operator}_{phase}", key) for phase in ("decode", "prefill"))
        calls: list[Call] = [Elementwise("attention_norm", "attention rmsnorm", 1, 2.0 * hidden_bytes)]
        if self.engram:
            width, out = ENGRAM_COLUMNS * ENGRAM_DIM, ENGRAM_OUTPUTS * hidden
            row_bytes = float(width * ACTIVATION_BYTES)
            calls.append(Elementwise("engram", "n-gram rows", 1, width * DTYPE_BYTES["mxfp8"] + row_bytes))
            if layout.tp > 1:
                calls.append(AllReduce("engram_allreduce", "n-gram all-reduce", 1, layout.tp, row_bytes))
            calls += linear_calls("engram_in", "engram_quantise", out, width, execution)
            calls.append(Elementwise("engram", "n-gram gate", 1, 3.0 * out * ACTIVATION_BYTES))
        mixer = MixerCall(1, decode, prefill, execution.kv_dtype)
        return (*calls, mixer, *after_attention(hidden, layout, execution))

    def kv_bytes_per_token(self, layout: Layout, kv_dtype: str) -> float:
        """Return a token's share of entries and keys, or its bytes in the window; tp does not reduce it."""
        entry = W.ENTRY * DTYPE_BYTES["bf16" if kv_dtype == "bf16" else "mxfp8"]
        key = W.INDEX_DIM * DTYPE_BYTES["mxfp4"]
        return (entry + key) / self.shape.ratio if self.shape.writes else entry

    def state_bytes(self, layout: Layout) -> float:
        """Return the fixed state bytes per sequence: none besides the window's."""
        return 0.0

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Return the linear weights of one layer on one GPU, by the role of their call."""
        shape, tp = self.shape, layout.tp
        weights = projections(hidden, _widths_of(shape), tp)
        if shape.scored:
            weights["index"] = shape.q_lora_rank * shape.index_heads * W.INDEX_DIM
        if self.engram:
            weights["engram"] = -(-self.engram // tp) * ENGRAM_DIM
            weights["engram_in"] = ENGRAM_COLUMNS * ENGRAM_DIM * ENGRAM_OUTPUTS * hidden
        return weights

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Return the weights of one layer on one GPU that stay in bf16: norms, sinks, compressors, keys."""
        shape = self.shape
        norms = hidden + shape.q_lora_rank + W.ENTRY + shape.num_heads // layout.tp
        made = shape.compressor(0) + (W.ENTRY + W.INDEX_DIM) * shape.writes
        keys = hidden * shape.index_heads + W.ENTRY * W.INDEX_DIM * shape.writes if shape.scored else 0
        return norms + made + keys + 2 * (ENGRAM_OUTPUTS - 1) * hidden * bool(self.engram)

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Return the elements per token of the widest kernel on one GPU: queries and their outputs."""
        return 2 * self.shape.num_heads * W.ENTRY // layout.tp


@dataclass(frozen=True)
@checked_fields
class CompressedAttention:
    """DeepSeek-V4 attention of one layer, measured as one block including its projections."""

    widths: CompressedWidths
    ratio: int
    window: int | None = None
    is_recurrent = False

    def __post_init__(self) -> None:
        """Reject invalid ratios and windows."""
        if self.ratio not in _OPERATORS:
            raise UnsupportedModelError(
                f"a compress_ratio of {self.ratio} has no operator: "
                f"{', '.join(map(str, sorted(_OPERATORS)))} are valid"
            )
        check_sizes(self.widths, *self.widths._fields)
        if (self.ratio == _NO_ENTRIES) != (self.window is not None):
            raise ModelError("a layer of compress_ratio 0 has only a window; others attend to all tokens")

    @property
    def attended(self) -> int:
        """Tokens beyond which a query costs no more (indexer scores aside); 0 if the cost always grows."""
        return W.CSA * self.widths.topk if self.ratio == W.CSA else 0

    @property
    def heads_text(self) -> str:
        """Return the heads as model lists show them."""
        return f"{self.widths.num_heads} {_NAMES[self.ratio]} {self.widths.head_dim}"

    def obstacles(self, layout: Layout) -> list[str]:
        """Return why this layout cannot split it; empty if it can."""
        return group_obstacles(self.widths, layout.tp)

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Return the calls of one layer on one GPU, in execution order."""
        hidden_bytes = float(hidden * ACTIVATION_BYTES)
        heads = self.widths.num_heads // layout.tp
        # attention computes in bf16 whatever the cache format: the only measured dtype
        model = measured_as(hidden, self.widths) + ("" if self.ratio else W.WINDOW_ALONE)
        key = (execution.kernel("q_up"), execution.kv_dtype, "bf16", model, heads)
        operator = _OPERATORS[self.ratio]
        decode, prefill = (MixerKernel(f"{operator}_{phase}", key) for phase in ("decode", "prefill"))
        return (
            Elementwise("attention_norm", "attention rmsnorm", 1, 2.0 * hidden_bytes),
            MixerCall(1, decode, prefill, execution.kv_dtype, window=self.attended),
            *after_attention(hidden, layout, execution),
        )

    def entry_bytes(self, kv_dtype: str) -> int:
        """Return the bytes of a cache entry; in fp8 the unrotated part has one scale per 64 elements."""
        width, rotated = self.widths.head_dim, self.widths.rope_dim
        if kv_dtype == "bf16":
            return width * ACTIVATION_BYTES
        scales = -(-((width - rotated) // SCALED) // FP8_ALIGNMENT) * FP8_ALIGNMENT
        return width - rotated + rotated * ACTIVATION_BYTES + scales

    def index_bytes(self, kv_dtype: str) -> int:
        """Return the bytes of an entry's indexer key; in fp8 with one float32 scale."""
        width = self.widths.index_dim
        return width * ACTIVATION_BYTES if kv_dtype == "bf16" else width + STATE_BYTES

    def kv_bytes_per_token(self, layout: Layout, kv_dtype: str) -> float:
        """Return a token's share of a cache entry in bytes; tp does not reduce it."""
        if self.ratio == _NO_ENTRIES:
            return float(self.entry_bytes(kv_dtype))
        index = self.index_bytes(kv_dtype) if self.ratio == W.CSA else 0
        return (self.entry_bytes(kv_dtype) + index) / self.ratio

    def state_bytes(self, layout: Layout) -> float:
        """Return the fixed state bytes per sequence of one layer on one GPU."""
        if self.ratio == _NO_ENTRIES:
            return 0.0
        open_tokens = (2 if self.ratio == W.CSA else 1) * self.ratio
        return float(self.widths.window * self.entry_bytes("fp8") + open_tokens * self.compressor_bytes)

    @property
    def compressor_bytes(self) -> int:
        """Return the bytes of a token in an entry that is not complete."""
        if self.ratio == _NO_ENTRIES:
            return 0
        overlap = 2 if self.ratio == W.CSA else 1
        compressed = self.widths.head_dim + (self.widths.index_dim if self.ratio == W.CSA else 0)
        return 2 * overlap * compressed * STATE_BYTES

    @property
    def index_state_bytes(self) -> int:
        """Return the part of ``compressor_bytes`` that is the indexer's."""
        return 4 * self.widths.index_dim * STATE_BYTES if self.ratio == W.CSA else 0

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Return the linear weights of one layer on one GPU, by the role of their call."""
        w = self.widths
        weights = projections(hidden, w, layout.tp)
        if self.ratio == W.CSA:
            weights["index"] = w.q_lora_rank * w.index_heads * w.index_dim
        return weights

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Return the weights of one layer on one GPU that stay in bf16: norms, sinks, compressors."""
        w = self.widths
        norms = hidden + w.q_lora_rank + w.head_dim + w.num_heads // layout.tp
        if self.ratio == _NO_ENTRIES:
            return norms
        overlap = 2 if self.ratio == W.CSA else 1

        def compressor(width: int) -> int:
            return overlap * width * (2 * hidden + self.ratio) + width

        indexer = compressor(w.index_dim) + hidden * w.index_heads if self.ratio == W.CSA else 0
        return norms + compressor(w.head_dim) + indexer

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Return the elements per token of the widest kernel on one GPU: queries and their outputs."""
        return 2 * self.widths.num_heads * self.widths.head_dim // layout.tp
