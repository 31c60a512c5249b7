"""Work of routed experts: FLOPs, bytes, the experts that tokens reach, and nodes of their curves."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import ORIGIN_EXTRAPOLATED
from fastroof.errors import LookupInputError
from fastroof.operators.operator import Real, as_floats
from fastroof.operators.row_operator import PackedSizes, RowNodes
from fastroof.pack import SIZE_LIMIT
from fastroof.units import ACTIVATION_BYTES

GATED_GEMMS: Final = 3
NONGATED_GEMMS: Final = 2

EVENLY_ROUTED: Final = ("balanced", "uniform")
"""Distributions for which the expectation of uniform routing holds."""


def check_routed(topk: int, num_experts: int) -> None:
    """Raise LookupInputError if topk exceeds the number of experts."""
    if topk > num_experts:
        raise LookupInputError(f"topk must be at most num_experts ({num_experts}), got {topk}")


def moe_touched_experts(num_tokens: Real, topk: Real, num_experts: Real, moe_ep: Real = 1) -> Floats:
    """Expected experts of one GPU under uniform routing: ``E/ep (1 - (1 - topk/E)^tokens)``."""
    experts = as_floats(num_experts)
    return experts / as_floats(moe_ep) * (1.0 - (1.0 - as_floats(topk) / experts) ** as_floats(num_tokens))


UNREACHED: Final = 2.0**-60
"""Share of experts below which the float64 of their bytes no longer changes."""


def tokens_to_reach_all(topk: int, num_experts: int) -> int:
    """Tokens from which :func:`moe_touched_experts` is all experts to the last bit."""
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


DENSE_ROWS: Final = 2**16
"""Tokens up to which a curve has a node at every number: more than reach all experts of any model."""

NODES_AN_OCTAVE: Final = 256
"""Nodes per octave beyond DENSE_ROWS: lines between them are within 1e-6 of the expectation."""


def nodes_of_experts(packed: PackedSizes, all_reached: int) -> RowNodes:
    """Nodes of a curve: at every number of tokens until all experts are reached, where B becomes linear."""
    from fastroof.compiled.guides import curve_latency_us

    launch_us = float(packed.curve.value[1:-1].min())
    dense = min(all_reached, DENSE_ROWS)
    octaves = np.log2(min(all_reached, SIZE_LIMIT / 2.0) / dense)
    close = np.rint(dense * 2.0 ** (np.arange(1.0, octaves * NODES_AN_OCTAVE + 1.0) / NODES_AN_OCTAVE))
    beyond = np.union1d(close, packed.sizes[packed.sizes > dense])
    rows = np.r_[np.arange(1.0, dense + 1.0), beyond]
    value, flag = np.empty(len(rows)), np.empty(len(rows), np.uint8)
    curve_latency_us(packed.curve, packed.coordinate(rows), value, flag)
    ends = packed.coordinate(np.array([rows[-1], SIZE_LIMIT]))
    # latency / B is constant beyond the last node
    last_us = value[-1] * ends[1] / ends[0]
    beyond_flag = max(flag[-1], ORIGIN_EXTRAPOLATED)
    return RowNodes(
        np.r_[0.0, rows, SIZE_LIMIT],
        np.r_[value[0], value, last_us],
        np.r_[flag[0], flag, np.uint8(beyond_flag)],
        launch_us,
    )
