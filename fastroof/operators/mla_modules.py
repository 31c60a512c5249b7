"""Attention blocks of MLA (projections and attention measured as one), and the batched GEMMs of absorbed MLA.

SGLang's tables name blocks after wide expert parallelism and launch them eagerly: prompts never take less
than 0.56 ms on an H100. Norms, rotary embedding and quantising are part of the time, but not of the FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import DTYPE, ORIGIN_BORROWED, ORIGIN_EXTRAPOLATED, Column
from fastroof.errors import MissingTableError
from fastroof.operators import external_rows as external
from fastroof.operators import mla
from fastroof.operators.attention_work import DECODE_AXES
from fastroof.operators.borrowing import SIZE, nearest
from fastroof.operators.calls import LatentProduct
from fastroof.operators.operator import (
    Columns,
    DatasheetClass,
    Key,
    RowSource,
    SourceTable,
    element_bytes,
    is_measured,
    measured_keys,
)
from fastroof.operators.ragged import RaggedOperator, RaggedPrefill, WorkPart
from fastroof.operators.row_operator import CurveOptions, PerRowOperator, RowCost, RowNodes
from fastroof.pack import SIZE_LIMIT
from fastroof.pack.ragged import RaggedTable
from fastroof.uncertainty.leave_one_out import relative_variance
from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES

_OPTIONAL: Final = (*external.text_columns("model", "gemm_type"), *external.RUN)
_GEMM_FORMATS: Final = ("fp8_block",)


def _package_rows(raw: external.Raw) -> external.ExternalRows:
    rows = len(raw["num_heads"])
    mla_dtype = external.dtype_names(raw["mla_dtype"])
    # older SGLang files have the projections' format in mla_dtype; attention computes in bf16
    is_format = np.isin(mla_dtype, _GEMM_FORMATS)
    dtype = external.dtype_names(raw["gemm_type"]) if "gemm_type" in raw else mla_dtype
    model = raw.get("model", np.full(rows, "deepseek-ai/DeepSeek-V3", object))
    attn_dtype = np.where(is_format, "bf16", mla_dtype).astype(object)
    names = mla.model_names(model)
    return mla.module_rows(raw, names, dtype, attn_dtype).without(mla.unknown_models(names))


_DEFAULTS: Final = {"dtype": "bf16", "kv_dtype": "bf16", "attn_dtype": "bf16", "model": "deepseek-v3"}


class _MlaModule(mla.LatentModule):
    def moved_bytes(self, columns: Columns) -> Floats:
        """Weights, tokens in and out, and the cache."""
        batch, q_len, kv_len = self.sizes(columns)
        return mla.module_bytes(columns, batch * q_len, batch * kv_len)


class MlaModulePrefill(_MlaModule, RaggedPrefill):
    """An MLA block over prompts: keys and values are expanded for every head."""

    name = "mla_module_prefill"
    rank = 92
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"mla_module_prefill": DatasheetClass(38.0, 0.62)}
    summary = "An MLA block over prompts."
    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 1, **_DEFAULTS}
    package_files = tuple(
        external.PackageFile(
            "mla", file, (*mla.MODULE_COLUMNS, *external.MEASURED), mla.prompts(_package_rows), _OPTIONAL
        )
        for file in ("mla_context_module_perf", "wideep_context_mla_perf")
    )

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Projections, expansion of every cached token, and causal attention."""
        batch, q_len, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        shape = mla.shapes_of(columns["model"])
        widths = shape.nope_dim + shape.rope_dim + shape.v_dim
        attention = 2.0 * columns["num_heads"] * widths * batch * mla.causal_pairs(q_len, kv_len)
        own = mla.projections(columns, shape, batch * q_len, batch * kv_len)
        return [*own, WorkPart(np.asarray(attention), columns["attn_dtype"])]


class MlaModuleDecode(_MlaModule):
    """An MLA block over one new token per sequence: absorbed."""

    name = "mla_module_decode"
    rank = 94
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"mla_module_decode": DatasheetClass(34.0, 0.99)}
    summary = "An MLA block, one new token per sequence."
    axes = DECODE_AXES
    defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS
    package_files = tuple(
        external.PackageFile(
            "mla", file, (*mla.MODULE_COLUMNS, *external.MEASURED), mla.decodes(_package_rows), _OPTIONAL
        )
        for file in ("mla_generation_module_perf", "wideep_generation_mla_perf")
    )

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Projections (the absorbed ones too) and attention over latent vectors."""
        batch, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        shape = mla.shapes_of(columns["model"])
        widths = 2.0 * shape.kv_lora_rank + shape.rope_dim
        attention = 2.0 * columns["num_heads"] * widths * batch * kv_len
        return [
            *mla.projections(columns, shape, batch),
            WorkPart(np.asarray(attention), columns["attn_dtype"]),
        ]


_PARTS: Final = {"mla_gen_pre": "pre", "mla_gen_post": "post"}
_KV_LORA_RANK: Final = 512
_HEAD_DIM: Final = 128
"""Width of one head without its rotary part, and of its values: both 128 in DeepSeek-V3, as measured."""

_FP8_WEIGHTS: Final = ("fp8", "fp8_block")
"""Weight formats that some engines absorb as fp8 with a scale per tensor."""

BORROWED: Final = 0.16
"""Relative standard error of borrowing from another number of heads: leaving out each number of the bf16 and
fp8
tables of three engines (H100, H200, B200), 80 % of |errors| are within 9 to 20 % (mean 6 to 12)."""


def _package_bmm(raw: external.Raw) -> external.ExternalRows:
    # a decode step runs one of each part
    part = np.array([_PARTS.get(word, word) for word in raw["op_name"]], object)
    rows = external.package_rows(raw, "num_heads", "num_tokens", dtype="bmm_dtype", part=part)
    return rows.without(external.others("op_name", raw["op_name"], _PARTS))


class MlaBmm(RaggedOperator, PerRowOperator):
    """One GEMM per head: tokens x 128 x 512 before attention, tokens x 512 x 128 after it."""

    name = "mla_bmm"
    rank = 96
    summary = "A batched GEMM before or after absorbed MLA."
    about = "Part pre turns queries into latent ones, part post latent outputs into values; decode runs both."
    keys = (DTYPE, Column("part", "text", "", "before or after attention: pre, post"), mla.NUM_HEADS)
    axes = (Column("num_tokens", "int", "tokens", "tokens of the call"),)
    defaults: ClassVar[Mapping[str, Any]] = {"dtype": "bf16"}
    # over vLLM 0.24.0's H100 products of more than 50 us
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"mla_bmm": DatasheetClass(3.8, 0.78)}
    package_files = (
        external.PackageFile(
            "mla_bmm",
            "mla_bmm_perf",
            (
                *external.size_columns("num_tokens", "num_heads"),
                *external.text_columns("bmm_dtype", "op_name"),
                *external.MEASURED,
            ),
            _package_bmm,
        ),
    )

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """``2 tokens heads 128 512``."""
        tokens = np.asarray(columns["num_tokens"], np.float64)
        return [WorkPart(2.0 * tokens * columns["num_heads"] * _HEAD_DIM * _KV_LORA_RANK, columns["dtype"])]

    def moved_bytes(self, columns: Columns) -> Floats:
        """Weights once, rows in and out."""
        tokens, heads = np.asarray(columns["num_tokens"], np.float64), columns["num_heads"]
        weights = heads * (_HEAD_DIM * _KV_LORA_RANK) * element_bytes(columns["dtype"])
        return np.asarray(weights + ACTIVATION_BYTES * tokens * heads * (_HEAD_DIM + _KV_LORA_RANK))

    # -- in plans ----------------------------------------------------------------------------------

    def row_cost(self, call: LatentProduct) -> RowCost:
        """FLOPs and bytes of one product per head."""
        weights = call.num_heads * call.head_dim * call.kv_lora_rank
        a_row = ACTIVATION_BYTES * call.num_heads * (call.head_dim + call.kv_lora_rank)
        dtype = "fp8" if call.dtype in _FP8_WEIGHTS else "bf16"
        return RowCost(2.0 * weights, float(a_row), weights * DTYPE_BYTES[dtype], dtype)

    def row_key(self, call: LatentProduct) -> Key:
        """Format of the absorbed weights, and sizes."""
        return (call.dtype, call.part, call.num_heads, call.head_dim, call.kv_lora_rank)

    def measured_key(self, call: LatentProduct, tables: RowSource) -> Key:
        """Measured kernel that a call is looked up as: its own, or its donor."""
        if (call.head_dim, call.kv_lora_rank) != (_HEAD_DIM, _KV_LORA_RANK):
            raise MissingTableError(
                f"no {self.name} row has head_dim {call.head_dim} and kv_lora_rank {call.kv_lora_rank}; "
                f"measured: {_HEAD_DIM} and {_KV_LORA_RANK}"
            )
        keys = tables.candidates(self.name)[0].groups()
        computes_in_fp8 = call.dtype in _FP8_WEIGHTS and any(key[0] == "fp8" for key in keys)
        target = ("fp8" if computes_in_fp8 else "bf16", call.part, call.num_heads)
        if is_measured(tables, self.name, target):
            return target
        heads = [key[2] for key in measured_keys(tables, self.name) if key[:2] == target[:2]]
        return next(((*target[:2], donor.kernel) for donor in nearest(call.num_heads, heads, SIZE)), target)

    def serving(self, call: LatentProduct, tables: RowSource) -> SourceTable:
        """Table of its kernel or donor."""
        return tables.serving(self.name, self.measured_key(call, tables))

    def row_nodes(
        self, call: LatentProduct, tables: RowSource, options: CurveOptions, max_rows: int
    ) -> RowNodes:
        """Latency at the measured numbers of tokens, since B is linear in them."""
        key = self.measured_key(call, tables)
        packed: RaggedTable = tables.packed(self, key)
        target = (*key[:2], call.num_heads)
        if options.method != "roofline" and target == key:
            tokens = np.arange(1.0, max_rows + 1.0)
            return self.every_row_nodes(tables, options.method, key, [tokens], packed.launch_us)
        measured = packed.points()[0]
        rows = np.r_[0.0, measured, SIZE_LIMIT]
        value, flag = np.empty(len(rows)), np.empty(len(rows), np.uint8)
        packed.latency((rows,), value, flag)
        flag[[0, -1]] = ORIGIN_EXTRAPOLATED
        if target != key:
            own, theirs = (packed.launch_us + self.work_us(k, tables.gpu)(rows) for k in (target, key))
            value, flag = value * (own / theirs), np.full_like(flag, ORIGIN_BORROWED)
        return RowNodes(rows, value, flag, packed.launch_us)

    def table_points(
        self, call: LatentProduct, tables: RowSource, rows: Floats
    ) -> tuple[Key, list[Floats]] | None:
        """Its kernel and tokens; None if it is borrowed."""
        key = self.measured_key(call, tables)
        return (key, [rows]) if key[2] == call.num_heads else None

    def row_variance(self, call: LatentProduct, tables: RowSource, rows: Floats) -> Floats:
        """Variance of its kernel's curve, and of borrowing."""
        key = self.measured_key(call, tables)
        # rows + 1 as in RaggedOperator, whose sizes may be 0
        own = relative_variance(self.local_errors(tables, key), [rows + 1.0])
        return own + (BORROWED**2 if key[2] != call.num_heads else 0.0)


OPERATORS: Final = (
    MlaModulePrefill(),
    MlaModuleDecode(),
    MlaBmm(),
)
