"""Experts over many GPUs, and what runs beside them: the kernels of wide expert parallelism.

``moe_wide`` is the computing alone, after tokens have arrived (:mod:`fastroof.operators.expert_dispatch`);
one kernel that sends, computes and brings back is :mod:`fastroof.operators.expert_dispatch`. Tokens are those
of all GPUs that share the experts, as in ``moe``. ``mlp`` is a gated MLP of one GPU: a shared expert, a
dense layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import DTYPE, Column
from fastroof.config.gpu import GpuSpec
from fastroof.errors import LookupInputError, MissingTableError, PlanError
from fastroof.operators.calls import Experts
from fastroof.operators.expert_borrowing import ExpertShape, Lender, borrowed_points, nearest, nearest_routing
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
from fastroof.operators.moe import (
    EVENLY_ROUTED,
    EXPERT_KEYS,
    MOE,
    MoeOperator,
    check_routed,
    moe_bytes,
    moe_flops,
    nodes_of_experts,
    tokens_to_reach_all,
)
from fastroof.operators.operator import (
    Columns,
    DatasheetClass,
    HoldoutGrid,
    Key,
    dtype_peaks,
    element_bytes,
)
from fastroof.operators.row_operator import (
    CurveOptions,
    PackedSizes,
    PerRowOperator,
    RowCost,
    RowNodes,
    SizedOperator,
)
from fastroof.uncertainty.leave_one_out import relative_variance
from fastroof.units import DTYPE_BYTES, US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from fastroof.load import MeasuredTable
    from fastroof.tables import Tables


ANY_PHASE: Final = "any"
"""Of an engine that has one kernel for prompts and decodes."""

BALANCED: Final = "_eplb"
"""Ending of routings that a load balancer evens out."""

ANOTHER_SPLIT: Final = 0.14
ANOTHER_PLACES: Final = 0.19
ANOTHER_LAYER: Final = 0.22
"""Relative standard errors of borrowing from another split of the layer, another number of places, and
another layer: the largest of README.md's table, made from 80 % of the errors."""


class WideKey(NamedTuple):
    """Keys of a kernel of wide experts, in the order of its table."""

    dtype: str
    hidden: int
    intermediate: int
    topk: int
    num_experts: int
    num_slots: int
    moe_ep: int
    phase: str
    distribution: str

    @property
    def layer(self) -> tuple[int, int, int, int]:
        """What a model says, however it is split and placed."""
        return self[1:5]

    @property
    def routing(self) -> str:
        """How tokens spread before a load balancer."""
        return self.distribution.removesuffix(BALANCED)

    @property
    def is_balanced(self) -> bool:
        """Whether a load balancer copied the busiest experts."""
        return self.distribution.endswith(BALANCED)

    @property
    def shape(self) -> ExpertShape:
        """What one GPU sees of it."""
        return ExpertShape(*self[:4], self.num_slots, 1, self.moe_ep, self.distribution)


class WideLoan(NamedTuple):
    """What serves a kernel of wide experts."""

    table: MeasuredTable
    lenders: tuple[tuple[WideKey, Lender], ...]
    is_own: bool

    def error(self, wanted: WideKey) -> float:
        """Relative standard error of borrowing."""
        if self.is_own:
            return 0.0
        near = self.lenders[0][0]
        if near.layer != wanted.layer:
            return ANOTHER_LAYER
        return ANOTHER_SPLIT if near.num_slots == wanted.num_slots else ANOTHER_PLACES


def wide_loan(tables: Tables, operator: str, wanted: WideKey) -> WideLoan:
    """Find what serves a kernel: of the engine's own table if it has one near, else of another engine's."""
    return tables.kept(("wide loan", operator, wanted), lambda: _loan(tables, operator, wanted))


def _loan(tables: Tables, operator: str, wanted: WideKey) -> WideLoan:
    candidates = tables.candidates(operator)
    found = [loan for table in candidates if (loan := _of_table(tables, table, wanted)) is not None]
    if not found:
        what = "a load balancer" if wanted.is_balanced else "no load balancer"
        raise MissingTableError(
            f"no {operator} row of {tables.gpu.name} has dtype={wanted.dtype}, phase={wanted.phase} and "
            f"{what}; "
            f"measured: {', '.join(sorted({_key_text(WideKey(*k)) for k in tables.every_key(operator)}))}"
        )

    def rank(loan: WideLoan) -> tuple[bool, bool, bool]:
        (key, lender), *_ = loan.lenders
        is_near = loan.is_own or key.layer == wanted.layer or lender.is_near(wanted.shape)
        return not is_near, tables.order.is_foreign(loan.table), not loan.is_own

    # of equals the first that is asked
    return min(found, key=rank)


def _key_text(key: WideKey) -> str:
    return f"{key.dtype} {key.phase} {key.distribution}"


def _of_table(tables: Tables, table: MeasuredTable, wanted: WideKey) -> WideLoan | None:
    there = [
        key
        for key in map(WideKey._make, tables.keys_of(table))
        if key.dtype == wanted.dtype
        and key.phase in (wanted.phase, ANY_PHASE)
        and key.is_balanced == wanted.is_balanced
    ]
    if not there:
        return None
    routing = nearest_routing(wanted.routing, {key.routing for key in there})
    there = [key for key in there if key.routing == routing]
    for key in there:
        if key[:7] == wanted[:7] and routing == wanted.routing:
            return WideLoan(table, ((key, Lender(key.shape, 1.0, 0.0)),), True)
    pool: Sequence[WideKey] = [key for key in there if key.layer == wanted.layer] or there
    of_shape = {key.shape: key for key in pool}
    lenders = nearest(wanted.shape._replace(distribution=pool[0].distribution), list(of_shape))
    return WideLoan(table, tuple((of_shape[lender.shape], lender) for lender in lenders), False)


def lender_key(shape: ExpertShape, phase: str) -> Key:
    """The key whose roofline is that of a shape."""
    return (*shape[:4], shape.num_experts, shape.num_experts, shape.moe_ep, phase, shape.distribution)


_, _HIDDEN, _INTERMEDIATE, _TOPK, _NUM_EXPERTS, _, _MOE_EP, _DISTRIBUTION = EXPERT_KEYS
_SLOTS: Final = Column("num_slots", "int", "", "places for experts on all GPUs: more where some are doubled")
PHASE: Final = Column("phase", "text", "", "context or generation; any where an engine has one kernel")
_TOKENS: Final = Column("num_tokens", "int", "tokens", "tokens of all GPUs that share the experts")


def _words(word: str, rows: int) -> Array:
    return np.full(rows, word, object)


def _experts(raw: Raw, phase: str, num_slots: Array) -> ForeignRows:
    dtype = dtype_names(raw["moe_dtype"])
    columns = {
        "dtype": dtype,
        "hidden": raw["hidden_size"],
        "intermediate": raw["inter_size"],
        "moe_ep": raw["moe_ep_size"],
        "num_slots": num_slots,
        "phase": _words(phase, len(dtype)),
        **{name: raw[name] for name in ("topk", "num_experts", "distribution", "num_tokens")},
        **measured_us(raw),
    }
    split = {"experts that are split": raw["moe_tp_size"] > 1}
    return ForeignRows(columns, unknown_dtypes(dtype) | split)


def _context_rows(raw: Raw) -> ForeignRows:
    return _experts(raw, "context", raw["num_experts"])


def _generation_rows(raw: Raw) -> ForeignRows:
    return _experts(raw, "generation", raw["num_experts"])


def _trtllm_rows(raw: Raw) -> ForeignRows:
    # dp_num_tokens are a GPU's share of num_tokens, rank0_num_tokens those that routing sent to the first
    return _experts(raw, "any", raw["num_slots"])


EXPERT_COLUMNS: Final = (
    *text_columns("moe_dtype", "distribution"),
    *size_columns("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"),
    *size_columns("num_tokens"),
    *MEASURED,
)


class GlobalExperts(SizedOperator):
    """Gated experts of many GPUs, by the tokens of all of them."""

    axes = (_TOKENS,)

    @staticmethod
    def _places(columns: Columns) -> Array:
        """Places for experts on all GPUs."""
        return columns["num_experts"]

    def flops(self, columns: Columns) -> Floats:
        """A GPU's share of all tokens' experts; the most loaded one has more of an uneven routing."""
        c = columns
        return moe_flops(c["num_tokens"], c["hidden"], c["intermediate"], c["topk"], 1, c["moe_ep"])

    def moved_bytes(self, columns: Columns) -> Floats:
        """Experts that even routing is expected to reach; for uneven routing the fewest."""
        even = np.isin(columns["distribution"].astype(str), EVENLY_ROUTED)
        return np.where(even, self._bytes(columns, columns["num_tokens"]), self._bytes(columns, 1))

    def least_bytes(self, columns: Columns, moved_bytes: Floats) -> Floats:
        """With the experts of one token alone."""
        return self._bytes(columns, 1)

    def _bytes(self, columns: Columns, routed_tokens: Any) -> Floats:
        c = columns
        shape = (c["hidden"], c["intermediate"], c["topk"], self._places(c), 1, c["moe_ep"])
        # a GPU reads and writes its share of the tokens
        tokens = moe_bytes(c["num_tokens"] / c["moe_ep"], *shape, 0)
        return (
            moe_bytes(routed_tokens, *shape, element_bytes(c["dtype"]))
            - moe_bytes(routed_tokens, *shape, 0)
            + tokens
        )

    def peaks(self, columns: Columns, gpu: GpuSpec) -> tuple[Floats, Floats]:
        """Peak of the row's dtype."""
        peak = dtype_peaks(columns["dtype"], gpu)
        return peak, peak

    def check_key(self, key: Key) -> None:
        """Refuse a token of more experts than there are, and fewer places than experts."""
        named = {c.name: int(value) for c, value in zip(self.keys, key, strict=True) if c.kind == "int"}
        check_routed(named["topk"], named["num_experts"])
        slots = named.get("num_slots", named["num_experts"])
        if slots < named["num_experts"]:
            raise LookupInputError(f"num_slots {slots} is less than num_experts {named['num_experts']}")

    def _key_columns(self, key: Key, tokens: Any) -> dict[str, Array]:
        named = {c.name: value for c, value in zip(self.keys, key, strict=True)}
        tokens = np.atleast_1d(np.asarray(tokens, np.float64))
        kinds = {name: object if isinstance(value, str) else np.float64 for name, value in named.items()}
        arrays = {name: np.full(len(tokens), value, kinds[name]) for name, value in named.items()}
        return {**arrays, "num_tokens": tokens}

    def roofline(self, key: Key, gpu: GpuSpec, launch_us: float) -> Callable[[Any], Floats]:
        """Launch, FLOPs at the dtype's peak, weights of the touched experts and tokens."""
        peak = gpu.peak(key[0])

        def bound_us(tokens: Any) -> Floats:
            columns = self._key_columns(key, tokens)
            moved = self._bytes(columns, columns["num_tokens"])
            seconds = self.flops(columns) / peak + moved / gpu.hbm_bytes_per_s
            return (launch_us + seconds * US_PER_S).reshape(np.shape(tokens))

        return bound_us

    def flops_per_unit(self, key: Key) -> float:
        """FLOPs of one token, on one of the GPUs."""
        return float(self.flops(self._key_columns(key, 1))[0])


GLOBAL_TOKENS: Final = "num_tokens are those of all GPUs that share the experts"


class WideMoe(GlobalExperts, PerRowOperator):
    """Experts of wide expert parallelism: the most loaded GPU's computing."""

    name = "moe_wide"
    rank = 52
    summary = "Experts over many GPUs, computing alone."
    keys = (
        DTYPE, _HIDDEN, _INTERMEDIATE, _TOPK, _NUM_EXPERTS, _SLOTS, _MOE_EP, PHASE, _DISTRIBUTION,
    )  # fmt: skip
    defaults: ClassVar[Mapping[str, Any]] = {"phase": "generation", "dtype": "fp8_block"}
    datasheet_error = MoeOperator.datasheet_error
    holdouts = (HoldoutGrid("moe_wide", "every second", {}, {}),)
    coverages = (HoldoutGrid("moe_wide", "all", {}, {}),)
    package_files = (
        PackageFile("moe", "wideep_context_moe_perf", EXPERT_COLUMNS, _context_rows, RUN),
        PackageFile("moe", "wideep_generation_moe_perf", EXPERT_COLUMNS, _generation_rows, RUN),
        PackageFile(
            "moe", "wideep_moe_perf", (*EXPERT_COLUMNS, *size_columns("num_slots")), _trtllm_rows, RUN
        ),
    )

    @staticmethod
    def _places(columns: Columns) -> Array:
        return columns["num_slots"]

    def package_notes(self, columns: Mapping[str, Columns], gpu: GpuSpec) -> dict[str, Any]:
        """Whose tokens are counted."""
        return {"note": f"{GLOBAL_TOKENS}; the GPU that was measured is the most loaded one"}

    # -- in plans ----------------------------------------------------------------------------------

    def row_cost(self, call: Experts) -> RowCost:
        """FLOPs and bytes of a token, and the weights of all places: those of many tokens."""
        return MOE.row_cost(replace(call, num_experts=call.num_slots))

    def row_work(self, call: Experts, rows: Floats) -> tuple[Floats, Floats]:
        """FLOPs, and the bytes of the places that so many tokens are expected to reach."""
        return MOE.row_work(replace(call, num_experts=call.num_slots), rows)

    def row_key(self, call: Experts) -> WideKey:
        """The kernel's keys."""
        layer = (call.hidden, call.intermediate, call.topk, call.num_experts)
        return WideKey(call.dtype, *layer, call.num_slots, call.moe_ep, call.phase, call.distribution)

    def _loan(self, call: Experts, tables: Tables) -> WideLoan:
        return wide_loan(tables, self.name, self.row_key(call))

    def is_measured(self, call: Experts, tables: Tables) -> bool:
        """Whether the engine that is asked for has the very kernel."""
        try:
            loan = self._loan(call, tables)
        except MissingTableError:
            return False
        return loan.is_own and not tables.order.is_foreign(loan.table)

    def serving(self, call: Experts, tables: Tables) -> MeasuredTable:
        """The table that has the kernel, or the nearest one."""
        return self._loan(call, tables).table

    def _packed(self, call: Experts, tables: Tables) -> PackedSizes:
        """The kernel's curve, or what its lenders make of it."""
        loan, wanted = self._loan(call, tables), self.row_key(call)
        keys = {key.shape: key for key, _ in loan.lenders}
        if loan.is_own:
            return self.packed(tables, loan.lenders[0][0])
        return borrowed_points(
            wanted.shape,
            [lender for _, lender in loan.lenders],
            lambda shape: self.packed(tables, keys[shape]),
            lambda shape, launch_us: self.roofline(lender_key(shape, call.phase), tables.gpu, launch_us),
        ).packed()

    def row_nodes(self, call: Experts, tables: Tables, options: CurveOptions, max_rows: int) -> RowNodes:
        """The curve of the layer's shape, at every number of tokens until they reach all places."""
        if options.method != "roofline":
            raise PlanError(f"experts of wide expert parallelism have no method={options.method!r}: roofline")
        return nodes_of_experts(self._packed(call, tables), tokens_to_reach_all(call.topk, call.num_slots))

    def table_points(self, call: Experts, tables: Tables, rows: Floats) -> tuple[Key, list[Floats]]:
        """The nearest kernel that is read, at so many tokens."""
        return tuple(self._loan(call, tables).lenders[0][0]), [rows]

    def row_variance(self, call: Experts, tables: Tables, rows: Floats) -> Floats:
        """Of the nearest kernel, and of borrowing."""
        loan, wanted = self._loan(call, tables), self.row_key(call)
        near = loan.lenders[0][0]
        theirs = rows * (wanted.topk * near.num_slots / (wanted.num_slots * near.topk))
        variance = relative_variance(self.local_errors(tables, near), [theirs])
        return variance + loan.error(wanted) ** 2

    def row_datasheet(self, call: Experts) -> DatasheetClass:
        """That of experts."""
        return MOE.row_datasheet(call)

    def datasheet_nodes(self, call: Experts, gpu: GpuSpec) -> RowNodes:
        """That of experts, with as many as there are places."""
        return MOE.datasheet_nodes(replace(call, num_experts=call.num_slots, phase=""), gpu)


def _mlp(raw: Raw, phase: str) -> ForeignRows:
    dtype = dtype_names(raw["quant_type"])
    columns = {
        "dtype": dtype,
        "hidden": raw["hidden_size"],
        "intermediate": raw["intermediate_size"],
        "phase": _words(phase, len(dtype)),
        "num_tokens": raw["num_token"],
        "latency_us": raw["avg_ms"] * US_PER_MS,
        "kernel": raw["kernel_source"],
    }
    return ForeignRows(columns, unknown_dtypes(dtype))


def _context_mlp(raw: Raw) -> ForeignRows:
    return _mlp(raw, "context")


def _generation_mlp(raw: Raw) -> ForeignRows:
    return _mlp(raw, "generation")


_MLP_COLUMNS: Final = (
    *text_columns("quant_type", "kernel_source"),
    *size_columns("num_token", "hidden_size", "intermediate_size"),
    Column("avg_ms", "float", "ms", "measured latency"),
)


class Mlp(SizedOperator):
    """A gated MLP as one call: three GEMMs and the activation."""

    name = "mlp"
    rank = 54
    summary = "Gated MLP of one GPU."
    keys = (
        DTYPE,
        _HIDDEN,
        Column("intermediate", "int", "", "width of the MLP on one GPU"),
        Column("phase", "text", "", "context or generation: two ways to run it"),
    )
    axes = (Column("num_tokens", "int", "tokens", "tokens of one GPU"),)
    defaults: ClassVar[Mapping[str, Any]] = {"phase": "generation", "dtype": "fp8_block"}
    is_linear = True
    holdouts = (HoldoutGrid("mlp", "every second", {}, {}),)
    coverages = (HoldoutGrid("mlp", "all", {}, {}),)
    package_files = (
        PackageFile("mlp", "wideep_context_mlp_perf", _MLP_COLUMNS, _context_mlp, RUN),
        PackageFile("mlp", "wideep_generation_mlp_perf", _MLP_COLUMNS, _generation_mlp, RUN),
    )

    def flops(self, columns: Columns) -> Floats:
        """Three GEMMs a token: one expert that every token takes."""
        return moe_flops(columns["num_tokens"], columns["hidden"], columns["intermediate"], 1)

    def moved_bytes(self, columns: Columns) -> Floats:
        """All weights, tokens in and out."""
        c = columns
        shape = (c["hidden"], c["intermediate"], 1, 1, 1, 1)
        return moe_bytes(c["num_tokens"], *shape, element_bytes(c["dtype"]))

    def peaks(self, columns: Columns, gpu: GpuSpec) -> tuple[Floats, Floats]:
        """Peak of the row's dtype."""
        peak = dtype_peaks(columns["dtype"], gpu)
        return peak, peak

    def roofline(self, key: Key, gpu: GpuSpec, launch_us: float) -> Callable[[Any], Floats]:
        """Launch, FLOPs at the dtype's peak, weights and tokens."""
        dtype, hidden, intermediate, _ = key

        def bound_us(tokens: Any) -> Floats:
            moved = moe_bytes(tokens, hidden, intermediate, 1, 1, 1, 1, DTYPE_BYTES[dtype])
            seconds = (
                moe_flops(tokens, hidden, intermediate, 1) / gpu.peak(dtype) + moved / gpu.hbm_bytes_per_s
            )
            return launch_us + seconds * US_PER_S

        return bound_us

    def flops_per_unit(self, key: Key) -> float:
        """FLOPs of one token."""
        return float(moe_flops(1, key[1], key[2], 1))


MOE_WIDE: Final = WideMoe()
MLP: Final = Mlp()
OPERATORS: Final = (MOE_WIDE, MLP)
