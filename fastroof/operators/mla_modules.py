"""Whole attention blocks with latent attention (MLA): projections and attention, measured as one.

vLLM's and TensorRT-LLM's tables have them by name, SGLang's as those of its wide expert parallelism, launched
eagerly: prompts never take less than 0.56 ms on an H100. Norms, rotary embedding and quantising are in the
time and, being small, not in the FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import Column
from fastroof.operators.attention_modules import MODULE_COLUMNS, LatentModule, decodes, module_rows, prompts
from fastroof.operators.attention_work import BATCH
from fastroof.operators.foreign_rows import (
    MEASURED,
    RUN,
    ForeignRows,
    PackageFile,
    Raw,
    dtype_names,
    text_columns,
)
from fastroof.operators.latent_shapes import model_names, shapes_of, unknown_models
from fastroof.operators.latent_work import (
    causal_pairs,
    module_bytes,
    projections,
)
from fastroof.operators.operator import Columns, DatasheetClass, HoldoutGrid
from fastroof.operators.ragged import RaggedPrefill, WorkPart

__all__ = ["OPERATORS", "MlaModuleDecode", "MlaModulePrefill"]

_OPTIONAL: Final = (*text_columns("model", "gemm_type"), *RUN)
_GEMM_FORMATS: Final = ("fp8_block",)


def _package_rows(raw: Raw) -> ForeignRows:
    rows = len(raw["num_heads"])
    mla_dtype = dtype_names(raw["mla_dtype"])
    # older files of SGLang name the projections' format there; attention computes in bf16
    is_format = np.isin(mla_dtype, _GEMM_FORMATS)
    dtype = dtype_names(raw["gemm_type"]) if "gemm_type" in raw else mla_dtype
    model = raw.get("model", np.full(rows, "deepseek-ai/DeepSeek-V3", object))
    attn_dtype = np.where(is_format, "bf16", mla_dtype).astype(object)
    names = model_names(model)
    made = module_rows(raw, names, dtype, attn_dtype)
    return ForeignRows(made.columns, made.left_out | unknown_models(names))


_DEFAULTS: Final = {"dtype": "bf16", "kv_dtype": "bf16", "attn_dtype": "bf16", "model": "deepseek-v3"}


class MlaModulePrefill(LatentModule, RaggedPrefill):
    """An attention block over prompts: keys and values are expanded for every head."""

    name = "mla_module_prefill"
    rank = 92
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"mla_module_prefill": DatasheetClass(38.0, 0.62)}
    summary = "A whole attention block of MLA over prompts."
    about = "q-len counts the new tokens of a sequence, kv-len the prefix and the new tokens."
    axes = (
        BATCH,
        Column("q_len", "int", "tokens", "new tokens of each sequence"),
        Column("kv_len", "int", "tokens", "tokens attended to: prefix plus q_len"),
    )
    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 1, **_DEFAULTS}
    holdouts = (HoldoutGrid("mla_module_prefill", "every second", {}, {}),)
    coverages = (HoldoutGrid("mla_module_prefill", "all", {}, {}),)
    package_files = tuple(
        PackageFile("mla", file, (*MODULE_COLUMNS, *MEASURED), prompts(_package_rows), _OPTIONAL)
        for file in ("mla_context_module_perf", "wideep_context_mla_perf")
    )

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Projections, the expansion of every token attended to, and causal attention."""
        batch, q_len, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        shape = shapes_of(columns["model"])
        widths = shape.nope_dim + shape.rope_dim + shape.v_dim
        attention = 2.0 * columns["num_heads"] * widths * batch * causal_pairs(q_len, kv_len)
        own = projections(columns, batch * q_len, batch * kv_len)
        return [*own, WorkPart(np.asarray(attention), columns["attn_dtype"])]

    def moved_bytes(self, columns: Columns) -> Floats:
        """Weights, tokens in and out, and the cache."""
        batch, q_len, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        return module_bytes(columns, batch * q_len, batch * kv_len)


class MlaModuleDecode(LatentModule):
    """An attention block over one new token a sequence: absorbed."""

    name = "mla_module_decode"
    rank = 94
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"mla_module_decode": DatasheetClass(34.0, 0.99)}
    summary = "A whole MLA block, one new token a sequence."
    axes = (BATCH, Column("kv_len", "int", "tokens", "tokens attended to, the new one included"))
    defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS
    holdouts = (HoldoutGrid("mla_module_decode", "every second", {}, {}),)
    coverages = (HoldoutGrid("mla_module_decode", "all", {}, {}),)
    package_files = tuple(
        PackageFile("mla", file, (*MODULE_COLUMNS, *MEASURED), decodes(_package_rows), _OPTIONAL)
        for file in ("mla_generation_module_perf", "wideep_generation_mla_perf")
    )

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Projections, absorbed ones among them, and attention over latent vectors."""
        batch, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        shape = shapes_of(columns["model"])
        widths = 2.0 * shape.kv_lora_rank + shape.rope_dim
        attention = 2.0 * columns["num_heads"] * widths * batch * kv_len
        return [*projections(columns, batch), WorkPart(np.asarray(attention), columns["attn_dtype"])]

    def moved_bytes(self, columns: Columns) -> Floats:
        """Weights, tokens in and out, and the cache."""
        batch, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        return module_bytes(columns, batch, batch * kv_len)


OPERATORS: Final = (MlaModulePrefill(), MlaModuleDecode())
