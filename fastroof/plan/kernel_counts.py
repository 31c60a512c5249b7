"""How many kernels a step launches: what its host does, and where the GPU may wait between two of them.

A call of a plan is one kernel, except for those below. Their numbers are those of SGLang's layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from fastroof.operators.calls import AttentionCall, Elementwise, Experts, Gemm, MixerCall, RowOperator
from fastroof.plan.curves import RowCurve
from fastroof.plan.plan_data import PlanAttention

QUANTISED: Final = ("fp8", "fp8_block", "nvfp4")
"""Formats of GEMMs whose input is quantised by a kernel before it."""

EXPERT_KERNELS: Final = 7
"""Top-k, two that sort tokens by expert, two GEMMs, the activation and the sum over a token's experts."""

ATTENTION_KERNELS: Final = (2, 1)
"""Grouped-query attention of decodes, which are split and combined, and of prompts."""

MIXER_KERNELS: Final[Mapping[str, tuple[int, int]]] = {
    "mla_decode": (2, 2),
    "mla_prefill": (3, 3),
    # SGLang 0.5.8, layers/attention/fla/chunk.py: 11 Triton kernels, three copies and a mask
    "gdn": (3, 15),
    "kda": (3, 9),
    "mamba2": (3, 6),
}
"""Other attention, of decodes and of prompts: with the kernels that arrange its input."""

BLOCK_KERNELS: Final = (20, 24)
"""Attention that is measured as one block, from its first projection to its last."""


def num_kernels(curves: Iterable[RowCurve], attention: Iterable[PlanAttention], has_prefill: bool) -> float:
    """Number of kernels of a decode step, or of one with prefill."""
    other_kind = "decode_only" if has_prefill else "with_prefill"
    calls = [curve.operator for curve in curves if curve.operator.steps != other_kind]
    total = float(sum(call.times * _of_rows(call) for call in calls))
    return total + sum(part.call.times * _of_attention(part.call, has_prefill) for part in attention)


def _of_rows(call: RowOperator) -> int:
    if isinstance(call, Gemm):
        return 1 + (call.dtype in QUANTISED)
    if isinstance(call, Experts):
        return EXPERT_KERNELS + 2 * (call.dtype in QUANTISED)
    # counted with its GEMM
    return 0 if isinstance(call, Elementwise) and call.role.endswith("_quantise") else 1


def _of_attention(call: AttentionCall | MixerCall, has_prefill: bool) -> int:
    if isinstance(call, AttentionCall):
        return ATTENTION_KERNELS[has_prefill]
    kernel = call.prefill if has_prefill else call.decode
    return 0 if kernel is None else MIXER_KERNELS.get(kernel.operator, BLOCK_KERNELS)[has_prefill]
