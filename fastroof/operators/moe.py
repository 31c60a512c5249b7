"""Routed experts of one layer on one GPU: a fused kernel, by the tokens that enter the layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import DTYPE, Column
from fastroof.config.gpu import GpuSpec
from fastroof.operators.foreign_rows import (
    MEASURED,
    RUN,
    ForeignRows,
    PackageFile,
    Raw,
    dtype_names,
    measured_us,
    size_columns,
    text_columns,
    unknown_dtypes,
)
from fastroof.operators.operator import Columns, HoldoutGrid, Key, dtype_peaks, element_bytes
from fastroof.operators.sized import SizedOperator
from fastroof.operators.work import Real, as_floats
from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES, US_PER_S

__all__ = ["MOE", "OPERATORS", "MoeOperator", "moe_bytes", "moe_flops", "moe_touched_experts"]

EVENLY_ROUTED: Final = ("balanced", "uniform")
"""Distributions of tokens over experts for which the expectation of uniform routing holds."""


def moe_touched_experts(num_tokens: Real, topk: Real, num_experts: Real, moe_ep: Real = 1) -> Floats:
    """Experts of one GPU that at least one token reaches, for uniform routing.

    ``E/ep (1 - (1 - topk/E)^tokens)``: the expectation over independent tokens.
    """
    experts = as_floats(num_experts)
    return experts / as_floats(moe_ep) * (1.0 - (1.0 - as_floats(topk) / experts) ** as_floats(num_tokens))


def moe_flops(
    num_tokens: Real, hidden: Real, intermediate: Real, topk: Real, moe_tp: Real = 1, moe_ep: Real = 1
) -> Floats:
    """FLOPs of the three expert GEMMs on one GPU: ``6 tokens topk hidden intermediate / (tp ep)``."""
    per_token = 6.0 * as_floats(topk) * as_floats(hidden) * as_floats(intermediate)
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
) -> Floats:
    """Bytes of the routed experts on one GPU: weights of the touched experts, tokens in and out."""
    expert = 3.0 * as_floats(hidden) * as_floats(intermediate) / as_floats(moe_tp) * element_bytes
    tokens = 2.0 * ACTIVATION_BYTES * as_floats(num_tokens) * as_floats(hidden)
    return moe_touched_experts(num_tokens, topk, num_experts, moe_ep) * expert + tokens


def _package_rows(raw: Raw) -> ForeignRows:
    dtype = dtype_names(raw["moe_dtype"])
    same = ("num_tokens", "topk", "num_experts", "distribution")
    other = {"hidden": "hidden_size", "intermediate": "inter_size"}
    other |= {"moe_tp": "moe_tp_size", "moe_ep": "moe_ep_size"}
    columns = {"dtype": dtype, **{n: raw[n] for n in same}, **{n: raw[o] for n, o in other.items()}}
    out = unknown_dtypes(dtype)
    # Two GEMMs an expert, not three; by its sizes alone such a layer looks like one with a gate.
    out["experts without a gate"] = np.char.endswith(raw["kernel_source"].astype(str), "_nongated")
    return ForeignRows({**columns, **measured_us(raw)}, out)


_PACKAGE_COLUMNS: Final = (
    *size_columns(
        "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"
    ),
    *text_columns("moe_dtype", "distribution"),
    *MEASURED,
)


def _shape(c: Columns) -> tuple[Array, Array, Array, Array, Array, Array]:
    return (c["hidden"], c["intermediate"], c["topk"], c["num_experts"], c["moe_tp"], c["moe_ep"])


class MoeOperator(SizedOperator):
    """Routed experts; B grows with the experts that tokens are expected to reach."""

    name = "moe"
    rank = 50
    summary = "Routed experts of one layer, on one GPU."
    keys = (
        DTYPE,
        Column("hidden", "int", "", "model width"),
        Column("intermediate", "int", "", "width of one expert, before moe_tp"),
        Column("topk", "int", "", "experts a token is routed to"),
        Column("num_experts", "int", "", "experts of the layer, before moe_ep"),
        Column("moe_tp", "int", "", "tensor-parallel size inside an expert"),
        Column("moe_ep", "int", "", "expert-parallel size"),
        Column("distribution", "text", "", "how tokens spread over experts"),
    )
    axes = (Column("num_tokens", "int", "tokens", "tokens entering the layer"),)
    defaults: ClassVar[Mapping[str, Any]] = {
        "moe_tp": 1,
        "moe_ep": 1,
        "distribution": "balanced",
        "dtype": "bf16",
    }
    holdouts = (HoldoutGrid("moe", "every second", {}, {}),)
    coverages = (HoldoutGrid("moe", "bf16", {}, {"dtype": "bf16"}),)
    package_files = (PackageFile("moe", "moe_perf", _PACKAGE_COLUMNS, _package_rows, RUN),)

    def flops(self, columns: Columns) -> Floats:
        """Three GEMMs an expert and token."""
        c = columns
        return moe_flops(c["num_tokens"], c["hidden"], c["intermediate"], c["topk"], c["moe_tp"], c["moe_ep"])

    def moved_bytes(self, columns: Columns) -> Floats:
        """With the experts that even routing is expected to reach; for uneven routing the fewest."""
        expected = moe_bytes(columns["num_tokens"], *_shape(columns), element_bytes(columns["dtype"]))
        even = np.isin(columns["distribution"].astype(str), EVENLY_ROUTED)
        return np.where(even, expected, self._one_tokens_experts(columns))

    def least_bytes(self, columns: Columns, moved_bytes: Floats) -> Floats:
        """Bytes of a call whose tokens all take the experts of the first one."""
        return self._one_tokens_experts(columns)

    @staticmethod
    def _one_tokens_experts(columns: Columns) -> Floats:
        shape = _shape(columns)
        one_token = moe_bytes(1, *shape, element_bytes(columns["dtype"]))
        return one_token + moe_bytes(columns["num_tokens"], *shape, 0) - moe_bytes(1, *shape, 0)

    def peaks(self, columns: Columns, gpu: GpuSpec) -> tuple[Floats, Floats]:
        """Peak of the row's dtype."""
        peak = dtype_peaks(columns["dtype"], gpu)
        return peak, peak

    def roofline(self, key: Key, gpu: GpuSpec, launch_us: float) -> Callable[[Any], Floats]:
        """Launch, FLOPs at the dtype's peak, weights of the touched experts and tokens."""
        dtype, hidden, intermediate, topk, num_experts, moe_tp, moe_ep, _ = key
        width = DTYPE_BYTES[dtype]

        def bound_us(tokens: Any) -> Floats:
            work = moe_flops(tokens, hidden, intermediate, topk, moe_tp, moe_ep)
            moved = moe_bytes(tokens, hidden, intermediate, topk, num_experts, moe_tp, moe_ep, width)
            seconds = work / gpu.peak(dtype) + moved / gpu.hbm_bytes_per_s
            return launch_us + seconds * US_PER_S

        return bound_us

    def flops_per_unit(self, key: Key) -> float:
        """FLOPs of one token."""
        _, hidden, intermediate, topk, _, moe_tp, moe_ep, _ = key
        return float(moe_flops(1, hidden, intermediate, topk, moe_tp, moe_ep))


MOE: Final = MoeOperator()
OPERATORS: Final = (MOE,)
