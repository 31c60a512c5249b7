"""Latent attention (MLA): the keys and values of all heads are expanded from one latent vector per token."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastroof.models.attention import Attention
from fastroof.models.exchange import after_attention
from fastroof.models.execution import Execution
from fastroof.models.hf import checked_fields
from fastroof.models.layout import Layout, check_sizes, linear_calls
from fastroof.operators.calls import Call, Elementwise, Gemm, LatentProduct, MixerCall, MixerKernel, Role
from fastroof.operators.widths import LatentShape, shape_name
from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES

ATTENTION_DTYPE = "bf16"
"""Compute dtype of attention kernels of measured models, whatever their cache format."""

PROJECTIONS: tuple[Role, ...] = ("q_down", "q_up", "kv_up", "o")


@dataclass(frozen=True)
@checked_fields
class LatentAttention(Attention):
    """Softmax attention that caches one latent vector per token, from which all heads expand."""

    num_heads: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_lora_rank: int | None = None
    bias: bool = False
    rope: bool = True
    output_gate: bool = False
    window = None

    def __post_init__(self) -> None:
        """Reject invalid sizes, also in layers built or modified by hand."""
        check_sizes(self, "num_heads", "kv_lora_rank", "nope_dim", "rope_dim", "v_dim")
        if self.q_lora_rank is not None:
            check_sizes(self, "q_lora_rank")

    @property
    def latent_dim(self) -> int:
        """Elements cached per token: the latent vector, and the rotary key shared by all heads."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def heads_text(self) -> str:
        """Return the heads as model lists show them."""
        return f"{self.num_heads} MLA {self.kv_lora_rank}+{self.rope_dim}"

    def obstacles(self, layout: Layout) -> list[str]:
        """Return why this layout cannot split it; empty if it can."""
        if self.num_heads % layout.tp:
            return [f"{self.num_heads} heads do not divide by {layout.tp}"]
        return []

    def heads(self, layout: Layout) -> int:
        """Return the query heads on one GPU, by which kernels are measured."""
        return self.num_heads // layout.tp

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Return the calls of one layer on one GPU, in execution order."""
        norm = Elementwise("attention_norm", "attention rmsnorm", 1, 4.0 * hidden * ACTIVATION_BYTES)
        block = self._block(hidden, layout, execution)
        gate = self._gate(hidden, layout)
        calls = [*gate, block] if block else self._parts(hidden, layout, execution, gate)
        return (norm, *calls, *after_attention(hidden, layout, execution))

    def _block(self, hidden: int, layout: Layout, execution: Execution) -> MixerCall | None:
        """Return the whole block as one call; None if it runs in parts."""
        dtypes = {execution.kernel(role) for role in PROJECTIONS}
        widths = (self.q_lora_rank, self.kv_lora_rank, self.nope_dim, self.rope_dim, self.v_dim)
        model = shape_name(LatentShape(hidden, *widths))
        if model is None or len(dtypes) > 1 or not dtypes <= set(execution.whole_blocks):
            return None
        key = (*dtypes, execution.kv_dtype, ATTENTION_DTYPE, model, self.heads(layout))
        decode, prefill = (MixerKernel(f"mla_module_{phase}", key) for phase in ("decode", "prefill"))
        return MixerCall(1, decode, prefill, execution.kv_dtype, "attention block")

    def _gate(self, hidden: int, layout: Layout) -> list[Call]:
        if not self.output_gate:
            return []
        width = self.heads(layout) * self.v_dim
        return [
            Gemm("attention_gate", "attention gate", 1, width, hidden, "bf16"),
            Elementwise("attention_gate", "gated attention", 1, 3.0 * width * ACTIVATION_BYTES),
        ]

    def _parts(self, hidden: int, layout: Layout, execution: Execution, gate: list[Call]) -> list[Call]:
        """Return the projections, absorbed products and attention as separate calls."""
        heads, kv_dtype = self.heads(layout), execution.kv_dtype
        q_lora = self.q_lora_rank or 0
        norm_bytes = 2.0 * (q_lora + self.kv_lora_rank) * ACTIVATION_BYTES
        rope_bytes = 2.0 * (heads + 1) * self.rope_dim * ACTIVATION_BYTES
        write_bytes = float(self.latent_dim) * (ACTIVATION_BYTES + DTYPE_BYTES[kv_dtype])
        down, up = q_lora + self.latent_dim, heads * (self.nope_dim + self.rope_dim)
        calls: list[Call] = [
            *linear_calls("q_down", "q_down_quantise", down, hidden, execution),
            Elementwise("qk_norm", "latent rmsnorm", 1, norm_bytes),
            *linear_calls("q_up", "q_up_quantise", up, q_lora or hidden, execution),
        ]
        if self.rope:
            calls.append(Elementwise("rope", "rope", 1, rope_bytes))
        calls.append(Elementwise("kv_write", "kv write", 1, write_bytes))
        expanded = heads * (self.nope_dim + self.v_dim)
        calls += [
            replace(call, steps="with_prefill")
            for call in linear_calls("kv_up", "kv_up_quantise", expanded, self.kv_lora_rank, execution)
        ]
        calls += [
            self._product("pre", self.nope_dim, heads, execution),
            MixerCall(
                1,
                MixerKernel("mla_decode", (kv_dtype, heads, self.kv_lora_rank, self.rope_dim)),
                MixerKernel("mla_prefill", (ATTENTION_DTYPE, kv_dtype, heads, self.nope_dim, self.rope_dim)),
                kv_dtype,
            ),
            self._product("post", self.v_dim, heads, execution),
            *gate,
        ]
        return calls + linear_calls("o", "o_quantise", hidden, heads * self.v_dim, execution)

    def _product(self, part: str, head_dim: int, heads: int, execution: Execution) -> LatentProduct:
        """Return a product that decodes absorb: queries to latent queries, latent outputs to values."""
        dtype, name = execution.kernel("kv_up"), f"absorbed product {part}"
        return LatentProduct("latent_products", name, 1, part, heads, head_dim, self.kv_lora_rank, dtype)

    def kv_bytes_per_token(self, layout: Layout, kv_dtype: str) -> float:
        """Return the KV-cache bytes per token of one layer; every GPU of tp stores the whole vector."""
        return self.latent_dim * DTYPE_BYTES[kv_dtype]

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Return the linear weights of one layer on one GPU, by the role of their call."""
        heads, q_lora = self.heads(layout), self.q_lora_rank or 0
        return {
            "q_down": hidden * (q_lora + self.latent_dim),
            "q_up": (q_lora or hidden) * heads * (self.nope_dim + self.rope_dim),
            "kv_up": self.kv_lora_rank * heads * (self.nope_dim + self.v_dim),
            "o": hidden * heads * self.v_dim,
        }

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Return the weights of one layer on one GPU that stay in bf16: norms, biases and the gate."""
        q_lora = self.q_lora_rank or 0
        biases = (q_lora + self.latent_dim + hidden) * self.bias
        gate = hidden * self.heads(layout) * self.v_dim * self.output_gate
        return hidden + q_lora + self.kv_lora_rank + biases + gate

    def activation_width(self, hidden: int, layout: Layout) -> int:
        """Return the elements per token that the widest kernel (prompt attention) reads and writes."""
        return self.heads(layout) * 2 * (self.nope_dim + self.rope_dim + self.v_dim)
