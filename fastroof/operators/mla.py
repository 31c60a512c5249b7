"""Latent attention (MLA), the attention kernel alone: projections before and after it are not in it.

Prompts expand the latent vectors to keys and values of every head; decodes absorb that into the queries, and
one latent vector a token is key and value of all heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import DTYPE, KV_DTYPE, LATENCY, Column
from fastroof.operators.attention_modules import MODULE_COLUMNS
from fastroof.operators.attention_work import (
    BATCH,
    SEQ_LEN,
    attention_bytes,
    attention_flops,
    decode_attention_bytes,
    decode_attention_flops,
    prefill_flops_conventions,
)
from fastroof.operators.foreign_rows import (
    MEASURED,
    MFU,
    RUN,
    ForeignRows,
    Heads,
    PackageFile,
    Raw,
    TreeFile,
    dtype_names,
    measured_us,
    unknown_dtypes,
)
from fastroof.operators.latent_work import generation_kv_len
from fastroof.operators.operator import Columns, DatasheetClass, HoldoutGrid, element_bytes
from fastroof.operators.ragged import RaggedOperator, RaggedPrefill, WorkPart

__all__ = ["MLA_DECODE", "MLA_PREFILL", "OPERATORS", "MlaDecode", "MlaPrefill"]

_Q_HEADS: Final = Column("num_q_heads", "int", "", "query heads on one GPU")
_ROPE_DIM: Final = Column("rope_dim", "int", "", "rotary head width")
_DEEPSEEK: Final = {"kv_lora_rank": 512, "nope_dim": 128, "rope_dim": 64}
"""Widths of every model that the package's kernels were measured for, DeepSeek-V3's."""


def _sizes(names: tuple[str, ...], heads: Heads, rows: int) -> dict[str, Array]:
    return {name: np.full(rows, size, np.int64) for name, size in zip(names, heads, strict=True)}


def _prefill_from_tree(read: Raw, heads: Heads) -> dict[str, Array]:
    rows = len(read["latency_us"])
    sizes = _sizes(("num_q_heads", "nope_dim", "rope_dim"), heads, rows)
    prompt = {"batch_size": np.ones(rows, np.int64), "q_len": read["seq_len"], "kv_len": read["seq_len"]}
    return {**sizes, **prompt, "dtype": read["dtype"], "kv_dtype": read["dtype"]}


def _decode_from_tree(read: Raw, heads: Heads) -> dict[str, Array]:
    sizes = _sizes(("num_q_heads", "kv_lora_rank", "rope_dim"), heads, len(read["latency_us"]))
    return sizes | {name: read[name] for name in ("kv_dtype", "batch_size", "kv_len")}


def _package_rows(raw: Raw, widths: tuple[str, ...]) -> ForeignRows:
    # num_heads is what one GPU has; the same kernel stands there once a tp_size, which is no key
    rows = len(raw["num_heads"])
    kv_dtype, dtype = dtype_names(raw["kv_cache_dtype"]), dtype_names(raw["mla_dtype"])
    columns = {
        "kv_dtype": kv_dtype,
        "num_q_heads": raw["num_heads"],
        **{name: np.full(rows, _DEEPSEEK[name], np.int64) for name in widths},
        "batch_size": raw["batch_size"],
        **measured_us(raw),
    }
    computes = {f"computes in {d}": dtype == d for d in sorted(set(dtype)) if d != "bf16"}
    return ForeignRows(columns, unknown_dtypes(kv_dtype) | computes)


def _package_prefill(raw: Raw) -> ForeignRows:
    rows = _package_rows(raw, ("nope_dim", "rope_dim"))
    sizes = {"dtype": dtype_names(raw["mla_dtype"]), "q_len": raw["isl"], "kv_len": raw["isl"] + raw["step"]}
    return ForeignRows(rows.columns | sizes, rows.left_out)


def _package_decode(raw: Raw) -> ForeignRows:
    rows = _package_rows(raw, ("kv_lora_rank", "rope_dim"))
    return ForeignRows(rows.columns | {"kv_len": generation_kv_len(raw)}, rows.left_out)


class MlaPrefill(RaggedPrefill):
    """Causal MLA of prompts, before absorption."""

    name = "mla_prefill"
    rank = 88
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"mla_prefill": DatasheetClass(15.0, 0.63)}
    summary = "MLA over prompts: the kernel alone."
    about = "q-len counts the new tokens of a sequence, kv-len the prefix and the new tokens."
    keys = (
        DTYPE,
        KV_DTYPE,
        _Q_HEADS,
        Column("nope_dim", "int", "", "head width without rotary part"),
        _ROPE_DIM,
    )
    axes = (
        BATCH,
        Column("q_len", "int", "tokens", "new tokens of each sequence"),
        Column("kv_len", "int", "tokens", "tokens attended to: prefix plus q_len"),
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        "batch_size": 1, "dtype": "bf16", "kv_dtype": "bf16", "nope_dim": 128, "rope_dim": 64,
    }  # fmt: skip
    holdouts = (HoldoutGrid("mla_prefill", "every second", {}, {}),)
    coverages = (HoldoutGrid("mla_prefill", "all", {}, {}),)
    package_files = (
        PackageFile("mla", "context_mla_perf", (*MODULE_COLUMNS, *MEASURED), _package_prefill, RUN),
    )
    tree_files = (
        TreeFile(
            "mla",
            "prefill",
            (DTYPE, SEQ_LEN, LATENCY),
            (MFU,),
            ("dtype", "seq_len", "latency_us", "mfu"),
            _prefill_from_tree,
            computes_in_any_dtype=True,
        ),
    )

    @staticmethod
    def _head_dim(c: Columns) -> Array:
        """Head width that gives MLA the cost of plain attention: the mean of its key and value widths."""
        return np.asarray(c["nope_dim"] + c["rope_dim"] / 2.0)

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Exact causal FLOPs."""
        sizes = columns["q_len"], columns["kv_len"], columns["batch_size"]
        return [
            WorkPart(
                attention_flops(columns["num_q_heads"], self._head_dim(columns), *sizes), columns["dtype"]
            )
        ]

    def fastest_dtype(self, columns: Columns) -> Array:
        """Some kernels compute in the KV cache's dtype."""
        return columns["kv_dtype"]

    def moved_bytes(self, columns: Columns) -> Floats:
        """Every query head has keys and values of its own."""
        heads = columns["num_q_heads"]
        sizes = columns["q_len"], columns["kv_len"], columns["batch_size"]
        return attention_bytes(heads, heads, self._head_dim(columns), *sizes)

    def flops_conventions(self, columns: Columns) -> dict[str, Floats]:
        """By how published files count a causal triangle."""
        return prefill_flops_conventions(columns, self._head_dim(columns), self.flops(columns))


class MlaDecode(RaggedOperator):
    """Absorbed MLA of one new token a sequence: one latent vector a token is key and value."""

    name = "mla_decode"
    rank = 90
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"mla_decode": DatasheetClass(11.0, 0.96)}
    summary = "MLA of one new token a sequence: the kernel."
    keys = (KV_DTYPE, _Q_HEADS, Column("kv_lora_rank", "int", "", "width of the compressed KV"), _ROPE_DIM)
    axes = (BATCH, Column("kv_len", "int", "tokens", "tokens attended to, the new one included"))
    defaults: ClassVar[Mapping[str, Any]] = {"kv_dtype": "bf16", "kv_lora_rank": 512, "rope_dim": 64}
    holdouts = (HoldoutGrid("mla_decode", "every second", {}, {}),)
    coverages = (HoldoutGrid("mla_decode", "all", {}, {}),)
    package_files = (
        PackageFile("mla", "generation_mla_perf", (*MODULE_COLUMNS, *MEASURED), _package_decode, RUN),
    )
    tree_files = (
        TreeFile(
            "mla",
            "decode",
            (DTYPE, KV_DTYPE, *axes, LATENCY),
            (MFU,),
            ("dtype", "kv_dtype", "batch_size", "kv_len", "latency_us", "mfu"),
            _decode_from_tree,
        ),
    )

    @staticmethod
    def _head_dim(c: Columns) -> Array:
        """As :meth:`MlaPrefill._head_dim`; after absorption keys are kv_lora + rope wide, values kv_lora."""
        return np.asarray(c["kv_lora_rank"] + c["rope_dim"] / 2.0)

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """One query a sequence."""
        width = self._head_dim(columns)
        flops = decode_attention_flops(
            columns["num_q_heads"], width, columns["kv_len"], columns["batch_size"]
        )
        return [WorkPart(flops, "bf16")]

    def fastest_dtype(self, columns: Columns) -> Array:
        """Some kernels compute in the KV cache's dtype."""
        return columns["kv_dtype"]

    def moved_bytes(self, columns: Columns) -> Floats:
        """One latent vector is key and value: so many KV heads of the mean width weigh as much."""
        width = self._head_dim(columns)
        latent_heads = (columns["kv_lora_rank"] + columns["rope_dim"]) / (2.0 * width)
        return decode_attention_bytes(
            columns["num_q_heads"], latent_heads, width, columns["kv_len"], columns["batch_size"],
            element_bytes(columns["kv_dtype"]),
        )  # fmt: skip


MLA_PREFILL: Final = MlaPrefill()
MLA_DECODE: Final = MlaDecode()
OPERATORS: Final = (MLA_PREFILL, MLA_DECODE)
