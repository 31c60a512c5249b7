"""Experts whose kernel sends tokens to the GPUs of their experts, computes, and brings the outputs back.

DeepGEMM's, as SGLang runs it for DeepSeek-V4: it takes the place of the experts and of both exchanges around
them, which it overlaps. One way to run it was measured for decodes and one for prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import DTYPE
from fastroof.config.gpu import GpuSpec
from fastroof.errors import PlanError
from fastroof.operators.calls import Experts
from fastroof.operators.expert_dispatch import EXPERT_DISPATCH, dispatch_wire_bytes
from fastroof.operators.expert_work import tokens_to_reach_all
from fastroof.operators.foreign_rows import (
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
from fastroof.operators.moe import EXPERT_KEYS, MOE, MoeOperator, nodes_of_experts
from fastroof.operators.operator import Columns, DatasheetClass, HoldoutGrid, Key
from fastroof.operators.rows import CurveOptions, PerRowOperator, RowCost, RowNodes
from fastroof.operators.wide_experts import EXPERT_COLUMNS, GLOBAL_TOKENS, PHASE, GlobalExperts
from fastroof.uncertainty.variance import relative_variance
from fastroof.units import DTYPE_BYTES, US_PER_S

if TYPE_CHECKING:
    from fastroof.load import MeasuredTable
    from fastroof.tables import Tables

__all__ = ["MEGAMOE", "OPERATORS", "MegaMoe"]

_, _HIDDEN, _INTERMEDIATE, _TOPK, _NUM_EXPERTS, _, _MOE_EP, _DISTRIBUTION = EXPERT_KEYS


def _megamoe_rows(raw: Raw) -> ForeignRows:
    dtype = dtype_names(raw["moe_dtype"])
    columns = {
        "dtype": dtype,
        "hidden": raw["hidden_size"],
        "intermediate": raw["inter_size"],
        "moe_ep": raw["moe_ep_size"],
        # num_tokens of the file are those of one GPU
        "num_tokens": raw["global_num_tokens"],
        **{name: raw[name] for name in ("topk", "num_experts", "phase", "distribution")},
        **measured_us(raw),
    }
    other = {
        "experts that are split": raw["moe_tp_size"] > 1,
        "shared experts in the kernel": raw["num_fused_shared_experts"] > 0,
    }
    return ForeignRows(columns, unknown_dtypes(dtype) | other)


class MegaMoe(GlobalExperts, PerRowOperator):
    """Dispatch, experts and combine in one kernel of DeepGEMM."""

    name = "megamoe"
    rank = 53
    summary = "Experts over many GPUs, tokens sent too."
    keys = (DTYPE, _HIDDEN, _INTERMEDIATE, _TOPK, _NUM_EXPERTS, _MOE_EP, PHASE, _DISTRIBUTION)
    defaults: ClassVar[Mapping[str, Any]] = {
        "phase": "generation",
        "distribution": "balanced",
        "dtype": "w4a8_mxfp4_mxfp8",
    }
    holdouts = (HoldoutGrid("megamoe", "every second", {}, {}),)
    coverages = (HoldoutGrid("megamoe", "all", {}, {}),)
    package_files = (
        PackageFile(
            "moe",
            "dsv4_megamoe_module_perf",
            (
                *EXPERT_COLUMNS,
                *text_columns("phase"),
                *size_columns("global_num_tokens"),
                *size_columns("num_fused_shared_experts", minimum=0),
            ),
            _megamoe_rows,
            RUN,
        ),
    )

    datasheet_error = MoeOperator.datasheet_error

    # -- in plans ----------------------------------------------------------------------------------

    def row_cost(self, call: Experts) -> RowCost:
        """Of the experts."""
        return MOE.row_cost(call)

    def row_work(self, call: Experts, rows: Floats) -> tuple[Floats, Floats]:
        """Of the experts that so many tokens are expected to reach."""
        return MOE.row_work(call, rows)

    def row_key(self, call: Experts) -> Key:
        """The kernel's keys."""
        layer = (call.hidden, call.intermediate, call.topk, call.num_experts)
        return (call.dtype, *layer, call.moe_ep, call.phase, call.distribution)

    def serving(self, call: Experts, tables: Tables) -> MeasuredTable:
        """The table that has the very kernel: nothing is lent, since it sends between as many GPUs."""
        return tables.serving(self.name, self.row_key(call))

    def row_nodes(self, call: Experts, tables: Tables, options: CurveOptions, max_rows: int) -> RowNodes:
        """The kernel's curve, at every number of tokens until they reach all experts."""
        if options.method != "roofline":
            raise PlanError(f"experts that send tokens have no method={options.method!r}: roofline")
        packed = self.packed(tables, self.row_key(call))
        return nodes_of_experts(packed, tokens_to_reach_all(call.topk, call.num_experts))

    def table_points(self, call: Experts, tables: Tables, rows: Floats) -> tuple[Key, list[Floats]]:
        """So many tokens."""
        return self.row_key(call), [rows]

    def row_variance(self, call: Experts, tables: Tables, rows: Floats) -> Floats:
        """Of the kernel's curve."""
        return relative_variance(self.local_errors(tables, self.row_key(call)), [rows])

    def row_datasheet(self, call: Experts) -> DatasheetClass:
        """That of experts."""
        return MOE.row_datasheet(call)

    def datasheet_nodes(self, call: Experts, gpu: GpuSpec) -> RowNodes:
        """Time of the experts or the link, whichever is longer: the kernel overlaps them."""
        made = MOE.datasheet_nodes(replace(call, phase=""), gpu)
        row_bytes = call.hidden * (DTYPE_BYTES["fp8"] + DTYPE_BYTES["bf16"])
        sent = dispatch_wire_bytes(made.axis / call.moe_ep, row_bytes, call.topk, call.moe_ep)
        link = EXPERT_DISPATCH.datasheets[EXPERT_DISPATCH.name]
        sending_us = link.launch_us + sent / gpu.nvlink_bytes_per_s / link.efficiency * US_PER_S
        return made._replace(value=np.maximum(made.value, sending_us))

    def package_notes(self, columns: Mapping[str, Columns], gpu: GpuSpec) -> dict[str, Any]:
        """Whose tokens are counted."""
        return {"note": f"{GLOBAL_TOKENS}: global_num_tokens of the file, whose num_tokens are one GPU's"}


MEGAMOE: Final = MegaMoe()
OPERATORS: Final = (MEGAMOE,)
