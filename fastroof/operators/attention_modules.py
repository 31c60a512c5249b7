"""Attention blocks that were measured whole, projections and all: what operators of them have in common.

The package's files of such modules count alike, whatever the attention is: their rows, what names them, and
that some kernels compute in the KV cache's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fastroof.arrays import Array
from fastroof.columns import DTYPE, KV_DTYPE, Column
from fastroof.operators.foreign_rows import (
    ForeignRows,
    Raw,
    dtype_names,
    measured_us,
    size_columns,
    text_columns,
    unknown_dtypes,
)
from fastroof.operators.latent_shapes import check_model
from fastroof.operators.latent_work import NUM_HEADS, generation_kv_len
from fastroof.operators.operator import Columns, Key
from fastroof.operators.ragged import RaggedOperator

__all__ = [
    "MODULE_COLUMNS",
    "MODULE_KEYS",
    "AttentionModule",
    "LatentModule",
    "decodes",
    "module_rows",
    "prompts",
]

MODULE_KEYS: Final = (
    DTYPE,
    KV_DTYPE,
    Column("attn_dtype", "text", "", "dtype that attention computes in"),
    Column("model", "text", "", "model whose widths the module has: deepseek-v3"),
    NUM_HEADS,
)
"""What names a module of a model's attention block."""

MODULE_COLUMNS: Final = (
    *size_columns("num_heads", "batch_size", "isl"),
    *size_columns("step", minimum=0),
    *text_columns("mla_dtype", "kv_cache_dtype"),
)
"""What the package's files of such modules have."""

Convert = Callable[[Raw], ForeignRows]


def module_rows(
    raw: Raw, model: Array, dtype: Array | None = None, attn_dtype: Array | None = None
) -> ForeignRows:
    """Keys, batch and latency of the package's rows of modules, without their lengths."""
    columns = {
        "dtype": dtype_names(raw["gemm_type"]) if dtype is None else dtype,
        "kv_dtype": dtype_names(raw["kv_cache_dtype"]),
        "attn_dtype": dtype_names(raw["mla_dtype"]) if attn_dtype is None else attn_dtype,
        "model": model,
        "num_heads": raw["num_heads"],
        "batch_size": raw["batch_size"],
        **measured_us(raw),
    }
    return ForeignRows(columns, unknown_dtypes(columns["dtype"]) | unknown_dtypes(columns["kv_dtype"]))


def prompts(convert: Convert) -> Convert:
    """Rows of prompts: with new tokens and, counting a prefix, all tokens of a sequence."""

    def converted(raw: Raw) -> ForeignRows:
        rows = convert(raw)
        sizes = {"q_len": raw["isl"], "kv_len": raw["isl"] + raw["step"]}
        return ForeignRows(rows.columns | sizes, rows.left_out)

    return converted


def decodes(convert: Convert) -> Convert:
    """Rows of decodes: with the tokens attended to."""

    def converted(raw: Raw) -> ForeignRows:
        rows = convert(raw)
        return ForeignRows(rows.columns | {"kv_len": generation_kv_len(raw)}, rows.left_out)

    return converted


class AttentionModule(RaggedOperator):
    """An attention block of a model, measured as one."""

    keys = MODULE_KEYS

    def fastest_dtype(self, columns: Columns) -> Array:
        """Some kernels compute attention in the KV cache's dtype."""
        return columns["kv_dtype"]


class LatentModule(AttentionModule):
    """A block of latent attention, by the widths of a model that is known."""

    def check_key(self, key: Key) -> None:
        """Refuse models whose widths are not known."""
        check_model(key[3])
