"""How an engine runs a model: weight and cache formats, token routing, parallel streams."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from fastroof.checks import shown
from fastroof.errors import ModelError
from fastroof.models.hf import checked_fields
from fastroof.models.lora import Adapters
from fastroof.operators.calls import ModelledPrompts
from fastroof.units import DTYPE_BYTES

SENDING_EXPERTS: Final = "megamoe"
"""Library name that stands for experts whose own kernel sends tokens."""


class ExchangeRules(NamedTuple):
    """What GPUs send each other for the experts of a layer.

    ``alltoall`` is never, always, or over_topk: if expert groups outnumber a token's experts.
    """

    alltoall: str = "never"
    alltoall_needs_dp: bool = False
    libraries: tuple[str, str] = ("", "")
    comm_dtypes: tuple[str, ...] = ()
    gathered_bytes: tuple[tuple[str, float], ...] = ()
    token_shares: str = "never"
    attention_sum: str = "all_reduce"
    copies_embedding: bool = False


AUTO: Final = "auto"
"""The checkpoint's format."""

DTYPES: Final = (
    "bf16",
    "fp8",
    "fp8_block",
    "mxfp8",
    "int8",
    "int8_wo",
    "int4_wo",
    "w4afp8",
    "nvfp4",
    "nvfp4_wo",
    "mxfp4",
)
"""Formats of linear layers and experts.

fp8 is per tensor, fp8_block per block of 128 x 128 weights, mxfp8 per 32 weights of a row. int8 is weights
and activations; int8_wo, int4_wo and nvfp4_wo weights only; w4afp8 int4 weights and fp8 activations.
"""
KV_DTYPES: Final = ("bf16", "fp8", "nvfp4", "int8_per_token_head")
"""Formats of the KV cache; the last two are for attention with keys and values of heads only."""
MEASURED_KV: Final = KV_DTYPES[:2]

ROUTINGS: Final = ("balanced", "power_law_1.01", "power_law_1.2")
"""Distribution of tokens over experts in the measured tables."""
ROUTING: Final = "power_law_1.2"
"""Default routing of families without their own.

TPOT MAPE of serving runs, %, by constants fitted without the model, with power_law_1.2, 1.01 and balanced:
gpt-oss 6.9, 7.1, 10.8 (vLLM) and 8.2, 10.0, 14.6 (TensorRT-LLM); Kimi-K2.5 8.9, 9.3, 14.5; MiniMax-M2.5
5.8, 6.1, 10.4; Qwen3.5 11.4, 11.6, 14.4; DeepSeek-V3 13.7, 13.5, 17.0 and (SGLang) 10.6, 10.6, 11.5;
Qwen3-235B 8.8, 7.5, 12.9; GLM-5 14.1, 13.7, 14.6. Routing of many small experts is skewed, and no family
decides between the two skews.
"""

Formats = tuple[tuple[str, str], ...]
"""Formats of a layer's modules that are not bf16, by the role of their call."""


class Execution(NamedTuple):
    """How an engine runs the calls of a layer."""

    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    quantise_inputs: tuple[str, ...] = ()
    formats: Formats | None = None
    kernels: tuple[tuple[str, str], ...] = ()
    scale_bytes: tuple[tuple[str, float], ...] = ()
    routing: str = ROUTING
    shared_beside: bool = False
    shared_most_tokens: int = 0
    fused_norm_tokens: int = 0
    sink_prompts: ModelledPrompts | None = None
    exchange: ExchangeRules = ExchangeRules()
    scatters_attention: bool = False
    whole_blocks: tuple[str, ...] = ()
    dp_imbalance: float = 1.0
    wide_experts: bool = False
    num_slots: int = 0
    two_batches_from: tuple[int, ...] = ()
    adapters: Adapters | None = None

    def stored(self, module: str) -> str:
        """Return the format in which the weights of a module, such as ``qkv`` or ``experts``, are stored."""
        return self.dtype if self.formats is None else dict(self.formats).get(module, "bf16")

    @property
    def head_dtype(self) -> str:
        """Format of the LM head: bf16 unless the checkpoint specifies another."""
        return "bf16" if self.formats is None else self.stored("lm_head")

    def of_head(self) -> Execution:
        """Return the execution with only the LM head's format."""
        return self._replace(formats=(("lm_head", self.head_dtype),))

    def kernel(self, module: str) -> str:
        """Return the format in which the kernels of a module compute."""
        stored = self.stored(module)
        return dict(self.kernels).get(stored, stored)


def weight_bytes(weights: dict[str, int], execution: Execution) -> float:
    """Return the bytes of a layer's linear weights and scales, each module in its own format."""
    scale_bytes = dict(execution.scale_bytes)

    def bytes_of(dtype: str) -> float:
        return DTYPE_BYTES[dtype] + scale_bytes.get(dtype, 0.0)

    return sum(count * bytes_of(execution.stored(module)) for module, count in weights.items())


_MOST_SCALE_BYTES: Final = 8
"""Maximum scale bytes per weight: one separate scale takes less."""


def check_formats(formats: Iterable[str]) -> None:
    """Raise ModelError if a format is not in :data:`fastroof.units.DTYPE_BYTES`."""
    for name in formats:
        if name not in DTYPE_BYTES:
            raise ModelError(f"a format must be one of {', '.join(DTYPE_BYTES)}, got {shown(name)}")


@dataclass(frozen=True)
@checked_fields
class Checkpoint:
    """Formats of a published checkpoint; its layer kinds record which modules have them."""

    dtype: str = "bf16"
    kv_dtype: str | None = None
    method: str = ""
    head_dtype: str = "bf16"
    scale_bytes: tuple[tuple[str, float], ...] = ()
    static_scales: bool = False

    def __post_init__(self) -> None:
        """Reject unknown formats."""
        check_formats((self.dtype, self.head_dtype, self.kv_dtype or "bf16", *dict(self.scale_bytes)))
        for name, scale_bytes in self.scale_bytes:
            if not 0 <= scale_bytes <= _MOST_SCALE_BYTES:
                raise ModelError(f"scale_bytes of {name} must be from 0 to {_MOST_SCALE_BYTES}")
        object.__setattr__(self, "scale_bytes", tuple((name, float(each)) for name, each in self.scale_bytes))

    @property
    def formats(self) -> tuple[str, str]:
        """Formats that ``auto`` stands for: of the linear layers and of the KV cache."""
        return self.dtype, self.kv_dtype or "bf16"


UNQUANTISED = Checkpoint()
"""A checkpoint with weights in bf16."""
