"""Calls: operators as a step uses them, with their shape on one GPU, how often, and over which rows.

Attention aside, each depends on a number of rows alone: the tokens of the step, or its sequences.
Nothing here knows a latency.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

__all__ = [
    "AllReduce",
    "AttentionCall",
    "Call",
    "Collective",
    "Dispatch",
    "Elementwise",
    "Experts",
    "Gemm",
    "HyperConnection",
    "LatentProduct",
    "MixerCall",
    "MixerKernel",
    "Parallel",
    "Role",
    "RowOperator",
    "Rows",
    "SendReceive",
    "Steps",
]

Rows = Literal["tokens", "sequences", "expert_tokens"]
"""The step's tokens, its sequences, or the tokens of all attention-data-parallel ranks together."""

Steps = Literal["all", "decode_only", "with_prefill"]
"""Which steps a call runs in: some kernels are others in steps of decodes alone."""

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
    "mtp_norms",
    "mtp_projection",
    "tokens_gather",
    "kv_gather",
    "stage_send",
    "final_norm",
    "lm_head",
    "runtime",
]
"""What a call does in a step: other programs' operators are found by it, never by a call's name.

``runtime`` is what an engine adds to its kernels, which is no call of any model.
"""


@dataclass(frozen=True)
class Gemm:
    """A linear layer on one GPU: rows x n x k, ``times`` a step."""

    operator: ClassVar[str] = "gemm"
    role: Role
    name: str
    times: int
    n: int
    k: int
    dtype: str
    rows: Rows = "tokens"
    steps: Steps = "all"


@dataclass(frozen=True)
class Elementwise:
    """A kernel that only streams: ``row_bytes`` read and written a row, ``times`` a step."""

    operator: ClassVar[str] = "elementwise"
    role: Role
    name: str
    times: int
    row_bytes: float
    rows: Rows = "tokens"
    steps: Steps = "all"


@dataclass(frozen=True)
class AllReduce:
    """A sum over a group, ``stride`` GPUs apart: ``row_bytes`` a row from each, ``times`` a step."""

    operator: ClassVar[str] = "allreduce"
    role: Role
    name: str
    times: int
    num_gpus: int
    row_bytes: float
    rows: Rows = "tokens"
    steps: Steps = "all"
    stride: int = 1


@dataclass(frozen=True)
class Experts:
    """Routed experts of a layer on one GPU: one fused kernel, ``times`` a step.

    Attributes
    ----------
    hidden, intermediate, topk, num_experts : int
        Of the whole layer: model width, width of one expert, experts a token is routed to, experts.
    moe_tp, moe_ep : int
        GPUs that share each expert, and groups of experts on GPUs of their own.
    dtype : str
        That its kernels compute in.
    distribution : str
        How tokens spread over experts, as measured tables call it.
    is_gated : bool
        Three GEMMs an expert; two without a gate.
    phase : str
        ``context`` or ``generation`` of kernels of wide expert parallelism, which compute alone, and of
        those that send; empty of others.
    num_slots : int
        Of the former: places for experts on all GPUs, more than experts where a load balancer copies some.
    sends : bool
        Whether the kernel sends tokens to their experts and back itself.
    """

    role: Role
    name: str
    times: int
    hidden: int
    intermediate: int
    topk: int
    num_experts: int
    moe_tp: int
    moe_ep: int
    dtype: str
    distribution: str
    is_gated: bool = True
    rows: Rows = "expert_tokens"
    steps: Steps = "all"
    phase: str = ""
    num_slots: int = 0
    sends: bool = False

    @property
    def operator(self) -> str:
        """The operator whose tables have it."""
        if self.sends:
            return "megamoe"
        if self.phase:
            return "moe_wide"
        return "moe" if self.is_gated else "moe_nongated"


@dataclass(frozen=True)
class Collective:
    """An all-gather, reduce-scatter or all-to-all: ``row_bytes`` a row from each GPU, ``times`` a step.

    The GPUs of its group are ``stride`` apart.
    """

    operator: ClassVar[str] = "collective"
    role: Role
    name: str
    times: int
    collective: str
    num_gpus: int
    row_bytes: float
    rows: Rows = "tokens"
    steps: Steps = "all"
    stride: int = 1


@dataclass(frozen=True)
class Dispatch:
    """One phase of sending tokens to the GPUs of their experts, ``times`` a step.

    Attributes
    ----------
    library : str
        Whose kernels send, as measured tables call it: ``deepep_ll``.
    phase : str
        ``dispatch`` or ``combine``.
    comm_dtype : str
        What is sent; ``default`` for what the library sends unasked.
    hidden, topk, num_experts : int
        Of the whole layer.
    num_gpus : int
        GPUs that share the experts.
    shared_by : int
        GPUs that share the rows: each sends its part of them.
    """

    operator: ClassVar[str] = "expert_dispatch"
    role: Role
    name: str
    times: int
    library: str
    phase: str
    comm_dtype: str
    hidden: int
    topk: int
    num_experts: int
    num_gpus: int
    shared_by: int = 1
    rows: Rows = "tokens"
    steps: Steps = "all"


@dataclass(frozen=True)
class SendReceive:
    """What a pipeline stage sends the next one: ``row_bytes`` a row, ``times`` a step.

    Attributes
    ----------
    stages, stage_gpus : int
        Stages one after another, and the GPUs of each: they say which boundaries lie between nodes.
    """

    operator: ClassVar[str] = "send_receive"
    role: Role
    name: str
    times: int
    row_bytes: float
    stages: int
    stage_gpus: int
    rows: Rows = "tokens"
    steps: Steps = "all"


@dataclass(frozen=True)
class LatentProduct:
    """One of the two batched products that decodes of latent attention absorb, ``times`` a step.

    Attributes
    ----------
    part : str
        ``pre``: queries to latent ones, before attention; ``post``: latent outputs to values, after it.
    num_heads : int
        Heads on one GPU: a product each.
    head_dim, kv_lora_rank : int
        Widths of a head on its own side, and of the latent vector.
    dtype : str
        Of the weights that are absorbed; what kernels compute in, tables say.
    """

    operator: ClassVar[str] = "mla_bmm"
    role: Role
    name: str
    times: int
    part: str
    num_heads: int
    head_dim: int
    kv_lora_rank: int
    dtype: str
    rows: Rows = "tokens"
    steps: Steps = "decode_only"


@dataclass(frozen=True)
class HyperConnection:
    """Mixing residual streams before a layer's sublayers, or after them, ``times`` a step.

    Attributes
    ----------
    stage : str
        ``pre`` or ``post``.
    hidden, streams : int
        Model width, and rows of the residual a token.
    sinkhorn_iterations : int
        Iterations that make the mixing weights doubly stochastic.
    sites : int
        Sublayers that one call is of.
    """

    operator: ClassVar[str] = "hyper_connections"
    role: Role
    name: str
    times: int
    stage: str
    hidden: int
    streams: int
    sinkhorn_iterations: int
    sites: int
    dtype: str = "bf16"
    rows: Rows = "tokens"
    steps: Steps = "all"


RowOperator = (
    Gemm
    | Elementwise
    | AllReduce
    | Experts
    | Collective
    | Dispatch
    | SendReceive
    | LatentProduct
    | HyperConnection
)


@dataclass(frozen=True)
class Parallel:
    """Calls on several paths beside each other, as shared experts beside routed ones: the longest counts.

    Attributes
    ----------
    paths : tuple of tuple of RowOperator
        Each in its order; all over tokens, their own or those of every rank.
    """

    paths: tuple[tuple[RowOperator, ...], ...]


@dataclass(frozen=True)
class AttentionCall:
    """Attention of a layer on one GPU, over the keys of the step's requests; ``times`` a step.

    A query attends to the last ``window`` tokens, itself included; to all of them where that is 0.
    """

    times: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    name: str = "attention"
    window: int = 0


class MixerKernel(NamedTuple):
    """A measured kernel, or a block of several measured as one, by the table that has it.

    Attributes
    ----------
    operator : str
        Name of the operator: ``mla_decode``, ``dsa_prefill``, ``gdn``.
    key : tuple
        What names a kernel in its tables, in the order of the operator's ``keys``; heads are those of one
        GPU.
    """

    operator: str
    key: tuple[Any, ...]


@dataclass(frozen=True)
class MixerCall:
    """What mixes tokens otherwise than by grouped heads: latent and sparse attention, linear attention.

    Of a layer on one GPU, over the keys or states of the step's requests, ``times`` a step.

    Attributes
    ----------
    decode, prefill : MixerKernel or None
        What runs over one new token a sequence, and over prompts; None where nothing does.
    window : int
        Tokens beyond which a query's attention costs no more, as where an indexer picks so many; 0 where it
        always grows.
    """

    times: int
    decode: MixerKernel | None
    prefill: MixerKernel | None
    kv_dtype: str
    name: str = "attention"
    window: int = 0


Call = RowOperator | Parallel | AttentionCall | MixerCall
