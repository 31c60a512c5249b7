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
    """How an engine runs the calls of a layer.

    Attributes
    ----------
    dtype : str
        Of the linear layers' weights and inputs.
    kv_dtype : str
        Of the KV cache.
    quantise_inputs : bool
        Whether each fp8 GEMM is preceded by a kernel that quantises its input; False where the measured
        GEMM includes it.
    formats : Formats or None
        Formats of a layer's modules as the checkpoint has them, all others bf16; None where ``dtype`` is
        that of all.
    kernels : tuple of (str, str)
        The format that the kernels of a stored format compute in, where it has another name.
    scale_bytes : tuple of (str, float)
        Bytes of scales a weight in a format, where the checkpoint has them beside the format's own.
    routing : str
        One of :data:`ROUTINGS`.
    shared_beside : bool
        Whether shared experts run beside the routed ones in steps of decodes alone, not before them.
    exchange : ExchangeRules
        What GPUs send each other for experts.
    scatters_attention : bool
        Whether the sums of a layer's attention are scattered over tp, for its experts to gather.
    whole_blocks : tuple of str
        Formats of projections whose blocks of latent attention are timed as measured whole; those of other
        formats are timed by parts.
    wide_experts : bool
        Whether gated experts run the kernels of wide expert parallelism, which compute alone.
    num_slots : int
        Places for experts on all GPUs where a load balancer copies some; 0: one an expert.
    two_batches_from : tuple of int
        Tokens of a rank from which steps of decodes alone, and steps with prefill, run as two halves whose
        sending and computing overlap; empty where they never do.
    dp_imbalance : float
        Tokens of the most loaded attention-data-parallel rank over the mean of all; steps are those of the
        most loaded one.
    """

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
