"""Whole attention blocks with latent attention (MLA): projections and attention, measured as one.

vLLM's and TensorRT-LLM's tables have them by name, SGLang's as those of its wide expert parallelism, launched
eagerly: prompts never take less than 0.56 ms on an H100. Norms, rotary embedding and quantising are in the
time and, being small, not in the FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import Column
from fastroof.operators.attention_work import BATCH
from fastroof.operators.foreign_rows import (
    MEASURED,
    RUN,
    ForeignRows,
    PackageFile,
    Raw,
    dtype_names,
    measured_us,
    text_columns,
    unknown_dtypes,
)
from fastroof.operators.latent_shapes import check_model, model_names, shapes_of, unknown_models
from fastroof.operators.latent_work import (
    MODULE_COLUMNS,
    MODULE_KEYS,
    causal_pairs,
    generation_kv_len,
    module_bytes,
    projections,
)
from fastroof.operators.operator import Columns, HoldoutGrid, Key
from fastroof.operators.ragged import RaggedOperator, RaggedPrefill, WorkPart

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
    columns = {
        "dtype": dtype,
        "kv_dtype": dtype_names(raw["kv_cache_dtype"]),
        "attn_dtype": np.where(is_format, "bf16", mla_dtype).astype(object),
        "model": model_names(model),
        "num_heads": raw["num_heads"],
        "batch_size": raw["batch_size"],
        **measured_us(raw),
    }
    out = unknown_dtypes(dtype) | unknown_dtypes(columns["kv_dtype"]) | unknown_models(columns["model"])
    return ForeignRows(columns, out)


def _prefill(raw: Raw) -> ForeignRows:
    rows = _package_rows(raw)
    return ForeignRows(
        rows.columns | {"q_len": raw["isl"], "kv_len": raw["isl"] + raw["step"]}, rows.left_out
    )


def _decode(raw: Raw) -> ForeignRows:
    rows = _package_rows(raw)
    return ForeignRows(rows.columns | {"kv_len": generation_kv_len(raw)}, rows.left_out)


_DEFAULTS: Final = {"dtype": "bf16", "kv_dtype": "bf16", "attn_dtype": "bf16", "model": "deepseek-v3"}


class MlaModulePrefill(RaggedPrefill):
    """An attention block over prompts: keys and values are expanded for every head."""

    name = "mla_module_prefill"
    rank = 92
    summary = "A whole attention block of MLA over prompts."
    about = "q-len counts the new tokens of a sequence, kv-len the prefix and the new tokens."
    keys = MODULE_KEYS
    axes = (
        BATCH,
        Column("q_len", "int", "tokens", "new tokens of each sequence"),
        Column("kv_len", "int", "tokens", "tokens attended to: prefix plus q_len"),
    )
    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 1, **_DEFAULTS}
    holdouts = (HoldoutGrid("mla_module_prefill", "every second", {}, {}),)
    coverages = (HoldoutGrid("mla_module_prefill", "all", {}, {}),)
    package_files = tuple(
        PackageFile("mla", file, (*MODULE_COLUMNS, *MEASURED), _prefill, _OPTIONAL)
        for file in ("mla_context_module_perf", "wideep_context_mla_perf")
    )

    def check_key(self, key: Key) -> None:
        """Refuse models whose widths are not known."""
        check_model(key[3])

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Projections, the expansion of every token attended to, and causal attention."""
        batch, q_len, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        shape = shapes_of(columns["model"])
        widths = shape.nope_dim + shape.rope_dim + shape.v_dim
        attention = 2.0 * columns["num_heads"] * widths * batch * causal_pairs(q_len, kv_len)
        own = projections(columns, batch * q_len, batch * kv_len)
        return [*own, WorkPart(np.asarray(attention), columns["attn_dtype"])]

    def fastest_dtype(self, columns: Columns) -> Array:
        """Some kernels compute attention in the KV cache's dtype."""
        return columns["kv_dtype"]

    def moved_bytes(self, columns: Columns) -> Floats:
        """Weights, tokens in and out, and the cache."""
        batch, q_len, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        return module_bytes(columns, batch * q_len, batch * kv_len)


class MlaModuleDecode(RaggedOperator):
    """An attention block over one new token a sequence: absorbed."""

    name = "mla_module_decode"
    rank = 94
    summary = "A whole MLA block, one new token a sequence."
    keys = MODULE_KEYS
    axes = (BATCH, Column("kv_len", "int", "tokens", "tokens attended to, the new one included"))
    defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS
    holdouts = (HoldoutGrid("mla_module_decode", "every second", {}, {}),)
    coverages = (HoldoutGrid("mla_module_decode", "all", {}, {}),)
    package_files = tuple(
        PackageFile("mla", file, (*MODULE_COLUMNS, *MEASURED), _decode, _OPTIONAL)
        for file in ("mla_generation_module_perf", "wideep_generation_mla_perf")
    )

    def check_key(self, key: Key) -> None:
        """Refuse models whose widths are not known."""
        check_model(key[3])

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Projections, absorbed ones among them, and attention over latent vectors."""
        batch, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        shape = shapes_of(columns["model"])
        widths = 2.0 * shape.kv_lora_rank + shape.rope_dim
        attention = 2.0 * columns["num_heads"] * widths * batch * kv_len
        return [*projections(columns, batch), WorkPart(np.asarray(attention), columns["attn_dtype"])]

    def fastest_dtype(self, columns: Columns) -> Array:
        """Some kernels compute attention in the KV cache's dtype."""
        return columns["kv_dtype"]

    def moved_bytes(self, columns: Columns) -> Floats:
        """Weights, tokens in and out, and the cache."""
        batch, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        return module_bytes(columns, batch, batch * kv_len)


OPERATORS: Final = (MlaModulePrefill(), MlaModuleDecode())
