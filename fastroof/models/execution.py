"""How an engine runs a model: formats of weights and cache, how tokens are routed, what runs in parallel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from fastroof.checks import shown
from fastroof.errors import ModelError
from fastroof.models.hf import checked_fields
from fastroof.units import DTYPE_BYTES

ALLTOALL: Final = ("never", "over_topk", "always")
"""Whether tokens are sent to their experts alone: also where expert groups outnumber a token's experts."""

TOKEN_SHARES: Final = ("never", "with_ep", "always")
"""Whether the GPUs of a rank, where attention is split by tp and dp at once, each take a share of its tokens
to the experts: also only with groups of experts."""

SENDING_EXPERTS: Final = "megamoe"
"""What stands in the place of a library where the experts' own kernel sends tokens."""

ATTENTION_SUMS: Final = ("all_reduce", "reduce_scatter")
"""How the sums of attention are formed where tokens are then shared."""


class ExchangeRules(NamedTuple):
    """What GPUs send each other for the experts of a layer."""

    alltoall: str = "never"
    alltoall_needs_dp: bool = False
    libraries: tuple[str, str] = ("", "")
    comm_dtypes: tuple[str, ...] = ()
    gathered_bytes: tuple[tuple[str, float], ...] = ()
    token_shares: str = "never"
    attention_sum: str = "all_reduce"
    copies_embedding: bool = False


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


_MOST_SCALE_BYTES: Final = 8
"""Of a weight: a separate scale takes less."""


def check_formats(given: Iterable[str]) -> None:
    """Raise ModelError if a format is not in :data:`fastroof.units.DTYPE_BYTES`."""
    for name in given:
        if name not in DTYPE_BYTES:
            raise ModelError(f"a format must be one of {', '.join(DTYPE_BYTES)}, got {shown(name)}")


@dataclass(frozen=True)
@checked_fields
class Checkpoint:
    """Formats of a published checkpoint; which modules have them, its kinds of layers say."""

    dtype: str = "bf16"
    kv_dtype: str | None = None
    method: str = ""
    head_dtype: str = "bf16"
    scale_bytes: tuple[tuple[str, float], ...] = ()
    static_scales: bool = False

    def __post_init__(self) -> None:
        """Refuse formats that nothing is known of."""
        check_formats((self.dtype, self.head_dtype, self.kv_dtype or "bf16", *dict(self.scale_bytes)))
        for name, scale_bytes in self.scale_bytes:
            if not 0 <= scale_bytes <= _MOST_SCALE_BYTES:
                raise ModelError(f"scale_bytes of {name} must be from 0 to {_MOST_SCALE_BYTES}")
        object.__setattr__(self, "scale_bytes", tuple((name, float(each)) for name, each in self.scale_bytes))

    @property
    def formats(self) -> tuple[str, str]:
        """What ``auto`` means of the linear layers, and of the cache."""
        return self.dtype, self.kv_dtype or "bf16"


UNQUANTISED = Checkpoint()
"""Weights in bf16."""
