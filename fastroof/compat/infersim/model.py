"""The fields that InferSim reads from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from fastroof.checks import shown
from fastroof.errors import ModelError
from fastroof.models.hf import Fields

NESTED_TYPES: Final = ("qwen3_5", "qwen3_5_moe")
"""Model types whose language model is in ``text_config``."""


@dataclass(frozen=True)
class LatentAttention:
    """Widths of multi-head latent attention (MLA)."""

    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class GatedDeltaNet:
    """The linear-attention layers of a hybrid model; they are not split by tensor parallelism."""

    num_layers: int
    conv_kernel: int
    num_key_heads: int
    key_head_dim: int
    num_value_heads: int
    value_head_dim: int

    @property
    def key_width(self) -> int:
        """Width of all keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Width of all values."""
        return self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class InfersimModel:
    """A model as InferSim sees it."""

    hidden: int
    num_layers: int
    full_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    moe: bool
    num_experts: int
    num_shared_experts: int
    topk: int
    intermediate: int
    mla: LatentAttention | None
    gdn: GatedDeltaNet | None


def read_model(config: Mapping[str, Any]) -> InfersimModel:
    """Read a config.json as InferSim does."""
    if not isinstance(config, Mapping):
        raise ModelError(f"config must be the dict of a Hugging Face config.json, got {shown(config)}")
    if config.get("model_type") in NESTED_TYPES:
        nested = config.get("text_config")
        if not isinstance(nested, Mapping):
            raise ModelError(f"config: field text_config must be an object, got {shown(nested)}")
        config = nested
    fields = Fields(config, "config")
    num_heads = fields.size("num_attention_heads")
    num_layers = fields.size("num_hidden_layers")
    interval = fields.optional_size("full_attention_interval")
    full_layers = num_layers // interval if interval else num_layers
    mla = _latent_attention(fields)
    head_dim = 0 if mla else fields.optional_size("head_dim") or fields.size("hidden_size") // num_heads
    experts = fields.optional_size("num_routed_experts") or fields.optional_size("num_experts")
    has_shared = bool(experts and config.get("num_shared_experts"))
    return InfersimModel(
        hidden=fields.size("hidden_size"),
        num_layers=num_layers,
        full_layers=full_layers,
        num_heads=num_heads,
        num_kv_heads=fields.size("num_key_value_heads"),
        head_dim=head_dim,
        moe=bool(experts),
        num_experts=experts or 1,
        num_shared_experts=fields.size("num_shared_experts") if has_shared else 0,
        topk=fields.size("num_experts_per_tok") if experts else 1,
        intermediate=fields.size("moe_intermediate_size" if experts else "intermediate_size"),
        mla=mla,
        gdn=_gated_delta_net(fields, num_layers - full_layers) if interval else None,
    )


def _latent_attention(fields: Fields) -> LatentAttention | None:
    if fields.config.get("kv_lora_rank") is None:
        return None
    return LatentAttention(
        fields.size("q_lora_rank"),
        fields.size("kv_lora_rank"),
        fields.size("qk_nope_head_dim"),
        fields.size("qk_rope_head_dim"),
        fields.size("v_head_dim"),
    )


def _gated_delta_net(fields: Fields, num_layers: int) -> GatedDeltaNet:
    return GatedDeltaNet(
        num_layers,
        fields.size("linear_conv_kernel_dim"),
        fields.size("linear_num_key_heads"),
        fields.size("linear_key_head_dim"),
        fields.size("linear_num_value_heads"),
        fields.size("linear_value_head_dim"),
    )


GFLOP: Final = 1e9
GFLOPS_PER_TFLOPS: Final = 1024
"""InferSim counts 1024 GFLOP/s per TFLOP/s, 2.4 % too many."""

BANDWIDTH_SHARE: Final = 0.8
"""Share of every datasheet bandwidth that InferSim considers achievable."""

RUNTIME_GIB: Final = 15
"""Memory that InferSim reserves for the runtime."""
ACTIVATIONS_GIB: Final = 5
"""Memory that InferSim reserves for activations."""

CAUSAL_DIVISOR: Final = 1.8
MISSING_PREFILL_MFU: Final = 0.9
PREFILL_OVERHEAD_MS: Final = 30
DECODE_OVERHEAD_MS: Final = 5
HYBRID_DECODE_OVERHEAD_MS: Final = 2
SM_RATIO: Final = 108 / 132
"""Share of the SMs that compute while two batches overlap."""


@dataclass(frozen=True)
class InfersimGpu:
    """InferSim's constants of a GPU; bandwidths include its derating.

    Attributes
    ----------
    fp16_tflops, fp8_tflops : float
        Peaks, TFLOP/s (taken as 1024 GFLOP/s each).
    default_mfu : float
        MFU without a measured row.
    memory_gib : float
        Memory, GiB.
    memory_gb_per_s, nvlink_gb_per_s, rdma_gb_per_s : float
        Bandwidths, GB/s (taken as GiB/s): memory, NVLink in one direction, network.

    Examples
    --------
    >>> GPUS["h800"].fp16_tflops
    989
    """

    fp16_tflops: float
    fp8_tflops: float
    default_mfu: float
    memory_gib: float
    memory_gb_per_s: float
    nvlink_gb_per_s: float
    rdma_gb_per_s: float


GPUS: Final[Mapping[str, InfersimGpu]] = MappingProxyType(
    {
        name: InfersimGpu(
            fp16_tflops, fp8_tflops, default_mfu, memory_gib, memory * BANDWIDTH_SHARE,
            nvlink * BANDWIDTH_SHARE / 2, rdma * BANDWIDTH_SHARE,
        )
        for name, fp16_tflops, fp8_tflops, default_mfu, memory_gib, memory, nvlink, rdma in (
            ("h20", 148, 296, 0.6, 96, 4096, 900, 50),
            ("h800", 989, 1979, 0.35, 80, 3430, 400, 50),
            ("h200", 989, 1979, 0.4, 141, 4800, 900, 50),
            ("gb200", 2500, 5000, 0.5, 192, 13400, 1800, 50),
        )
    }
)  # fmt: skip
"""InferSim's table of GPUs (alibaba/InferSim@f2293da, Apache-2.0): datasheet GB/s, NVLink halved."""
