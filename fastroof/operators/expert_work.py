"""Work of routed experts: FLOPs, bytes, and the experts that tokens are expected to reach."""

from __future__ import annotations

import math
from typing import Final

from fastroof.arrays import Floats
from fastroof.errors import LookupInputError
from fastroof.operators.work import Real, as_floats
from fastroof.units import ACTIVATION_BYTES

__all__ = [
    "EVENLY_ROUTED",
    "GATED_GEMMS",
    "NONGATED_GEMMS",
    "check_routed",
    "moe_bytes",
    "moe_flops",
    "moe_touched_experts",
    "tokens_to_reach_all",
]

GATED_GEMMS: Final = 3
NONGATED_GEMMS: Final = 2

EVENLY_ROUTED: Final = ("balanced", "uniform")
"""Distributions of tokens over experts for which the expectation of uniform routing holds."""


def check_routed(topk: int, num_experts: int) -> None:
    """Refuse a token that is routed to more experts than there are, which no kernel can be asked for."""
    if topk > num_experts:
        raise LookupInputError(f"topk {topk} is more than num_experts {num_experts}: it can be {num_experts}")


def moe_touched_experts(num_tokens: Real, topk: Real, num_experts: Real, moe_ep: Real = 1) -> Floats:
    """Experts of one GPU that at least one token reaches, for uniform routing."""
    experts = as_floats(num_experts)
    return experts / as_floats(moe_ep) * (1.0 - (1.0 - as_floats(topk) / experts) ** as_floats(num_tokens))


UNREACHED: Final = 2.0**-60
"""Share of experts below which a float64 of their bytes does not change any more."""


def tokens_to_reach_all(topk: int, num_experts: int) -> int:
    """Tokens from which the expectation of :func:`moe_touched_experts` is all experts, to the last bit."""
    if topk >= num_experts:
        return 1
    return math.ceil(math.log(UNREACHED) / math.log1p(-topk / num_experts))


def moe_flops(
    num_tokens: Real,
    hidden: Real,
    intermediate: Real,
    topk: Real,
    moe_tp: Real = 1,
    moe_ep: Real = 1,
    gemms: int = GATED_GEMMS,
) -> Floats:
    """FLOPs of the expert GEMMs on one GPU: ``2 gemms tokens topk hidden intermediate / (tp ep)``."""
    per_token = 2.0 * gemms * as_floats(topk) * as_floats(hidden) * as_floats(intermediate)
    return as_floats(num_tokens) * per_token / (as_floats(moe_tp) * as_floats(moe_ep))


def moe_bytes(
    num_tokens: Real,
    hidden: Real,
    intermediate: Real,
    topk: Real,
    num_experts: Real,
    moe_tp: Real = 1,
    moe_ep: Real = 1,
    element_bytes: float = 2,
    gemms: int = GATED_GEMMS,
) -> Floats:
    """Bytes of the routed experts on one GPU: weights of the touched experts, tokens in and out."""
    expert = float(gemms) * as_floats(hidden) * as_floats(intermediate) / as_floats(moe_tp) * element_bytes
    tokens = 2.0 * ACTIVATION_BYTES * as_floats(num_tokens) * as_floats(hidden)
    return moe_touched_experts(num_tokens, topk, num_experts, moe_ep) * expert + tokens
