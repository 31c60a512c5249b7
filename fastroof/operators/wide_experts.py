"""Kernels of wide expert parallelism: experts over many GPUs, and MLPs.

``moe_wide`` is the computation after dispatch (:mod:`fastroof.operators.expert_dispatch`). Tokens are those
of all GPUs that share the experts, as in ``moe``. ``mlp`` is a gated MLP on one GPU, such as a shared expert
or a dense layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import DTYPE, Column
from fastroof.config.gpu import GpuSpec
from fastroof.errors import LookupInputError, MissingTableError, PlanError
from fastroof.operators import external_rows as external
from fastroof.operators.borrowing import WIDE_EXPERTS, Donor, borrowed_points, nearest, nearest_routing
from fastroof.operators.calls import Experts
from fastroof.operators.moe import EXPERT_KEYS, MOE, MoeOperator
from fastroof.operators.moe_work import EVENLY_ROUTED, check_routed, moe_bytes, moe_flops
from fastroof.operators.operator import (
    Columns,
    DatasheetClass,
    Key,
    RowSource,
    SourceTable,
    element_bytes,
    measured_keys,
)
from fastroof.operators.row_operator import (
    CurveOptions,
    KernelOperator,
    PackedSizes,
    RowCost,
    RowNodes,
    SizedOperator,
)
from fastroof.uncertainty.leave_one_out import relative_variance
from fastroof.units import US_PER_MS

ANY_PHASE: Final = "any"
"""Phase of an engine with one kernel for prefill and decode."""

BALANCED: Final = "_eplb"
"""Suffix of routings with a load balancer."""

ANOTHER_SPLIT: Final = 0.14
ANOTHER_SLOTS: Final = 0.19
ANOTHER_LAYER: Final = 0.22
"""Relative standard errors of borrowing from another split of the layer, another number of slots, and another
layer: the largest in README.md's table, from 80 % of the errors."""


class WideKey(NamedTuple):
    """Key of a kernel of wide experts."""

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
        """Sizes of the layer, independent of its split and slots."""
        return self[1:5]

    @property
    def routing(self) -> str:
        """Distribution of tokens before load balancing."""
        return self.distribution.removesuffix(BALANCED)

    @property
    def is_balanced(self) -> bool:
        """Whether a load balancer copied the busiest experts."""
        return self.distribution.endswith(BALANCED)

    @property
    def moe_tp(self) -> int:
        """Experts are whole."""
        return 1

    @property
    def experts(self) -> int:
        """Slots that tokens are spread over."""
        return self.num_slots


class WideDonors(NamedTuple):
    """Table and kernels that serve a key, nearest first; ``is_own`` if the kernel itself was measured."""

    table: SourceTable
    donors: tuple[Donor, ...]
    is_own: bool

    @property
    def error(self) -> float:
        """Relative standard error of borrowing."""
        if self.is_own:
            return 0.0
        is_other_layer, is_other_slots = self.donors[0].kinds
        return ANOTHER_LAYER if is_other_layer else ANOTHER_SLOTS if is_other_slots else ANOTHER_SPLIT


def _find_donors(tables: RowSource, operator: str, target: WideKey) -> WideDonors:
    """Find the kernels that serve a key: near ones of the requested engine, else another engine's."""
    candidates = tables.candidates(operator)
    matches = [one for table in candidates if (one := _of_table(tables, table, target)) is not None]
    if not matches:
        what = "a load balancer" if target.is_balanced else "no load balancer"
        keys = {WideKey(*key) for key in measured_keys(tables, operator)}
        measured = sorted({f"{key.dtype} {key.phase} {key.distribution}" for key in keys})
        raise MissingTableError(
            f"no {operator} row of {tables.gpu.name} has dtype={target.dtype}, phase={target.phase} and "
            f"{what}; measured: {', '.join(measured)}"
        )

    def rank(found: WideDonors) -> tuple[bool, bool, bool]:
        return not found.donors[0].is_near, tables.is_foreign(found.table), not found.is_own

    # ties go to the first table
    return min(matches, key=rank)


def _of_table(tables: RowSource, table: SourceTable, target: WideKey) -> WideDonors | None:
    there = [
        key
        for key in map(WideKey._make, table.groups())
        if key.dtype == target.dtype
        and key.phase in (target.phase, ANY_PHASE)
        and key.is_balanced == target.is_balanced
    ]
    if not there:
        return None
    routing = nearest_routing(target.routing, {key.routing for key in there})
    there = [key for key in there if key.routing == routing]
    for key in there:
        if key[:7] == target[:7] and routing == target.routing:
            return WideDonors(table, (Donor(key),), True)
    return WideDonors(table, nearest(target, there, WIDE_EXPERTS), False)


_, _HIDDEN, _INTERMEDIATE, _TOPK, _NUM_EXPERTS, _, _MOE_EP, _DISTRIBUTION = EXPERT_KEYS
_SLOTS: Final = Column(
    "num_slots", "int", "", "slots for experts on all GPUs, more than experts if some are copied"
)
PHASE: Final = Column("phase", "text", "", "context or generation; any if the engine has one kernel")
_TOKENS: Final = Column("num_tokens", "int", "tokens", "tokens of all GPUs that share the experts")


def expert_rows(raw: external.Raw, **columns: str | Array) -> external.ExternalRows:
    """Rows of whole experts on many GPUs."""
    return external.package_rows(
        raw,
        *("topk", "num_experts", "distribution"),
        dtype="moe_dtype",
        hidden="hidden_size",
        intermediate="inter_size",
        moe_ep="moe_ep_size",
        **columns,
    ).without({"experts that are split": raw["moe_tp_size"] > 1})


def _wide_rows(raw: external.Raw, phase: str) -> external.ExternalRows:
    # dp_num_tokens is a GPU's share of num_tokens, rank0_num_tokens what routing sent to rank 0
    slots = "num_slots" if "num_slots" in raw else "num_experts"
    phases = external.constant_text(phase, len(raw["topk"]))
    return expert_rows(raw, phase=phases, num_slots=slots, num_tokens="num_tokens")


EXPERT_COLUMNS: Final = (
    *external.text_columns("moe_dtype", "distribution"),
    *external.size_columns("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"),
    *external.size_columns("num_tokens"),
    *external.MEASURED,
)


def _files_of_phases(
    operator: str, columns: tuple[Column, ...], convert: Callable[..., external.ExternalRows]
) -> tuple[external.PackageFile, ...]:
    """Files of prompts and of decodes."""
    return tuple(
        external.PackageFile(
            operator, f"wideep_{phase}_{operator}_perf", columns, partial(convert, phase=phase)
        )
        for phase in ("context", "generation")
    )


class GlobalExperts(KernelOperator):
    """Gated experts of many GPUs, by the tokens of all of them."""

    axes = (_TOKENS,)
    datasheet_error = MoeOperator.datasheet_error

    @staticmethod
    def _slots(columns: Columns) -> Array:
        """Slots for experts on all GPUs."""
        return columns["num_experts"]

    def flops(self, columns: Columns) -> Floats:
        """A GPU's even share of all tokens' experts."""
        c = columns
        return moe_flops(c["num_tokens"], c["hidden"], c["intermediate"], c["topk"], 1, c["moe_ep"])

    def moved_bytes(self, columns: Columns) -> Floats:
        """Bytes with the experts that even routing is expected to reach; the fewest for uneven routing."""
        even = np.isin(columns["distribution"].astype(str), EVENLY_ROUTED)
        return np.where(even, self.expected_bytes(columns), self._bytes(columns, 1))

    def expected_bytes(self, columns: Columns) -> Floats:
        """Bytes with the experts that even routing is expected to reach."""
        return self._bytes(columns, columns["num_tokens"])

    def least_bytes(self, columns: Columns, moved_bytes: Floats) -> Floats:
        """Bytes with the experts of one token."""
        return self._bytes(columns, 1)

    def _bytes(self, columns: Columns, routed_tokens: Any) -> Floats:
        c = columns
        shape = (c["hidden"], c["intermediate"], c["topk"], self._slots(c), 1, c["moe_ep"])
        # a GPU reads and writes its share of the tokens
        tokens = moe_bytes(c["num_tokens"] / c["moe_ep"], *shape, 0)
        return (
            moe_bytes(routed_tokens, *shape, element_bytes(c["dtype"]))
            - moe_bytes(routed_tokens, *shape, 0)
            + tokens
        )

    def check_key(self, key: Key) -> None:
        """Reject topk above the number of experts, and fewer slots than experts."""
        named = {c.name: int(value) for c, value in zip(self.keys, key, strict=True) if c.kind == "int"}
        check_routed(named["topk"], named["num_experts"])
        slots = named.get("num_slots", named["num_experts"])
        if slots < named["num_experts"]:
            raise LookupInputError(
                f"num_slots must be at least num_experts ({named['num_experts']}), got {slots}"
            )

    # -- in plans ----------------------------------------------------------------------------------

    def as_moe(self, call: Experts) -> Experts:
        """The call as a kernel of :data:`MOE` with as many experts as there are slots."""
        return replace(call, phase="")

    def row_cost(self, call: Experts) -> RowCost:
        """FLOPs and bytes per token, and the weights of all slots, which many tokens reach."""
        return MOE.row_cost(self.as_moe(call))

    def row_work(self, call: Experts, rows: Floats) -> tuple[Floats, Floats]:
        """FLOPs, and the bytes of the slots that the tokens are expected to reach."""
        return MOE.row_work(self.as_moe(call), rows)

    def row_nodes(self, call: Experts, tables: RowSource, options: CurveOptions, max_rows: int) -> RowNodes:
        """Nodes of the kernel's curve."""
        if options.method != "roofline":
            raise PlanError(f"{self.name} supports method='roofline' only, got {options.method!r}")
        return super().row_nodes(call, tables, options, max_rows)

    def roofline_nodes(self, call: Experts, packed: PackedSizes) -> RowNodes:
        """A node at every number of tokens until they reach all slots."""
        return MOE.roofline_nodes(self.as_moe(call), packed)

    def row_datasheet(self, call: Experts) -> DatasheetClass:
        """Launch floor and efficiency of experts."""
        return MOE.row_datasheet(call)

    def datasheet_nodes(self, call: Experts, gpu: GpuSpec) -> RowNodes:
        """Nodes of as many experts as there are slots."""
        return MOE.datasheet_nodes(self.as_moe(call), gpu)


GLOBAL_TOKENS: Final = "num_tokens are those of all GPUs that share the experts"


class WideMoe(GlobalExperts):
    """Experts of wide expert parallelism: computation of the most loaded GPU."""

    name = "moe_wide"
    rank = 52
    summary = "Experts over many GPUs, computing alone."
    note = f"{GLOBAL_TOKENS}; the GPU that was measured is the most loaded one"
    keys = (
        DTYPE, _HIDDEN, _INTERMEDIATE, _TOPK, _NUM_EXPERTS, _SLOTS, _MOE_EP, PHASE, _DISTRIBUTION,
    )  # fmt: skip
    defaults: ClassVar[Mapping[str, Any]] = {"phase": "generation", "dtype": "fp8_block"}
    package_files = (
        *_files_of_phases("moe", EXPERT_COLUMNS, _wide_rows),
        external.PackageFile(
            "moe",
            "wideep_moe_perf",
            (*EXPERT_COLUMNS, *external.size_columns("num_slots")),
            partial(_wide_rows, phase=ANY_PHASE),
        ),
    )

    @staticmethod
    def _slots(columns: Columns) -> Array:
        return columns["num_slots"]

    # -- in plans ----------------------------------------------------------------------------------

    def as_moe(self, call: Experts) -> Experts:
        """The call with as many experts as there are slots."""
        return replace(call, phase="", num_experts=call.num_slots)

    def row_key(self, call: Experts) -> WideKey:
        """Key of the kernel."""
        layer = (call.hidden, call.intermediate, call.topk, call.num_experts)
        return WideKey(call.dtype, *layer, call.num_slots, call.moe_ep, call.phase, call.distribution)

    def _donors(self, call: Experts, tables: RowSource) -> WideDonors:
        target = self.row_key(call)
        return tables.cached(
            ("wide donors", self.name, target), lambda: _find_donors(tables, self.name, target)
        )

    def is_measured(self, call: Experts, tables: RowSource) -> bool:
        """Whether the requested engine measured exactly this kernel."""
        try:
            found = self._donors(call, tables)
        except MissingTableError:
            return False
        return found.is_own and not tables.is_foreign(found.table)

    def serving(self, call: Experts, tables: RowSource) -> SourceTable:
        """Table of the kernel or the nearest one."""
        return self._donors(call, tables).table

    def call_curve(self, call: Experts, tables: RowSource) -> PackedSizes:
        """Curve of the kernel, or made from its donors."""
        found, target = self._donors(call, tables), self.row_key(call)
        if found.is_own:
            return self.packed(tables, found.donors[0].kernel)
        return borrowed_points(
            target,
            found.donors,
            lambda key: self.packed(tables, key),
            lambda key, launch_us: self.roofline(key, tables.gpu, launch_us),
        ).packed()

    def table_points(self, call: Experts, tables: RowSource, rows: Floats) -> tuple[Key, list[Floats]]:
        """The nearest kernel and tokens."""
        return tuple(self._donors(call, tables).donors[0].kernel), [rows]

    def row_variance(self, call: Experts, tables: RowSource, rows: Floats) -> Floats:
        """Variance of the nearest kernel, and of borrowing."""
        found, target = self._donors(call, tables), self.row_key(call)
        near = found.donors[0].kernel
        theirs = rows * (target.topk * near.num_slots / (target.num_slots * near.topk))
        variance = relative_variance(self.local_errors(tables, near), [theirs])
        return variance + found.error**2


def _mlp(raw: external.Raw, phase: str) -> external.ExternalRows:
    return external.package_rows(
        raw,
        dtype="quant_type",
        hidden="hidden_size",
        intermediate="intermediate_size",
        phase=external.constant_text(phase, len(raw["num_token"])),
        num_tokens="num_token",
        latency_us=raw["avg_ms"] * US_PER_MS,
    )


_MLP_COLUMNS: Final = (
    *external.text_columns("quant_type", "kernel_source"),
    *external.size_columns("num_token", "hidden_size", "intermediate_size"),
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
        Column("phase", "text", "", "context or generation"),
    )
    axes = (Column("num_tokens", "int", "tokens", "tokens of one GPU"),)
    defaults: ClassVar[Mapping[str, Any]] = {"phase": "generation", "dtype": "fp8_block"}
    is_linear = True
    package_files = _files_of_phases("mlp", _MLP_COLUMNS, _mlp)

    def flops(self, columns: Columns) -> Floats:
        """FLOPs of three GEMMs, as one expert for every token."""
        return moe_flops(columns["num_tokens"], columns["hidden"], columns["intermediate"], 1)

    def moved_bytes(self, columns: Columns) -> Floats:
        """All weights, tokens in and out."""
        c = columns
        shape = (c["hidden"], c["intermediate"], 1, 1, 1, 1)
        return moe_bytes(c["num_tokens"], *shape, element_bytes(c["dtype"]))


MOE_WIDE: Final = WideMoe()
MLP: Final = Mlp()
OPERATORS: Final = (MOE_WIDE, MLP)
