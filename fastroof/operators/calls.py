"""Calls of a step: an operator with its shape on one GPU, its count and its rows, without any latency.

Except for attention, a call depends only on a number of rows: the step's tokens or sequences. ``times`` is
the count per step; ``stride`` is the distance of a group's GPUs in ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

Rows = Literal["tokens", "sequences", "expert_tokens"]
"""The step's tokens, its sequences, or the tokens of all attention-data-parallel ranks together."""

Steps = Literal["all", "decode_only", "with_prefill"]
"""Steps that a call runs in; some kernels differ in steps without prefill."""

Role = Literal[
    "embedding",
    "attention_norm",
    "qkv_quantise",
    "qkv",
    "qk_norm",
    "qk_norm_allreduce",
    "rope",
    "kv_write",
    "decode_attention",
    "prefill_attention",
    "attention_gate",
    "q_down_quantise",
    "q_down",
    "q_up_quantise",
    "q_up",
    "kv_up_quantise",
    "kv_up",
    "latent_products",
    "index",
    "state_in_quantise",
    "state_in",
    "state_conv",
    "state_gate",
    "state_out_quantise",
    "state_out",
    "hyper_connection",
    "engram",
    "engram_allreduce",
    "engram_quantise",
    "engram_in",
    "o_quantise",
    "o",
    "attention_allreduce",
    "mlp_norm",
    "gate_up_quantise",
    "gate_up",
    "activation",
    "down_quantise",
    "down",
    "mlp_allreduce",
    "router",
    "shared_gate_up_quantise",
    "shared_gate_up",
    "shared_activation",
    "shared_down_quantise",
    "shared_down",
    "shared_gate",
    "experts_down_quantise",
    "experts_down",
    "experts_up_quantise",
    "experts_up",
    "attention_scatter",
    "experts_gather",
    "experts_dispatch",
    "experts",
    "experts_combine",
    "experts_scatter",
    "lora",
    "mtp_norms",
    "mtp_projection",
    "tokens_gather",
    "kv_gather",
    "stage_send",
    "final_norm",
    "lm_head",
    "runtime",
]
"""What a call does in a step; exports to other programs map roles, never names of calls.

``runtime`` is the overhead of an engine, which belongs to no call of a model.
"""


@dataclass(frozen=True)
class RowOperator:
    """A call whose latency depends on a number of rows; its other fields are its shape."""

    role: Role
    name: str
    times: int
    rows: Rows = field(default="tokens", kw_only=True)
    steps: Steps = field(default="all", kw_only=True)
    beyond: int = field(default=0, kw_only=True)
    """Number of tokens of a step up to which another call includes this one."""

    @property
    def operator(self) -> str:
        """Name of the operator."""
        raise NotImplementedError


@dataclass(frozen=True)
class Gemm(RowOperator):
    """A linear layer on one GPU: rows x n x k."""

    operator: ClassVar[str] = "gemm"
    n: int
    k: int
    dtype: str


@dataclass(frozen=True)
class Elementwise(RowOperator):
    """A kernel that only streams: ``row_bytes`` read and written per row."""

    operator: ClassVar[str] = "elementwise"
    row_bytes: float


@dataclass(frozen=True)
class AllReduce(RowOperator):
    """A sum over a group of GPUs: ``row_bytes`` per row from each."""

    operator: ClassVar[str] = "allreduce"
    num_gpus: int
    row_bytes: float
    stride: int = 1


@dataclass(frozen=True)
class Experts(RowOperator):
    """Routed experts of a layer on one GPU: one fused kernel; sizes are those of the whole layer.

    ``phase`` and ``num_slots`` (places for experts, with copies of a load balancer) are of wide expert
    parallelism; a kernel that ``sends`` also dispatches and combines tokens.
    """

    hidden: int
    intermediate: int
    topk: int
    num_experts: int
    moe_tp: int
    moe_ep: int
    dtype: str
    distribution: str
    is_gated: bool = True
    rows: Rows = field(default="expert_tokens", kw_only=True)
    phase: str = ""
    num_slots: int = 0
    sends: bool = False

    @property
    def operator(self) -> str:
        """Name of the operator."""
        if self.sends:
            return "megamoe"
        if self.phase:
            return "moe_wide"
        return "moe" if self.is_gated else "moe_nongated"


@dataclass(frozen=True)
class Collective(RowOperator):
    """An all-gather, reduce-scatter or all-to-all: ``row_bytes`` per row from each GPU."""

    operator: ClassVar[str] = "collective"
    collective: str
    num_gpus: int
    row_bytes: float
    stride: int = 1


@dataclass(frozen=True)
class Dispatch(RowOperator):
    """One phase (dispatch or combine) of sending tokens to the GPUs of their experts.

    ``library`` names the kernels as tables do, ``shared_by`` is the number of GPUs that share the rows.
    """

    operator: ClassVar[str] = "expert_dispatch"
    library: str
    phase: str
    comm_dtype: str
    hidden: int
    topk: int
    num_experts: int
    num_gpus: int
    shared_by: int = 1


@dataclass(frozen=True)
class SendReceive(RowOperator):
    """Activations that a pipeline stage sends to the next: ``row_bytes`` per row."""

    operator: ClassVar[str] = "send_receive"
    row_bytes: float
    stages: int
    stage_gpus: int


@dataclass(frozen=True)
class LatentProduct(RowOperator):
    """One of the two batched GEMMs of absorbed latent attention: ``pre`` or ``post`` attention."""

    operator: ClassVar[str] = "mla_bmm"
    part: str
    num_heads: int
    head_dim: int
    kv_lora_rank: int
    dtype: str
    steps: Steps = field(default="decode_only", kw_only=True)


@dataclass(frozen=True)
class HyperConnection(RowOperator):
    """Mixing of residual streams before (``pre``) or after (``post``) a layer's sublayers."""

    operator: ClassVar[str] = "hyper_connections"
    stage: str
    hidden: int
    streams: int
    sinkhorn_iterations: int
    sites: int
    dtype: str = "bf16"


@dataclass(frozen=True)
class AdapterGemm(RowOperator):
    """One of the GEMMs of LoRA adapters next to a layer: each row by its adapter's matrix.

    ``shrink`` multiplies ``inputs`` by matrices of ``slices`` x rank outputs, ``expand`` the rank by
    ``outputs``; ``lookup`` reads a row of an embedding's matrix. Experts have a matrix each, and a token
    ``picks`` of them.
    """

    operator: ClassVar[str] = "lora"
    part: Literal["shrink", "expand", "lookup"]
    inputs: int
    outputs: int
    slices: int
    adapters: int
    experts: int = 1
    picks: float = 1.0

    @property
    def weights(self) -> int:
        """Elements of one adapter."""
        return self.inputs * self.outputs * self.experts


@dataclass(frozen=True)
class Parallel:
    """Calls on parallel paths, such as shared and routed experts: the longest path counts.

    Steps of more than ``most_tokens`` run them one after another; 0 if none does.
    """

    paths: tuple[tuple[RowOperator, ...], ...]
    most_tokens: int = 0


class ModelledPrompts(NamedTuple):
    """Attention of prompts by a kernel that was not measured.

    ``share`` is its efficiency relative to the measured kernel, ``error`` the standard error of its ln.
    """

    share: float
    error: float


@dataclass(frozen=True)
class AttentionCall:
    """Grouped-query attention of a layer on one GPU; window 0 is full attention."""

    times: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    name: str = "attention"
    window: int = 0
    prompts: ModelledPrompts | None = None


class MixerKernel(NamedTuple):
    """A measured kernel, or a block of kernels measured as one: operator and key of its table."""

    operator: str
    key: tuple[Any, ...]


@dataclass(frozen=True)
class MixerCall:
    """A layer's latent, sparse or linear attention on one GPU: kernels of decode and prefill.

    ``window`` is the number of tokens beyond which attention costs no more; 0 if it always grows.
    """

    times: int
    decode: MixerKernel | None
    prefill: MixerKernel | None
    kv_dtype: str
    name: str = "attention"
    window: int = 0


Call = RowOperator | Parallel | AttentionCall | MixerCall
