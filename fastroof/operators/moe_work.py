"""Work of routed experts and of their dispatch: FLOPs, bytes, experts that tokens reach, nodes of curves."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import ORIGIN_EXTRAPOLATED
from fastroof.errors import LookupInputError
from fastroof.operators.operator import Real, as_floats
from fastroof.operators.row_operator import PackedSizes, RowNodes
from fastroof.pack import SIZE_LIMIT
from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES

GATED_GEMMS: Final = 3
NONGATED_GEMMS: Final = 2

EVENLY_ROUTED: Final = ("balanced", "uniform")
"""Distributions for which the expectation of uniform routing holds."""


class ExpertShape(NamedTuple):
    """Key of a kernel of routed experts."""

    dtype: str
    hidden: int
    intermediate: int
    topk: int
    num_experts: int
    moe_tp: int
    moe_ep: int
    distribution: str

    @property
    def layer(self) -> tuple[int, int, int, int]:
        """Sizes of the layer, independent of its split."""
        return self[1:5]

    @property
    def experts(self) -> int:
        """Experts that tokens are spread over."""
        return self.num_experts


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

    launch_us = packed.launch_us
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


# -- dispatch: tokens sent to experts on other GPUs and back ------------------------------------------

DEFAULT_DTYPE: Final = "default"
DEFAULT_DTYPE_BYTES: Final = {"dispatch": 1.0, "combine": 2.0}
"""DeepEP dispatches fp8 with scales (1.034 bytes per element by its figures) and combines bf16 (2.0)."""

INDEX_BYTES: Final = 4
"""Bytes of an expert's index."""

LOW_LATENCY: Final = ("deepep_ll", "trtllm_deepep_ll", "deepep_v2_generation")
"""Libraries whose kernels send a copy per expert, without forwarding."""
HIGH_THROUGHPUT: Final = ("deepep_normal", "deepep_ht", "trtllm_deepep_ht", "deepep_v2_context")
OVER_NVLINK: Final = ("nvlink_one_sided", "nvlink_two_sided")

BF16_PHASES: Final = ("combine",)
"""Phases of NVLink kernels that move two bytes per element for every format of the experts: GB200's two-sided
combine takes the same time in bf16, fp8 and nvfp4, the one-sided one in nvfp4 3.5 times its dispatch."""

FP4_BYTES: Final = 0.5


class DispatchKey(NamedTuple):
    """Key of a kernel, in the order of the operator's keys."""

    library: str
    phase: str
    comm_dtype: str
    hidden: int
    topk: int
    num_experts: int
    num_gpus: int
    num_nodes: int
    sms: int


def row_bytes_of(library: str, phase: str, comm_dtype: str, hidden: float, topk: float) -> float:
    """Bytes of one token on the wire."""
    if phase == "prepare":
        return float(INDEX_BYTES * topk)
    return hidden * element_bytes_of(library, phase, comm_dtype)


def element_bytes_of(library: str, phase: str, comm_dtype: str) -> float:
    """Bytes of one element on the wire."""
    if library in OVER_NVLINK and phase in BF16_PHASES:
        return DEFAULT_DTYPE_BYTES["combine"]
    if comm_dtype == "fp4":
        return FP4_BYTES
    return DTYPE_BYTES.get(comm_dtype, DEFAULT_DTYPE_BYTES.get(phase, 1.0))


def sent_to(groups: Real, topk: Real) -> Floats:
    """Expected groups of GPUs, other than its own, that hold some of a token's experts under even routing."""
    g = as_floats(groups)
    return (g - 1.0) * (1.0 - (1.0 - 1.0 / g) ** as_floats(topk))


def dispatch_wire_bytes(num_tokens: Real, row_bytes: Real, topk: Real, num_gpus: Real) -> Floats:
    """Bytes that a GPU sends: each token once to every other GPU that has one of its experts."""
    return as_floats(num_tokens) * as_floats(row_bytes) * sent_to(num_gpus, topk)


def sent_bytes(call: Any) -> float:
    """Bytes that one token of a call (or of a kernel) takes to other GPUs."""
    row = row_bytes_of(call.library, call.phase, call.comm_dtype, call.hidden, call.topk)
    return float(dispatch_wire_bytes(1.0, row, call.topk, call.num_gpus))


def crossing_bytes(call: Any, near: int, domains: int) -> float:
    """Bytes of one token that cross nodes: a copy per remote expert, or one per node."""
    row = row_bytes_of(call.library, call.phase, call.comm_dtype, call.hidden, call.topk)
    if call.library in LOW_LATENCY:
        return float(row * call.topk * (call.num_gpus - near) / call.num_gpus)
    return float(row * sent_to(domains, call.topk))
