"""Routed experts of one layer on one GPU: a fused kernel, by the tokens that enter the layer.

Experts with a gate are three GEMMs (gate, up, down), those without one two: two operators with equal keys,
since an engine runs other kernels for them and a shape alone does not tell which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Bools, Floats
from fastroof.columns import DTYPE, Column
from fastroof.config.gpu import GpuSpec
from fastroof.operators.calls import Experts
from fastroof.operators.foreign_rows import (
    MEASURED,
    RUN,
    ForeignRows,
    PackageFile,
    Raw,
    TreeFile,
    dtype_names,
    measured_us,
    size_columns,
    text_columns,
    unknown_dtypes,
    version_order,
)
from fastroof.operators.grouped_gemms import GROUPED_GEMM_FILES
from fastroof.operators.operator import (
    Columns,
    DatasheetClass,
    HoldoutGrid,
    Key,
    dtype_peaks,
    element_bytes,
)
from fastroof.operators.rows import CurveOptions, PerRowOperator, RowCost, RowNodes
from fastroof.operators.sized import SizedOperator
from fastroof.operators.work import Real, as_floats
from fastroof.pack import SIZE_LIMIT
from fastroof.uncertainty.variance import relative_variance
from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES, US_PER_S

if TYPE_CHECKING:
    from fastroof.load import MeasuredTable
    from fastroof.tables import Tables

__all__ = [
    "EXPERT_KEYS",
    "MOE",
    "MOE_NONGATED",
    "OPERATORS",
    "MoeOperator",
    "NongatedMoeOperator",
    "expert_shape",
    "is_nongated",
    "moe_bytes",
    "moe_flops",
    "moe_touched_experts",
    "not_run_by_the_engine",
]

GATED_GEMMS: Final = 3
NONGATED_GEMMS: Final = 2

EVENLY_ROUTED: Final = ("balanced", "uniform")
"""Distributions of tokens over experts for which the expectation of uniform routing holds."""


def moe_touched_experts(num_tokens: Real, topk: Real, num_experts: Real, moe_ep: Real = 1) -> Floats:
    """Experts of one GPU that at least one token reaches, for uniform routing.

    ``E/ep (1 - (1 - topk/E)^tokens)``: the expectation over independent tokens.
    """
    experts = as_floats(num_experts)
    return experts / as_floats(moe_ep) * (1.0 - (1.0 - as_floats(topk) / experts) ** as_floats(num_tokens))


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


NONGATED_SHAPES: Final = ((2688, 1856), (1024, 2688), (4096, 2688), (2048, 5120), (8192, 5120))
"""Hidden and intermediate widths of models without a gate (Nemotron 3 Nano, Super and Ultra).

Only TensorRT-LLM's kernels say so by name. Elsewhere the memory does: with three GEMMs an expert the bf16
weights of all touched experts would come at 1.2 to 1.45 times its bandwidth, and at no more than 0.96 times
for any other shape."""

NONGATED_SINCE: Final = {"vllm": (0, 24), "sglang": (0, 5, 14)}
"""Versions since which an engine's tables measure those shapes without a gate; before, as if they had one
(with three GEMMs 0.82 to 0.92 of the memory's bandwidth)."""

MIN_LATENCY_TOKENS: Final = 128
"""Up to so many tokens TensorRT-LLM runs its min-latency kernel of nvfp4 experts, where there is one."""

OTHER_ACTIVATION: Final = "_situ_as_silu"
"""Ending of kernels that were measured with SiLU in place of the model's own activation."""


def is_nongated(raw: Raw) -> Bools:
    """Mark the package's rows of experts without a gate."""
    kernel = raw["kernel_source"].astype(str)
    by_shape = np.zeros(len(kernel), bool)
    for hidden, intermediate in NONGATED_SHAPES:
        by_shape |= (raw["hidden_size"] == hidden) & (raw["inter_size"] == intermediate)
    # measured with a gate, as the bandwidth says: SGLang's Triton kernel of Nemotron 3 Super's latent width
    # (0.91 with three GEMMs), and vLLM's on Intel cards (0.86, others 0.85)
    by_shape &= ~((raw["hidden_size"] == 1024) & (kernel == "sglang_fused_moe_triton"))
    by_shape &= ~np.char.startswith(kernel, "vllm_xpu_")
    versions = raw.get("version", np.full(len(kernel), "0", object))
    is_since = np.zeros(len(kernel), bool)
    for version in set(versions):
        for engine, first in NONGATED_SINCE.items():
            if version_order(version) >= first:
                is_since |= (versions == version) & np.char.startswith(kernel, f"{engine}_")
    return np.asarray(np.char.endswith(kernel, "_nongated") | (by_shape & is_since))


def not_run_by_the_engine(raw: Raw) -> dict[str, Bools]:
    """Mark rows of a kernel that TensorRT-LLM does not run for so many tokens, by reason.

    Its min-latency kernel and another one were both measured at every point; which one serves is a matter
    of tokens, not of which was faster.
    """
    kernel = raw["kernel_source"].astype(str)
    quick = np.char.endswith(kernel, "_min_latency")
    if not quick.any():
        return {}
    names = ("moe_dtype", "distribution", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts")
    code = np.zeros(len(kernel), np.int64)
    for name in (*names, "moe_tp_size", "moe_ep_size"):
        _, index = np.unique(raw[name], return_inverse=True)
        _, code = np.unique(code * (int(index.max()) + 1) + index, return_inverse=True)
    has_quick, has_other = (np.bincount(code[rows], minlength=code.max() + 1) > 0 for rows in (quick, ~quick))
    small = raw["num_tokens"] <= MIN_LATENCY_TOKENS
    few = f"up to {MIN_LATENCY_TOKENS} tokens, where the engine runs its min-latency kernel instead"
    many = f"min-latency kernel, which the engine does not run beyond {MIN_LATENCY_TOKENS} tokens"
    return {few: ~quick & small & has_quick[code], many: quick & ~small & has_other[code]}


def expert_shape(raw: Raw) -> dict[str, Array]:
    """Keys and tokens of the package's rows of experts; its sizes are those of the model, not of a shard."""
    same = ("num_tokens", "topk", "num_experts", "distribution")
    other = {"hidden": "hidden_size", "intermediate": "inter_size"}
    other |= {"moe_tp": "moe_tp_size", "moe_ep": "moe_ep_size"}
    columns = {"dtype": dtype_names(raw["moe_dtype"]), **{name: raw[name] for name in same}}
    return columns | {name: raw[theirs] for name, theirs in other.items()}


def _package_rows(raw: Raw, has_gate: bool) -> ForeignRows:
    columns = expert_shape(raw)
    nongated = is_nongated(raw)
    out = {"experts without a gate": nongated} if has_gate else {"experts with a gate": ~nongated}
    out |= unknown_dtypes(columns["dtype"]) | not_run_by_the_engine(raw)
    return ForeignRows(columns | measured_us(raw), out)


def _gated_rows(raw: Raw) -> ForeignRows:
    return _package_rows(raw, has_gate=True)


def _nongated_rows(raw: Raw) -> ForeignRows:
    return _package_rows(raw, has_gate=False)


_PACKAGE_COLUMNS: Final = (
    *size_columns(
        "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"
    ),
    *text_columns("moe_dtype", "distribution"),
    *MEASURED,
)

EXPERT_KEYS: Final = (
    DTYPE,
    Column("hidden", "int", "", "model width"),
    Column("intermediate", "int", "", "width of one expert, before moe_tp"),
    Column("topk", "int", "", "experts a token is routed to"),
    Column("num_experts", "int", "", "experts of the layer, before moe_ep"),
    Column("moe_tp", "int", "", "tensor-parallel size inside an expert"),
    Column("moe_ep", "int", "", "expert-parallel size"),
    Column("distribution", "text", "", "how tokens spread over experts"),
)


def _shape(c: Columns) -> tuple[Array, Array, Array, Array, Array, Array]:
    return (c["hidden"], c["intermediate"], c["topk"], c["num_experts"], c["moe_tp"], c["moe_ep"])


class MoeOperator(SizedOperator, PerRowOperator):
    """Routed experts; B grows with the experts that tokens are expected to reach.

    Attributes
    ----------
    gemms : int
        GEMMs an expert.
    """

    gemms: ClassVar[int] = GATED_GEMMS
    name = "moe"
    rank = 50
    summary = "Routed experts of one layer, on one GPU."
    keys = EXPERT_KEYS
    axes = (Column("num_tokens", "int", "tokens", "tokens of all GPUs that share the experts"),)
    defaults: ClassVar[Mapping[str, Any]] = {
        "moe_tp": 1,
        "moe_ep": 1,
        "distribution": "balanced",
        "dtype": "bf16",
    }
    holdouts = (HoldoutGrid("moe", "every second", {}, {}),)
    coverages = (HoldoutGrid("moe", "bf16", {}, {"dtype": "bf16"}),)
    # Over the bf16 rows of vLLM 0.24.0 on the H100, balanced, of 500 us and more.
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"moe": DatasheetClass(23.3, 0.63)}
    package_files = (PackageFile("moe", "moe_perf", _PACKAGE_COLUMNS, _gated_rows, RUN),)
    tree_files: ClassVar[tuple[TreeFile, ...]] = GROUPED_GEMM_FILES

    def flops(self, columns: Columns) -> Floats:
        """All GEMMs of every token's experts."""
        c = columns
        experts = (c["hidden"], c["intermediate"], c["topk"], c["moe_tp"], c["moe_ep"])
        return moe_flops(c["num_tokens"], *experts, self.gemms)

    def moved_bytes(self, columns: Columns) -> Floats:
        """With the experts that even routing is expected to reach; for uneven routing the fewest."""
        width = element_bytes(columns["dtype"])
        expected = moe_bytes(columns["num_tokens"], *_shape(columns), width, self.gemms)
        even = np.isin(columns["distribution"].astype(str), EVENLY_ROUTED)
        return np.where(even, expected, self._one_tokens_experts(columns))

    def least_bytes(self, columns: Columns, moved_bytes: Floats) -> Floats:
        """Bytes of a call whose tokens all take the experts of the first one."""
        return self._one_tokens_experts(columns)

    def _one_tokens_experts(self, columns: Columns) -> Floats:
        shape = _shape(columns)
        one_token = moe_bytes(1, *shape, element_bytes(columns["dtype"]), self.gemms)
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
            work = moe_flops(tokens, hidden, intermediate, topk, moe_tp, moe_ep, self.gemms)
            experts = (hidden, intermediate, topk, num_experts, moe_tp, moe_ep)
            moved = moe_bytes(tokens, *experts, width, self.gemms)
            seconds = work / gpu.peak(dtype) + moved / gpu.hbm_bytes_per_s
            return launch_us + seconds * US_PER_S

        return bound_us

    def flops_per_unit(self, key: Key) -> float:
        """FLOPs of one token."""
        _, hidden, intermediate, topk, _, moe_tp, moe_ep, _ = key
        return float(moe_flops(1, hidden, intermediate, topk, moe_tp, moe_ep, self.gemms))

    # -- in plans ----------------------------------------------------------------------------------

    @staticmethod
    def row_key(call: Experts) -> Key:
        """The kernel's keys."""
        shape = (call.hidden, call.intermediate, call.topk, call.num_experts, call.moe_tp, call.moe_ep)
        return (call.dtype, *shape, call.distribution)

    def row_cost(self, call: Experts) -> RowCost:
        """FLOPs and bytes of a token, and the weights of all experts: those of many tokens."""
        _, hidden, intermediate, topk, num_experts, moe_tp, moe_ep, _ = self.row_key(call)
        per_row = float(moe_flops(1, hidden, intermediate, topk, moe_tp, moe_ep, self.gemms))
        experts = num_experts / moe_ep * self.gemms * hidden * intermediate / moe_tp
        tokens = 2.0 * ACTIVATION_BYTES * hidden
        return RowCost(per_row, tokens, experts * DTYPE_BYTES[call.dtype], call.dtype)

    def serving(self, call: Experts, tables: Tables) -> MeasuredTable:
        """The table that has the layer's shape."""
        return tables.serving(self.name, self.row_key(call))

    def row_nodes(self, call: Experts, tables: Tables, options: CurveOptions, max_rows: int) -> RowNodes:
        """The curve of the layer's shape, at every number of tokens: B is not linear in them."""
        from fastroof.compiled.search import curve_latency_us

        key = self.row_key(call)
        packed = self.packed(tables, key)
        launch_us = float(packed.curve.value[1:-1].min())
        tokens = np.arange(1.0, max_rows + 1.0)
        value, flag = np.empty(max_rows), np.empty(max_rows, np.uint8)
        curve_latency_us(packed.curve, packed.coordinate(tokens), value, flag)
        if options.method != "roofline":
            sizes = dict(zip((c.name for c in self.keys), key, strict=True))
            return self.looked_up_nodes(
                tables, options.method, max_rows, sizes | {"num_tokens": tokens.astype(np.int64)}, launch_us
            )
        at = np.r_[0, :max_rows, max_rows - 1]
        return RowNodes(np.r_[0.0, tokens, SIZE_LIMIT], value[at], flag[at], launch_us)

    def table_points(self, call: Experts, tables: Tables, rows: Floats) -> tuple[Key, list[Floats]]:
        """So many tokens of the layer's shape."""
        return self.row_key(call), [rows]

    def row_variance(self, call: Experts, tables: Tables, rows: Floats) -> Floats:
        """Of the shape's curve."""
        return relative_variance(self.local_errors(tables, self.row_key(call)), [rows])

    def row_datasheet(self, call: Experts) -> DatasheetClass:
        """The one class."""
        return MOE.datasheets["moe"]

    def package_notes(self, columns: Mapping[str, Columns], gpu: GpuSpec) -> dict[str, Any]:
        """Name the kernels that were measured with another activation than the model's."""
        kernel = columns[self.name]["kernel"].astype(str)
        other = np.char.endswith(kernel, OTHER_ACTIVATION)
        if not other.any():
            return {}
        named = ", ".join(sorted(set(kernel[other])))
        return {
            "activation": f"{int(other.sum())} rows were measured with SiLU instead of the model's own "
            f"activation, as their kernels' names say: {named}"
        }


class NongatedMoeOperator(MoeOperator):
    """Routed experts of two GEMMs: up and down, as with a squared ReLU between."""

    gemms: ClassVar[int] = NONGATED_GEMMS
    name = "moe_nongated"
    rank = 51
    summary = "Routed experts without a gate."
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {}
    holdouts = (HoldoutGrid("moe_nongated", "every second", {}, {}),)
    coverages = (HoldoutGrid("moe_nongated", "bf16", {}, {"dtype": "bf16"}),)
    package_files = (PackageFile("moe", "moe_perf", _PACKAGE_COLUMNS, _nongated_rows, RUN),)
    tree_files = ()


MOE: Final = MoeOperator()
MOE_NONGATED: Final = NongatedMoeOperator()
OPERATORS: Final = (MOE, MOE_NONGATED)
