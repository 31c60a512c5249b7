"""How an engine runs a model: formats of weights and cache, how tokens are routed, what runs beside what."""

from __future__ import annotations

from typing import Final, NamedTuple

from fastroof.models.exchange_rules import ExchangeRules
from fastroof.units import DTYPE_BYTES

__all__ = ["AUTO", "DTYPES", "KV_DTYPES", "ROUTING", "ROUTINGS", "Execution", "Formats", "weight_bytes"]

AUTO: Final = "auto"
"""The format that the checkpoint has."""

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

fp8 is per tensor, fp8_block per block of 128 x 128 weights, mxfp8 per 32 of a row; int8 is weights and
activations, int8_wo, int4_wo and nvfp4_wo weights alone; w4afp8 is int4 weights against fp8 activations.
"""
KV_DTYPES: Final = ("bf16", "fp8")

ROUTINGS: Final = ("balanced", "power_law_1.01", "power_law_1.2")
"""How tokens are drawn over experts in the measured tables."""
ROUTING: Final = "power_law_1.2"
"""Of 1,584 public serving runs mixtures of experts come out at 10.3 % (TPOT MAPE) with it, at 10.0 with
power_law_1.01 and at 13.6 with balanced routing: real routing is skewed, and between the two skews the data
do not decide; the published tables' own engine takes this one for most models."""

Formats = tuple[tuple[str, str], ...]
"""Formats of a layer's modules that are not bf16, by the role of their call."""


class Execution(NamedTuple):
    """How an engine runs the calls of a layer."""

    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    quantise_inputs: bool = False
    formats: Formats | None = None
    kernels: tuple[tuple[str, str], ...] = ()
    scale_bytes: tuple[tuple[str, float], ...] = ()
    routing: str = ROUTING
    shared_beside: bool = False
    exchange: ExchangeRules = ExchangeRules()
    scatters_attention: bool = False
    whole_blocks: tuple[str, ...] = ()
    dp_imbalance: float = 1.0
    wide_experts: bool = False
    num_slots: int = 0
    two_batches_from: tuple[int, ...] = ()

    def stored(self, module: str) -> str:
        """Format in which the weights of a module are stored, such as ``qkv`` or ``experts``."""
        return self.dtype if self.formats is None else dict(self.formats).get(module, "bf16")

    @property
    def head_dtype(self) -> str:
        """Format of the LM head: bf16 unless the checkpoint says otherwise."""
        return "bf16" if self.formats is None else self.stored("lm_head")

    def of_head(self) -> Execution:
        """Return the execution with the head's format alone."""
        return self._replace(formats=(("lm_head", self.head_dtype),))

    def kernel(self, module: str) -> str:
        """Format that the kernels of a module compute in."""
        stored = self.stored(module)
        return dict(self.kernels).get(stored, stored)


def weight_bytes(weights: dict[str, int], execution: Execution) -> float:
    """Bytes of a layer's linear weights and their scales, each module in its own format."""
    scale_bytes = dict(execution.scale_bytes)

    def bytes_of(dtype: str) -> float:
        return DTYPE_BYTES[dtype] + scale_bytes.get(dtype, 0.0)

    return sum(count * bytes_of(execution.stored(module)) for module, count in weights.items())
